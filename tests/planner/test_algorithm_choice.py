"""`reduce=auto` proves every candidate at the size of the world, before it runs it."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from paragrad.errors import StepFailed
from paragrad.executors.machine import ASSUMED_MACHINE, Machine
from paragrad.executors.proof import prove_schedule
from paragrad.launch import Launcher
from paragrad.notation.choices import Choice
from paragrad.planner import algorithm_choice
from paragrad.planner.algorithm_choice import AlgorithmChooser
from paragrad.runtime.world import World
from paragrad.schedules.actions import Compute, Program
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import TwoLevel
from paragrad.strategies.data import Native

pytestmark = pytest.mark.processes


class Hasty(Choice):
    """A wrong ring that leaves out a chunk, so that the clock predicts the shortest time."""

    def parts(self, size: int) -> int:
        return size

    def program(self, rank: int, size: int) -> Program:
        return (
            each
            for each in Ring().program(rank, size)
            if isinstance(each, Compute) or each.slot != 0
        )


def choose_among(world: World, *algorithms: Choice) -> tuple[str, int, list[str]]:
    """Let `auto` choose among some algorithms.

    Returns the chosen algorithm or the error, the number of exchanges that ran, and what rank 0
    proved.
    """
    played: list[Choice] = []
    proved: list[str] = []

    def prove_and_note(algorithm: Choice, size: int) -> None:
        proved.append(f"{algorithm} of {size}")
        prove_schedule(algorithm, size)  # type: ignore[arg-type]

    chooser = AlgorithmChooser(
        world,
        Native(),
        lambda algorithm, vector: played.append(algorithm),
        Machine({"gloo": ASSUMED_MACHINE.select_link()}, ASSUMED_MACHINE.gamma, 2, "given"),
    )
    with (
        patch.object(algorithm_choice, "list_candidates", lambda size, group: list(algorithms)),
        patch.object(algorithm_choice, "prove_schedule", prove_and_note),
    ):
        try:
            said = ""
            for length in (100, 1000):
                said = str(chooser.choose_algorithm(torch.zeros(length)))
        except StepFailed as error:
            said = str(error)
    return said, len(played), proved


def test_invalid_all_reduce_is_never_executed(pool: Launcher) -> None:
    """Earlier, `auto` ran every algorithm of its list without a proof.

    Only an algorithm that the user named was proved, before the run started.
    """
    for rank, (said, played, proved) in enumerate(pool.run(choose_among, Ring(), Hasty(), size=3)):
        assert said == (
            "hasty is no all-reduce of 3 ranks: rank 0 ends without the contribution of rank 1 in "
            "slot 0: it never takes that slot; name another, such as reduce=native"
        )
        assert played == 0
        # It is proved first, because it is predicted to be faster than the ring.
        assert proved == (["hasty of 3"] if rank == 0 else [])


def test_candidates_are_proved_once_for_all_lengths(pool: Launcher) -> None:
    """Rank 0 proves the candidates for all ranks, also those with groups of two levels."""
    for rank, (said, played, proved) in enumerate(
        pool.run(choose_among, Ring(), TwoLevel(group=2), size=4)
    ):
        assert said in ("ring", "two_level(group=2)", "native")
        assert played > 0
        assert sorted(proved) == (["ring of 4", "two_level(group=2) of 4"] if rank == 0 else [])


def count_turns(world: World, native: float) -> tuple[str, dict[str, int]]:
    """Return the chosen algorithm, and how often each was timed.

    The backend's own all-reduce takes `native` seconds, the others 1 ms, 2 ms and so on.
    """
    times: Counter[str] = Counter()
    others: list[Choice] = [
        Ring(),
        Tree(),
        Star(),
        Butterfly(),
        Direct(),
        Halving(1),
        DoubleTree(1),
    ]

    def simulate_exchange_time(
        chooser: AlgorithmChooser, algorithm: Choice, vector: torch.Tensor, row: int
    ) -> float:
        times[str(algorithm)] += 1
        return native if isinstance(algorithm, Native) else 1e-3 * (1 + others.index(algorithm))

    chooser = AlgorithmChooser(
        world,
        Native(),
        lambda algorithm, vector: None,
        Machine({"gloo": ASSUMED_MACHINE.select_link()}, ASSUMED_MACHINE.gamma, 2, "given"),
    )
    with (
        patch.object(algorithm_choice, "list_candidates", lambda size, group: others),
        patch.object(AlgorithmChooser, "_time_exchanges", simulate_exchange_time),
    ):
        return str(chooser.choose_algorithm(torch.zeros(1000))), dict(times)


def test_backend_all_reduce_is_timed_in_every_round(
    pool: Launcher,
) -> None:
    """Earlier, one disturbed turn in the first stage could remove the fastest candidate.

    It could even remove the backend's own all-reduce.
    """
    for native, best in ((1.0, "ring"), (1e-3, "native")):
        for said, times in pool.run(count_turns, native, size=3):
            assert said == best
            assert times["native"] == times["ring"] == max(times.values())
            assert min(times.values()) >= algorithm_choice.MIN_TURNS
            assert len(set(times.values())) > 1  # some were timed in fewer stages
