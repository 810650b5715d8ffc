"""Star all-reduce: all ranks send to rank 0, which adds and sends the sum to all.

It is the plainest algorithm, and the yardstick of the others. The link of rank 0 carries
everything, one vector after another.

    4 ranks     reduce              broadcast
    0 | <1:0+ <2:0+ <3:0+    >1:0 >2:0 >3:0
    1 | >0:0                 <0:0
    2 | >0:0                      <0:0
    3 | >0:0                           <0:0

Time 2(p-1)(alpha + n beta) + n gamma, where an addition hides behind the next message. Everything
goes through one link. Scratch n.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import ComposedAllReduce, RootOwnership


class Star(ComposedAllReduce):
    """Star: all ranks send to rank 0, which adds and sends the sum to all.

    Attributes:
        reproducible: Whether the result has the same bits for every order of arrival.
    """

    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return StarReduce(), StarBroadcast()


@dataclass(frozen=True)
class StarReduce(RootOwnership):
    """All ranks send their vectors to rank 0, which adds them in rank order."""

    def program(self, rank: int, size: int) -> Program:
        if rank > 0:
            yield Send(0, 0)
        else:
            yield from (Recv(other, 0, add=True) for other in range(1, size))


@dataclass(frozen=True)
class StarBroadcast(RootOwnership):
    """Rank 0 sends its vector to all other ranks."""

    def program(self, rank: int, size: int) -> Program:
        if rank > 0:
            yield Recv(0, 0)
        else:
            yield from (Send(other, 0) for other in range(1, size))
