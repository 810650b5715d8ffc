"""A row's time per step: one statistic for table and charts, how sure it is, and what of it another row's may be divided by.

The steps of a run come in bursts of disturbance, so neighbours do not tell independently of each other. Medians of blocks of
neighbours nearly do, and the order of such medians bounds the median of them all, whatever their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from statistics import median

from paragrad.record.cpu import others
from paragrad.record.record import Record

BLOCKS = 10             # of a run: consecutive steps
SURE = 0.95             # how often the median is in its interval, at least, where there are enough blocks
BUSY = 0.1              # of all cores, kept busy by others, beyond which times are doubted
BROAD = 2.0             # an interval wider than by this factor says nothing about a ratio


@dataclass(frozen=True)
class Times:
    """Seconds per step of the slowest rank: the median over runs of their medians, and from where to where it may be."""
    seconds: float
    low: float
    high: float
    others: float | None = None         # cores that others kept busy meanwhile, in the run where they were most
    interrupted: float = 0.0            # how often a second they took a core from a rank

    def busy(self, cores: int) -> bool:
        """Others kept a good part of the machine's cores busy."""
        return (self.others or 0.0) > BUSY * cores

    def over(self, other: Times) -> Ratio:
        """How many times these are the other's."""
        return Ratio(self.seconds / other.seconds, self.low / other.high, self.high / other.low,
                     max(self.others or 0.0, other.others or 0.0))


@dataclass(frozen=True)
class Ratio:
    """How many times faster something is than something else, and from where to where that may be."""
    value: float
    low: float
    high: float
    others: float = 0.0                 # as in the times that it is of

    def busy(self, cores: int) -> bool:
        """As the times."""
        return self.others > BUSY * cores

    @property
    def told(self) -> bool:
        """It is not noise that made it: the interval is not broad, and does not hold 1 unless it is 1."""
        return self.low == self.high or (self.high <= BROAD * self.low and not self.low <= 1.0 <= self.high)

    def __str__(self) -> str:
        if not self.told:
            return f"{_digits(self.low)}-{_digits(self.high)}x"
        return f"{self.value:.2f}x" if self.value >= 0.095 else f"{_digits(self.value)}x"


def times_of(records: Sequence[Record]) -> Times | None:
    """Of some runs of the same; None where none made a step."""
    runs = [seconds for record in records if (seconds := record.step_seconds)]
    if not runs:
        return None
    middle = median(map(median, runs))
    blocks = sorted(median(block) for seconds in runs for block in _blocks(seconds))
    place = _place(len(blocks))
    clocks = [(lines, record.header["machine"]["cores"]) for record in records if (lines := record.cpu)]
    return Times(middle, min(middle, blocks[place]), max(middle, blocks[-1 - place]),
                 max((found for lines, cores in clocks if (found := others(lines, cores)) is not None), default=None),
                 max((line["interrupted"] / line["seconds"] for lines, _ in clocks for line in lines), default=0.0))


def _blocks(seconds: Sequence[float]) -> list[Sequence[float]]:
    count = min(BLOCKS, len(seconds))
    edges = [len(seconds) * place // count for place in range(count + 1)]
    return [seconds[first:stop] for first, stop in pairwise(edges)]


def _place(count: int) -> int:
    """The largest place from either end of so many sorted numbers between which the median lies as often as SURE says (every
    number is below it or above it as a coin falls); 0 where they are too few."""
    place, outside = 0, 2.0 * 0.5 ** count
    while 1.0 - outside - 2.0 * comb(count, place + 1) * 0.5 ** count >= SURE:
        place += 1
        outside += 2.0 * comb(count, place) * 0.5 ** count
    return place


def _digits(value: float) -> str:
    """Two that count."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
