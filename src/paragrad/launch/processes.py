"""The launcher's side: the server that ranks come from, and each rank's process as seen from
here.

A server lives until the process that started it ends, so that the next ranks start in some 10
ms; no two threads or processes share one by accident: it is kept by the process, and by the
variables that libraries read when they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from paragrad.errors import RankFailed
from paragrad.launch.launcher_folder import locked_folder
from paragrad.launch.protocol import NUMBER, Setup

# seconds for the server to import torch, on a slow disk with everything else at work
START = 120.0
END = 5.0  # seconds for a killed process to be gone
# variables read once, when a library is loaded: a server that was started with others is not
# the one to fork
LOADED = ("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_")

_servers: dict[object, ServerProcess] = {}
_starting = threading.Lock()


def server() -> ServerProcess:
    """This process's server, started if there is none: then it imports torch while the caller
    goes on.
    """
    with _starting:
        kind = (
            os.getpid(),
            tuple(
                sorted(
                    (name, value) for name, value in os.environ.items() if name.startswith(LOADED)
                )
            ),
        )
        found = _servers.get(kind)
        if found is None or found.popen.poll() is not None:
            if found is not None:
                found.close()
            found = ServerProcess()
            _servers[kind] = found
        return found


@atexit.register
def close() -> None:
    """End the servers of this process, with all their ranks. It happens at exit; the next ranks
    start a new one.
    """
    while _servers:
        _servers.popitem()[1].close()


class ServerProcess:
    """The process that ranks come from. how: "fork", or "spawn" for a fresh Python each; what
    this system can by default.
    """

    def __init__(self, how: str | None = None) -> None:
        how = how or ("fork" if sys.platform == "linux" else "spawn")
        self.owner = os.getpid()
        self.folder, self.lock = locked_folder()
        self.socket, theirs = socket.socketpair()
        with theirs:
            environment = {
                **_environment(),
                "PYTHONPATH": os.pathsep.join(_path()),
                # should an import ask for GPUs: without CUDA itself
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            told = [str(theirs.fileno()), str(self.lock), str(self.folder), how]
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "paragrad.launch.fork_server", *told],
                pass_fds=[theirs.fileno(), self.lock],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=environment,
                process_group=0,
            )

    def start(self, stacks: list[Path]) -> list[Process]:
        """Processes that wait for tasks, one for each of the files to write their stacks into.
        Raises RankFailed.
        """
        processes: list[Process] = []
        try:
            for path in stacks:
                processes.append(Process(self, path))
            for process in processes:
                process.settle()
        except BaseException:
            for process in processes:
                process.end()
            raise
        return processes

    def failed(self) -> RankFailed:
        """What to raise when it ended."""
        try:
            how = ending(self.popen.wait(END))
        except subprocess.TimeoutExpired:
            how = f"closed its socket and is still there after {END:g} s"
        return RankFailed(f"the server of the ranks {how}, and its ranks ended with it", rank=None)

    def close(self) -> None:
        """End the server, and with it every rank that came from it."""
        self.socket.close()
        os.close(self.lock)
        if os.getpid() == self.owner:  # not in a child that the user forked
            self.popen.kill()
            self.popen.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


class Process:
    """A rank's process: this end of its socket, what the server tells of it, and the file of
    its stacks.
    """

    def __init__(self, server: ServerProcess, stacks: Path) -> None:
        self.server = server
        self.stacks = stacks
        stacks.touch()
        self.pid = 0
        # a pidfd: a pid may be another's by the time it is used
        self.handle: int | None = None
        # its exit code, when the server has told it
        self.code: int | None = None
        ours, link = socket.socketpair()
        self.notes, told = socket.socketpair()
        self.socket = Connection(ours.detach())
        # `settle` will say how it ended
        with link, told, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(server.socket, [b"+"], [link.fileno(), told.fileno(), 2])

    def settle(self) -> None:
        """Wait for it to be there and let it take over what a child of this process would.
        Raises RankFailed.
        """
        self.notes.settimeout(START)
        try:
            told, handles, *_ = socket.recv_fds(self.notes, NUMBER.size, 1)
        except TimeoutError:
            raise RankFailed(
                f"the server of the ranks has not started one within {START:g} s", rank=None
            ) from None
        except ConnectionResetError:
            told = b""
            handles = []
        if not told:
            raise self.server.failed()
        self.pid = NUMBER.unpack(told)[0]
        self.handle = handles[0] if handles else None
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(Setup(_environment(), _path(), os.getcwd(), affinity, self.stacks))

    def signal(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, sent)
            elif self.pid:
                os.kill(self.pid, sent)

    def exit_code(self, seconds: float) -> int | None:
        """Its exit code, waited for; None where the server is gone and cannot tell. Raises
        TimeoutError.
        """
        if self.code is None:
            self.notes.settimeout(seconds)
            with contextlib.suppress(ConnectionResetError):
                if told := self.notes.recv(NUMBER.size):
                    self.code = NUMBER.unpack(told)[0]
        return self.code

    def failed(self, rank: int) -> RankFailed:
        """What to raise when it ended, as rank `rank`: how it ended, or that the server did."""
        try:
            code = self.exit_code(END)
        except TimeoutError:
            return RankFailed(
                f"the process of rank {rank} closed its socket and is still there after {END:g} s",
                rank=rank,
            )
        return (
            self.server.failed()
            if code is None
            else RankFailed(f"the process of rank {rank} {ending(code)}", rank=rank)
        )

    def end(self) -> None:
        """Kill it and wait until it is gone, and what it started too."""
        self.signal(signal.SIGKILL)
        # it ends by this too, should it not have told its pid yet
        self.socket.close()
        if self.pid:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                # no server is left to do it; whoever is in the group keeps its number
                if self.exit_code(END) is None:
                    os.killpg(self.pid, signal.SIGKILL)
        self.notes.close()
        if self.handle is not None:
            gone = select.poll()
            gone.register(self.handle, select.POLLIN)
            gone.poll(1000 * END)
            os.close(self.handle)
            self.handle = None
        self.pid = 0


def ending(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _environment() -> dict[str, str]:
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _path() -> list[str]:
    return [path or os.getcwd() for path in sys.path]
