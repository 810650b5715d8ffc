"""What the launcher and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paragrad.errors import RankFailed


@dataclass(frozen=True)
class Task:
    """What a rank is asked to do: call(world, *arguments) in a world of `size` ranks that meet in the file `store`."""
    rank: int
    size: int
    store: Path
    backend: str
    device: str
    threads: int
    timeout: float
    call: bytes             # (function, arguments), by cloudpickle
    reports: bool           # pass report=... to the function


@dataclass(frozen=True)
class Stop:
    """The launcher was asked to stop: finish the step, save, and end the task."""


@dataclass(frozen=True)
class Failure:
    """Why a task failed, and when on the host's monotonic clock (the first one is the one to show)."""
    error: RankFailed
    when: float
