"""Send the entries above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paragrad.parallel.compression.codec import Payload
from paragrad.parallel.compression.sparse import SparseCodec, find_above_bound
from paragrad.strategies.compressors import Threshold


class ThresholdCodec(SparseCodec):
    """Sends the entries with a magnitude above a threshold; their number depends on the values.

    Args:
        shape: Shape of the tensor.
        threshold: The threshold.
    """

    has_variable_length = True

    def __init__(self, shape: Sequence[int], threshold: float) -> None:
        super().__init__(shape)
        self.threshold = threshold

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Return the entries above the threshold.

        Args:
            vector: The vector.
            agreement: Not used.
            seed: Not used.

        Raises:
            StepFailed: An entry is not finite.
        """
        return self.make_payload(vector, find_above_bound(vector, self.threshold))


def make_codec(compressor: Threshold, shape: Sequence[int], key: int) -> ThresholdCodec:
    """Make the codec of a compressor.

    Args:
        compressor: The compressor.
        shape: Shape of the tensor.
        key: Not used.
    """
    return ThresholdCodec(shape, compressor.at)
