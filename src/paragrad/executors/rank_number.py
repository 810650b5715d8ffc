"""The rank of a program that is read once for all ranks: a number per rank, kept as three integers.

If a program makes no choice by rank, its peers and slots follow from the rank by arithmetic. It
adds, multiplies, and takes a remainder, which closes the ring of ranks. All ranks are read at
the cost of one: an operation on a RankNumber costs the same for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


class NotUniform(Exception):
    """Ranks do not all do the same, or their messages meet."""


@dataclass(frozen=True, slots=True, eq=False)
class RankNumber:
    """The number (rank + shift) % size * scale + offset of every rank.

    Other operations than those below raise TypeError, because their result is no such number.

    Attributes:
        size: The number of ranks.
        shift: The distance, around the ring of ranks, to the rank whose number this is.
        scale: The factor.
        offset: The term.
    """

    size: int
    shift: int = 0
    scale: int = 1
    offset: int = 0

    def __add__(self, number: int) -> RankNumber:
        if not isinstance(number, int):
            return NotImplemented
        return RankNumber(self.size, self.shift, self.scale, self.offset + number)

    __radd__ = __add__

    def __sub__(self, number: int) -> RankNumber:
        return self + -number

    def __mul__(self, number: int) -> RankNumber:
        if not isinstance(number, int):
            return NotImplemented
        return RankNumber(self.size, self.shift, self.scale * number, self.offset * number)

    __rmul__ = __mul__

    def __mod__(self, modulus: int) -> RankNumber:
        # Only this remainder leads from the last rank to the first one.
        if modulus != self.size * self.scale:
            return NotImplemented
        distance, offset = divmod(self.offset, self.scale)
        return RankNumber(self.size, (self.shift + distance) % self.size, self.scale, offset)

    def __eq__(self, other: object) -> bool:
        """Return True if the numbers of all ranks are equal.

        Raises:
            NotUniform: If they may be equal on some ranks only.
        """
        if isinstance(other, RankNumber) and (
            (self.size, self.shift, self.scale, self.offset)
            == (other.size, other.shift, other.scale, other.offset)
        ):
            return True
        raise NotUniform

    def __bool__(self) -> bool:
        raise NotUniform

    def look_from(self, distance: int) -> RankNumber:
        """Return, for every rank, the number that belongs to the rank at a distance from it."""
        return RankNumber(self.size, (self.shift + distance) % self.size, self.scale, self.offset)


def find_distance(peer: object) -> int:
    """Return the distance, around the ring of ranks, from every rank to its peer.

    Args:
        peer: The peer, as a program that is read for all ranks gives it.

    Raises:
        NotUniform: If there are several distances, or if a peer is no other rank.
    """
    if not isinstance(peer, RankNumber) or (peer.scale, peer.offset) != (1, 0) or peer.shift == 0:
        raise NotUniform
    return peer.shift
