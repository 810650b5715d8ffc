"""Every scheduler of torch gives the learning rates of a plain loop, by epoch and by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality_table import VECTORS, make_job
from torch import nn
from torch.optim import lr_scheduler as schedulers

import paragrad as pg
from paragrad.record.record import Record

pytestmark = pytest.mark.processes

EPOCHS, STEPS = 3, 4  # steps of an epoch
RESUMED = 6  # in the middle of the second epoch
# classes of torch that are not tested here: the base class, and one that needs a metric
REFUSED = {"LRScheduler", "ReduceLROnPlateau"}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], schedulers.LRScheduler]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 2]),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, total_iters=2),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, total_iters=3),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, EPOCHS, 2.0),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, EPOCHS),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(
        optimizer, 2
    ),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(
        optimizer, 0.2, total_steps=EPOCHS * STEPS + 1
    ),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=2), schedulers.MultiStepLR(optimizer, [1])],
        [1],
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, total_iters=2), schedulers.StepLR(optimizer, 2)]
    ),
}


def make_momentum_sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def compute_plain_rates(name: str, unit: str) -> list[float]:
    optimizer = make_momentum_sgd([nn.Parameter(torch.zeros(1))])
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if unit == "step":
                scheduler.step()
        if unit == "epoch":
            scheduler.step()
    return rates


def read_rates(run: pg.Run) -> list[float]:
    return [line["lr"] for line in Record(run.folder).select_lines("step")]


def test_every_scheduler_of_torch_is_tried() -> None:
    found = {
        name
        for name, each in vars(schedulers).items()
        if isinstance(each, type) and issubclass(each, schedulers.LRScheduler) and name[0] != "_"
    }
    assert found == {*SCHEDULERS, *REFUSED}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "strategy",
    [
        "serial",
        *(pytest.param(each, marks=pytest.mark.table) for each in ("data(2)", "server(2)")),
        pytest.param("pipeline(2, micro=2)", marks=pytest.mark.table),
    ],
)
@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_equal_those_of_a_plain_loop(
    name: str, unit: str, strategy: str, tmp_path: Path
) -> None:
    """Earlier, a cosine over some number of epochs fell to 0 within that number of steps."""
    made = make_job(
        "vectors", lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)), VECTORS
    )
    made = made.replace(
        batch=-(-len(VECTORS) // STEPS),
        epochs=EPOCHS,
        optimizer=make_momentum_sgd,
        scheduler=SCHEDULERS[name],
        scheduler_every=unit,
    )
    expected = compute_plain_rates(name, unit)
    whole = pg.train(made, strategy, runs=tmp_path)
    assert read_rates(whole) == expected
    half = pg.train(made, strategy, runs=tmp_path, limit=RESUMED, save=RESUMED)
    rest = pg.train(made, strategy, runs=tmp_path, resume=half.folder)
    assert read_rates(half) + read_rates(rest) == expected
    assert half.losses + rest.losses == whole.losses
