"""What steps took, of a rank or, where workers step by themselves, of all together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

Line = dict[str, Any]


def list_slowest_seconds(ranks: Sequence[list[Line]]) -> list[float]:
    """Of step lines by rank the seconds of those whose median is the largest: all wait for that
    rank.
    """
    return max(([line["seconds"] for line in lines] for lines in ranks), key=median, default=[])


def list_joint_seconds(steps: Iterable[list[Line]], window: int | None) -> list[float]:
    """Of steps (the lines of their shares) of workers that step by themselves: what one takes,
    whosever its shares were. No worker's own seconds say how fast all get on, for one that is
    slow holds up nobody.

    A step is over when the last of its shares is, for the first time. Steps end in bursts, so
    the mean over a window of them is taken; None: over an epoch. What lies between two epochs
    (tests, averaging) is left out.
    """
    epochs: dict[int, list[list[Line]]] = {}
    for lines in steps:
        epochs.setdefault(lines[0]["epoch"], []).append(lines)
    found = list[float]()
    for _, each in sorted(epochs.items()):
        many = min(window or len(each), len(each))
        times = [
            min(line["start"] for lines in each for line in lines),
            *sorted(map(_find_step_end, each)),
        ]
        found += [(last - first) / many for first, last in pairwise(times[::many])]
    return found


def _find_step_end(lines: list[Line]) -> float:
    ends: dict[tuple[int, ...], float] = {}
    for line in lines:  # a share that came late is made again
        share = tuple(line["order"])
        end = line["start"] + line["seconds"]
        ends[share] = min(end, ends.get(share, end))
    return max(ends.values())
