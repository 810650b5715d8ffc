"""Ring all-reduce: one trip around the ring adds, a second one distributes the sums.

Source: Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002.

The vector is divided into `size` chunks. In hop h every rank sends one chunk to the right and
receives one from the left:

    3 ranks    reduce_scatter          all_gather
    0 | >1:0 <2:2+    >1:2 <2:1+    >1:1 <2:0     >1:0 <2:2
    1 | >2:1 <0:0+    >2:0 <0:2+    >2:2 <0:1     >2:1 <0:0
    2 | >0:2 <1:1+    >0:1 <1:0+    >0:0 <1:2     >0:2 <1:1

Time 2(p-1)(alpha + beta n/p) + (p-1)/p n gamma. This is optimal in bytes: 2(p-1)/p n per rank.
Scratch n/p.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, Integer, Word, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import ComposedAllReduce, SegmentedAllReduce


class Ring(ComposedAllReduce):
    """Ring: reduce-scatter, then all-gather, one chunk a hop (Patarasuk & Yuan 2009).

    Attributes:
        blocking: Whether sends are rendezvous sends: even ranks send first, odd ranks receive
            first.

        reproducible: Whether the result has the same bits for every order of arrival.
    """

    blocking: bool = option(Flag(), default=False)
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return RingReduceScatter(1, self.blocking), RingAllGather(1, self.blocking)


class RingAsync(SegmentedAllReduce):
    """Ring in segments: adding one overlaps the transfer of the next (as in Open MPI).

    Attributes:
        segments: The number of segments of a chunk; auto: 2.

        reproducible: Whether the result has the same bits for every order of arrival.
    """

    segments: int | str = option(Integer(), Word("auto"), default="auto")  # per chunk
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return RingReduceScatter(self.count_segments()), RingAllGather(self.count_segments())


@dataclass(frozen=True)
class RingHalf:
    """One half of a ring: one chunk a hop, in segments.

    After size - 1 hops of adding, each rank owns the chunk to the right of its own number.

    Attributes:
        segments: The number of segments of a chunk.
        blocking: Whether sends are rendezvous sends.
    """

    segments: int = 1
    blocking: bool = False

    def parts(self, size: int) -> int:
        return size * self.segments

    def owns(self, rank: int, size: int) -> range:
        chunk = (rank + 1) % size
        return range(chunk * self.segments, (chunk + 1) * self.segments)

    def pass_chunk(self, rank: int, size: int, chunk: int, add: bool) -> Program:
        """Send a chunk to the right and receive the chunk before it from the left.

        Args:
            rank: The rank.
            size: The number of ranks.
            chunk: The number of the chunk to send.
            add: Whether the received chunk is added; otherwise it overwrites.
        """
        right = (rank + 1) % size
        left = (rank - 1) % size
        received_chunk = (chunk - 1) % size
        sends = [
            Send(right, chunk * self.segments + segment, wait=self.blocking)
            for segment in range(self.segments)
        ]
        receives = [
            Recv(left, received_chunk * self.segments + segment, add=add)
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
    """Pass on the sums so far."""

    def program(self, rank: int, size: int) -> Program:
        for hop in range(size - 1):
            yield from self.pass_chunk(rank, size, (rank - hop) % size, add=True)


@dataclass(frozen=True)
class RingAllGather(RingHalf):
    """Pass on the complete sums."""

    def program(self, rank: int, size: int) -> Program:
        for hop in range(size - 1):
            yield from self.pass_chunk(rank, size, (rank + 1 - hop) % size, add=False)
