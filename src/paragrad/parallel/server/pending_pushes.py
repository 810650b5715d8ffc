"""What workers push: checked field by field, and kept until all is there that it is added up
with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paragrad.parallel.server.message_header import Header, Unfit
from paragrad.parallel.server.shard import Shard
from paragrad.parallel.server.shared_buffer import Reader

Question = tuple[bytes, Header]  # over which connection, and what


@dataclass(eq=False)
class Push:
    """What came of one share: by slot its marks and its vector. sender: whose;  waiting: who
    waits for an answer, the last question of every connection about every slot.
    """

    sender: int
    numbers: tuple[float, ...]
    vectors: dict[int, tuple[bytes, Tensor]] = field(default_factory=dict)
    waiting: dict[tuple[bytes, int], Header] = field(default_factory=dict)

    def add(self, whose: bytes, header: Header, marked: bytes, vector: Tensor) -> None:
        self.vectors[header.slot] = marked, vector
        self.waiting[whose, header.slot] = header

    def asking(self, own: bool | None = None) -> Iterator[Question]:
        """own: those alone of whom it is, or (False) those who brought it before."""
        return (
            (whose, header)
            for (whose, _), header in self.waiting.items()
            if own in (None, header.sender == self.sender)
        )


def checked(
    shard: Shard, reader: Reader, header: Header, rest: Sequence[Any]
) -> tuple[Tensor, bytes]:
    """(the vector, its marks). Raises Unfit where this is not what belongs into a slot, or came
    before.
    """
    if header.slot >= len(shard.slots):
        raise Unfit("it is for a vector that is not here")
    slot = shard.slots[header.slot]
    if len(rest) != 2:
        raise Unfit("a push without its marks and its vector")
    if header.dtype != slot.dtype:
        raise Unfit(
            f"gradients of type {str(header.dtype).removeprefix('torch.')}, and here are "
            f"parameters of "
            f"{str(slot.dtype).removeprefix('torch.')}"
        )
    if header.elements != slot.elements:
        raise Unfit(f"a gradient of {header.elements} elements for {slot.elements} parameters")
    marked = rest[0].bytes
    if len(marked) != len(slot.stretches) or not set(marked) <= {0, 1}:
        raise Unfit("marks that do not fit the slice")
    parcel = shard.parcels[header.slot]
    frame = rest[1].buffer
    if parcel is not None and header.lies:
        raise Unfit("a vector that lies, where they are compressed")
    vector = reader.vector(header, frame) if parcel is None else parcel.came(frame)
    if not all(map(math.isfinite, header.numbers)):
        raise Unfit("numbers that are not finite")
    if shard.strategy.hands_out and not (
        0 <= header.numbers[3] <= shard.full and 1 <= header.shares <= shard.strategy.shares
    ):
        raise Unfit("samples or shares that cannot be")
    # what is not finite makes a sum so; each is looked at, which takes many times as long,
    # where a sum is out of range
    if not vector.sum().isfinite() and not vector.isfinite().all():
        raise Unfit("a gradient that is not finite")
    shard.received += vector.nbytes if parcel is None else parcel.nbytes
    return vector, marked
