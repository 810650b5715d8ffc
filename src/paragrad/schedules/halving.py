"""Halving all-reduce: recursive halving adds, recursive doubling distributes the sums.

Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521.

In round k, ranks at distance 2^k halve the range that both add up: each sends the half that the
other keeps. The nearest ranks exchange the longest messages. The all_gather goes back the same way,
with messages that double.

    4 ranks     reduce_scatter                  all_gather
    0 | >1:2-3 <1:0-1+    >2:1 <2:0+    >2:0 <2:1    >1:0-1 <1:2-3
    1 | >0:0-1 <0:2-3+    >3:3 <3:2+    >3:2 <3:3    >0:2-3 <0:0-1
    2 | >3:2-3 <3:0-1+    >0:0 <0:1+    >0:1 <0:0    >3:0-1 <3:2-3
    3 | >2:0-1 <2:2-3+    >1:2 <1:3+    >1:3 <1:2    >2:2-3 <2:0-1

Time 2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma: both lower bounds, but for a factor of two in
alpha. Scratch n/2. If p is no power of two, the extra ranks fold in and out as in the butterfly: 2
alpha + 2 n beta + n gamma more. With segments, every message travels in pieces: the addition of one
piece overlaps the transfer of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paragrad.notation.choices import Flag, Integer, Word, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send, Slot, make_slot
from paragrad.schedules.butterfly import (
    count_inner_ranks,
    count_inner_rounds,
    fold_extra_ranks,
    unfold_extra_ranks,
)
from paragrad.schedules.compose import SegmentedAllReduce


class Halving(SegmentedAllReduce):
    """Recursive halving, then recursive doubling (Rabenseifner 2004).

    Attributes:
        segments: The number of segments of a message; auto: 2.

        reproducible: Whether the result has the same bits for every order of arrival.
    """

    segments: int | str = option(Integer(), Word("auto"), default="auto")  # per message
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return HalvingReduceScatter(self.count_segments()), DoublingAllGather(self.count_segments())


@dataclass(frozen=True)
class HalvedBlocks:
    """The blocks of recursive halving: each inner rank ends with one block of `segments` parts."""

    segments: int = 1

    def parts(self, size: int) -> int:
        return count_inner_ranks(size) * self.segments

    def owns(self, rank: int, size: int) -> range:
        if rank >= count_inner_ranks(size):
            return range(0)
        return [
            range(self.parts(size)),
            *(kept for _, kept, _ in self.iterate_halving_rounds(rank, size)),
        ][-1]

    def iterate_halving_rounds(self, rank: int, size: int) -> Iterator[tuple[int, range, range]]:
        """Generate the rounds of an inner rank.

        Args:
            rank: The inner rank.
            size: The number of ranks.

        Yields:
            (partner, parts that this rank keeps, parts that the partner keeps) of each round.
        """
        kept = range(self.parts(size))
        for round_ in range(count_inner_rounds(size)):
            halves = kept[: len(kept) // 2], kept[len(kept) // 2 :]
            upper = rank >> round_ & 1
            kept = halves[upper]
            yield rank ^ (1 << round_), kept, halves[1 - upper]

    def split_message(self, parts: range) -> Iterator[Slot]:
        """Split a message of some parts into its segments."""
        step = len(parts) // self.segments
        return (make_slot(start, start + step) for start in parts[::step])


@dataclass(frozen=True)
class HalvingReduceScatter(HalvedBlocks):
    """Send the half that the partner keeps; receive and add the half that this rank keeps."""

    def program(self, rank: int, size: int) -> Program:
        yield from fold_extra_ranks(rank, size, range(self.parts(size)))
        if rank < count_inner_ranks(size):
            for partner, kept, given in self.iterate_halving_rounds(rank, size):
                yield from (Send(partner, piece) for piece in self.split_message(given))
                yield from (Recv(partner, piece, add=True) for piece in self.split_message(kept))


@dataclass(frozen=True)
class DoublingAllGather(HalvedBlocks):
    """The rounds backwards: send everything that is complete, receive as much."""

    def program(self, rank: int, size: int) -> Program:
        if rank < count_inner_ranks(size):
            for partner, kept, given in reversed(list(self.iterate_halving_rounds(rank, size))):
                yield from (Send(partner, piece) for piece in self.split_message(kept))
                yield from (Recv(partner, piece) for piece in self.split_message(given))
        yield from unfold_extra_ranks(rank, size, range(self.parts(size)))
