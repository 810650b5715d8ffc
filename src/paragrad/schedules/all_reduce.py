"""AllReduce: the choice of an all-reduce algorithm, built in or defined by a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from paragrad.notation.choices import Family
from paragrad.schedules.actions import Program


class AllReduce(Family, abstract=True):
    """An all-reduce algorithm as a value: which messages each rank sends, and in which order.

    A class of your own needs `program(rank, size)` only, which generates the actions of one rank,
    `Send` and `Recv`. The class is then known by its name, and printed, proved, drawn, timed by the
    clock and run like the built-in ones. Options are fields made by `option(...)`, as in the
    built-in classes.

    Attributes:
        reproducible: Whether the result has the same bits for every schedule and order of arrival.
            It is an option of the built-in classes.
    """

    __slots__ = ()
    renamed_members: ClassVar[Mapping[str, str]] = {
        **Family.renamed_members,
        "resolved": "resolve",
    }
    reproducible = False

    if TYPE_CHECKING:  # each class defines it; the proof refuses a class without it

        def program(self, rank: int, size: int) -> Program:
            """Generate the actions of one rank, in order.

            Args:
                rank: The rank.
                size: The number of ranks. Each has a vector of `parts(size)` equal parts.
            """

    def parts(self, size: int) -> int:
        """Return into how many equal parts the vector is divided; the default is one per rank.

        Args:
            size: The number of ranks.
        """
        return size

    def resolve(self, size: int, ranks_per_host: int) -> Self:
        """Return the same algorithm with every `auto` replaced.

        Args:
            size: The number of ranks.
            ranks_per_host: How many of them are on one host.

        Raises:
            Refused: If the options do not fit these numbers.
        """
        return self
