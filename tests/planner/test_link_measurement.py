"""Measurements of links, and the choice of an all-reduce by these measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import paragrad as pg
from paragrad.executors.machine import ASSUMED_MACHINE, Cluster, Link, Machine, read_machine_file
from paragrad.executors.transport import run_all_reduce
from paragrad.launch import Launcher
from paragrad.planner import algorithm_choice, link_measurement
from paragrad.planner.algorithm_choice import (
    AlgorithmChooser,
    list_candidates,
    predict_candidate_times,
)
from paragrad.planner.link_measurement import measure_link
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.world import World
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.two_level import TwoLevel
from paragrad.strategies.data import Native

pytestmark = pytest.mark.processes


def invoke(words: list[str]) -> Any:
    """Run a command, and return its result.

    The command line is imported here, because ranks import this module and do not need it.
    """
    from typer.testing import CliRunner

    from paragrad.commands.cli import app

    return CliRunner().invoke(app, words)


def measure_small_link(world: World) -> tuple[Link, float]:
    return measure_link(world, sizes=(64, 1 << 12, 1 << 18), rounds=1)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_measured_link_is_known_to_all_ranks(pool: Launcher, backend: str) -> None:
    answers = pool.run(measure_small_link, size=3, backend=backend)
    link, error = answers[0]
    assert answers == [(link, error)] * 3
    assert link.compute_port_seconds(1 << 18) >= link.compute_port_seconds(64) > 0
    assert link.beta > 0
    assert link.overhead > 0
    assert [size for size, _ in link.points] == [64, 1 << 12, 1 << 18]


BYTES = (64, 1 << 14, 1 << 18, 1 << 20, 1 << 22)


def measure_disturbed_link(
    world: World, slow: Callable[[int, int], bool]
) -> tuple[Link, float, int]:
    """Measure a simulated link of 50 us and 1 GB/s, while other programs disturb it.

    A message is three times slower if slow(bytes, round) is true.
    """
    # Before its first round, each size is played twice to choose the number of repetitions.
    rounds = dict.fromkeys(BYTES, -2)

    def simulate_play(
        world: World, vector: torch.Tensor, program: object, peer: int, times: int
    ) -> tuple[float, float]:
        size = vector.nbytes // link_measurement.STREAM_PARTS
        ping_pong = program is link_measurement._make_ping_pong
        rounds[size] += ping_pong if rounds[size] >= 0 else 1
        taken = (50e-6 + 1e-9 * size) * (3 if slow(size, rounds[size]) else 1)
        return times * (
            (2 if ping_pong else 1) * taken + (40e-6 if ping_pong else 0)
        ), times * 10e-6

    with patch.object(link_measurement, "_time_play", simulate_play):
        link, error = measure_link(world, BYTES)
    return link, error, rounds[1 << 22]


def every_other(size: int, number: int) -> bool:
    return number % 2 == 0


def that_moment(size: int, number: int) -> bool:
    return size == 1 << 22 and number <= link_measurement.ROUNDS


@pytest.mark.parametrize("slow", [every_other, that_moment])
def test_link_speed_is_measured_despite_other_work(
    pool: Launcher, slow: Callable[[int, int], bool]
) -> None:
    """Earlier, the measurement needed a quiet moment.

    If a few commands ran while 4 MB were measured, the prediction for 16 MB was 60 % too slow.
    """
    link, error, rounds = pool.run(measure_disturbed_link, slow, size=2)[0]
    assert link.compute_port_seconds(1 << 24) == pytest.approx(50e-6 + 1e-9 * (1 << 24), rel=1e-3)
    assert error < 1e-3
    assert link.disturbed is not None
    assert link.disturbed.compute_port_seconds(1 << 24) > 2.5 * link.compute_port_seconds(1 << 24)
    # A size that does not fit the straight line is measured again.
    assert (rounds > link_measurement.ROUNDS) == (slow is that_moment)


def play(world: World, algorithm: object, vector: torch.Tensor) -> None:
    if isinstance(algorithm, Native):
        vector.copy_(world.all_reduce(vector))
    else:
        run_all_reduce(algorithm, vector, world)  # type: ignore[arg-type]


def choose_for_lengths(world: World, machine: Machine | None) -> tuple[list[str], bool]:
    """Choose an algorithm for two lengths, one of them twice.

    Returns the messages about the choices, and whether the sums are right.
    """
    told: list[str] = []
    chooser = AlgorithmChooser(
        world,
        Native(),
        partial(play, world),
        machine,
        on_choice=lambda bytes_, pick: told.append(f"{bytes_}: {pick}"),
    )
    right = True
    for length in (10, 30_000, 10):
        vector = torch.arange(float(length)) + 100 * world.rank
        play(world, chooser.choose_algorithm(vector), vector)
        right &= torch.equal(vector, 3 * torch.arange(float(length)) + 300)
    return told, right


@pytest.mark.story
@pytest.mark.parametrize(
    "machine",
    [pytest.param(None, marks=pytest.mark.table), ASSUMED_MACHINE],
    ids=["measured", "given"],
)
def test_all_ranks_choose_alike_once_per_size(pool: Launcher, machine: Machine | None) -> None:
    given = (
        Machine({"gloo": ASSUMED_MACHINE.select_link()}, ASSUMED_MACHINE.gamma, 2, "given")
        if machine
        else None
    )
    answers = pool.run(choose_for_lengths, given, size=3)
    told, right = answers[0]
    assert right
    assert all(answer == answers[0] for answer in answers)
    assert [line.split(":")[0] for line in told] == ["40", "120000"]
    assert all("native" in line and "clock" in line for line in told)
    assert ("given" if machine else "measured just before") in told[0]


def measure_hosts(
    world: World, hosts: list[int], machine: Machine | None
) -> tuple[Cluster | None, str]:
    """Return the measured cluster, and the source of its links.

    `hosts` gives for each rank the number of ranks on its host. The latency of a simulated link
    shows which peer was measured.
    """

    def simulate_link(
        world: World, sizes: object, rounds: int, peer: int = 1
    ) -> tuple[Link, float]:
        return Link(alpha=1e-6 * peer, beta=1e-9), 0.0

    told: list[str] = []
    # no time for trials, which other tests cover
    with (
        patch.object(link_measurement, "count_local_ranks", lambda: hosts[world.rank]),
        patch.object(algorithm_choice, "measure_link", simulate_link),
        patch.object(algorithm_choice, "TRIAL_SECONDS", 0.0),
    ):
        chooser = AlgorithmChooser(
            world,
            Native(),
            partial(play, world),
            machine,
            on_choice=lambda _, pick: told.append(pick.because),
        )
        chooser.choose_algorithm(torch.zeros(8))
    return chooser.cluster, told[0].rpartition("links ")[2]


GIVEN = Machine(
    {"gloo": ASSUMED_MACHINE.select_link()}, ASSUMED_MACHINE.gamma, 2, "by hand", hosts=2
)


@pytest.mark.parametrize(
    ("hosts", "machine", "link", "inside", "known"),
    [
        ([4, 4, 4, 4], None, 1e-6, None, "measured just before"),
        (
            [2, 2, 2, 2],
            None,
            2e-6,
            1e-6,
            "measured just before; inside a host: measured just before",
        ),
        ([2, 2, 2, 2], GIVEN, 20e-6, 1e-6, "by hand; inside a host: measured just before"),
        (
            [2, 2, 2, 2],
            replace(GIVEN, hosts=1),
            2e-6,
            1e-6,
            "measured just before, as the machine file is of one host; inside a host: measured "
            "just before",
        ),
        ([3, 3, 3, 1], None, 3e-6, None, "measured just before"),
        ([1, 3, 3, 3], None, 1e-6, None, "measured just before"),
    ],
)
def test_choice_over_hosts_and_their_links(
    pool: Launcher,
    hosts: list[int],
    machine: Machine | None,
    link: float,
    inside: float | None,
    known: str,
) -> None:
    """All ranks agree, also if hosts have different numbers of ranks.

    Earlier, each rank used its own host, so ranks would have tried different candidates. Later,
    all used the host of rank 0, and the clock simulated hosts that do not exist.
    """
    answers = pool.run(measure_hosts, hosts, machine, size=4)
    assert answers == [answers[0]] * 4
    cluster, told = answers[0]
    assert cluster.link.alpha == pytest.approx(link)
    assert (cluster.inside and cluster.inside.alpha) == inside
    assert cluster.group == (2 if inside else 1)
    assert told == known


def test_clock_predicts_the_choice_by_message_size() -> None:
    """For short messages, algorithms with few rounds are fast; for long ones, those with few
    bytes.
    """
    network = Cluster(Link(20e-6, 1 / 2e9), 1 / 8e9)
    short, long = (
        list(predict_candidate_times(8, length, 4, network)) for length in (10, 10_000_000)
    )
    assert short[0] in (Butterfly(), Halving(1))
    assert long.index(Butterfly()) > long.index(Halving(1))
    assert {type(each) for each in long[:5]} <= {Halving, Ring, RingAsync, Direct}
    assert TwoLevel(group=2) in list_candidates(8)
    assert TwoLevel(group=2) not in list_candidates(7)
    assert TwoLevel(group=4) in list_candidates(8, 4)
    assert Ring() not in predict_candidate_times(40, 1000, 4, network)
    assert TwoLevel(across=Halving(1), group=2) in list_candidates(64, 2)


@pytest.mark.story
def test_record_has_the_choice_and_its_reason(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    Machine(
        {"gloo": ASSUMED_MACHINE.select_link()}, ASSUMED_MACHINE.gamma, count_cores(), "by hand"
    ).write_machine_file(machine)
    run = pg.train(
        pg.job("digits").replace(epochs=1),
        "data(2, state=replicated)",
        backend="gloo",
        machine=machine,
        runs=tmp_path,
    )
    lines = [json.loads(line) for line in (run.folder / "rank-0.jsonl").read_text().splitlines()]
    picks = [line for line in lines if line["kind"] == "choice" and line["what"] == "reduce"]
    assert len(picks) == 1  # the gradients are 19 KB, which is one bucket
    assert picks[0]["bytes"] == 4 * (64 * 64 + 64 + 640 + 10 + 4)
    assert "links by hand" in picks[0]["because"]
    with pytest.warns(
        UserWarning,
        match=r"the machine file .* is not used: data\(2, state=shared_memory\) has no all-",
    ):
        pg.train(pg.job("digits").replace(epochs=0), "data(2)", machine=machine, runs=tmp_path)
    # Earlier, the choices of the run said native, though other algorithms were picked.
    assert [line for line in run.choices if line["what"] == "reduce"] == []


@pytest.mark.story
def test_measured_machine_file_is_read_by_simulate(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    answer = invoke(["measure", "--backend", "gloo", "--output", str(path)])
    assert answer.exit_code == 0, answer.output
    machine, _ = read_machine_file(path, 2)
    assert list(machine.links) == ["gloo"]
    assert machine.gamma > 0
    assert str(path) in answer.output
    answer = invoke(
        ["simulate", "data(4, reduce=ring)", "--bytes", "1MB", "--machine", str(path), "--json"]
    )
    found = json.loads(answer.stdout)
    assert found["measured"] == machine.measured
    assert 0 < found["seconds"] < 1


def test_simulate_writes_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "predicted.jsonl"
    words = ["simulate", "data(4, reduce=halving)", "--bytes", "1MB", "--timeline", str(path)]
    assert invoke(words).exit_code == 0
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert {span["kind"] for span in spans} == {"span"}
    assert {span["lane"] for span in spans} == {"send", "receive", "compute"}
