"""Direct all-reduce: each rank receives its part from all others, adds, and sends the sum to all.

hivemind averages in this way.

    3 ranks    reduce_scatter             all_gather
    0 | >1:1 <2:0+   >2:2 <1:0+     >1:0 <2:2   >2:0 <1:1
    1 | >2:2 <0:1+   >0:0 <2:1+     >2:1 <0:0   >0:1 <2:2
    2 | >0:0 <1:2+   >1:1 <0:2+     >0:2 <1:1   >1:2 <0:0

In turn k every rank sends k places to the right and receives from k places to the left, so no two
ranks send to the same rank at once. Time 2(p-1)(alpha + n/p beta) + (p-1)/p n gamma. This is the
time of the ring, but no rank waits for a chain of others. It needs p(p-1) connections; scratch n/p.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import ComposedAllReduce


class Direct(ComposedAllReduce):
    """All-to-all reduce-scatter, then all-gather (as hivemind averages).

    Attributes:
        reproducible: Whether the result has the same bits for every order of arrival.
    """

    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return DirectReduceScatter(), DirectAllGather()


class PartPerRank:
    """Rank r owns part r."""

    def parts(self, size: int) -> int:
        return size

    def owns(self, rank: int, size: int) -> range:
        return range(rank, rank + 1)


@dataclass(frozen=True)
class DirectReduceScatter(PartPerRank):
    """Send each rank its part, beginning with the right neighbour, so that first targets differ."""

    def program(self, rank: int, size: int) -> Program:
        for distance in range(1, size):
            yield Send((rank + distance) % size, (rank + distance) % size)
            yield Recv((rank - distance) % size, rank, add=True)


@dataclass(frozen=True)
class DirectAllGather(PartPerRank):
    """Send the own part to all other ranks."""

    def program(self, rank: int, size: int) -> Program:
        for distance in range(1, size):
            yield Send((rank + distance) % size, rank)
            yield Recv((rank - distance) % size, (rank - distance) % size)
