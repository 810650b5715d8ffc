"""What one rank does in a pipeline's schedule, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paragrad.executors.pipeline_memory import POSTED_RECEIVES
from paragrad.executors.transport import list_touched_parts, plan_postings
from paragrad.schedules.actions import Action, Compute, Recv, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule, parse_task_slot


@dataclass(frozen=True)
class StageTask:
    """A forward or a backward of one stage, or a half of a backward.

    Attributes:
        what: F, B, I or W, as in `schedules/pipeline.py`.

        stage: Number of the stage.

        micro: Number of the micro-batch.

        label: Its name in the record.

        arrived_messages: Messages of this rank that have arrived when the task begins, because a
            message that it needs confirms them.
    """

    what: str
    stage: int
    micro: int
    label: str
    arrived_messages: Sequence[Slot]


@dataclass(frozen=True)
class RankProgram:
    """What one rank does in a schedule, and what follows from it.

    Attributes:
        micro_batch_schedule: The schedule.

        program: The actions of the rank.

        touched_parts: The parts that each action touches, as in `ProgramRun`.

        postings: The receives that are posted before each action, as in `ProgramRun`.

        tasks: What each Compute of the program stands for.

        backward_count: Number of backwards, with halves counted one by one.

        splits_backward: Whether backwards are split into halves.

        recomputed_passes: As MicroBatchSchedule.find_recomputed_passes defines.
    """

    micro_batch_schedule: MicroBatchSchedule
    program: Sequence[Action]
    touched_parts: Sequence[Sequence[Slot]]
    postings: Sequence[Sequence[Recv]]
    tasks: Mapping[Compute, StageTask]
    backward_count: int
    splits_backward: bool
    recomputed_passes: frozenset[tuple[int, int]]

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
        program = list(micro_batch_schedule.program(rank, size))
        confirmed_sends = micro_batch_schedule.map_confirmed_sends(rank, size)
        tasks = dict[Compute, StageTask]()
        for action in program:
            if isinstance(action, Compute):
                stage, micro = parse_task_slot(rank, action.at)
                needed = f"x{stage}.{micro}" if action.what == "F" else f"g{stage + 1}.{micro}"
                tasks[action] = StageTask(
                    action.what, stage, micro, str(action), confirmed_sends.get(needed, ())
                )
        return cls(
            micro_batch_schedule,
            program,
            [list_touched_parts(each) for each in program],
            plan_postings(program, POSTED_RECEIVES),
            tasks,
            sum(each.what != "F" for each in tasks.values()),
            any(each.what == "W" for each in tasks.values()),
            frozenset(micro_batch_schedule.find_recomputed_passes(rank, size)),
        )
