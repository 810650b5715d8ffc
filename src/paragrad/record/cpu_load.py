"""Who kept this machine's cores busy while a rank worked: the ranks, or others."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paragrad.record.record import Line

CLOCK_TICKS_ERROR = 2  # ticks of a core's clock by which its two readings may be wrong
# of all cores: kept busy by others, times are doubted; idle, nobody was in the way
BUSY_SHARE = 0.1


class CpuMeter:
    """Reads the clocks of this process and of its cores, from now on."""

    def __init__(self) -> None:
        self.start_readings = _read_cpu_clocks()

    def measure_usage(self) -> Line:
        """Seconds since then, of them by the CPU: own (of this process and the loaders that
        ended) and all (of everybody on its cores, null where the system does not say);
        switched: how often its core was given to another thread, whoever's.
        """
        return {"host": platform.node()} | {
            name: None
            if value is None or self.start_readings[name] is None
            else round(value - self.start_readings[name], 6)
            for name, value in _read_cpu_clocks().items()
        }


def _read_cpu_clocks() -> Line:
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return {
        "seconds": time.monotonic(),
        "own": used,
        "all": _read_busy_seconds(),
        "switched": own.ru_nivcsw,
    }


def _read_busy_seconds() -> float | None:
    """CPU seconds that the cores of this process were busy, since the machine started; stolen
    by other machines counts.
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
    """What kept a host busy during a run, in cores: the ranks, and everybody else, at least
    (the launcher is among them).
    """

    cores: int
    rank_cores: float
    others: float
    # how often a second a rank's core went to another thread, at most
    switched: float

    @property
    def crowded(self) -> bool:
        """Others took a good part of the cores, and hardly any was left."""
        return (
            self.others > BUSY_SHARE * self.cores
            and self.rank_cores + self.others > (1.0 - BUSY_SHARE) * self.cores
        )


def find_cpu_load(lines: Sequence[Line], cores: int) -> CpuLoad | None:
    """Of the host on which others did most, by what all ranks told at their end; None where
    nothing says.
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
    own = sum(line["own"] for line in lines)
    unknown = CLOCK_TICKS_ERROR * cores / os.sysconf("SC_CLK_TCK")
    return CpuLoad(
        cores,
        own / first["seconds"],
        max(0.0, first["all"] - own - unknown) / first["seconds"],
        max(line["switched"] / line["seconds"] for line in lines),
    )
