"""A RankNumber stands for all ranks: it equals the same operations rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paragrad.executors.rank_number import NotUniform, RankNumber, find_distance

pytestmark = pytest.mark.pure


def list_numbers(number: RankNumber) -> list[int]:
    return [
        (rank + number.shift) % number.size * number.scale + number.offset
        for rank in range(number.size)
    ]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize(
    "program",
    [
        lambda rank, size: rank,
        lambda rank, size: (rank + 1) % size,
        lambda rank, size: (rank - 3 * size - 2) % size,
        lambda rank, size: ((2 + rank) % size - 1) % size * 3 + 2,
        lambda rank, size: (3 * ((rank - 1) % size) - 4) % (3 * size),
        lambda rank, size: (rank * 2 + 1 + 5) % (2 * size) - 1,
    ],
)
def test_all_ranks_at_once_equal_rank_by_rank(
    program: Callable[[Any, int], Any], size: int
) -> None:
    number = program(RankNumber(size), size)
    assert list_numbers(number) == [program(rank, size) for rank in range(size)]
    numbers = list_numbers(number)
    assert list_numbers(number.look_from(-1)) == [numbers[rank - 1] for rank in range(size)]


@pytest.mark.parametrize(
    "choice",
    [
        lambda rank: rank == 0,
        lambda rank: rank != 0,
        lambda rank: rank > 0,
        lambda rank: rank in (1, 2),
        lambda rank: not rank,
        lambda rank: rank % 2,
        lambda rank: rank // 2,
        lambda rank: rank ^ 1,
        lambda rank: 3 - rank,
        lambda rank: rank + rank,
        lambda rank: rank * rank,
        lambda rank: range(rank),
        lambda rank: [10, 20, 30, 40][rank],
        lambda rank: {0: 1}.get(rank),
        lambda rank: f"{rank:d}",
    ],
)
def test_choice_by_rank_raises(choice: Callable[[Any], Any]) -> None:
    """If a comparison were False for all ranks, another program would be timed.

    There would be no message.
    """
    with pytest.raises((NotUniform, TypeError)):
        choice(RankNumber(4))


def test_distance_is_that_of_all_ranks() -> None:
    rank = RankNumber(5)
    assert find_distance((rank - 1) % 5) == 4
    for peer in (rank, rank + 1, rank * 2 % 10, 3):  # the last rank + 1 is no rank
        with pytest.raises(NotUniform):
            find_distance(peer)


def test_numbers_are_equal_on_all_ranks_or_refused() -> None:
    rank = RankNumber(5)
    assert (rank + 4) % 5 == (rank - 1) % 5
    with pytest.raises(NotUniform):
        assert (rank + 1) % 5 == rank
