"""Send a fixed number of entries, those of the largest magnitude.

This is top-k sparsification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paragrad.parallel.compression.codec import Payload
from paragrad.parallel.compression.sparse import SparseCodec, find_largest
from paragrad.strategies.compressors import count_top_entries


class TopKCodec(SparseCodec):
    """Sends the entries of the largest magnitude.

    Args:
        shape: Shape of the tensor.
        ratio: Fraction of the elements that is sent.
    """

    def __init__(self, shape: Sequence[int], ratio: float) -> None:
        super().__init__(shape)
        self.ratio = ratio

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Return the largest entries.

        Args:
            vector: The vector.
            agreement: Not used.
            seed: Not used.

        Raises:
            StepFailed: An entry is not finite.
        """
        return self.make_payload(
            vector, find_largest(vector, count_top_entries(self.ratio, self.elements))
        )


def make_codec(compressor: Any, shape: Sequence[int], key: int) -> TopKCodec:
    """Make the codec of a compressor.

    Args:
        compressor: The compressor, with a ratio.
        shape: Shape of the tensor.
        key: Not used.
    """
    return TopKCodec(shape, compressor.ratio)
