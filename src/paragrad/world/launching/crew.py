"""Processes of which each does a task of its own: one may end, and another be started, while the others go on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import cloudpickle

from paragrad.world.launching import files
from paragrad.world.launching.messages import Failure, Task
from paragrad.world.launching.processes import Process
from paragrad.world.launching.ranks import Ranks

DONE, FAILED, DIED = "done", "failed", "died"


class Crew:
    """Members by number, each in a world of its own; threads, device, timeout: as `Ranks.run` has them. A context manager that
    leaves none."""

    def __init__(self, ranks: Ranks, threads: int, device: str, timeout: float) -> None:
        self.ranks, self.threads, self.device, self.timeout = ranks, threads, device, timeout
        self.members: dict[int, Process] = {}
        self.spare: list[Process] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """Who has not ended does now: a stopped process too."""
        every = [*self.members.values(), *self.spare]
        for process in every:
            process.signal(signal.SIGKILL)
        for process in every:
            process.end()

    def start(self, number: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a member do function(world, *arguments). Raises RankFailed."""
        import torch  # here: the command imports this room to start its server, before torch itself

        call, needed = files.dumps((torch.get_default_dtype(), function, arguments))
        process = self.ranks.another()
        self.members[number] = process
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):            # it died: who looks will see how
            process.socket.send(Task(number, 1, self.ranks.meeting(), "gloo", self.device, self.threads, self.timeout, needed,
                                     call, False))

    @property
    def descriptors(self) -> dict[int, int]:
        """What to wait for, and whose it is."""
        return {end: number for number, process in self.members.items()
                for end in (process.socket.fileno(), process.notes.fileno())}

    def heard(self, number: int) -> tuple[str, Any]:
        """What a member says, of which something can be read: (what, value); where that was its end it is none any more."""
        process = self.members[number]
        try:
            if not process.socket.poll(0):              # it ended, and what it started holds its socket open
                raise EOFError
            kind, value = process.socket.recv()
        except (EOFError, OSError):
            del self.members[number]
            failure = process.failed(number)
            process.end()
            return DIED, failure
        del self.members[number]
        self.spare.append(process)
        if kind == "failed":
            found: Failure = value
            return FAILED, found.error
        return DONE, cloudpickle.loads(value)
