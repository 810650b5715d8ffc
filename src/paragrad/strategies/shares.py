"""Which rank computes which samples of a batch: micro-batches of a batch, shares of a micro-batch.

A batch is positions start..stop of the order of the epoch. It is divided into contiguous
micro-batches, and each of these into contiguous parts of the ranks, in rank order. So a micro-batch
has the same samples on one rank and on many. Batch norm takes its statistics over it.

The parts of a micro-batch follow the shares, by largest remainder. A rank that got too little in
earlier micro-batches of the batch gets the next remaining sample first.

All ranks run the same number of micro-batches, so that collectives inside a model (batch norm) and
hooks meet. If the part of a rank is empty, the rank runs one sample with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from paragrad.schedules.actions import split_evenly


@dataclass(frozen=True)
class Division:
    """How a global batch is divided.

    Attributes:
        shares: The relative shares, one for each replica.
        micro: The micro-batches of a batch.
    """

    shares: tuple[int, ...] = (1,)
    micro: int = 1

    @cached_property  # read in every step
    def is_undivided(self) -> bool:
        """Whether each replica has the whole batch, in one micro-batch."""
        return len(self.shares) == 1 and self.micro == 1


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank.

    Attributes:
        positions: The samples, in the order of the epoch. Usually a range; compare and join
            `list(positions)`.
        places: The samples, in the global batch. It is never empty: if `positions` is empty, one
            sample takes part with weight 0.
    """

    positions: Sequence[int]
    places: Sequence[int]


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
    """Divide a batch into micro-batches, and each of these into the parts of all ranks.

    The micro-batches do not depend on the shares: `serial(micro=m)` and `data(n, micro=m)` have the
    same ones. With one micro-batch, a part has the samples that `apportion_samples` gives its rank.

    Args:
        batch: The positions of the batch.
        division: The shares and the number of micro-batches.

    Returns:
        `[micro][rank] -> range of positions`; parts may be empty. The parts of a micro-batch are
        contiguous, and so are the micro-batches. A batch of fewer samples has fewer micro-batches.
    """
    return [
        [batch[part.start : part.stop] for part in parts]
        for parts in _split_places(len(batch), tuple(division.shares), division.micro)
    ]


@lru_cache(maxsize=64)  # nearly all batches of a training have one size
def _split_places(
    samples: int, shares: tuple[int, ...], micro: int
) -> tuple[tuple[range, ...], ...]:
    """Divide the places of a batch as `split_micro_batches` does."""
    micro_count = min(micro, samples) or 1
    counts_so_far = [0] * len(shares)
    micro_batches = []
    for micro_batch in split_evenly(samples, micro_count):
        counts = _apportion_micro_batch(micro_batch, shares, counts_so_far)
        ends = accumulate(counts, initial=micro_batch.start)
        micro_batches.append(tuple(range(start, stop) for start, stop in pairwise(ends)))
        counts_so_far = [
            before + count for before, count in zip(counts_so_far, counts, strict=True)
        ]
    return tuple(micro_batches)


def _apportion_micro_batch(
    micro_batch: range, weights: Sequence[int], counts_so_far: Sequence[int]
) -> list[int]:
    """Divide a micro-batch in proportion to weights, by largest remainder, lowest rank first.

    The remainder of a rank is what it lacks of its share of the batch up to here. Otherwise the
    same rank would get the remaining sample of every micro-batch.

    Args:
        micro_batch: The places of the micro-batch in the batch.
        weights: The weight of each rank.
        counts_so_far: The samples of each rank in the micro-batches before.

    Returns:
        The samples of each rank.
    """
    total = sum(weights)
    counts = [len(micro_batch) * weight // total for weight in weights]
    lacking = [
        micro_batch.stop * weight - total * (before + count)
        for weight, before, count in zip(weights, counts_so_far, counts, strict=True)
    ]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-lacking[rank], rank))
    for rank in by_remainder[: len(micro_batch) - sum(counts)]:
        counts[rank] += 1
    return counts


def count_largest_micro_batch(samples: int, division: Division, share: int) -> int:
    """Return the samples of the largest micro-batch of a share; at least 1, the placeholder sample.

    Args:
        samples: The samples of the batch.
        division: The shares and the number of micro-batches.
        share: The number of the share.
    """
    parts = split_micro_batches(range(samples), division)
    return max(1, *(len(parts_of_ranks[share]) for parts_of_ranks in parts))


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
