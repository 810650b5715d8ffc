"""Train a model in parts in the user's own loop, on one host and on two hosts.

The losses equal serial's, whichever axis of the mesh crosses the hosts. If a rank is killed at
any place, all ranks end soon, the message names the killed rank, and no file is left.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import selectors
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
from hosts import PORT, Cluster, HostFailed, Program
from namespaces import living_in, spaces_of

pytestmark = pytest.mark.network

Clusters = Callable[..., AbstractContextManager[Cluster]]
SOON = 10.0  # seconds from the death of a rank to the end of all ranks
WAITED = (
    r"exitcode +: -9 |rank\(s\) [\d, ]+ say nothing|waits for .* from rank \d|"
    r"its process, on the host of rank 0, has ended|"
    r"rank \d \(process \d+\) ended while rank \d waited|\d +\| says nothing"
)

LOOP = """
    import json, os, signal, sys
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import paragrad as pg

    def die_after(calls, told):
        # as so many more functions of Python have been called, or have returned, in this thread
        def count(frame, event, argument):
            nonlocal calls
            calls -= 1
            if calls == 0:
                os.write(os.open(told, os.O_WRONLY), b"now")
                os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(count)

    strategy, out, *death = sys.argv[1:]
    rank, step, calls = map(int, death[:3]) if death else (-1, 0, 0)
    # a last batch of 22
    points = torch.randn(150, 10, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(points, points[:, :4].argmax(1))
    torch.manual_seed(1)
    layers = (nn.Linear(10, 30), nn.Tanh(), nn.Dropout(0.2), nn.Linear(30, 30), nn.Tanh(),
              nn.Linear(30, 4))
    model = nn.Sequential(*layers).double()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, strategy,
            clip_norm=1.0) as trainer:
        for epoch in range(4):
            for batch in trainer.batches(data, batch=32, epoch=epoch):
                if (trainer.world.rank, trainer.steps) == (rank, step):
                    die_after(calls, death[3])
                losses.append(trainer.step(*batch).loss)
        if trainer.world.rank == rank:
            die_after(1, death[3])             # it had fewer calls to make
    with open(f"{out}.{trainer.world.rank}", "w") as file:
        hosts = trainer.training.shared_hosts
        json.dump({"losses": losses, "firsts": hosts and hosts.first_ranks}, file)
"""


# ---- which host each rank is on --------------------------------------------------------------
def start_on_one_host(cluster: Cluster, words: list[str]) -> list[Program]:
    return cluster.torchrun(words, ranks=4)


def start_with_model_inside_hosts(cluster: Cluster, words: list[str]) -> list[Program]:
    """Start ranks in the order of torchrun, with ranks 0 and 1 on the first host.

    Then the parts of a replica are on one host, and replicas exchange gradients across hosts.
    """
    return cluster.torchrun(words, ranks=2)


def start_with_model_across_hosts(cluster: Cluster, words: list[str]) -> list[Program]:
    """Start ranks 0 and 2 on the first host, so that parts send to each other across hosts.

    There is no agent of torchrun that ends the ranks.
    """
    launch = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": str(PORT),
    }
    return [
        cluster.start(
            rank % 2,
            [sys.executable, *words],
            environment={**launch, "RANK": str(rank), "LOCAL_RANK": str(rank // 2)},
        )
        for rank in range(4)
    ]


# the number of hosts, how ranks are started, and for each rank the first rank of its host
WAYS = {
    "one host": (1, start_on_one_host, [0, 0, 0, 0]),
    "data across hosts": (2, start_with_model_inside_hosts, [0, 0, 2, 2]),
    "model across hosts": (2, start_with_model_across_hosts, [0, 1, 0, 1]),
}
STRATEGIES = ("data(2) * pipeline(2)", "data(2, reduce=ring) * place(2)")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(textwrap.dedent(LOOP))
    return tmp_path / "loop.py"


# ---- serial's losses -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("way", "strategy"),
    [
        pytest.param(
            way,
            strategy,
            marks=pytest.mark.story
            if (way, strategy) == ("model across hosts", STRATEGIES[1])
            else pytest.mark.table,
        )
        for way in WAYS
        for strategy in STRATEGIES
    ],
)
def test_model_parallel_losses_equal_serial(
    clusters: Clusters, script: Path, monkeypatch: pytest.MonkeyPatch, way: str, strategy: str
) -> None:
    """The training is in float64, with dropout, and with clipping over all parts.

    Each host holds the whole model once, until the model is divided.
    """
    monkeypatch.setattr("sys.argv", [str(script), "serial", str(script.with_name("alone"))])
    runpy.run_path(str(script))
    expected = json.loads(script.with_name("alone.0").read_text())["losses"]
    count, started, firsts = WAYS[way]
    with clusters(count) as cluster:
        cluster.wait_for(
            started(cluster, [str(script), strategy, str(script.with_name("parts"))]), timeout=90
        )
        assert not any(cluster.faults().values())
    for rank in range(4):
        found = json.loads(script.with_name(f"parts.{rank}").read_text())
        assert found["losses"] == pytest.approx(expected, rel=1e-10, abs=0)
        assert found["firsts"] == firsts


# ---- killed at random ------------------------------------------------------------------------
@dataclass(frozen=True)
class Death:
    """The death of a rank: it reaches a step, makes some calls, and is killed."""

    way: str
    strategy: str
    rank: int
    step: int
    calls: int

    def __str__(self) -> str:
        return ", ".join(map(str, astuple(self)))


def draw_deaths(count: int) -> Iterator[Death]:
    """Yield random deaths, half of them in the first step.

    A rank makes most calls there: it inspects and divides the model, makes groups and compares.
    """
    chosen = random.Random(7)
    for number in range(count):
        step = 0 if number % 2 else chosen.randrange(1, 19)
        yield Death(
            [*WAYS][number % 3],
            chosen.choice(STRATEGIES),
            chosen.randrange(4),
            step,
            chosen.randrange(1, 30_000 if step else 200_000),
        )


@contextmanager
def open_pipe(path: Path) -> Iterator[Callable[[], None]]:
    """Make a named pipe, and yield a function that waits until a process writes into it."""
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with selectors.DefaultSelector() as waiting:
        waiting.register(end, selectors.EVENT_READ)

        def wait() -> None:
            assert waiting.select(60.0), "nobody died"

        try:
            yield wait
        finally:
            os.close(end)


def list_left_files(cluster: Cluster) -> list[str]:
    """Return the files that are left in the shared memory of the hosts.

    Temporary files are there too. Files that torch itself leaves are ignored.
    """
    lists = [
        subprocess.run(
            host.build_command(["ls", "-A", "/dev/shm"]),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        for host in cluster.hosts
    ]
    return [
        name
        for each in lists
        for name in each.stdout.split()
        if not name.startswith(("torchelastic_", "torchinductor_"))
    ]


@pytest.mark.parametrize(
    "death",
    [
        pytest.param(
            each, id=str(each), marks=pytest.mark.story if number == 2 else pytest.mark.table
        )
        for number, each in enumerate(draw_deaths(20))
    ],
)
def test_killed_rank_ends_all_ranks_and_is_named(
    clusters: Clusters, script: Path, death: Death
) -> None:
    """The other ranks end soon: torchrun stops them, or they find a closed connection.

    No rank waits for the time limit of 300 s.
    """
    count, started, _ = WAYS[death.way]
    with clusters(count) as cluster, open_pipe(script.with_name("told")) as died:
        before = living_in(spaces_of(cluster))
        programs = started(
            cluster,
            [
                str(script),
                death.strategy,
                str(script.with_name("parts")),
                *map(str, (death.rank, death.step, death.calls)),
                str(script.with_name("told")),
            ],
        )
        died()
        with pytest.raises(HostFailed) as caught:
            cluster.wait_for(programs, SOON)
        assert "was not done after" not in str(caught.value)
        assert set(living_in(spaces_of(cluster))) <= set(before)
        assert list_left_files(cluster) == []
        complaints = [
            program.read_output()[1]
            for program in programs
            if program.process.returncode != -signal.SIGKILL
        ]
    named = (
        rf"rank +: {death.rank} .*\n +exitcode +: -9 |rank\(s\) [\d, ]*{death.rank}[\d, ]* say|"
        rf"from rank {death.rank}, which says|{death.rank} +\| says nothing"
    )
    assert any(re.search(named, text) for text in complaints), complaints
    # each surviving rank names the rank for which it waited
    for text in complaints:
        assert re.search(WAITED, text), text
