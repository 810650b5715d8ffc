"""Which rank computes which samples: the order of samples, shares, micro-batches."""

from __future__ import annotations

import random
from itertools import chain
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paragrad.datasets.sample_order import SampleOrder, permute_samples
from paragrad.errors import Refused
from paragrad.schedules.actions import split_evenly
from paragrad.strategies.shares import (
    Division,
    apportion_samples,
    count_largest_micro_batch,
    count_smallest_micro_batch,
    split_micro_batches,
)

pytestmark = pytest.mark.pure


@given(st.integers(1, 300), st.integers(1, 70), st.integers(0, 5), st.integers(0, 5))
def test_every_sample_once_per_epoch(samples: int, batch: int, seed: int, epoch: int) -> None:
    order = SampleOrder(samples, batch, seed)
    seen = list(chain(*(order.get_indices(epoch, positions) for positions in order.list_batches())))
    assert sorted(seen) == list(range(samples))
    assert len(list(order.list_batches())) == order.steps


def test_sample_order_is_stable_across_versions() -> None:
    """A run that is saved now and resumed by a later version gets the same samples."""
    orders = [permute_samples(10, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] == [2, 3, 6, 5, 8, 7, 1, 0, 4, 9]
    assert orders[0] not in orders[1:]


@given(st.integers(0, 300), st.integers(0, 5), st.integers(0, 5))
def test_order_equals_sorted_keys(samples: int, seed: int, epoch: int) -> None:
    """The order is the same as that of the earlier code, which drew and sorted in Python."""
    draw = random.Random(f"paragrad order {seed} {epoch}").random
    keys = [draw() for _ in range(samples)]
    assert permute_samples(samples, seed, epoch).tolist() == sorted(
        range(samples), key=keys.__getitem__
    )


@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_largest_remainder(samples: int, weights: list[int]) -> None:
    counts = apportion_samples(samples, weights)
    assert sum(counts) == samples
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) < 1


def test_shares_of_the_documented_example() -> None:
    # 22.5 and 7.5: the lower rank gets the remaining sample
    assert apportion_samples(30, [3, 1]) == [23, 7]


@given(
    st.integers(0, 50),
    st.integers(1, 100),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_micro_batches_are_those_of_one_rank(
    start: int, samples: int, weights: list[int], micro: int
) -> None:
    """The micro-batches of all ranks together are those of one worker.

    Earlier, each share was divided into micro-batches. So micro-batch 0 of `data(2, micro=3)` had
    the samples 0, 1, 6, 7 of twelve. Batch norm took its statistics over other samples than on
    one worker.
    """
    batch = range(start, start + samples)
    pieces = split_micro_batches(batch, Division(tuple(weights), micro))
    alone = split_micro_batches(batch, Division((1,), micro))
    assert [list(chain(*piece)) for piece in pieces] == [list(part) for (part,) in alone]
    assert list(chain(*map(chain.from_iterable, pieces))) == list(batch)
    assert len(pieces) == min(micro, samples)
    for piece in pieces:
        whole = sum(map(len, piece))
        assert whole  # no micro-batch is empty on every rank
        for part, weight in zip(piece, weights, strict=True):
            # the rank that lacks most of its share of the batch gets a remaining sample, also if
            # its part of this micro-batch is a whole number
            assert abs(len(part) - whole * weight / sum(weights)) <= 1


@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 12))
def test_remaining_samples_go_to_all_ranks_in_turn(
    samples: int, weights: list[int], micro: int
) -> None:
    """The remaining samples of micro-batches go to all ranks in turn.

    If each micro-batch were divided alone by the largest remainder, the fourth of four ranks
    would get no sample of two micro-batches of three.
    """
    pieces = split_micro_batches(range(samples), Division(tuple(weights), micro))
    counts = [sum(len(piece[rank]) for piece in pieces) for rank in range(len(weights))]
    shares = apportion_samples(samples, weights)
    assert all(abs(count - share) <= 1 for count, share in zip(counts, shares, strict=True))
    if micro == 1:
        assert counts == shares
    if len(set(weights)) == 1:
        assert sorted(counts) == sorted(shares)


def test_shares_of_documented_micro_batches() -> None:
    division = Division((1, 1), 3)
    assert split_micro_batches(range(10, 18), division) == [
        [range(10, 12), range(12, 13)],
        [range(13, 14), range(14, 16)],
        [range(16, 17), range(17, 18)],
    ]
    assert [count_largest_micro_batch(8, division, share) for share in (0, 1)] == [2, 2]
    assert count_smallest_micro_batch(8, division) == 2
    assert count_smallest_micro_batch(8, division, per_share=True) == 1
    assert count_largest_micro_batch(1, division, 1) == 1  # the placeholder sample


@given(st.integers(0, 100), st.integers(1, 40))
def test_even_division(length: int, parts: int) -> None:
    ranges = split_evenly(length, parts)
    assert list(chain(*ranges)) == list(range(length))
    assert max(map(len, ranges)) == -(-length // parts)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_order_takes_eight_bytes_per_sample() -> None:
    """The order of samples takes eight bytes per sample.

    Earlier, it was a tuple of Python numbers, sorted from a list. This took about a hundred bytes
    per sample in every rank.
    """
    order = permute_samples(100_000, seed=0, epoch=0)
    assert order.nbytes == 8 * len(order)
    assert not order.flags.writeable  # all callers get the same array


@pytest.mark.parametrize(("samples", "batch", "steps"), [(10**12, 64, 15_625_000_000), (7, 3, 3)])
def test_batch_is_computed_without_earlier_ones(samples: int, batch: int, steps: int) -> None:
    order = SampleOrder(samples, batch, seed=0)
    assert order.steps == steps
    assert order.get_batch(steps - 1).stop == samples
    assert next(order.list_batches(steps - 1)) == order.get_batch(steps - 1)


@pytest.mark.parametrize(
    ("samples", "left", "message"),
    [
        (
            10**12,
            None,
            r"an epoch has 1000000000000 samples, too many for one epoch; let its __len__ return "
            r"how many",
        ),
        (
            10**9,
            10**10,
            r"order takes 28 bytes a sample while it is made, and there is memory for 357142857; "
            r"let its __len__",
        ),
    ],
)
def test_too_many_samples_are_refused(samples: int, left: int | None, message: str) -> None:
    """A dataset with too many samples is refused.

    Earlier, a dataset whose `__len__` returned 10^12 used all memory.
    """
    with (
        mock.patch("paragrad.datasets.sample_order.read_available_memory", return_value=left),
        pytest.raises(Refused, match=message),
    ):
        SampleOrder(samples, 1, seed=0).get_indices(0, range(1))
