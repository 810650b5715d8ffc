"""The entries of largest magnitude, exactly so many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paragrad.parallel.compression.codec import Payload
from paragrad.parallel.compression.sparse import SparseCodec, find_largest
from paragrad.strategies.compressors import count_top_entries


class TopKCodec(SparseCodec):
    """ratio: of a tensor's elements."""

    def __init__(self, shape: Sequence[int], ratio: float) -> None:
        super().__init__(shape)
        self.ratio = ratio

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        return self.make_payload(
            vector, find_largest(vector, count_top_entries(self.ratio, self.elements))
        )


def make_codec(compressor: Any, shape: Sequence[int], key: int) -> TopKCodec:
    return TopKCodec(shape, compressor.ratio)
