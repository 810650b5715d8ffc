"""Who kept this machine's cores busy while a rank worked: the ranks, or others."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from paragrad.record.record import Line

RESOLUTION = 2          # ticks of a core's clock by which its two readings may be wrong


class Cpu:
    """Reads the clocks of this process and of its cores, from now on."""

    def __init__(self) -> None:
        self.began = _clocks()

    def told(self) -> Line:
        """Seconds since then, of them by the CPU: own (of this process and the loaders that ended) and all (of everybody on its
        cores, null where the system does not say); interrupted: how often it lost a core to somebody else."""
        return {name: None if value is None or self.began[name] is None else round(value - self.began[name], 6)
                for name, value in _clocks().items()}


def _clocks() -> Line:
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return {"seconds": time.monotonic(), "own": used, "all": _everybody(), "interrupted": own.ru_nivcsw}


def _everybody() -> float | None:
    """CPU seconds that the cores of this process were busy, since the machine started; stolen by other machines counts."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = [sum(map(int, words[1:4])) + sum(map(int, words[6:9])) for words in lines if words[0] in mine]
    except (AttributeError, OSError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if any(ticks) else None


def others(lines: Sequence[Line], cores: int) -> float | None:
    """How many of a host's cores others kept busy, at least, by what all of its ranks told; None where nothing says."""
    if not lines or lines[0]["all"] is None or not lines[0]["seconds"]:
        return None
    unknown = RESOLUTION * cores / os.sysconf("SC_CLK_TCK")
    return max(0.0, lines[0]["all"] - sum(line["own"] for line in lines) - unknown) / lines[0]["seconds"]
