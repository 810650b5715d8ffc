"""Without paragrad's launcher, a worker or a server is killed, and the other ranks name it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paragrad.errors import StepFailed
from paragrad.runtime.peer_processes import PeerProcesses, ProcessAddress

pytestmark = [pytest.mark.processes, pytest.mark.story]

JOB = """
import paragrad as pg, torch
from torch.utils.data import TensorDataset

data = TensorDataset(torch.randn(640, 8), torch.zeros(640, dtype=torch.long))


class Net(torch.nn.Linear):
    def forward(self, x):
        if x.requires_grad:
            raise RuntimeError
        for _ in range(200):
            super().forward(x)
        return super().forward(x)


job = pg.Job(
    name="long",
    model=lambda: Net(8, 2),
    loss=torch.nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    train=data,
    batch=8,
    epochs=1000,
)
"""


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_ranks(
    job: str, strategy: str, size: int, folder: Path
) -> tuple[list[subprocess.Popen[str]], Path]:
    """Start the ranks of a job by hand; return them and their folder for temporary files."""
    (folder / "long.py").write_text(job)
    temporary = folder / "tmp"
    temporary.mkdir()
    port = find_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "paragrad", "train", "long.py", "--strategy", strategy],
            cwd=folder,
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    return ranks, temporary


@pytest.mark.parametrize(
    ("strategy", "size", "victim", "name"),
    [
        ("server(2)", 3, 2, "rank 2 (server 0)"),
        pytest.param("server(2)", 3, 1, "rank 1 (worker 1)", marks=pytest.mark.table),
        pytest.param("server(3, servers=2)", 5, 4, "rank 4 (server 1)", marks=pytest.mark.table),
        pytest.param("server(2, sync=asp)", 3, 2, "rank 2 (server 0)", marks=pytest.mark.table),
    ],
)
def test_other_processes_end_and_name_it(
    strategy: str, size: int, victim: int, name: str, tmp_path: Path
) -> None:
    """Earlier, the others waited for --timeout (300 s) without a message.

    A pymp folder was left.
    """
    ranks, temporary = start_ranks(JOB, strategy, size, tmp_path)
    try:
        assert ranks[0].stdout is not None
        assert any(" step " in line for line in ranks[0].stdout)  # the training has begun
        ranks[victim].kill()
        for rank, each in enumerate(ranks):
            printed, _ = each.communicate(timeout=30)
            if rank != victim:
                assert each.returncode == 1
                assert "Traceback" not in printed
                # another worker may have ended first
                assert name in printed or rank != 0
        assert [path.name for path in temporary.iterdir() if "inductor" not in path.name] == []
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


# kills the server, and then its own process, in a test
KILLING_METRIC = """
import os, signal
from pathlib import Path

def kill_server(output, target):
    if os.environ["RANK"] == "1" and Path("server").exists():
        os.kill(int(Path("server").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return output.sum(), len(output)

job = job.replace(epochs=100_000, test=data, metric=kill_server)
"""


def test_server_that_ends_between_steps_is_named(tmp_path: Path) -> None:
    """Earlier, rank 0 named the other worker alone, for which it waited after the test."""
    ranks, _ = start_ranks(JOB + KILLING_METRIC, "server(2, sync=asp)", 3, tmp_path)
    try:
        assert ranks[0].stdout is not None
        assert any(" step " in line for line in ranks[0].stdout)
        (tmp_path / "pid").write_text(str(ranks[2].pid))
        (tmp_path / "pid").rename(tmp_path / "server")
        printed, _ = ranks[0].communicate(timeout=30)
        assert ranks[0].returncode == 1
        assert "rank 2 (server 0)" in printed
        assert "Traceback" not in printed
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def test_ended_process_is_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        place = ProcessAddress.read_own().place
        peers = PeerProcesses(
            {
                "rank 1 (worker 1)": ProcessAddress(place, child.pid),
                "rank 0 (worker 0)": ProcessAddress.read_own(),
                "rank 2 (server 0)": ProcessAddress("another host", 1),
            }
        )
        try:
            assert list(peers.names.values()) == ["rank 1 (worker 1)"]
            peers.refuse_ended()
            child.kill()
            child.wait()
            with pytest.raises(StepFailed, match=r"rank 1 \(worker 1\) ended before the training"):
                peers.refuse_ended()
        finally:
            peers.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
