"""The fork server and the processes of ranks, as the launcher sees them.

A fork server lives until the process that started it ends, so that the next ranks start in about 10
ms. It belongs to one process, and to one value of the variables that libraries read when they are
loaded. No other process shares it by accident.
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
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from paragrad.errors import RankFailed
from paragrad.launch.launcher_folder import create_locked_folder
from paragrad.launch.protocol import NUMBER_FORMAT, ProcessSetup

# time for the server to import torch, also from a slow disk on a busy host
START_SECONDS = 120.0
END_SECONDS = 5.0  # time for a killed process to be gone
# Libraries read these variables once, when they are loaded. A server that was started with other
# values cannot be used.
LOAD_TIME_PREFIXES = ("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_")

_servers: dict[object, ForkServerProcess] = {}
_server_lock = threading.Lock()


def get_fork_server() -> ForkServerProcess:
    """Return this process's fork server; start it at the first call.

    A new server imports torch while the caller goes on.
    """
    with _server_lock:
        key = (
            os.getpid(),
            tuple(
                sorted(
                    (name, value)
                    for name, value in os.environ.items()
                    if name.startswith(LOAD_TIME_PREFIXES)
                )
            ),
        )
        fork_server = _servers.get(key)
        if fork_server is None or fork_server.popen.poll() is not None:
            if fork_server is not None:
                fork_server.close()
            fork_server = ForkServerProcess()
            _servers[key] = fork_server
        return fork_server


@atexit.register
def close_fork_servers() -> None:
    """End the fork servers of this process, with all their ranks.

    Runs at exit. The next ranks start a new server.
    """
    while _servers:
        _servers.popitem()[1].close()


class ForkServerProcess:
    """The process that starts ranks.

    Attributes:
        owner_pid: The process that started the server.

        folder: The server's temporary folder.

        lock_descriptor: The descriptor that holds the folder's lock.

        socket: The socket for requests to the server.

        popen: The server's process.
    """

    def __init__(self, start_method: str | None = None) -> None:
        """Start the server.

        Args:
            start_method: "fork", or "spawn" to start each rank in a fresh Python; None takes what
                this system can do.
        """
        start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        self.owner_pid = os.getpid()
        self.folder, self.lock_descriptor = create_locked_folder()
        self.socket, server_socket = socket.socketpair()
        with server_socket:
            environment = {
                **_copy_environment(),
                "PYTHONPATH": os.pathsep.join(_list_import_paths()),
                # if an import looks for GPUs, torch must not initialize CUDA
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            server_arguments = [
                str(server_socket.fileno()),
                str(self.lock_descriptor),
                str(self.folder),
                start_method,
            ]
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "paragrad.launch.fork_server", *server_arguments],
                pass_fds=[server_socket.fileno(), self.lock_descriptor],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=environment,
                process_group=0,
            )

    def start_processes(self, stack_files: list[Path]) -> list[RankProcess]:
        """Start processes that wait for tasks.

        Args:
            stack_files: For each process the file into which it writes its stacks.

        Returns:
            The processes.

        Raises:
            RankFailed: A process could not be started.
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
        """Make the failure to raise when the server has ended."""
        try:
            ending = describe_exit_code(self.popen.wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            ending = f"closed its socket and still runs after {END_SECONDS:g} s"
        return RankFailed(
            f"the server of the ranks {ending}, and its ranks ended with it", rank=None
        )

    def close(self) -> None:
        """End the server, and with it all its ranks."""
        self.socket.close()
        os.close(self.lock_descriptor)
        if os.getpid() == self.owner_pid:  # not in a child that the user forked
            self.popen.kill()
            self.popen.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


class RankProcess:
    """A rank's process.

    Attributes:
        server: The server that started it.

        stack_file: The file into which it writes its stacks.

        pid: The process id; 0 when it has not started yet or has ended.

        pidfd: A descriptor of the process, where the system has them. A pid can belong to another
            process by the time it is used; a pidfd cannot.

        code: The exit code, once the server has reported it.

        socket: The connection for tasks and answers.

        status_socket: The socket on which the server reports the pid and the exit code.
    """

    def __init__(self, server: ForkServerProcess, stack_file: Path) -> None:
        """Request the process from its server.

        Args:
            server: The server.
            stack_file: The file into which the process writes its stacks.
        """
        self.server = server
        self.stack_file = stack_file
        stack_file.touch()
        self.pid = 0
        self.pidfd: int | None = None
        self.code: int | None = None
        own_end, rank_end = socket.socketpair()
        self.status_socket, status_end = socket.socketpair()
        self.socket = Connection(own_end.detach())
        # if the server has ended, `finish_start` reports how
        with (
            rank_end,
            status_end,
            _open_standard_input() as stdin,
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
        ):
            socket.send_fds(
                server.socket, [b"+"], [rank_end.fileno(), status_end.fileno(), 2, stdin]
            )

    def finish_start(self) -> None:
        """Wait until the process has started, and send it the state that a child would inherit.

        Raises:
            RankFailed: The process did not start.
        """
        self.status_socket.settimeout(START_SECONDS)
        try:
            message, pidfds, *_ = socket.recv_fds(self.status_socket, NUMBER_FORMAT.size, 1)
        except TimeoutError:
            raise RankFailed(
                f"the server of the ranks did not start a rank within {START_SECONDS:g} s",
                rank=None,
            ) from None
        except ConnectionResetError:
            message = b""
            pidfds = []
        if not message:
            raise self.server.make_server_failure()
        self.pid = NUMBER_FORMAT.unpack(message)[0]
        self.pidfd = pidfds[0] if pidfds else None
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
        """Send a signal to the process, unless it has ended.

        Args:
            sent: The signal.
        """
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, sent)
            elif self.pid:
                os.kill(self.pid, sent)

    def wait_exit_code(self, seconds: float) -> int | None:
        """Wait for the exit code.

        Args:
            seconds: The time limit.

        Returns:
            The exit code, negative for a signal; None if the server is gone and cannot report it.

        Raises:
            TimeoutError: The process has not ended in time.
        """
        if self.code is None:
            self.status_socket.settimeout(seconds)
            with contextlib.suppress(ConnectionResetError):
                if message := self.status_socket.recv(NUMBER_FORMAT.size):
                    self.code = NUMBER_FORMAT.unpack(message)[0]
        return self.code

    def make_rank_failure(self, rank: int) -> RankFailed:
        """Make the failure to raise when the process has ended: how it or the server ended.

        Args:
            rank: The rank that the process served as.
        """
        try:
            code = self.wait_exit_code(END_SECONDS)
        except TimeoutError:
            return RankFailed(
                f"the process of rank {rank} closed its socket and still runs after "
                f"{END_SECONDS:g} s",
                rank=rank,
            )
        return (
            self.server.make_server_failure()
            if code is None
            else RankFailed(f"the process of rank {rank} {describe_exit_code(code)}", rank=rank)
        )

    def kill_and_wait(self) -> None:
        """Kill the process and the processes that it started, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        # this also ends a process that has not reported its pid yet
        self.socket.close()
        if self.pid:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                # The server is gone and cannot kill the group. The group's number stays reserved
                # while a process is in it.
                if self.wait_exit_code(END_SECONDS) is None:
                    os.killpg(self.pid, signal.SIGKILL)
        self.status_socket.close()
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(1000 * END_SECONDS)
            os.close(self.pidfd)
            self.pidfd = None
        self.pid = 0


def describe_exit_code(code: int) -> str:
    """Describe an exit code in words.

    Args:
        code: The exit code; minus the number of the signal that killed the process.
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


@contextlib.contextmanager
def _open_standard_input() -> Iterator[int]:
    """Give the descriptor of the standard input, or of an empty one if it is closed."""
    try:
        os.fstat(0)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    else:
        yield 0


def _copy_environment() -> dict[str, str]:
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _list_import_paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]
