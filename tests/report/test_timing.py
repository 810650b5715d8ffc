"""How certain a time per step is.

Disturbed steps widen the interval of the time. A ratio of such times is not reported.
"""

from __future__ import annotations

import math
import random
from itertools import chain

import pytest

from paragrad.record.record import Record
from paragrad.report import timing

pytestmark = pytest.mark.pure


class StepRecord(Record):
    """A record of one rank with these steps."""

    def __init__(self, seconds: list[float]) -> None:
        self.header = {}
        # the first step warms up and is not counted
        self.ranks = [[{"kind": "step", "seconds": each} for each in [9.0, *seconds]]]


def measure_runs(*runs: list[float]) -> timing.StepTime:
    found = timing.measure_step_time([StepRecord(seconds) for seconds in runs])
    assert found is not None
    return found


def draw_step_times(middle: float, seed: int, count: int = 200) -> list[float]:
    """Return step times of a quiet machine: they differ by some per cent, and a few are late."""
    draw = random.Random(seed)
    return [
        middle * draw.uniform(0.97, 1.03) * (10 if draw.random() < 0.05 else 1)
        for _ in range(count)
    ]


@pytest.mark.parametrize(("count", "place"), [(6, 0), (8, 0), (9, 1), (10, 1), (20, 5), (30, 9)])
def test_rank_of_the_median_follows_the_sign_test(count: int, place: int) -> None:
    """The positions are those in the tables of the sign test at 5 %."""
    assert timing._find_bound_position(count) == place


def test_quiet_machine_reports_a_ratio_despite_late_steps() -> None:
    ratio = measure_runs(draw_step_times(1.0, 0)).divide_by(measure_runs(draw_step_times(0.5, 1)))
    assert ratio.is_significant
    assert ratio.value == pytest.approx(2.0, rel=0.02)
    assert 0.95 * ratio.high < ratio.low < ratio.value < ratio.high
    assert str(ratio) == f"{ratio.value:.2f}x"


def test_close_times_are_compared_by_their_ratio_interval() -> None:
    ratio = measure_runs(draw_step_times(1.0, 0)).divide_by(measure_runs(draw_step_times(1.0, 1)))
    assert not ratio.is_significant
    assert ratio.low < 1.0 < ratio.high


def test_bursts_and_a_disturbed_seed_widen_the_interval() -> None:
    """First, another program runs half of the time; then it disturbs all steps of one seed."""
    bursts = list(chain.from_iterable([20.0 if block % 2 else 1.0] * 20 for block in range(9)))
    assert not measure_runs(bursts).divide_by(measure_runs(draw_step_times(0.5, 0))).is_significant
    assert measure_runs(draw_step_times(1.0, 1), draw_step_times(80.0, 2)).high > 70


@pytest.mark.parametrize("steps", range(1, 8))
def test_too_few_steps_report_no_ratio(steps: int) -> None:
    """Earlier, one step of each run was enough to report a speed-up as certain."""
    quick = measure_runs([0.25] * steps)
    slow = measure_runs([0.5] * steps)
    assert quick.seconds == 0.25
    assert (
        slow.divide_by(quick).is_significant
        == (quick.finite_bounds is not None)
        == (steps >= timing.MIN_BLOCKS)
    )
    assert str(slow.divide_by(quick)) == ("2.00x" if steps >= timing.MIN_BLOCKS else "-")
    assert str(timing.NO_SPEED_UP) == "1.00x"


def test_no_steps_give_no_time() -> None:
    assert timing.measure_step_time([]) is None


@pytest.mark.parametrize(
    ("value", "low", "high", "told"),
    [
        (0.004, 0.003, 0.005, "0.004x"),
        (1.5, 1.4, 1.6, "1.50x"),
        (47.0, 20.0, 60.0, "unknown"),
        (3.0, 0.34, 40.0, "unknown"),
        (1.0, 1.0, 1.0, "1.00x"),
        (1.1, 0.951, 1.24, "0.95-1.24x"),
        (1.1, 0.0, math.inf, "-"),
        (47.0, 40.0, 60.0, "47.00x"),
    ],
)
def test_ratio_is_worded_by_its_interval(value: float, low: float, high: float, told: str) -> None:
    assert str(timing.SpeedUp(value, low, high)) == told
