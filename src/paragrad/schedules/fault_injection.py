"""Planted faults of an all-reduce, for tests and documentation.

They show what the proof refuses, and what the fault would have cost.

- skip_chunk: both ends leave out every message of the first chunk. So nothing hangs, and each rank
  keeps its own numbers.
- mean_twice: the exchange divides by the number of ranks, and its caller divides again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paragrad.schedules.actions import Collective, Compute, Program, count_parts, expand_slot

FAULTS = ("skip_chunk", "mean_twice")


@dataclass(frozen=True)
class FaultySchedule:
    """An all-reduce with one of the FAULTS.

    Attributes:
        schedule: The correct schedule.
        fault: The name of the fault.
    """

    schedule: Collective
    fault: str

    def parts(self, size: int) -> int:
        return count_parts(self.schedule, size)

    @property
    def reproducible(self) -> bool:
        return bool(getattr(self.schedule, "reproducible", False))

    def program(self, rank: int, size: int) -> Program:
        for action in self.schedule.program(rank, size):
            if (
                self.fault == "skip_chunk"
                and not isinstance(action, Compute)
                and 0 in expand_slot(action.slot)
            ):
                continue
            yield action
        if self.fault == "mean_twice":
            for slot in range(self.parts(size)):
                yield Compute("mean", slot)

    def __str__(self) -> str:
        return f"{self.schedule} with {self.fault}"


def inject_fault(schedule: Any, fault: str | None) -> Any:
    """Return the schedule with a planted fault, or unchanged.

    Args:
        schedule: The schedule.
        fault: One of the FAULTS, or None.
    """
    return FaultySchedule(schedule, fault) if fault else schedule


def make_fault_compute(schedule: Any, size: int) -> Callable[[Compute, Any], None] | None:
    """Return the function by which the transport runs the Compute of a fault.

    Args:
        schedule: The schedule, faulty or not.
        size: The number of ranks.

    Returns:
        A function of the Compute and the part of the vector, or None if there is no fault.
    """

    def mean(action: Compute, part: Any) -> None:
        part.div_(size, rounding_mode=None if part.is_floating_point() else "floor")

    return mean if isinstance(schedule, FaultySchedule) else None
