"""What one rank does of a pipeline's schedule, found out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paragrad.schedules.actions import Action, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule


@dataclass(frozen=True)
class RankProgram:
    """What one rank does of a schedule, and what follows from it. over, again: as Pipelined
    says.
    """

    program: list[Action]
    backward_count: int  # and halves of them
    splits_backward: bool
    confirmed_sends: Mapping[Slot, list[Slot]]
    recomputed_passes: set[tuple[int, int]]

    @classmethod
    def build_for_rank(
        cls, micro_batch_schedule: MicroBatchSchedule, rank: int, size: int
    ) -> RankProgram:
        tasks = [what for what, *_ in micro_batch_schedule.list_tasks(rank, size)]
        return cls(
            list(micro_batch_schedule.program(rank, size)),
            sum(what != "F" for what in tasks),
            "W" in tasks,
            micro_batch_schedule.map_confirmed_sends(rank, size),
            micro_batch_schedule.find_recomputed_passes(rank, size),
        )
