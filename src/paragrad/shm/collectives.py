"""Collectives of one group: what each rank writes into its area, and reads from other areas.

All collectives are exchanges: write into the own area, pass a barrier, read from any area. A rank
has two areas and uses them in turn, so an exchange needs only one barrier. When a rank writes an
area again, all ranks have passed a barrier since they read it. Longer tensors go in pieces.

* all_reduce of at most `GroupAreas.small_bytes` bytes, and of two ranks: one exchange, in which
  every rank adds all contributions. With two ranks, a slice that is added once would have to be
  written and read once more. This moves as many bytes and needs one more barrier.
* all_reduce of more bytes: every rank adds its slice from the other areas into its next area. After
  a barrier all ranks copy all slices. The order of the additions is the rank order. All ranks
  therefore get the same bits, and the same bits as in one exchange.

Before the first barrier every rank writes what it does (operation, types, shapes) beside its area,
and afterwards reads what the others do. If two differ, all ranks raise, and no rank waits for data
that never comes.

Tensors here are flat (one dimension, contiguous).
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paragrad.shm.reductions import Reduction
from paragrad.shm.region import CACHE_LINE_BYTES
from paragrad.shm.synchronization import DisseminationBarrier, GroupError, Peers, Semaphores

# up to this size an all-reduce is one exchange, if every rank has a core of its own
SMALL_BYTES = 2**16
# the same if ranks share cores: a barrier then costs as much as the reading of these bytes
CROWDED_SMALL_BYTES = 2**19
TITLE_BYTES = 512  # the longest text in which a rank describes what it does
MAX_VIEWS = 4096


class CollectiveTitle(NamedTuple):
    """The description of a collective.

    Attributes:
        text: The description in words.
        digest: A digest of it, by which ranks compare what they do.
    """

    text: str
    digest: bytes


@functools.lru_cache(maxsize=1024)
def make_title(text: str) -> CollectiveTitle:
    """Make the title of a collective.

    Args:
        text: The description in words.
    """
    return CollectiveTitle(
        text, hashlib.sha256(text.encode()).digest().ljust(CACHE_LINE_BYTES - 8, b"\0")
    )


class GroupAreas:
    """One rank's access to the areas of its group.

    Attributes:
        rank: The number of this rank.

        size: The number of ranks.

        memory: The areas, uint8 [2, size, bytes of an area].

        marks: bytes [2, size, CACHE_LINE_BYTES]: the digest of what each rank does, and the number
            of this collective.

        titles: bytes [size, TITLE_BYTES]: the same in words, if ranks disagree.

        group_barrier: The barrier of the group.

        peers: The processes of the other ranks.

        area_bytes: The size of an area.

        small_bytes: The largest all-reduce that is one exchange.

        part_bytes: The size of a part, if an area has one part for each rank.

        turn: Which of the two areas is written now.

        collective_count: The number of collectives so far.

        title: The current collective.

        own_mark: The slice of this rank's mark, by turn.

        all_marks: The slice of all ranks' marks, by turn.

        expected_mark: The mark that all ranks must have; None once it has been compared.

        deadline: The time limit of the current collective, on the monotonic clock.

        is_background: No caller waits for the current collective, so waits do not spin.

        cached_views: Views of areas. To make one costs more than to copy a kilobyte.

        number_views: The areas as numbers in double precision, by turn and rank.
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
        """Take the sections of the group's region.

        Args:
            rank: The number of this rank.

            size: The number of ranks.

            memory: The areas.

            marks: The marks of all ranks.

            titles: The titles of all ranks.

            signals: The barrier's semaphores: number `from * size + to`.

            peers: The processes of the other ranks.

            crowded: Whether ranks share cores.
        """
        self.rank = rank
        self.size = size
        self.memory = memory
        self.marks = marks
        self.titles = titles
        self.group_barrier = DisseminationBarrier(rank, size, signals, peers)
        self.peers = peers
        self.area_bytes = memory.size(2)
        self.small_bytes = CROWDED_SMALL_BYTES if crowded else SMALL_BYTES
        self.part_bytes = self.area_bytes // size // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        self.turn = 0
        self.collective_count = 0
        self.title = make_title("")
        mark_offsets = [
            [turn * size * CACHE_LINE_BYTES, (turn * size + rank) * CACHE_LINE_BYTES]
            for turn in (0, 1)
        ]
        self.own_mark = [
            slice(own_offset, own_offset + CACHE_LINE_BYTES) for _, own_offset in mark_offsets
        ]
        self.all_marks = [
            slice(first_offset, first_offset + size * CACHE_LINE_BYTES)
            for first_offset, _ in mark_offsets
        ]
        self.expected_mark: bytes | None = None
        self.deadline = 0.0
        self.is_background = False
        self.cached_views: dict[tuple[int, int, torch.dtype, int, int], Tensor] = {}
        self.number_views = [
            [memoryview(area.numpy()).cast("d") for area in areas] for areas in memory
        ]

    def begin_collective(
        self, title: CollectiveTitle, deadline: float, is_background: bool = False
    ) -> None:
        """Begin a collective.

        Args:
            title: The description of the collective.
            deadline: The time limit, on the monotonic clock.
            is_background: No caller waits for it, so do not spin.

        Raises:
            GroupError: The group was abandoned.
        """
        self.collective_count = self.collective_count + 1
        number = self.collective_count
        self.title = title
        self.deadline = deadline
        self.is_background = is_background
        # a rank that comes late to an abandoned group must not let others continue
        self.peers.check_abandoned(self.describe_progress)
        self.expected_mark = title.digest + number.to_bytes(8, "little")
        self.marks[self.own_mark[self.turn]] = self.expected_mark

    def barrier(self) -> None:
        """Wait until every rank is here. What a rank wrote before can then be read by all.

        Raises:
            GroupError: A rank died, came too late, abandoned the group, or does another collective.
        """
        self.group_barrier.wait(self.deadline, self.describe_progress, self.is_background)
        turn, self.turn = self.turn, 1 - self.turn
        if self.expected_mark is not None:
            is_equal = self.marks[self.all_marks[turn]] == self.expected_mark * self.size
            self.expected_mark = None
            if not is_equal:
                raise self._make_mismatch_error()

    def report_interrupt(self) -> None:
        """Abandon the group after Ctrl-C, so that other ranks do not wait for this one."""
        self.peers.abandon_group(f"rank {self.rank} was interrupted in {self.describe_progress()}")

    def describe_progress(self) -> str:
        """Describe what this rank does, and which ranks have not begun it.

        It reads the marks without synchronization, so the result is only for messages.
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
        """View elements of the own area, to write before the next barrier.

        Args:
            dtype: The type of the elements.
            count: The number of elements.
            offset: The offset of the first byte.
        """
        return self.get_view(self.turn, self.rank, dtype, count, offset)

    def view_rank(self, rank: int, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
        """View elements that a rank wrote before the last barrier.

        Args:
            rank: The rank.
            dtype: The type of the elements.
            count: The number of elements.
            offset: The offset of the first byte.
        """
        return self.get_view(1 - self.turn, rank, dtype, count, offset)

    def view_all_ranks(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """View elements that each rank wrote before the last barrier.

        Args:
            dtype: The type of the elements.
            count: The number of elements.
        """
        return [self.view_rank(rank, dtype, count) for rank in range(self.size)]

    def write_own(
        self, flat: Tensor, start: int = 0, stop: int | None = None, offset: int = 0
    ) -> None:
        """Write a range of a tensor, as far as it has elements, into the own area.

        Args:
            flat: The tensor.
            start: The first element.
            stop: The end of the range; None for the tensor's end.
            offset: The offset of the first byte in the area.
        """
        if start or stop is not None:
            flat = flat[start:stop]
        if count := flat.numel():
            self.view_own(flat.dtype, count, offset).copy_(flat)

    def read_rank(
        self, rank: int, flat: Tensor, start: int = 0, stop: int | None = None, offset: int = 0
    ) -> None:
        """Read what a rank wrote into a range of a tensor, as far as it has elements.

        Args:
            rank: The rank.

            flat: The tensor.

            start: The first element.

            stop: The end of the range; None for the tensor's end.

            offset: The offset of the first byte in the area.
        """
        part = flat[start:stop]
        if count := part.numel():
            part.copy_(self.view_rank(rank, flat.dtype, count, offset))

    def get_view(self, turn: int, rank: int, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """Return a view of an area; views are cached.

        Args:
            turn: Which of the two areas.

            rank: The rank that writes the area.

            dtype: The type of the elements.

            count: The number of elements.

            offset: The offset of the first byte.
        """
        key = turn, rank, dtype, count, offset
        view = self.cached_views.get(key)
        if view is None:
            if len(self.cached_views) >= MAX_VIEWS:
                self.cached_views.clear()
            # The first caller may be in inference mode; later callers may write.
            with torch.inference_mode(False):
                view = self.memory[turn, rank, offset : offset + count * dtype.itemsize].view(dtype)
                self.cached_views[key] = view
        return view

    def _make_mismatch_error(self) -> GroupError:
        """Make the error of ranks that disagree.

        All ranks see the disagreement. They meet once more to exchange their titles in words, and
        may continue together afterwards.
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
            f"{self.rank} does {titles[self.rank]}, rank {other} does {titles[other]}"
        )


class ShortSum:
    """The sum of a short tensor over all ranks, with prepared views of the areas.

    Attributes:
        title: The description of the collective.
        views: The views of the areas, by turn and rank.
    """

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
        """Sum a tensor over all ranks, as `all_reduce_flat` does.

        Args:
            tensor: The contribution, which takes the sum.
            areas: The areas of the group.
        """
        views = self.views[areas.turn]
        views[areas.rank].copy_(tensor)
        areas.barrier()
        if areas.size == 2:
            tensor.add_(views[1 - areas.rank])  # a + b and b + a have the same bits
        elif areas.size > 2:
            torch.add(views[0], views[1], out=tensor)
            for view in views[2:]:
                tensor.add_(view)


def split_range(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """Split a number of elements into pieces.

    Without elements there is one empty piece, because the ranks meet anyway.

    Args:
        count: The number of elements.
        limit: The largest number of elements of a piece.

    Yields:
        The start and the stop of each piece.
    """
    for start in range(0, max(count, 1), limit):
        yield start, min(start + limit, count)


# ---- the operations --------------------------------------------------------------------------
def run_barrier(areas: GroupAreas) -> None:
    """Wait until every rank is here.

    Args:
        areas: The areas of the group.
    """
    areas.barrier()


def all_reduce_flat(
    areas: GroupAreas, flat: Tensor, reduction: Reduction, root: int | None = None
) -> None:
    """Replace every rank's tensor by the reduction of all.

    Args:
        areas: The areas of the group.
        flat: The contribution, which takes the result.
        reduction: The reduction.
        root: The only rank that gets the result; None for all ranks.
    """
    count = flat.numel()
    dtype = flat.dtype
    ranks = range(areas.size)
    limit = areas.area_bytes // dtype.itemsize
    needs_result = root is None or root == areas.rank
    if areas.size == 2 or count * dtype.itemsize <= areas.small_bytes:
        for start, stop in split_range(count, limit):
            part = flat if stop - start == count else flat[start:stop]
            areas.write_own(part)
            areas.barrier()
            if needs_result and stop > start:
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
        bounds = [len(part) * rank // areas.size for rank in range(areas.size + 1)]
        low = bounds[areas.rank]
        high = bounds[areas.rank + 1]
        areas.write_own(part, 0, low)
        areas.write_own(part, high, None, offset=high * dtype.itemsize)
        areas.barrier()
        own_slice = part[low:high]
        offset = low * dtype.itemsize
        if high > low:
            reduction.combine(
                areas.view_own(dtype, high - low, offset),
                [
                    own_slice
                    if rank == areas.rank
                    else areas.view_rank(rank, dtype, high - low, offset)
                    for rank in ranks
                ],
            )
        areas.barrier()
        if needs_result:
            for rank in ranks:
                areas.read_rank(
                    rank, part, bounds[rank], bounds[rank + 1], bounds[rank] * dtype.itemsize
                )


def broadcast_flat(areas: GroupAreas, flat: Tensor, root: int) -> None:
    """Overwrite every rank's tensor with the root's.

    Args:
        areas: The areas of the group.
        flat: The tensor.
        root: The rank that sends.
    """
    for start, stop in split_range(flat.numel(), areas.area_bytes // flat.dtype.itemsize):
        if areas.rank == root:
            areas.write_own(flat, start, stop)
        areas.barrier()
        if areas.rank != root:
            areas.read_rank(root, flat, start, stop)


def all_gather_flat(areas: GroupAreas, outputs: Sequence[Tensor], flat: Tensor) -> None:
    """Copy each rank's tensor to all ranks.

    Args:
        areas: The areas of the group.
        outputs: Take the tensors, by rank; their lengths may differ.
        flat: This rank's tensor.
    """
    for start, stop in split_range(max(map(len, outputs)), areas.area_bytes // flat.dtype.itemsize):
        areas.write_own(flat, start, stop)
        areas.barrier()
        for rank, output in enumerate(outputs):
            areas.read_rank(rank, output, start, stop)


def all_gather_numbers(areas: GroupAreas, numbers: array[float]) -> list[list[float]]:
    """Copy each rank's numbers to all ranks.

    Args:
        areas: The areas of the group.
        numbers: This rank's numbers, in double precision; equally many on all ranks.

    Returns:
        The numbers of each rank, in rank order.
    """
    rows: list[list[float]] = [[] for _ in range(areas.size)]
    for start, stop in split_range(len(numbers), areas.area_bytes // numbers.itemsize):
        views = areas.number_views[areas.turn]
        views[areas.rank][: stop - start] = numbers[start:stop]
        areas.barrier()
        for row, view in zip(rows, views, strict=True):
            row += view[: stop - start].tolist()
    return rows


def gather_flat(areas: GroupAreas, outputs: Sequence[Tensor] | None, flat: Tensor) -> None:
    """Copy each rank's tensor to the root. All tensors have the same length.

    Args:
        areas: The areas of the group.
        outputs: Take the tensors, by rank; None on other ranks than the root.
        flat: This rank's tensor.
    """
    for start, stop in split_range(len(flat), areas.area_bytes // flat.dtype.itemsize):
        areas.write_own(flat, start, stop)
        areas.barrier()
        for rank, output in enumerate(outputs or ()):
            areas.read_rank(rank, output, start, stop)


def scatter_flat(
    areas: GroupAreas, flat: Tensor, inputs: Sequence[Tensor] | None, root: int
) -> None:
    """Copy to each rank its tensor of the root. All tensors have the same length.

    Args:
        areas: The areas of the group.
        flat: Takes this rank's tensor.
        inputs: The tensors, by rank; None on other ranks than the root.
        root: The rank that sends.
    """
    for start, stop in split_range(len(flat), areas.part_bytes // flat.dtype.itemsize):
        for rank, each in enumerate(inputs or ()):
            areas.write_own(each, start, stop, rank * areas.part_bytes)
        areas.barrier()
        areas.read_rank(root, flat, start, stop, areas.rank * areas.part_bytes)


def reduce_scatter_flat(
    areas: GroupAreas, flat: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> None:
    """Reduce tensors over all ranks, and give each rank the result of its own number.

    Args:
        areas: The areas of the group.

        flat: Takes the reduction of all ranks' inputs[own rank].

        inputs: The contributions, by rank that gets the result; their lengths may differ.

        reduction: The reduction.
    """
    dtype = flat.dtype
    for start, stop in split_range(max(map(len, inputs)), areas.part_bytes // dtype.itemsize):
        for rank, each in enumerate(inputs):
            # also this rank's own input: `flat` may share its memory
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
    """Copy each rank's inputs[own rank] into outputs[that rank].

    Args:
        areas: The areas of the group.
        outputs: Take the tensors, by the rank that sends.
        inputs: The tensors, by the rank that receives. Each pair of ranks may have another length.

    Raises:
        GroupError: A sender and a receiver have different lengths.
    """
    lengths = torch.tensor([len(each) for each in inputs])
    lengths_by_rank = [torch.empty_like(lengths) for _ in inputs]
    all_gather_flat(areas, lengths_by_rank, lengths)
    for rank, output in enumerate(outputs):
        if lengths_by_rank[rank][areas.rank] != len(output):
            raise areas.peers.abandon_group(
                f"rank {rank} sends {int(lengths_by_rank[rank][areas.rank])} elements to rank "
                f"{areas.rank}, which takes {len(output)}, in {areas.describe_progress()}"
            )
    for start, stop in split_range(
        int(torch.stack(lengths_by_rank).max()), areas.part_bytes // inputs[0].dtype.itemsize
    ):
        for rank, each in enumerate(inputs):
            areas.write_own(each, start, stop, rank * areas.part_bytes)
        areas.barrier()
        for rank, output in enumerate(outputs):
            areas.read_rank(rank, output, start, stop, areas.rank * areas.part_bytes)
