"""Pushes of workers: every field is checked, and they are kept until all shares have arrived."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paragrad.parallel.server.message_header import Header, InvalidMessage
from paragrad.parallel.server.shard import ServerShard
from paragrad.parallel.server.shared_buffer import BufferReader

ClientRequest = tuple[bytes, Header]  # (connection, header)


@dataclass(eq=False)
class PendingPush:
    """The vectors of one share that have arrived.

    Attributes:
        sender: The sender of the share.

        numbers: The numbers of its header.

        vectors: For each slot, the marks and the vector.

        waiting_requests: Requests that wait for an answer: the last one of each connection for each
            slot.
    """

    sender: int
    numbers: tuple[float, ...]
    vectors: dict[int, tuple[bytes, Tensor]] = field(default_factory=dict)
    waiting_requests: dict[tuple[bytes, int], Header] = field(default_factory=dict)

    def add_vector(self, connection: bytes, header: Header, marks: bytes, vector: Tensor) -> None:
        """Add a vector.

        Args:
            connection: The connection of the worker.
            header: The header of the push.
            marks: One byte for each range: 1 if it has a gradient.
            vector: The vector.
        """
        self.vectors[header.slot] = marks, vector
        self.waiting_requests[connection, header.slot] = header

    def list_requests(self, from_sender: bool | None = None) -> Iterator[ClientRequest]:
        """List the requests that wait for an answer.

        Args:
            from_sender: True: only those of the current sender. False: only those of earlier
                senders of the same share. None: all.
        """
        return (
            (connection, header)
            for (connection, _), header in self.waiting_requests.items()
            if from_sender in (None, header.sender == self.sender)
        )


def check_push(
    shard: ServerShard, reader: BufferReader, header: Header, rest: Sequence[Any]
) -> tuple[Tensor, bytes]:
    """Check a push and read its vector.

    Args:
        shard: The shard of the server.
        reader: Reads vectors in shared memory.
        header: The header of the push.
        rest: The frames after the header.

    Returns:
        (vector, marks).

    Raises:
        InvalidMessage: The push does not fit the slot.
    """
    if header.slot >= len(shard.slots):
        raise InvalidMessage("it is for a vector that is not here")
    slot = shard.slots[header.slot]
    if len(rest) != 2:
        raise InvalidMessage("a push without its marks and its vector")
    if header.dtype != slot.dtype:
        raise InvalidMessage(
            f"gradients of type {str(header.dtype).removeprefix('torch.')}, and here are "
            f"parameters of {str(slot.dtype).removeprefix('torch.')}"
        )
    if header.elements != slot.elements:
        raise InvalidMessage(
            f"a gradient of {header.elements} elements for {slot.elements} parameters"
        )
    marks = rest[0].bytes
    if len(marks) != len(slot.ranges) or not set(marks) <= {0, 1}:
        raise InvalidMessage("marks that do not fit the slice")
    push_codec = shard.push_codecs[header.slot]
    frame = rest[1].buffer
    if push_codec is not None and header.is_shared:
        raise InvalidMessage("a vector in shared memory, where they are compressed")
    vector = (
        reader.read_vector(header, frame) if push_codec is None else push_codec.decode_vector(frame)
    )
    if not all(map(math.isfinite, header.numbers)):
        raise InvalidMessage("numbers that are not finite")
    if shard.strategy.uses_work_queue and not (
        0 <= header.numbers[3] <= shard.full_batch
        and 1 <= header.shares <= shard.strategy.share_count
    ):
        raise InvalidMessage("samples or shares that cannot be right")
    # If an element is not finite, neither is the sum. Each element is checked, which takes many
    # times as long, only if the sum is not finite; it may have overflowed.
    if not vector.sum().isfinite() and not vector.isfinite().all():
        raise InvalidMessage("a gradient that is not finite")
    shard.received_bytes += vector.nbytes if push_codec is None else push_codec.nbytes
    return vector, marks
