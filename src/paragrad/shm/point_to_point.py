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

from paragrad.shm.region import LINE, aligned
from paragrad.shm.synchronization import GroupError, Peers, Semaphores
from paragrad.shm.work import Lane, Work

# bytes that are copied in before they are copied out; or a fourth of the message, or of the
# ring
PIECE = 2**17
# seconds before the daemon looks after receives: what has come may lie, and one thread more
# costs much
PATIENCE = 0.02
SEND = "send to"
RECEIVE = "receive from"
# bytes of the message, bytes in this record, tag, type, ring the bell for the room?
HEADER = struct.Struct("<qqqqq")
DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Message(Work):
    """A send or receive of the bytes at an address.  peer: None takes from any rank;  until:
    when it must be done, once somebody has asked whether it is: of what was only posted, nobody
    waits for the other rank.
    """

    until = math.inf

    def __init__(
        self, lane: Messages, verb: str, tensor: Tensor, peer: int | None, tag: int, seconds: float
    ) -> None:
        super().__init__(lane, [tensor], seconds)
        self.verb = verb
        self.peer = peer
        self.tag = tag
        self.moved = 0
        # conjugates torch itself refuses
        plain = tensor.is_contiguous() and not tensor.is_neg()
        self.flat = tensor if plain else tensor.detach().resolve_neg().contiguous()
        # a receive: goes back into the tensor
        self.copied = not plain
        self.address = self.flat.data_ptr()
        self.bytes = self.flat.nbytes
        self.dtype = tensor.dtype

    def __str__(self) -> str:
        shape = list(self.tensors[0].shape)
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.verb} {peer} of {dtype} {shape}, {self.bytes} bytes, tag {self.tag}, "
            f"{self.moved} bytes moved"
        )


class Aside:
    """A message that nobody has asked for yet."""

    def __init__(self, tag: int, dtype: torch.dtype, total: int) -> None:
        self.tag = tag
        self.dtype = dtype
        self.bytes = total
        self.moved = 0
        self.tensor = torch.empty(total, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


@dataclass
class Outgoing:
    """What goes to one rank. at: where the next record begins;  free: bytes of the ring;  lent:
    the records not given back.
    """

    free: int
    at: int = 0
    lent: deque[int] = field(default_factory=deque)
    messages: deque[Message] = field(default_factory=deque)


@dataclass
class Incoming:
    """What comes from one rank. at: where the next record begins;  arriving: of what only a
    part has come;  aside: whole.
    """

    at: int = 0
    arriving: Message | Aside | None = None
    aside: list[Aside] = field(default_factory=list)


class Messages(Lane):
    """One rank's messages.

    rings: uint8 [from, to, bytes];  filled, room: `from * size + to`;  bells: by rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rings: Tensor,
        filled: Semaphores,
        room: Semaphores,
        bells: Semaphores,
        peers: Peers,
    ) -> None:
        super().__init__(PATIENCE)
        self.rank = rank
        self.size = size
        self.ring = rings.size(2)
        self.filled = filled
        self.room = room
        self.bells = bells
        self.peers = peers
        self.start = rings.data_ptr()
        self.memory = rings.view(-1).numpy().data
        self.outgoing = [Outgoing(self.ring) for _ in range(size)]
        self.incoming = {peer: Incoming() for peer in range(size) if peer != rank}
        self.receives: list[Message] = []

    def send(self, tensor: Tensor, to: int, tag: int, seconds: float) -> Message:
        message = Message(self, SEND, tensor, to, tag, seconds)
        outgoing = self.outgoing[to]
        outgoing.messages.append(message)
        self._now(self._out, to, outgoing)
        return message

    def receive(self, tensor: Tensor, frm: int | None, tag: int, seconds: float) -> Message:
        message = Message(self, RECEIVE, tensor, frm, tag, seconds)
        self.receives.append(message)
        for peer in self.incoming if frm is None else (frm,):
            self._now(self._in, peer, self.incoming[peer])
        return message

    def _now(self, move: Callable[[int, Any], bool], peer: int, way: Outgoing | Incoming) -> None:
        """Move what can be moved; whoever is at the lane is told."""
        if not self.lock.acquire(blocking=False):
            self.bells.post(self.rank)
            return
        try:
            move(peer, way)
        except GroupError as error:
            self._fail(error)
        finally:
            self.lock.release()

    def leave(self, work: Work) -> None:
        super().leave(work)
        # the ring is full, and its receiver may wait
        if isinstance(work, Message) and work.verb == SEND:
            super().hurry(work)

    def hurry(self, work: Work) -> None:
        assert isinstance(work, Message)
        work.until = min(work.until, time.monotonic() + work.seconds)
        super().hurry(work)

    def hurried(self, work: Message) -> Message:
        """Of what was left to the daemon, what must be done first; this one, where nobody waits
        for any.
        """
        with self.left.guard:
            waiting: list[Any] = [each for each in (work, *self.left.works) if not each.done]
            return min(waiting, key=lambda each: each.until, default=work)

    def make_way(self) -> None:
        self.bells.post(self.rank)

    def too_late(self, work: Work) -> None:
        assert isinstance(work, Message)
        self.peers.give_up(
            f"rank {self.rank} gave up waiting for {self.peers.away(work.peer)} in {work}"
        )

    def advance(self, work: Work, deadline: float, patient: bool) -> None:
        assert isinstance(work, Message)
        try:
            while not work.done:
                while self.bells.taken(self.rank):  # rung before this look at everything
                    pass
                if self._move_all() or work.done:
                    continue
                if patient and self.impatient:
                    return
                if self.bells.wait(self.rank, 0 if patient else self.peers.spins):
                    continue
                while not work.done:
                    first = self.hurried(work) if patient else work
                    if self.peers.look(
                        self.bells,
                        self.rank,
                        first.peer,
                        first.until if patient else deadline,
                        first.__str__,
                    ):
                        break
        except GroupError as error:
            self._fail(error)
            if not work.done:
                work.finish(error)

    def _fail(self, error: GroupError) -> None:
        for incoming in self.incoming.values():
            if isinstance(incoming.arriving, Message):
                incoming.arriving.finish(error)
            incoming.arriving = None
        waiting: list[Any] = [self.receives, *(each.messages for each in self.outgoing)]
        for messages in waiting:
            while messages:  # to which another thread may add
                messages.pop().finish(error)

    def _move_all(self) -> bool:
        """Move every piece that can be moved now; was there any?"""
        moved = False
        for to, outgoing in enumerate(self.outgoing):
            if outgoing.messages and self._out(to, outgoing):
                moved = True
        for frm, incoming in self.incoming.items():
            if self._in(frm, incoming):
                moved = True
        return moved

    # ---- out ---------------------------------------------------------------------------------
    def _out(self, to: int, outgoing: Outgoing) -> bool:
        """Every piece that there is room for; was there any?"""
        moved = False
        while outgoing.messages and self._push(to, outgoing):
            moved = True
        return moved

    def _push(self, to: int, outgoing: Outgoing) -> bool:
        """The next piece of the first message into the ring; False if it has no room for it."""
        message = outgoing.messages[0]
        pair = self.rank * self.size + to
        at = outgoing.at
        count = min(
            max(PIECE, message.bytes // 4),
            self.ring // 4,
            message.bytes - message.moved,
            self.ring - at - LINE,
        )
        record = LINE + aligned(count)
        while outgoing.free < record:
            if not self.room.taken(pair):
                return False
            outgoing.free += outgoing.lent.popleft()
        outgoing.free -= record
        outgoing.lent.append(record)
        outgoing.at = (at + record) % self.ring
        place = pair * self.ring + at
        HEADER.pack_into(
            self.memory,
            place,
            message.bytes,
            count,
            message.tag,
            NUMBERS[message.dtype],
            outgoing.free < self.ring // 2,
        )
        ctypes.memmove(self.start + place + LINE, message.address + message.moved, count)
        self.filled.post(pair)
        self.bells.post(to)
        message.moved += count
        if message.moved == message.bytes:
            outgoing.messages.popleft()
            message.finish()
        return True

    # ---- in ----------------------------------------------------------------------------------
    def _in(self, frm: int, incoming: Incoming) -> bool:
        """Every piece that has come and somebody wants; was there any?"""
        moved = False
        while self._wanted(frm, incoming) and self._pull(frm, incoming):
            moved = True
        return moved

    def _wanted(self, frm: int, incoming: Incoming) -> bool:
        """Does a receive want what comes next of this rank? What was put aside is given
        first.
        """
        while incoming.aside:
            found = next(
                (
                    (place, each, taker)
                    for place, each in enumerate(incoming.aside)
                    if (taker := self._taker(frm, each.tag)) is not None
                ),
                None,
            )
            if found is None:
                break
            place, each, taker = found
            del incoming.aside[place]
            self._match(frm, taker, each.tag, each.dtype, each.bytes)
            self.receives.remove(taker)
            ctypes.memmove(taker.address, each.address, each.bytes)
            self._arrived(frm, taker)
        return incoming.arriving is not None or any(
            each.peer in (frm, None) for each in self.receives
        )

    def _pull(self, frm: int, incoming: Incoming) -> bool:
        """The next piece out of the ring; False if there is none."""
        pair = frm * self.size + self.rank
        if not self.filled.taken(pair):
            return False
        place = pair * self.ring + incoming.at
        total, count, tag, number, told = HEADER.unpack_from(self.memory, place)
        incoming.at = (incoming.at + LINE + aligned(count)) % self.ring
        into = incoming.arriving or self._begun(frm, tag, DTYPES[number], total)
        ctypes.memmove(into.address + into.moved, self.start + place + LINE, count)
        self.room.post(pair)
        if told:
            self.bells.post(frm)
        into.moved += count
        if into.moved < total:
            incoming.arriving = into
            return True
        incoming.arriving = None
        if isinstance(into, Message):
            self._arrived(frm, into)
        else:
            incoming.aside.append(into)
        return True

    def _begun(self, frm: int, tag: int, dtype: torch.dtype, total: int) -> Message | Aside:
        taker = self._taker(frm, tag)
        if taker is None:
            return Aside(tag, dtype, total)
        self._match(frm, taker, tag, dtype, total)
        self.receives.remove(taker)
        return taker

    def _taker(self, frm: int, tag: int) -> Message | None:
        """The first receive that asks for it."""
        for each in self.receives:
            if each.tag == tag and (each.peer == frm or each.peer is None):
                return each
        return None

    def _match(self, frm: int, taker: Message, tag: int, dtype: torch.dtype, total: int) -> None:
        if dtype != taker.dtype or total != taker.bytes:
            raise self.peers.give_up(
                f"rank {frm} sends {str(dtype).removeprefix('torch.')}, {total} bytes, tag {tag}; "
                f"rank {self.rank} waits for it in {taker}"
            )

    def _arrived(self, frm: int, taker: Message) -> None:
        if taker.copied:
            taker.tensors[0].detach().copy_(taker.flat)
        taker.source = frm
        taker.finish()
