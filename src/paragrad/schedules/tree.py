"""Tree all-reduce: a binomial tree adds everything up at rank 0 and then distributes the sum.

Source: Chan et al. 2007, doi 10.1002/cpe.1206.

    4 ranks     reduce               broadcast
    0 | <1:0+ <2:0+          >2:0 >1:0
    1 | >0:0                           <0:0
    2 |       <3:0+ >0:0     <0:0 >3:0
    3 |       >2:0                     <2:0

Time 2 ceil(lg p)(alpha + n beta) + ceil(lg p) n gamma: few messages, but whole vectors. Scratch n.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import ComposedAllReduce, RootOwnership


class Tree(ComposedAllReduce):
    """Binomial tree: reduce to rank 0, then broadcast (Chan et al. 2007).

    Attributes:
        reproducible: Whether the result has the same bits for every order of arrival.
    """

    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return TreeReduce(), TreeBroadcast()


@dataclass(frozen=True)
class TreeReduce(RootOwnership):
    """Receive from the children, the nearest first, and send to the parent."""

    def program(self, rank: int, size: int) -> Program:
        parent, children = find_binomial_relatives(rank, size)
        yield from (Recv(child, 0, add=True) for child in children)
        if rank > 0:
            yield Send(parent, 0)


@dataclass(frozen=True)
class TreeBroadcast(RootOwnership):
    """Receive from the parent and send to the children, the one with the largest subtree first."""

    def program(self, rank: int, size: int) -> Program:
        parent, children = find_binomial_relatives(rank, size)
        if rank > 0:
            yield Recv(parent, 0)
        yield from (Send(child, 0) for child in reversed(children))


def find_binomial_relatives(rank: int, size: int) -> tuple[int, list[int]]:
    """Return (parent, children) in the binomial tree; rank 0 is the root."""
    # The subtree of this rank: rank .. rank + below - 1.
    below = rank & -rank or 1 << (size - 1).bit_length()
    return rank - below, [rank + 2**k for k in range(below.bit_length() - 1) if rank + 2**k < size]
