"""All-reduces of two halves: reduce and broadcast, or reduce_scatter and all_gather."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from paragrad.schedules.actions import AllReduceHalf, Program
from paragrad.schedules.all_reduce import AllReduce


class ComposedAllReduce(AllReduce, ABC, abstract=True):
    """One half after the other; both agree on the parts and on the owner of each part."""

    __slots__ = ()

    @abstractmethod
    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        """Return the first and the second half."""

    def parts(self, size: int) -> int:
        return self.build_halves()[0].parts(size)

    def program(self, rank: int, size: int) -> Program:
        for half in self.build_halves():
            yield from half.program(rank, size)


class SegmentedAllReduce(ComposedAllReduce, abstract=True):
    """Messages in segments: the addition of one segment overlaps the transfer of the next.

    Attributes:
        AUTO_SEGMENTS: The number of segments for `auto`. Two is the least with which one segment is
            added while another travels.
    """

    __slots__ = ()
    AUTO_SEGMENTS: ClassVar[int] = 2
    if TYPE_CHECKING:  # an option of each subclass

        @property
        def segments(self) -> int | str: ...

    def count_segments(self) -> int:
        """Return the number of segments, with `auto` replaced."""
        return self.AUTO_SEGMENTS if isinstance(self.segments, str) else self.segments

    def resolve(self, size: int, ranks_per_host: int) -> Self:
        result: Self = dataclasses.replace(cast(Any, self), segments=self.count_segments())
        return result


class RootOwnership:
    """A vector in one piece that rank 0 owns between the halves."""

    def parts(self, size: int) -> int:
        return 1

    def owns(self, rank: int, size: int) -> range:
        return range(1 if rank == 0 else 0)
