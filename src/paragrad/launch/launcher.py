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
from paragrad.launch.processes import Process, ServerProcess
from paragrad.launch.protocol import Failure, Stop, Task
from paragrad.runtime.launcher_env import cores

# seconds in which a killed rank must show, before a peer's complaint counts as the cause
GRACE = 0.5


class Ranks:
    """Up to `size` ranks of this host; `run` plays a function on them. A context manager that
    leaves no rank.

    server: where they come from; otherwise this process's own, which stays for the next Ranks.
    """

    def __init__(self, size: int, server: ServerProcess | None = None) -> None:
        self.size = size
        self.server = server
        self.processes: list[Process] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.tasks = 0
        self.sending = False
        self.stop_asked = False

    def __enter__(self) -> Ranks:
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

        call, needed = job_files.dumps((torch.get_default_dtype(), function, arguments))
        self.sending = True
        self.tasks += 1
        each = threads or max(1, cores() // size)
        store: Path | None = None
        try:
            store = self._start(size) / f"meeting-{self.tasks}"
            for rank, process in enumerate(self.processes[:size]):
                task = Task(
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
            self.sending = False
            if self.stop_asked:
                self.ask_to_stop()
            return Collection(self.processes[:size], deadline, on_report).results()
        except BaseException:
            self.stop()
            raise
        finally:
            self.sending = False
            self.stop_asked = False
            if store is not None:
                store.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Ask the task under way to finish its step, save and end: its ranks see `world.stop`.
        A signal handler may call it.
        """
        self.stop_asked = True
        # a message would land inside another: `run` does it when it has sent its own
        if self.sending:
            return
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.socket.send(Stop())

    def _start(self, size: int) -> Path:
        """Have processes for that many ranks; the folder they share."""
        server = self.server or processes.server()
        folder = self.meeting()
        self.processes += server.start(
            [folder / f"stacks-{number}" for number in range(len(self.processes), size)]
        )
        return folder

    def another(self) -> Process:
        """One process more, that is nobody's rank. Raises RankFailed."""
        server = self.server or processes.server()
        folder = self.meeting()
        # which goes with the server that the others came from
        if not folder.is_dir():
            raise RankFailed("the server of the ranks ended, and its ranks with it", rank=None)
        self.tasks += 1
        return server.start([folder / f"stacks-apart-{self.tasks}"])[0]

    def meeting(self) -> Path:
        """The folder of what they share."""
        server = self.server or processes.server()
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(
                prefix="ranks-", dir=server.folder, ignore_cleanup_errors=True
            )
        return Path(self.folder.name)

    def stop(self) -> None:
        """Kill every rank; the next `run` starts fresh ones."""
        for process in self.processes:
            process.signal(signal.SIGKILL)
        for process in self.processes:
            process.end()
        self.processes = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def close(self) -> None:
        """End the ranks and forget their folder."""
        self.stop()


@dataclass
class Collection:
    """The answers of the ranks to one task, as they come."""

    processes: list[Process]
    deadline: float | None
    on_report: Callable[[int, Any], None] | None
    answers: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)

    def results(self) -> list[Any]:
        end = time.monotonic() + self.deadline if self.deadline else None
        while len(self.answers) < len(self.processes) and not self.failures:
            if not self.take(None if end is None else max(0.0, end - time.monotonic())):
                raise self.silence()
        if self.failures:
            raise self.cause()
        return [self.answers[rank] for rank in range(len(self.processes))]

    def take(self, seconds: float | None) -> bool:
        """Take what ranks have sent within some seconds; False if none did."""
        silent = {
            rank: process
            for rank, process in enumerate(self.processes)
            if rank not in self.answers and rank not in self.dead
        }
        ready = wait(
            [end for process in silent.values() for end in (process.socket, process.notes)], seconds
        )
        for rank, process in silent.items():
            if process.socket not in ready and process.notes not in ready:
                continue
            try:
                # it ended, and what it started holds its socket open
                if process.socket not in ready:
                    raise EOFError
                kind, value = process.socket.recv()
            except (EOFError, OSError):
                self.dead.add(rank)
                # a death is the cause of what others say
                self.failures.append(Failure(process.failed(rank), 0.0))
                continue
            if kind == "report":
                if self.on_report:
                    self.on_report(rank, value)
            elif kind == "failed":
                self.dead.add(rank)
                self.failures.append(value)
            else:
                self.answers[rank] = cloudpickle.loads(value)
        return bool(ready)

    def cause(self) -> RankFailed:
        """The failure that came first. A complaint is given a moment for a death to show: that
        would be its cause.
        """
        end = time.monotonic() + GRACE
        while (
            (left := end - time.monotonic()) > 0
            and len(self.dead) + len(self.answers) < len(self.processes)
            and all(failure.when for failure in self.failures)
        ):
            self.take(left)
        return min(self.failures, key=lambda failure: failure.when).error

    def silence(self) -> RankFailed:
        """Nobody answered in time: name the first silent rank, with the stacks of all of
        them.
        """
        silent = [rank for rank in range(len(self.processes)) if rank not in self.answers]
        for rank in silent:
            self.processes[rank].signal(signal.SIGUSR1)
        # time to write their stacks
        wait([self.processes[rank].socket for rank in silent], GRACE)
        stacks = "\n".join(
            f"rank {rank} stands at:\n{self.processes[rank].stacks.read_text()}" for rank in silent
        )
        return RankFailed(
            f"no answer from rank(s) {', '.join(map(str, silent))} within {self.deadline:g} "
            f"s\n{stacks}",
            rank=silent[0],
            traceback=stacks,
        )
