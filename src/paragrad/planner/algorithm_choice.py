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
from paragrad.executors.clock import time_schedule
from paragrad.executors.machine import Cluster, Machine
from paragrad.executors.proof import MAX_PROVED_RANKS, prove_schedule
from paragrad.notation.choices import Choice
from paragrad.planner.link_measurement import (
    FEW_SIZES,
    count_ranks_on_hosts,
    find_first_remote_rank,
    measure_addition,
    measure_link,
)
from paragrad.planner.prediction_interval import predict_interval
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.world import World
from paragrad.schedules.actions import ScheduleError
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.compose import ComposedAllReduce
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import TwoLevel

CANDIDATES: tuple[ComposedAllReduce, ...] = (
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
MAX_TRIED = 8  # of them, beside the backend's own
# messages of all ranks together: tried too where messages are short, as the work of cores that
FEW_MESSAGES = (Star(), Tree())
# ranks share is what the clock knows least
TRIAL_SECONDS = 2.0  # seconds of exchanges that a trial may take, about
# seconds of an exchange, by the clock: from there on half as many are tried
LONG_EXCHANGE = 0.15
MAX_TURNS = 30  # of a stage
# of a stage, before anybody is dropped; long exchanges outlast a disturbance, there one will do
MIN_TURNS = 3
# exchanges of one turn, where they are short: in training too one follows another
EXCHANGES_PER_TURN = 4
SHORT_EXCHANGE = 0.02  # seconds
MAX_FINALISTS = 3  # so many, or fewer, are in the last stage
SLOWER_RATIO = 1.05  # so much slower is not equal, however few turns there were
# ranks up to which the clock plays all candidates; beyond, those of few messages
MAX_CLOCKED_RANKS = 32


def list_candidates(size: int, group: int = 1) -> list[ComposedAllReduce | TwoLevel]:
    """What may be picked for so many ranks; group: how many of them are on a host."""
    if size > MAX_CLOCKED_RANKS:
        few: list[ComposedAllReduce | TwoLevel] = [
            each for each in CANDIDATES if not isinstance(each, Ring | RingAsync | Direct)
        ]
        return [*few, TwoLevel(across=Halving(1), group=group)] if 1 < group < size else few
    groups = {each for each in (2, group) if 1 < each < size and size % each == 0}
    return [*CANDIDATES, *(TwoLevel(group=each) for each in sorted(groups))]


def predict_candidate_times(
    size: int, length: int, element: int, cluster: Cluster
) -> dict[Choice, float]:
    """Candidates and their times by the clock, the quickest first."""
    found = {
        each: time_schedule(each, size, length, cluster, element_bytes=element).seconds
        for each in list_candidates(size, cluster.group)
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _find_wrong_algorithm(algorithms: list[Choice], size: int) -> str | None:
    """What is wrong with the first that is no all-reduce of so many ranks."""
    for each in algorithms:
        try:
            prove_schedule(each, size)  # type: ignore[arg-type]
        except ScheduleError as error:
            return (
                f"{each} is no all-reduce of {size} ranks: {error}; name another, such as "
                f"reduce=native"
            )
    return None


def is_slower_by_sign_test(ratios: list[float]) -> bool:
    """Of ratios of times: was the one slower? A sign test, one-sided at 5 %: so many above 1
    are rare where both are alike.
    """
    above = sum(ratio > 1 for ratio in ratios)
    return (
        sum(math.comb(len(ratios), k) for k in range(above, len(ratios) + 1)) / 2 ** len(ratios)
        < 0.05
    )


def is_measurably_slower(times: list[float], best_times: list[float]) -> bool:
    """Is the one slower than the best of all, by their times in the same turns, or by all of
    each? What comes and goes in less than a turn is in either of a pair.
    """
    pairs = [our / other for our, other in zip(times, best_times, strict=True)]
    return max(
        statistics.median(pairs), statistics.median(times) / statistics.median(best_times)
    ) > SLOWER_RATIO or is_slower_by_sign_test(pairs)


@dataclass(frozen=True)
class AlgorithmChoice:
    """What was picked, and why in words."""

    algorithm: Choice
    because: str


@dataclass
class AlgorithmChooser:
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
    on_choice: Callable[[int, AlgorithmChoice], None] = lambda bytes_, pick: None
    choices: dict[tuple[int, torch.dtype], AlgorithmChoice] = field(default_factory=dict)
    cluster: Cluster | None = None
    link_source: str = ""  # where that is from
    proved_algorithms: set[Choice] = field(default_factory=set)

    def choose_algorithm(self, vector: torch.Tensor) -> Choice:
        key = vector.numel(), vector.dtype
        if key not in self.choices:
            self.choices[key] = self._try_candidates(vector)
            self.on_choice(vector.nbytes, self.choices[key])
        return self.choices[key].algorithm

    def _try_candidates(self, vector: torch.Tensor) -> AlgorithmChoice:
        self.cluster = self.cluster or self._measure_cluster()
        times = predict_candidate_times(
            self.world.size, vector.numel(), vector.element_size(), self.cluster
        )
        quickest = next(iter(times.values()))
        tried = list(times)[: MAX_TRIED if quickest < LONG_EXCHANGE else MAX_TRIED // 2]
        if quickest < SHORT_EXCHANGE:
            tried += [each for each in FEW_MESSAGES if each in times and each not in tried]
        self._prove_new_algorithms(tried)
        seen: dict[Choice, list[float]] = {each: [] for each in (*tried, self.native)}
        self._run_trials(list(seen), torch.zeros_like(vector), quickest, seen)
        most = max(map(len, seen.values()))
        last = [each for each, taken in seen.items() if len(taken) == most]
        best = min(last, key=lambda each: statistics.median(seen[each]))
        equal = [each for each in last if not is_measurably_slower(seen[each], seen[best])]
        simple: list[Choice] = [self.native, *list_candidates(self.world.size, self.cluster.group)]
        because = self._explain_choice(seen, equal, times, vector) if self.world.rank == 0 else None
        simplest: Any = min(equal, key=simple.index)
        return AlgorithmChoice(simplest, self.world.broadcast_object(because))

    def _explain_choice(
        self,
        measured: dict[Choice, list[float]],
        equals: list[Choice],
        predictions: dict[Choice, float],
        vector: torch.Tensor,
    ) -> str:
        """Why, in words. Of rank 0 alone: the clock's intervals are work, and ranks may share
        cores.
        """
        told = ", ".join(
            f"{each} {_format_trial_time(statistics.median(taken))}"
            f"{self._describe_prediction(each, predictions, vector)}"
            for each, taken in measured.items()
        )
        return f"tried: {told}{_describe_equals(equals)}; links {self.link_source}"

    def _run_trials(
        self,
        remaining: list[Choice],
        vector: torch.Tensor,
        quickest: float,
        measured: dict[Choice, list[float]],
    ) -> None:
        """Turns of all, of the better half, and so on until few are left: their seconds, the
        slowest rank's. Collective.

        quickest: seconds of an exchange, about.
        """
        row = EXCHANGES_PER_TURN if quickest < SHORT_EXCHANGE else 1
        least = MIN_TURNS if quickest < LONG_EXCHANGE else 1
        for each in remaining:
            # connections are made when they are first used
            self.play(each, vector[: self.world.size])
        self.play(self.native, vector)  # and memory
        # the same order on all ranks, another in every turn
        shuffled = random.Random(0)
        stages = 1 + max(0, math.ceil(math.log2(len(remaining) / MAX_FINALISTS)))
        for stage in range(stages):
            spent = 0.0
            turns = 0
            while turns < least or (spent < TRIAL_SECONDS / stages and turns < MAX_TURNS):
                order = shuffled.sample(remaining, len(remaining))
                seconds = torch.tensor(
                    [self._time_exchanges(each, vector, row) for each in order], dtype=torch.float64
                )
                slowest = self.world.all_reduce(seconds, "MAX").tolist()
                for each, taken in zip(order, slowest, strict=True):
                    measured[each].append(taken)
                spent = spent + row * sum(slowest)
                turns = turns + 1
            if stage < stages - 1:
                middle = [
                    statistics.median(turn)
                    for turn in zip(*(measured[each] for each in remaining), strict=True)
                ]
                remaining = sorted(
                    remaining,
                    key=lambda each: statistics.median(
                        taken / usual for taken, usual in zip(measured[each], middle, strict=True)
                    ),
                )[: -(-len(remaining) // 2)]
                if self.native not in remaining:
                    # what a user would have without us
                    remaining.append(self.native)

    def _describe_prediction(
        self, algorithm: Choice, predictions: dict[Choice, float], vector: torch.Tensor
    ) -> str:
        """What the clock said of it, in words."""
        if algorithm not in predictions or self.cluster is None:
            return ""
        around = predict_interval(
            predictions[algorithm],
            self.cluster,
            lambda other: (
                time_schedule(
                    algorithm,  # type: ignore[arg-type]
                    self.world.size,
                    vector.numel(),
                    other,
                    element_bytes=vector.element_size(),
                ).seconds
            ),
        )
        return (
            f" (clock {' to '.join(map(_format_trial_time, around or (predictions[algorithm],)))})"
        )

    def _prove_new_algorithms(self, algorithms: list[Choice]) -> None:
        """Each at the size of this world, once. Rank 0 does it for all, as ranks may share
        cores; all raise alike.
        """
        new = [each for each in algorithms if each not in self.proved_algorithms]
        if new and self.world.size <= MAX_PROVED_RANKS:
            wrong = self.world.broadcast_object(
                _find_wrong_algorithm(new, self.world.size) if self.world.rank == 0 else None
            )
            if wrong:
                raise StepFailed(wrong)
        self.proved_algorithms.update(new)

    def _time_exchanges(self, algorithm: Choice, vector: torch.Tensor, times: int) -> float:
        """Seconds per exchange on this rank, of some in a row."""
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(times):
            self.play(algorithm, vector)
        return (time.perf_counter() - start) / times

    def _measure_cluster(self) -> Cluster:
        """The ranks on their links: where every host has as many ranks, that between hosts and
        that inside of one, otherwise one for all. Ranks share the cores of their host where
        they are more than these. All go by what rank 0 knows: candidates in another order would
        wait for each other.
        """
        self.machine = self.world.broadcast_object(self.machine)
        size = self.world.size
        here = count_ranks_on_hosts(self.world)
        alike = set(here) == {here[0]}
        group = here[0] if alike and 1 < here[0] < size else 1
        processors = self.world.broadcast_object(count_cores())
        sharing = here[0] if alike and here[0] > processors else 1
        if self.machine and not (self.machine.hosts == 1 and here[0] < size):
            link = self.machine.select_link(self.world.backend)
            gamma = self.machine.gamma
            self.link_source = self.machine.measured
        else:
            link = measure_link(self.world, FEW_SIZES, rounds=3, peer=find_first_remote_rank(here))[
                0
            ]
            gamma = measure_addition()
            self.link_source = "measured just before" + (
                ", as the machine file is of one host" if self.machine else ""
            )
        inside = None
        if group > 1:
            inside = measure_link(self.world, FEW_SIZES, rounds=3)[0]
            self.link_source += "; inside a host: measured just before"
        return self.world.broadcast_object(
            Cluster(link, gamma, inside, group, sharing, processors if sharing > 1 else 1)
        )  # type: ignore[no-any-return]


def _format_trial_time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _describe_equals(equals: list[Choice]) -> str:
    return (
        f"; not told apart, and the simplest taken: {', '.join(map(str, equals))}"
        if len(equals) > 1
        else ""
    )
