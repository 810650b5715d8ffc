"""The entries of largest magnitude, exactly so many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paragrad.parallel.compression.codec import Payload
from paragrad.parallel.compression.sparse import Sparse, largest
from paragrad.strategies.compressors import count_of


class Largest(Sparse):
    """ratio: of a tensor's elements."""

    def __init__(self, shape: Sequence[int], ratio: float) -> None:
        super().__init__(shape)
        self.ratio = ratio

    def compress(self, vector: Tensor, agreed: Tensor | None = None, draw: int = 0) -> Payload:
        return self.payload(vector, largest(vector, count_of(self.ratio, self.elements)))


def codec(compressor: Any, shape: Sequence[int], key: int) -> Largest:
    return Largest(shape, compressor.ratio)
