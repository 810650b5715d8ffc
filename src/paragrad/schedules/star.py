"""Star all-reduce: everybody sends to rank 0, which adds and tells everybody. The plainest one, and the measure of the others:
rank 0's link carries everything, one vector after another.

    4 ranks     add                     tell
    0 | <1:0+ <2:0+ <3:0+    >1:0 >2:0 >3:0
    1 | >0:0                 <0:0
    2 | >0:0                      <0:0
    3 | >0:0                           <0:0

Time 2(p-1)(alpha + n beta) + (p-1) n gamma where rank 0 has one link; scratch n.
"""

from __future__ import annotations

from paragrad.notation import Choice, Flag, choice, option
from paragrad.schedules.actions import Program, Recv, Send


@choice
class Star(Choice):
    """Star: everybody sends to rank 0, which adds and tells all."""
    reproducible: bool = option(Flag(), default=False, later=(True,))

    def parts(self, size: int) -> int:
        return 1

    def program(self, rank: int, size: int) -> Program:
        if rank > 0:
            yield Send(0, 0)
            yield Recv(0, 0)
            return
        others = range(1, size)
        yield from (Recv(other, 0, add=True) for other in others)
        yield from (Send(other, 0) for other in others)
