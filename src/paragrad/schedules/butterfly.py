"""Butterfly all-reduce, also known as recursive doubling.

In round k, ranks at distance 2^k exchange everything they have and add it (Thakur, Rabenseifner,
Gropp 2005, doi 10.1177/1094342005051521).

    4 ranks    distance 1       distance 2
    0 |     >1:0 <1:0+       >2:0 <2:0+
    1 |     >0:0 <0:0+       >3:0 <3:0+
    2 |     >3:0 <3:0+       >0:0 <0:0+
    3 |     >2:0 <2:0+       >1:0 <1:0+

Among 5 ranks, rank 4 first folds its vector into rank 0, and receives the result at the end.

Time lg p (alpha + n beta + n gamma), plus two messages if p is no power of two. This is the
smallest number of rounds. Scratch n. Both partners add the same two numbers, and the sum of two
floats commutes, so the ranks stay bit-equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send, Slot
from paragrad.schedules.compose import ComposedAllReduce


class Butterfly(ComposedAllReduce):
    """Butterfly, that is recursive doubling (Thakur, Rabenseifner, Gropp 2005).

    Attributes:
        reproducible: Whether the result has the same bits for every order of arrival.
    """

    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return ButterflyReduce(), ButterflyUnfold()


class FoldedVector:
    """A vector in one piece that every inner rank owns between the halves.

    The inner ranks are those below the largest power of two. The other ranks fold into them and
    unfold again.
    """

    def parts(self, size: int) -> int:
        return 1

    def owns(self, rank: int, size: int) -> range:
        return range(1 if rank < count_inner_ranks(size) else 0)


@dataclass(frozen=True)
class ButterflyReduce(FoldedVector):
    """Fold in the extra ranks, then exchange everything with the partner of every round."""

    def program(self, rank: int, size: int) -> Program:
        yield from fold_extra_ranks(rank, size, 0)
        if rank < count_inner_ranks(size):
            for round_ in range(count_inner_rounds(size)):
                partner = rank ^ (1 << round_)
                yield Send(partner, 0)
                yield Recv(partner, 0, add=True)


@dataclass(frozen=True)
class ButterflyUnfold(FoldedVector):
    """Send the result to the ranks that folded in."""

    def program(self, rank: int, size: int) -> Program:
        yield from unfold_extra_ranks(rank, size, 0)


def count_inner_ranks(size: int) -> int:
    """Return the largest power of two up to `size`; the ranks from there on fold in and out."""
    return 1 << count_inner_rounds(size)


def count_inner_rounds(size: int) -> int:
    """Return the number of rounds among the inner ranks."""
    return size.bit_length() - 1


def fold_extra_ranks(rank: int, size: int, whole_slot: Slot) -> Program:
    """Send the whole vector of each rank beyond the power of two to a partner (as MPICH does).

    Args:
        rank: The rank.
        size: The number of ranks.
        whole_slot: The slot of the whole vector.
    """
    if size > count_inner_ranks(size):
        if rank >= count_inner_ranks(size):
            yield Send(rank - count_inner_ranks(size), whole_slot)
        elif rank + count_inner_ranks(size) < size:
            yield Recv(rank + count_inner_ranks(size), whole_slot, add=True)


def unfold_extra_ranks(rank: int, size: int, whole_slot: Slot) -> Program:
    """Send the result back to the ranks that folded in; the arguments are those of the folding."""
    if size > count_inner_ranks(size):
        if rank >= count_inner_ranks(size):
            yield Recv(rank - count_inner_ranks(size), whole_slot)
        elif rank + count_inner_ranks(size) < size:
            yield Send(rank + count_inner_ranks(size), whole_slot)
