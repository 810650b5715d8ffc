"""A scheduler that counts epochs is told of at the door."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equality_table import JOBS
from torch.optim import Optimizer, lr_scheduler

import paragrad as pg
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes


class Counting:
    """Counts what is asked of it, as a function that closes over a counter."""

    asked = 0

    def __call__(self, step: int) -> float:
        Counting.asked += 1
        return 1.0 / Counting.asked


def half_of_it(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)


SOUND: dict[str, Callable[[Optimizer], Any]] = {
    "steps": partial(lr_scheduler.ExponentialLR, gamma=0.999),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=10),
    "a warm-up": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, step / 100)),
    "zero at the half": partial(lr_scheduler.CosineAnnealingLR, T_max=200),
    "the end": partial(lr_scheduler.CosineAnnealingLR, T_max=400),
    "one that raises": half_of_it,
    "a state of its own": partial(lr_scheduler.LambdaLR, lr_lambda=Counting()),
    "none at all": partial(lr_scheduler.ConstantLR, factor=0.0, total_iters=10**6),
}


def stepped_by(scheduler: Callable[[Optimizer], Any]) -> pg.Job:
    """200 epochs of two steps."""
    job = JOBS["mlp"]
    samples = len(job.train() if callable(job.train) else job.train)
    return job.replace(epochs=200, batch=(samples + 1) // 2, scheduler=scheduler)


@pytest.mark.parametrize(
    ("scheduler", "step"),
    [
        (partial(lr_scheduler.StepLR, step_size=10), 70),
        (partial(lr_scheduler.ExponentialLR, gamma=0.9), 132),
        (partial(lr_scheduler.PolynomialLR, total_iters=50), 50),
    ],
)
def test_vanishing_learning_rate_is_reported(
    scheduler: Callable[[Optimizer], Any], step: int
) -> None:
    """StepLR(30) of a script that steps it once an epoch: nothing was learned from step 200 on,
    and nothing was said.
    """
    with pytest.warns(
        UserWarning,
        match=f"from step {step} of 400 on the learning rate is below a millionth of the first: "
        r"\w+LR is stepped once for every global batch; .* give it 2 times as many",
    ):
        validate_run(stepped_by(scheduler), "serial", Settings())


@pytest.mark.parametrize("name", SOUND)
def test_sound_schedulers_are_not_reported(name: str) -> None:
    """A look that stepped any scheduler moved the counter in a user's function, and the
    training was another; a cosine that is 0 where the look ended was called gone.
    """
    Counting.asked = 0
    drawn = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate_run(stepped_by(SOUND[name]), "serial", Settings())
    # as torch asks when it is made
    assert Counting.asked == (name == "a state of its own")
    # also the first time in a process: models are built
    assert torch.equal(torch.random.get_rng_state(), drawn)
