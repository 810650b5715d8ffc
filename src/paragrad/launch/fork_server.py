"""The fork server: a process that has imported what ranks need, and forks a rank in 10 ms.

`processes.py` starts it as `python -m paragrad.launch.fork_server FD LOCK FOLDER fork|spawn`.

* FD is the socket of requests. One byte requests a rank and brings three descriptors: the rank's
  socket, a socket for the rank's status, and the launcher's standard error. The status is the
  rank's pid and at its end its exit code.
* LOCK is a descriptor that ranks inherit. It shows that FOLDER is in use (`launcher_folder.py`).

Before a fork this process has run no operation of torch, has not initialized CUDA, and has one
thread. Otherwise a child would get the locks and pools of threads that it lacks, and hang.

When the launcher is gone, the server ends its ranks and removes the launcher's FOLDER. When the
server is killed, the system kills its ranks (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

from paragrad.launch.protocol import DEBUGGER_STDIN, NUMBER_FORMAT
from paragrad.runtime.stop_signals import exit_with_parent

# the modules that `train`, `compare` and `verify` run in a rank, and the one that torch imports at
# the first step of an optimizer
PRELOADED_MODULES = (
    "paragrad.launch.rank_process",
    "paragrad.loops.synchronous",
    "paragrad.report.equivalence.lockstep",
    "torch._dynamo",
)


def run_server() -> None:
    """Serve until the launcher is gone. In each forked child: serve as a rank."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    lock = int(sys.argv[2])
    folder = sys.argv[3]
    start_method = sys.argv[4]
    launcher.set_inheritable(False)
    os.set_inheritable(lock, False)
    # SIGINT and SIGTERM also reach the launcher, which ends its ranks or lets them save.
    for sent in (
        signal.SIGINT,
        signal.SIGTERM,
        # can reach a rank before the rank has installed its handler
        signal.SIGUSR1,
    ):
        signal.signal(sent, signal.SIG_IGN)
    gc.disable()
    can_fork = start_method == "fork"
    if can_fork:
        with watch_launcher(launcher, lambda: exit_server(folder)):
            for name in PRELOADED_MODULES:
                importlib.import_module(name)
        can_fork = is_single_threaded()
        # A collection over the imported objects would copy the pages that ranks share.
        gc.freeze()
    server = ForkServer(launcher, can_fork)
    link = server.serve_requests()
    if link is None:
        server.kill_all_ranks()
        exit_server(folder)
    gc.enable()
    from paragrad.launch import rank_process

    try:
        rank_process.serve_tasks(Connection(link))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)  # a child never returns into the server's code


def exit_server(folder: str) -> NoReturn:
    """End this process at once, and remove the folder that its launcher can no longer remove.

    Args:
        folder: The launcher's folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


@contextlib.contextmanager
def watch_launcher(launcher: socket.socket, on_end: Callable[[], None]) -> Iterator[None]:
    """Call a function when the launcher's socket closes, while the context is active.

    The server is busy with imports meanwhile; the system signals the end by SIGIO.

    Args:
        launcher: The socket of requests.
        on_end: The function to call.
    """

    def check_launcher(*_: object) -> None:
        # a new poll object each time: a signal can interrupt the handler of an earlier one
        poll = select.poll()
        poll.register(launcher, 0)  # POLLHUP is always reported
        if poll.poll(0):
            on_end()

    signal.signal(signal.SIGIO, check_launcher)
    fcntl.fcntl(launcher, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(launcher, fcntl.F_GETFL)
    fcntl.fcntl(launcher, fcntl.F_SETFL, flags | os.O_ASYNC)
    check_launcher()
    try:
        yield
    finally:
        fcntl.fcntl(launcher, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def is_single_threaded() -> bool:
    """Tell whether this process has only one thread left.

    numpy's OpenBLAS starts threads when it is imported, and ends them before a fork. Without /proc
    the answer is unknown, and the result is False.
    """
    if not os.path.isdir("/proc/self/task"):
        return False
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 1.0  # an ended thread stays listed for a moment
    while count_threads() > 1 and time.monotonic() < deadline:
        # no event marks the end of a thread: only /proc shows it
        time.sleep(0.001)
    return count_threads() == 1


def count_threads() -> int:
    """Count the threads of this process."""
    return len(os.listdir("/proc/self/task"))


class ForkServer:
    """Starts ranks on request and reports their ends.

    Attributes:
        launcher: The socket of requests.

        can_fork: Whether ranks are forked; otherwise each is a fresh Python.

        status_sockets: The socket for the status of each rank, by pid.

        wakeup_reader: The end of a pipe that has data when a child has ended.

        wakeup_writer: The end into which Python writes when a signal arrives.

        parent_pidfd: A pidfd of the launcher. It shows its end also where other processes hold the
            launcher's end of the socket open.
    """

    def __init__(self, launcher: socket.socket, can_fork: bool) -> None:
        self.launcher = launcher
        self.can_fork = can_fork
        self.status_sockets: dict[int, socket.socket] = {}
        self.wakeup_reader, self.wakeup_writer = os.pipe()
        self.parent_pidfd = open_pidfd(os.getppid())

    def serve_requests(self) -> int | None:
        """Serve requests until the launcher is gone.

        Returns:
            None in the server, when the launcher is gone; the rank's socket in each forked child.
        """
        os.set_blocking(self.wakeup_writer, False)
        signal.set_wakeup_fd(self.wakeup_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (self.launcher.fileno(), self.wakeup_reader, self.parent_pidfd):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if self.wakeup_reader in events:
                os.read(self.wakeup_reader, 4096)
                self.report_ended_ranks()
            request = events.get(self.launcher.fileno(), 0)
            if self.parent_pidfd in events or request & select.POLLHUP:
                return None
            if request and (link := self.start_rank()) is not None:
                return link

    def start_rank(self) -> int | None:
        """Start the requested rank.

        Returns:
            None in the server; the rank's socket in a forked child.
        """
        _, (link, status, errors, stdin), *_ = socket.recv_fds(self.launcher, 1, 4)
        for descriptor in (link, status, errors, stdin):
            os.set_inheritable(descriptor, False)
        status_socket = socket.socket(fileno=status)
        server = os.getpid()
        pid = os.fork() if self.can_fork else spawn_rank(link, errors, stdin)
        if not pid:
            status_socket.close()
            self.prepare_child(server, errors, stdin)
            return link
        for descriptor in (link, errors, stdin):
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the child does it too; either can be first
            os.setpgid(pid, pid)
        self.status_sockets[pid] = status_socket
        with contextlib.suppress(OSError):  # the launcher may no longer read
            if (pidfd := open_pidfd(pid)) is not None:
                socket.send_fds(status_socket, [NUMBER_FORMAT.pack(pid)], [pidfd])
                os.close(pidfd)
            else:
                status_socket.sendall(NUMBER_FORMAT.pack(pid))
        return None

    def prepare_child(self, server: int, errors: int, stdin: int) -> None:
        """Detach a forked child from the server's state.

        The child dies with the server, has a process group of its own, and closes what belongs to
        the server.

        Args:
            server: The pid of the server.
            errors: The descriptor of the launcher's standard error.
            stdin: The descriptor of the launcher's standard input, which a debugger reads.
        """
        exit_with_parent(server)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.launcher.close()
        for status_socket in self.status_sockets.values():
            status_socket.close()
        for descriptor in (self.wakeup_reader, self.wakeup_writer, self.parent_pidfd):
            if descriptor is not None:
                os.close(descriptor)
        os.dup2(stdin, DEBUGGER_STDIN, inheritable=False)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(errors)
        os.close(stdin)
        # numpy's generator is a copy, equal in all ranks; Python seeds its own again after a fork
        if random := sys.modules.get("numpy.random"):
            random.seed()

    def report_ended_ranks(self) -> None:
        """Report the ranks that ended, and kill the processes that they left behind."""
        for pid, status_socket in list(self.status_sockets.items()):
            code = reap_child(pid)
            if code is not None:
                with status_socket, contextlib.suppress(OSError):
                    status_socket.sendall(NUMBER_FORMAT.pack(code))
                del self.status_sockets[pid]

    def kill_all_ranks(self) -> None:
        """Kill all ranks and the processes that they started."""
        for pid in self.status_sockets:
            kill_process_group(pid)
        for pid in self.status_sockets:
            os.waitpid(pid, 0)


def spawn_rank(link: int, errors: int, stdin: int) -> int:
    """Start a rank in a fresh Python, where this process cannot fork.

    Args:
        link: The descriptor of the rank's socket.
        errors: The descriptor of the launcher's standard error.
        stdin: The descriptor of the launcher's standard input.

    Returns:
        The pid of the rank.
    """
    os.set_inheritable(link, True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "paragrad.launch.rank_process", str(link)],
        os.environ,
        setpgroup=0,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, stdin, DEBUGGER_STDIN),
            (os.POSIX_SPAWN_DUP2, errors, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
        ],
    )


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor of a process. Unlike a pid it never refers to another process.

    Args:
        pid: The process.

    Returns:
        The pidfd; None where the system has none or the process is gone.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def reap_child(pid: int) -> int | None:
    """Return the exit code of an ended child, and kill its process group.

    Args:
        pid: The child.

    Returns:
        The exit code, or minus the number of the signal that killed it; None while it runs.
    """
    # kill the group before the child is reaped, while its number still belongs to it
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_process_group(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    if not ended_pid:
        return None
    kill_process_group(pid)
    return os.waitstatus_to_exitcode(status)


def kill_process_group(group: int) -> None:
    """Kill all processes of a group, if there are any.

    Args:
        group: The number of the group.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    run_server()
