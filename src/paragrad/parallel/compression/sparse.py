"""Entries of a vector, as positions and values; and which entries are the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite
from paragrad.strategies.compressors import count_index_bytes

SAMPLE_SIZE = 8192  # entries in the sample from which the bound is guessed
GUESS_MARGIN = 4.0  # standard deviations of the guess, so that it is rarely too high
EXACT_SEARCH_LIMIT = 1 << 15  # vectors with fewer entries are searched without a guess


class SparseCodec(Codec):
    """A payload is (positions, values); all positions are different.

    Args:
        shape: Shape of the tensor.

    Attributes:
        index_dtype: Type of the positions.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.index_dtype = torch.int32 if count_index_bytes(self.elements) == 4 else torch.int64

    def make_payload(self, vector: Tensor, positions: Tensor) -> Payload:
        """Make the payload of some entries.

        Args:
            vector: The vector.
            positions: Positions of the entries.

        Raises:
            StepFailed: An entry is not finite.
        """
        values = vector.index_select(0, positions)
        refuse_nonfinite(values)
        return positions.to(self.index_dtype), values

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Return the vector that has these entries and is 0 elsewhere.

        Args:
            payload: The payload.
            agreement: Not used.
        """
        vector = torch.zeros(self.elements, dtype=payload[1].dtype, device=payload[1].device)
        self.add(payload, vector)
        return vector

    def add(self, payload: Payload, into: Tensor, agreement: Tensor | None = None) -> None:
        """Add the entries to a vector.

        Args:
            payload: The payload.
            into: The vector, changed in place.
            agreement: Not used.
        """
        into.index_add_(0, *payload)

    def remove_sent(
        self, payload: Payload, vector: Tensor, agreement: Tensor | None = None
    ) -> None:
        """Set the entries of a vector to 0.

        Args:
            payload: The payload that was sent.
            vector: The vector, changed in place.
            agreement: Not used.
        """
        vector.index_fill_(0, payload[0].long(), 0.0)

    def describe_payload(
        self, payload: Payload, entries: int | None
    ) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return the types and shapes of the payload of another rank.

        Args:
            payload: The payload of this rank.
            entries: Number of entries of the other payload, or None if it is the same.
        """
        return [(each.dtype, each.shape if entries is None else (entries,)) for each in payload]


def find_largest(vector: Tensor, count: int) -> Tensor:
    """Find the positions of exactly `count` entries of the largest magnitude.

    A bound is guessed from a sample, such that slightly more than `count` entries exceed it. Only
    these are sorted. To sort a million entries takes longer than to send them (Lin et al. 2018,
    section 5).

    Args:
        vector: The vector. Entries that are not finite count as the largest.
        count: Number of entries.

    Returns:
        The positions, in any order.
    """
    if count >= len(vector):
        return torch.arange(len(vector), device=vector.device)
    if vector.is_cuda or len(vector) < EXACT_SEARCH_LIMIT:
        return vector.abs().topk(count, sorted=False).indices
    numbers = vector.numpy()
    above = _find_above_bound(numbers, _guess_bound(vector, count))
    if (spare := len(above) - count) < 0:  # the sample does not represent the vector
        return vector.abs().topk(count, sorted=False).indices
    return torch.from_numpy(
        above[numpy.argpartition(numpy.abs(numbers[above]), spare)[spare:]] if spare else above
    )


def find_above_bound(vector: Tensor, bound: float) -> Tensor:
    """Find the positions of entries that are not between -bound and bound; this includes nan.

    Args:
        vector: The vector.
        bound: The bound.
    """
    bound = min(bound, torch.finfo(vector.dtype).max)
    if vector.is_cuda:
        return (vector.abs() <= bound).logical_not_().nonzero().view(-1)
    return torch.from_numpy(_find_above_bound(vector.numpy(), bound))


def _guess_bound(vector: Tensor, count: int) -> float:
    """Guess a bound that slightly more than `count` entries exceed.

    The sample is taken at equal distances. The distance is odd, because rows often have an even
    length.
    """
    sample = vector[:: len(vector) // SAMPLE_SIZE | 1].abs().numpy()
    wanted = count * len(sample) / len(vector)
    place = len(sample) - 1 - int(wanted + GUESS_MARGIN * (wanted + 1) ** 0.5)
    return float(numpy.partition(sample, place)[place]) if place >= 0 else -1.0


def _find_above_bound(vector: Any, bound: float) -> Any:
    """Find entries beyond a bound, as `find_above_bound` does.

    Eight entries are tested at a time, because single tests take twice as long. The magnitudes are
    not stored, because that would cost as much as everything else.
    """
    small = vector <= bound
    small &= vector >= -bound
    packed = numpy.packbits(small)
    mixed_bytes = numpy.flatnonzero(packed != 255)
    bits = numpy.flatnonzero(numpy.unpackbits(packed[mixed_bytes]) == 0)
    positions = 8 * mixed_bytes[bits >> 3] + (bits & 7)
    # the last group of eight may be incomplete
    return positions[: numpy.searchsorted(positions, len(vector))]
