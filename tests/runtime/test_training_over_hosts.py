"""Training over several hosts with torchrun, as the README describes it, equals serial.

If one rank dies, all ranks on all hosts end.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hosts import Cluster, HostFailed

from paragrad.executors.machine import read_machine_file

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
Clusters = Callable[..., AbstractContextManager[Cluster]]


def run_lines(cluster: Cluster, lines: list[str], folder: Path) -> list[str]:
    """Run each line in a shell on its own host, and return what the shells printed.

    The variable GLOO_SOCKET_IFNAME is not set there.
    """
    programs = [
        cluster.start(
            host, ["sh", "-c", line], folder=folder, environment={"GLOO_SOCKET_IFNAME": None}
        )
        for host, line in enumerate(lines)
    ]
    return cluster.wait_for(programs)


TRAINS = """
    import itertools, sys
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import paragrad as pg
    from paragrad.executors.transport import run_all_reduce
    from paragrad.schedules.butterfly import Butterfly
    from paragrad.schedules.ring import Ring, RingAsync
    from paragrad.schedules.star import Star
    from paragrad.schedules.tree import Tree

    def make_vector(rank, length):
        # whole numbers, no two ranks alike
        return ((torch.arange(length) * (rank + 3) + 17 * rank) % 1009 - 500).double()

    # a last batch of 22: 8, 7 and 7
    points = torch.randn(150, 10, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(points, points[:, :4].argmax(1))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 300), nn.Tanh(), nn.Linear(300, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = "data(auto, reduce=ring)"
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, strategy) as trainer:
        for epoch in range(5):
            for batch in trainer.batches(data, batch=32, epoch=epoch):
                trainer.step(*batch)
        world = trainer.world
        schedules = Ring(), RingAsync(5), Tree(), Butterfly(), Star()
        for schedule, length in itertools.product(schedules, (1, 3, 1000, 100_003)):
            if world.size > 1:
                mine = make_vector(world.rank, length)
                run_all_reduce(schedule, mine, world)
                expected = sum(make_vector(rank, length) for rank in range(world.size))
                assert torch.equal(mine, expected), (schedule, length)
        print(world.rank, "of", world.size, world.backend)
        if world.rank == 0:
            torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.table
def test_three_hosts_train_as_serial_and_all_reduces_are_exact(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is in float64.

    Every all-reduce schedule gives the exact sum over real links; vectors differ by rank.
    """
    script, here, there = (tmp_path / name for name in ("trains.py", "alone.pt", "three.pt"))
    script.write_text(textwrap.dedent(TRAINS))
    monkeypatch.setattr("sys.argv", [str(script), str(here)])
    runpy.run_path(str(script))
    with clusters(3, megabits=200) as cluster:
        assert cluster.run([str(script), str(there)]) == [
            f"{rank} of 3 gloo\n" for rank in range(3)
        ]
        assert not any(cluster.faults().values())
    ours = torch.load(there)
    theirs = torch.load(here)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float64
        assert float((tensor - theirs[name]).abs().max()) <= 1e-10 * float(tensor.abs().max())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make a folder with the files of the README, and with its .venv."""
    for name in ("mine.py", "own.py"):
        code = re.search(rf"```python\n# {name}\n(.*?)```", README, re.DOTALL)
        assert code is not None
        (tmp_path / name).write_text(code.group(1))
    # torchrun starts Python with -u, so two ranks may print into one line; files are safe
    with open(tmp_path / "own.py", "a") as own:
        own.write(
            "total = sum(parameter.sum().item() for parameter in model.parameters())\n"
            "open(str(trainer.world.rank), 'w').write(f'{trainer.steps} {total}')\n"
        )
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return tmp_path


LINES = re.findall(r"^GLOO_SOCKET_IFNAME=.* --nnodes 2 .*$", README, re.MULTILINE)


@pytest.mark.story
def test_readme_commands_for_two_hosts(clusters: Clusters, place: Path) -> None:
    """Two hosts with two ranks each reach the same parameters as one worker."""
    assert len(LINES) == 2
    alone = subprocess.run(
        [sys.executable, "own.py"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    _, steps, total = alone.stdout.split()
    with clusters(2, megabits=200) as cluster:
        assert all(run_lines(cluster, LINES, place))
    for rank in range(4):
        found, other = (place / str(rank)).read_text().split()
        # the tolerance is for float32
        assert (found, float(other)) == (steps, pytest.approx(float(total), rel=1e-4))


@pytest.mark.table
def test_several_hosts_example_as_typed(clusters: Clusters, place: Path) -> None:
    """The commands in the first lines of examples/several_hosts.sh work on two hosts."""
    (place / "examples").symlink_to(ROOT / "examples")
    told = (ROOT / "examples" / "several_hosts.sh").read_text()
    lines = re.findall(r"^#     (sh examples/several_hosts.sh \d \S+ \S+) ", told, re.MULTILINE)
    assert len(lines) == 2
    with clusters(2, megabits=200) as cluster:
        assert "4 worker(s)" in run_lines(cluster, lines, place)[0]


@pytest.mark.table
def test_job_trains_over_hosts_and_the_first_host_has_the_run(
    clusters: Clusters, place: Path
) -> None:
    train = 'per-node 1 -m paragrad train mine.py --strategy "data(auto)"'
    with clusters(2, megabits=200) as cluster:
        first, other = run_lines(
            cluster, [line.replace("per-node 2 own.py", train) for line in LINES], place
        )
    assert "0 missed" in first
    assert other == ""
    (run,) = (place / "runs").iterdir()
    assert (run / "model.safetensors").exists()


DIES = """
    import os, signal, sys, torch
    import paragrad as pg
    from torch import nn
    from torch.utils.data import TensorDataset
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, dtype=torch.long))
    with pg.parallelize(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(),
            lr=0.1)) as trainer:
        for batch in trainer.batches(data, batch=8, epoch=0):
            trainer.step(*batch)
            if trainer.steps == 3 and trainer.world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.table
def test_dead_rank_ends_the_ranks_of_all_hosts(clusters: Clusters, tmp_path: Path) -> None:
    """The connections to the dead rank close, so no rank waits for the time limit of 300 s."""
    (tmp_path / "dies.py").write_text(textwrap.dedent(DIES))
    with clusters(2) as cluster:
        with pytest.raises(HostFailed, match="SIGKILL") as caught:
            cluster.run([str(tmp_path / "dies.py")])
        assert set(caught.value.hosts) == {"host0", "host1"}


JOINS = """
    import torch
    import paragrad as pg
    model = torch.nn.Linear(2, 2)
    with pg.parallelize(model, torch.nn.functional.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.1)):
        print("it joined")
"""


@pytest.mark.table
def test_links_between_hosts_are_measured(clusters: Clusters, tmp_path: Path) -> None:
    """The links between hosts are measured, though ranks 0 and 1 are on the same host."""
    with clusters(2, megabits=200) as cluster:
        told = cluster.run(
            ["-m", "paragrad", "measure", "--interface", "eth0", "--output", "machine.json"],
            ranks=2,
            folder=tmp_path,
            timeout=120,
        )
    machine, _ = read_machine_file(tmp_path / "machine.json", 1)
    assert list(machine.links) == ["gloo"]
    assert machine.hosts == 2
    assert "gloo over eth0" in machine.measured
    # 200 Mbit/s are 25 MB in a second; a token bucket lets the first bytes of a message pass faster
    assert 0.95 / 25e6 < machine.links["gloo"].beta < 1.25 / 25e6
    assert "machine.json" in told[0]
    assert not told[1]


@pytest.mark.table
def test_missing_interface_is_refused_before_joining(clusters: Clusters) -> None:
    """A wrong interface is refused at once.

    No other rank has started here, so this rank would otherwise wait for the others.
    """
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0,nosuch0",
    }
    with clusters(2) as cluster:
        program = cluster.start(0, [sys.executable, "-c", textwrap.dedent(JOINS)], environment=rank)
        with pytest.raises(HostFailed):
            cluster.wait_for([program])
        assert program.read_output()[1].splitlines()[-1] == (
            "paragrad.errors.Refused: GLOO_SOCKET_IFNAME names nosuch0, and this host has lo, "
            "eth0; set it to the one by which the other hosts reach this one (`ip address` shows "
            "their addresses), or unset it where all ranks are on this host"
        )


DYING_JOB = """
import os, signal
import paragrad as pg, torch
from torch.utils.data import TensorDataset

data = TensorDataset(torch.randn(640, 8), torch.zeros(640, dtype=torch.long))
steps = {"made": 0}


def die_at_step_20():
    steps["made"] += os.environ["RANK"] == os.environ["VICTIM"]
    if steps["made"] == 20:
        os.kill(os.getpid(), signal.SIGKILL)


class Net(torch.nn.Linear):
    def forward(self, x):
        die_at_step_20()
        return super().forward(x)


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        die_at_step_20()
        return super().step(closure)


job = pg.Job(
    name="dying",
    model=lambda: Net(8, 2),
    loss=torch.nn.functional.cross_entropy,
    optimizer=lambda parameters: SGD(parameters, lr=0.1),
    train=data,
    batch=8,
    epochs=1000,
)
"""


@pytest.mark.story
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("strategy", "places", "victim", "name"),
    [
        # The pattern also allows gloo's message: its connections end first while the ranks
        # still exchange values.
        ("server(2)", [0, 0, 1], 2, r"server 0|rank\(s\) 2 say nothing"),
        ("server(2)", [0, 1, 0], 1, r"worker 1|rank\(s\) 1 say nothing"),
        ("server(2, sync=asp)", [0, 0, 1], 2, r"server 0|rank\(s\) 2 say nothing"),
        ("server(2, sync=asp)", [0, 1, 0], 1, r"worker 1|rank\(s\) 1 say nothing"),
    ],
)
def test_process_of_another_host_is_named(
    clusters: Clusters,
    strategy: str,
    places: list[int],
    victim: int,
    name: str,
    tmp_path: Path,
) -> None:
    """A rank cannot watch the process of another host.

    It sees that the connection ends, and that the process does not connect again.
    """
    (tmp_path / "dying.py").write_text(DYING_JOB)
    words = [sys.executable, "-m", "paragrad", "train", "dying.py", "--strategy", strategy]
    with clusters(2) as cluster:
        ranks = [
            cluster.start(
                host,
                words,
                folder=tmp_path,
                environment={
                    "VICTIM": str(victim),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(places)),
                    "LOCAL_RANK": str(places[:rank].count(host)),
                    "LOCAL_WORLD_SIZE": str(places.count(host)),
                    "MASTER_ADDR": "host0",
                    "MASTER_PORT": "29500",
                },
            )
            for rank, host in enumerate(places)
        ]
        survivors = [each for rank, each in enumerate(ranks) if rank != victim]
        codes = [each.process.wait(timeout=60) for each in survivors]
        messages = ["\n".join(each.read_output()) for each in survivors]
    assert codes == [1, 1]
    assert not any("Traceback" in each for each in messages)
    assert any(re.search(name, each) for each in messages), messages
