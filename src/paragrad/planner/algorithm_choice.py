"""`reduce=auto`: select an all-reduce algorithm and its segments for each vector size.

1. The clock predicts the time of every candidate from what is known of the machine.
2. The quickest few, and the backend's own all-reduce, run on vectors of the wanted size.
3. They run in turns. After each stage the better half goes on (sequential halving: Karnin, Koren,
   Somekh 2013, "Almost optimal exploration in multi-armed bandits"). The backend's own algorithm
   stays until the last stage.
4. If the turns cannot tell finalists apart, these are equal. The backend's own is then chosen, or
   the simplest.

A disturbance affects all algorithms of a turn, so algorithms are compared within turns. The trial
costs some exchanges in the first step. Every candidate is proved before it runs, as validation
proves an algorithm that is requested by name.
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
# candidates that are tried, besides the backend's own algorithm
MAX_TRIED = 8
# The algorithms with the fewest messages of all ranks together. They are tried, too, if messages
# are short: what the clock knows least is the work of cores that ranks share.
FEW_MESSAGES = (Star(), Tree())
# approximate seconds of exchanges in a trial
TRIAL_SECONDS = 2.0
# predicted seconds of an exchange from which half as many candidates are tried
LONG_EXCHANGE = 0.15
MAX_TURNS = 30  # of a stage
# Turns of a stage before candidates are dropped. Long exchanges outlast a disturbance, so one turn
# is enough for them.
MIN_TURNS = 3
# exchanges of one turn if they are short; in training, too, one follows another
EXCHANGES_PER_TURN = 4
SHORT_EXCHANGE = 0.02  # seconds, predicted
MAX_FINALISTS = 3  # algorithms in the last stage
# an algorithm that is slower by this factor is not equal, however few turns there were
SLOWER_RATIO = 1.05
# Ranks up to which the clock predicts all candidates. With more ranks it predicts only those with
# few messages.
MAX_CLOCKED_RANKS = 32


def list_candidates(size: int, group: int = 1) -> list[ComposedAllReduce | TwoLevel]:
    """List the algorithms that may be chosen for a number of ranks.

    Args:
        size: number of ranks.
        group: number of ranks on each host.
    """
    if size > MAX_CLOCKED_RANKS:
        few_messages: list[ComposedAllReduce | TwoLevel] = [
            each for each in CANDIDATES if not isinstance(each, Ring | RingAsync | Direct)
        ]
        return (
            [*few_messages, TwoLevel(across=Halving(1), group=group)]
            if 1 < group < size
            else few_messages
        )
    groups = {each for each in (2, group) if 1 < each < size and size % each == 0}
    return [*CANDIDATES, *(TwoLevel(group=each) for each in sorted(groups))]


def predict_candidate_times(
    size: int, length: int, element: int, cluster: Cluster
) -> dict[Choice, float]:
    """Predict the time of every candidate by the clock.

    Args:
        size: number of ranks.
        length: elements of the vector.
        element: bytes of an element.
        cluster: the links between the ranks.

    Returns:
        Candidates with their seconds, the quickest first.
    """
    predictions = {
        each: time_schedule(each, size, length, cluster, element_bytes=element).seconds
        for each in list_candidates(size, cluster.group)
    }
    return dict(sorted(predictions.items(), key=lambda item: item[1]))


def _find_wrong_algorithm(algorithms: list[Choice], size: int) -> str | None:
    """Explain the first algorithm that is no all-reduce of `size` ranks, or return None."""
    for each in algorithms:
        try:
            prove_schedule(each, size)  # type: ignore[arg-type]
        except ScheduleError as error:
            return (
                f"{each} is no all-reduce of {size} ranks: {error}; name another, such as "
                "reduce=native"
            )
    return None


def is_slower_by_sign_test(ratios: list[float]) -> bool:
    """Tell whether one algorithm is slower than another, by a one-sided sign test at 5 %.

    If both are equally fast, so many ratios above 1 are rare.

    Args:
        ratios: its times divided by the other's times, one for each turn.
    """
    above = sum(ratio > 1 for ratio in ratios)
    outcomes = sum(math.comb(len(ratios), k) for k in range(above, len(ratios) + 1))
    return bool(outcomes / 2 ** len(ratios) < 0.05)


def is_measurably_slower(times: list[float], best_times: list[float]) -> bool:
    """Tell whether an algorithm is slower than the best one.

    It is slower if the medians differ by more than SLOWER_RATIO, or by the sign test. Medians are
    taken of ratios within turns and of all times. A disturbance shorter than a turn can affect
    either time of a pair.

    Args:
        times: seconds of the algorithm, one for each turn.
        best_times: seconds of the best algorithm in the same turns.
    """
    pairs = [our / other for our, other in zip(times, best_times, strict=True)]
    return max(
        statistics.median(pairs), statistics.median(times) / statistics.median(best_times)
    ) > SLOWER_RATIO or is_slower_by_sign_test(pairs)


@dataclass(frozen=True)
class AlgorithmChoice:
    """A chosen algorithm.

    Attributes:
        algorithm: the algorithm.
        because: the reason in words.
    """

    algorithm: Choice
    because: str


@dataclass
class AlgorithmChooser:
    """Chooses an algorithm once for every vector size.

    Collective: all ranks request choices in the same order.

    Attributes:
        world: the ranks that exchange.

        native: the backend's own all-reduce.

        play: play(algorithm, vector) runs one all-reduce.

        machine: what is known of the links. If None, they are measured at the first choice.

        on_choice: on_choice(bytes, choice) is called after each choice.

        choices: the choices made so far, by number of elements and dtype.

        cluster: the links between the ranks, known after the first choice.

        link_source: where the numbers of the links come from, in words.

        proved_algorithms: algorithms that are proved for the size of this world.
    """

    world: World
    native: Choice
    play: Callable[[Any, torch.Tensor], object]
    machine: Machine | None = None
    on_choice: Callable[[int, AlgorithmChoice], None] = lambda bytes_, pick: None
    choices: dict[tuple[int, torch.dtype], AlgorithmChoice] = field(default_factory=dict)
    cluster: Cluster | None = None
    link_source: str = ""
    proved_algorithms: set[Choice] = field(default_factory=set)

    def choose_algorithm(self, vector: torch.Tensor) -> Choice:
        """Return the algorithm for vectors of this size and dtype.

        The first call for a size runs the trial. Collective.

        Args:
            vector: the vector to reduce.
        """
        key = vector.numel(), vector.dtype
        if key not in self.choices:
            self.choices[key] = self._try_candidates(vector)
            self.on_choice(vector.nbytes, self.choices[key])
        return self.choices[key].algorithm

    def _try_candidates(self, vector: torch.Tensor) -> AlgorithmChoice:
        self.cluster = self.cluster or self._measure_cluster()
        predictions = predict_candidate_times(
            self.world.size, vector.numel(), vector.element_size(), self.cluster
        )
        quickest = next(iter(predictions.values()))
        candidates_to_try = list(predictions)[
            : MAX_TRIED if quickest < LONG_EXCHANGE else MAX_TRIED // 2
        ]
        if quickest < SHORT_EXCHANGE:
            candidates_to_try += [
                each
                for each in FEW_MESSAGES
                if each in predictions and each not in candidates_to_try
            ]
        self._prove_new_algorithms(candidates_to_try)
        measured: dict[Choice, list[float]] = {
            each: [] for each in (*candidates_to_try, self.native)
        }
        self._run_trials(list(measured), torch.zeros_like(vector), quickest, measured)
        most_turns = max(map(len, measured.values()))
        finalists = [each for each, seconds in measured.items() if len(seconds) == most_turns]
        best = min(finalists, key=lambda each: statistics.median(measured[each]))
        equals = [
            each for each in finalists if not is_measurably_slower(measured[each], measured[best])
        ]
        by_simplicity: list[Choice] = [
            self.native,
            *list_candidates(self.world.size, self.cluster.group),
        ]
        because = (
            self._explain_choice(measured, equals, predictions, vector)
            if self.world.rank == 0
            else None
        )
        simplest: Any = min(equals, key=by_simplicity.index)
        return AlgorithmChoice(simplest, self.world.broadcast_object(because))

    def _explain_choice(
        self,
        measured: dict[Choice, list[float]],
        equals: list[Choice],
        predictions: dict[Choice, float],
        vector: torch.Tensor,
    ) -> str:
        """Explain the choice in words.

        Rank 0 alone calls this: the clock's intervals cost work, and ranks may share cores.
        """
        descriptions = ", ".join(
            f"{each} {_format_trial_time(statistics.median(seconds))}"
            f"{self._describe_prediction(each, predictions, vector)}"
            for each, seconds in measured.items()
        )
        return f"tried: {descriptions}{_describe_equals(equals)}; links {self.link_source}"

    def _run_trials(
        self,
        remaining: list[Choice],
        vector: torch.Tensor,
        quickest: float,
        measured: dict[Choice, list[float]],
    ) -> None:
        """Time all algorithms, then the better half, and so on until few are left. Collective.

        The times in `measured` are those of the slowest rank.

        Args:
            remaining: the algorithms to try.
            vector: the vector that they reduce.
            quickest: predicted seconds of one exchange.
            measured: receives the seconds of each turn, by algorithm.
        """
        exchanges = EXCHANGES_PER_TURN if quickest < SHORT_EXCHANGE else 1
        min_turns = MIN_TURNS if quickest < LONG_EXCHANGE else 1
        for each in remaining:
            # the first use of an algorithm connects the ranks
            self.play(each, vector[: self.world.size])
        self.play(self.native, vector)  # allocates memory
        # the order is the same on all ranks and differs from turn to turn
        generator = random.Random(0)
        stages = 1 + max(0, math.ceil(math.log2(len(remaining) / MAX_FINALISTS)))
        for stage in range(stages):
            spent = 0.0
            turns = 0
            while turns < min_turns or (spent < TRIAL_SECONDS / stages and turns < MAX_TURNS):
                order = generator.sample(remaining, len(remaining))
                seconds = torch.tensor(
                    [self._time_exchanges(each, vector, exchanges) for each in order],
                    dtype=torch.float64,
                )
                slowest = self.world.all_reduce(seconds, "MAX").tolist()
                for each, turn_seconds in zip(order, slowest, strict=True):
                    measured[each].append(turn_seconds)
                spent = spent + exchanges * sum(slowest)
                turns = turns + 1
            if stage < stages - 1:
                turn_medians = [
                    statistics.median(turn)
                    for turn in zip(*(measured[each] for each in remaining), strict=True)
                ]
                remaining = sorted(
                    remaining,
                    key=lambda each: statistics.median(
                        turn_seconds / turn_median
                        for turn_seconds, turn_median in zip(
                            measured[each], turn_medians, strict=True
                        )
                    ),
                )[: -(-len(remaining) // 2)]
                if self.native not in remaining:
                    # what a user has without this library
                    remaining.append(self.native)

    def _describe_prediction(
        self, algorithm: Choice, predictions: dict[Choice, float], vector: torch.Tensor
    ) -> str:
        """The clock's prediction for an algorithm, in words."""
        if algorithm not in predictions or self.cluster is None:
            return ""
        bounds = predict_interval(
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
            f" (clock {' to '.join(map(_format_trial_time, bounds or (predictions[algorithm],)))})"
        )

    def _prove_new_algorithms(self, algorithms: list[Choice]) -> None:
        """Prove each algorithm once at the size of this world.

        Rank 0 proves for all ranks, because ranks may share cores. If a proof fails, all ranks
        raise.
        """
        unproved = [each for each in algorithms if each not in self.proved_algorithms]
        if unproved and self.world.size <= MAX_PROVED_RANKS:
            refusal = self.world.broadcast_object(
                _find_wrong_algorithm(unproved, self.world.size) if self.world.rank == 0 else None
            )
            if refusal:
                raise StepFailed(refusal)
        self.proved_algorithms.update(unproved)

    def _time_exchanges(self, algorithm: Choice, vector: torch.Tensor, times: int) -> float:
        """Seconds of one exchange on this rank, averaged over `times` exchanges in a row."""
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(times):
            self.play(algorithm, vector)
        return (time.perf_counter() - start) / times

    def _measure_cluster(self) -> Cluster:
        """Describe the ranks and their links.

        If every host has the same number of ranks, there is one link between hosts and one inside a
        host. Otherwise there is one link for all. If a host has more ranks than cores, its ranks
        share the cores. All ranks use rank 0's knowledge: ranks with candidates in different orders
        would wait for each other.
        """
        self.machine = self.world.broadcast_object(self.machine)
        size = self.world.size
        host_ranks = count_ranks_on_hosts(self.world)
        equal_hosts = set(host_ranks) == {host_ranks[0]}
        group = host_ranks[0] if equal_hosts and 1 < host_ranks[0] < size else 1
        processors = self.world.broadcast_object(count_cores())
        sharing_ranks = host_ranks[0] if equal_hosts and host_ranks[0] > processors else 1
        if self.machine and not (self.machine.hosts == 1 and host_ranks[0] < size):
            link = self.machine.select_link(self.world.backend)
            gamma = self.machine.gamma
            self.link_source = self.machine.measured
        else:
            link = measure_link(
                self.world, FEW_SIZES, rounds=3, peer=find_first_remote_rank(host_ranks)
            )[0]
            gamma = measure_addition()
            self.link_source = "measured just before" + (
                ", as the machine file is of one host" if self.machine else ""
            )
        host_link = None
        if group > 1:
            host_link = measure_link(self.world, FEW_SIZES, rounds=3)[0]
            self.link_source += "; inside a host: measured just before"
        processors = processors if sharing_ranks > 1 else 1
        cluster = Cluster(link, gamma, host_link, group, sharing_ranks, processors)
        agreed: Cluster = self.world.broadcast_object(cluster)
        return agreed


def _format_trial_time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _describe_equals(equals: list[Choice]) -> str:
    return (
        f"; no measurable difference between {', '.join(map(str, equals))}: the simplest is taken"
        if len(equals) > 1
        else ""
    )
