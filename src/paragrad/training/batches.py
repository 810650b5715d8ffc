"""What one rank runs of one global batch: its micro-batches, as places in the epoch's order and as samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from paragrad.datasets.order import Order
from paragrad.strategies.shares import micro_batches


@dataclass(frozen=True)
class Piece:
    """A micro-batch of this rank. `places` is never empty: where `positions` is, one sample stands in with weight 0."""
    positions: list[int]        # in the epoch's order
    places: list[int]           # in the global batch


@dataclass(frozen=True)
class Batch:
    """This rank's part of the global batch that stands at `whole` in the order of `epoch`; indices: all its samples."""
    epoch: int
    whole: range
    indices: list[int]
    pieces: list[Piece]

    @property
    def places(self) -> list[int]:
        """The places in the global batch of what to load, piece after piece."""
        return list(chain.from_iterable(piece.places for piece in self.pieces))

    @property
    def recorded(self) -> list[int]:
        """[first, stop] of its positions, which are contiguous."""
        positions = [position for piece in self.pieces for position in piece.positions]
        return [min(positions), max(positions) + 1] if positions else [0, 0]

    def fewer(self, count: int, shares: Sequence[int], micro: int, ranks: Sequence[int]) -> Batch | None:
        """The same of its first samples alone; None where a share would have none."""
        whole = self.whole[:count]
        micros = micro_batches(whole, shares, micro)
        if not all(any(parts[rank] for parts in micros) for rank in range(len(shares))):
            return None
        return Batch(self.epoch, whole, self.indices[:count], _pieces(whole, shares, micro, ranks))

    def cuts(self) -> Iterator[tuple[Piece, slice]]:
        """Every piece, with its place in what was loaded."""
        start = 0
        for piece in self.pieces:
            yield piece, slice(start, start + len(piece.places))
            start += len(piece.places)


def batch_of(order: Order, epoch: int, whole: range, shares: Sequence[int], micro: int, ranks: Sequence[int],
             reverse: bool = False) -> Batch:
    """The part of a global batch that these ranks' parts make together; reverse: each micro-batch back to front."""
    return Batch(epoch, whole, order.indices(epoch, whole), _pieces(whole, shares, micro, ranks, reverse))


def _pieces(whole: range, shares: Sequence[int], micro: int, ranks: Sequence[int], reverse: bool = False) -> list[Piece]:
    pieces = []
    for parts in micro_batches(whole, shares, micro):
        positions = list(chain.from_iterable(parts[rank] for rank in ranks))
        positions = positions[::-1] if reverse else positions
        pieces.append(Piece(positions, [position - whole.start for position in positions] or [0]))
    return pieces
