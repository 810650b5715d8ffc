"""The part of a global batch that a rank runs."""

from __future__ import annotations

import pytest

from paragrad.datasets.sample_order import SampleOrder
from paragrad.strategies.shares import Division
from paragrad.trainer.batch import make_rank_batch

pytestmark = pytest.mark.pure

ORDER = SampleOrder(29, 12, seed=5)


def test_rank_has_a_part_of_every_micro_batch() -> None:
    division = Division((1, 1), 3)
    batch = make_rank_batch(ORDER, 0, range(12, 24), division, [1])
    assert [list(each.positions) for each in batch.micro_batches] == [
        [14, 15],
        [18, 19],
        [22, 23],
    ]
    assert list(batch.places) == [2, 3, 6, 7, 10, 11]
    assert batch.recorded_ranges == [[14, 16], [18, 20], [22, 24]]


def test_ranges_that_meet_are_one() -> None:
    """Parts of consecutive micro-batches, parts of several replicas, and reversed samples."""
    division = Division((1, 1), 3)
    for replicas, reverse in (([0, 1], False), ([1, 0], False), ([0, 1], True)):
        batch = make_rank_batch(ORDER, 0, range(12, 24), division, replicas, reverse)
        assert batch.recorded_ranges == [[12, 24]]
    assert make_rank_batch(ORDER, 0, range(12), Division(micro=4), [0]).recorded_ranges == [[0, 12]]


def test_rank_without_samples_has_no_range() -> None:
    """The rank runs one sample of the batch with weight 0."""
    batch = make_rank_batch(ORDER, 0, range(24, 25), Division((1, 1), 3), [1])
    assert batch.recorded_ranges == []
    (micro,) = batch.micro_batches
    assert (list(micro.positions), list(micro.places)) == ([], [0])


def test_smaller_batch_is_divided_anew() -> None:
    division = Division((1, 1), 2)
    batch = make_rank_batch(ORDER, 0, range(12), division, [1])
    smaller = batch.take_first_samples(4, division, [1])
    assert smaller is not None
    assert [list(each.positions) for each in smaller.micro_batches] == [[1], [3]]
    assert list(smaller.sample_indices) == list(batch.sample_indices[:4])
    assert batch.take_first_samples(1, division, [1]) is None  # replica 0 alone has a sample
