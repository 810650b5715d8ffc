"""Processes that run tasks of their own: one can end, or another start, while the others go on."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from paragrad.launch import job_files
from paragrad.launch.launcher import Launcher
from paragrad.launch.processes import RankProcess
from paragrad.launch.protocol import LIFE, LifeMessage, RankTask, StopMessage, TaskFailure

TASK_DONE = "done"
TASK_FAILED = "failed"
PROCESS_DIED = "died"
TASK_REPORTED = "said"


class ProcessPool:
    """A pool of processes by number. As a context manager it leaves no process behind.

    Attributes:
        launcher: The launcher that starts the processes.

        threads: The number of torch's threads in each process.

        device: The kind of device, cpu or cuda.

        timeout: Seconds that a process waits for another.

        members: The processes at work, by number.

        finished: The processes of ended tasks; those of failed tasks still wait where they failed.

        folder: A folder that the processes share. Only its owner can enter it (mode 0700). It is
            removed with the pool, or by the next start if this process is killed.
    """

    def __init__(self, launcher: Launcher, threads: int, device: str, timeout: float) -> None:
        self.launcher = launcher
        self.threads = threads
        self.device = device
        self.timeout = timeout
        self.members: dict[int, RankProcess] = {}
        self.finished: list[RankProcess] = []
        self.folder = Path(tempfile.mkdtemp(dir=launcher.open_shared_folder()))

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes, also stopped ones, and remove the folder."""
        processes = [*self.members.values(), *self.finished]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.kill_and_wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_task(
        self,
        number: int,
        function: Callable[..., Any],
        *arguments: Any,
        size: int = 1,
        store: Path | None = None,
        backend: str = "gloo",
    ) -> None:
        """Start a process and let it call function(world, *arguments).

        Without a store the process is in a world of its own. With a store it is the rank `number`
        of the ranks that meet there, and it can report: function(world, *arguments, report=...).

        Args:
            number: The number of the process, and its rank.

            function: The function to call.

            arguments: Its arguments after the world.

            size: The number of ranks that meet in the store.

            store: The file in which the ranks meet; None for a world of one.

            backend: The torch.distributed backend.

        Raises:
            RankFailed: The process could not be started.
        """
        # not at the top: the command imports this module to start its server, before torch
        import torch

        pickled_call, needed_files = job_files.pickle_task(
            (torch.get_default_dtype(), function, arguments)
        )
        process = self.launcher.start_extra_process(number)
        self.members[number] = process
        # if the process died, `receive_event` reports how
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.socket.send(
                RankTask(
                    number,
                    size,
                    store or self.folder,
                    backend,
                    self.device,
                    self.threads,
                    self.timeout,
                    needed_files,
                    pickled_call,
                    store is not None,
                )
            )

    def request_stop(self, numbers: Iterable[int]) -> None:
        """Ask members to finish their step, save and end, as `Launcher.request_stop` does.

        Args:
            numbers: The numbers of the members.
        """
        for number in numbers:
            with contextlib.suppress(OSError):
                self.members[number].socket.send(StopMessage())

    def request_life(self, numbers: Iterable[int]) -> None:
        """Ask members to report from now on whether they come further.

        Args:
            numbers: The numbers of the members.
        """
        for number in numbers:
            with contextlib.suppress(OSError):
                self.members[number].socket.send(LifeMessage())

    def kill_members(self, numbers: Iterable[int]) -> None:
        """Kill members, and the processes of all ended tasks.

        Args:
            numbers: The numbers of the members.
        """
        processes = [*(self.members.pop(number) for number in [*numbers]), *self.finished]
        self.finished = []
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.kill_and_wait()

    @property
    def descriptors(self) -> dict[int, int]:
        """The descriptors to wait for, each with the number of its member."""
        return {
            descriptor: number
            for number, process in self.members.items()
            for descriptor in (process.socket.fileno(), process.status_socket.fileno())
        }

    def wait_members(self, seconds: float) -> set[int]:
        """Wait until members have something to read.

        Args:
            seconds: The time limit.

        Returns:
            The numbers of these members; empty after the time limit.
        """
        numbers = self.descriptors
        return {
            numbers[descriptor]
            for descriptor in wait(list(numbers), seconds)
            if isinstance(descriptor, int)
        }

    def receive_event(self, number: int) -> tuple[str, Any]:
        """Read the next event of a member that has something to read.

        After its end a process is no member any more. The process of a failed task is kept until
        the pool kills it.

        Args:
            number: The number of the member.

        Returns:
            The kind of event and its value: (TASK_DONE, result), (TASK_REPORTED, reported value),
            (LIFE, seconds), (TASK_FAILED, RankFailed) or (PROCESS_DIED, RankFailed).
        """
        process = self.members[number]
        try:
            # The process ended, and a process that it started holds its socket open.
            if not process.socket.poll(0):
                raise EOFError
            kind, value = process.socket.recv()
        except (EOFError, OSError):
            del self.members[number]
            failure = process.make_rank_failure(number)
            process.kill_and_wait()
            return PROCESS_DIED, failure
        if kind == LIFE:
            self.launcher.report_life(value)
            return LIFE, value
        if kind == "report":
            return TASK_REPORTED, value
        del self.members[number]
        self.finished.append(process)
        if kind == "failed":
            task_failure: TaskFailure = value
            return TASK_FAILED, task_failure.error
        return TASK_DONE, cloudpickle.loads(value)
