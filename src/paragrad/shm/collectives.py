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
from paragrad.shm.region import CACHE_LINE_BYTES
from paragrad.shm.synchronization import DisseminationBarrier, GroupError, Peers, Semaphores

# bytes up to which an all-reduce is one exchange, where every rank has a core to itself
SMALL_BYTES = 2**16
# ... where ranks share cores, and a barrier costs as much as reading these
CROWDED_SMALL_BYTES = 2**19
TITLE_BYTES = 512  # bytes in which a rank says what it does
# views of areas that are kept: making one costs more than copying a kilobyte
MAX_VIEWS = 4096


class CollectiveTitle(NamedTuple):
    """What a rank does, in words, and the digest by which ranks compare it."""

    text: str
    digest: bytes


@functools.lru_cache(maxsize=1024)
def make_title(text: str) -> CollectiveTitle:
    return CollectiveTitle(
        text, hashlib.sha256(text.encode()).digest().ljust(CACHE_LINE_BYTES - 8, b"\0")
    )


class GroupAreas:
    """One rank's way into the areas of its group.

    areas: uint8 [2, size, area];  marks: bytes [2, size, LINE], what each rank does (a digest)
    and its how manieth collective that is;  titles: bytes [size, TITLE], the same in words,
    where they differ;  signals: semaphore `from * size + to`; crowded: ranks share cores.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Tensor,
        marks: memoryview,
        titles: memoryview,
        signals: Semaphores,
        peers: Peers,
        crowded: bool,
    ) -> None:
        self.rank = rank
        self.size = size
        self.memory = memory
        self.marks = marks
        self.titles = titles
        self.group_barrier = DisseminationBarrier(rank, size, signals, peers)
        self.peers = peers
        self.area_bytes = memory.size(2)  # bytes of one area
        self.small_bytes = CROWDED_SMALL_BYTES if crowded else SMALL_BYTES
        # bytes of an area cut in one part per rank
        self.part_bytes = self.area_bytes // size // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        # which of the two areas is written
        self.turn = 0
        self.collective_count = 0  # collectives so far
        self.title = make_title("")
        lines = [
            [turn * size * CACHE_LINE_BYTES, (turn * size + rank) * CACHE_LINE_BYTES]
            for turn in (0, 1)
        ]
        # by turn
        self.own_mark = [slice(own, own + CACHE_LINE_BYTES) for _, own in lines]
        self.all_marks = [slice(first, first + size * CACHE_LINE_BYTES) for first, _ in lines]
        # what all ranks must be doing, until that was seen
        self.expected_mark: bytes | None = None
        self.deadline = 0.0
        self.is_background = False
        self.cached_views: dict[tuple[int, int, torch.dtype, int, int], Tensor] = {}

    def begin_collective(
        self, title: CollectiveTitle, deadline: float, is_background: bool = False
    ) -> None:
        """A collective begins. patient: nobody waits for it, so do not spin."""
        self.collective_count = self.collective_count + 1
        number = self.collective_count
        self.title = title
        self.deadline = deadline
        self.is_background = is_background
        # who comes late to a group that was given up must not let others go on
        self.peers.check_abandoned(self.describe_progress)
        self.expected_mark = title.digest + number.to_bytes(8, "little")
        self.marks[self.own_mark[self.turn]] = self.expected_mark

    def barrier(self) -> None:
        """Until every rank has come here: what each wrote before, all may read after. Raises
        GroupError.
        """
        self.group_barrier.wait(self.deadline, self.describe_progress, self.is_background)
        turn, self.turn = self.turn, 1 - self.turn
        if self.expected_mark is not None:
            agree = self.marks[self.all_marks[turn]] == self.expected_mark * self.size
            self.expected_mark = None
            if not agree:
                raise self._make_mismatch_error()

    def report_interrupt(self) -> None:
        """Ctrl-C within a collective: the others must not wait for this rank."""
        self.peers.abandon_group(f"rank {self.rank} was interrupted in {self.describe_progress()}")

    def describe_progress(self) -> str:
        """What this rank is doing, and who has not begun it: read without a signal, for a
        message only.
        """
        numbers = [
            max(
                int.from_bytes(
                    self.marks[(turn * self.size + rank + 1) * CACHE_LINE_BYTES - 8 :][:8], "little"
                )
                for turn in (0, 1)
            )
            for rank in range(self.size)
        ]
        absent = [
            f"rank {rank}" for rank, number in enumerate(numbers) if number < self.collective_count
        ]
        missing = (
            f", to which {', '.join(absent)} {'has' if len(absent) == 1 else 'have'} not come"
            if absent
            else ""
        )
        return (
            f"{self.title.text}, collective {self.collective_count} of its group of "
            f"{self.size}{missing}"
        )

    def view_own(self, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
        """`count` elements of the own area from byte `at` on, to write before the next
        barrier.
        """
        return self.get_view(self.turn, self.rank, dtype, count, offset)

    def view_rank(self, rank: int, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
        """The same of what a rank wrote before the last barrier."""
        return self.get_view(1 - self.turn, rank, dtype, count, offset)

    def view_all_ranks(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """`of` every rank."""
        return [self.view_rank(rank, dtype, count) for rank in range(self.size)]

    def write_own(
        self, flat: Tensor, start: int = 0, stop: int | None = None, offset: int = 0
    ) -> None:
        """Write elements start to stop, as far as there are."""
        if start or stop is not None:
            flat = flat[start:stop]
        if count := flat.numel():
            self.view_own(flat.dtype, count, offset).copy_(flat)

    def read_rank(
        self, rank: int, flat: Tensor, start: int = 0, stop: int | None = None, offset: int = 0
    ) -> None:
        """Read what a rank has put into elements start to stop, as far as there are."""
        part = flat[start:stop]
        if count := part.numel():
            part.copy_(self.view_rank(rank, flat.dtype, count, offset))

    def get_view(self, turn: int, rank: int, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        key = turn, rank, dtype, count, offset
        view = self.cached_views.get(key)
        if view is None:
            if len(self.cached_views) >= MAX_VIEWS:
                self.cached_views.clear()
            # who asks first may be in it; others, who write, come later
            with torch.inference_mode(False):
                view = self.memory[turn, rank, offset : offset + count * dtype.itemsize].view(dtype)
                self.cached_views[key] = view
        return view

    def _make_mismatch_error(self) -> GroupError:
        """All have met here and see it; they meet once more to say it in words, and may go on
        together.
        """
        text = self.title.text.encode()[:TITLE_BYTES].ljust(TITLE_BYTES, b"\0")
        self.titles[self.rank * TITLE_BYTES : (self.rank + 1) * TITLE_BYTES] = text
        self.barrier()
        titles = [
            bytes(self.titles[rank * TITLE_BYTES :][:TITLE_BYTES])
            .rstrip(b"\0")
            .decode(errors="replace")
            for rank in range(self.size)
        ]
        other = next(
            (rank for rank, title in enumerate(titles) if title != titles[self.rank]),
            (self.rank + 1) % self.size,
        )
        return GroupError(
            f"ranks disagree in collective {self.collective_count} of their group: rank "
            f"{self.rank} does "
            f"{titles[self.rank]}, rank {other} does {titles[other]}"
        )


class ShortSum:
    """The sum of a short tensor over all ranks, with the views of the areas made beforehand."""

    def __init__(self, areas: GroupAreas, title: CollectiveTitle, tensor: Tensor) -> None:
        self.title = title
        dtype = tensor.dtype
        count = tensor.numel()
        shape = tensor.shape
        with torch.inference_mode(False):
            self.views = [
                [
                    areas.get_view(turn, rank, dtype, count, 0).view(shape)
                    for rank in range(areas.size)
                ]
                for turn in (0, 1)
            ]

    def sum_ranks(self, tensor: Tensor, areas: GroupAreas) -> None:
        """As `all_reduce`."""
        views = self.views[areas.turn]
        views[areas.rank].copy_(tensor)
        areas.barrier()
        if areas.size == 2:
            tensor.add_(views[1 - areas.rank])  # a + b and b + a are the same bits
        elif areas.size > 2:
            torch.add(views[0], views[1], out=tensor)
            for view in views[2:]:
                tensor.add_(view)


def split_range(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most `limit` elements; one of none where there is nothing:
    ranks meet all the same.
    """
    for start in range(0, max(count, 1), limit):
        yield start, min(start + limit, count)


# ---- the operations --------------------------------------------------------------------------
def run_barrier(areas: GroupAreas) -> None:
    areas.barrier()


def all_reduce_flat(
    areas: GroupAreas, flat: Tensor, reduction: Reduction, root: int | None = None
) -> None:
    """Every rank's flat becomes the reduction of all; with a root only that rank's."""
    count = flat.numel()
    dtype = flat.dtype
    ranks = range(areas.size)
    limit = areas.area_bytes // dtype.itemsize
    wants = root is None or root == areas.rank
    if areas.size == 2 or count * dtype.itemsize <= areas.small_bytes:
        for start, stop in split_range(count, limit):
            part = flat if stop - start == count else flat[start:stop]
            areas.write_own(part)
            areas.barrier()
            if wants and stop > start:
                reduction.combine(
                    part,
                    areas.view_all_ranks(dtype, stop - start)
                    if areas.size > 2
                    else [
                        part if rank == areas.rank else areas.view_rank(rank, dtype, stop - start)
                        for rank in ranks
                    ],
                )
        return
    for start, stop in split_range(count, limit):
        part = flat[start:stop]
        cuts = [len(part) * rank // areas.size for rank in range(areas.size + 1)]
        low = cuts[areas.rank]
        high = cuts[areas.rank + 1]
        areas.write_own(part, 0, low)
        areas.write_own(part, high, None, offset=high * dtype.itemsize)
        areas.barrier()
        slice_ = part[low:high]
        at = low * dtype.itemsize
        if high > low:
            reduction.combine(
                areas.view_own(dtype, high - low, at),
                [
                    slice_ if rank == areas.rank else areas.view_rank(rank, dtype, high - low, at)
                    for rank in ranks
                ],
            )
        areas.barrier()
        if wants:
            for rank in ranks:
                areas.read_rank(rank, part, cuts[rank], cuts[rank + 1], cuts[rank] * dtype.itemsize)


def broadcast_flat(areas: GroupAreas, flat: Tensor, root: int) -> None:
    for start, stop in split_range(flat.numel(), areas.area_bytes // flat.dtype.itemsize):
        if areas.rank == root:
            areas.write_own(flat, start, stop)
        areas.barrier()
        if areas.rank != root:
            areas.read_rank(root, flat, start, stop)


def all_gather_flat(areas: GroupAreas, outputs: Sequence[Tensor], flat: Tensor) -> None:
    """outputs[rank] becomes that rank's flat; they may differ in length."""
    for start, stop in split_range(max(map(len, outputs)), areas.area_bytes // flat.dtype.itemsize):
        areas.write_own(flat, start, stop)
        areas.barrier()
        for rank, output in enumerate(outputs):
            areas.read_rank(rank, output, start, stop)


def gather_flat(areas: GroupAreas, outputs: Sequence[Tensor] | None, flat: Tensor) -> None:
    """The same, at the root alone; the others give None, and all flats are of one length."""
    for start, stop in split_range(len(flat), areas.area_bytes // flat.dtype.itemsize):
        areas.write_own(flat, start, stop)
        areas.barrier()
        for rank, output in enumerate(outputs or ()):
            areas.read_rank(rank, output, start, stop)


def scatter_flat(
    areas: GroupAreas, flat: Tensor, inputs: Sequence[Tensor] | None, root: int
) -> None:
    """Every rank's flat becomes the root's inputs[rank], all of one length."""
    for start, stop in split_range(len(flat), areas.part_bytes // flat.dtype.itemsize):
        for rank, each in enumerate(inputs or ()):
            areas.write_own(each, start, stop, rank * areas.part_bytes)
        areas.barrier()
        areas.read_rank(root, flat, start, stop, areas.rank * areas.part_bytes)


def reduce_scatter_flat(
    areas: GroupAreas, flat: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> None:
    """flat becomes the reduction of all ranks' inputs[own rank]; inputs may differ in length
    among themselves.
    """
    dtype = flat.dtype
    for start, stop in split_range(max(map(len, inputs)), areas.part_bytes // dtype.itemsize):
        for rank, each in enumerate(inputs):
            # the own one too: flat may lie in it
            areas.write_own(each, start, stop, rank * areas.part_bytes)
        areas.barrier()
        part = flat[start:stop]
        if len(part):
            reduction.combine(
                part,
                [
                    areas.view_rank(rank, dtype, len(part), areas.rank * areas.part_bytes)
                    for rank in range(areas.size)
                ],
            )


def all_to_all_flat(areas: GroupAreas, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """outputs[rank] becomes that rank's inputs[own rank]; every pair of ranks may have a length
    of its own.
    """
    lengths = torch.tensor([len(each) for each in inputs])
    table = [torch.empty_like(lengths) for _ in inputs]
    all_gather_flat(areas, table, lengths)
    for rank, output in enumerate(outputs):
        if table[rank][areas.rank] != len(output):
            raise areas.peers.abandon_group(
                f"rank {rank} sends {int(table[rank][areas.rank])} elements to rank {areas.rank}, "
                f"which "
                f"takes {len(output)}, in {areas.describe_progress()}"
            )
    for start, stop in split_range(
        int(torch.stack(table).max()), areas.part_bytes // inputs[0].dtype.itemsize
    ):
        for rank, each in enumerate(inputs):
            areas.write_own(each, start, stop, rank * areas.part_bytes)
        areas.barrier()
        for rank, output in enumerate(outputs):
            areas.read_rank(rank, output, start, stop, areas.rank * areas.part_bytes)
