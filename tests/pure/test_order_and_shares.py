"""Who computes what: the order of samples, shares, micro-batches."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from paragrad.datasets.order import Order, permutation
from paragrad.schedules.actions import evenly
from paragrad.strategies.shares import Division, divide, micro_batches


@given(st.integers(1, 300), st.integers(1, 70), st.integers(0, 5), st.integers(0, 5))
def test_every_sample_once_per_epoch(samples: int, batch: int, seed: int, epoch: int) -> None:
    order = Order(samples, batch, seed)
    seen = list(chain(*(order.indices(epoch, positions) for positions in order.batches())))
    assert sorted(seen) == list(range(samples))
    assert len(list(order.batches())) == order.steps


def test_the_order_is_fixed_for_ever() -> None:
    """A run saved today and resumed by a later version meets the same samples."""
    assert permutation(10, seed=0, epoch=0) == (2, 3, 6, 5, 8, 7, 1, 0, 4, 9)
    assert permutation(10, seed=0, epoch=1) != permutation(10, seed=0, epoch=0)
    assert permutation(10, seed=1, epoch=0) != permutation(10, seed=0, epoch=0)


@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_largest_remainder(samples: int, weights: list[int]) -> None:
    counts = divide(samples, weights)
    assert sum(counts) == samples
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) < 1


def test_the_example_of_the_design() -> None:
    assert divide(30, [3, 1]) == [23, 7]            # 22.5 and 7.5: the lower rank gets the odd one


@given(st.integers(0, 50), st.integers(1, 100), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 7))
def test_micro_batches_cover_the_batch_in_rank_order(start: int, samples: int, weights: list[int], micro: int) -> None:
    batch = range(start, start + samples)
    pieces = micro_batches(batch, Division(tuple(weights), micro))
    by_rank = [list(chain(*(piece[rank] for piece in pieces))) for rank in range(len(weights))]
    assert list(chain(*by_rank)) == list(batch)
    assert [len(part) for part in by_rank] == divide(samples, weights)
    assert all(any(len(part) for part in piece) for piece in pieces)        # no micro-batch is empty on every rank
    assert len(pieces) <= micro


@given(st.integers(0, 100), st.integers(1, 40))
def test_evenly(length: int, parts: int) -> None:
    ranges = evenly(length, parts)
    assert list(chain(*ranges)) == list(range(length))
    assert max(map(len, ranges)) == -(-length // parts)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
