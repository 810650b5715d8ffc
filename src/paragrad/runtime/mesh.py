"""Axes: the grid of a world's ranks, and the sets of ranks along some of its axes.

torch calls such a grid a device mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from math import prod
from typing import Literal, NamedTuple

from paragrad.errors import Refused


class Axis(NamedTuple):
    """One dimension of the grid of ranks, along which the work is divided.

    Attributes:
        name: The name of the axis.

        size: The number of ranks along it.

        divides: What it divides: the samples of a batch, the domain of each sample (such as the
            rows of an image), or the model.
    """

    name: str
    size: int
    divides: Literal["samples", "domain", "model"] = "samples"

    def __str__(self) -> str:
        return f"{self.name}({self.size})"


def build_grid(pairs: Iterable[Axis | tuple[str, int]], world_size: int) -> tuple[Axis, ...]:
    """Build the axes of a grid and check them.

    Args:
        pairs: Axes, or pairs (name, size), from outer to inner.
        world_size: The number of ranks in the grid.

    Returns:
        The axes.

    Raises:
        Refused: Two axes share a name, an axis is empty, or the sizes do not give the world size.
    """
    axes = tuple(Axis(*pair) for pair in pairs)
    shown = " * ".join(map(str, axes)) or "no axes"
    names = [axis.name for axis in axes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Refused(f"{shown} has two axes {twice[0]}; give each a name of its own")
    if empty := [axis for axis in axes if axis.size < 1]:
        raise Refused(f"{shown} has an axis of {empty[0].size} ranks; give every axis at least 1")
    if (product := prod(axis.size for axis in axes)) != world_size:
        raise Refused(
            f"{shown} needs {product} ranks and the world has {world_size}; start {product}, or "
            f"choose sizes whose product is {world_size}"
        )
    return axes


def group_ranks_by_axes(axes: Collection[Axis], names: Collection[str]) -> list[list[int]]:
    """List the sets of ranks that differ only along the named axes. Every rank is in one set.

        group_ranks_by_axes((Axis("data", 2), Axis("tensor", 2)), ["data"]) == [[0, 2], [1, 3]]

    Args:
        axes: The axes of the grid, from outer to inner.
        names: The names of some of them.

    Returns:
        The sets, each in the order of ranks.

    Raises:
        ValueError: The grid has no axis of such a name.
    """
    if unknown := set(names) - {axis.name for axis in axes}:
        raise ValueError(
            f"no axis {', '.join(sorted(unknown))}; the world has "
            f"{' * '.join(map(str, axes)) or 'none yet'}"
        )
    ranks_by_rest: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(itertools.product(*(range(axis.size) for axis in axes))):
        rest = tuple(
            position
            for axis, position in zip(axes, coordinates, strict=True)
            if axis.name not in names
        )
        ranks_by_rest.setdefault(rest, []).append(rank)
    return list(ranks_by_rest.values())


def locate_rank(axes: Collection[Axis], rank: int) -> dict[str, int]:
    """Find the coordinates of a rank in the grid.

        locate_rank((Axis("data", 2), Axis("tensor", 2)), 2) == {"data": 1, "tensor": 0}

    Args:
        axes: The axes of the grid, from outer to inner.
        rank: The rank.

    Returns:
        The position along every axis, by the name of the axis.
    """
    coordinates = {}
    for axis in reversed([*axes]):
        rank, coordinates[axis.name] = divmod(rank, axis.size)
    return coordinates


def check_disjoint(rank_sets: Collection[Collection[int]], world_size: int) -> None:
    """Check that sets of ranks have no rank in common.

    Args:
        rank_sets: The sets.
        world_size: The number of ranks in the world.

    Raises:
        ValueError: The world lacks a rank of a set, or two sets share one.
    """
    seen: set[int] = set()
    for rank in itertools.chain.from_iterable(rank_sets):
        if not 0 <= rank < world_size:
            raise ValueError(
                f"there is no rank {rank} in a world of {world_size}, among "
                f"{list(map(list, rank_sets))}"
            )
        if rank in seen:
            raise ValueError(
                f"rank {rank} is named twice among {list(map(list, rank_sets))}; ask for sets that "
                "share a rank in separate calls"
            )
        seen.add(rank)
