"""`reduce=auto`: which algorithm, in how many segments, for a vector of this size on these links.

The clock plays every candidate on what is known of the machine; the quickest few, and the backend's own all-reduce, are then
tried on vectors of that size, in turn, the better half of them again and longer, and so on to the last (sequential halving,
Karnin, Koren, Somekh 2013, "Almost optimal exploration in multi-armed bandits"). Trying costs some exchanges in the first step.
What is tried is proved before it is played, as the door proves what is asked for.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paragrad.errors import StepFailed
from paragrad.notation.choices import Choice
from paragrad.planner.measuring import BRIEF, added, first_elsewhere, measured_link, ranks_on_hosts
from paragrad.players.clock import timed
from paragrad.players.machine import Cluster, Machine
from paragrad.players.proof import PROVED, prove
from paragrad.schedules.actions import ScheduleError
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.compose import Composed
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import TwoLevel
from paragrad.world.launched import cores
from paragrad.world.world import World

CANDIDATES: tuple[Composed, ...] = (
    Star(), Tree(), DoubleTree(1), DoubleTree(4), DoubleTree(16), Butterfly(), Halving(1), Halving(2), Halving(4), Direct(),
    Ring(), RingAsync(2), RingAsync(4))
TRIED = 8               # of them, beside the backend's own
MOMENT = 3.0            # seconds of exchanges that a trial may take, about, by the clock; where few fit, half as many are tried
FEW, MOST = 20, 200     # exchanges of a trial
ROW = 4                 # exchanges of one turn, where they are short: in training too one follows another
SHORT = 0.02            # seconds
CLOCKED = 32            # ranks up to which the clock plays all candidates; beyond, those of few messages


def candidates(size: int, group: int = 1) -> list[Composed | TwoLevel]:
    """What may be picked for so many ranks; group: how many of them are on a host."""
    if size > CLOCKED:
        few: list[Composed | TwoLevel] = [each for each in CANDIDATES if not isinstance(each, Ring | RingAsync | Direct)]
        return [*few, TwoLevel(across=Halving(1), group=group)] if 1 < group < size else few
    groups = {each for each in (2, group) if 1 < each < size and size % each == 0}
    return [*CANDIDATES, *(TwoLevel(group=each) for each in sorted(groups))]


def predicted(size: int, length: int, element: int, cluster: Cluster) -> dict[Choice, float]:
    """Candidates and their times by the clock, the quickest first."""
    found = {each: timed(each, size, length, cluster, element=element).seconds for each in candidates(size, cluster.group)}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _first_wrong(algorithms: list[Choice], size: int) -> str | None:
    """What is wrong with the first that is no all-reduce of so many ranks."""
    for each in algorithms:
        try:
            prove(each, size)                                                           # type: ignore[arg-type]
        except ScheduleError as error:
            return f"{each} is no all-reduce of {size} ranks: {error}; name another, such as reduce=native"
    return None


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
    known: str = ""                     # where that is from
    proved: set[Choice] = field(default_factory=set)

    def pick(self, vector: torch.Tensor) -> Choice:
        key = vector.numel(), vector.dtype
        if key not in self.picked:
            self.picked[key] = self._tried(vector)
            self.told(vector.nbytes, self.picked[key])
        return self.picked[key].algorithm

    def _tried(self, vector: torch.Tensor) -> Pick:
        self.cluster = self.cluster or self._known()
        times = predicted(self.world.size, vector.numel(), vector.element_size(), self.cluster)
        quickest = next(iter(times.values()))
        exchanges = min(MOST, int(MOMENT / quickest))
        tried = list(times)[:TRIED if exchanges >= FEW else TRIED // 2]
        self._prove(tried)
        left = [*tried, self.native]
        seen: dict[Choice, list[float]] = {each: [] for each in left}
        mine = torch.zeros_like(vector)
        for each in left:
            self.play(each, mine[:self.world.size])                 # connections are made when they are first used
        self.play(self.native, mine)                                # and memory
        shuffled = random.Random(0)                                 # the same order on all ranks, another in every turn
        stages = math.ceil(math.log2(len(left)))
        row = ROW if quickest < SHORT else 1
        while len(left) > 1:
            turns = max(1, exchanges // (stages * len(left) * row))
            order = [each for _ in range(turns) for each in shuffled.sample(left, len(left))]
            seconds = torch.tensor([self._seconds(each, mine, row) for each in order], dtype=torch.float64)
            for each, slowest in zip(order, self.world.all_reduced(seconds, "MAX").tolist(), strict=True):
                seen[each].append(slowest)
            left = sorted(left, key=lambda each: statistics.median(seen[each]))[:-(-len(left) // 2)]
        told = ", ".join(f"{each} {1e3 * statistics.median(taken):.3g} ms" +
                         (f" (clock {1e3 * times[each]:.3g})" if each in times else "") for each, taken in seen.items())
        return Pick(left[0], f"tried: {told}; links {self.known}")

    def _prove(self, algorithms: list[Choice]) -> None:
        """Each at the size of this world, once. Rank 0 does it for all, as ranks may share cores; all raise alike."""
        new = [each for each in algorithms if each not in self.proved]
        if new and self.world.size <= PROVED:
            wrong = self.world.agreed(_first_wrong(new, self.world.size) if self.world.rank == 0 else None)
            if wrong:
                raise StepFailed(wrong)
        self.proved.update(new)

    def _seconds(self, algorithm: Choice, vector: torch.Tensor, times: int) -> float:
        """Seconds per exchange on this rank, of some in a row."""
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(times):
            self.play(algorithm, vector)
        return (time.perf_counter() - start) / times

    def _known(self) -> Cluster:
        """The ranks on their links: where every host has as many ranks, that between hosts and that inside of one, otherwise
        one for all. Ranks share the cores of their host where they are more than these. All go by what rank 0 knows: candidates
        in another order would wait for each other.
        """
        self.machine = self.world.agreed(self.machine)
        size, here = self.world.size, ranks_on_hosts(self.world)
        alike = set(here) == {here[0]}
        group = here[0] if alike and 1 < here[0] < size else 1
        processors = self.world.agreed(cores())
        sharing = here[0] if alike and here[0] > processors else 1
        if self.machine and not (self.machine.hosts == 1 and here[0] < size):
            link, gamma, self.known = self.machine.link(self.world.backend), self.machine.gamma, self.machine.measured
        else:
            link, gamma = measured_link(self.world, BRIEF, rounds=1, peer=first_elsewhere(here))[0], added()
            self.known = "measured just before" + (", as the machine file is of one host" if self.machine else "")
        inside = None
        if group > 1:
            inside = measured_link(self.world, BRIEF, rounds=1)[0]
            self.known += "; inside a host: measured just before"
        return self.world.agreed(Cluster(link, gamma, inside, group, sharing, processors if sharing > 1 else 1))    # type: ignore[no-any-return]
