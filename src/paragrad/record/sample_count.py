"""The sample count: how often each epoch used each sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any


@dataclass(frozen=True)
class SampleCount:
    """Which samples the epochs of a run used, according to its record.

    With rounds, each round has samples of its own. `samples` and `seen` are then totals over all
    rounds.

    Attributes:
        epochs: The number of finished epochs.

        samples: The number of samples of the dataset, or that a sampler drew for an epoch.

        seen: The number of different samples, in the epoch that used fewest.

        twice: How many were used more than once in an epoch, over all epochs.

        missed: How many were not used in an epoch, over all epochs.

        in_rounds: Whether clients train in rounds.

        from_sampler: Whether a sampler drew the samples. It may draw one several times; each drawn
            sample then counts for itself.
    """

    epochs: int
    samples: int
    seen: int
    twice: int
    missed: int
    in_rounds: bool = False
    from_sampler: bool = False

    def __str__(self) -> str:
        if not self.epochs:
            return "no epoch was finished"
        if self.in_rounds:
            return (
                f"{self.seen} of the {self.samples} samples that clients had to train on in "
                f"{self.epochs} round(s), {self.twice} twice, {self.missed} missed"
            )
        if self.from_sampler:
            return (
                f"{self.seen} of the {self.samples} samples that the sampler drew for each of "
                f"{self.epochs} epoch(s), {self.twice} used twice, {self.missed} missed"
            )
        return (
            f"{self.seen} of {self.samples} samples seen in each of {self.epochs} epoch(s), "
            f"{self.twice} twice, {self.missed} missed"
        )


def count_range_samples(ranges: Iterable[list[int]]) -> int:
    """Count the samples of the ranges of a step line.

    Args:
        ranges: The ranges [first, stop], without common positions.
    """
    return sum(stop - first for first, stop in ranges)


def count_covered_positions(parts: Iterable[list[int]]) -> tuple[int, int]:
    """Count the positions that ranges cover.

    Args:
        parts: The ranges [first, stop].

    Returns:
        The number of positions in at least one range, and of those in more than one.
    """
    covered = 0
    repeated = 0
    depth = 0
    last_place = 0
    for place, change in sorted(end for first, stop in parts for end in ((first, 1), (stop, -1))):
        covered = covered + (place - last_place) * (depth > 0)
        repeated = repeated + (place - last_place) * (depth > 1)
        depth = depth + change
        last_place = place
    return covered, repeated


def count_epoch_samples(
    ended: Iterable[int],
    used: Mapping[int, list[dict[str, Any]]],
    samples: int,
    from_sampler: bool = False,
) -> SampleCount:
    """Count how often each sample of the finished epochs was used.

    An epoch is left out if its beginning is not in the record.

    Args:
        ended: The numbers of the finished epochs.
        used: The step lines of each epoch.
        samples: The number of samples of the dataset, or that the sampler draws.
        from_sampler: Whether a sampler draws them.

    Returns:
        The counts.
    """
    epochs = [
        epoch
        for epoch in ended
        if any(first == 0 for line in used.get(epoch, ()) for first, _ in line["order"])
    ]
    counts = [
        count_covered_positions(chain.from_iterable(line["order"] for line in used[epoch]))
        for epoch in epochs
    ]
    return SampleCount(
        len(epochs),
        samples,
        min((once for once, _ in counts), default=0),
        sum(more for _, more in counts),
        sum(samples - once for once, _ in counts),
        from_sampler=from_sampler,
    )
