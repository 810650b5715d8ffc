"""A worker joins from another host, which has its own network.

The hosts have only an address and two public keys in common.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hosts import Cluster

from paragrad.parallel.server.curve_keys import make_key_files
from paragrad.record.record import Record

pytestmark = pytest.mark.network

Clusters = Callable[..., AbstractContextManager[Cluster]]

TRAINS = """
    import sys
    import paragrad as pg
    from paragrad.loops import queue_coordinator

    class Held(queue_coordinator.QueueCoordinator):
        def train_epochs(self):
            while len(self.queue.workers) < 3:         # two of its own, and the one that joins
                self.poll_events(None)
            return super().train_epochs()

    queue_coordinator.QueueCoordinator = Held
    if __name__ == "__main__":
        job = pg.job("digits").replace(epochs=1)
        run = pg.train(job, "server(2, servers=2, sync=ssp(1))", listen="host0:4000", allow="allow")
        print(run.folder, run.sample_count)
"""
JOIN = (
    f"{sys.executable} -m paragrad join tcp://host0:4000 digits --server-key runs/*/training.key "
    "--key me.key_secret"
)


@pytest.mark.table
def test_a_worker_joins_from_another_host(clusters: Clusters, tmp_path: Path) -> None:
    """The first call of `join` makes a key, and says into which folder its public half must go.

    The ports of the training follow each other.
    """
    (tmp_path / "trains.py").write_text(textwrap.dedent(TRAINS))
    (tmp_path / "allow").mkdir()
    with clusters(2, megabits=100) as cluster:
        first = cluster.start(1, ["sh", "-c", JOIN], folder=tmp_path)
        assert first.process.wait(60) == 2
        assert re.search(
            r"its public half me.key must be put\s+into the\s+folder", first.read_output()[1]
        )
        (tmp_path / "me.key").rename(tmp_path / "allow" / "host1.key")
        trains = cluster.start(0, [sys.executable, "trains.py"], folder=tmp_path)
        opens = "until ls runs/*/training.key >/dev/null 2>&1; do :; done"
        joins = cluster.start(1, ["sh", "-c", f"{opens}; {JOIN}"], folder=tmp_path)
        said, joined = cluster.wait_for([trains, joins], 110)
    assert re.fullmatch(r"worker 4: train \d+(, test \d+)?\n", joined)
    assert "1437 of 1437 samples seen in each of 1 epoch(s), 0 twice, 0 missed" in said
    record = Record(tmp_path / said.split()[0])
    assert (
        sum(line["samples"] for rank in (2, 3) for line in record.select_lines("server", rank))
        == 2 * 1437
    )
    assert record.select_lines("step", 4)
    opened = next(line["message"] for line in record.run_lines if line["kind"] == "event")
    assert "paragrad join tcp://host0:4000 JOB" in opened


WIDE = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import paragrad as pg
    from paragrad.loops import queue_coordinator

    inputs = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    job = pg.Job(name="wide", model=lambda: nn.Linear(64, 20_000), loss=nn.functional.mse_loss,
            batch=4, epochs=2,
                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                 train=TensorDataset(inputs, torch.zeros(24, 20_000)))

    class Held(queue_coordinator.QueueCoordinator):
        def train_epochs(self):
            while len(self.queue.workers) < 2:
                self.poll_events(None)
            return super().train_epochs()

    queue_coordinator.QueueCoordinator = Held
    if __name__ == "__main__":
        print(pg.train(job, "server(1, sync=ssp(1))", listen="host0:4000", allow="allow",
                timeout=30).folder)
"""


@pytest.mark.table
def test_slow_vector_is_sent_once(clusters: Clusters, tmp_path: Path) -> None:
    """A vector takes four seconds over this link. Earlier, both sides sent it again every second.

    The copies queued behind each other. So the joined worker got no answer within half a minute,
    and ended.
    """
    (tmp_path / "trains.py").write_text(textwrap.dedent(WIDE))
    (tmp_path / "allow").mkdir()
    make_key_files(tmp_path / "me.key_secret").rename(tmp_path / "allow" / "host1.key")
    with clusters(2, megabits=10) as cluster:
        trains = cluster.start(0, [sys.executable, "trains.py"], folder=tmp_path)
        opens = "until ls runs/*/training.key >/dev/null 2>&1; do :; done"
        join = JOIN.replace(" digits ", " trains.py ")
        joins = cluster.start(1, ["sh", "-c", f"{opens}; {join} --timeout 30"], folder=tmp_path)
        said, joined = cluster.wait_for([trains, joins], 110)
    assert re.fullmatch(r"worker 2: train \d+\n", joined)
    record = Record(tmp_path / said.split()[0])
    steps, (server,) = (
        [len(record.select_lines("step", number)) for number in (0, 2)],
        record.select_lines("server", 1),
    )
    assert min(steps) > 2
    assert server["received"] == sum(steps) * 4 * (64 * 20_000 + 20_000)
    assert sum(steps) == 2 * 6
