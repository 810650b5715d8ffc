"""Collectives of one group: what every rank writes into its area, and what it reads from the
others'.

All of them are exchanges: write into the own area, barrier, read from any area. Every rank has
two areas and takes them in turn, so one barrier per exchange is enough: who writes an area
again has passed one with everybody after they read it. Longer tensors go in pieces.

* all_reduce up to `Port.small` bytes, and of two ranks: one exchange, every rank adds all
contributions (with two, a slice that
  is added once would have to be written and read once more: no less to move, and one more
  barrier).
* all_reduce of more: every rank adds its slice straight from the others' areas into its next
area, meets, and all copy all
  slices. Always in rank order, so all ranks have the same bits, and the same as those of the
  small way.

Before the first barrier every rank writes what it does (operation, types, shapes) beside its
area, and afterwards reads what the others do: where two differ, all raise, and nobody waits for
what will not come.

Tensors here are flat (one dimension, contiguous).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paragrad.shm.reductions import Reduction
from paragrad.shm.region import LINE
from paragrad.shm.synchronization import Barrier, GroupError, Peers, Semaphores

# bytes up to which an all-reduce is one exchange, where every rank has a core to itself
SMALL = 2**16
# ... where ranks share cores, and a barrier costs as much as reading these
CROWDED = 2**19
TITLE = 512  # bytes in which a rank says what it does
# views of areas that are kept: making one costs more than copying a kilobyte
VIEWS = 4096


class Title(NamedTuple):
    """What a rank does, in words, and the digest by which ranks compare it."""

    words: str
    digest: bytes


@functools.lru_cache(maxsize=1024)
def titled(words: str) -> Title:
    return Title(words, hashlib.sha256(words.encode()).digest().ljust(LINE - 8, b"\0"))


class Port:
    """One rank's way into the areas of its group.

    areas: uint8 [2, size, area];  marks: bytes [2, size, LINE], what each rank does (a digest)
    and its how manieth collective that is;  titles: bytes [size, TITLE], the same in words,
    where they differ;  signals: semaphore `from * size + to`; crowded: ranks share cores.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        areas: Tensor,
        marks: memoryview,
        titles: memoryview,
        signals: Semaphores,
        peers: Peers,
        crowded: bool,
    ) -> None:
        self.rank = rank
        self.size = size
        self.areas = areas
        self.marks = marks
        self.titles = titles
        self.gate = Barrier(rank, size, signals, peers)
        self.peers = peers
        self.capacity = areas.size(2)  # bytes of one area
        self.small = CROWDED if crowded else SMALL
        # bytes of an area cut in one part per rank
        self.part = self.capacity // size // LINE * LINE
        # which of the two areas is written
        self.turn = 0
        self.number = 0  # collectives so far
        self.doing = titled("")
        lines = [[turn * size * LINE, (turn * size + rank) * LINE] for turn in (0, 1)]
        # by turn
        self.own_mark = [slice(own, own + LINE) for _, own in lines]
        self.all_marks = [slice(first, first + size * LINE) for first, _ in lines]
        # what all ranks must be doing, until that was seen
        self.mark: bytes | None = None
        self.deadline = 0.0
        self.patient = False
        self.views: dict[tuple[int, int, torch.dtype, int, int], Tensor] = {}

    def begin(self, doing: Title, deadline: float, patient: bool = False) -> None:
        """A collective begins. patient: nobody waits for it, so do not spin."""
        self.number = self.number + 1
        number = self.number
        self.doing = doing
        self.deadline = deadline
        self.patient = patient
        # who comes late to a group that was given up must not let others go on
        self.peers.check(self.late)
        self.mark = doing.digest + number.to_bytes(8, "little")
        self.marks[self.own_mark[self.turn]] = self.mark

    def barrier(self) -> None:
        """Until every rank has come here: what each wrote before, all may read after. Raises
        GroupError.
        """
        self.gate.wait(self.deadline, self.late, self.patient)
        turn, self.turn = self.turn, 1 - self.turn
        if self.mark is not None:
            agree = self.marks[self.all_marks[turn]] == self.mark * self.size
            self.mark = None
            if not agree:
                raise self._disagree()

    def interrupted(self) -> None:
        """Ctrl-C within a collective: the others must not wait for this rank."""
        self.peers.give_up(f"rank {self.rank} was interrupted in {self.late()}")

    def late(self) -> str:
        """What this rank is doing, and who has not begun it: read without a signal, for a
        message only.
        """
        numbers = [
            max(
                int.from_bytes(self.marks[(turn * self.size + rank + 1) * LINE - 8 :][:8], "little")
                for turn in (0, 1)
            )
            for rank in range(self.size)
        ]
        absent = [f"rank {rank}" for rank, number in enumerate(numbers) if number < self.number]
        missing = (
            f", to which {', '.join(absent)} {'has' if len(absent) == 1 else 'have'} not come"
            if absent
            else ""
        )
        return f"{self.doing.words}, collective {self.number} of its group of {self.size}{missing}"

    def own(self, dtype: torch.dtype, count: int, at: int = 0) -> Tensor:
        """`count` elements of the own area from byte `at` on, to write before the next
        barrier.
        """
        return self.view(self.turn, self.rank, dtype, count, at)

    def of(self, rank: int, dtype: torch.dtype, count: int, at: int = 0) -> Tensor:
        """The same of what a rank wrote before the last barrier."""
        return self.view(1 - self.turn, rank, dtype, count, at)

    def all_of(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """`of` every rank."""
        return [self.of(rank, dtype, count) for rank in range(self.size)]

    def put(self, flat: Tensor, start: int = 0, stop: int | None = None, at: int = 0) -> None:
        """Write elements start to stop, as far as there are."""
        if start or stop is not None:
            flat = flat[start:stop]
        if count := flat.numel():
            self.own(flat.dtype, count, at).copy_(flat)

    def take(
        self, rank: int, flat: Tensor, start: int = 0, stop: int | None = None, at: int = 0
    ) -> None:
        """Read what a rank has put into elements start to stop, as far as there are."""
        part = flat[start:stop]
        if count := part.numel():
            part.copy_(self.of(rank, flat.dtype, count, at))

    def view(self, turn: int, rank: int, dtype: torch.dtype, count: int, at: int) -> Tensor:
        key = turn, rank, dtype, count, at
        view = self.views.get(key)
        if view is None:
            if len(self.views) >= VIEWS:
                self.views.clear()
            # who asks first may be in it; others, who write, come later
            with torch.inference_mode(False):
                view = self.areas[turn, rank, at : at + count * dtype.itemsize].view(dtype)
                self.views[key] = view
        return view

    def _disagree(self) -> GroupError:
        """All have met here and see it; they meet once more to say it in words, and may go on
        together.
        """
        text = self.doing.words.encode()[:TITLE].ljust(TITLE, b"\0")
        self.titles[self.rank * TITLE : (self.rank + 1) * TITLE] = text
        self.barrier()
        titles = [
            bytes(self.titles[rank * TITLE :][:TITLE]).rstrip(b"\0").decode(errors="replace")
            for rank in range(self.size)
        ]
        other = next(
            (rank for rank, title in enumerate(titles) if title != titles[self.rank]),
            (self.rank + 1) % self.size,
        )
        return GroupError(
            f"ranks disagree in collective {self.number} of their group: rank {self.rank} does "
            f"{titles[self.rank]}, rank {other} does {titles[other]}"
        )


class Short:
    """The sum of a short tensor over all ranks, with the views of the areas made beforehand."""

    def __init__(self, port: Port, title: Title, tensor: Tensor) -> None:
        self.title = title
        dtype = tensor.dtype
        count = tensor.numel()
        shape = tensor.shape
        with torch.inference_mode(False):
            self.views = [
                [port.view(turn, rank, dtype, count, 0).view(shape) for rank in range(port.size)]
                for turn in (0, 1)
            ]

    def sum(self, tensor: Tensor, port: Port) -> None:
        """As `all_reduce`."""
        views = self.views[port.turn]
        views[port.rank].copy_(tensor)
        port.barrier()
        if port.size == 2:
            tensor.add_(views[1 - port.rank])  # a + b and b + a are the same bits
        elif port.size > 2:
            torch.add(views[0], views[1], out=tensor)
            for view in views[2:]:
                tensor.add_(view)


def pieces(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most `limit` elements; one of none where there is nothing:
    ranks meet all the same.
    """
    for start in range(0, max(count, 1), limit):
        yield start, min(start + limit, count)


# ---- the operations --------------------------------------------------------------------------
def barrier(port: Port) -> None:
    port.barrier()


def all_reduce(port: Port, flat: Tensor, reduction: Reduction, root: int | None = None) -> None:
    """Every rank's flat becomes the reduction of all; with a root only that rank's."""
    count = flat.numel()
    dtype = flat.dtype
    ranks = range(port.size)
    limit = port.capacity // dtype.itemsize
    wants = root is None or root == port.rank
    if port.size == 2 or count * dtype.itemsize <= port.small:
        for start, stop in pieces(count, limit):
            part = flat if stop - start == count else flat[start:stop]
            port.put(part)
            port.barrier()
            if wants and stop > start:
                reduction.of(
                    part,
                    port.all_of(dtype, stop - start)
                    if port.size > 2
                    else [
                        part if rank == port.rank else port.of(rank, dtype, stop - start)
                        for rank in ranks
                    ],
                )
        return
    for start, stop in pieces(count, limit):
        part = flat[start:stop]
        cuts = [len(part) * rank // port.size for rank in range(port.size + 1)]
        low = cuts[port.rank]
        high = cuts[port.rank + 1]
        port.put(part, 0, low)
        port.put(part, high, None, at=high * dtype.itemsize)
        port.barrier()
        slice_ = part[low:high]
        at = low * dtype.itemsize
        if high > low:
            reduction.of(
                port.own(dtype, high - low, at),
                [
                    slice_ if rank == port.rank else port.of(rank, dtype, high - low, at)
                    for rank in ranks
                ],
            )
        port.barrier()
        if wants:
            for rank in ranks:
                port.take(rank, part, cuts[rank], cuts[rank + 1], cuts[rank] * dtype.itemsize)


def broadcast(port: Port, flat: Tensor, root: int) -> None:
    for start, stop in pieces(flat.numel(), port.capacity // flat.dtype.itemsize):
        if port.rank == root:
            port.put(flat, start, stop)
        port.barrier()
        if port.rank != root:
            port.take(root, flat, start, stop)


def all_gather(port: Port, outputs: Sequence[Tensor], flat: Tensor) -> None:
    """outputs[rank] becomes that rank's flat; they may differ in length."""
    for start, stop in pieces(max(map(len, outputs)), port.capacity // flat.dtype.itemsize):
        port.put(flat, start, stop)
        port.barrier()
        for rank, output in enumerate(outputs):
            port.take(rank, output, start, stop)


def gather(port: Port, outputs: Sequence[Tensor] | None, flat: Tensor) -> None:
    """The same, at the root alone; the others give None, and all flats are of one length."""
    for start, stop in pieces(len(flat), port.capacity // flat.dtype.itemsize):
        port.put(flat, start, stop)
        port.barrier()
        for rank, output in enumerate(outputs or ()):
            port.take(rank, output, start, stop)


def scatter(port: Port, flat: Tensor, inputs: Sequence[Tensor] | None, root: int) -> None:
    """Every rank's flat becomes the root's inputs[rank], all of one length."""
    for start, stop in pieces(len(flat), port.part // flat.dtype.itemsize):
        for rank, each in enumerate(inputs or ()):
            port.put(each, start, stop, rank * port.part)
        port.barrier()
        port.take(root, flat, start, stop, port.rank * port.part)


def reduce_scatter(
    port: Port, flat: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> None:
    """flat becomes the reduction of all ranks' inputs[own rank]; inputs may differ in length
    among themselves.
    """
    dtype = flat.dtype
    for start, stop in pieces(max(map(len, inputs)), port.part // dtype.itemsize):
        for rank, each in enumerate(inputs):
            # the own one too: flat may lie in it
            port.put(each, start, stop, rank * port.part)
        port.barrier()
        part = flat[start:stop]
        if len(part):
            reduction.of(
                part,
                [
                    port.of(rank, dtype, len(part), port.rank * port.part)
                    for rank in range(port.size)
                ],
            )


def all_to_all(port: Port, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """outputs[rank] becomes that rank's inputs[own rank]; every pair of ranks may have a length
    of its own.
    """
    lengths = torch.tensor([len(each) for each in inputs])
    table = [torch.empty_like(lengths) for _ in inputs]
    all_gather(port, table, lengths)
    for rank, output in enumerate(outputs):
        if table[rank][port.rank] != len(output):
            raise port.peers.give_up(
                f"rank {rank} sends {int(table[rank][port.rank])} elements to rank {port.rank}, "
                f"which "
                f"takes {len(output)}, in {port.late()}"
            )
    for start, stop in pieces(int(torch.stack(table).max()), port.part // inputs[0].dtype.itemsize):
        for rank, each in enumerate(inputs):
            port.put(each, start, stop, rank * port.part)
        port.barrier()
        for rank, output in enumerate(outputs):
            port.take(rank, output, start, stop, port.rank * port.part)
