"""`reduce=auto`: which algorithm, in how many segments, for a vector of this size on these links.

The clock plays every candidate on what is known of the machine; the quickest few are then tried once each on the vector's own
size, the backend's own all-reduce among them, and the quickest of those is taken. Trying costs some exchanges of the first step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paragrad.notation import Choice
from paragrad.planner.machine import Cluster, Link, Machine
from paragrad.players.clock import timed
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.compose import Composed
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.world import World

CANDIDATES: tuple[Composed, ...] = (
    Star(), Tree(), DoubleTree(1), DoubleTree(4), DoubleTree(16), Butterfly(), Halving(1), Halving(2), Halving(4), Direct(),
    Ring(), RingAsync(2), RingAsync(4))
TRIED = 4               # of them, beside the backend's own
ROUNDS = 5              # of the trial, in turn
CLOCKED = 32            # ranks up to which the clock plays all candidates; beyond, those of few messages


def predicted(size: int, length: int, element: int, cluster: Cluster) -> dict[Composed, float]:
    """Candidates and their times by the clock, the quickest first."""
    names = CANDIDATES if size <= CLOCKED else [each for each in CANDIDATES if not isinstance(each, Ring | RingAsync | Direct)]
    found = {each: timed(each, size, length, cluster, element=element).seconds for each in names}
    return dict(sorted(found.items(), key=lambda item: item[1]))


@dataclass(frozen=True)
class Pick:
    """What was picked, and why in words."""
    algorithm: Choice
    because: str


@dataclass
class Chooser:
    """Picks an algorithm for every vector size, once. Collective: all ranks ask in the same order.

    play(algorithm, vector): one all-reduce; native: the backend's own;  cluster: what is known of the ranks' links.
    """
    world: World
    native: Choice
    play: Callable[[Any, torch.Tensor], object]
    cluster: Cluster
    told: Callable[[int, Pick], None] = lambda bytes_, pick: None
    picked: dict[tuple[int, torch.dtype], Pick] = field(default_factory=dict)

    def pick(self, vector: torch.Tensor) -> Choice:
        key = vector.numel(), vector.dtype
        if key not in self.picked:
            self.picked[key] = self._tried(vector)
            self.told(vector.numel() * vector.element_size(), self.picked[key])
        return self.picked[key].algorithm

    def _tried(self, vector: torch.Tensor) -> Pick:
        times = predicted(self.world.size, vector.numel(), vector.element_size(), self.cluster)
        candidates = [*list(times)[:TRIED], self.native]
        seen: dict[Choice, list[float]] = {each: [] for each in candidates}
        mine = torch.zeros_like(vector)
        for turn in range(ROUNDS + 1):
            for each in candidates:
                self.world.barrier()
                start = time.perf_counter()
                self.play(each, mine)
                if turn:                            # the first warms up: connections are made when they are first used
                    seen[each].append(time.perf_counter() - start)
        medians = torch.tensor([statistics.median(seen[each]) for each in candidates], dtype=torch.float64)
        slowest = self.world.all_reduced(medians, "MAX").tolist()
        best = candidates[slowest.index(min(slowest))]
        told = ", ".join(f"{each} {1e3 * seconds:.3g} ms" + (f" (clock {1e3 * times[each]:.3g})" if each in times else "")
                         for each, seconds in zip(candidates, slowest, strict=True))
        return Pick(best, f"tried: {told}")


def cluster_of(world: World, link: Link, machine: Machine | None, gamma: float, here: int, cores: int) -> Cluster:
    """The ranks of a world on links of one kind; here: ranks on this host, which share its cores."""
    sharing = here if here > cores and world.size % here == 0 else 1
    return Cluster(machine.link(world.backend) if machine else link, machine.gamma if machine else gamma,
                   sharing=sharing, cores=cores if sharing > 1 else 1)
