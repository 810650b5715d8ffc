"""The partition of a dimension over ranks, and how reshapes and slices change it.

This module does not import torch. A dimension is a row of *blocks*. Each block is divided by
itself: the columns of a fused query-key-value layer are three blocks. A block is divided into whole
*grains*, as evenly as possible, and the longer pieces come first. A grain of the columns that an
attention turns into heads is one head. A rank holds its range of every block, one after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm, prod

from paragrad.schedules.actions import split_evenly

# A dimension of this size separates queries, keys and values, not heads. If ranks are more than
# these, each of them is divided by itself.
QKV_PARTS = 3
# (parameter name, start, stop) in the divided dimension of the parameter
Origin = tuple[str, int, int]


@dataclass(frozen=True)
class DimBlock:
    """A block of consecutive elements, divided into grains of equal length.

    Attributes:
        size: Number of elements.
        grains: Number of grains; a rank holds whole grains.
        origins: The ranges of parameters that determine how the block is divided. They do not count
            when blocks are compared.
    """

    size: int
    grains: int
    origins: tuple[Origin, ...] = field(default=(), compare=False)

    def scale_block(self, times: int, divisor: int = 1) -> DimBlock:
        """Return the block with as many grains, each `times / divisor` as long."""
        return DimBlock(self.size * times // divisor, self.grains, self.origins)


@dataclass(frozen=True)
class DimPartition:
    """How a dimension is divided over ranks.

    Attributes:
        blocks: The blocks of the dimension, in order.
        ranks: Number of ranks over which each block is divided.
    """

    blocks: tuple[DimBlock, ...]
    ranks: int

    @functools.cached_property
    def size(self) -> int:
        """Number of elements of the whole dimension."""
        return sum(block.size for block in self.blocks)

    @functools.cached_property
    def ranges(self) -> tuple[tuple[range, ...], ...]:
        """The element ranges that each rank holds, one for each block."""
        return _compute_ranges(self)

    def list_ranges(self, rank: int) -> list[range]:
        """Return the element ranges that a rank holds, one for each block."""
        return list(self.ranges[rank])

    def list_lengths(self, rank: int) -> list[int]:
        """Return the number of elements that a rank holds of each block."""
        return [len(each) for each in self.ranges[rank]]

    def compute_length(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return sum(self.list_lengths(rank))

    def repeat_blocks(self, times: int) -> DimPartition:
        """Return the partition of a dimension that is this one `times` times in a row."""
        return DimPartition(self.blocks * times, self.ranks)

    def scale_elements(self, times: int, divisor: int = 1) -> DimPartition:
        """Return the partition after every element became `times` elements.

        With a divisor, every group of `divisor` elements becomes `times` elements.
        """
        return DimPartition(
            tuple(block.scale_block(times, divisor) for block in self.blocks), self.ranks
        )

    def find_blocks(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the blocks from element `start` to element `stop`.

        Args:
            start: First element of the range.
            stop: End of the range.

        Returns:
            (first block, end block), or None if the range begins or ends inside a block.
        """
        ends = [0, *itertools.accumulate(block.size for block in self.blocks)]
        return (ends.index(start), ends.index(stop)) if start in ends and stop in ends else None

    def select_blocks(self, first: int, last: int) -> DimPartition:
        """Return the partition of the blocks from `first` to `last`, without the last."""
        return DimPartition(self.blocks[first:last], self.ranks)


@functools.lru_cache(maxsize=4096)
def _compute_ranges(partition: DimPartition) -> tuple[tuple[range, ...], ...]:
    starts = itertools.accumulate((block.size for block in partition.blocks), initial=0)
    blocks_of_ranks = []
    for block, start in zip(partition.blocks, starts, strict=False):
        grain = block.size // block.grains
        blocks_of_ranks.append(
            [
                range(start + grains.start * grain, start + grains.stop * grain)
                for grains in split_evenly(block.grains, partition.ranks)
            ]
        )
    return tuple(zip(*blocks_of_ranks, strict=True)) if blocks_of_ranks else ((),) * partition.ranks


def partition_evenly(size: int, ranks: int, origin: str | None = None) -> DimPartition:
    """Divide a dimension of one block, element by element.

    Args:
        size: Number of elements.
        ranks: Number of ranks.
        origin: Name of the parameter to which the dimension belongs, if any.

    Returns:
        The partition.
    """
    return DimPartition((DimBlock(size, size, ((origin, 0, size),) if origin else ()),), ranks)


# ---- constraints: another division of a parameter that an operation needs -----------------
@dataclass(frozen=True)
class Constraint:
    """A requested change of how a range of a parameter is divided.

    Without grains and ends, the parameter is not to be divided at all.

    Attributes:
        origin: The parameter and the range of its divided dimension.

        grains: Number of grains into which the range is to be divided; 0: not requested.

        ends: Elements of the parameter where blocks are to end.
    """

    origin: Origin
    grains: int = 0
    ends: tuple[int, ...] = ()


def apply_constraints(
    blocks: Sequence[DimBlock], name: str, constraints: Iterable[Constraint], ranks: int
) -> tuple[DimBlock, ...] | None:
    """Change the blocks of a parameter's dimension as constraints request.

    Args:
        blocks: The blocks as they are.
        name: Name of the parameter.
        constraints: The requested changes.
        ranks: Number of ranks.

    Returns:
        The new blocks, or None if the parameter is not to be divided.
    """
    new_blocks = list(blocks)
    for constraint in constraints:
        _, start, stop = constraint.origin
        if not constraint.grains and not constraint.ends:
            return None
        at = next(
            (at for at, block in enumerate(new_blocks) if block.origins == ((name, start, stop),)),
            None,
        )
        # This block was changed by an earlier constraint. The constraint comes again in the next
        # run if it is still needed.
        if at is None:
            continue
        if constraint.grains:
            new_blocks[at] = replace(
                new_blocks[at], grains=gcd(new_blocks[at].grains, constraint.grains)
            )
        else:
            new_blocks[at : at + 1] = [
                DimBlock(b - a, b - a, ((name, a, b),))
                for a, b in itertools.pairwise((start, *constraint.ends, stop))
            ]
    return tuple(new_blocks) if all(block.grains >= ranks for block in new_blocks) else None


def make_constraints(
    block: DimBlock, grains: int = 0, ends: Sequence[int] = ()
) -> Iterator[Constraint]:
    """Make a constraint for each origin of a block.

    Args:
        block: The block that should be divided in another way.
        grains: Requested number of grains; 0: no request.
        ends: Requested ends of blocks, in elements of the block.

    Yields:
        One constraint for each origin.
    """
    for origin in block.origins:
        _, start, stop = origin
        new_ends = [start + end * (stop - start) // block.size for end in ends]
        is_exact = all(end * (stop - start) % block.size == 0 for end in ends)
        yield Constraint(origin, grains, tuple(new_ends)) if is_exact else Constraint(origin)


def constrain_block_ends(partition: DimPartition, ends: Iterable[int]) -> list[Constraint]:
    """Return constraints that blocks end at these elements."""
    constraints = list[Constraint]()
    sorted_ends = sorted(set(ends))
    for block, start in zip(
        partition.blocks,
        itertools.accumulate((b.size for b in partition.blocks), initial=0),
        strict=False,
    ):
        if inner_ends := [end - start for end in sorted_ends if start < end < start + block.size]:
            constraints += make_constraints(block, ends=inner_ends)
    return constraints


def constrain_to_whole(partition: DimPartition) -> list[Constraint]:
    """Return constraints that the dimension is not divided."""
    return [constraint for block in partition.blocks for constraint in make_constraints(block)]


def constrain_to_equal(one: DimPartition, other: DimPartition) -> list[Constraint]:
    """Return constraints that make the partitions of two dimensions equal.

    Args:
        one: Partition of a dimension.
        other: Partition of a dimension that is used together with it.

    Returns:
        One constraint for each origin of a block that must change.
    """
    ends = [set(itertools.accumulate(block.size for block in each.blocks)) for each in (one, other)]
    if ends[0] != ends[1]:
        return constrain_block_ends(one, ends[1]) + constrain_block_ends(other, ends[0])
    constraints = []
    for a, b in zip(one.blocks, other.blocks, strict=True):
        if a.grains != b.grains:
            common_grains = gcd(a.grains, b.grains)
            constraints += [
                constraint
                for block in (a, b)
                if block.grains != common_grains
                for constraint in make_constraints(block, common_grains)
            ]
    return constraints


# ---- shapes ----------------------------------------------------------------------------------
def match_dim_groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[range, range]] | None:
    """Match the dimensions before and after a reshape that hold the same elements.

    Each group has as few dimensions as possible.

    Args:
        before: The old shape.
        after: The new shape.

    Returns:
        (old dimensions, new dimensions) of each group, or None if a dimension is empty.
    """
    if 0 in before or 0 in after:
        return None
    groups = []
    i = 0
    j = 0
    while i < len(before) or j < len(after):
        start = (i, j)
        a = 1
        b = 1
        while True:
            if i < len(before) and (a <= b or j >= len(after)):
                a = a * before[i]
                i = i + 1
            elif j < len(after):
                b = b * after[j]
                j = j + 1
            if a == b and (i > start[0] or i >= len(before)) and (j > start[1] or j >= len(after)):
                break
        groups.append((range(start[0], i), range(start[1], j)))
    return groups


def reshape_partition(
    before: Sequence[int], after: Sequence[int], dim: int, partition: DimPartition
) -> tuple[int, DimPartition] | list[Constraint]:
    """Find which dimension is divided after a reshape, and how.

    Args:
        before: The old shape.
        after: The new shape.
        dim: The divided dimension of the old shape.
        partition: How it is divided.

    Returns:
        (new dimension, its partition), or constraints that would make the reshape possible.
    """
    for old, new in match_dim_groups(before, after) or ():
        if dim in old:
            outer = prod(before[old.start : dim])
            inner = prod(before[dim + 1 : old.stop])
            result = _unflatten_partition(
                partition.scale_elements(inner).repeat_blocks(outer), [after[at] for at in new]
            )
            return result if isinstance(result, list) else (new.start + result[0], result[1])
    return constrain_to_whole(partition)


def _unflatten_partition(
    flat: DimPartition, sizes: Sequence[int]
) -> tuple[int, DimPartition] | list[Constraint]:
    """Reshape a flat dimension into these sizes; the result is as of `reshape_partition`."""
    constraints = list[Constraint]()
    for at, size in enumerate(sizes):
        outer = prod(sizes[:at])
        inner = prod(sizes[at + 1 :])
        period, remainder = divmod(len(flat.blocks), outer)
        if (
            size == 1
            or remainder
            or any(
                flat.blocks[:period] != flat.blocks[start : start + period]
                for start in range(0, len(flat.blocks), period)
            )
        ):
            continue
        group = [_merge_blocks(flat.blocks[start::period]) for start in range(period)]
        if sum(block.size for block in group) != size * inner or any(
            block.size % inner for block in group
        ):
            continue
        if all(block.size // block.grains % inner == 0 for block in group):
            return at, DimPartition(
                tuple(block.scale_block(1, inner) for block in group), flat.ranks
            )
        grain_counts = [block.size // lcm(block.size // block.grains, inner) for block in group]
        if not constraints and min(grain_counts) >= flat.ranks:
            constraints = [
                constraint
                for block, grains in zip(group, grain_counts, strict=True)
                for constraint in make_constraints(block, grains)
            ]
        if len(flat.blocks) == 1 and not constraints:  # the elements are fewer than the ranks
            return (
                constrain_block_ends(flat, range(inner, QKV_PARTS * inner, inner))
                if size == QKV_PARTS
                else constrain_to_whole(flat)
            )
    return constraints or constrain_to_whole(flat)


def _merge_blocks(blocks: Sequence[DimBlock]) -> DimBlock:
    """Make one block of equal blocks; it keeps the origins of all."""
    return replace(
        blocks[0],
        origins=tuple(dict.fromkeys(origin for block in blocks for origin in block.origins)),
    )
