"""A row's time per step: one statistic for table and charts, how sure it is, and what of it
another row's may be divided by.

The steps of a run come in bursts of disturbance, so neighbours do not tell independently of
each other. Medians of blocks of neighbours nearly do, and the order of such medians bounds the
median of them all, whatever their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, inf
from statistics import median

from paragrad.record.cpu_load import CpuLoad, find_cpu_load
from paragrad.record.record import Record

BLOCK_COUNT = 10  # of a run: consecutive steps
# how often the median is in its interval, at least, where there are enough blocks
CONFIDENCE = 0.95
# blocks: of fewer, not even the least and the largest have the median between them so often
MIN_BLOCKS = 6
MAX_INTERVAL_RATIO = 2.0  # an interval wider than by this factor says nothing about a ratio


class ValueInterval:
    """A number that lies between two others."""

    low: float
    high: float

    @property
    def finite_bounds(self) -> list[float] | None:
        """The two, where they say something."""
        return [self.low, self.high] if self.low > 0.0 and self.high < inf else None


@dataclass(frozen=True)
class StepTime(ValueInterval):
    """Seconds per step of the slowest rank: the median over runs of their medians, and from
    where to where it may be, which is anywhere (0 to infinity) after too few steps.
    """

    seconds: float
    low: float
    high: float
    load: CpuLoad | None = None  # of the run in which it was most doubtful

    @property
    def crowded(self) -> bool:
        """Others were in the way of the ranks."""
        return self.load is not None and self.load.crowded

    def divide_by(self, other: StepTime) -> SpeedUp:
        """How many times this is the other's."""
        return SpeedUp(
            self.seconds / other.seconds,
            self.low / other.high,
            self.high / other.low if other.low else inf,
            self.crowded or other.crowded,
        )


@dataclass(frozen=True)
class SpeedUp(ValueInterval):
    """How many times faster something is than something else, and from where to where that may
    be.
    """

    value: float
    low: float
    high: float
    crowded: bool = False  # as one of the times that it is of

    @property
    def is_narrow(self) -> bool:
        """The interval says something: it is not broad."""
        return self.high <= MAX_INTERVAL_RATIO * self.low

    @property
    def is_significant(self) -> bool:
        """It is not noise that made it: the interval is narrow, and on one side of 1."""
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
        return (
            f"{self.low:.2f}-{self.high:.2f}x"
            if self.is_narrow
            else f"{_format_two_digits(self.low)}-{_format_two_digits(self.high)}x"
        )


NO_SPEED_UP = SpeedUp(1.0, 1.0, 1.0)  # of a row over itself


def measure_step_time(records: Sequence[Record], first: int = 1) -> StepTime | None:
    """Of some runs of the same, their steps from `first` on; None where none made a step."""
    runs = [seconds for record in records if (seconds := record.list_step_seconds(first))]
    if not runs:
        return None
    middle = median(map(median, runs))
    blocks = sorted(median(block) for seconds in runs for block in _divide_into_blocks(seconds))
    loads = [
        load
        for record in records
        if (lines := record.cpu)
        and (load := find_cpu_load(lines, record.header["machine"]["cores"]))
    ]
    load = max(loads, key=lambda load: (load.crowded, load.others), default=None)
    if len(blocks) < MIN_BLOCKS:
        return StepTime(middle, 0.0, inf, load)
    place = _find_bound_position(len(blocks))
    return StepTime(middle, min(middle, blocks[place]), max(middle, blocks[-1 - place]), load)


def _divide_into_blocks(seconds: Sequence[float]) -> list[Sequence[float]]:
    count = min(BLOCK_COUNT, len(seconds))
    edges = [len(seconds) * place // count for place in range(count + 1)]
    return [seconds[first:stop] for first, stop in pairwise(edges)]


def _find_bound_position(count: int) -> int:
    """The largest place from either end of so many sorted numbers between which the median lies
    as often as SURE says (every number is below it or above it as a coin falls).
    """
    place = 0
    outside = 2.0 * 0.5**count
    while 1.0 - outside - 2.0 * comb(count, place + 1) * 0.5**count >= CONFIDENCE:
        place += 1
        outside += 2.0 * comb(count, place) * 0.5**count
    return place


def _format_two_digits(value: float) -> str:
    """Two that count."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
