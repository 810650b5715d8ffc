"""A small pipeline schedule with slots of any names, for the tests of every executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paragrad.executors.proof import Goal, SlotBits
from paragrad.schedules.actions import Compute, Program, Recv, ScheduleError, Send


@dataclass(frozen=True)
class Forwards:
    """A schedule of forwards only: every micro-batch goes through all ranks, one stage each."""

    micros: int

    def program(self, rank: int, size: int) -> Program:
        for micro in range(self.micros):
            if rank > 0:
                yield Recv(rank - 1, f"x{micro}")
            yield Compute("F", f"x{micro}")
            if rank < size - 1:
                yield Send(rank + 1, f"x{micro}")

    def slots(self, length: int) -> dict[Any, int]:
        return {f"x{micro}": length for micro in range(self.micros)}


def forward(rank: int, action: Compute, held: SlotBits) -> None:
    if held[action.at] != (1 << rank) - 1:
        raise ScheduleError(f"stage {rank} does not get {action.at} from the stage before it")
    held[action.at] |= 1 << rank


THROUGH = Goal(
    initial_slots=lambda schedule, size: [{}] * size,
    final_slots=lambda schedule, size: [
        *[{}] * (size - 1),
        dict.fromkeys(schedule.slots(1), (1 << size) - 1),
    ],
    compute=forward,
    describe_bit="the forward of stage {}".format,
)
