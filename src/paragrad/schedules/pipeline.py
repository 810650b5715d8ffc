"""Pipelines: every micro-batch goes forward through all stages and backward through them again;
a schedule is the order in which each rank does its part of that. What travels between the ranks
follows from the order.

`F2` is the forward of micro-batch 2, `B2` its backward, or `I2` and `W2`, its two halves:
gradients of what came in, and of the weights. Where a rank has several stages, `F2.5` is that
of stage 5; stage s is on rank s mod p.

    one_f_one_b, 2 ranks, 3 micro-batches
    0 | F0 F1 B0 F2 B1 B2
    1 | F0 B0 F1 B1 F2 B2

Into stage s come the activations `x{s}.{micro}`, and out of it, back to the stage before it,
their gradient `g{s}.{micro}`. Every order takes the micro-batches of a stage in turn, forward
and backward: sums of gradients are those of one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from paragrad.notation.choices import Family, Integer, option
from paragrad.schedules.actions import Compute, Program, Recv, Send, Slot

# F, B, I or W; which of a rank's stages, from 0; micro-batch
Task = tuple[str, int, int]


class PipelineSchedule(Family, abstract=True):
    """In which order a rank makes its forwards and backwards.

    A class of your own needs `order` alone, and `chunks` where a rank has several stages.
    """

    __slots__ = ()
    if TYPE_CHECKING:  # of each class

        @property
        def chunks(self) -> int: ...
        def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
            """What rank `rank` of `size` does with `micro` micro-batches."""
    else:
        chunks = 1  # stages of each rank

    def pad_micro_count(self, micro: int, size: int) -> int:
        """With how many micro-batches it is played where there are `micro`: the others are of
        no samples.
        """
        return micro


class Gpipe(PipelineSchedule):
    """All forwards, then all backwards (Huang et al. 2019)."""

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        yield from (("F", 0, each) for each in range(micro))
        yield from (("B", 0, each) for each in range(micro))


class OneFOneB(PipelineSchedule):
    """One forward, one backward in turn: of at most p - rank micro-batches activations are kept
    (PipeDream-flush, Narayanan et al. 2019).
    """

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        ahead = min(size - 1 - rank, micro)
        yield from (("F", 0, each) for each in range(ahead))
        for each in range(micro):
            if each + ahead < micro:
                yield "F", 0, each + ahead
            yield "B", 0, each


class Interleaved(PipelineSchedule):
    """One forward, one backward over several stages per rank: the bubble is `chunks` times
    shorter, and there are as many times more messages (Narayanan et al. 2021, arXiv
    2104.04473).
    """

    chunks: int = option(Integer(2), default=2)

    def pad_micro_count(self, micro: int, size: int) -> int:
        return -(-micro // size) * size

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        every = micro * self.chunks
        ahead = min(2 * (size - 1 - rank) + (self.chunks - 1) * size, every)

        def turn(number: int) -> tuple[int, int]:
            """(stage of this rank, micro-batch): `size` micro-batches through one, then through
            the next.
            """
            group, within = divmod(number, size * self.chunks)
            return within // size, group * size + within % size

        for number in range(-ahead, every):
            if number + ahead < every:
                yield "F", *turn(number + ahead)
            if number >= 0:
                chunk, each = turn(number)
                yield "B", self.chunks - 1 - chunk, each


class ZeroBubble(PipelineSchedule):
    """ZB-H1: as one_f_one_b, and weights get their gradients when a rank would wait (Qi et al.
    2024, arXiv 2401.10241).
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
    """The schedule of `micro` micro-batches through the stages of all ranks.

    trained: the first stage that has anything to train; those before it make no backwards.
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
        return size * self.schedule.chunks

    def slots(self, size: int) -> list[Slot]:
        """Of everything that travels: activations into each stage, and gradients out of it."""
        return [
            f"{what}{stage}.{micro}"
            for stage in range(1, self.count_stages(size))
            for what in "xg"
            for micro in range(self.micro)
            if what == "x" or stage > self.first_trained_stage
        ]

    def list_tasks(self, rank: int, size: int) -> Iterator[Task]:
        """(what, stage, micro-batch), in order."""
        for what, chunk, micro in self.schedule.order(rank, size, self.micro):
            if what == "F" or chunk * size + rank >= self.first_trained_stage:
                yield what, chunk * size + rank, micro

    def program(self, rank: int, size: int) -> Program:
        """What comes from a rank is taken in the order in which that rank sends it: for what is
        needed nobody waits longer.
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
        here: set[Slot] = set()
        for task in self.list_tasks(rank, size):
            for frm, slot in self._list_inputs(task, size):
                while frm != rank and slot not in here and coming[frm]:
                    yield Recv(frm, coming[frm][0])
                    here.add(coming[frm].popleft())
            what, stage, micro = task
            yield Compute(what, micro if self.schedule.chunks == 1 else f"{micro}.{stage}")
            yield from (Send(to, slot) for to, slot in self._list_outputs(task, size) if to != rank)

    def _list_inputs(self, task: Task, size: int) -> Iterator[tuple[int, Slot]]:
        """(from which rank, what) there must be before a task."""
        what, stage, micro = task
        if what == "F" and stage > 0:
            yield (stage - 1) % size, f"x{stage}.{micro}"
        if what in "BI" and stage < self.count_stages(size) - 1:
            yield (stage + 1) % size, f"g{stage + 1}.{micro}"

    def _list_outputs(self, task: Task, size: int) -> Iterator[tuple[int, Slot]]:
        """(to which rank, what) there is after it."""
        what, stage, micro = task
        if what == "F" and stage < self.count_stages(size) - 1:
            yield (stage + 1) % size, f"x{stage + 1}.{micro}"
        if what in "BI" and stage > self.first_trained_stage:
            yield (stage - 1) % size, f"g{stage}.{micro}"

    def map_confirmed_sends(self, rank: int, size: int) -> dict[Slot, list[Slot]]:
        """{what comes to a rank: what the rank sent, and is known to be there by then, for who
        sends it took that first}.
        """
        found: dict[Slot, list[Slot]] = {}
        for peer in {(rank - 1) % size, (rank + 1) % size} - {rank}:
            took: list[Slot] = []
            for action in self.program(peer, size):
                if isinstance(action, Recv) and action.frm == rank:
                    took.append(action.slot)
                elif isinstance(action, Send) and action.to == rank:
                    found[action.slot] = took
                    took = []
        return found

    def find_recomputed_passes(self, rank: int, size: int) -> set[tuple[int, int]]:
        """(stage, micro-batch) of the forwards that are made again for their backward, where
        activations are not to be kept: all but those whose backward comes next.
        """
        tasks = list(self.list_tasks(rank, size))
        at_once = {
            two[1:]
            for one, two in pairwise(tasks)
            if one[0] == "F" and two[0] in "BI" and one[1:] == two[1:]
        }
        return {task[1:] for task in tasks if task[0] in "BI"} - at_once

    def count_kept_micro_batches(self, rank: int, size: int) -> int:
        """Of how many micro-batches a rank keeps a stage's activations at a time, at most."""
        now = 0
        most = 0
        last = {"B", "W"}  # what they are kept for
        for what, stage, _ in self.list_tasks(rank, size):
            now += (what == "F" and stage >= self.first_trained_stage) - (what in last)
            most = max(most, now)
        return most


def parse_task_slot(rank: int, at: Slot) -> tuple[int, int]:
    """(stage, micro-batch) of what a rank computes at `at`."""
    micro, _, stage = str(at).partition(".")
    return int(stage or rank), int(micro)
