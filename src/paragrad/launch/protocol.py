"""Messages between the launcher, the fork server and the ranks."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from paragrad.errors import RankFailed
from paragrad.launch.job_files import JobFile

# the format of what the server reports of a rank: its pid, and later its exit code
NUMBER_FORMAT = struct.Struct("q")


@dataclass(frozen=True)
class ProcessSetup:
    """The state that a rank's process takes over from its launcher before its first task.

    A child process would inherit the same state.

    Attributes:
        environment: The environment variables.

        import_paths: The launcher's sys.path, so that a rank can import the same modules.

        working_folder: The working directory.

        affinity: The cores on which the rank may run; None where the system does not say.

        stack_file: Where SIGUSR1 writes the stacks of all threads.
    """

    environment: dict[str, str]
    import_paths: list[str]
    working_folder: str
    affinity: set[int] | None
    stack_file: Path


@dataclass(frozen=True)
class RankTask:
    """A call for a rank: function(world, *arguments), in a world of ranks that meet in a file.

    Attributes:
        rank: The number of this rank.

        size: The number of ranks.

        store: The file in which the ranks meet.

        backend: The torch.distributed backend.

        device: The kind of device, cpu or cuda.

        threads: The number of torch's threads in this rank.

        timeout: Seconds to wait for another rank; None takes the default.

        job_files: Files that the rank must run before it unpickles the call.

        pickled_call: (torch's default dtype, function, arguments), by cloudpickle.

        has_reports: Whether the function gets an argument `report`.
    """

    rank: int
    size: int
    store: Path
    backend: str
    device: str
    threads: int
    timeout: float | None
    job_files: tuple[JobFile, ...]
    pickled_call: bytes
    has_reports: bool


# The descriptor of a rank for the launcher's standard input. Number 0 is empty, for a rank and what
# it starts: a program in the background that reads a terminal is stopped.
DEBUGGER_STDIN = 190
# the kind of message that reports life; its value is the longest time between two steps
LIFE = "life"


@dataclass(frozen=True)
class StopMessage:
    """A request of the launcher to stop: finish the step, save, and end the task."""


@dataclass(frozen=True)
class LifeMessage:
    """A request of the launcher to report from now on whether the task comes further."""


@dataclass(frozen=True)
class TaskFailure:
    """The failure of a task. The failure that came first is the one to show.

    Attributes:
        error: The failure.
        when: The time of the failure on the host's monotonic clock; 0.0 for an ended process.
    """

    error: RankFailed
    when: float
