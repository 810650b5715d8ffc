"""Ring all-reduce (Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002): once round to add,
once round to tell.

The vector is cut into `size` chunks. In hop h every rank hands one chunk to the right and takes
one from the left:

    3 ranks    reduce_scatter          all_gather
    0 | >1:0 <2:2+    >1:2 <2:1+    >1:1 <2:0     >1:0 <2:2
    1 | >2:1 <0:0+    >2:0 <0:2+    >2:2 <0:1     >2:1 <0:0
    2 | >0:2 <1:1+    >0:1 <1:0+    >0:0 <1:2     >0:2 <1:1

Time 2(p-1)(alpha + beta n/p) + (p-1)/p n gamma: optimal in bytes, 2(p-1)/p n per rank; scratch
n/p.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, Integer, Word, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import ComposedAllReduce, SegmentedAllReduce


class Ring(ComposedAllReduce):
    """Ring: reduce-scatter, then all-gather, one chunk a hop (Patarasuk & Yuan 2009)."""

    # rendezvous sends: even ranks send first, odd ranks receive
    blocking: bool = option(Flag(), default=False)
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return RingReduceScatter(1, self.blocking), RingAllGather(1, self.blocking)


class RingAsync(SegmentedAllReduce):
    """Ring in segments: the addition of one overlaps the transfer of the next (Open MPI's
    segmented ring).
    """

    segments: int | str = option(Integer(), Word("auto"), default="auto")  # per chunk
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return RingReduceScatter(self.count_segments()), RingAllGather(self.count_segments())


@dataclass(frozen=True)
class RingHalf:
    """One chunk a hop, in segments; after size - 1 hops of adding, each rank owns the chunk
    that comes to its right.
    """

    segments: int = 1
    blocking: bool = False

    def parts(self, size: int) -> int:
        return size * self.segments

    def owns(self, rank: int, size: int) -> range:
        chunk = (rank + 1) % size
        return range(chunk * self.segments, (chunk + 1) * self.segments)

    def pass_chunk(self, rank: int, size: int, chunk: int, add: bool) -> Program:
        """Give chunk `mine` to the right and take the one before it from the left."""
        right = (rank + 1) % size
        left = (rank - 1) % size
        theirs = (chunk - 1) % size
        sends = [
            Send(right, chunk * self.segments + segment, wait=self.blocking)
            for segment in range(self.segments)
        ]
        receives = [
            Recv(left, theirs * self.segments + segment, add=add)
            for segment in range(self.segments)
        ]
        if self.blocking and rank % 2 == 1:
            yield from receives
            yield from sends
        else:
            yield from sends
            yield from receives


@dataclass(frozen=True)
class RingReduceScatter(RingHalf):
    """Hand on what was added up so far."""

    def program(self, rank: int, size: int) -> Program:
        for hop in range(size - 1):
            yield from self.pass_chunk(rank, size, (rank - hop) % size, add=True)


@dataclass(frozen=True)
class RingAllGather(RingHalf):
    """Hand on what is complete."""

    def program(self, rank: int, size: int) -> Program:
        for hop in range(size - 1):
            yield from self.pass_chunk(rank, size, (rank + 1 - hop) % size, add=False)
