"""Work and depth of a schedule: its additions, and the longest chain of them (Ben-Nun & Hoefler
2018, arXiv 1802.09941).

An operation is the addition of one element. Every part carries the length of the chain that led
to it; messages hand it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.executors.interpreter import walk
from paragrad.schedules.actions import (
    Collective,
    Compute,
    Recv,
    ScheduleError,
    Send,
    lengths_of,
    parts_in,
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

    def bounds(self, processors: int) -> tuple[float, float]:
        """Time on P processors: at least max(W/P, D), at most W/P + D (Brent 1974, doi
        10.1145/321812.321815).
        """
        return max(self.work / processors, self.depth), self.work / processors + self.depth


def work_and_depth(schedule: Collective, size: int, length: int) -> WorkAndDepth:
    """Of all ranks together, over a vector of `length` elements."""
    chains = Chains(size, list(lengths_of(schedule, size, length).values()))
    walk(schedule.program, size, chains)
    return WorkAndDepth(chains.work, max(map(max, chains.depth)))


class Chains:
    """The meaning of a walk in which a part holds the length of its longest chain of
    additions.
    """

    def __init__(self, size: int, lengths: list[int]) -> None:
        self.lengths = lengths
        self.depth = [[0] * len(lengths) for _ in range(size)]
        self.work = 0

    def read(self, rank: int, send: Send) -> list[int]:
        return [self.depth[rank][part] for part in parts_in(send.slot)]  # type: ignore[index]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        depth = self.depth[rank]
        parts = parts_in(recv.slot)
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
