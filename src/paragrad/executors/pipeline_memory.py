"""The bytes that a rank holds while it runs its part of a pipeline.

They follow from the bytes of one micro-batch on each stage. Activations live from a forward to its
backward. The output of a forward for the next stage lives until it is known to have arrived. An
expected message lives from the posting of its receive (POSTED_RECEIVES ahead) until the task that
needs it is done. The program is the one that is run, proved and timed. Times play no part, so the
bytes are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paragrad.schedules.actions import Compute, Recv, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule, parse_task_slot

# Receives that are posted at a time: the one that the rank waits for, and two more. Their messages
# arrive during a task.
POSTED_RECEIVES = 3


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch on one stage.

    Attributes:
        input_message: The message of activations into the stage.

        gradient_message: The message of gradients out of it, to the stage before.

        saved: What a forward keeps for its backward.

        shared_with_message: The part of `saved` that is the message itself.

        saved_between_halves: What is kept between the two halves of a backward.

        first_half_peak: The peak in the first half of a backward.

        batch_copy: What is kept of the batch, if a forward runs on a copy of it.
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
    """A task, and the peak of held bytes since the task before it."""

    task: str
    bytes: int


StageBytesFunction = Callable[[int, int], StageBytes]  # (stage, micro-batch) -> its bytes


def compute_task_memory(
    schedule: MicroBatchSchedule,
    rank: int,
    size: int,
    stage_bytes: StageBytesFunction,
    recompute: bool = False,
) -> list[TaskMemory]:
    """Return what a rank holds, task by task.

    Args:
        schedule: The schedule of the micro-batches.

        rank: The rank.

        size: The number of ranks.

        stage_bytes: The bytes of a (stage, micro-batch).

        recompute: Whether forwards run again instead of keeping activations.
    """
    return list(MemorySimulation(schedule, rank, size, stage_bytes, recompute).play_program())


class MemorySimulation:
    """The bytes that one rank holds while it runs its program.

    Args:
        schedule: The schedule of the micro-batches.

        rank: The rank.

        size: The number of ranks.

        stage_bytes: The bytes of a (stage, micro-batch).

        recompute: Whether forwards run again instead of keeping activations.
    """

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
        """Generate the memory of each task, in order."""
        for action in self.program:
            if isinstance(action, Compute):
                stage, micro = parse_task_slot(self.rank, action.at)
                {"F": self.play_forward, "W": self.play_weight_gradients}.get(
                    action.what, self.play_backward
                )(action.what, stage, micro)
                self.peak_bytes, peak = sum(self.held_bytes.values()), self.peak_bytes
                yield TaskMemory(str(action), peak)
                continue
            while self.awaited_slots and self.posted_receives < POSTED_RECEIVES:
                self.hold_slot(
                    self.awaited_slots[0], self.find_message_bytes(self.awaited_slots.pop(0))
                )
                self.posted_receives += 1
            self.posted_receives -= isinstance(action, Recv)

    def hold_slot(self, slot: Slot, size: int) -> None:
        """Hold `size` bytes in a slot from now on."""
        self.held_bytes[slot] = size
        self.peak_bytes = max(self.peak_bytes, sum(self.held_bytes.values()))

    def release_slots(self, *slots: Slot) -> None:
        """Release the bytes of some slots."""
        for slot in slots:
            self.held_bytes.pop(slot, None)

    def find_message_bytes(self, slot: Slot) -> int:
        """Return the bytes of the message x{stage}.{micro} or g{stage}.{micro}."""
        stage, _, micro = str(slot)[1:].partition(".")
        sizes = self.stage_bytes(int(stage), int(micro))
        return sizes.input_message if str(slot)[0] == "x" else sizes.gradient_message

    def play_forward(self, _: str, stage: int, micro: int) -> None:
        """Account for a forward."""
        input_slot = f"x{stage}.{micro}"
        kept = f"kept {stage}.{micro}"
        sizes = self.stage_bytes(stage, micro)
        self.release_slots(*self.confirmed_sends.get(input_slot, ()))
        is_trained = stage >= self.schedule.first_trained_stage
        runs_again = (stage, micro) in self.recomputed_passes
        if is_trained and not runs_again:
            self.hold_slot(kept, sizes.saved - sizes.shared_with_message)
        if stage < self.last_stage:
            self.hold_slot(
                f"x{stage + 1}.{micro}", self.find_message_bytes(f"x{stage + 1}.{micro}")
            )
        if not runs_again:
            self.release_slots(input_slot)
            if is_trained:
                self.hold_slot(kept, sizes.saved)

    def play_backward(self, what: str, stage: int, micro: int) -> None:
        """Account for a backward, or for its first half."""
        input_slot = f"x{stage}.{micro}"
        gradient_slot = f"g{stage + 1}.{micro}"
        kept = f"kept {stage}.{micro}"
        sizes = self.stage_bytes(stage, micro)
        self.release_slots(*self.confirmed_sends.get(gradient_slot, ()))
        copy = sizes.batch_copy if (stage, micro) in self.recomputed_passes else 0
        if (stage, micro) in self.recomputed_passes:
            self.hold_slot(kept, sizes.saved - sizes.shared_with_message + copy)
            self.release_slots(input_slot)
            self.hold_slot(kept, sizes.saved + copy)
        if what == "I":
            self.hold_slot(kept, sizes.first_half_peak + copy)
            self.hold_slot(kept, sizes.saved_between_halves + copy)
        else:
            self.release_slots(kept)
        self.release_slots(gradient_slot)
        if stage > self.schedule.first_trained_stage:
            self.hold_slot(f"g{stage}.{micro}", sizes.gradient_message)

    def play_weight_gradients(self, _: str, stage: int, micro: int) -> None:
        """Account for the second half of a backward."""
        self.release_slots(f"kept {stage}.{micro}")
