"""Processes that stay up and are given orders: worlds of different kinds can so be measured in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"]


class Workers:
    """`count` processes `file --worker kind ADDRESS`, started by torchrun (or mpirun), each with a socket of its own."""

    def __init__(self, file: str, kind: str, count: int, starter: list[str] = TORCHRUN) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        address = str(Path(self.folder.name) / "socket")
        interpreter = [sys.executable] if starter is MPIRUN else []
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        with Listener(address, "AF_UNIX", backlog=count) as listener:
            self.process = subprocess.Popen([*starter, str(count), *interpreter, file, "--worker", kind, address],
                                            env=environment)
            self.sockets: list[Connection] = [listener.accept() for _ in range(count)]
        self.pids: list[int] = [socket.recv() for socket in self.sockets]

    def ask(self, order: Any) -> list[Any]:
        """The answers of all to one order."""
        for socket in self.sockets:
            socket.send(order)
        return [socket.recv() for socket in self.sockets]

    def close(self) -> None:
        for socket in self.sockets:
            socket.send(None)
        self.process.wait(timeout=60)
        self.folder.cleanup()


def serve(address: str, answer: Callable[[Any], Any]) -> None:
    """In a worker: answer orders until there are no more."""
    orders = Client(address, "AF_UNIX")
    orders.send(os.getpid())
    while (order := orders.recv()) is not None:
        orders.send(answer(order))
