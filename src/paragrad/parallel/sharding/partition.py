"""Pieces: how a dimension of a tensor is divided over ranks, and what reshaping and slicing
make of that. No torch.

A dimension is a row of *blocks*, each divided by itself: the columns of a fused qkv are three.
A block is divided in whole *grains*, as evenly as they go (the longer pieces first): a grain of
the columns that an attention makes heads of is a head. A rank holds its range of every block,
one after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm, prod

from paragrad.schedules.actions import split_evenly

# queries, keys and values, which are no heads: each is divided by itself where ranks are more
QKV_PARTS = 3
# of which parameter, and from where to where in its divided dimension
Origin = tuple[str, int, int]


@dataclass(frozen=True)
class DimBlock:
    """size elements in so many grains of equal length. origins: where parameters say how it is
    divided.
    """

    size: int
    grains: int
    origins: tuple[Origin, ...] = field(default=(), compare=False)

    def scale_block(self, times: int, divisor: int = 1) -> DimBlock:
        """The same grains, each times / by as long."""
        return DimBlock(self.size * times // divisor, self.grains, self.origins)


@dataclass(frozen=True)
class DimPartition:
    """A dimension of blocks, over so many ranks."""

    blocks: tuple[DimBlock, ...]
    ranks: int

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def list_ranges(self, rank: int) -> list[range]:
        """What a rank holds, block by block."""
        return list(_compute_ranges(self)[rank])

    def list_lengths(self, rank: int) -> list[int]:
        return [len(each) for each in _compute_ranges(self)[rank]]

    def compute_length(self, rank: int) -> int:
        return sum(self.list_lengths(rank))

    def has_same_ranges(self, other: DimPartition) -> bool:
        """Do all ranks hold the same elements?"""
        return self == other or _compute_ranges(self) == _compute_ranges(other)

    def repeat_blocks(self, times: int) -> DimPartition:
        """Of a dimension that is this one so many times in a row."""
        return DimPartition(self.blocks * times, self.ranks)

    def scale_elements(self, times: int, divisor: int = 1) -> DimPartition:
        """Of a dimension of which every element became so many (or so many one)."""
        return DimPartition(
            tuple(block.scale_block(times, divisor) for block in self.blocks), self.ranks
        )

    def find_blocks(self, start: int, stop: int) -> tuple[int, int] | None:
        """Which blocks, from one to another, lie from start to stop; None where that cuts
        one.
        """
        ends = [0, *itertools.accumulate(block.size for block in self.blocks)]
        return (ends.index(start), ends.index(stop)) if start in ends and stop in ends else None

    def select_blocks(self, first: int, last: int) -> DimPartition:
        return DimPartition(self.blocks[first:last], self.ranks)


@functools.lru_cache(maxsize=4096)
def _compute_ranges(partition: DimPartition) -> tuple[tuple[range, ...], ...]:
    starts = itertools.accumulate((block.size for block in partition.blocks), initial=0)
    found = []
    for block, start in zip(partition.blocks, starts, strict=False):
        grain = block.size // block.grains
        found.append(
            [
                range(start + part.start * grain, start + part.stop * grain)
                for part in split_evenly(block.grains, partition.ranks)
            ]
        )
    return tuple(zip(*found, strict=True)) if found else ((),) * partition.ranks


def partition_evenly(size: int, ranks: int, origin: str | None = None) -> DimPartition:
    """A dimension of one block, element by element."""
    return DimPartition((DimBlock(size, size, ((origin, 0, size),) if origin else ()),), ranks)


# ---- wishes: what another division of a parameter would have made possible -------------------
@dataclass(frozen=True)
class Constraint:
    """Of a parameter's range: to be divided in so many grains, or (cuts) in blocks that end
    there; or (none of both) not at all.
    """

    origin: Origin
    grains: int = 0
    ends: tuple[int, ...] = ()


def apply_constraints(
    blocks: Sequence[DimBlock], name: str, constraints: Iterable[Constraint], ranks: int
) -> tuple[DimBlock, ...] | None:
    """Blocks of a parameter's dimension as they are wished for; None: it is not to be
    divided.
    """
    found = list(blocks)
    for wish in constraints:
        _, start, stop = wish.origin
        if not wish.grains and not wish.ends:
            return None
        at = next(
            (at for at, block in enumerate(found) if block.origins == ((name, start, stop),)), None
        )
        # a wish of before another was granted: it comes again if it is still one
        if at is None:
            continue
        if wish.grains:
            found[at] = replace(found[at], grains=gcd(found[at].grains, wish.grains))
        else:
            found[at : at + 1] = [
                DimBlock(b - a, b - a, ((name, a, b),))
                for a, b in itertools.pairwise((start, *wish.ends, stop))
            ]
    return tuple(found) if all(block.grains >= ranks for block in found) else None


def make_constraints(
    block: DimBlock, grains: int = 0, ends: Sequence[int] = ()
) -> Iterator[Constraint]:
    """To all origins of a block. cuts: where in the block, in its own elements."""
    for origin in block.origins:
        _, start, stop = origin
        places = [start + cut * (stop - start) // block.size for cut in ends]
        exact = all(cut * (stop - start) % block.size == 0 for cut in ends)
        yield Constraint(origin, grains, tuple(places)) if exact else Constraint(origin)


def constrain_block_ends(partition: DimPartition, ends: Iterable[int]) -> list[Constraint]:
    """Wishes that blocks end there."""
    found = list[Constraint]()
    wanted = sorted(set(ends))
    for block, start in zip(
        partition.blocks,
        itertools.accumulate((b.size for b in partition.blocks), initial=0),
        strict=False,
    ):
        if inside := [end - start for end in wanted if start < end < start + block.size]:
            found += make_constraints(block, ends=inside)
    return found


def constrain_to_whole(partition: DimPartition) -> list[Constraint]:
    return [wish for block in partition.blocks for wish in make_constraints(block)]


def constrain_to_equal(one: DimPartition, other: DimPartition) -> list[Constraint]:
    """Wishes of two divisions of dimensions that are used together, and differ."""
    ends = [set(itertools.accumulate(block.size for block in each.blocks)) for each in (one, other)]
    if ends[0] != ends[1]:
        return constrain_block_ends(one, ends[1]) + constrain_block_ends(other, ends[0])
    found = []
    for a, b in zip(one.blocks, other.blocks, strict=True):
        if a.grains != b.grains:
            together = gcd(a.grains, b.grains)
            found += [
                wish
                for block in (a, b)
                if block.grains != together
                for wish in make_constraints(block, together)
            ]
    return found


# ---- shapes ----------------------------------------------------------------------------------
def match_dim_groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[range, range]] | None:
    """Of a reshape, dimensions before and after that hold the same elements, as few together as
    can be; None where one is empty.
    """
    if 0 in before or 0 in after:
        return None
    found = []
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
        found.append((range(start[0], i), range(start[1], j)))
    return found


def reshape_partition(
    before: Sequence[int], after: Sequence[int], dim: int, partition: DimPartition
) -> tuple[int, DimPartition] | list[Constraint]:
    """Which dimension is divided after a reshape, and how; or what to wish for, where that
    cannot be said.
    """
    for old, new in match_dim_groups(before, after) or ():
        if dim in old:
            outer = prod(before[old.start : dim])
            inner = prod(before[dim + 1 : old.stop])
            found = _unflatten_partition(
                partition.scale_elements(inner).repeat_blocks(outer), [after[at] for at in new]
            )
            return found if isinstance(found, list) else (new.start + found[0], found[1])
    return constrain_to_whole(partition)


def _unflatten_partition(
    flat: DimPartition, sizes: Sequence[int]
) -> tuple[int, DimPartition] | list[Constraint]:
    """Of a flat dimension that becomes these."""
    wished = list[Constraint]()
    for at, size in enumerate(sizes):
        before = prod(sizes[:at])
        after = prod(sizes[at + 1 :])
        each, rest = divmod(len(flat.blocks), before)
        if (
            size == 1
            or rest
            or any(
                flat.blocks[:each] != flat.blocks[start : start + each]
                for start in range(0, len(flat.blocks), each)
            )
        ):
            continue
        group = [_merge_blocks(flat.blocks[start::each]) for start in range(each)]
        if sum(block.size for block in group) != size * after or any(
            block.size % after for block in group
        ):
            continue
        if all(block.size // block.grains % after == 0 for block in group):
            return at, DimPartition(
                tuple(block.scale_block(1, after) for block in group), flat.ranks
            )
        wanted = [block.size // lcm(block.size // block.grains, after) for block in group]
        if not wished and min(wanted) >= flat.ranks:
            wished = [
                wish
                for block, grains in zip(group, wanted, strict=True)
                for wish in make_constraints(block, grains)
            ]
        if len(flat.blocks) == 1 and not wished:  # there are fewer than ranks
            return (
                constrain_block_ends(flat, range(after, QKV_PARTS * after, after))
                if size == QKV_PARTS
                else constrain_to_whole(flat)
            )
    return wished or constrain_to_whole(flat)


def _merge_blocks(blocks: Sequence[DimBlock]) -> DimBlock:
    """Blocks that become one."""
    return replace(
        blocks[0],
        origins=tuple(dict.fromkeys(origin for block in blocks for origin in block.origins)),
    )
