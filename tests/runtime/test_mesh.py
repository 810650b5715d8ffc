"""The device mesh: which ranks form groups along its axes. No rank process is started."""

from __future__ import annotations

import pytest

from paragrad.errors import Refused
from paragrad.runtime.mesh import Axis, build_grid, check_disjoint, group_ranks_by_axes

pytestmark = pytest.mark.pure

THREE = (Axis("data", 2), Axis("tensor", 2), Axis("pipeline", 2))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # along the last axis, ranks are neighbours
        (["pipeline"], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (["tensor"], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (["data"], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # the order of the names does not matter
        (["pipeline", "data"], [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (["data", "tensor", "pipeline"], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ([], [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_rank_lines_of_a_cube(names: list[str], expected: list[list[int]]) -> None:
    assert group_ranks_by_axes(THREE, names) == expected


def test_rank_lines_of_unequal_sizes() -> None:
    axes = build_grid([("data", 3), ("tensor", 2)], 6)
    assert group_ranks_by_axes(axes, ["data"]) == [[0, 2, 4], [1, 3, 5]]
    assert group_ranks_by_axes(axes, ["tensor"]) == [[0, 1], [2, 3], [4, 5]]
    assert group_ranks_by_axes(build_grid([("data", 1), ("tensor", 3)], 3), ["data"]) == [
        [0],
        [1],
        [2],
    ]


@pytest.mark.parametrize(
    ("pairs", "ranks", "words"),
    [
        (
            [("data", 2), ("tensor", 2)],
            6,
            r"data\(2\) \* tensor\(2\) needs 4 ranks and the world has 6; start 4, or choose sizes",
        ),
        ([("data", 2)], 1, "needs 2 ranks and the world has 1"),
        ([], 2, "no axes needs 1 ranks and the world has 2"),
        ([("data", 2), ("data", 2)], 4, "two axes data; give each a name of its own"),
        ([("data", -2), ("tensor", -2)], 4, "an axis of -2 ranks; give every axis at least 1"),
    ],
)
def test_mesh_that_is_not_the_world_is_refused(
    pairs: list[tuple[str, int]], ranks: int, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        build_grid(pairs, ranks)


def test_missing_axis_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"no axis spatial; the world has data\(2\) \* tensor\(2\) \* pipeline\(2\)",
    ):
        group_ranks_by_axes(THREE, ["data", "spatial"])
    with pytest.raises(ValueError, match="no axis data; the world has none yet"):
        group_ranks_by_axes((), ["data"])


def test_rank_sets_are_disjoint_and_valid() -> None:
    check_disjoint([[3, 0], [1]], 4)
    check_disjoint([], 4)
    with pytest.raises(ValueError, match=r"no rank 4 in a world of 4, among \[\[0, 4\]\]"):
        check_disjoint([[0, 4]], 4)
    with pytest.raises(ValueError, match="no rank -1"):
        check_disjoint([[-1]], 4)
    for twice in ([[0, 1], [1, 2]], [[1, 1]]):
        with pytest.raises(ValueError, match="rank 1 is named twice"):
            check_disjoint(twice, 4)
