"""Parameter servers: the time of a push and a pull, compared with plain copies of the same bytes;
and how well they use the links.

    # simulated hosts of this machine at 100 Mbit/s (needs root and iproute2)
    python benchmarks/server.py --check
    # the same, written into docs/techniques/server.md
    python benchmarks/server.py --check --page

| figure                                                                                             | bar          |
|----------------------------------------------------------------------------------------------------|--------------|
| time of a push and a pull, two workers and one server on one host, over two copies by their sockets | at most 1.5  |
| of the links, server(4, servers=4), every process on a host of its own at 100 Mbit/s               | at least 0.9 |

The model has 4 MB of parameters. The copies use the same sockets, with pyzmq alone. Both workers
send that many bytes, receive an acknowledgement, send a request, and receive the same number of
bytes.

A push and a pull do everything that a step needs: gradients are copied into one vector, checked,
summed and divided, and parameters are copied to their places. The time with the update of the
optimizer (SGD) is a separate figure. On one host (ipc), the vectors are in shared memory, and the
sockets carry their locations only. Over TCP, with and without encryption, the sockets carry the
vectors.

There are figures without a bar: seconds of a step for 1 to 8 workers and 1, 2, 4 servers, read from
their records. They run on one host, and with one host per process. Ranks 0 to p - 1 are the
workers, the ranks after them are the servers. Each has a link of its own.

A link carries data in both directions at the same time. But all workers push before all pull, so
each direction is unused for half of a step. Therefore the shortest possible time is the closed form
2 p n beta / S at the link of a server. If there are more servers than workers, it is 2 n beta at
the link of a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import zmq
from common import Bench, measure_in_turn, ratios
from hosts import PORT, Cluster, hosts
from pages import DOCS, FIGURES, fill_block, format_milliseconds, table
from torch import nn
from trainings import make_training_measure
from workers import Workers, serve

import paragrad as pg
from paragrad.commands.train import train
from paragrad.engine.exchange import Replica
from paragrad.jobs.loss import LossModule
from paragrad.launch import Launcher
from paragrad.parallel.server import server_exchange, worker_exchange
from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.message_header import view_bytes
from paragrad.parallel.server.sockets import Listener
from paragrad.record.record import Record
from paragrad.record.step_log import StepLog
from paragrad.runtime import allocator
from paragrad.runtime.rendezvous import join_launched_world
from paragrad.runtime.world import World

SIDE = 512
LAYERS = 4
BYTES = 4 * LAYERS * SIDE**2  # bytes of the parameters: 4 MB
TRANSPORTS = ("ipc", "TCP", "TCP, encrypted")
WHOLE = torch.zeros(BYTES // 4)
THEIRS = "two copies, pyzmq alone"
OURS = "a push and a pull"
UPDATED = "with SGD's update"
TURNS = 30  # their median counts
WORKERS = (1, 2, 4, 8)
SERVERS = (1, 2, 4)
MEGABITS = 100
MOST = ("server(4, servers=4)", 4, 4)
# steps of a training on hosts; the first three do not count
STEPS = 7
PAGE = DOCS / "techniques" / "server.md"
RESULTS = FIGURES / "server.json"


def build_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))


@dataclass(frozen=True)
class Setting:
    """A job whose steps need almost no computation."""

    steps: int = STEPS

    def job(self) -> pg.Job:
        inputs = torch.randn(64, SIDE, generator=torch.Generator().manual_seed(0))
        return pg.Job(
            name="contention",
            model=build_model,
            loss=nn.functional.mse_loss,
            epochs=1000,
            batch=16,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            train=torch.utils.data.TensorDataset(inputs, inputs),
        )


# ---- a push and a pull, in two workers and a server ------------------------------------------
def serve_orders(address: str) -> None:
    """Answer orders (transport, what) with the median of the seconds that the work takes."""
    torch.set_num_threads(1)
    allocator.keep_freed_memory()  # as in the ranks of a training
    with join_launched_world("gloo") as world:
        sides = {transport: make_exchange(world, transport) for transport in TRANSPORTS}

        def answer(order: tuple[str, str]) -> float:
            transport, whose = order
            turn = make_turn(sides[transport], whose)
            return median([time_turn(world, turn) for _ in range(TURNS + 3)][3:])

        serve(address, answer)


def make_exchange(
    world: World, transport: str
) -> server_exchange.ServerExchange | worker_exchange.WorkerExchange:
    """Make this rank's exchange, of a worker or of the server, over a transport. Collective."""
    made = build_model()
    strategy = pg.strategy("server(2)")
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    replica = Replica(
        LossModule(made, nn.functional.mse_loss),
        torch.optim.SGD(made.parameters(), lr=0.01),
        full_batch=2,
    )
    with contextlib.ExitStack() as stack:
        if transport != "ipc":
            stack.enter_context(
                mock.patch.object(server_exchange, "find_own_host", return_value="127.0.0.1")
            )
        if transport == "TCP":
            stack.enter_context(mock.patch.object(server_exchange, "Listener", make_plain_listener))
        if world.rank < 2:
            asks = worker_exchange.WorkerExchange(strategy, replica, world, StepLog(None), None)
            _ = asks.shared_memory_use  # asks the server whether shared memory can be used
            return asks
        serves = server_exchange.ServerExchange(strategy, replica, world, StepLog(None), None)
        # answer the two workers, which ask whether shared memory can be used
        for _ in range(2 if transport == "ipc" else 0):
            handle_request(serves)
        return serves


def make_plain_listener(longest: int, host: str, keys: KeyPair, **more: Any) -> Listener:
    """Make a server's socket over TCP without encryption. paragrad itself has no such socket."""
    found = Listener(longest, None, keys, Address(f"tcp://{host}:*"), **more)
    found.address = Address(found.socket.get_string(zmq.LAST_ENDPOINT))
    return found


def make_turn(own: Any, whose: str) -> Callable[[], object]:
    """Return a function that does this rank's part of a push and a pull."""
    if isinstance(own, server_exchange.ServerExchange):
        own.shard.draw_alike = lambda name, step, update: update() if whose == UPDATED else None
        return partial(serve_copies, own) if whose == THEIRS else partial(handle_turn, own)
    return partial(send_copies, own) if whose == THEIRS else partial(push_and_pull, own)


def time_turn(world: World, turn: Callable[[], object]) -> float:
    world.barrier()
    start = time.perf_counter()
    turn()
    return time.perf_counter() - start


def handle_turn(own: server_exchange.ServerExchange) -> None:
    # two pushes, and two requests for the update
    for _ in range(4):
        handle_request(own)


def handle_request(own: server_exchange.ServerExchange) -> None:
    found = own.listener.receive_message(60.0)
    assert found is not None
    own.request_handler.handle_message(found)


def push_and_pull(own: worker_exchange.WorkerExchange) -> None:
    own.begin()
    own.finish(1.0, 1.0)
    own.average(2.0)
    own.update()


def serve_copies(own: server_exchange.ServerExchange) -> None:
    """Do the server's part of the copies with pyzmq alone."""
    line = own.listener.socket
    vector = view_bytes(WHOLE)
    pushed = [line.recv_multipart(copy=False) for _ in range(2)]
    for whose, *_ in pushed:
        line.send_multipart([whose.bytes, b"done"])
    for _ in range(2):
        whose, _ = line.recv_multipart()
        line.send_multipart([whose, bytes(104), b"", vector], copy=False)


def send_copies(own: worker_exchange.WorkerExchange) -> None:
    line = own.client.sockets[0]
    line.send_multipart([bytes(104), b"", view_bytes(WHOLE)], copy=False)
    line.recv_multipart()
    line.send(b"more")
    line.recv_multipart(copy=False)


def measure_pushes_and_pulls(bench: Bench) -> None:
    workers = Workers(__file__, "copies", 3)
    measures = {
        (transport, whose): lambda order=(transport, whose): max(workers.ask(order)[:2])
        for transport in TRANSPORTS
        for whose in (THEIRS, OURS, UPDATED)
    }
    found = measure_in_turn(
        {f"{transport}, {whose} [s]": each for (transport, whose), each in measures.items()},
        bench.rounds(15, quick=5),
    )
    workers.close()
    bench.measured |= found
    for transport in TRANSPORTS:
        for what, bar in ((OURS, 1.5 if transport == "ipc" else None), (UPDATED, None)):
            bench.figure(
                f"{transport}, {what} over {THEIRS}",
                at_most=bar,
                value=ratios(
                    found[f"{transport}, {what} [s]"], found[f"{transport}, {THEIRS} [s]"]
                ),
            )
    bench.figure(
        f"{OURS}, encrypted over not",
        ratios(found[f"TCP, encrypted, {OURS} [s]"], found[f"TCP, {OURS} [s]"]),
    )


# ---- steps of trainings ----------------------------------------------------------------------
def measure_on_hosts(cluster: Cluster, folder: Path, workers: int, servers: int) -> float:
    """Train on hosts, and return the seconds of a step.

    Each rank is started with the variables of torchrun, but without torchrun's agent, which would
    cost as much again.
    """
    place = tempfile.mkdtemp(dir=folder)
    size = workers + servers
    told = {
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.hosts[0].name,
        "MASTER_PORT": str(PORT),
    }
    words = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        f"server({workers}, servers={servers})",
        place,
    ]
    programs = [
        cluster.start(rank, words, environment={**told, "RANK": str(rank)}) for rank in range(size)
    ]
    cluster.wait_for(programs, timeout=300.0)
    (run,) = Path(place).iterdir()
    starts = [line["start"] for line in Record(run).select_lines("step", 0)]
    return (starts[-1] - starts[3]) / (len(starts) - 4)


def closed_form(workers: int, servers: int) -> float:
    """Return the seconds of a step on the busiest link."""
    return 2 * max(workers / servers, 1.0) * BYTES * 8e-6 / MEGABITS


def run_training(strategy: str, folder: str) -> None:
    train(Setting().job(), strategy, runs=folder, limit=STEPS)


def list_pairs() -> Iterator[tuple[int, int]]:
    return ((workers, servers) for workers in WORKERS for servers in SERVERS)


def measure_steps(bench: Bench, folder: Path) -> None:
    some = [(1, 1), (4, 1), (4, 2)] if bench.quick else list(list_pairs())
    most = WORKERS[-1] + SERVERS[-1]
    with Launcher(most) as ranks:
        found = measure_in_turn(
            {
                f"one host, {workers} to {servers} [ms]": make_training_measure(
                    ranks, f"server({workers}, servers={servers})", Setting(25), folder
                )
                for workers, servers in some
            },
            1 if bench.quick else 2,
        )
    with hosts(most, megabits=MEGABITS) as cluster:
        measures = {
            f"hosts, {workers} to {servers} [s]": partial(
                measure_on_hosts, cluster, folder, workers, servers
            )
            for workers, servers in some
        }
        found |= measure_in_turn(measures, 1)
        repeated = measure_in_turn(
            {"most": partial(measure_on_hosts, cluster, folder, 4, 4)}, 1 if bench.quick else 2
        )["most"]
        found["hosts, 4 to 4 [s]"] = found.get("hosts, 4 to 4 [s]", []) + repeated
        for name, fault in cluster.faults().items():
            bench.figure(name, fault)
    bench.measured |= found
    bench.figure(
        "of the links, server(4, servers=4)",
        [closed_form(4, 4) / each for each in found["hosts, 4 to 4 [s]"]],
        at_least=0.9,
    )
    for workers, servers in some:
        bench.figure(
            f"of the closed form, {workers} to {servers}",
            [
                closed_form(workers, servers) / each
                for each in found[f"hosts, {workers} to {servers} [s]"]
            ],
        )


# ---- the page --------------------------------------------------------------------------------
def build_copies_table(bench: Bench) -> str:
    def format_copies(transport: str, what: str) -> str:
        over = (
            ""
            if what == THEIRS
            else f" ({bench.figures[f'{transport}, {what} over {THEIRS}']['value']:.2f})"
        )
        return format_milliseconds(median(bench.measured[f"{transport}, {what} [s]"])) + over

    return table(
        ["4 MB, two workers, one server [ms]", *TRANSPORTS],
        [
            [what, *(format_copies(each, what) for each in TRANSPORTS)]
            for what in (THEIRS, OURS, UPDATED)
        ],
    )


def build_steps_table(bench: Bench) -> str:
    def format_step(workers: int, servers: int) -> str:
        own = median(bench.measured[f"hosts, {workers} to {servers} [s]"])
        form = closed_form(workers, servers)
        return f"{own:.2f} ({form:.2f}: {form / own:.2f})"

    many = table(
        ["workers, a link each", *(f"servers: {servers}" for servers in SERVERS)],
        [
            [str(workers), *(format_step(workers, servers) for servers in SERVERS)]
            for workers in WORKERS
        ],
    )
    one = table(
        ["workers, one host [ms]", *(f"servers: {servers}" for servers in SERVERS)],
        [
            [
                str(workers),
                *(
                    f"{median(bench.measured[f'one host, {workers} to {servers} [ms]']):.1f}"
                    for servers in SERVERS
                ),
            ]
            for workers in WORKERS
        ],
    )
    return f"{many}\n\n{one}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("copies", "steps"), help="measure only this part")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the tables of docs/techniques/server.md, and their figures",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        kind, place = bench.options.worker
        serve_orders(place) if kind == "copies" else run_training(kind, place)
        return
    if bench.options.page and (
        bench.quick or bench.options.only or bench.options.rounds or bench.options.json
    ):
        sys.exit("the page shows all parts, measured in full: with --page, give only --check")
    if bench.options.only != "steps":
        measure_pushes_and_pulls(bench)
    if bench.options.only != "copies":
        with tempfile.TemporaryDirectory() as folder:
            measure_steps(bench, Path(folder))
    if bench.options.page:
        bench.keep(RESULTS)
        PAGE.write_text(
            fill_block(
                fill_block(PAGE.read_text(), "copies", build_copies_table(bench)),
                "contention",
                build_steps_table(bench),
            )
        )
    bench.finish()


if __name__ == "__main__":
    main()
