"""What the launcher, its ranks and the server they come from say to each other."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from paragrad.errors import RankFailed
from paragrad.launch.job_files import JobFile

# what the server tells of a rank: its pid, and at its end its exit code
NUMBER_FORMAT = struct.Struct("q")


@dataclass(frozen=True)
class ProcessSetup:
    """What a rank's process takes over from its launcher before its first task, as a child of
    it would.
    """

    environment: dict[str, str]
    import_paths: list[str]  # sys.path, so that what is importable there is here
    working_folder: str  # the working directory
    affinity: set[int] | None  # the cores it may run on, where the system says
    stack_file: Path  # where SIGUSR1 writes the stacks of all threads


@dataclass(frozen=True)
class RankTask:
    """What a rank is asked to do: call(world, *arguments) in a world of `size` ranks that meet
    in the file `store`.
    """

    rank: int
    size: int
    store: Path
    backend: str
    device: str
    threads: int
    timeout: float | None  # seconds a rank waits for another; None: the world's own
    job_files: tuple[JobFile, ...]  # to be run before the call is unpickled
    pickled_call: bytes  # (torch's default type, function, arguments), by cloudpickle
    has_reports: bool  # pass report=... to the function


@dataclass(frozen=True)
class StopMessage:
    """The launcher was asked to stop: finish the step, save, and end the task."""


@dataclass(frozen=True)
class TaskFailure:
    """Why a task failed, and when on the host's monotonic clock (the first one is the one to
    show).
    """

    error: RankFailed
    when: float
