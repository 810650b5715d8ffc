"""The start time of a run on the clock of each host, to compare times of several ranks."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class ClockWorld(Protocol):
    """The methods of a world that are needed here."""

    def barrier(self) -> None: ...

    def broadcast_object(self, value: object) -> list[tuple[str, float]]: ...

    def gather_objects(self, value: object) -> list[tuple[str, float]]: ...


def find_common_origin(world: ClockWorld) -> tuple[float, int]:
    """Agree on the start time of a run. Collective.

    Ranks of a host share its clock and use the time of its first rank. Times of different hosts are
    taken when a barrier ends. They differ by at most the time of its last message.

    Args:
        world: The ranks of the run.

    Returns:
        The start time on the monotonic clock of this rank's host, in seconds, and the number of
        different clocks.
    """
    world.barrier()
    mine = read_clock_name(), time.monotonic()
    moments = world.broadcast_object(world.gather_objects(mine))
    return next(moment for name, moment in moments if name == mine[0]), len(
        {name for name, _ in moments}
    )


def read_clock_name() -> str:
    """Return the name of this host's monotonic clock; its processes share it until a restart."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
