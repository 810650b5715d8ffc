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
from paragrad.launch.launcher_folder import create_locked_folder
from paragrad.launch.protocol import NUMBER_FORMAT, ProcessSetup

# seconds for the server to import torch, on a slow disk with everything else at work
START_SECONDS = 120.0
END_SECONDS = 5.0  # seconds for a killed process to be gone
# variables read once, when a library is loaded: a server that was started with others is not
# the one to fork
LOAD_TIME_PREFIXES = ("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_")

_servers: dict[object, ForkServerProcess] = {}
_server_lock = threading.Lock()


def get_fork_server() -> ForkServerProcess:
    """This process's server, started if there is none: then it imports torch while the caller
    goes on.
    """
    with _server_lock:
        kind = (
            os.getpid(),
            tuple(
                sorted(
                    (name, value)
                    for name, value in os.environ.items()
                    if name.startswith(LOAD_TIME_PREFIXES)
                )
            ),
        )
        found = _servers.get(kind)
        if found is None or found.popen.poll() is not None:
            if found is not None:
                found.close()
            found = ForkServerProcess()
            _servers[kind] = found
        return found


@atexit.register
def close_fork_servers() -> None:
    """End the servers of this process, with all their ranks. It happens at exit; the next ranks
    start a new one.
    """
    while _servers:
        _servers.popitem()[1].close()


class ForkServerProcess:
    """The process that ranks come from. how: "fork", or "spawn" for a fresh Python each; what
    this system can by default.
    """

    def __init__(self, start_method: str | None = None) -> None:
        start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        self.owner_pid = os.getpid()
        self.folder, self.lock_descriptor = create_locked_folder()
        self.socket, theirs = socket.socketpair()
        with theirs:
            environment = {
                **_copy_environment(),
                "PYTHONPATH": os.pathsep.join(_list_import_paths()),
                # should an import ask for GPUs: without CUDA itself
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            told = [str(theirs.fileno()), str(self.lock_descriptor), str(self.folder), start_method]
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "paragrad.launch.fork_server", *told],
                pass_fds=[theirs.fileno(), self.lock_descriptor],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=environment,
                process_group=0,
            )

    def start_processes(self, stack_files: list[Path]) -> list[RankProcess]:
        """Processes that wait for tasks, one for each of the files to write their stacks into.
        Raises RankFailed.
        """
        processes: list[RankProcess] = []
        try:
            for path in stack_files:
                processes.append(RankProcess(self, path))
            for process in processes:
                process.finish_start()
        except BaseException:
            for process in processes:
                process.kill_and_wait()
            raise
        return processes

    def make_server_failure(self) -> RankFailed:
        """What to raise when it ended."""
        try:
            how = describe_exit_code(self.popen.wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            how = f"closed its socket and is still there after {END_SECONDS:g} s"
        return RankFailed(f"the server of the ranks {how}, and its ranks ended with it", rank=None)

    def close(self) -> None:
        """End the server, and with it every rank that came from it."""
        self.socket.close()
        os.close(self.lock_descriptor)
        if os.getpid() == self.owner_pid:  # not in a child that the user forked
            self.popen.kill()
            self.popen.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


class RankProcess:
    """A rank's process: this end of its socket, what the server tells of it, and the file of
    its stacks.
    """

    def __init__(self, server: ForkServerProcess, stack_file: Path) -> None:
        self.server = server
        self.stack_file = stack_file
        stack_file.touch()
        self.pid = 0
        # a pidfd: a pid may be another's by the time it is used
        self.pidfd: int | None = None
        # its exit code, when the server has told it
        self.code: int | None = None
        ours, link = socket.socketpair()
        self.status_socket, told = socket.socketpair()
        self.socket = Connection(ours.detach())
        # `settle` will say how it ended
        with link, told, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(server.socket, [b"+"], [link.fileno(), told.fileno(), 2])

    def finish_start(self) -> None:
        """Wait for it to be there and let it take over what a child of this process would.
        Raises RankFailed.
        """
        self.status_socket.settimeout(START_SECONDS)
        try:
            told, handles, *_ = socket.recv_fds(self.status_socket, NUMBER_FORMAT.size, 1)
        except TimeoutError:
            raise RankFailed(
                f"the server of the ranks has not started one within {START_SECONDS:g} s", rank=None
            ) from None
        except ConnectionResetError:
            told = b""
            handles = []
        if not told:
            raise self.server.make_server_failure()
        self.pid = NUMBER_FORMAT.unpack(told)[0]
        self.pidfd = handles[0] if handles else None
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(
                ProcessSetup(
                    _copy_environment(),
                    _list_import_paths(),
                    os.getcwd(),
                    affinity,
                    self.stack_file,
                )
            )

    def send_signal(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, sent)
            elif self.pid:
                os.kill(self.pid, sent)

    def wait_exit_code(self, seconds: float) -> int | None:
        """Its exit code, waited for; None where the server is gone and cannot tell. Raises
        TimeoutError.
        """
        if self.code is None:
            self.status_socket.settimeout(seconds)
            with contextlib.suppress(ConnectionResetError):
                if told := self.status_socket.recv(NUMBER_FORMAT.size):
                    self.code = NUMBER_FORMAT.unpack(told)[0]
        return self.code

    def make_rank_failure(self, rank: int) -> RankFailed:
        """What to raise when it ended, as rank `rank`: how it ended, or that the server did."""
        try:
            code = self.wait_exit_code(END_SECONDS)
        except TimeoutError:
            return RankFailed(
                f"the process of rank {rank} closed its socket and is still there after "
                f"{END_SECONDS:g} s",
                rank=rank,
            )
        return (
            self.server.make_server_failure()
            if code is None
            else RankFailed(f"the process of rank {rank} {describe_exit_code(code)}", rank=rank)
        )

    def kill_and_wait(self) -> None:
        """Kill it and wait until it is gone, and what it started too."""
        self.send_signal(signal.SIGKILL)
        # it ends by this too, should it not have told its pid yet
        self.socket.close()
        if self.pid:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                # no server is left to do it; whoever is in the group keeps its number
                if self.wait_exit_code(END_SECONDS) is None:
                    os.killpg(self.pid, signal.SIGKILL)
        self.status_socket.close()
        if self.pidfd is not None:
            gone = select.poll()
            gone.register(self.pidfd, select.POLLIN)
            gone.poll(1000 * END_SECONDS)
            os.close(self.pidfd)
            self.pidfd = None
        self.pid = 0


def describe_exit_code(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _copy_environment() -> dict[str, str]:
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _list_import_paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]
