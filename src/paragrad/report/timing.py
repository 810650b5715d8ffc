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

from paragrad.record.cpu_load import Load, load_of
from paragrad.record.record import Record

BLOCKS = 10  # of a run: consecutive steps
# how often the median is in its interval, at least, where there are enough blocks
SURE = 0.95
# blocks: of fewer, not even the least and the largest have the median between them so often
FEWEST = 6
BROAD = 2.0  # an interval wider than by this factor says nothing about a ratio


class Between:
    """A number that lies between two others."""

    low: float
    high: float

    @property
    def between(self) -> list[float] | None:
        """The two, where they say something."""
        return [self.low, self.high] if self.low > 0.0 and self.high < inf else None


@dataclass(frozen=True)
class StepTime(Between):
    """Seconds per step of the slowest rank: the median over runs of their medians, and from
    where to where it may be, which is anywhere (0 to infinity) after too few steps.
    """

    seconds: float
    low: float
    high: float
    load: Load | None = None  # of the run in which it was most doubtful

    @property
    def crowded(self) -> bool:
        """Others were in the way of the ranks."""
        return self.load is not None and self.load.crowded

    def over(self, other: StepTime) -> SpeedUp:
        """How many times this is the other's."""
        return SpeedUp(
            self.seconds / other.seconds,
            self.low / other.high,
            self.high / other.low if other.low else inf,
            self.crowded or other.crowded,
        )


@dataclass(frozen=True)
class SpeedUp(Between):
    """How many times faster something is than something else, and from where to where that may
    be.
    """

    value: float
    low: float
    high: float
    crowded: bool = False  # as one of the times that it is of

    @property
    def narrow(self) -> bool:
        """The interval says something: it is not broad."""
        return self.high <= BROAD * self.low

    @property
    def clear(self) -> bool:
        """It is not noise that made it: the interval is narrow, and on one side of 1."""
        return self.narrow and not self.low < 1.0 < self.high

    def __str__(self) -> str:
        if self.between is None:
            return "-"
        if self.clear:
            return f"{self.value:.2f}x" if self.value >= 0.095 else f"{_digits(self.value)}x"
        return (
            f"{self.low:.2f}-{self.high:.2f}x"
            if self.narrow
            else f"{_digits(self.low)}-{_digits(self.high)}x"
        )


SAME = SpeedUp(1.0, 1.0, 1.0)  # of a row over itself


def times_of(records: Sequence[Record], first: int = 1) -> StepTime | None:
    """Of some runs of the same, their steps from `first` on; None where none made a step."""
    runs = [seconds for record in records if (seconds := record.seconds_from(first))]
    if not runs:
        return None
    middle = median(map(median, runs))
    blocks = sorted(median(block) for seconds in runs for block in _blocks(seconds))
    loads = [
        load
        for record in records
        if (lines := record.cpu) and (load := load_of(lines, record.header["machine"]["cores"]))
    ]
    load = max(loads, key=lambda load: (load.crowded, load.others), default=None)
    if len(blocks) < FEWEST:
        return StepTime(middle, 0.0, inf, load)
    place = _place(len(blocks))
    return StepTime(middle, min(middle, blocks[place]), max(middle, blocks[-1 - place]), load)


def _blocks(seconds: Sequence[float]) -> list[Sequence[float]]:
    count = min(BLOCKS, len(seconds))
    edges = [len(seconds) * place // count for place in range(count + 1)]
    return [seconds[first:stop] for first, stop in pairwise(edges)]


def _place(count: int) -> int:
    """The largest place from either end of so many sorted numbers between which the median lies
    as often as SURE says (every number is below it or above it as a coin falls).
    """
    place = 0
    outside = 2.0 * 0.5**count
    while 1.0 - outside - 2.0 * comb(count, place + 1) * 0.5**count >= SURE:
        place += 1
        outside += 2.0 * comb(count, place) * 0.5**count
    return place


def _digits(value: float) -> str:
    """Two that count."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
