"""Processes of which each does a task of its own: one may end, and another be started, while
the others go on.
"""

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
from paragrad.launch.protocol import RankTask, StopMessage, TaskFailure

TASK_DONE = "done"
TASK_FAILED = "failed"
PROCESS_DIED = "died"
TASK_REPORTED = "said"


class ProcessPool:
    """Members by number; threads, device, timeout: as `Ranks.run` has them. A context manager
    that leaves none.

    To be read: folder, of what they share, which only their owner may enter (mode 0700), and
    which is cleared with them, also where this process is killed.
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
        """Who has not ended does now: a stopped process too."""
        every = [*self.members.values(), *self.finished]
        for process in every:
            process.send_signal(signal.SIGKILL)
        for process in every:
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
        """Have a member do function(world, *arguments), in a world of its own; or as that rank
        of those that meet in a file, which says what it reports: function(world, *arguments,
        report=...). Raises RankFailed.
        """
        # here: the command imports this room to start its server, before torch itself
        import torch

        call, needed = job_files.pickle_task((torch.get_default_dtype(), function, arguments))
        process = self.launcher.start_extra_process()
        self.members[number] = process
        # it died: who looks will see how
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
                    needed,
                    call,
                    store is not None,
                )
            )

    def request_stop(self, numbers: Iterable[int]) -> None:
        """As `Ranks.ask_to_stop`."""
        for number in numbers:
            with contextlib.suppress(OSError):
                self.members[number].socket.send(StopMessage())

    def kill_members(self, numbers: Iterable[int]) -> None:
        """Members are none any more; nor are those that have ended, of which some wait where
        they failed.
        """
        gone = [*(self.members.pop(number) for number in [*numbers]), *self.finished]
        self.finished = []
        for process in gone:
            process.send_signal(signal.SIGKILL)
        for process in gone:
            process.kill_and_wait()

    @property
    def descriptors(self) -> dict[int, int]:
        """What to wait for, and whose it is."""
        return {
            end: number
            for number, process in self.members.items()
            for end in (process.socket.fileno(), process.status_socket.fileno())
        }

    def wait_members(self, seconds: float) -> set[int]:
        """Of whom something can be read, once there is somebody, or after so many seconds."""
        whose = self.descriptors
        return {whose[each] for each in wait(list(whose), seconds) if isinstance(each, int)}

    def receive_event(self, number: int) -> tuple[str, Any]:
        """What a member says, of which something can be read: (what, value); where that was its
        end it is none any more, and a process that failed is held until all are closed.
        """
        process = self.members[number]
        try:
            # it ended, and what it started holds its socket open
            if not process.socket.poll(0):
                raise EOFError
            kind, value = process.socket.recv()
        except (EOFError, OSError):
            del self.members[number]
            failure = process.make_rank_failure(number)
            process.kill_and_wait()
            return PROCESS_DIED, failure
        if kind == "report":
            return TASK_REPORTED, value
        del self.members[number]
        self.finished.append(process)
        if kind == "failed":
            found: TaskFailure = value
            return TASK_FAILED, found.error
        return TASK_DONE, cloudpickle.loads(value)
