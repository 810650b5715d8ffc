"""Partitions of a dimension, also after reshaping and slicing, compared with real tensors."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from paragrad.parallel.sharding.partition import (
    Constraint,
    DimBlock,
    DimPartition,
    apply_constraints,
    constrain_block_ends,
    constrain_to_equal,
    match_dim_groups,
    partition_evenly,
    reshape_partition,
)

pytestmark = pytest.mark.pure


def cut_piece(tensor: Tensor, dim: int, pieces: DimPartition, rank: int) -> Tensor:
    return torch.cat(
        [tensor.narrow(dim, each.start, len(each)) for each in pieces.list_ranges(rank)], dim
    )


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_every_element_is_on_one_rank(ranks: int, blocks: list[tuple[int, int]]) -> None:
    pieces = DimPartition(
        tuple(DimBlock(grain * grains, grains) for grain, grains in blocks), ranks
    )
    held = sorted(
        place for rank in range(ranks) for each in pieces.list_ranges(rank) for place in each
    )
    assert held == list(range(pieces.size))
    for rank in range(ranks):
        assert pieces.compute_length(rank) == sum(map(len, pieces.list_ranges(rank)))
        assert all(
            not part.start % grain and not part.stop % grain
            for part, grain in (
                (range(each.start - start, each.stop - start), grain)
                for each, (grain, _), start in zip(
                    pieces.list_ranges(rank),
                    blocks,
                    itertools.accumulate((a * b for a, b in blocks), initial=0),
                    strict=False,
                )
            )
        )


@st.composite
def draw_reshape(draw: st.DrawFn) -> tuple[list[int], list[int], int, DimPartition]:
    """Draw a shape, another shape of equal size, and a partition of one dimension in blocks."""
    factors = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def group_factors() -> list[int]:
        inner = draw(st.sets(st.integers(1, len(factors) - 1))) if len(factors) > 1 else set()
        cuts = [0, *sorted(inner), len(factors)]
        return [prod(factors[a:b]) for a, b in itertools.pairwise(cuts)]

    before = group_factors()
    after = group_factors()
    dim = draw(st.integers(0, len(before) - 1))
    count = draw(
        st.sampled_from([count for count in range(1, before[dim] + 1) if before[dim] % count == 0])
    )
    size = before[dim] // count
    grains = draw(st.sampled_from([grains for grains in range(1, size + 1) if size % grains == 0]))
    return (
        before,
        after,
        dim,
        DimPartition((DimBlock(size, grains),) * count, draw(st.integers(1, 3))),
    )


@given(draw_reshape())
def test_reshaped_shards_are_shards_of_the_reshaped(
    drawn: tuple[list[int], list[int], int, DimPartition],
) -> None:
    before, after, dim, pieces = drawn
    found = reshape_partition(before, after, dim, pieces)
    assume(not isinstance(found, list))
    assert not isinstance(found, list)
    at, new = found
    tensor = torch.arange(prod(before)).view(before)
    assert new.size == after[at]
    for rank in range(pieces.ranks):
        local = list(after)
        local[at] = new.compute_length(rank)
        assert torch.equal(
            cut_piece(tensor, dim, pieces, rank).reshape(local),
            cut_piece(tensor.view(after), at, new, rank),
        )


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_dimensions_that_hold_the_same_elements(before: list[int], data: st.DataObject) -> None:
    after = data.draw(st.permutations(before)) + data.draw(st.lists(st.just(1), max_size=2))
    found = match_dim_groups(before, after)
    assert found is not None
    assert [at for old, _ in found for at in old] == list(range(len(before)))
    assert [at for _, new in found for at in new] == list(range(len(after)))
    assert all(
        prod(before[at] for at in old) == prod(after[at] for at in new) for old, new in found
    )


def test_heads_from_a_divided_dimension_are_whole() -> None:
    wishes = reshape_partition((5, 12), (5, 3, 4), 1, partition_evenly(12, 2, "q"))
    assert wishes == [Constraint(("q", 0, 12), grains=3)]
    blocks = apply_constraints(partition_evenly(12, 2, "q").blocks, "q", wishes, 2)
    assert blocks == (DimBlock(12, 3),)
    assert reshape_partition((5, 12), (5, 3, 4), 1, DimPartition(blocks, 2)) == (
        1,
        DimPartition((DimBlock(3, 3),), 2),
    )


def test_queries_keys_and_values_are_divided_separately() -> None:
    """The partition of queries, keys and values is found in three steps.

    First, the dimension is treated as three heads. Then a slice asks for three blocks. The blocks
    then ask for whole heads, in all three in the same way.
    """
    pieces = partition_evenly(24, 2, "qkv")
    found = reshape_partition((24,), (3, 2, 4), 0, pieces)
    blocks = apply_constraints(pieces.blocks, "qkv", found, 2)  # type: ignore[arg-type]
    assert blocks == (DimBlock(24, 3),)
    at, three = reshape_partition((24,), (3, 2, 4), 0, DimPartition(blocks, 2))
    assert (at, three.size) == (0, 3)
    blocks = apply_constraints(blocks, "qkv", constrain_block_ends(three, range(1, 3)), 2)
    assert blocks == (DimBlock(8, 8),) * 3
    wishes = reshape_partition((24,), (3, 2, 4), 0, DimPartition(blocks, 2))
    assert wishes == [Constraint(("qkv", start, start + 8), grains=2) for start in (0, 8, 16)]
    blocks = apply_constraints(blocks, "qkv", wishes, 2)  # type: ignore[arg-type]
    assert reshape_partition((24,), (3, 2, 4), 0, DimPartition(blocks, 2)) == (
        1,
        DimPartition((DimBlock(2, 2),), 2),
    )


@pytest.mark.parametrize(("size", "ranks"), [(2, 3), (1, 2)])
def test_fewer_heads_than_ranks_are_replicated(size: int, ranks: int) -> None:
    wishes = reshape_partition(
        (size * 8,), (1, size, 8) if size > 1 else (8, 1), 0, partition_evenly(size * 8, ranks, "k")
    )
    if size > 1:
        assert isinstance(wishes, list)
        assert (
            apply_constraints(partition_evenly(size * 8, ranks, "k").blocks, "k", wishes, ranks)
            is None
        )


def test_partitions_used_together_are_aligned() -> None:
    """With eight query heads and four key heads, queries are divided by two heads at a time."""
    queries = DimPartition((DimBlock(8, 8, (("q", 0, 64),)),), 3)
    keys = DimPartition((DimBlock(8, 4, (("k", 0, 32),)),), 3)
    assert constrain_to_equal(queries, keys) == [Constraint(("q", 0, 64), grains=4)]
    cut = DimPartition((DimBlock(4, 4, (("q", 0, 32),)), DimBlock(4, 4, (("q", 32, 64),))), 2)
    assert constrain_to_equal(cut, DimPartition((DimBlock(8, 8, (("g", 0, 8),)),), 2)) == [
        Constraint(("g", 0, 8), ends=(4,))
    ]
