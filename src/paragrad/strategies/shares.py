"""Who computes what of a batch: shares of ranks, micro-batches of a share.

A batch is positions start..stop of the epoch's order. Every rank gets a contiguous part of it,
in rank order, by largest remainder; the part is cut into micro-batches. All ranks run the same
number of micro-batches, so that collectives inside a model (batch norm) and hooks meet; where a
rank has none left, its part is empty (it then runs one sample with weight 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.schedules.actions import split_evenly


@dataclass(frozen=True)
class Division:
    """Who computes which samples of a global batch: relative shares, one for each replica, and
    micro-batches in each.
    """

    shares: tuple[int, ...] = (1,)
    micro: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank. `places` is never empty: where `positions` is, one sample
    stands in with weight 0.
    """

    positions: list[int]  # in the epoch's order
    places: list[int]  # in the global batch


def apportion_samples(samples: int, weights: Sequence[int]) -> list[int]:
    """`samples` in proportion to `weights`: largest remainder, lowest rank first; sums to
    `samples`.
    """
    whole = sum(weights)
    counts = [samples * weight // whole for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda rank: (-(samples * weights[rank] % whole), rank)
    )
    for rank in by_remainder[: samples - sum(counts)]:
        counts[rank] += 1
    return counts


def split_micro_batches(batch: range, division: Division) -> list[list[range]]:
    """For every micro-batch, the part of every rank: `[micro][rank] -> range of positions`;
    parts may be empty.
    """
    counts = apportion_samples(len(batch), division.shares)
    micro = division.micro
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    number = max(min(micro, count) for count in counts)
    cut = [
        [
            batch[start + part.start : start + part.stop]
            for part in split_evenly(count, min(micro, count) or 1)
        ]
        for start, count in zip(starts, counts, strict=True)
    ]
    return [[parts[k] if k < len(parts) else parts[-1][:0] for parts in cut] for k in range(number)]


def count_largest_micro_batch(samples: int, division: Division, share: int) -> int:
    """Samples in the largest micro-batch that a share has of a batch; at least the one that
    stands in for none.
    """
    return max(1, len(split_micro_batches(range(samples), division)[0][share]))


def count_smallest_micro_batch(samples: int, division: Division, per_share: bool = False) -> int:
    """Samples in the smallest micro-batch of a batch, over all shares; apart: in the smallest
    part of one that is not empty.
    """
    every = [
        [len(part) for part in parts if part]
        for parts in split_micro_batches(range(samples), division)
    ]
    return min(min(counts) if per_share else sum(counts) for counts in every)
