"""Direct all-reduce: everybody sends every other rank that rank's part, adds up its own, and
sends it to all (hivemind averages so).

    3 ranks    reduce_scatter             all_gather
    0 | >1:1 <2:0+   >2:2 <1:0+     >1:0 <2:2   >2:0 <1:1
    1 | >2:2 <0:1+   >0:0 <2:1+     >2:1 <0:0   >0:1 <2:2
    2 | >0:0 <1:2+   >1:1 <0:2+     >0:2 <1:1   >1:2 <0:0

In turn k everybody sends k to the right and takes from k to the left, so no two ranks send to
one at a time. Time 2(p-1)(alpha + n/p beta) + (p-1)/p n gamma: that of the ring, but nobody
waits for a chain of others; for p(p-1) connections; scratch n/p.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import ComposedAllReduce


class Direct(ComposedAllReduce):
    """All-to-all reduce-scatter, then all-gather (as hivemind averages)."""

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
    """To each its part, the right neighbour's first, so that no two ranks begin with the same
    one.
    """

    def program(self, rank: int, size: int) -> Program:
        for distance in range(1, size):
            yield Send((rank + distance) % size, (rank + distance) % size)
            yield Recv((rank - distance) % size, rank, add=True)


@dataclass(frozen=True)
class DirectAllGather(PartPerRank):
    """The own part to everybody."""

    def program(self, rank: int, size: int) -> Program:
        for distance in range(1, size):
            yield Send((rank + distance) % size, rank)
            yield Recv((rank - distance) % size, (rank - distance) % size)
