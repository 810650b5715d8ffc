"""Butterfly all-reduce, that is recursive doubling (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521):
in round k, ranks at distance 2^k exchange all they have and add.

    4 ranks    distance 1       distance 2          5 ranks: rank 4 folds into rank 0 first, and is told at the end
    0 |     >1:0 <1:0+       >2:0 <2:0+
    1 |     >0:0 <0:0+       >3:0 <3:0+
    2 |     >3:0 <3:0+       >0:0 <0:0+
    3 |     >2:0 <2:0+       >1:0 <1:0+

Time lg p (alpha + n beta + n gamma) (two messages more where p is no power of two): the fewest rounds; scratch n.
Both partners add the same two numbers, and a sum of two floats commutes: the ranks stay bit-equal.
"""

from __future__ import annotations

from paragrad.notation import Choice, Flag, choice, option
from paragrad.schedules.actions import Program, Recv, Send


@choice
class Butterfly(Choice):
    """Butterfly, that is recursive doubling (Thakur, Rabenseifner, Gropp 2005)."""
    reproducible: bool = option(Flag(), default=False, later=(True,))

    def parts(self, size: int) -> int:
        return 1

    def program(self, rank: int, size: int) -> Program:
        inner = 1 << (size.bit_length() - 1)        # the largest power of two: those above it fold in and out
        if rank >= inner:
            yield Send(rank - inner, 0)
            yield Recv(rank - inner, 0)
            return
        folded = rank + inner
        if folded < size:
            yield Recv(folded, 0, add=True)
        for round_ in range(inner.bit_length() - 1):
            partner = rank ^ (1 << round_)
            yield Send(partner, 0)
            yield Recv(partner, 0, add=True)
        if folded < size:
            yield Send(folded, 0)
