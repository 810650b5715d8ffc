"""Replicas in one process (benchmarks/replicas.py).

They compute the right mean, they train as serial does, and every planted bug is detected.
"""

from __future__ import annotations

import pytest
import torch
from replicas import (
    BUGS,
    REST,
    REUSED,
    STARTS,
    TWICE,
    Training,
    average,
    measure_rounding,
    measure_serial_difference,
    run_checks,
    train_replicas,
)

import paragrad as pg
from paragrad.datasets.mnist import MnistImages
from paragrad.schedules.compose import ComposedAllReduce

pytestmark = pytest.mark.pure

ALGORITHMS = (
    pg.Star(),
    pg.Tree(),
    pg.DoubleTree(2),
    pg.Butterfly(),
    pg.Halving(2),
    pg.Direct(),
    pg.Ring(),
    pg.RingAsync(2),
)


@pytest.fixture
def digits() -> MnistImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (240, 28, 28), generator=generator, dtype=torch.uint8)
    return MnistImages(pixels, torch.randint(10, (240,), generator=generator))


@pytest.mark.parametrize("schedule", ALGORITHMS, ids=str)
def test_every_row_becomes_the_mean_of_all(schedule: ComposedAllReduce) -> None:
    for count in (2, 3, 5, 8):
        rows = torch.randint(
            -1000, 1000, (count, 43), generator=torch.Generator().manual_seed(count)
        ).double()
        expected = rows.mean(0).expand(count, -1).clone()
        average(rows, schedule)
        assert torch.equal(rows, expected)


@pytest.mark.story
def test_replicas_train_as_serial_does(digits: MnistImages) -> None:
    found = run_checks(Training(pg.job("mnist-mlp", width=16), 4, pg.Ring(), batch=5), digits)
    assert found["proof"] is None
    assert found["sum"] == 0
    assert found["serial"] < 1e-10


@pytest.mark.sample(3)
@pytest.mark.story
@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_detected(digits: MnistImages, bug: str) -> None:
    found = run_checks(
        Training(pg.job("mnist-mlp", width=16), 4, pg.Ring(), batch=5, bug=bug), digits
    )
    assert found["serial"] > 1e-6
    assert (found["sum"] > 0) == (bug != STARTS)
    assert (found["proof"] is not None) == (bug == TWICE)


@pytest.mark.story
@pytest.mark.parametrize(
    ("bug", "equal"), [(None, True), (REST, False), (REUSED, False), (TWICE, True), (STARTS, False)]
)
def test_unequal_replicas_are_detected(digits: MnistImages, bug: str | None, equal: bool) -> None:
    how = Training(pg.job("mnist-mlp", width=17), 4, pg.Ring(), batch=5, bug=bug)
    told: list[int] = []
    found = train_replicas(how, digits, digits, 2, lambda epoch, accuracy: told.append(epoch))
    assert told == [0, 1]
    assert len(found["accuracies"]) == 2
    assert found["equal"] is equal


@pytest.mark.story
def test_weight_averaging_equals_gradient_averaging(digits: MnistImages) -> None:
    """The average of weights and the average of gradients both give serial's training.

    The reason is that SGD with momentum is linear in the gradients.
    """
    assert (
        measure_serial_difference(
            Training(pg.job("mnist-mlp", width=16), 4, pg.Tree(), "weights", "batch", 5), digits
        )
        < 1e-10
    )


def test_rounding_differs_by_a_few_units_in_the_last_place(digits: MnistImages) -> None:
    found = measure_rounding(
        pg.job("mnist-mlp", width=16), digits, 4, {"ring": pg.Ring(), "tree": pg.Tree()}, 10
    )
    assert list(found) == ["serial", "serial, batch in reverse order", "ring", "tree"]
    assert all(0 < row["median"] < 100 and 0 < row["relative"] < 1e-5 for row in found.values())
