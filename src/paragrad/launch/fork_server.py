"""The server of ranks: a process that has imported what ranks need and forks them, 10 ms each.

Started by `processes.py` as `python -m paragrad.launch.fork_server FD LOCK FOLDER
fork|spawn`; by the descriptor LOCK, which its ranks inherit, FOLDER is known to be in use
(`folders.py`). One byte on the socket FD asks for a rank and brings three descriptors: the
rank's socket, a socket for what is told of it (its pid, at its end its exit code), and the
launcher's standard error. Before a fork this process has run no operation of torch, has asked
nothing of CUDA and has one thread: a child would get the locks and the pools of others without
their threads, and hang. When its launcher is gone it ends its ranks and removes the launcher's
FOLDER; when it is killed, the system kills its ranks (PR_SET_PDEATHSIG).
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

from paragrad.launch.protocol import NUMBER_FORMAT
from paragrad.runtime.stop_signals import exit_with_parent

# what `train`, `compare` and `verify` run in a rank, and what torch itself imports at the first
# step of an optimizer
PRELOADED_MODULES = (
    "paragrad.launch.rank_process",
    "paragrad.loops.synchronous",
    "paragrad.report.equivalence.lockstep",
    "torch._dynamo",
)


def run_server() -> None:
    """Serve until the launcher is gone. In each forked child: be a rank."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    lock = int(sys.argv[2])
    folder = sys.argv[3]
    how = sys.argv[4]
    launcher.set_inheritable(False)
    os.set_inheritable(lock, False)
    # they reach the launcher too, which ends its ranks or lets them save
    for sent in (
        signal.SIGINT,
        signal.SIGTERM,
        # may come to a rank before it has said what it does then
        signal.SIGUSR1,
    ):
        signal.signal(sent, signal.SIG_IGN)
    gc.disable()
    forks = how == "fork"
    if forks:
        with watch_launcher(launcher, lambda: exit_server(folder)):
            for name in PRELOADED_MODULES:
                importlib.import_module(name)
        forks = is_single_threaded()
        # no look at what is imported: it would copy the pages that ranks share
        gc.freeze()
    server = ForkServer(launcher, forks)
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
        os._exit(1)  # never back into what belongs to the server


def exit_server(folder: str) -> NoReturn:
    """End this process at once, with what its launcher can no longer remove."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


@contextlib.contextmanager
def watch_launcher(launcher: socket.socket, on_end: Callable[[], None]) -> Iterator[None]:
    """While this process imports, call `end` when the launcher's socket closes: the system
    tells by SIGIO.
    """

    def look(*_: object) -> None:
        # of each look its own: one signal may come amid the look for another
        ends = select.poll()
        ends.register(launcher, 0)  # POLLHUP is always told
        if ends.poll(0):
            on_end()

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(launcher, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(launcher, fcntl.F_GETFL)
    fcntl.fcntl(launcher, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()
    try:
        yield
    finally:
        fcntl.fcntl(launcher, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def is_single_threaded() -> bool:
    """Is this process down to one thread? numpy's OpenBLAS starts some when imported and ends
    them before a fork. Without /proc nobody can say.
    """
    if not os.path.isdir("/proc/self/task"):
        return False
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    until = time.monotonic() + 1.0  # an ended thread is listed for a moment
    while count_threads() > 1 and time.monotonic() < until:
        # nothing can be waited for: /proc alone says when it is gone
        time.sleep(0.001)
    return count_threads() == 1


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


class ForkServer:
    """Starts ranks as it is asked to, tells of their ends. forks: fork them; otherwise each is
    a fresh Python.
    """

    def __init__(self, launcher: socket.socket, can_fork: bool) -> None:
        self.launcher = launcher
        self.can_fork = can_fork
        # pid -> where its launcher is told of it
        self.status_sockets: dict[int, socket.socket] = {}
        # the system writes into it when a child ends
        self.wakeup_reader, self.wakeup_writer = os.pipe()
        # tells of its end also where others hold its end of the socket open
        self.parent_pidfd = open_pidfd(os.getppid())

    def serve_requests(self) -> int | None:
        """Returns in the server when the launcher is gone; in each forked child at once, with
        its socket.
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
            asked = events.get(self.launcher.fileno(), 0)
            if self.parent_pidfd in events or asked & select.POLLHUP:
                return None
            if asked and (link := self.start_rank()) is not None:
                return link

    def start_rank(self) -> int | None:
        """Start the rank that is asked for. Returns its socket in a forked child."""
        _, (link, told, errors), *_ = socket.recv_fds(self.launcher, 1, 3)
        for descriptor in (link, told, errors):
            os.set_inheritable(descriptor, False)
        notes = socket.socket(fileno=told)
        server = os.getpid()
        pid = os.fork() if self.can_fork else spawn_rank(link, errors)
        if not pid:
            notes.close()
            self.prepare_child(server, errors)
            return link
        os.close(link)
        os.close(errors)
        with contextlib.suppress(OSError):  # also in the child: whoever comes first
            os.setpgid(pid, pid)
        self.status_sockets[pid] = notes
        with contextlib.suppress(OSError):  # the launcher no longer listens
            if (process := open_pidfd(pid)) is not None:
                socket.send_fds(notes, [NUMBER_FORMAT.pack(pid)], [process])
                os.close(process)
            else:
                notes.sendall(NUMBER_FORMAT.pack(pid))
        return None

    def prepare_child(self, server: int, errors: int) -> None:
        """In a forked child: die with the server, be a process group, and keep nothing that is
        the server's.
        """
        exit_with_parent(server)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.launcher.close()
        for notes in self.status_sockets.values():
            notes.close()
        for descriptor in (self.wakeup_reader, self.wakeup_writer, self.parent_pidfd):
            if descriptor is not None:
                os.close(descriptor)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(errors)
        # its state is a copy, the same in all ranks; Python's own starts anew
        if random := sys.modules.get("numpy.random"):
            random.seed()

    def report_ended_ranks(self) -> None:
        """Tell of the ranks that ended; what they started and left behind ends too."""
        for pid, notes in list(self.status_sockets.items()):
            code = reap_child(pid)
            if code is not None:
                with notes, contextlib.suppress(OSError):
                    notes.sendall(NUMBER_FORMAT.pack(code))
                del self.status_sockets[pid]

    def kill_all_ranks(self) -> None:
        """Kill every rank, with what it started."""
        for pid in self.status_sockets:
            kill_process_group(pid)
        for pid in self.status_sockets:
            os.waitpid(pid, 0)


def spawn_rank(link: int, errors: int) -> int:
    """A rank in a fresh Python, where this process cannot fork: its pid."""
    os.set_inheritable(link, True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "paragrad.launch.rank_process", str(link)],
        os.environ,
        setpgroup=0,
        file_actions=[(os.POSIX_SPAWN_DUP2, errors, 1), (os.POSIX_SPAWN_DUP2, errors, 2)],
    )


def open_pidfd(pid: int) -> int | None:
    """A descriptor of a process (pidfd), where the system has them: it never comes to mean
    another, as a pid does.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def reap_child(pid: int) -> int | None:
    """The exit code of a child that ended, minus the signal if one killed it; its process group
    is killed.
    """
    # kill the group while the child's number still belongs to it
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_process_group(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return None
    kill_process_group(pid)
    return os.waitstatus_to_exitcode(status)


def kill_process_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    run_server()
