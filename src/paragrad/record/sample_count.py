"""Did every epoch use every sample once?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampleCount:
    """Which samples a run's epochs used, by its own record."""

    epochs: int
    samples: int  # of the dataset
    seen: int  # different ones, in the epoch that saw fewest
    twice: int  # used more than once in an epoch, over all epochs
    missed: int  # not used in an epoch, over all epochs
    # each is over samples of its own: `samples` and `seen` are of all of them together
    in_rounds: bool = False

    def __str__(self) -> str:
        if not self.epochs:
            return "no epoch was finished"
        if self.in_rounds:
            return (
                f"{self.seen} of the {self.samples} samples that clients of {self.epochs} round(s) "
                f"were to train on, "
                f"{self.twice} twice, {self.missed} missed"
            )
        return (
            f"{self.seen} of {self.samples} samples seen in each of {self.epochs} epoch(s), "
            f"{self.twice} twice, {self.missed} missed"
        )


def count_covered_positions(parts: Iterable[list[int]]) -> tuple[int, int]:
    """How many places are in some of the parts [first, stop], and how many in more than one."""
    once = 0
    more = 0
    depth = 0
    before = 0
    for place, change in sorted(end for first, stop in parts for end in ((first, 1), (stop, -1))):
        once = once + (place - before) * (depth > 0)
        more = more + (place - before) * (depth > 1)
        depth = depth + change
        before = place
    return once, more


def count_epoch_samples(
    ended: Iterable[int], used: Mapping[int, list[dict[str, Any]]], samples: int
) -> SampleCount:
    """Of epochs that ended, by the lines of their steps. One whose beginning is lost is left
    out.
    """
    epochs = [
        epoch
        for epoch in ended
        if any(line["order"][0] == 0 < line["order"][1] for line in used.get(epoch, ()))
    ]
    counts = [count_covered_positions(line["order"] for line in used[epoch]) for epoch in epochs]
    return SampleCount(
        len(epochs),
        samples,
        min((once for once, _ in counts), default=0),
        sum(more for _, more in counts),
        sum(samples - once for once, _ in counts),
    )
