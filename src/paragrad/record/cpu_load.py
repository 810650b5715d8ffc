"""Measures whether the ranks or other processes used the cores of this machine."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paragrad.record.record import Line

CLOCK_TICKS_ERROR = 2  # error of two readings of a core's clock, in ticks
# share of all cores: times are doubted if other processes use more than this, and less is idle
BUSY_SHARE = 0.1


class CpuMeter:
    """Measures from its creation on, with the clocks of this process and of its cores.

    Attributes:
        start_readings: The readings at the start.
    """

    def __init__(self) -> None:
        self.start_readings = _read_cpu_clocks()

    def measure_usage(self) -> Line:
        """Measure what happened since the start.

        Returns:
            Seconds since then, and CPU seconds. `own` counts this process and the loaders that
            ended. `all` counts all processes on its cores; it is None if the system does not
            provide it. `switched` is how often its core was given to another thread of any process.
        """
        return {"host": platform.node()} | {
            name: None
            if value is None or self.start_readings[name] is None
            else round(value - self.start_readings[name], 6)
            for name, value in _read_cpu_clocks().items()
        }


def _read_cpu_clocks() -> Line:
    process = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = process.ru_utime + process.ru_stime + children.ru_utime + children.ru_stime
    return {
        "seconds": time.monotonic(),
        "own": used,
        "all": _read_busy_seconds(),
        "switched": process.ru_nivcsw,
    }


def _read_busy_seconds() -> float | None:
    """CPU seconds in which the cores of this process were busy, since the machine started.

    Time stolen by other virtual machines counts.
    """
    try:
        lines = [
            line.split()
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("cpu")
        ]
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = [
            sum(map(int, words[1:4])) + sum(map(int, words[6:9]))
            for words in lines
            if words[0] in mine
        ]
    except (AttributeError, OSError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if any(ticks) else None


@dataclass(frozen=True)
class CpuLoad:
    """How many cores of a host were busy during a run, by cause.

    Attributes:
        cores: The number of cores.

        rank_cores: The cores that the ranks kept busy.

        others: The cores that other processes kept busy, at least; the launcher is one of them.

        switched: How often per second the core of a rank went to another thread, at most.
    """

    cores: int
    rank_cores: float
    others: float
    switched: float

    @property
    def crowded(self) -> bool:
        """Whether other processes used many of the cores, and hardly any were idle."""
        return (
            self.others > BUSY_SHARE * self.cores
            and self.rank_cores + self.others > (1.0 - BUSY_SHARE) * self.cores
        )


def find_cpu_load(lines: Sequence[Line], cores: int) -> CpuLoad | None:
    """Find the load of the host on which other processes used most.

    Args:
        lines: What all ranks measured at their end.
        cores: The number of cores of a host.

    Returns:
        The load, or None if it was not measured.
    """
    hosts: dict[str, list[Line]] = {}
    for line in lines:
        if line["all"] is not None and line["seconds"]:
            hosts.setdefault(line["host"], []).append(line)
    return max(
        (_compute_host_load(found, cores) for found in hosts.values()),
        key=lambda load: load.others,
        default=None,
    )


def _compute_host_load(lines: Sequence[Line], cores: int) -> CpuLoad:
    first = lines[0]
    rank_seconds = sum(line["own"] for line in lines)
    error = CLOCK_TICKS_ERROR * cores / os.sysconf("SC_CLK_TCK")
    return CpuLoad(
        cores,
        rank_seconds / first["seconds"],
        max(0.0, first["all"] - rank_seconds - error) / first["seconds"],
        max(line["switched"] / line["seconds"] for line in lines),
    )
