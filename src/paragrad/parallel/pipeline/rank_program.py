"""What one rank does of a pipeline's schedule, found out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paragrad.schedules.actions import Action, Slot
from paragrad.schedules.pipeline import Pipelined


@dataclass(frozen=True)
class Order:
    """What one rank does of a schedule, and what follows from it. over, again: as Pipelined
    says.
    """

    program: list[Action]
    backwards: int  # and halves of them
    in_halves: bool
    over: Mapping[Slot, list[Slot]]
    again: set[tuple[int, int]]

    @classmethod
    def of(cls, pipelined: Pipelined, rank: int, size: int) -> Order:
        tasks = [what for what, *_ in pipelined.tasks(rank, size)]
        return cls(
            list(pipelined.program(rank, size)),
            sum(what != "F" for what in tasks),
            "W" in tasks,
            pipelined.over(rank, size),
            pipelined.again(rank, size),
        )
