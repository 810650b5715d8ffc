"""Butterfly all-reduce, that is recursive doubling (Thakur, Rabenseifner, Gropp 2005, doi
10.1177/1094342005051521): in round k, ranks at distance 2^k exchange all they have and add.

    4 ranks    distance 1       distance 2          5 ranks: rank 4 folds into rank 0 first, and
    is told at the end 0 |     >1:0 <1:0+       >2:0 <2:0+ 1 |     >0:0 <0:0+       >3:0 <3:0+ 2
    |     >3:0 <3:0+       >0:0 <0:0+ 3 |     >2:0 <2:0+       >1:0 <1:0+

Time lg p (alpha + n beta + n gamma) (two messages more where p is no power of two): the fewest
rounds; scratch n. Both partners add the same two numbers, and a sum of two floats commutes: the
ranks stay bit-equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.notation.choices import Flag, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send, Slot
from paragrad.schedules.compose import ComposedAllReduce


class Butterfly(ComposedAllReduce):
    """Butterfly, that is recursive doubling (Thakur, Rabenseifner, Gropp 2005)."""

    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return ButterflyReduce(), ButterflyUnfold()


class FoldedVector:
    """A vector in one piece that all ranks below the largest power of two own; the others fold
    into them and out again.
    """

    def parts(self, size: int) -> int:
        return 1

    def owns(self, rank: int, size: int) -> range:
        return range(1 if rank < count_inner_ranks(size) else 0)


@dataclass(frozen=True)
class ButterflyReduce(FoldedVector):
    """Fold in, then exchange everything with the partner of every round."""

    def program(self, rank: int, size: int) -> Program:
        yield from fold_extra_ranks(rank, size, 0)
        if rank < count_inner_ranks(size):
            for round_ in range(count_inner_rounds(size)):
                partner = rank ^ (1 << round_)
                yield Send(partner, 0)
                yield Recv(partner, 0, add=True)


@dataclass(frozen=True)
class ButterflyUnfold(FoldedVector):
    """Those that folded in are told."""

    def program(self, rank: int, size: int) -> Program:
        yield from unfold_extra_ranks(rank, size, 0)


def count_inner_ranks(size: int) -> int:
    """The largest power of two up to size: ranks above it fold in and out."""
    return 1 << count_inner_rounds(size)


def count_inner_rounds(size: int) -> int:
    """Rounds among the inner ranks."""
    return size.bit_length() - 1


def fold_extra_ranks(rank: int, size: int, whole_slot: Slot) -> Program:
    """Ranks that are too many for a power of two give all they have to a partner (as MPICH
    does).
    """
    if size > count_inner_ranks(size):
        if rank >= count_inner_ranks(size):
            yield Send(rank - count_inner_ranks(size), whole_slot)
        elif rank + count_inner_ranks(size) < size:
            yield Recv(rank + count_inner_ranks(size), whole_slot, add=True)


def unfold_extra_ranks(rank: int, size: int, whole_slot: Slot) -> Program:
    """And get the result from it."""
    if size > count_inner_ranks(size):
        if rank >= count_inner_ranks(size):
            yield Recv(rank - count_inner_ranks(size), whole_slot)
        elif rank + count_inner_ranks(size) < size:
            yield Send(rank + count_inner_ranks(size), whole_slot)
