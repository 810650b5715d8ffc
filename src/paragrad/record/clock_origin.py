"""When a run began, on the clock of each host: so that what several ranks did can be set side
by side.
"""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class ClockWorld(Protocol):
    """What is asked of a world."""

    def barrier(self) -> None: ...

    def broadcast_object(self, value: object) -> list[tuple[str, float]]: ...

    def gather_objects(self, value: object) -> list[tuple[str, float]]: ...


def find_common_origin(world: ClockWorld) -> tuple[float, int]:
    """(the beginning of a run, on the monotonic clock of this rank's host; how many clocks
    there are). Collective.

    Ranks of a host share its clock, and take the moment of the first of them. Moments of
    different hosts are those at which a barrier let them go: as far apart as its last message
    takes.
    """
    world.barrier()
    mine = read_clock_name(), time.monotonic()
    every = world.broadcast_object(world.gather_objects(mine))
    return next(moment for name, moment in every if name == mine[0]), len(
        {name for name, _ in every}
    )


def read_clock_name() -> str:
    """The name of this host's monotonic clock: all processes since its start have it in
    common.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
