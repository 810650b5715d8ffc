"""Axes: the ranks of a world in a grid, and which of them lie along some of its axes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from math import prod
from typing import Literal, NamedTuple

from paragrad.errors import Refused


class Axis(NamedTuple):
    """One way in which the ranks divide the work: so many stand side by side.

    divides: the samples of a batch, the domain of each sample (rows of an image), or the model.
    """

    name: str
    size: int
    divides: Literal["samples", "domain", "model"] = "samples"

    def __str__(self) -> str:
        return f"{self.name}({self.size})"


def build_grid(pairs: Iterable[Axis | tuple[str, int]], world_size: int) -> tuple[Axis, ...]:
    """The axes, from outer to inner, of a grid of so many ranks. Raises Refused."""
    axes = tuple(Axis(*pair) for pair in pairs)
    shown = " * ".join(map(str, axes)) or "no axes"
    names = [axis.name for axis in axes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Refused(f"{shown} has two axes {twice[0]}; give each a name of its own")
    if small := [axis for axis in axes if axis.size < 1]:
        raise Refused(f"{shown} has an axis of {small[0].size} ranks; give every axis at least 1")
    if (wanted := prod(axis.size for axis in axes)) != world_size:
        raise Refused(
            f"{shown} wants {wanted} ranks and the world has {world_size}; start {wanted}, or "
            f"choose "
            f"sizes whose product "
            f"is {world_size}"
        )
    return axes


def group_ranks_by_axes(axes: Collection[Axis], names: Collection[str]) -> list[list[int]]:
    """The sets of ranks that differ along the named axes alone, in the order of ranks; every
    rank is in one.

        lines((Axis("data", 2), Axis("tensor", 2)), ["data"]) == [[0, 2], [1, 3]]
    """
    if strange := set(names) - {axis.name for axis in axes}:
        raise ValueError(
            f"no axis {', '.join(sorted(strange))}; the world's are "
            f"{' * '.join(map(str, axes)) or 'none yet'}"
        )
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(axis.size) for axis in axes))):
        rest = tuple(at for axis, at in zip(axes, place, strict=True) if axis.name not in names)
        found.setdefault(rest, []).append(rank)
    return list(found.values())


def locate_rank(axes: Collection[Axis], rank: int) -> dict[str, int]:
    """Where a rank stands on every axis: place((Axis("data", 2), Axis("tensor", 2)), 2) ==
    {"data": 1, "tensor": 0}.
    """
    found = {}
    for axis in reversed([*axes]):
        rank, found[axis.name] = divmod(rank, axis.size)
    return found


def check_disjoint(rank_sets: Collection[Collection[int]], world_size: int) -> None:
    """Raises ValueError where a set has a rank that there is not, or two sets share one."""
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
                f"share a rank one "
                "after the other"
            )
        seen.add(rank)
