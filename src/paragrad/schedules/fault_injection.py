"""Planted bugs of an all-reduce, for the tests and the docs: what the proof refuses, and what
it would have cost.

skip_chunk: both ends leave out every message of the first chunk, so nothing hangs and each rank
keeps its own numbers. mean_twice: the exchange divides by the number of ranks, and whoever
called it divides again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paragrad.schedules.actions import Collective, Compute, Program, parts_for, parts_in

SABOTAGES = ("skip_chunk", "mean_twice")


@dataclass(frozen=True)
class Sabotaged:
    """An all-reduce with one of the SABOTAGES in it."""

    schedule: Collective
    bug: str

    def parts(self, size: int) -> int:
        return parts_for(self.schedule, size)

    @property
    def reproducible(self) -> bool:
        return bool(getattr(self.schedule, "reproducible", False))

    def program(self, rank: int, size: int) -> Program:
        for action in self.schedule.program(rank, size):
            if (
                self.bug == "skip_chunk"
                and not isinstance(action, Compute)
                and 0 in parts_in(action.slot)
            ):
                continue
            yield action
        if self.bug == "mean_twice":
            for slot in range(self.parts(size)):
                yield Compute("mean", slot)

    def __str__(self) -> str:
        return f"{self.schedule} with {self.bug}"


def sabotaged(schedule: Any, bug: str | None) -> Any:
    """The schedule with a planted bug, or as it is."""
    return Sabotaged(schedule, bug) if bug else schedule


def planted(schedule: Any, size: int) -> Callable[[Compute, Any], None] | None:
    """What the wire is to do where a bug computes, on the part of a vector; None where there is
    no bug.
    """

    def mean(action: Compute, part: Any) -> None:
        part.div_(size, rounding_mode=None if part.is_floating_point() else "floor")

    return mean if isinstance(schedule, Sabotaged) else None
