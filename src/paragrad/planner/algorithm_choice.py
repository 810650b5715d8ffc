"""`reduce=auto`: which algorithm, in how many segments, for a vector of this size on these
links.

The clock plays every candidate on what is known of the machine; the quickest few, and the
backend's own all-reduce, are then tried on vectors of that size, in turn, the better half of
them again, and so on to the last (sequential halving, Karnin, Koren, Somekh 2013, "Almost
optimal exploration in multi-armed bandits"); the backend's own stays to the last. What disturbs
a turn disturbs all that are in it: they are compared within turns. Those of the last that the
turns cannot tell apart are equal, and the backend's own, or the simplest, is taken. Trying
costs some exchanges in the first step. What is tried is proved before it is played, as the door
proves what is asked for.
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
from paragrad.executors.clock import timed
from paragrad.executors.machine import Cluster, Machine
from paragrad.executors.proof import PROVED, prove
from paragrad.notation.choices import Choice
from paragrad.planner.link_measurement import (
    BRIEF,
    added,
    first_elsewhere,
    measured_link,
    ranks_on_hosts,
)
from paragrad.planner.prediction_interval import interval
from paragrad.runtime.launcher_env import cores
from paragrad.runtime.world import World
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

CANDIDATES: tuple[Composed, ...] = (
    Star(),
    Tree(),
    DoubleTree(1),
    DoubleTree(4),
    DoubleTree(16),
    Butterfly(),
    Halving(1),
    Halving(2),
    Halving(4),
    Direct(),
    Ring(),
    RingAsync(2),
    RingAsync(4),
)
TRIED = 8  # of them, beside the backend's own
# messages of all ranks together: tried too where messages are short, as the work of cores that
FEWEST = (Star(), Tree())
# ranks share is what the clock knows least
MOMENT = 2.0  # seconds of exchanges that a trial may take, about
# seconds of an exchange, by the clock: from there on half as many are tried
LONG = 0.15
TURNS = 30  # of a stage
# of a stage, before anybody is dropped; long exchanges outlast a disturbance, there one will do
LEAST_TURNS = 3
# exchanges of one turn, where they are short: in training too one follows another
ROW = 4
SHORT = 0.02  # seconds
LAST = 3  # so many, or fewer, are in the last stage
APART = 1.05  # so much slower is not equal, however few turns there were
# ranks up to which the clock plays all candidates; beyond, those of few messages
CLOCKED = 32


def candidates(size: int, group: int = 1) -> list[Composed | TwoLevel]:
    """What may be picked for so many ranks; group: how many of them are on a host."""
    if size > CLOCKED:
        few: list[Composed | TwoLevel] = [
            each for each in CANDIDATES if not isinstance(each, Ring | RingAsync | Direct)
        ]
        return [*few, TwoLevel(across=Halving(1), group=group)] if 1 < group < size else few
    groups = {each for each in (2, group) if 1 < each < size and size % each == 0}
    return [*CANDIDATES, *(TwoLevel(group=each) for each in sorted(groups))]


def predicted(size: int, length: int, element: int, cluster: Cluster) -> dict[Choice, float]:
    """Candidates and their times by the clock, the quickest first."""
    found = {
        each: timed(each, size, length, cluster, element=element).seconds
        for each in candidates(size, cluster.group)
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _first_wrong(algorithms: list[Choice], size: int) -> str | None:
    """What is wrong with the first that is no all-reduce of so many ranks."""
    for each in algorithms:
        try:
            prove(each, size)  # type: ignore[arg-type]
        except ScheduleError as error:
            return (
                f"{each} is no all-reduce of {size} ranks: {error}; name another, such as "
                f"reduce=native"
            )
    return None


def slower(pairs: list[float]) -> bool:
    """Of ratios of times: was the one slower? A sign test, one-sided at 5 %: so many above 1
    are rare where both are alike.
    """
    above = sum(ratio > 1 for ratio in pairs)
    return (
        sum(math.comb(len(pairs), k) for k in range(above, len(pairs) + 1)) / 2 ** len(pairs) < 0.05
    )


def told_apart(ours: list[float], best: list[float]) -> bool:
    """Is the one slower than the best of all, by their times in the same turns, or by all of
    each? What comes and goes in less than a turn is in either of a pair.
    """
    pairs = [our / other for our, other in zip(ours, best, strict=True)]
    return max(
        statistics.median(pairs), statistics.median(ours) / statistics.median(best)
    ) > APART or slower(pairs)


@dataclass(frozen=True)
class Pick:
    """What was picked, and why in words."""

    algorithm: Choice
    because: str


@dataclass
class Chooser:
    """Picks an algorithm for every vector size, once. Collective: all ranks ask in the same
    order.

    native: the backend's own;  play(algorithm, vector): one all-reduce;  machine: what is known
    of the links, otherwise they are measured when first asked;  told(bytes, pick) is told of
    each.
    """

    world: World
    native: Choice
    play: Callable[[Any, torch.Tensor], object]
    machine: Machine | None = None
    told: Callable[[int, Pick], None] = lambda bytes_, pick: None
    picked: dict[tuple[int, torch.dtype], Pick] = field(default_factory=dict)
    cluster: Cluster | None = None
    known: str = ""  # where that is from
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
        tried = list(times)[: TRIED if quickest < LONG else TRIED // 2]
        if quickest < SHORT:
            tried += [each for each in FEWEST if each in times and each not in tried]
        self._prove(tried)
        seen: dict[Choice, list[float]] = {each: [] for each in (*tried, self.native)}
        self._try(list(seen), torch.zeros_like(vector), quickest, seen)
        most = max(map(len, seen.values()))
        last = [each for each, taken in seen.items() if len(taken) == most]
        best = min(last, key=lambda each: statistics.median(seen[each]))
        equal = [each for each in last if not told_apart(seen[each], seen[best])]
        simple: list[Choice] = [self.native, *candidates(self.world.size, self.cluster.group)]
        because = self._because(seen, equal, times, vector) if self.world.rank == 0 else None
        simplest: Any = min(equal, key=simple.index)
        return Pick(simplest, self.world.agreed(because))

    def _because(
        self,
        seen: dict[Choice, list[float]],
        equal: list[Choice],
        times: dict[Choice, float],
        vector: torch.Tensor,
    ) -> str:
        """Why, in words. Of rank 0 alone: the clock's intervals are work, and ranks may share
        cores.
        """
        told = ", ".join(
            f"{each} {_milliseconds(statistics.median(taken))}{self._foretold(each, times, vector)}"
            for each, taken in seen.items()
        )
        return f"tried: {told}{_not_told_apart(equal)}; links {self.known}"

    def _try(
        self,
        left: list[Choice],
        mine: torch.Tensor,
        quickest: float,
        seen: dict[Choice, list[float]],
    ) -> None:
        """Turns of all, of the better half, and so on until few are left: their seconds, the
        slowest rank's. Collective.

        quickest: seconds of an exchange, about.
        """
        row = ROW if quickest < SHORT else 1
        least = LEAST_TURNS if quickest < LONG else 1
        for each in left:
            # connections are made when they are first used
            self.play(each, mine[: self.world.size])
        self.play(self.native, mine)  # and memory
        # the same order on all ranks, another in every turn
        shuffled = random.Random(0)
        stages = 1 + max(0, math.ceil(math.log2(len(left) / LAST)))
        for stage in range(stages):
            spent = 0.0
            turns = 0
            while turns < least or (spent < MOMENT / stages and turns < TURNS):
                order = shuffled.sample(left, len(left))
                seconds = torch.tensor(
                    [self._seconds(each, mine, row) for each in order], dtype=torch.float64
                )
                slowest = self.world.all_reduced(seconds, "MAX").tolist()
                for each, taken in zip(order, slowest, strict=True):
                    seen[each].append(taken)
                spent = spent + row * sum(slowest)
                turns = turns + 1
            if stage < stages - 1:
                middle = [
                    statistics.median(turn)
                    for turn in zip(*(seen[each] for each in left), strict=True)
                ]
                left = sorted(
                    left,
                    key=lambda each: statistics.median(
                        taken / usual for taken, usual in zip(seen[each], middle, strict=True)
                    ),
                )[: -(-len(left) // 2)]
                if self.native not in left:
                    # what a user would have without us
                    left.append(self.native)

    def _foretold(self, algorithm: Choice, times: dict[Choice, float], vector: torch.Tensor) -> str:
        """What the clock said of it, in words."""
        if algorithm not in times or self.cluster is None:
            return ""
        around = interval(
            times[algorithm],
            self.cluster,
            lambda other: (
                timed(
                    algorithm,  # type: ignore[arg-type]
                    self.world.size,
                    vector.numel(),
                    other,
                    element=vector.element_size(),
                ).seconds
            ),
        )
        return f" (clock {' to '.join(map(_milliseconds, around or (times[algorithm],)))})"

    def _prove(self, algorithms: list[Choice]) -> None:
        """Each at the size of this world, once. Rank 0 does it for all, as ranks may share
        cores; all raise alike.
        """
        new = [each for each in algorithms if each not in self.proved]
        if new and self.world.size <= PROVED:
            wrong = self.world.agreed(
                _first_wrong(new, self.world.size) if self.world.rank == 0 else None
            )
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
        """The ranks on their links: where every host has as many ranks, that between hosts and
        that inside of one, otherwise one for all. Ranks share the cores of their host where
        they are more than these. All go by what rank 0 knows: candidates in another order would
        wait for each other.
        """
        self.machine = self.world.agreed(self.machine)
        size = self.world.size
        here = ranks_on_hosts(self.world)
        alike = set(here) == {here[0]}
        group = here[0] if alike and 1 < here[0] < size else 1
        processors = self.world.agreed(cores())
        sharing = here[0] if alike and here[0] > processors else 1
        if self.machine and not (self.machine.hosts == 1 and here[0] < size):
            link = self.machine.link(self.world.backend)
            gamma = self.machine.gamma
            self.known = self.machine.measured
        else:
            link = measured_link(self.world, BRIEF, rounds=3, peer=first_elsewhere(here))[0]
            gamma = added()
            self.known = "measured just before" + (
                ", as the machine file is of one host" if self.machine else ""
            )
        inside = None
        if group > 1:
            inside = measured_link(self.world, BRIEF, rounds=3)[0]
            self.known += "; inside a host: measured just before"
        return self.world.agreed(
            Cluster(link, gamma, inside, group, sharing, processors if sharing > 1 else 1)
        )  # type: ignore[no-any-return]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _not_told_apart(equal: list[Choice]) -> str:
    return (
        f"; not told apart, and the simplest taken: {', '.join(map(str, equal))}"
        if len(equal) > 1
        else ""
    )
