"""Collectives of one group: what every rank writes into its area, and what it reads from the others'.

All of them are exchanges: write into the own area, meet, read from any area. Every rank has two areas and takes them in
turn, so one meeting per exchange is enough: who writes an area again has met everybody after they read it. Longer tensors go in
pieces.

* all_reduce up to `SMALL` bytes: one exchange, every rank adds all contributions.
* all_reduce of more: every rank adds its slice straight from the others' areas into its next area, meets, and all copy all
  slices. Always in rank order, so all ranks have the same bits, and the same as those of the small way.

Before the first meeting every rank writes what it does (operation, types, shapes) beside its area, and afterwards reads what
the others do: where two differ, all raise, and nobody waits for what will not come.

Tensors here are flat (one dimension, contiguous).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paragrad.backends.shm.reductions import Reduction
from paragrad.backends.shm.region import LINE
from paragrad.backends.shm.signals import GroupError, Meeting, Peers, Semaphores

SMALL = 32 * 2**10      # bytes up to which an all-reduce is one exchange
TITLE = 256             # bytes in which a rank says what it does
VIEWS = 4096            # views of areas that are kept: making one costs more than copying a kilobyte


class Port:
    """One rank's way into the areas of its group.

    areas: uint8 [2, size, area];  titles: bytes [2, size, TITLE];  numbers: by rank, collectives it has begun;  signals:
    semaphore `from * size + to`.
    """

    def __init__(self, rank: int, size: int, areas: Tensor, titles: memoryview, numbers: memoryview, signals: Semaphores,
                 peers: Peers) -> None:
        self.rank, self.size, self.areas, self.titles, self.numbers = rank, size, areas, titles, numbers
        self.meeting, self.peers = Meeting(rank, size, signals, peers), peers
        self.capacity = areas.size(2)                           # bytes of one area
        self.part = self.capacity // size // LINE * LINE        # bytes of an area cut in one part per rank
        self.turn = 0                                           # which of the two areas is written
        self.number = 0                                         # collectives so far
        self.doing = ""
        self.title: bytes | None = None                         # what all ranks must be doing, until that was seen
        self.deadline, self.patient = 0.0, False
        self.views: dict[tuple[int, int, torch.dtype, int, int], Tensor] = {}

    def begin(self, doing: str, deadline: float, patient: bool = False) -> None:
        """A collective begins. patient: nobody waits for it, so do not spin."""
        self.number += 1
        self.numbers[self.rank] = self.number
        self.doing, self.deadline, self.patient = doing, deadline, patient
        self.peers.check(self.late)             # who comes late to a group that was given up must not let others go on
        self.title = _title(doing)
        place = self._place(self.rank)
        self.titles[place:place + TITLE] = self.title

    def meet(self) -> None:
        """Until every rank has come here: what each wrote before, all may read after. Raises GroupError."""
        self.meeting.meet(self.deadline, self.late, self.patient)
        if self.title is not None:
            first = self._place(0)
            if self.titles[first:first + self.size * TITLE] != self.title * self.size:
                raise self._disagree()
            self.title = None
        self.turn = 1 - self.turn

    def late(self) -> str:
        """What this rank is doing, and who has not begun it: read without a signal, for a message only."""
        absent = [f"rank {rank}" for rank, number in enumerate(self.numbers) if number < self.number]
        missing = f", to which {', '.join(absent)} {'has' if len(absent) == 1 else 'have'} not come" if absent else ""
        return f"{self.doing}, collective {self.number} of its group of {self.size}{missing}"

    def own(self, dtype: torch.dtype, count: int, at: int = 0) -> Tensor:
        """`count` elements of the own area from byte `at` on, to write before the next meeting."""
        return self._view(self.turn, self.rank, dtype, count, at)

    def of(self, rank: int, dtype: torch.dtype, count: int, at: int = 0) -> Tensor:
        """The same of what a rank wrote before the last meeting."""
        return self._view(1 - self.turn, rank, dtype, count, at)

    def put(self, flat: Tensor, start: int = 0, stop: int | None = None, at: int = 0) -> None:
        """Write elements start to stop, as far as there are."""
        if start or stop is not None:
            flat = flat[start:stop]
        if count := flat.numel():
            self.own(flat.dtype, count, at).copy_(flat)

    def take(self, rank: int, flat: Tensor, start: int = 0, stop: int | None = None, at: int = 0) -> None:
        """Read what a rank has put into elements start to stop, as far as there are."""
        part = flat[start:stop]
        if count := part.numel():
            part.copy_(self.of(rank, flat.dtype, count, at))

    def _view(self, turn: int, rank: int, dtype: torch.dtype, count: int, at: int) -> Tensor:
        key = turn, rank, dtype, count, at
        view = self.views.get(key)
        if view is None:
            if len(self.views) >= VIEWS:
                self.views.clear()
            view = self.views[key] = self.areas[turn, rank, at:at + count * dtype.itemsize].view(dtype)
        return view

    def _place(self, rank: int) -> int:
        return (self.turn * self.size + rank) * TITLE

    def _disagree(self) -> GroupError:
        titles = [bytes(self.titles[self._place(rank):][:TITLE]).rstrip(b"\0").decode() for rank in range(self.size)]
        self.turn, self.title = 1 - self.turn, None             # all have met here, and go on together
        other = next(rank for rank, title in enumerate(titles) if title != titles[self.rank])
        return GroupError(f"ranks disagree in collective {self.number} of their group: rank {self.rank} does "
                          f"{titles[self.rank]}, rank {other} does {titles[other]}")


@functools.lru_cache(maxsize=1024)
def _title(doing: str) -> bytes:
    text = doing.encode()
    if len(text) > TITLE:                                       # its digest tells two long ones apart
        text = text[:TITLE - 20] + b" ... " + hashlib.sha256(text).hexdigest()[:15].encode()
    return text.ljust(TITLE, b"\0")


def pieces(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most `limit` elements; one of none where there is nothing: ranks meet all the same."""
    for start in range(0, max(count, 1), limit):
        yield start, min(start + limit, count)


# ---- the operations --------------------------------------------------------------------------------------------------------
def barrier(port: Port) -> None:
    port.meet()


def all_reduce(port: Port, flat: Tensor, reduction: Reduction, root: int | None = None) -> None:
    """Every rank's flat becomes the reduction of all; with a root only that rank's."""
    count, dtype, ranks = flat.numel(), flat.dtype, range(port.size)
    wants = root in (None, port.rank)
    if count * dtype.itemsize <= SMALL:
        port.put(flat)
        port.meet()
        if wants and count:
            reduction.of(flat, [port.of(rank, dtype, count) for rank in ranks])
        return
    for start, stop in pieces(count, port.capacity // dtype.itemsize):
        part = flat[start:stop]
        cuts = [len(part) * rank // port.size for rank in range(port.size + 1)]
        low, high = cuts[port.rank], cuts[port.rank + 1]
        port.put(part, 0, low)
        port.put(part, high, None, at=high * dtype.itemsize)
        port.meet()
        slice_, at = part[low:high], low * dtype.itemsize
        if high > low:
            reduction.of(port.own(dtype, high - low, at), [
                slice_ if rank == port.rank else port.of(rank, dtype, high - low, at) for rank in ranks])
        port.meet()
        if wants:
            for rank in ranks:
                port.take(rank, part, cuts[rank], cuts[rank + 1], cuts[rank] * dtype.itemsize)


def broadcast(port: Port, flat: Tensor, root: int) -> None:
    for start, stop in pieces(flat.numel(), port.capacity // flat.dtype.itemsize):
        if port.rank == root:
            port.put(flat, start, stop)
        port.meet()
        if port.rank != root:
            port.take(root, flat, start, stop)


def all_gather(port: Port, outputs: Sequence[Tensor], flat: Tensor) -> None:
    """outputs[rank] becomes that rank's flat; they may differ in length."""
    for start, stop in pieces(max(map(len, outputs)), port.capacity // flat.dtype.itemsize):
        port.put(flat, start, stop)
        port.meet()
        for rank, output in enumerate(outputs):
            port.take(rank, output, start, stop)


def gather(port: Port, outputs: Sequence[Tensor] | None, flat: Tensor) -> None:
    """The same, at the root alone; the others give None, and all flats are of one length."""
    for start, stop in pieces(len(flat), port.capacity // flat.dtype.itemsize):
        port.put(flat, start, stop)
        port.meet()
        for rank, output in enumerate(outputs or ()):
            port.take(rank, output, start, stop)


def scatter(port: Port, flat: Tensor, inputs: Sequence[Tensor] | None, root: int) -> None:
    """Every rank's flat becomes the root's inputs[rank], all of one length."""
    for start, stop in pieces(len(flat), port.part // flat.dtype.itemsize):
        for rank, each in enumerate(inputs or ()):
            port.put(each, start, stop, rank * port.part)
        port.meet()
        port.take(root, flat, start, stop, port.rank * port.part)


def reduce_scatter(port: Port, flat: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    """flat becomes the reduction of all ranks' inputs[own rank]; inputs may differ in length among themselves."""
    dtype = flat.dtype
    for start, stop in pieces(max(map(len, inputs)), port.part // dtype.itemsize):
        for rank, each in enumerate(inputs):
            port.put(each, start, stop, rank * port.part)       # the own one too: flat may lie in it
        port.meet()
        part = flat[start:stop]
        if len(part):
            reduction.of(part, [port.of(rank, dtype, len(part), port.rank * port.part) for rank in range(port.size)])


def all_to_all(port: Port, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """outputs[rank] becomes that rank's inputs[own rank]; every pair of ranks may have a length of its own."""
    lengths = torch.tensor([len(each) for each in inputs])
    table = [torch.empty_like(lengths) for _ in inputs]
    all_gather(port, table, lengths)
    for rank, output in enumerate(outputs):
        if table[rank][port.rank] != len(output):
            raise port.peers.give_up(f"rank {rank} sends {int(table[rank][port.rank])} elements to rank {port.rank}, which "
                                     f"takes {len(output)}, in {port.late()}")
    for start, stop in pieces(int(torch.stack(table).max()), port.part // inputs[0].dtype.itemsize):
        for rank, each in enumerate(inputs):
            port.put(each, start, stop, rank * port.part)
        port.meet()
        for rank, output in enumerate(outputs):
            port.take(rank, output, start, stop, port.rank * port.part)
