"""The entries above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paragrad.parallel.compression.codec import Payload
from paragrad.parallel.compression.sparse import Sparse, beyond
from paragrad.strategies.compressors import Threshold


class Above(Sparse):
    """How many there are depends on the values."""

    varies = True

    def __init__(self, shape: Sequence[int], at: float) -> None:
        super().__init__(shape)
        self.at = at

    def compress(self, vector: Tensor, agreed: Tensor | None = None, draw: int = 0) -> Payload:
        return self.payload(vector, beyond(vector, self.at))


def codec(compressor: Threshold, shape: Sequence[int], key: int) -> Above:
    return Above(shape, compressor.at)
