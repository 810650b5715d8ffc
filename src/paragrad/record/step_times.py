"""Durations of steps: of one rank, or of all workers together if they step independently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

Line = dict[str, Any]


def list_slowest_seconds(ranks: Sequence[list[Line]]) -> list[float]:
    """List the step durations of the rank with the largest median; all ranks wait for it.

    Args:
        ranks: For each rank its step lines.

    Returns:
        The seconds of each step.
    """
    return max(([line["seconds"] for line in lines] for lines in ranks), key=median, default=[])


def list_joint_seconds(steps: Iterable[list[Line]], window: int | None) -> list[float]:
    """List the step durations of workers that step independently, taken together.

    The durations of one worker do not show the progress of all, because a slow worker does not
    delay the others. A step ends when the last of its shares ends for the first time. Steps end in
    bursts, so durations are averaged over a window of steps. Time between two epochs (tests,
    averaging) is left out.

    Args:
        steps: For each step the lines of its shares.
        window: The number of steps to average over; None means a whole epoch.

    Returns:
        The mean seconds of a step, for each window.
    """
    epochs: dict[int, list[list[Line]]] = {}
    for lines in steps:
        epochs.setdefault(lines[0]["epoch"], []).append(lines)
    seconds = list[float]()
    for _, epoch_steps in sorted(epochs.items()):
        width = min(window or len(epoch_steps), len(epoch_steps))
        times = [
            min(line["start"] for lines in epoch_steps for line in lines),
            *sorted(map(_find_step_end, epoch_steps)),
        ]
        seconds += [(last - first) / width for first, last in pairwise(times[::width])]
    return seconds


def _find_step_end(lines: list[Line]) -> float:
    """The time when the last share of a step was done for the first time."""
    ends: dict[tuple[Any, ...], float] = {}
    for line in lines:  # a late share is computed again by another worker
        share = tuple(map(tuple, line["order"]))
        end = line["start"] + line["seconds"]
        ends[share] = min(end, ends.get(share, end))
    return max(ends.values())
