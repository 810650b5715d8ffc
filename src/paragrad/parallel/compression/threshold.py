"""The entries above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paragrad.parallel.compression.codec import Payload
from paragrad.parallel.compression.sparse import SparseCodec, find_above_bound
from paragrad.strategies.compressors import Threshold


class ThresholdCodec(SparseCodec):
    """How many there are depends on the values."""

    has_variable_length = True

    def __init__(self, shape: Sequence[int], threshold: float) -> None:
        super().__init__(shape)
        self.threshold = threshold

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        return self.make_payload(vector, find_above_bound(vector, self.threshold))


def make_codec(compressor: Threshold, shape: Sequence[int], key: int) -> ThresholdCodec:
    return ThresholdCodec(shape, compressor.at)
