"""Which rank computes which samples of a batch: shares of ranks, micro-batches of a share.

A batch is positions start..stop of the order of the epoch. Every rank gets a contiguous part of it,
in rank order, by largest remainder. The part is divided into micro-batches. All ranks run the same
number of micro-batches, so that collectives inside a model (batch norm) and hooks meet. If a rank
has no micro-batch left, its part is empty; it then runs one sample with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.schedules.actions import split_evenly


@dataclass(frozen=True)
class Division:
    """How a global batch is divided.

    Attributes:
        shares: The relative shares, one for each replica.
        micro: The micro-batches in each share.
    """

    shares: tuple[int, ...] = (1,)
    micro: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank.

    Attributes:
        positions: The samples, in the order of the epoch.
        places: The samples, in the global batch. It is never empty: if `positions` is empty, one
            sample takes part with weight 0.
    """

    positions: list[int]
    places: list[int]


def apportion_samples(samples: int, weights: Sequence[int]) -> list[int]:
    """Divide samples in proportion to weights, by largest remainder, lowest rank first.

    Args:
        samples: The number of samples.
        weights: The weight of each rank.

    Returns:
        The samples of each rank; their sum is `samples`.
    """
    total = sum(weights)
    counts = [samples * weight // total for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda rank: (-(samples * weights[rank] % total), rank)
    )
    for rank in by_remainder[: samples - sum(counts)]:
        counts[rank] += 1
    return counts


def split_micro_batches(batch: range, division: Division) -> list[list[range]]:
    """Divide a batch into the parts of every rank in every micro-batch.

    Args:
        batch: The positions of the batch.
        division: The shares and the number of micro-batches.

    Returns:
        `[micro][rank] -> range of positions`; parts may be empty.
    """
    counts = apportion_samples(len(batch), division.shares)
    micro = division.micro
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    micro_count = max(min(micro, count) for count in counts)
    parts_of_ranks = [
        [
            batch[start + part.start : start + part.stop]
            for part in split_evenly(count, min(micro, count) or 1)
        ]
        for start, count in zip(starts, counts, strict=True)
    ]
    return [
        [parts[k] if k < len(parts) else parts[-1][:0] for parts in parts_of_ranks]
        for k in range(micro_count)
    ]


def count_largest_micro_batch(samples: int, division: Division, share: int) -> int:
    """Return the samples of the largest micro-batch of a share; at least 1, the placeholder sample.

    Args:
        samples: The samples of the batch.
        division: The shares and the number of micro-batches.
        share: The number of the share.
    """
    return max(1, len(split_micro_batches(range(samples), division)[0][share]))


def count_smallest_micro_batch(samples: int, division: Division, per_share: bool = False) -> int:
    """Return the samples of the smallest micro-batch of a batch.

    Args:
        samples: The samples of the batch.

        division: The shares and the number of micro-batches.

        per_share: Whether to count each part that is not empty on its own; otherwise all parts of a
            micro-batch together.
    """
    counts_per_micro = [
        [len(part) for part in parts if part]
        for parts in split_micro_batches(range(samples), division)
    ]
    return min(min(counts) if per_share else sum(counts) for counts in counts_per_micro)
