"""Tree all-reduce: a binomial tree adds everything up at rank 0, and the same tree tells it (Chan et al. 2007,
doi 10.1002/cpe.1206).

    4 ranks     add                  tell
    0 | <1:0+ <2:0+          >2:0 >1:0
    1 | >0:0                           <0:0
    2 |       <3:0+ >0:0     <0:0 >3:0
    3 |       >2:0                     <2:0

Time 2 ceil(lg p)(alpha + n beta) + ceil(lg p) n gamma: few messages, but whole vectors; scratch n.
"""

from __future__ import annotations

from paragrad.notation import Choice, Flag, choice, option
from paragrad.schedules.actions import Program, Recv, Send


@choice
class Tree(Choice):
    """Binomial tree: reduce to rank 0, then broadcast (Chan et al. 2007)."""
    reproducible: bool = option(Flag(), default=False, later=(True,))

    def parts(self, size: int) -> int:
        return 1

    def program(self, rank: int, size: int) -> Program:
        below = rank & -rank or 1 << (size - 1).bit_length()      # my subtree: ranks rank .. rank + below - 1
        children = [rank + 2**k for k in range(below.bit_length() - 1) if rank + 2**k < size]
        yield from (Recv(child, 0, add=True) for child in children)
        if rank > 0:
            yield Send(rank - below, 0)
            yield Recv(rank - below, 0)
        yield from (Send(child, 0) for child in reversed(children))
