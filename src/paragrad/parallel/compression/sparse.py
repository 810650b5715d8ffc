"""Entries of a vector: where, and what is there. And which are the largest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite
from paragrad.strategies.compressors import count_index_bytes

SAMPLE_SIZE = 8192  # entries looked at to guess the least of the largest
GUESS_MARGIN = 4.0  # standard deviations of that guess, so that it is rarely too high
EXACT_SEARCH_LIMIT = 1 << 15  # of fewer entries the largest are found without a guess


class SparseCodec(Codec):
    """A payload is (positions, values); positions differ from each other."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.index_dtype = torch.int32 if count_index_bytes(self.elements) == 4 else torch.int64

    def make_payload(self, vector: Tensor, positions: Tensor) -> Payload:
        values = vector.index_select(0, positions)
        refuse_nonfinite(values)
        return positions.to(self.index_dtype), values

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        found = torch.zeros(self.elements, dtype=payload[1].dtype, device=payload[1].device)
        self.add(payload, found)
        return found

    def add(self, payload: Payload, into: Tensor, agreement: Tensor | None = None) -> None:
        into.index_add_(0, *payload)

    def remove_sent(
        self, payload: Payload, vector: Tensor, agreement: Tensor | None = None
    ) -> None:
        vector.index_fill_(0, payload[0].long(), 0.0)

    def describe_payload(
        self, payload: Payload, entries: int | None
    ) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(each.dtype, each.shape if entries is None else (entries,)) for each in payload]


def find_largest(vector: Tensor, count: int) -> Tensor:
    """Positions of exactly that many entries of largest magnitude; what is not finite counts as
    largest.

    A bound is guessed from a sample, so that little more than the wanted lies above it, and
    among those they are found: sorting out all of a million entries takes longer than sending
    them would (Lin et al. 2018, section 5).
    """
    if count >= len(vector):
        return torch.arange(len(vector), device=vector.device)
    if vector.is_cuda or len(vector) < EXACT_SEARCH_LIMIT:
        return vector.abs().topk(count, sorted=False).indices
    numbers = vector.numpy()
    above = _find_above_bound(numbers, _guess_bound(vector, count))
    if (spare := len(above) - count) < 0:  # the sample was not like the rest
        return vector.abs().topk(count, sorted=False).indices
    return torch.from_numpy(
        above[numpy.argpartition(numpy.abs(numbers[above]), spare)[spare:]] if spare else above
    )


def find_above_bound(vector: Tensor, bound: float) -> Tensor:
    """Positions of entries that are not between -bound and the bound; nan is not."""
    bound = min(bound, torch.finfo(vector.dtype).max)
    if vector.is_cuda:
        return (vector.abs() <= bound).logical_not_().nonzero().view(-1)
    return torch.from_numpy(_find_above_bound(vector.numpy(), bound))


def _guess_bound(vector: Tensor, count: int) -> float:
    """A bound that a little more than so many entries exceed, by a sample at even distances
    (odd ones: rows are often of even lengths).
    """
    sample = vector[:: len(vector) // SAMPLE_SIZE | 1].abs().numpy()
    wanted = count * len(sample) / len(vector)
    place = len(sample) - 1 - int(wanted + GUESS_MARGIN * (wanted + 1) ** 0.5)
    return float(numpy.partition(sample, place)[place]) if place >= 0 else -1.0


def _find_above_bound(vector: numpy.ndarray, bound: float) -> numpy.ndarray:  # type: ignore[type-arg]
    """As `beyond`. Of eight entries at a time it is seen that none is: one by one takes twice
    as long; and magnitudes that are written down cost as much as all the rest.
    """
    small = vector <= bound
    small &= vector >= -bound
    packed = numpy.packbits(small)
    some = numpy.flatnonzero(packed != 255)
    bits = numpy.flatnonzero(numpy.unpackbits(packed[some]) == 0)
    found = 8 * some[bits >> 3] + (bits & 7)
    # the last eight may not be full
    return found[: numpy.searchsorted(found, len(vector))]
