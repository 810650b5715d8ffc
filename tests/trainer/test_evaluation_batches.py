"""The batches of a test are the same for every number of ranks, and contain each sample once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from paragrad.datasets.loading import Samples
from paragrad.trainer.evaluation_batches import (
    EvaluationPlan,
    choose_test_batch,
    has_rows_of_samples,
    is_divisible,
    iterate_evaluation_batches,
)

pytestmark = pytest.mark.pure

Collate = Callable[[list[int]], Any]


def stack_numbers(samples: list[int]) -> tuple[Tensor, Tensor]:
    """Return the samples as rows, and a random number for each."""
    return torch.tensor(samples), torch.rand(len(samples))


def put_time_first(samples: list[int]) -> tuple[Tensor, Tensor]:
    """Return five times of each sample; time is the first dimension."""
    return torch.tensor(samples).expand(5, -1), torch.rand(len(samples))


def pack_numbers(samples: list[int]) -> Any:
    return pack_sequence([torch.rand(2) + number for number in samples])


def count_numbers(samples: list[int]) -> tuple[Tensor, int]:
    return torch.tensor(samples), len(samples)


def want_four(samples: list[int]) -> Tensor:
    if len(samples) < 4:
        raise ValueError("too few")
    return torch.tensor(samples)


def load_parts(
    collate: Collate | None, samples: int, parts: int, batch: int = 12, largest: int = 256
) -> list[list[tuple[list[int], Any]]]:
    """Load the batches that each part of a test evaluates."""
    dataset = Samples(list(range(samples)), 7, collate)
    return [
        list(
            iterate_evaluation_batches(
                dataset, EvaluationPlan(samples, batch, largest, part, parts)
            )
        )
        for part in range(parts)
    ]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.integers(1, 9))
def test_every_sample_is_evaluated_once(samples: int, batch: int, largest: int, parts: int) -> None:
    for collate in (None, stack_numbers, put_time_first):
        found = load_parts(collate, samples, parts, batch, largest)
        places = [place for part in found for positions, _ in part for place in positions]
        assert sorted(places) == list(range(samples))
        for part, each in enumerate(found):
            sizes = [len(positions) for positions, _ in each]
            if collate is not put_time_first:
                assert max(sizes, default=0) <= largest
                plan = EvaluationPlan(samples, batch, largest, part, parts)
                assert sizes == plan.list_part_sizes(collate is not None)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.integers(1, 9))
def test_draws_of_a_sample_do_not_depend_on_parts(
    samples: int, batch: int, largest: int, parts: int
) -> None:
    """Earlier, the collate of each rank drew for the samples of that rank only."""
    expected = {
        place: float(number)
        for positions, (_, drawn) in load_parts(stack_numbers, samples, 1, batch)[0]
        for place, number in zip(positions, drawn, strict=True)
    }
    for part in load_parts(stack_numbers, samples, parts, batch, largest):
        for positions, (values, drawn) in part:
            assert values.tolist() == positions
            assert drawn.tolist() == [expected[place] for place in positions]


def test_test_batches_go_to_ranks_in_turn() -> None:
    """The last test batches are divided if there are fewer of them than ranks."""
    positions = [
        [(each[0], each[-1]) for each, _ in part] for part in load_parts(stack_numbers, 59, 2)
    ]
    assert positions == [[(0, 11), (24, 35), (48, 53)], [(12, 23), (36, 47), (54, 58)]]
    # torch's own collate: each rank loads its own samples only
    positions = [[(each[0], each[-1]) for each, _ in part] for part in load_parts(None, 59, 2)]
    assert positions == [[(0, 29)], [(30, 58)]]


@pytest.mark.parametrize("collate", [put_time_first, pack_numbers, count_numbers, want_four])
def test_batch_without_rows_stays_whole(collate: Collate) -> None:
    """There are three test batches and four ranks; the fourth rank gets no batch."""
    found = load_parts(collate, 29, 4, largest=5)
    assert [[positions for positions, _ in part] for part in found] == [
        [list(range(12))],
        [list(range(12, 24))],
        [list(range(24, 29))],
        [],
    ]


def test_rows_may_vanish_in_a_later_batch() -> None:
    """The collate returns a tensor for some batches, and packs the others.

    For example, it may pack a batch if its samples have unequal lengths.
    """

    def collate(samples: list[int]) -> Any:
        return pack_numbers(samples) if max(samples) > 20 else torch.tensor(samples)

    found = load_parts(collate, 29, 4, largest=5)
    places = [[(each[0], len(each)) for each, _ in part] for part in found]
    assert places == [[(0, 3)], [(3, 3), (12, 12)], [(6, 3), (24, 5)], [(9, 3)]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(5, 2), True),
        ({"a": torch.zeros(5), "b": [torch.zeros(5, 3), ("a", "b", "c", "d", "e")]}, True),
        (torch.zeros(4, 5), False),
        (torch.tensor(5.0), False),  # a number of the whole batch
        ((torch.zeros(5), 5), False),
        ((torch.zeros(5), None), False),
        (torch.eye(5).to_sparse(), False),
        (torch.nested.nested_tensor([torch.zeros(2)] * 5, layout=torch.jagged), False),
        (pack_sequence([torch.zeros(2)] * 5), False),
    ],
)
def test_batch_is_divided_if_all_of_it_has_rows(value: Any, expected: bool) -> None:
    assert is_divisible(value, 5) == expected


def test_time_that_equals_samples_by_chance_is_no_row() -> None:
    """Five times of five samples look like five rows of samples."""
    assert is_divisible(put_time_first([0, 1, 2, 3, 4]), 5)
    for count in (1, 2, 3, 29):
        assert not has_rows_of_samples(Samples(list(range(count)), 7, put_time_first))
        assert has_rows_of_samples(Samples(list(range(count)), 7, stack_numbers))


def test_size_follows_the_global_batch_only() -> None:
    """The size is 256 if the global batch is larger, or is not known yet."""
    assert [choose_test_batch(size) for size in (0, 1, 12, 1000)] == [256, 1, 12, 256]
