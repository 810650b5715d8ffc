"""Processes that keep running and answer orders, so that worlds of different kinds can be measured
in turn.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"]
LIMIT = 300.0  # seconds until all have started, though many share a core


class Workers:
    """`count` processes `file --worker kind ADDRESS`, started by torchrun (or mpirun). Each has a
    socket of its own.

    starter: the words in front of this command, such as those of torchrun. Or a function that
    starts the command in another way, and returns a function that waits for its end.
    """

    def __init__(
        self,
        file: str,
        kind: str,
        count: int,
        starter: list[str] | Callable[[list[str]], Callable[[], object]] = TORCHRUN,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        address = str(Path(self.folder.name) / "socket")
        words = [file, "--worker", kind, address]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(count)
            listener.settimeout(LIMIT)
            self.ended = (
                start_processes(starter, count, words)
                if isinstance(starter, list)
                else starter(words)
            )
            self.sockets: list[Connection] = []
            try:
                while len(self.sockets) < count:
                    self.sockets.append(Connection(listener.accept()[0].detach()))
            except TimeoutError:
                for each in self.sockets:  # a worker ends when its socket is closed
                    each.close()
                with suppress(subprocess.TimeoutExpired):
                    self.ended()
                self.folder.cleanup()
                raise RuntimeError(
                    f"{len(self.sockets)} of {count} workers have come after {LIMIT:g} s"
                ) from None
        self.pids: list[int] = [each.recv() for each in self.sockets]

    def ask(self, order: Any) -> list[Any]:
        """Send an order to all workers, and return their answers."""
        for each in self.sockets:
            each.send(order)
        return [each.recv() for each in self.sockets]

    def close(self) -> None:
        for each in self.sockets:
            with suppress(BrokenPipeError):  # the worker has failed, and has printed its error
                each.send(None)
        self.ended()
        self.folder.cleanup()


def start_processes(starter: list[str], count: int, words: list[str]) -> Callable[[], object]:
    """Start processes on this host, and return a function that waits for their end."""
    interpreter = [sys.executable] if starter is MPIRUN else []
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen([*starter, str(count), *interpreter, *words], env=environment)
    return lambda: process.wait(timeout=60)


def serve(address: str, answer: Callable[[Any], Any]) -> None:
    """Answer orders until there are no more. This runs in a worker."""
    orders = Client(address, "AF_UNIX")
    orders.send(os.getpid())
    while (order := orders.recv()) is not None:
        orders.send(answer(order))


# seconds: a longer exchange is run once, a shorter one up to REPEATS more times
LONG = 0.25
REPEATS = 10


class Stopwatch:
    """A stopwatch in a rank that measures the seconds of an exchange. Collective.

    If the exchange is short, it is repeated several times in a row. The first exchange of a kind
    is not timed, because it makes connections and allocates memory.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.seen = set[Any]()

    def seconds(self, kind: Any, exchange: Callable[[], object]) -> float:
        if kind not in self.seen:
            exchange()
            self.seen.add(kind)
        taken = self._time_exchange(exchange, 1)
        again = self.world.broadcast_object(min(REPEATS, int(LONG / taken)))
        return self._time_exchange(exchange, again) if again else taken

    def _time_exchange(self, exchange: Callable[[], object], times: int) -> float:
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(times):
            exchange()
        return (time.perf_counter() - start) / times


def serve_backwards(
    address: str,
    models: Callable[[], Mapping[str, Any]],
    losses: Callable[[], Callable[[Any], Any]],
) -> None:
    """Measure the forward and backward of the models that orders name. This runs in a rank over
    gloo, with one thread.

    losses: makes a function that returns the loss of a model, on data of this rank's own.
    """
    import torch

    from paragrad.runtime.rendezvous import join_launched_world

    torch.set_num_threads(1)
    with join_launched_world("gloo") as world:
        made = models()
        watch = Stopwatch(world)
        torch.manual_seed(world.rank)
        loss = losses()

        def run_backward(name: str) -> None:
            made[name].zero_grad()
            loss(made[name]).backward()

        serve(address, lambda name: watch.seconds(name, lambda: run_backward(name)))
