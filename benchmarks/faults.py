"""Workers and servers that are killed, or stopped for longer than the limit, or that join, at
random moments of a training.

    python benchmarks/faults.py --check --data DIR
    # the same, written into docs/results/stragglers.md
    python benchmarks/faults.py --check --page --data DIR

| figure | bar |
|---|---|
| runs that did not end: 60 under asp and ssp with workers killed, stopped or joining, 20 with a server killed | at most 0 |
| samples, over all servers and runs, that were neither applied nor counted as lost, or both | at most 0 |
| points of accuracy below undisturbed runs, of those with workers killed, stopped or joining, means | at most 0.5 |
| updates that a death of a server lost, the most | at most 100: a snapshot is made so often |
| seconds without a step of any worker in runs whose server was killed, the most | at most 5 |
| workers that joined and did not end: with the training, or by themselves where they missed its end | at most 0 |
| processes and folders left over | at most 0 |
| under bsp, anybody killed: parameters after 200 steps, away from serial's, the farthest (float64) | at most 1e-10 |

Each run trains mnist-mlp for one epoch (200 steps under bsp). The number of the run is the seed of
all random choices: which process is disturbed, how, and when. A worker that died is replaced.

In runs with joining workers, workers join over TCP with the command `paragrad join`, up to three at
a time. Now and then, one of the joined workers is killed, stopped or asked to leave, or one of the
training's own workers is killed.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import Bench
from pages import DOCS, FIGURES, fill_block, table

import paragrad as pg
from paragrad.launch import process_pool
from paragrad.launch.processes import RankProcess, get_fork_server
from paragrad.loops import failure_recovery, queue_coordinator
from paragrad.parallel.server.curve_keys import (
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    Address,
    make_key_files,
)
from paragrad.record.record import Record

BSP = "server(4, servers=2)"
KINDS = dict.fromkeys(
    ("worker killed", "worker stopped", "workers joining", "server killed"), ("asp", "ssp(4)")
)
LIMIT = 2.0  # seconds that a worker may need for a ticket, in runs that stop workers
PAGE = DOCS / "results" / "stragglers.md"
RESULTS = FIGURES / "faults.json"
GUESTS = 3  # joined workers at the same time
PACE = 0.1  # seconds per share in runs with joining workers, so that there is time to join
ALONE = 10  # seconds without an answer after which a joined worker ends
_started: list[tuple[int, RankProcess]] = []
_joined: list[subprocess.Popen[bytes]] = []


class RecordingPool(process_pool.ProcessPool):
    """A process pool that records which processes it started."""

    def start_task(
        self, number: int, function: Callable[..., Any], *arguments: Any, **place: Any
    ) -> None:
        super().start_task(number, function, *arguments, **place)
        _started.append((number, self.members[number]))


class OpenCoordinator(queue_coordinator.QueueCoordinator):
    """A queue coordinator that records the address at which workers can join.

    limit: seconds for a ticket; 0 for the limit of the sockets.
    """

    address = ""
    key = Path()
    limit = 0.0

    def run_training(self) -> str:
        self.queue.limit = self.limit or self.queue.limit
        return super().run_training()

    def announce_join_address(self, address: Address) -> None:
        super().announce_join_address(address)
        OpenCoordinator.key = self.folder / "training.key"
        OpenCoordinator.address = address.endpoint


def disturb_with_joins(
    seed: int, data: str, keys: Path, draws: random.Random, over: threading.Event
) -> None:
    """Make one change every second or two until the training is over.

    A worker joins, or a joined worker is killed, stopped or asked to leave, or one of the
    training's own workers is killed.
    """
    words = [
        sys.executable,
        "-m",
        "paragrad",
        "join",
        "ADDRESS",
        "mnist-mlp",
        "--seed",
        str(seed),
        "--data",
        data,
        "--key",
        str(keys),
        "--threads",
        "1",
        "--timeout",
        str(ALONE),
        "--server-key",
    ]
    while not over.wait(draws.uniform(1.0, 2.0)):
        there = [each for each in _joined if each.poll() is None]
        own = [
            process
            for number, process in _started
            if number < 4 and process.code is None and process.pid
        ]
        what = draws.choice(("join", "join", "kill", "stop", "leave", "own"))
        if what == "join" and len(there) < GUESTS and OpenCoordinator.address:
            words[4] = OpenCoordinator.address
            _joined.append(
                subprocess.Popen(
                    [*words, str(OpenCoordinator.key)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        elif what == "own" and own:
            draws.choice(own).send_signal(signal.SIGKILL)
        elif what in ("kill", "stop", "leave") and there:
            victim = draws.choice(there)
            victim.send_signal(
                {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGINT}[what]
            )
            if what == "stop":
                over.wait(2 * LIMIT)
                victim.send_signal(signal.SIGCONT)


def disturb(
    kind: str, workers: int, servers: int, draws: random.Random, over: threading.Event
) -> None:
    """Kill or stop a process every one to three seconds until the training is over.

    At most three servers are killed, because each death of a server loses updates.
    """
    victims = 3 if kind.startswith("server") else 1000
    while victims and not over.wait(draws.uniform(1.0, 3.0)):
        serving = [process for number, process in _started if workers <= number < workers + servers]
        working = [
            process for number, process in _started if not workers <= number < workers + servers
        ]
        alive = [
            each
            for each in (serving if kind.startswith("server") else working)
            if each.code is None and each.pid
        ]
        if not alive:
            continue
        victim = draws.choice(alive[-max(workers, servers) :])
        victims = victims - 1
        victim.send_signal(signal.SIGSTOP if kind.endswith("stopped") else signal.SIGKILL)
        if kind.endswith("stopped"):
            over.wait(2 * LIMIT)
            victim.send_signal(signal.SIGCONT)


def train_disturbed(
    text: str, seed: int, data: str, folder: str, kind: str | None
) -> dict[str, Any]:
    """Train once, with disturbances of a kind, and return numbers from the record of the run."""
    job = pg.job("mnist-mlp").replace(epochs=1, seed=seed)
    chosen = pg.strategy(text)
    over = threading.Event()
    _started.clear()
    _joined.clear()
    OpenCoordinator.address = ""
    OpenCoordinator.limit = LIMIT if kind in ("worker stopped", "workers joining") else 0.0
    thread = threading.Thread(
        target=disturb, args=(kind, chosen.workers, chosen.servers, random.Random(seed), over)
    )
    more: dict[str, Any] = {}
    if kind == "workers joining":
        keys = Path(folder) / f"me{SECRET_SUFFIX}"
        thread = threading.Thread(
            target=disturb_with_joins, args=(seed, data, keys, random.Random(seed), over)
        )
        more = {"listen": "127.0.0.1", "allow": Path(folder) / "allow", "pace": PACE}
        if not keys.exists():
            more["allow"].mkdir()
            make_key_files(keys).replace(more["allow"] / f"me{PUBLIC_SUFFIX}")
    if kind:
        thread.start()
    try:
        run = pg.train(job, text, runs=folder, data=data, **more)
    finally:
        over.set()
        if kind:
            thread.join()
        stayed = sum(map(is_still_running, _joined))
    record = Record(run.folder)
    served = [
        line for rank in range(len(record.ranks)) for line in record.select_lines("server", rank)
    ]
    samples = record.header["job"]["samples"]
    ends = sorted(
        line["start"] + line["seconds"]
        for rank in range(len(record.ranks))
        for line in record.select_lines("step", rank)
    )
    events = [
        line for line in record.run_lines if line["kind"] == "event" and line["name"] != "open"
    ]
    return {
        "accuracy": run.test,
        "off": sum(abs(line["samples"] + line["lost"]["samples"] - samples) for line in served),
        "servers": len(served),
        "lost": max(line["lost"]["updates"] for line in served),
        "gap": max(later - earlier for earlier, later in itertools.pairwise(ends)),
        "events": len(events),
        "deaths": sum(line["name"] == "again" for line in events),
        "stayed": stayed,
        "joined": sum(line["name"] == "joined" for line in events),
        "audit": str(run.sample_count),
    }


def is_still_running(joiner: subprocess.Popen[bytes]) -> bool:
    """Return whether a joined worker runs for too long after the end of its training."""
    try:
        joiner.wait(6 * ALONE)
        return False
    except subprocess.TimeoutExpired:
        joiner.kill()
        joiner.wait()
        return True


def measure_bsp_difference(seed: int, data: str, folder: str) -> dict[str, Any]:
    """Train 200 steps under bsp while six processes are killed, one every one to three seconds.

    Return how far the parameters are from serial's.
    """
    job = pg.job("mnist-mlp").replace(
        epochs=1, seed=seed, dtype=torch.float64, test=None, metric=None
    )
    serial = pg.train(job, runs=folder, data=data, limit=200)
    draws = random.Random(seed)
    over = threading.Event()

    def kill() -> None:
        for _ in range(6):
            if over.wait(draws.uniform(1.0, 3.0)):
                return
            if alive := [
                process for _, process in _started if process.code is None and process.pid
            ]:
                draws.choice(alive).send_signal(signal.SIGKILL)

    _started.clear()
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        run = pg.train(job, BSP, runs=folder, data=data, limit=200, pace=0.05)
    finally:
        over.set()
        thread.join()
    away = max(
        float((tensor - serial.model().state_dict()[name]).abs().max())
        for name, tensor in run.model().state_dict().items()
    )
    events = [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"]
    return {
        "away": away,
        "again": events.count("again"),
        "back": events.count("back"),
        "steps": len(run.losses),
    }


def measure_bsp(bench: Bench, folder: str, rounds: int) -> str:
    """Add the figure for bsp, and return the sentence for the page."""
    found = []
    for seed in range(rounds):
        found.append(measure_bsp_difference(seed, bench.options.data, folder))
        print(f"{BSP} {seed}: {found[-1]}", flush=True)
    bench.measured["bsp"] = found
    away = max(one["away"] if one["steps"] == 200 else float("inf") for one in found)
    bench.figure(
        "bsp, anybody killed: parameters away from serial's, the farthest", away, at_most=1e-10
    )
    return (
        f"`{BSP}`, {rounds} runs of 200 steps in float64, six killed in each, one every one to "
        f"three seconds: workers began again {sum(one['again'] for one in found)} times, "
        f"everything went back {sum(one['back'] for one in found)} times, and parameters ended at "
        f"most {away:.0e} from serial's."
    )


def count_leftovers() -> int:
    """Count the ranks that still run below this process, and what its trainings left in its folder."""
    processes = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    ranks = [
        child
        for parent in processes
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ]
    return len(ranks) + len(glob.glob(f"{get_fork_server().folder}/**/queue", recursive=True))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder with MNIST")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/results/stragglers.md, and its figures",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    found = dict[str, list[dict[str, Any]]]()
    missing = 0
    queue_coordinator.ProcessPool = RecordingPool  # type: ignore[misc]
    failure_recovery.ProcessPool = RecordingPool
    queue_coordinator.QueueCoordinator = OpenCoordinator  # type: ignore[misc]
    rounds = bench.rounds(20, quick=2)
    with tempfile.TemporaryDirectory() as folder:
        for kind, syncs in {"undisturbed": ("asp",), **KINDS}.items():
            for number in range(3 if kind == "undisturbed" else rounds):
                text = f"server(4, servers=2, sync={syncs[number % len(syncs)]})"
                try:
                    one = train_disturbed(
                        text,
                        number,
                        bench.options.data,
                        folder,
                        None if kind == "undisturbed" else kind,
                    )
                except Exception as error:
                    missing += 1
                    print(f"{kind} {number}: {text}: {type(error).__name__}: {error}", flush=True)
                    continue
                found.setdefault(kind, []).append(one)
                print(f"{kind} {number}: {text} {one}", flush=True)
        told = measure_bsp(bench, folder, rounds)
    bench.measured["runs"] = found
    every = [one for kind, ones in found.items() if kind != "undisturbed" for one in ones]
    bench.figure("runs that did not end", missing, at_most=0)
    bench.figure(
        "samples neither applied nor lost, or both", sum(one["off"] for one in every), at_most=0
    )
    bench.figure(
        "points of accuracy below undisturbed",
        mean(one["accuracy"] for one in found["undisturbed"])
        - mean(
            one["accuracy"] for kind in KINDS if kind.startswith("worker") for one in found[kind]
        ),
        at_most=0.5,
    )
    bench.figure(
        "updates lost by a death, the most",
        max(one["lost"] / max(1, one["deaths"]) for one in every),
        at_most=100,
    )
    bench.figure(
        "seconds without a step, a server killed",
        max(one["gap"] for one in found["server killed"]),
        at_most=5,
    )
    bench.figure("who joined and did not end", sum(one["stayed"] for one in every), at_most=0)
    bench.figure("left over", count_leftovers(), at_most=0)
    if bench.options.page:
        bench.keep(RESULTS)
        rows = [
            [
                kind,
                str(len(ones)),
                f"{mean(one['accuracy'] for one in ones):.2f}",
                f"{min(one['accuracy'] for one in ones):.2f}",
                str(sum(one["events"] for one in ones)),
                str(sum(one["joined"] for one in ones)),
                str(sum(one["lost"] for one in ones)),
                f"{max(one['gap'] for one in ones):.1f}",
            ]
            for kind, ones in found.items()
        ]
        head = [
            "",
            "runs",
            "accuracy [%], mean",
            "lowest",
            "events",
            "of them joining",
            "updates lost",
            "s without a step, most",
        ]
        PAGE.write_text(fill_block(PAGE.read_text(), "faults", f"{table(head, rows)}\n\n{told}"))
    bench.finish()


if __name__ == "__main__":
    main()
