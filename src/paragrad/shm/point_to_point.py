"""Point-to-point messages: a ring of bytes in the region for every ordered pair of ranks.

The sender writes records into the ring, each a header and a piece of a message, and posts `filled`.
The receiver copies the piece into its own tensor and posts `freed`. Both know where a record begins
from the lengths of the records before it.

A send is done when its last piece is in the ring, so a message that fits does not wait for its
receiver. The pieces of a longer message are copied in and out at the same time. (One copy by the
kernel, process_vm_readv, was tried and is slower: docs/techniques/shm.md.)

A third semaphore of each rank is its doorbell. A rank therefore waits in one place for everything.
The doorbell is posted with each piece sent to the rank, and when space becomes free in a ring that
was more than half full.

Messages move on while their rank waits for anything else, or by the daemon of the queue. Two ranks
that both send more than a ring holds, and then receive, therefore do not block each other.

Between a pair of ranks, messages of one tag arrive in the order of the sends. If no receive has the
tag of a message, the message is set aside as soon as a later one is needed.
"""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paragrad.shm.region import CACHE_LINE_BYTES, align_to_cache_line
from paragrad.shm.synchronization import GroupError, Peers, Semaphores
from paragrad.shm.work import OperationQueue, ShmWork

# The smallest size of a piece. It grows to a fourth of the message, but not above a fourth of the
# ring.
PIECE_BYTES = 2**17
# The daemon completes receives only after this time. A message can wait in the ring, and a second
# busy thread is expensive.
RECEIVE_POLL_SECONDS = 0.02
SEND = "send to"
RECEIVE = "receive from"
# bytes of the message, bytes in this record, tag, type, whether to ring the bell for free space
RECORD_HEADER = struct.Struct("<qqqqq")
DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class MessageWork(ShmWork):
    """A send or a receive of the bytes at an address.

    Attributes:
        deadline: When the operation must be done, on the monotonic clock. It is infinite until a
            caller asks whether the operation is done: before, no caller waits for the other rank.

        direction: `SEND` or `RECEIVE`.

        peer: The other rank; None receives from any rank.

        tag: The tag of the message.

        moved_bytes: The number of bytes that were copied so far.

        flat: The contiguous tensor that is sent or received into.

        needs_copy_back: Whether a received message must be copied from `flat` into the tensor.

        address: The address of `flat`.

        bytes: The number of bytes.

        dtype: The type of the elements.
    """

    deadline = math.inf

    def __init__(
        self,
        queue: MessageQueue,
        direction: str,
        tensor: Tensor,
        peer: int | None,
        tag: int,
        seconds: float,
    ) -> None:
        super().__init__(queue, [tensor], seconds)
        self.direction = direction
        self.peer = peer
        self.tag = tag
        self.moved_bytes = 0
        # torch itself refuses conjugated tensors
        is_plain = tensor.is_contiguous() and not tensor.is_neg()
        self.flat = tensor if is_plain else tensor.detach().resolve_neg().contiguous()
        self.needs_copy_back = not is_plain
        self.address = self.flat.data_ptr()
        self.bytes = self.flat.nbytes
        self.dtype = tensor.dtype

    def __str__(self) -> str:
        shape = list(self.tensors[0].shape)
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.direction} {peer} of {dtype} {shape}, {self.bytes} bytes, tag {self.tag}, "
            f"{self.moved_bytes} bytes moved"
        )


class UnclaimedMessage:
    """A message that came before its receive.

    Attributes:
        tag: The tag of the message.

        dtype: The type of the elements.

        bytes: The number of bytes.

        moved_bytes: The number of bytes that have come.

        tensor: Holds the bytes.

        address: The address of the bytes.
    """

    def __init__(self, tag: int, dtype: torch.dtype, total: int) -> None:
        self.tag = tag
        self.dtype = dtype
        self.bytes = total
        self.moved_bytes = 0
        self.tensor = torch.empty(total, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


@dataclass
class OutgoingRing:
    """The ring to one rank, as its sender sees it.

    Attributes:
        free_bytes: The free space of the ring.

        offset: Where the next record begins.

        unreleased: The sizes of the records that the receiver has not freed.

        messages: The messages that are not completely in the ring.
    """

    free_bytes: int
    offset: int = 0
    unreleased: deque[int] = field(default_factory=deque)
    messages: deque[MessageWork] = field(default_factory=deque)


@dataclass
class IncomingRing:
    """The ring from one rank, as its receiver sees it.

    Attributes:
        offset: Where the next record begins.
        partial: The message of which only a part has come.
        unclaimed: Complete messages that came before their receive.
    """

    offset: int = 0
    partial: MessageWork | UnclaimedMessage | None = None
    unclaimed: list[UnclaimedMessage] = field(default_factory=list)


class MessageQueue(OperationQueue):
    """The messages of one rank.

    Attributes:
        rank: The number of this rank.

        size: The number of ranks.

        ring_bytes: The size of a ring.

        filled: Semaphores for filled records, number `from * size + to`.

        freed: Semaphores for freed records, number `from * size + to`.

        doorbells: One semaphore for each rank.

        peers: The processes of the other ranks.

        start: The address of the rings.

        memory: The bytes of the rings.

        outgoing: The rings to other ranks, by rank.

        incoming: The rings from other ranks, by rank.

        receives: The receives that have not begun.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rings: Tensor,
        filled: Semaphores,
        freed: Semaphores,
        doorbells: Semaphores,
        peers: Peers,
    ) -> None:
        """Take the sections of the group's region.

        Args:
            rank: The number of this rank.

            size: The number of ranks.

            rings: uint8 [from, to, bytes of a ring].

            filled: Semaphores for filled records, number `from * size + to`.

            freed: Semaphores for freed records, number `from * size + to`.

            doorbells: One semaphore for each rank.

            peers: The processes of the other ranks.
        """
        super().__init__(RECEIVE_POLL_SECONDS)
        self.rank = rank
        self.size = size
        self.ring_bytes = rings.size(2)
        self.filled = filled
        self.freed = freed
        self.doorbells = doorbells
        self.peers = peers
        self.start = rings.data_ptr()
        self.memory = rings.view(-1).numpy().data
        self.outgoing = [OutgoingRing(self.ring_bytes) for _ in range(size)]
        self.incoming = {peer: IncomingRing() for peer in range(size) if peer != rank}
        self.receives: list[MessageWork] = []

    def send(self, tensor: Tensor, destination: int, tag: int, seconds: float) -> MessageWork:
        """Start to send a tensor.

        Args:
            tensor: The tensor.
            destination: The rank that receives.
            tag: The tag of the message.
            seconds: The time limit.

        Returns:
            The operation.
        """
        message = MessageWork(self, SEND, tensor, destination, tag, seconds)
        outgoing = self.outgoing[destination]
        outgoing.messages.append(message)
        self._try_move(self._send_pieces, destination, outgoing)
        return message

    def receive(self, tensor: Tensor, source: int | None, tag: int, seconds: float) -> MessageWork:
        """Start to receive into a tensor.

        Args:
            tensor: Takes the message.
            source: The rank that sends; None for any rank.
            tag: The tag of the message.
            seconds: The time limit.

        Returns:
            The operation.
        """
        message = MessageWork(self, RECEIVE, tensor, source, tag, seconds)
        self.receives.append(message)
        for peer in self.incoming if source is None else (source,):
            self._try_move(self._receive_pieces, peer, self.incoming[peer])
        return message

    def _try_move(
        self, move: Callable[[int, Any], bool], peer: int, ring: OutgoingRing | IncomingRing
    ) -> None:
        """Move what can be moved. If another thread runs the queue, ring the doorbell instead."""
        if not self.lock.acquire(blocking=False):
            self.doorbells.post(self.rank)
            return
        try:
            move(peer, ring)
        except GroupError as error:
            self._fail_all(error)
        finally:
            self.lock.release()

    def leave_to_daemon(self, work: ShmWork) -> None:
        super().leave_to_daemon(work)
        # the ring is full, and the receiver may be waiting
        if isinstance(work, MessageWork) and work.direction == SEND:
            super().mark_urgent(work)

    def mark_urgent(self, work: ShmWork) -> None:
        assert isinstance(work, MessageWork)
        work.deadline = min(work.deadline, time.monotonic() + work.seconds)
        super().mark_urgent(work)

    def find_most_urgent(self, work: MessageWork) -> MessageWork:
        """Find the operation with the earliest deadline among those left to the daemon.

        Args:
            work: The result if no operation is waiting.
        """
        with self.backlog.guard:
            waiting: list[Any] = [each for each in (work, *self.backlog.works) if not each.done]
            return min(waiting, key=lambda each: each.deadline, default=work)

    def request_yield(self) -> None:
        self.doorbells.post(self.rank)

    def handle_timeout(self, work: ShmWork) -> None:
        assert isinstance(work, MessageWork)
        self.peers.abandon_group(
            f"rank {self.rank} gave up waiting for {self.peers.describe_away_ranks(work.peer)} in "
            f"{work}"
        )

    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        assert isinstance(work, MessageWork)
        try:
            while not work.done:
                while self.doorbells.try_take(self.rank):  # the next line looks at everything
                    pass
                if self._move_pieces() or work.done:
                    continue
                if is_background and self.awaited_works:
                    return
                if self.doorbells.wait(self.rank, 0 if is_background else self.peers.spins):
                    continue
                while not work.done:
                    most_urgent = self.find_most_urgent(work) if is_background else work
                    if self.peers.wait_one_slice(
                        self.doorbells,
                        self.rank,
                        most_urgent.peer,
                        most_urgent.deadline if is_background else deadline,
                        most_urgent.__str__,
                    ):
                        break
        except GroupError as error:
            self._fail_all(error)
            if not work.done:
                work.finish(error)

    def _fail_all(self, error: GroupError) -> None:
        for incoming in self.incoming.values():
            if isinstance(incoming.partial, MessageWork):
                incoming.partial.finish(error)
            incoming.partial = None
        waiting: list[Any] = [self.receives, *(each.messages for each in self.outgoing)]
        for messages in waiting:
            while messages:  # another thread may append meanwhile
                messages.pop().finish(error)

    def _move_pieces(self) -> bool:
        """Move all pieces that can be moved now; tell whether there were any."""
        moved = False
        for destination, outgoing in enumerate(self.outgoing):
            if outgoing.messages and self._send_pieces(destination, outgoing):
                moved = True
        for source, incoming in self.incoming.items():
            if self._receive_pieces(source, incoming):
                moved = True
        return moved

    # ---- send --------------------------------------------------------------------------------
    def _send_pieces(self, destination: int, outgoing: OutgoingRing) -> bool:
        """Write all pieces that fit into the ring; tell whether there were any."""
        moved = False
        while outgoing.messages and self._send_piece(destination, outgoing):
            moved = True
        return moved

    def _send_piece(self, destination: int, outgoing: OutgoingRing) -> bool:
        """Write the next piece of the first message into the ring; return False without space."""
        message = outgoing.messages[0]
        pair = self.rank * self.size + destination
        offset = outgoing.offset
        count = min(
            max(PIECE_BYTES, message.bytes // 4),
            self.ring_bytes // 4,
            message.bytes - message.moved_bytes,
            self.ring_bytes - offset - CACHE_LINE_BYTES,
        )
        record_bytes = CACHE_LINE_BYTES + align_to_cache_line(count)
        # also before space is short: the receiver rings a bell for it, which takes microseconds
        while outgoing.unreleased and outgoing.free_bytes < self.ring_bytes // 2 + record_bytes:
            if not self.freed.try_take(pair):
                break
            outgoing.free_bytes += outgoing.unreleased.popleft()
        if outgoing.free_bytes < record_bytes:
            return False
        outgoing.free_bytes -= record_bytes
        outgoing.unreleased.append(record_bytes)
        outgoing.offset = (offset + record_bytes) % self.ring_bytes
        header_offset = pair * self.ring_bytes + offset
        RECORD_HEADER.pack_into(
            self.memory,
            header_offset,
            message.bytes,
            count,
            message.tag,
            DTYPE_NUMBERS[message.dtype],
            outgoing.free_bytes < self.ring_bytes // 2,
        )
        ctypes.memmove(
            self.start + header_offset + CACHE_LINE_BYTES,
            message.address + message.moved_bytes,
            count,
        )
        self.filled.post(pair)
        self.doorbells.post(destination)
        message.moved_bytes += count
        if message.moved_bytes == message.bytes:
            outgoing.messages.popleft()
            message.finish()
        return True

    # ---- receive -----------------------------------------------------------------------------
    def _receive_pieces(self, source: int, incoming: IncomingRing) -> bool:
        """Read all pieces that have come and that are needed; tell whether there were any."""
        moved = False
        while self._is_receive_waiting(source, incoming) and self._receive_piece(source, incoming):
            moved = True
        return moved

    def _is_receive_waiting(self, source: int, incoming: IncomingRing) -> bool:
        """Deliver unclaimed messages; tell whether a receive needs the next piece of a rank."""
        while incoming.unclaimed:
            match = next(
                (
                    (index, message, receive)
                    for index, message in enumerate(incoming.unclaimed)
                    if (receive := self._find_receive(source, message.tag)) is not None
                ),
                None,
            )
            if match is None:
                break
            index, message, receive = match
            del incoming.unclaimed[index]
            self._check_match(source, receive, message.tag, message.dtype, message.bytes)
            self.receives.remove(receive)
            ctypes.memmove(receive.address, message.address, message.bytes)
            self._complete_receive(source, receive)
        if incoming.partial is not None:
            return True
        # a list, since a generator takes longer
        return True in [each.peer is None or each.peer == source for each in self.receives]

    def _receive_piece(self, source: int, incoming: IncomingRing) -> bool:
        """Read the next piece from the ring; return False if there is none."""
        pair = source * self.size + self.rank
        if not self.filled.try_take(pair):
            return False
        header_offset = pair * self.ring_bytes + incoming.offset
        total, count, tag, dtype_number, rings_bell = RECORD_HEADER.unpack_from(
            self.memory, header_offset
        )
        incoming.offset = (
            incoming.offset + CACHE_LINE_BYTES + align_to_cache_line(count)
        ) % self.ring_bytes
        message = incoming.partial or self._begin_message(source, tag, DTYPES[dtype_number], total)
        ctypes.memmove(
            message.address + message.moved_bytes,
            self.start + header_offset + CACHE_LINE_BYTES,
            count,
        )
        self.freed.post(pair)
        if rings_bell:
            self.doorbells.post(source)
        message.moved_bytes += count
        if message.moved_bytes < total:
            incoming.partial = message
            return True
        incoming.partial = None
        if isinstance(message, MessageWork):
            self._complete_receive(source, message)
        else:
            incoming.unclaimed.append(message)
        return True

    def _begin_message(
        self, source: int, tag: int, dtype: torch.dtype, total: int
    ) -> MessageWork | UnclaimedMessage:
        receive = self._find_receive(source, tag)
        if receive is None:
            return UnclaimedMessage(tag, dtype, total)
        self._check_match(source, receive, tag, dtype, total)
        self.receives.remove(receive)
        return receive

    def _find_receive(self, source: int, tag: int) -> MessageWork | None:
        """Find the first receive for a message of this rank and tag."""
        for receive in self.receives:
            if receive.tag == tag and (receive.peer == source or receive.peer is None):
                return receive
        return None

    def _check_match(
        self, source: int, receive: MessageWork, tag: int, dtype: torch.dtype, total: int
    ) -> None:
        if dtype != receive.dtype or total != receive.bytes:
            raise self.peers.abandon_group(
                f"rank {source} sends {str(dtype).removeprefix('torch.')}, {total} bytes, tag "
                f"{tag}; rank {self.rank} waits for it in {receive}"
            )

    def _complete_receive(self, source: int, receive: MessageWork) -> None:
        if receive.needs_copy_back:
            receive.tensors[0].detach().copy_(receive.flat)
        receive.source = source
        receive.finish()
