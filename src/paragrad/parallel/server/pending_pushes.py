"""What workers push: checked field by field, and kept until all is there that it is added up
with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paragrad.parallel.server.message_header import Header, InvalidMessage
from paragrad.parallel.server.shard import ServerShard
from paragrad.parallel.server.shared_buffer import BufferReader

ClientRequest = tuple[bytes, Header]  # over which connection, and what


@dataclass(eq=False)
class PendingPush:
    """What came of one share: by slot its marks and its vector. sender: whose;  waiting: who
    waits for an answer, the last question of every connection about every slot.
    """

    sender: int
    numbers: tuple[float, ...]
    vectors: dict[int, tuple[bytes, Tensor]] = field(default_factory=dict)
    waiting_requests: dict[tuple[bytes, int], Header] = field(default_factory=dict)

    def add_vector(self, connection: bytes, header: Header, marks: bytes, vector: Tensor) -> None:
        self.vectors[header.slot] = marks, vector
        self.waiting_requests[connection, header.slot] = header

    def list_requests(self, from_sender: bool | None = None) -> Iterator[ClientRequest]:
        """own: those alone of whom it is, or (False) those who brought it before."""
        return (
            (whose, header)
            for (whose, _), header in self.waiting_requests.items()
            if from_sender in (None, header.sender == self.sender)
        )


def check_push(
    shard: ServerShard, reader: BufferReader, header: Header, rest: Sequence[Any]
) -> tuple[Tensor, bytes]:
    """(the vector, its marks). Raises Unfit where this is not what belongs into a slot, or came
    before.
    """
    if header.slot >= len(shard.slots):
        raise InvalidMessage("it is for a vector that is not here")
    slot = shard.slots[header.slot]
    if len(rest) != 2:
        raise InvalidMessage("a push without its marks and its vector")
    if header.dtype != slot.dtype:
        raise InvalidMessage(
            f"gradients of type {str(header.dtype).removeprefix('torch.')}, and here are "
            f"parameters of "
            f"{str(slot.dtype).removeprefix('torch.')}"
        )
    if header.elements != slot.elements:
        raise InvalidMessage(
            f"a gradient of {header.elements} elements for {slot.elements} parameters"
        )
    marked = rest[0].bytes
    if len(marked) != len(slot.ranges) or not set(marked) <= {0, 1}:
        raise InvalidMessage("marks that do not fit the slice")
    parcel = shard.push_codecs[header.slot]
    frame = rest[1].buffer
    if parcel is not None and header.is_shared:
        raise InvalidMessage("a vector that lies, where they are compressed")
    vector = reader.read_vector(header, frame) if parcel is None else parcel.decode_vector(frame)
    if not all(map(math.isfinite, header.numbers)):
        raise InvalidMessage("numbers that are not finite")
    if shard.strategy.uses_work_queue and not (
        0 <= header.numbers[3] <= shard.full_batch
        and 1 <= header.shares <= shard.strategy.share_count
    ):
        raise InvalidMessage("samples or shares that cannot be")
    # what is not finite makes a sum so; each is looked at, which takes many times as long,
    # where a sum is out of range
    if not vector.sum().isfinite() and not vector.isfinite().all():
        raise InvalidMessage("a gradient that is not finite")
    shard.received_bytes += vector.nbytes if parcel is None else parcel.nbytes
    return vector, marked
