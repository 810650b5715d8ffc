"""The launcher: processes of this host that serve as ranks, one after another task, until
closed.

When one rank fails all are stopped, and what is raised is the failure that came first. A rank
notices the end of its launcher by the end of their socket, and so does the server it came from,
so nobody outlives it, whatever kills it.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from paragrad.errors import RankFailed
from paragrad.launch import job_files, processes
from paragrad.launch.processes import ForkServerProcess, RankProcess
from paragrad.launch.protocol import RankTask, StopMessage, TaskFailure
from paragrad.runtime.launcher_env import count_cores

# seconds in which a killed rank must show, before a peer's complaint counts as the cause
DEATH_GRACE_SECONDS = 0.5


class Launcher:
    """Up to `size` ranks of this host; `run` plays a function on them. A context manager that
    leaves no rank.

    server: where they come from; otherwise this process's own, which stays for the next Ranks.
    """

    def __init__(self, size: int, server: ForkServerProcess | None = None) -> None:
        self.size = size
        self.server = server
        self.processes: list[RankProcess] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.task_count = 0
        self.is_sending = False
        self.stop_requested = False

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int | None = None,
        backend: str = "gloo",
        device: str = "cpu",
        threads: int | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """function(world, *arguments) on ranks 0..size-1; their results. Raises RankFailed.

        threads: of each rank, otherwise the cores are divided; timeout: seconds a rank waits
        for another; deadline: seconds for everything; on_report: called with (rank, value)
        whenever the function calls report(value).
        """
        size = size or self.size
        # here: the command imports this module to start its server, before torch itself
        import torch

        call, needed = job_files.pickle_task((torch.get_default_dtype(), function, arguments))
        self.is_sending = True
        self.task_count += 1
        each = threads or max(1, count_cores() // size)
        store: Path | None = None
        try:
            store = self._start_ranks(size) / f"meeting-{self.task_count}"
            for rank, process in enumerate(self.processes[:size]):
                task = RankTask(
                    rank,
                    size,
                    store,
                    backend,
                    device,
                    each,
                    timeout,
                    needed,
                    call,
                    on_report is not None,
                )
                # it died: collecting will say how
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.socket.send(task)
            self.is_sending = False
            if self.stop_requested:
                self.request_stop()
            return ResultCollector(self.processes[:size], deadline, on_report).collect_results()
        except BaseException:
            self.kill_ranks()
            raise
        finally:
            self.is_sending = False
            self.stop_requested = False
            if store is not None:
                store.unlink(missing_ok=True)

    def request_stop(self) -> None:
        """Ask the task under way to finish its step, save and end: its ranks see `world.stop`.
        A signal handler may call it.
        """
        self.stop_requested = True
        # a message would land inside another: `run` does it when it has sent its own
        if self.is_sending:
            return
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.socket.send(StopMessage())

    def _start_ranks(self, size: int) -> Path:
        """Have processes for that many ranks; the folder they share."""
        server = self.server or processes.get_fork_server()
        folder = self.open_shared_folder()
        self.processes += server.start_processes(
            [folder / f"stacks-{number}" for number in range(len(self.processes), size)]
        )
        return folder

    def start_extra_process(self) -> RankProcess:
        """One process more, that is nobody's rank. Raises RankFailed."""
        server = self.server or processes.get_fork_server()
        folder = self.open_shared_folder()
        # which goes with the server that the others came from
        if not folder.is_dir():
            raise RankFailed("the server of the ranks ended, and its ranks with it", rank=None)
        self.task_count += 1
        return server.start_processes([folder / f"stacks-apart-{self.task_count}"])[0]

    def open_shared_folder(self) -> Path:
        """The folder of what they share."""
        server = self.server or processes.get_fork_server()
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(
                prefix="ranks-", dir=server.folder, ignore_cleanup_errors=True
            )
        return Path(self.folder.name)

    def kill_ranks(self) -> None:
        """Kill every rank; the next `run` starts fresh ones."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.kill_and_wait()
        self.processes = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def close(self) -> None:
        """End the ranks and forget their folder."""
        self.kill_ranks()


@dataclass
class ResultCollector:
    """The answers of the ranks to one task, as they come."""

    processes: list[RankProcess]
    deadline: float | None
    on_report: Callable[[int, Any], None] | None
    answers: dict[int, Any] = field(default_factory=dict)
    failures: list[TaskFailure] = field(default_factory=list)
    ended_ranks: set[int] = field(default_factory=set)

    def collect_results(self) -> list[Any]:
        end = time.monotonic() + self.deadline if self.deadline else None
        while len(self.answers) < len(self.processes) and not self.failures:
            if not self.receive_messages(None if end is None else max(0.0, end - time.monotonic())):
                raise self.make_timeout_failure()
        if self.failures:
            raise self.find_first_failure()
        return [self.answers[rank] for rank in range(len(self.processes))]

    def receive_messages(self, seconds: float | None) -> bool:
        """Take what ranks have sent within some seconds; False if none did."""
        silent = {
            rank: process
            for rank, process in enumerate(self.processes)
            if rank not in self.answers and rank not in self.ended_ranks
        }
        ready = wait(
            [end for process in silent.values() for end in (process.socket, process.status_socket)],
            seconds,
        )
        for rank, process in silent.items():
            if process.socket not in ready and process.status_socket not in ready:
                continue
            try:
                # it ended, and what it started holds its socket open
                if process.socket not in ready:
                    raise EOFError
                kind, value = process.socket.recv()
            except (EOFError, OSError):
                self.ended_ranks.add(rank)
                # a death is the cause of what others say
                self.failures.append(TaskFailure(process.make_rank_failure(rank), 0.0))
                continue
            if kind == "report":
                if self.on_report:
                    self.on_report(rank, value)
            elif kind == "failed":
                self.ended_ranks.add(rank)
                self.failures.append(value)
            else:
                self.answers[rank] = cloudpickle.loads(value)
        return bool(ready)

    def find_first_failure(self) -> RankFailed:
        """The failure that came first. A complaint is given a moment for a death to show: that
        would be its cause.
        """
        end = time.monotonic() + DEATH_GRACE_SECONDS
        while (
            (left := end - time.monotonic()) > 0
            and len(self.ended_ranks) + len(self.answers) < len(self.processes)
            and all(failure.when for failure in self.failures)
        ):
            self.receive_messages(left)
        return min(self.failures, key=lambda failure: failure.when).error

    def make_timeout_failure(self) -> RankFailed:
        """Nobody answered in time: name the first silent rank, with the stacks of all of
        them.
        """
        silent = [rank for rank in range(len(self.processes)) if rank not in self.answers]
        for rank in silent:
            self.processes[rank].send_signal(signal.SIGUSR1)
        # time to write their stacks
        wait([self.processes[rank].socket for rank in silent], DEATH_GRACE_SECONDS)
        stacks = "\n".join(
            f"rank {rank} stands at:\n{self.processes[rank].stack_file.read_text()}"
            for rank in silent
        )
        return RankFailed(
            f"no answer from rank(s) {', '.join(map(str, silent))} within {self.deadline:g} "
            f"s\n{stacks}",
            rank=silent[0],
            traceback=stacks,
        )
