"""`reduce=auto`: which algorithm, in how many segments, for a vector of this size on these links.

The clock plays every candidate on what is known of the machine; the quickest few, and the backend's own all-reduce, are then
tried on vectors of that size, and the quickest of them is taken. Trying costs some exchanges in the first step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paragrad.launching import cores
from paragrad.notation import Choice
from paragrad.planner.machine import Cluster, Machine
from paragrad.planner.measuring import BRIEF, added, measured_link
from paragrad.players.clock import timed
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.compose import Composed
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.world import World, ranks_here

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

    native: the backend's own;  play(algorithm, vector): one all-reduce;  machine: what is known of the links, otherwise they
    are measured when first asked;  told(bytes, pick) is told of each.
    """
    world: World
    native: Choice
    play: Callable[[Any, torch.Tensor], object]
    machine: Machine | None = None
    told: Callable[[int, Pick], None] = lambda bytes_, pick: None
    picked: dict[tuple[int, torch.dtype], Pick] = field(default_factory=dict)
    cluster: Cluster | None = None

    def pick(self, vector: torch.Tensor) -> Choice:
        key = vector.numel(), vector.dtype
        if key not in self.picked:
            self.picked[key] = self._tried(vector)
            self.told(vector.nbytes, self.picked[key])
        return self.picked[key].algorithm

    def _tried(self, vector: torch.Tensor) -> Pick:
        self.cluster = self.cluster or self._known()
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
        return Pick(best, f"tried: {told}; links {self.machine.measured if self.machine else 'measured just before'}")

    def _known(self) -> Cluster:
        """The ranks on their links; those of a host share its cores where they are more than these. All ranks go by what rank 0
        knows: candidates in another order would wait for each other.
        """
        self.machine = self.world.agreed(self.machine)
        here, processors = ranks_here() or self.world.size, cores()
        sharing = here if here > processors and self.world.size % here == 0 else 1
        if self.machine:
            link, gamma = self.machine.link(self.world.backend), self.machine.gamma
        else:
            link, gamma = measured_link(self.world, BRIEF, rounds=1)[0], added()
        known: Cluster = self.world.agreed(Cluster(link, gamma, sharing=sharing, cores=processors if sharing > 1 else 1))
        return known
