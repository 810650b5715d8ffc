"""Messages from one rank to another: a ring of bytes in the region for every ordered pair of
ranks.

The sender writes records into it, each a header and a piece of a message, and posts `filled`;
the receiver copies the piece straight into its own tensor and posts `room`. Both know where a
record begins from the lengths of those before it. A send is done when its last piece is in the
ring, so one that fits does not wait for its receiver; of a longer one the pieces are copied in
and out at the same time. (One copy by the kernel, process_vm_readv, was tried, and is slower:
docs/shm.md.)

A third semaphore, the bell of a rank, is rung for what it may wait for, so that a rank with
nothing to move has one thing to wait at: with every piece for it, and with the room in a ring
that was more than half full. Messages move on while their rank waits for anything else, or by
the lane's daemon. So two ranks that both send more than a ring holds, and then receive, do not
block each other.

Between a pair of ranks messages of one tag arrive in the order they were sent. A message whose
tag nobody wants yet is put aside as soon as a later one is wanted.
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

# bytes that are copied in before they are copied out; or a fourth of the message, or of the
# ring
PIECE_BYTES = 2**17
# seconds before the daemon looks after receives: what has come may lie, and one thread more
# costs much
RECEIVE_POLL_SECONDS = 0.02
SEND = "send to"
RECEIVE = "receive from"
# bytes of the message, bytes in this record, tag, type, ring the bell for the room?
RECORD_HEADER = struct.Struct("<qqqqq")
DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class MessageWork(ShmWork):
    """A send or receive of the bytes at an address.  peer: None takes from any rank;  until:
    when it must be done, once somebody has asked whether it is: of what was only posted, nobody
    waits for the other rank.
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
        # conjugates torch itself refuses
        plain = tensor.is_contiguous() and not tensor.is_neg()
        self.flat = tensor if plain else tensor.detach().resolve_neg().contiguous()
        # a receive: goes back into the tensor
        self.needs_copy_back = not plain
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
    """A message that nobody has asked for yet."""

    def __init__(self, tag: int, dtype: torch.dtype, total: int) -> None:
        self.tag = tag
        self.dtype = dtype
        self.bytes = total
        self.moved_bytes = 0
        self.tensor = torch.empty(total, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


@dataclass
class OutgoingRing:
    """What goes to one rank. at: where the next record begins;  free: bytes of the ring;  lent:
    the records not given back.
    """

    free_bytes: int
    offset: int = 0
    unreleased: deque[int] = field(default_factory=deque)
    messages: deque[MessageWork] = field(default_factory=deque)


@dataclass
class IncomingRing:
    """What comes from one rank. at: where the next record begins;  arriving: of what only a
    part has come;  aside: whole.
    """

    offset: int = 0
    partial: MessageWork | UnclaimedMessage | None = None
    unclaimed: list[UnclaimedMessage] = field(default_factory=list)


class MessageQueue(OperationQueue):
    """One rank's messages.

    rings: uint8 [from, to, bytes];  filled, room: `from * size + to`;  bells: by rank.
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
        message = MessageWork(self, SEND, tensor, destination, tag, seconds)
        outgoing = self.outgoing[destination]
        outgoing.messages.append(message)
        self._try_move(self._send_pieces, destination, outgoing)
        return message

    def receive(self, tensor: Tensor, source: int | None, tag: int, seconds: float) -> MessageWork:
        message = MessageWork(self, RECEIVE, tensor, source, tag, seconds)
        self.receives.append(message)
        for peer in self.incoming if source is None else (source,):
            self._try_move(self._receive_pieces, peer, self.incoming[peer])
        return message

    def _try_move(
        self, move: Callable[[int, Any], bool], peer: int, ring: OutgoingRing | IncomingRing
    ) -> None:
        """Move what can be moved; whoever is at the lane is told."""
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
        # the ring is full, and its receiver may wait
        if isinstance(work, MessageWork) and work.direction == SEND:
            super().mark_urgent(work)

    def mark_urgent(self, work: ShmWork) -> None:
        assert isinstance(work, MessageWork)
        work.deadline = min(work.deadline, time.monotonic() + work.seconds)
        super().mark_urgent(work)

    def find_most_urgent(self, work: MessageWork) -> MessageWork:
        """Of what was left to the daemon, what must be done first; this one, where nobody waits
        for any.
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
                while self.doorbells.try_take(self.rank):  # rung before this look at everything
                    pass
                if self._move_pieces() or work.done:
                    continue
                if is_background and self.awaited_works:
                    return
                if self.doorbells.wait(self.rank, 0 if is_background else self.peers.spins):
                    continue
                while not work.done:
                    first = self.find_most_urgent(work) if is_background else work
                    if self.peers.wait_one_slice(
                        self.doorbells,
                        self.rank,
                        first.peer,
                        first.deadline if is_background else deadline,
                        first.__str__,
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
            while messages:  # to which another thread may add
                messages.pop().finish(error)

    def _move_pieces(self) -> bool:
        """Move every piece that can be moved now; was there any?"""
        moved = False
        for to, outgoing in enumerate(self.outgoing):
            if outgoing.messages and self._send_pieces(to, outgoing):
                moved = True
        for frm, incoming in self.incoming.items():
            if self._receive_pieces(frm, incoming):
                moved = True
        return moved

    # ---- out ---------------------------------------------------------------------------------
    def _send_pieces(self, destination: int, outgoing: OutgoingRing) -> bool:
        """Every piece that there is room for; was there any?"""
        moved = False
        while outgoing.messages and self._send_piece(destination, outgoing):
            moved = True
        return moved

    def _send_piece(self, destination: int, outgoing: OutgoingRing) -> bool:
        """The next piece of the first message into the ring; False if it has no room for it."""
        message = outgoing.messages[0]
        pair = self.rank * self.size + destination
        at = outgoing.offset
        count = min(
            max(PIECE_BYTES, message.bytes // 4),
            self.ring_bytes // 4,
            message.bytes - message.moved_bytes,
            self.ring_bytes - at - CACHE_LINE_BYTES,
        )
        record = CACHE_LINE_BYTES + align_to_cache_line(count)
        while outgoing.free_bytes < record:
            if not self.freed.try_take(pair):
                return False
            outgoing.free_bytes += outgoing.unreleased.popleft()
        outgoing.free_bytes -= record
        outgoing.unreleased.append(record)
        outgoing.offset = (at + record) % self.ring_bytes
        place = pair * self.ring_bytes + at
        RECORD_HEADER.pack_into(
            self.memory,
            place,
            message.bytes,
            count,
            message.tag,
            DTYPE_NUMBERS[message.dtype],
            outgoing.free_bytes < self.ring_bytes // 2,
        )
        ctypes.memmove(
            self.start + place + CACHE_LINE_BYTES, message.address + message.moved_bytes, count
        )
        self.filled.post(pair)
        self.doorbells.post(destination)
        message.moved_bytes += count
        if message.moved_bytes == message.bytes:
            outgoing.messages.popleft()
            message.finish()
        return True

    # ---- in ----------------------------------------------------------------------------------
    def _receive_pieces(self, source: int, incoming: IncomingRing) -> bool:
        """Every piece that has come and somebody wants; was there any?"""
        moved = False
        while self._is_receive_waiting(source, incoming) and self._receive_piece(source, incoming):
            moved = True
        return moved

    def _is_receive_waiting(self, source: int, incoming: IncomingRing) -> bool:
        """Does a receive want what comes next of this rank? What was put aside is given
        first.
        """
        while incoming.unclaimed:
            found = next(
                (
                    (place, each, taker)
                    for place, each in enumerate(incoming.unclaimed)
                    if (taker := self._find_receive(source, each.tag)) is not None
                ),
                None,
            )
            if found is None:
                break
            place, each, taker = found
            del incoming.unclaimed[place]
            self._check_match(source, taker, each.tag, each.dtype, each.bytes)
            self.receives.remove(taker)
            ctypes.memmove(taker.address, each.address, each.bytes)
            self._complete_receive(source, taker)
        return incoming.partial is not None or any(
            each.peer in (source, None) for each in self.receives
        )

    def _receive_piece(self, source: int, incoming: IncomingRing) -> bool:
        """The next piece out of the ring; False if there is none."""
        pair = source * self.size + self.rank
        if not self.filled.try_take(pair):
            return False
        place = pair * self.ring_bytes + incoming.offset
        total, count, tag, number, told = RECORD_HEADER.unpack_from(self.memory, place)
        incoming.offset = (
            incoming.offset + CACHE_LINE_BYTES + align_to_cache_line(count)
        ) % self.ring_bytes
        into = incoming.partial or self._begin_message(source, tag, DTYPES[number], total)
        ctypes.memmove(
            into.address + into.moved_bytes, self.start + place + CACHE_LINE_BYTES, count
        )
        self.freed.post(pair)
        if told:
            self.doorbells.post(source)
        into.moved_bytes += count
        if into.moved_bytes < total:
            incoming.partial = into
            return True
        incoming.partial = None
        if isinstance(into, MessageWork):
            self._complete_receive(source, into)
        else:
            incoming.unclaimed.append(into)
        return True

    def _begin_message(
        self, source: int, tag: int, dtype: torch.dtype, total: int
    ) -> MessageWork | UnclaimedMessage:
        taker = self._find_receive(source, tag)
        if taker is None:
            return UnclaimedMessage(tag, dtype, total)
        self._check_match(source, taker, tag, dtype, total)
        self.receives.remove(taker)
        return taker

    def _find_receive(self, source: int, tag: int) -> MessageWork | None:
        """The first receive that asks for it."""
        for each in self.receives:
            if each.tag == tag and (each.peer == source or each.peer is None):
                return each
        return None

    def _check_match(
        self, source: int, receive: MessageWork, tag: int, dtype: torch.dtype, total: int
    ) -> None:
        if dtype != receive.dtype or total != receive.bytes:
            raise self.peers.abandon_group(
                f"rank {source} sends {str(dtype).removeprefix('torch.')}, {total} bytes, tag "
                f"{tag}; "
                f"rank {self.rank} waits for it in {receive}"
            )

    def _complete_receive(self, source: int, receive: MessageWork) -> None:
        if receive.needs_copy_back:
            receive.tensors[0].detach().copy_(receive.flat)
        receive.source = source
        receive.finish()
