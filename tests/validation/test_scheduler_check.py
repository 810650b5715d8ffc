"""A scheduler that may count epochs or steps is refused until the job says which."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from equality_table import JOBS
from torch.optim import Optimizer, lr_scheduler

import paragrad as pg
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

UNCLEAR: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=10),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[30, 60]),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}
CLEAR: dict[str, Callable[[Optimizer], Any]] = {
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=10),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=100),
    "cycles": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=3),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_scheduler_that_may_count_epochs_is_refused(name: str) -> None:
    """Earlier, CosineAnnealingLR(optimizer, epochs) was stepped for every batch.

    The learning rate was 0 after one epoch, and then rose again, without any message.
    """
    job = JOBS["mlp"].replace(scheduler=UNCLEAR[name])
    with pytest.raises(
        pg.Refused, match=rf"{name} can count epochs or steps; give scheduler_every"
    ):
        validate_run(job, "serial")
    for unit in ("epoch", "step"):
        validate_run(job.replace(scheduler_every=unit), "serial")


@pytest.mark.parametrize("name", CLEAR)
def test_scheduler_that_counts_steps_is_accepted(name: str) -> None:
    validate_run(JOBS["mlp"].replace(scheduler=CLEAR[name]), "serial")


def test_unknown_unit_is_refused_with_the_nearest_one() -> None:
    job = JOBS["mlp"].replace(scheduler=UNCLEAR["StepLR"], scheduler_every="epochs")
    with pytest.raises(pg.Refused, match=r"epochs.*epoch"):
        validate_run(job, "serial")
