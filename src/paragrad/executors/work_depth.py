"""Work and depth of a schedule: its additions, and the longest chain of them.

Source: Ben-Nun & Hoefler 2018, arXiv 1802.09941. An operation is the addition of one element. Every
part carries the length of the chain that led to it; messages pass it on.
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
    """Work W and depth D, in additions of one element."""

    work: int
    depth: int

    @property
    def parallelism(self) -> float:
        """Average parallelism W / D: how many processors could be busy on average."""
        return self.work / max(self.depth, 1)

    def compute_time_bounds(self, processors: int) -> tuple[float, float]:
        """Return the bounds of the time on P processors: at least max(W/P, D), at most W/P + D.

        Source: Brent 1974, doi 10.1145/321812.321815.

        Args:
            processors: The number of processors P.
        """
        return max(self.work / processors, self.depth), self.work / processors + self.depth


def compute_work_and_depth(schedule: Collective, size: int, length: int) -> WorkAndDepth:
    """Return the work and depth of all ranks together.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        length: The elements of the vector.
    """
    chains = AdditionChains(size, list(compute_slot_lengths(schedule, size, length).values()))
    interpret_schedule(schedule.program, size, chains)
    return WorkAndDepth(chains.work, max(map(max, chains.depth)))


class AdditionChains:
    """An interpretation in which a part holds the length of its longest chain of additions.

    Args:
        size: The number of ranks.
        lengths: The elements of each part.
    """

    def __init__(self, size: int, lengths: list[int]) -> None:
        self.lengths = lengths
        self.depth = [[0] * len(lengths) for _ in range(size)]
        self.work = 0

    def read(self, rank: int, send: Send) -> list[int]:
        """Return the chain lengths of the parts that a message carries."""
        return [self.depth[rank][part] for part in expand_slot(send.slot)]  # type: ignore[index]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        """Overwrite the chain lengths, or add: the longest chain grows by the added elements."""
        depth = self.depth[rank]
        parts = expand_slot(recv.slot)
        if not recv.add:
            for part, chain in zip(parts, payload, strict=True):
                depth[part] = chain  # type: ignore[index]
            return
        added = sum(self.lengths[part] for part in parts)  # type: ignore[index, misc]
        self.work += added
        own_chains: list[int] = [depth[part] for part in parts]  # type: ignore[index]
        longest = max(payload + own_chains) + added
        for part in parts:
            depth[part] = longest  # type: ignore[index]

    def compute(self, rank: int, action: Compute) -> None:
        """Refuse a Compute: an exchange only adds."""
        raise ScheduleError(f"rank {rank} computes {action}, and an exchange only adds")
