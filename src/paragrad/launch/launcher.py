"""The launcher: processes of this host that serve as ranks, for one task after another.

When a rank fails, all ranks are stopped, and the failure that came first is raised. The ranks and
the fork server notice the end of the launcher by the end of their socket. No process outlives the
launcher, however it ends.
"""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from paragrad.errors import LIBRARY_PREFIXES, RankFailed
from paragrad.launch import job_files, processes
from paragrad.launch.processes import ForkServerProcess, RankProcess
from paragrad.launch.protocol import LIFE, RankTask, StopMessage, TaskFailure
from paragrad.runtime.launcher_env import choose_rank_threads

# Within these seconds the death of a rank must show; afterwards the failure that another rank
# reported counts as the cause.
DEATH_GRACE_SECONDS = 0.5


class Launcher:
    """Up to `size` ranks of this host. As a context manager it leaves no rank behind.

    Attributes:
        size: The largest number of ranks.

        server: The fork server that starts the ranks; None takes this process's own, which stays
            for the next launcher.

        processes: The processes of the ranks, in rank order.

        folder: The folder that they share, once it exists.

        task_count: The number of tasks and extra processes so far.

        is_sending: Whether a task is being sent to the ranks.

        stop_requested: Whether the task under way must stop.

        extra_processes: The processes that are not ranks of this launcher, by their numbers.

        is_collecting: Whether the results of a task are waited for.

        on_life: Is called with the longest time between two steps of a process when it comes
            further after a request to stop.
    """

    def __init__(self, size: int, server: ForkServerProcess | None = None) -> None:
        self.size = size
        self.server = server
        self.processes: list[RankProcess] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.task_count = 0
        self.is_sending = False
        self.stop_requested = False
        self.extra_processes: dict[int, RankProcess] = {}
        self.is_collecting = False
        self.on_life: Callable[[float], None] | None = None

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
        """Call function(world, *arguments) on ranks 0 to size - 1.

        Args:
            function: The function; it must be picklable by cloudpickle.

            arguments: Its arguments after the world.

            size: The number of ranks; None takes all.

            backend: The torch.distributed backend.

            device: The kind of device, cpu or cuda.

            threads: The number of torch's threads in each rank; None takes OMP_NUM_THREADS, or
                divides the cores.

            timeout: Seconds that a rank waits for another; None takes the default.

            deadline: Seconds for the whole task; None for no limit.

            on_report: Is called with (rank, value) when the function calls report(value).

        Returns:
            The results in rank order.

        Raises:
            RankFailed: A rank failed, or the deadline passed.

            Refused: The function or its arguments cannot be pickled.
        """
        size = size or self.size
        # not at the top: the command imports this module to start its server, before torch
        import torch

        pickled_call, needed_files = job_files.pickle_task(
            (torch.get_default_dtype(), function, arguments)
        )
        self.is_sending = True
        self.task_count += 1
        threads_per_rank = threads or choose_rank_threads(size)
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
                    threads_per_rank,
                    timeout,
                    needed_files,
                    pickled_call,
                    on_report is not None,
                )
                # if the process died, the collector reports how
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.socket.send(task)
            self.is_sending = False
            if self.stop_requested:
                self.request_stop()
            self.is_collecting = True
            return ResultCollector(
                self.processes[:size], deadline, on_report, self.report_life
            ).collect_results()
        except BaseException:
            self.kill_ranks()
            raise
        finally:
            self.is_collecting = False
            self.is_sending = False
            self.stop_requested = False
            if store is not None:
                store.unlink(missing_ok=True)

    def request_stop(self) -> None:
        """Ask the task under way to finish its step, save and end.

        The ranks see the request as `world.stop`. A signal handler may call this method.
        """
        self.stop_requested = True
        # A message now could land inside the one that `run` sends. `run` requests the stop later.
        if self.is_sending:
            return
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.socket.send(StopMessage())

    def _start_ranks(self, size: int) -> Path:
        """Start processes until there are `size` of them; return the folder that they share."""
        server = self.server or processes.get_fork_server()
        folder = self.open_shared_folder()
        self.processes += server.start_processes(
            [folder / f"stacks-{number}" for number in range(len(self.processes), size)]
        )
        return folder

    def start_extra_process(self, number: int) -> RankProcess:
        """Start one more process, which is not a rank of this launcher.

        Args:
            number: The number of the process in its pool.

        Returns:
            The process.

        Raises:
            RankFailed: The server ended.
        """
        server = self.server or processes.get_fork_server()
        folder = self.open_shared_folder()
        # the folder is removed with the server that started the other processes
        if not folder.is_dir():
            raise RankFailed(
                "the server of the ranks ended, and its ranks ended with it", rank=None
            )
        self.task_count += 1
        (process,) = server.start_processes([folder / f"stacks-apart-{self.task_count}"])
        self.extra_processes[number] = process
        return process

    def follow_life(self, on_life: Callable[[float], None] | None) -> None:
        """Let a function follow the reports of life.

        Args:
            on_life: Is called with the longest time between two steps of a process; None for none.
        """
        self.on_life = on_life

    def report_life(self, longest_gap: float) -> None:
        """Take the report of a process that it comes further.

        Args:
            longest_gap: The longest time between two of its steps, in seconds.
        """
        if self.on_life is not None:
            self.on_life(longest_gap)

    @property
    def has_live_tasks(self) -> bool:
        """Whether processes are at work."""
        return self.is_collecting or any(each.pid for each in self.extra_processes.values())

    def open_shared_folder(self) -> Path:
        """Return the folder that the ranks share; create it at the first call."""
        server = self.server or processes.get_fork_server()
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(
                prefix="ranks-", dir=server.folder, ignore_cleanup_errors=True
            )
        return Path(self.folder.name)

    def locate_ranks(self) -> str:
        """Describe the line of user code at which each process is.

        Returns:
            Such as "rank 1 is at model.py:7"; empty if none is in user code.
        """
        processes = {**dict(enumerate(self.processes)), **self.extra_processes}
        processes = {number: each for number, each in processes.items() if each.pid}
        for process in processes.values():
            process.send_signal(signal.SIGUSR1)
        # give the ranks time to write their stacks
        time.sleep(DEATH_GRACE_SECONDS)
        places = (
            (number, find_user_line(process.stack_file.read_text()))
            for number, process in processes.items()
            if process.stack_file.is_file()
        )
        return ", ".join(f"rank {number} is at {place}" for number, place in places if place)

    def kill_ranks(self) -> None:
        """Kill all ranks. The next `run` starts new ones."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.kill_and_wait()
        self.processes = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def close(self) -> None:
        """End the ranks and remove their folder."""
        self.kill_ranks()


def find_user_line(stacks: str) -> str:
    """Find the innermost line of user code in the stacks of a process.

    Args:
        stacks: The stacks as faulthandler writes them, innermost line first in each thread.

    Returns:
        FILE:LINE, or an empty text.
    """
    for file, line in re.findall(r'File "([^"]+)", line (\d+)', stacks):
        if not file.startswith(LIBRARY_PREFIXES):
            return f"{file}:{line}"
    return ""


@dataclass
class ResultCollector:
    """Collects the answers of the ranks to one task.

    Attributes:
        processes: The processes of the ranks, in rank order.

        deadline: Seconds for the whole task; None for no limit.

        on_report: Is called with (rank, value) for each report.

        on_life: Is called with the longest time between two steps when a rank comes further after
            a request to stop.

        answers: The results so far, by rank.

        failures: The failures so far.

        ended_ranks: The ranks that failed or died.
    """

    processes: list[RankProcess]
    deadline: float | None
    on_report: Callable[[int, Any], None] | None
    on_life: Callable[[float], None] = lambda _: None
    answers: dict[int, Any] = field(default_factory=dict)
    failures: list[TaskFailure] = field(default_factory=list)
    ended_ranks: set[int] = field(default_factory=set)

    def collect_results(self) -> list[Any]:
        """Wait for the results of all ranks.

        Returns:
            The results in rank order.

        Raises:
            RankFailed: A rank failed, or the deadline passed.
        """
        end = time.monotonic() + self.deadline if self.deadline else None
        while len(self.answers) < len(self.processes) and not self.failures:
            if not self.receive_messages(None if end is None else max(0.0, end - time.monotonic())):
                raise self.make_timeout_failure()
        if self.failures:
            raise self.find_first_failure()
        return [self.answers[rank] for rank in range(len(self.processes))]

    def receive_messages(self, seconds: float | None) -> bool:
        """Receive the messages that ranks send within a time limit.

        Args:
            seconds: The time limit; None for no limit.

        Returns:
            False if no rank sent anything.
        """
        waiting = {
            rank: process
            for rank, process in enumerate(self.processes)
            if rank not in self.answers and rank not in self.ended_ranks
        }
        ready = wait(
            [
                connection
                for process in waiting.values()
                for connection in (process.socket, process.status_socket)
            ],
            seconds,
        )
        for rank, process in waiting.items():
            if process.socket not in ready and process.status_socket not in ready:
                continue
            try:
                # The rank ended, and a process that it started holds its socket open.
                if process.socket not in ready:
                    raise EOFError
                kind, value = process.socket.recv()
            except (EOFError, OSError):
                self.ended_ranks.add(rank)
                # a death counts first (time 0.0): it causes the failures that others report
                self.failures.append(TaskFailure(process.make_rank_failure(rank), 0.0))
                continue
            if kind == LIFE:
                self.on_life(value)
            elif kind == "report":
                if self.on_report:
                    self.on_report(rank, value)
            elif kind == "failed":
                self.ended_ranks.add(rank)
                self.failures.append(value)
            else:
                self.answers[rank] = cloudpickle.loads(value)
        return bool(ready)

    def find_first_failure(self) -> RankFailed:
        """Return the failure that came first.

        If no rank has died, this method waits a moment: a death that shows later is the cause of
        the failures that other ranks reported.
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
        """Make the failure of a passed deadline. It names silent ranks and holds their stacks."""
        silent = [rank for rank in range(len(self.processes)) if rank not in self.answers]
        for rank in silent:
            self.processes[rank].send_signal(signal.SIGUSR1)
        # give the ranks time to write their stacks
        wait([self.processes[rank].socket for rank in silent], DEATH_GRACE_SECONDS)
        stacks = "\n".join(
            f"rank {rank} is at:\n{self.processes[rank].stack_file.read_text()}" for rank in silent
        )
        return RankFailed(
            f"no answer from rank(s) {', '.join(map(str, silent))} within {self.deadline:g} "
            f"s\n{stacks}",
            rank=silent[0],
            traceback=stacks,
        )
