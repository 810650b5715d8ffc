"""Pipeline schedules: the order in which each rank runs its forwards and backwards.

`gpipe` is GPipe: all forwards, then all backwards. `one_f_one_b` is 1F1B: one forward and one
backward in turn. `zero_bubble` is the zero bubble schedule ZB-H1: weight gradients fill the
waits. The pipeline bubble is the time in which ranks wait for work.

Every micro-batch goes forward through all stages and backward through them again. The messages
between the ranks follow from the order.

`F2` is the forward of micro-batch 2, and `B2` its backward. `I2` and `W2` are the two halves of a
backward: the gradients of the input, and of the weights. If a rank has several stages, `F2.5` is
the forward of stage 5; stage s is on rank s mod p.

    one_f_one_b, 2 ranks, 3 micro-batches
    0 | F0 F1 B0 F2 B1 B2
    1 | F0 B0 F1 B1 F2 B2

Stage s receives the activations `x{s}.{micro}`, and sends their gradient `g{s}.{micro}` back to the
stage before it. Every order runs the micro-batches of a stage in turn, forward and backward, so
sums of gradients are those of one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from paragrad.notation.choices import Family, Integer, option
from paragrad.schedules.actions import Compute, Program, Recv, Send, Slot

# (F, B, I or W; the stage among those of a rank, from 0; the micro-batch)
Task = tuple[str, int, int]


class PipelineSchedule(Family, abstract=True):
    """The order in which a rank runs its forwards and backwards.

    A class of your own needs `order(rank, size, micro)` only, and `chunks` if a rank has several
    stages. `order` generates the tasks of one rank: (F, B, I or W; the stage among those of the
    rank, from 0; the micro-batch).

    Attributes:
        chunks: The number of stages of each rank.
    """

    __slots__ = ()
    renamed_members: ClassVar[Mapping[str, str]] = {
        **Family.renamed_members,
        "filled": "pad_micro_count",
    }
    if TYPE_CHECKING:  # each class defines them

        @property
        def chunks(self) -> int: ...
        def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
            """Generate the tasks of one rank, in order.

            Args:
                rank: The rank.
                size: The number of ranks.
                micro: The number of micro-batches.
            """
    else:
        chunks = 1

    def pad_micro_count(self, micro: int, size: int) -> int:
        """Return with how many micro-batches the schedule runs; the added ones have no samples.

        Args:
            micro: The number of micro-batches that have samples.
            size: The number of ranks.
        """
        return micro


class Gpipe(PipelineSchedule):
    """All forwards, then all backwards (Huang et al. 2019)."""

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        yield from (("F", 0, each) for each in range(micro))
        yield from (("B", 0, each) for each in range(micro))


class OneFOneB(PipelineSchedule):
    """One forward, one backward in turn (PipeDream-flush, Narayanan et al. 2019).

    A rank keeps the activations of at most p - rank micro-batches.
    """

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        ahead = min(size - 1 - rank, micro)
        yield from (("F", 0, each) for each in range(ahead))
        for each in range(micro):
            if each + ahead < micro:
                yield "F", 0, each + ahead
            yield "B", 0, each


class Interleaved(PipelineSchedule):
    """One forward, one backward over several stages per rank (Narayanan et al. 2021).

    The bubble is `chunks` times shorter, and there are `chunks` times more messages (arXiv
    2104.04473).

    Attributes:
        chunks: The number of stages of each rank.
    """

    chunks: int = option(Integer(2), default=2)

    def pad_micro_count(self, micro: int, size: int) -> int:
        return -(-micro // size) * size

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        task_count = micro * self.chunks
        ahead = min(2 * (size - 1 - rank) + (self.chunks - 1) * size, task_count)

        def find_pass(number: int) -> tuple[int, int]:
            """Return (stage of this rank, micro-batch) of the forward with this number.

            `size` micro-batches go through one stage, then through the next.
            """
            micro_group, position = divmod(number, size * self.chunks)
            return position // size, micro_group * size + position % size

        for number in range(-ahead, task_count):
            if number + ahead < task_count:
                yield "F", *find_pass(number + ahead)
            if number >= 0:
                chunk, each = find_pass(number)
                yield "B", self.chunks - 1 - chunk, each


class ZeroBubble(PipelineSchedule):
    """ZB-H1: as one_f_one_b, but weight gradients fill the waits of a rank (Qi et al. 2024).

    Source: arXiv 2401.10241.
    """

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        ahead = min(size - 1 - rank, micro)
        yield from (("F", 0, each) for each in range(ahead))
        for each in range(micro + rank):
            if each + ahead < micro:
                yield "F", 0, each + ahead
            if each < micro:
                yield "I", 0, each
            if rank <= each:
                yield "W", 0, each - rank


@dataclass(frozen=True)
class MicroBatchSchedule:
    """The schedule of some micro-batches through the stages of all ranks.

    Attributes:
        schedule: The order in which each rank runs its tasks.
        micro: The number of micro-batches.
        first_trained_stage: The first stage with parameters to train. Earlier stages run no
            backwards.
    """

    schedule: PipelineSchedule
    micro: int
    first_trained_stage: int = 0

    def __str__(self) -> str:
        return (
            "one batch at a time"
            if self.micro == 1
            else f"{self.schedule} of {self.micro} micro-batches"
        )

    def count_stages(self, size: int) -> int:
        """Return the number of stages of all ranks."""
        return size * self.schedule.chunks

    def slots(self, size: int) -> list[Slot]:
        """List the slots of all messages: activations into each stage, and gradients out of it."""
        return [
            f"{what}{stage}.{micro}"
            for stage in range(1, self.count_stages(size))
            for what in "xg"
            for micro in range(self.micro)
            if what == "x" or stage > self.first_trained_stage
        ]

    def list_tasks(self, rank: int, size: int) -> Iterator[Task]:
        """Generate (task, stage, micro-batch) of one rank, in order."""
        for what, chunk, micro in self.schedule.order(rank, size, self.micro):
            if what == "F" or chunk * size + rank >= self.first_trained_stage:
                yield what, chunk * size + rank, micro

    def program(self, rank: int, size: int) -> Program:
        """Generate the actions of one rank, in order.

        A rank receives the messages of another rank in the order in which that rank sends them. No
        message that is needed arrives later because of that.
        """
        peers = {(rank - 1) % size, (rank + 1) % size} - {rank}
        coming = {
            peer: deque(
                slot
                for task in self.list_tasks(peer, size)
                for to, slot in self._list_outputs(task, size)
                if to == rank
            )
            for peer in peers
        }
        received: set[Slot] = set()
        for task in self.list_tasks(rank, size):
            for frm, slot in self._list_inputs(task, size):
                while frm != rank and slot not in received and coming[frm]:
                    yield Recv(frm, coming[frm][0])
                    received.add(coming[frm].popleft())
            what, stage, micro = task
            yield Compute(what, micro if self.schedule.chunks == 1 else f"{micro}.{stage}")
            yield from (Send(to, slot) for to, slot in self._list_outputs(task, size) if to != rank)

    def _list_inputs(self, task: Task, size: int) -> Iterator[tuple[int, Slot]]:
        """Generate (source rank, slot) of everything that a task needs."""
        what, stage, micro = task
        if what == "F" and stage > 0:
            yield (stage - 1) % size, f"x{stage}.{micro}"
        if what in "BI" and stage < self.count_stages(size) - 1:
            yield (stage + 1) % size, f"g{stage + 1}.{micro}"

    def _list_outputs(self, task: Task, size: int) -> Iterator[tuple[int, Slot]]:
        """Generate (target rank, slot) of everything that a task produces."""
        what, stage, micro = task
        if what == "F" and stage < self.count_stages(size) - 1:
            yield (stage + 1) % size, f"x{stage + 1}.{micro}"
        if what in "BI" and stage > self.first_trained_stage:
            yield (stage - 1) % size, f"g{stage}.{micro}"

    def map_confirmed_sends(self, rank: int, size: int) -> dict[Slot, list[Slot]]:
        """Map each message to a rank to the sends of that rank that the message confirms.

        The sender of the message received these sends before. So they are over when the message
        arrives.
        """
        confirmed: dict[Slot, list[Slot]] = {}
        for peer in {(rank - 1) % size, (rank + 1) % size} - {rank}:
            received: list[Slot] = []
            for action in self.program(peer, size):
                if isinstance(action, Recv) and action.frm == rank:
                    received.append(action.slot)
                elif isinstance(action, Send) and action.to == rank:
                    confirmed[action.slot] = received
                    received = []
        return confirmed

    def find_recomputed_passes(self, rank: int, size: int) -> set[tuple[int, int]]:
        """Return (stage, micro-batch) of the forwards that run again before their backward.

        This concerns schedules that keep no activations. A forward does not run again if its
        backward comes next.
        """
        tasks = list(self.list_tasks(rank, size))
        at_once = {
            later[1:]
            for earlier, later in pairwise(tasks)
            if earlier[0] == "F" and later[0] in "BI" and earlier[1:] == later[1:]
        }
        return {task[1:] for task in tasks if task[0] in "BI"} - at_once

    def count_kept_micro_batches(self, rank: int, size: int) -> int:
        """Return the largest number of micro-batches of which a rank keeps activations at once."""
        now = 0
        most = 0
        last = {"B", "W"}  # the last tasks that need the activations
        for what, stage, _ in self.list_tasks(rank, size):
            now += (what == "F" and stage >= self.first_trained_stage) - (what in last)
            most = max(most, now)
        return most


def parse_task_slot(rank: int, at: Slot) -> tuple[int, int]:
    """Return (stage, micro-batch) of a Compute.

    Args:
        rank: The rank, which is also the stage if each rank has one stage only.
        at: The slot of the Compute.
    """
    micro, _, stage = str(at).partition(".")
    return int(stage or rank), int(micro)
