"""The time per step of a row, its confidence interval, and speed-ups with their intervals.

Table and charts use the same statistic. Disturbances come in bursts, so neighbouring steps are not
independent. Medians of blocks of neighbouring steps are nearly independent. The sorted medians of
blocks bound the median of all steps, whatever their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, inf
from statistics import median

from paragrad.record.cpu_load import CpuLoad, find_cpu_load
from paragrad.record.record import Record

BLOCK_COUNT = 10  # blocks of consecutive steps of a run
# the least probability that the median is in its interval, if there are enough blocks
CONFIDENCE = 0.95
# with fewer blocks, even the interval from the smallest to the largest is less certain
MIN_BLOCKS = 6
MAX_INTERVAL_RATIO = 2.0  # a ratio says nothing if its interval is wider than this factor


class ValueInterval:
    """A number with an interval that contains it.

    Attributes:
        low: The lower end.
        high: The upper end.
    """

    low: float
    high: float

    @property
    def finite_bounds(self) -> list[float] | None:
        """[low, high], or None if they say nothing."""
        return [self.low, self.high] if self.low > 0.0 and self.high < inf else None


@dataclass(frozen=True)
class StepTime(ValueInterval):
    """Seconds per step of the slowest rank: the median over runs of the medians of runs.

    After too few steps, the interval is 0 to infinity.

    Attributes:
        seconds: The median.

        low: The lower end of its interval.

        high: The upper end of its interval.

        load: The load of the machine in the run where it was highest, or None.
    """

    seconds: float
    low: float
    high: float
    load: CpuLoad | None = None

    @property
    def crowded(self) -> bool:
        """Whether other processes kept the cores busy."""
        return self.load is not None and self.load.crowded

    def divide_by(self, other: StepTime) -> SpeedUp:
        """Divide this time by another.

        Args:
            other: The other time.

        Returns:
            The ratio with its interval.
        """
        return SpeedUp(
            self.seconds / other.seconds,
            self.low / other.high,
            self.high / other.low if other.low else inf,
            self.crowded or other.crowded,
        )


@dataclass(frozen=True)
class SpeedUp(ValueInterval):
    """How many times faster something is than something else.

    Attributes:
        value: The ratio.

        low: The lower end of its interval.

        high: The upper end of its interval.

        crowded: Whether other processes kept the cores busy during one of the two measurements.
    """

    value: float
    low: float
    high: float
    crowded: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether the interval is narrow enough to say something."""
        return self.high <= MAX_INTERVAL_RATIO * self.low

    @property
    def is_significant(self) -> bool:
        """Whether it is not mere noise: the interval is narrow and lies on one side of 1."""
        return self.is_narrow and not self.low < 1.0 < self.high

    def __str__(self) -> str:
        if self.finite_bounds is None:
            return "-"
        if self.is_significant:
            return (
                f"{self.value:.2f}x"
                if self.value >= 0.095
                else f"{_format_two_digits(self.value)}x"
            )
        return f"{self.low:.2f}-{self.high:.2f}x" if self.is_narrow else "unknown"


NO_SPEED_UP = SpeedUp(1.0, 1.0, 1.0)  # of a row compared with itself


def measure_step_time(records: Sequence[Record], first: int = 1) -> StepTime | None:
    """Measure the time per step of several runs of the same training.

    Args:
        records: The records of the runs.
        first: The first step to include.

    Returns:
        The time, or None if no run made a step.
    """
    seconds_by_run = [seconds for record in records if (seconds := record.list_step_seconds(first))]
    if not seconds_by_run:
        return None
    middle = median(map(median, seconds_by_run))
    blocks = sorted(
        median(block) for seconds in seconds_by_run for block in _divide_into_blocks(seconds)
    )
    loads = [
        load
        for record in records
        if (lines := record.cpu)
        and (load := find_cpu_load(lines, record.header["machine"]["cores"]))
    ]
    load = max(loads, key=lambda load: (load.crowded, load.others), default=None)
    if len(blocks) < MIN_BLOCKS:
        return StepTime(middle, 0.0, inf, load)
    position = _find_bound_position(len(blocks))
    return StepTime(middle, min(middle, blocks[position]), max(middle, blocks[-1 - position]), load)


def _divide_into_blocks(seconds: Sequence[float]) -> list[Sequence[float]]:
    count = min(BLOCK_COUNT, len(seconds))
    edges = [len(seconds) * place // count for place in range(count + 1)]
    return [seconds[first:stop] for first, stop in pairwise(edges)]


def _find_bound_position(count: int) -> int:
    """The position, from either end of sorted numbers, of the bounds of their median.

    It is the largest position at which the interval contains the median with probability
    CONFIDENCE. Each number is above or below the median with probability one half.
    """
    position = 0
    outside = 2.0 * 0.5**count
    while 1.0 - outside - 2.0 * comb(count, position + 1) * 0.5**count >= CONFIDENCE:
        position += 1
        outside += 2.0 * comb(count, position) * 0.5**count
    return position


def _format_two_digits(value: float) -> str:
    """A number with two significant digits."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
