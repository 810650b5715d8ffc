"""AllReduce: the choice of an all-reduce, ours or a user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from paragrad.notation.choices import Family
from paragrad.schedules.actions import Program


class AllReduce(Family, abstract=True):
    """An all-reduce as a value: who sends what to whom, in which order (the words:
    `actions.py`).

    A class of your own needs `program` alone; it is then known by its name, printed, proved,
    drawn, priced by the clock and played like ours. Options are fields made by `option(...)`,
    as in ours.
    """

    __slots__ = ()
    # an option of ours: the same bits for every schedule and order of arrival
    reproducible = False

    if TYPE_CHECKING:  # of each class; the proof says where there is none

        def program(self, rank: int, size: int) -> Program:
            """What one rank of `size` does, in order, with its vector of `parts(size)` equal
            parts.
            """

    def parts(self, size: int) -> int:
        """Into how many equal parts the vector is cut: one for each rank, unless said
        otherwise.
        """
        return size

    def resolve(self, size: int, ranks_per_host: int) -> Self:
        """The same with every `auto` replaced, for `size` ranks, `group` of them on a host.
        Raises Refused where they do not fit.
        """
        return self
