"""Memory: how many bytes a rank holds while it plays its part of a pipeline, from what one
micro-batch weighs on each stage.

Activations live from a forward to its backward; what a forward made for the next stage from
there until it is known to be gone; what is awaited from when it is asked for (POSTS ahead)
until the task that wants it is done. The program is the one that is played, proved and timed;
times are no part of it, so the bytes are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paragrad.schedules.actions import Compute, Recv, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule, parse_task_slot

# receives under way at a time: the one that is waited for, and two more, which come while a
# task is done
POSTED_RECEIVES = 3


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch on one stage.

    came: the message of activations into it;  back: that of gradients out of it, to the stage
    before;  kept: what a forward keeps for its backward;  shared: of that, what is the message
    itself;  halved: what is kept between the two halves of a backward;  halving: at most, in
    the first half;  batch: what of the batch is kept, where a forward is made on a copy of it.
    """

    input_message: int
    gradient_message: int
    saved: int
    shared_with_message: int = 0
    saved_between_halves: int = 0
    first_half_peak: int = 0
    batch_copy: int = 0


@dataclass(frozen=True)
class TaskMemory:
    """A task, and the most that was held since the task before it."""

    task: str
    bytes: int


StageBytesFunction = Callable[[int, int], StageBytes]  # of a stage and a micro-batch


def compute_task_memory(
    schedule: MicroBatchSchedule,
    rank: int,
    size: int,
    stage_bytes: StageBytesFunction,
    recompute: bool = False,
) -> list[TaskMemory]:
    """What a rank holds, task by task."""
    return list(MemorySimulation(schedule, rank, size, stage_bytes, recompute).play_program())


class MemorySimulation:
    """What one rank holds while it plays its program."""

    def __init__(
        self,
        schedule: MicroBatchSchedule,
        rank: int,
        size: int,
        stage_bytes: StageBytesFunction,
        recompute: bool,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.last_stage = schedule.count_stages(size) - 1
        self.stage_bytes = stage_bytes
        self.program = list(schedule.program(rank, size))
        self.confirmed_sends = schedule.map_confirmed_sends(rank, size)
        self.recomputed_passes = schedule.find_recomputed_passes(rank, size) if recompute else set()
        self.awaited_slots = [action.slot for action in self.program if isinstance(action, Recv)]
        self.posted_receives = 0
        self.held_bytes: dict[Slot, int] = {}
        self.peak_bytes = 0

    def play_program(self) -> Iterator[TaskMemory]:
        for action in self.program:
            if isinstance(action, Compute):
                stage, micro = parse_task_slot(self.rank, action.at)
                {"F": self.play_forward, "W": self.play_weight_gradients}.get(
                    action.what, self.play_backward
                )(action.what, stage, micro)
                self.peak_bytes, told = sum(self.held_bytes.values()), self.peak_bytes
                yield TaskMemory(str(action), told)
                continue
            while self.awaited_slots and self.posted_receives < POSTED_RECEIVES:
                self.hold_slot(
                    self.awaited_slots[0], self.find_message_bytes(self.awaited_slots.pop(0))
                )
                self.posted_receives += 1
            self.posted_receives -= isinstance(action, Recv)

    def hold_slot(self, slot: Slot, size: int) -> None:
        self.held_bytes[slot] = size
        self.peak_bytes = max(self.peak_bytes, sum(self.held_bytes.values()))

    def release_slots(self, *slots: Slot) -> None:
        for slot in slots:
            self.held_bytes.pop(slot, None)

    def find_message_bytes(self, slot: Slot) -> int:
        """Bytes of x{stage}.{micro} or g{stage}.{micro}."""
        stage, _, micro = str(slot)[1:].partition(".")
        weight = self.stage_bytes(int(stage), int(micro))
        return weight.input_message if str(slot)[0] == "x" else weight.gradient_message

    def play_forward(self, _: str, stage: int, micro: int) -> None:
        came = f"x{stage}.{micro}"
        kept = f"kept {stage}.{micro}"
        weight = self.stage_bytes(stage, micro)
        self.release_slots(*self.confirmed_sends.get(came, ()))
        keeps = stage >= self.schedule.first_trained_stage
        again = (stage, micro) in self.recomputed_passes
        if keeps and not again:
            self.hold_slot(kept, weight.saved - weight.shared_with_message)
        if stage < self.last_stage:
            self.hold_slot(
                f"x{stage + 1}.{micro}", self.find_message_bytes(f"x{stage + 1}.{micro}")
            )
        if not again:
            self.release_slots(came)
            if keeps:
                self.hold_slot(kept, weight.saved)

    def play_backward(self, what: str, stage: int, micro: int) -> None:
        came = f"x{stage}.{micro}"
        back = f"g{stage + 1}.{micro}"
        kept = f"kept {stage}.{micro}"
        weight = self.stage_bytes(stage, micro)
        self.release_slots(*self.confirmed_sends.get(back, ()))
        more = weight.batch_copy if (stage, micro) in self.recomputed_passes else 0
        if (stage, micro) in self.recomputed_passes:
            self.hold_slot(kept, weight.saved - weight.shared_with_message + more)
            self.release_slots(came)
            self.hold_slot(kept, weight.saved + more)
        if what == "I":
            self.hold_slot(kept, weight.first_half_peak + more)
            self.hold_slot(kept, weight.saved_between_halves + more)
        else:
            self.release_slots(kept)
        self.release_slots(back)
        if stage > self.schedule.first_trained_stage:
            self.hold_slot(f"g{stage}.{micro}", weight.gradient_message)

    def play_weight_gradients(self, _: str, stage: int, micro: int) -> None:
        self.release_slots(f"kept {stage}.{micro}")
