"""Messages from one rank to another: a ring of blocks in the region for every ordered pair of ranks.

A long message stays where it is: a block says where, its receiver copies it from there straight into its own tensor
(`reading`), and posts `room`, by which the send is done. That is two meetings and one copy, and nobody but the receiver need
do anything for it: a sender may compute meanwhile. A short one, and every one where the kernel lets no rank read another's
memory, is copied twice: the sender takes a free block, copies the next piece in and posts `filled`; the receiver copies it out
and posts `room`. Such a send is done when its last piece is in a block, so a short one does not wait for its receiver.

A third semaphore, the bell of a rank, is rung with each of both, so that a rank with nothing to move has one thing to wait at.
Messages move on while their rank waits for anything else, or by the lane's daemon. So two ranks that both send more than the
blocks hold, and then receive, do not block each other.

Between a pair of ranks messages of one tag arrive in the order they were sent. A message whose tag nobody wants yet is put
aside as soon as a later one is wanted.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paragrad.world.backends.shm.reading import read, readable
from paragrad.world.backends.shm.region import LINE
from paragrad.world.backends.shm.signals import GroupError, Peers, Semaphores
from paragrad.world.backends.shm.work import Lane, Work

BLOCKS = 4
WHOLE = 2**16           # bytes from which on a message is read where it is
HEADER = struct.Struct("<qqqqq")        # bytes of the message, bytes in this block, tag, type, where the message is (0: here)
DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


class Message(Work):
    """A send or receive. bytes: the tensor's, as uint8;  peer: None takes from any rank."""

    def __init__(self, lane: Messages, verb: str, tensor: Tensor, peer: int | None, tag: int, seconds: float) -> None:
        super().__init__(lane, [tensor], seconds)
        self.verb = verb
        flat = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
        self.copied = None if tensor.is_contiguous() else flat          # goes back into the tensor
        self.bytes, self.dtype = flat.view(-1).view(torch.uint8), tensor.dtype
        self.peer, self.tag, self.moved = peer, tag, 0
        self.address = 0                                                # of a send: where its receiver reads it

    def __str__(self) -> str:
        shape = list(self.tensors[0].shape)
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.verb} {peer} of {dtype} {shape}, {len(self.bytes)} bytes, tag {self.tag}, {self.moved} bytes moved"


@dataclass
class Arriving:
    """A message on its way in: into a receive's tensor, or aside."""
    tag: int
    dtype: torch.dtype
    bytes: Tensor
    taker: Message | None
    moved: int = 0


@dataclass
class Source:
    """What comes from one rank."""
    block: int = 0                                          # the next one to read
    arriving: Arriving | None = None
    aside: list[Arriving] = field(default_factory=list)     # whole messages nobody has asked for yet


class Messages(Lane):
    """One rank's messages.

    blocks: uint8 [from, to, BLOCKS, LINE + piece];  filled, room: `from * size + to`;  bells: by rank;  readers: the ranks that
    may read this one's memory, once they are known.
    """

    def __init__(self, rank: int, size: int, blocks: Tensor, filled: Semaphores, room: Semaphores, bells: Semaphores,
                 peers: Peers) -> None:
        super().__init__()
        self.rank, self.size, self.blocks = rank, size, blocks
        self.filled, self.room, self.bells, self.peers = filled, room, bells, peers
        self.memory = blocks.view(-1).numpy().data
        self.piece = blocks.size(3) - LINE
        self.readers: Sequence[int] = ()
        self.sends: dict[int, deque[Message]] = {peer: deque() for peer in range(size)}
        self.next_block = dict.fromkeys(range(size), 0)     # by peer: the next one to fill
        # by peer: of each block that it has not given back the message that it reads elsewhere, or None
        self.unread: dict[int, deque[Message | None]] = {peer: deque() for peer in range(size)}
        self.receives: list[Message] = []
        self.sources = {peer: Source() for peer in range(size) if peer != rank}

    def send(self, tensor: Tensor, to: int, tag: int, seconds: float) -> Message:
        message = Message(self, "send to", tensor, to, tag, seconds)
        start = message.bytes.data_ptr()
        if len(message.bytes) >= WHOLE and to in self.readers and readable(start):
            message.address = start
        self.sends[to].append(message)
        return self._asked(message)

    def receive(self, tensor: Tensor, frm: int | None, tag: int, seconds: float) -> Message:
        message = Message(self, "receive from", tensor, frm, tag, seconds)
        self.receives.append(message)
        return self._asked(message)

    def _asked(self, message: Message) -> Message:
        """Move what can be moved now; whoever is at the lane is told."""
        if self.lock.acquire(blocking=False):
            try:
                self._move_all()
            finally:
                self.lock.release()
        else:
            self.bells.post(self.rank)
        return message

    def make_way(self) -> None:
        self.bells.post(self.rank)

    def advance(self, work: Work, deadline: float, patient: bool) -> None:
        assert isinstance(work, Message)
        try:
            while not work.done:
                while self.bells.taken(self.rank):      # rung before this look at everything
                    pass
                if self._move_all() or work.done:
                    continue
                if patient and self.impatient:
                    return
                if self.bells.wait(self.rank, 0 if patient else self.peers.spins):
                    continue
                while not work.done and not self.peers.look(self.bells, self.rank, work.peer, deadline, work.__str__):
                    pass
        except GroupError as error:
            self._fail(error)

    def _fail(self, error: GroupError) -> None:
        arriving = [source.arriving.taker for source in self.sources.values() if source.arriving is not None]
        waiting: list[Any] = [self.receives, *self.sends.values(), *self.unread.values(), arriving]
        for message in [each for messages in waiting for each in messages if each is not None]:
            message.finish(error)
        for messages in waiting:
            messages.clear()

    def _move_all(self) -> bool:
        """Move every piece that can be moved now; was there any?"""
        moved = False
        try:
            for to, sends in self.sends.items():
                moved |= self._given_back(to)
                while sends and self._push(to, sends[0]):
                    moved = True
                    if sends[0].done or sends[0].address:
                        sends.popleft()
            for frm, source in self.sources.items():
                while self._wanted(frm, source) and self._pull(frm, source):
                    moved = True
        except GroupError as error:
            self._fail(error)
            return True
        return moved

    def _offset(self, pair: int, number: int) -> int:
        return (pair * BLOCKS + number) * (LINE + self.piece)

    # ---- out -----------------------------------------------------------------------------------------------------------
    def _given_back(self, to: int) -> bool:
        """Look which blocks a receiver has given back; was a message over by that?"""
        unread, pair, over = self.unread[to], self.rank * self.size + to, False
        while unread and self.room.taken(pair):
            message = unread.popleft()
            if message is not None:
                message.moved = len(message.bytes)
                message.finish()
                over = True
        return over

    def _push(self, to: int, message: Message) -> bool:
        """The next piece of a message into a free block, or where all of it is; False if no block is free."""
        unread = self.unread[to]
        if len(unread) == BLOCKS:
            return False
        pair, number = self.rank * self.size + to, self.next_block[to]
        self.next_block[to] = (number + 1) % BLOCKS
        total, address = len(message.bytes), message.address
        count = 0 if address else min(self.piece, total - message.moved)
        header = total, count, message.tag, DTYPES.index(message.dtype), address
        HEADER.pack_into(self.memory, self._offset(pair, number), *header)
        if count:
            piece = message.bytes[message.moved:message.moved + count]
            self.blocks[self.rank, to, number, LINE:LINE + count].copy_(piece)
        unread.append(message if address else None)
        self.filled.post(pair)
        self.bells.post(to)
        message.moved += count
        if message.moved >= total:
            message.finish()
        return True

    # ---- in ------------------------------------------------------------------------------------------------------------
    def _wanted(self, frm: int, source: Source) -> bool:
        """Give what was put aside to who asked for it; does somebody still want something of this rank?"""
        while source.aside:
            found = next(((place, each, taker) for place, each in enumerate(source.aside)
                          if (taker := self._taker(frm, each.tag)) is not None), None)
            if found is None:
                break
            place, each, taker = found
            del source.aside[place]
            self._match(frm, taker, each.tag, each.dtype, len(each.bytes))
            taker.bytes.copy_(each.bytes)
            self._arrived(frm, taker)
        return source.arriving is not None or any(each.peer in (None, frm) for each in self.receives)

    def _pull(self, frm: int, source: Source) -> bool:
        """The next piece out of a block; False if there is none."""
        pair = frm * self.size + self.rank
        if not self.filled.taken(pair):
            return False
        block = self.blocks[frm, self.rank, source.block]
        total, count, tag, dtype, address = HEADER.unpack_from(self.memory, self._offset(pair, source.block))
        source.block = (source.block + 1) % BLOCKS
        coming = source.arriving
        if coming is None:
            coming = source.arriving = self._begun(frm, tag, DTYPES[dtype], total)
        if address:
            self._read(frm, address, coming)
            count = total
        elif count:
            coming.bytes[coming.moved:coming.moved + count].copy_(block[LINE:LINE + count])
        self.room.post(pair)
        self.bells.post(frm)
        coming.moved += count
        if coming.moved >= total:
            source.arriving = None
            if coming.taker is None:
                source.aside.append(coming)
            else:
                self._arrived(frm, coming.taker)
        return True

    def _read(self, frm: int, address: int, coming: Arriving) -> None:
        """All of a message from where its sender has it: there as long as the sender lives and has not given up."""
        def late() -> str:
            return str(coming.taker or f"receive from rank {frm} of {len(coming.bytes)} bytes, tag {coming.tag}")
        try:
            read(self.peers.pids[frm], address, coming.bytes)
        except ProcessLookupError:                      # it is ending: its memory goes before its process is seen to have ended
            raise self.peers.ended(frm, late) from None
        except OSError as error:
            if self.peers.alive(frm):
                raise self.peers.give_up(f"rank {self.rank} cannot read rank {frm}'s memory ({error}) in {late()}") from None
        if not self.peers.alive(frm):
            raise self.peers.ended(frm, late)
        self.peers.check(late)

    def _begun(self, frm: int, tag: int, dtype: torch.dtype, total: int) -> Arriving:
        taker = self._taker(frm, tag)
        if taker is None:
            return Arriving(tag, dtype, torch.empty(total, dtype=torch.uint8), None)
        self._match(frm, taker, tag, dtype, total)
        self.receives.remove(taker)
        return Arriving(tag, dtype, taker.bytes, taker)

    def _taker(self, frm: int, tag: int) -> Message | None:
        """The first receive that asks for it."""
        return next((each for each in self.receives if each.peer in (None, frm) and each.tag == tag), None)

    def _match(self, frm: int, taker: Message, tag: int, dtype: torch.dtype, total: int) -> None:
        if dtype != taker.dtype or total != len(taker.bytes):
            raise self.peers.give_up(f"rank {frm} sends {str(dtype).removeprefix('torch.')}, {total} bytes, tag {tag}; "
                                     f"rank {self.rank} waits for it in {taker}")

    def _arrived(self, frm: int, taker: Message) -> None:
        if taker in self.receives:
            self.receives.remove(taker)
        if taker.copied is not None:
            taker.tensors[0].detach().copy_(taker.copied.view_as(taker.tensors[0]))
        taker.source = frm
        taker.finish()
