"""Work and depth of a schedule: its additions, and the longest chain of them (Ben-Nun & Hoefler
2018, arXiv 1802.09941).

An operation is the addition of one element. Every part carries the length of the chain that led
to it; messages hand it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.executors.interpreter import interpret_schedule
from paragrad.schedules.actions import (
    Collective,
    Compute,
    Recv,
    ScheduleError,
    Send,
    compute_slot_lengths,
    expand_slot,
)


@dataclass(frozen=True)
class WorkAndDepth:
    """W and D, in additions of one element."""

    work: int
    depth: int

    @property
    def parallelism(self) -> float:
        """Average parallelism W / D: as many processors could be busy on average."""
        return self.work / max(self.depth, 1)

    def compute_time_bounds(self, processors: int) -> tuple[float, float]:
        """Time on P processors: at least max(W/P, D), at most W/P + D (Brent 1974, doi
        10.1145/321812.321815).
        """
        return max(self.work / processors, self.depth), self.work / processors + self.depth


def compute_work_and_depth(schedule: Collective, size: int, length: int) -> WorkAndDepth:
    """Of all ranks together, over a vector of `length` elements."""
    chains = AdditionChains(size, list(compute_slot_lengths(schedule, size, length).values()))
    interpret_schedule(schedule.program, size, chains)
    return WorkAndDepth(chains.work, max(map(max, chains.depth)))


class AdditionChains:
    """The meaning of a walk in which a part holds the length of its longest chain of
    additions.
    """

    def __init__(self, size: int, lengths: list[int]) -> None:
        self.lengths = lengths
        self.depth = [[0] * len(lengths) for _ in range(size)]
        self.work = 0

    def read(self, rank: int, send: Send) -> list[int]:
        return [self.depth[rank][part] for part in expand_slot(send.slot)]  # type: ignore[index]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        depth = self.depth[rank]
        parts = expand_slot(recv.slot)
        if not recv.add:
            for part, chain in zip(parts, payload, strict=True):
                depth[part] = chain  # type: ignore[index]
            return
        added = sum(self.lengths[part] for part in parts)  # type: ignore[index, misc]
        self.work += added
        before: list[int] = [depth[part] for part in parts]  # type: ignore[index]
        longest = max(payload + before) + added
        for part in parts:
            depth[part] = longest  # type: ignore[index]

    def compute(self, rank: int, action: Compute) -> None:
        raise ScheduleError(f"rank {rank}: {action} is no addition of an exchange")
