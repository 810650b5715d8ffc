"""Ring all-reduce (Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002): once round to add, once round to tell.

The vector is cut into `size` chunks. In hop h every rank hands one chunk to the right and takes one from the left:

    3 ranks      add             add             tell            tell
    0 | >1:0 <2:2+    >1:2 <2:1+    >1:1 <2:0     >1:0 <2:2
    1 | >2:1 <0:0+    >2:0 <0:2+    >2:2 <0:1     >2:1 <0:0
    2 | >0:2 <1:1+    >0:1 <1:0+    >0:0 <1:2     >0:2 <1:1

Time 2(p-1)(alpha + beta n/p) + (p-1)/p n gamma: optimal in bytes, 2(p-1)/p n per rank; scratch n/p.
"""

from __future__ import annotations

from paragrad.notation import Choice, Flag, Integer, Word, choice, option
from paragrad.schedules.actions import Program, Recv, Send


@choice
class Ring(Choice):
    """Ring: reduce-scatter, then all-gather, one chunk a hop (Patarasuk & Yuan 2009)."""
    blocking: bool = option(Flag(), default=False)          # rendezvous sends: even ranks send first, odd ranks receive
    reproducible: bool = option(Flag(), default=False, later=(True,))

    def parts(self, size: int) -> int:
        return size

    def program(self, rank: int, size: int) -> Program:
        right, left = (rank + 1) % size, (rank - 1) % size
        for hop in range(2 * (size - 1)):
            send = Send(right, (rank - hop) % size, wait=self.blocking)
            recv = Recv(left, (rank - hop - 1) % size, add=hop < size - 1)
            receives_first = self.blocking and rank % 2 == 1
            yield from (recv, send) if receives_first else (send, recv)


@choice
class RingAsync(Choice):
    """Ring in segments: the addition of one overlaps the transfer of the next (Open MPI's segmented ring)."""
    segments: int | str = option(Integer(), Word("auto"), default="auto")      # per chunk
    reproducible: bool = option(Flag(), default=False, later=(True,))

    def count(self) -> int:
        """Segments per chunk; auto is two, the least that lets one be added while one travels."""
        return 2 if isinstance(self.segments, str) else self.segments

    def parts(self, size: int) -> int:
        return size * self.count()

    def program(self, rank: int, size: int) -> Program:
        segments = range(self.count())
        right, left = (rank + 1) % size, (rank - 1) % size
        for hop in range(2 * (size - 1)):
            mine, theirs = (rank - hop) % size, (rank - hop - 1) % size
            yield from (Send(right, mine * len(segments) + segment) for segment in segments)
            yield from (Recv(left, theirs * len(segments) + segment, add=hop < size - 1) for segment in segments)
