"""What one rank does in a pipeline's schedule, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paragrad.schedules.actions import Action, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule


@dataclass(frozen=True)
class RankProgram:
    """What one rank does in a schedule, and what follows from it.

    Attributes:
        program: The actions of the rank.

        backward_count: Number of backwards, with halves counted one by one.

        splits_backward: Whether backwards are split into halves.

        confirmed_sends: As MicroBatchSchedule.map_confirmed_sends defines.

        recomputed_passes: As MicroBatchSchedule.find_recomputed_passes defines.
    """

    program: list[Action]
    backward_count: int
    splits_backward: bool
    confirmed_sends: Mapping[Slot, list[Slot]]
    recomputed_passes: set[tuple[int, int]]

    @classmethod
    def build_for_rank(
        cls, micro_batch_schedule: MicroBatchSchedule, rank: int, size: int
    ) -> RankProgram:
        """Compute what a rank does in a schedule.

        Args:
            micro_batch_schedule: The schedule.
            rank: The rank.
            size: Number of ranks.

        Returns:
            Its program.
        """
        tasks = [what for what, *_ in micro_batch_schedule.list_tasks(rank, size)]
        return cls(
            list(micro_batch_schedule.program(rank, size)),
            sum(what != "F" for what in tasks),
            "W" in tasks,
            micro_batch_schedule.map_confirmed_sends(rank, size),
            micro_batch_schedule.find_recomputed_passes(rank, size),
        )
