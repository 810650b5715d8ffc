"""A matrix as the product of two narrow ones: one step of the power method in every training step.

This is PowerSGD.

Each step continues from the last one (Vogels et al. 2019, arXiv 1905.13727, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite
from paragrad.strategies.compressors import PowerSgd, compute_matrix_shape


class PowerSgdCodec(Codec):
    """Compresses a matrix M into narrow factors P and Q.

    All ranks agree on P: the sum of M Q over ranks with orthonormal columns. Q comes from the last
    step and is the memory of the codec. A payload is M' P; the sum of the payloads is the next Q.
    The payload represents P Q'.

    Args:
        shape: Shape of the tensor.
        columns: Number of columns of the factors.
        key: Seed of the first Q.

    Attributes:
        rows: Rows of the matrix.
        row_length: Columns of the matrix.
        columns: Columns of the factors.
        key: Seed of the first Q.
    """

    def __init__(self, shape: Sequence[int], columns: int, key: int) -> None:
        super().__init__(shape)
        self.rows, self.row_length = compute_matrix_shape(shape)
        self.columns = min(columns, self.rows, self.row_length)
        self.key = key

    def propose_agreement(self, vector: Tensor) -> Tensor:
        """Return M Q.

        Args:
            vector: The vector of this rank.

        Raises:
            StepFailed: The product is not finite.
        """
        # the number of columns or the partition of the model has changed
        if self.memory is None or self.memory.shape != (self.row_length, self.columns):
            self.memory = self._make_initial_factor()
        self.memory = self.memory.to(vector)
        # a column of zeros (after a gradient of zeros) would stay zero
        if not (is_used := self.memory.any(0)).all():
            self.memory = self.memory.where(is_used, self._make_initial_factor().to(vector))
        product = self._view_as_matrix(vector) @ self.memory
        refuse_nonfinite(product)
        return product

    def conclude_agreement(self, summed: Tensor) -> Tensor:
        """Return P: the sum with orthonormal columns.

        Args:
            summed: The sum of M Q over ranks.
        """
        return torch.linalg.qr(summed).Q

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Return M' P.

        Args:
            vector: The vector.
            agreement: P.
            seed: Not used.
        """
        assert agreement is not None
        return (self._view_as_matrix(vector).T @ agreement,)

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Return P Q', flat.

        Args:
            payload: The payload, or the sum of payloads.
            agreement: P.
        """
        assert agreement is not None
        return (agreement @ payload[0].T).view(-1)

    def add(
        self, payload: Payload, into: Tensor, agreement: Tensor | None = None, scale: int = 1
    ) -> None:
        """Add P Q' to a vector.

        Args:
            payload: The payload, or the sum of payloads.
            into: The vector, changed in place.
            agreement: P.
            scale: Factor of the product.
        """
        assert agreement is not None
        # in one operation: the product alone would be as large as the matrix
        self._view_as_matrix(into).addmm_(agreement, payload[0].T, alpha=scale)

    def remove_sent(
        self, payload: Payload, vector: Tensor, agreement: Tensor | None = None
    ) -> None:
        """Subtract P Q' from a vector.

        Args:
            payload: The payload.
            vector: The vector, changed in place.
            agreement: P.
        """
        self.add(payload, vector, agreement, scale=-1)

    def adopt_sum(self, payload: Payload) -> None:
        """Keep the next Q.

        Args:
            payload: The sum of payloads.
        """
        self.memory = payload[0]

    def _make_initial_factor(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.key)
        return torch.randn(self.row_length, self.columns, generator=generator, dtype=torch.float64)

    def _view_as_matrix(self, vector: Tensor) -> Tensor:
        return vector.view(self.rows, self.row_length)


def make_codec(compressor: PowerSgd, shape: Sequence[int], key: int) -> PowerSgdCodec:
    """Make the codec of a compressor.

    Args:
        compressor: The compressor.
        shape: Shape of the tensor.
        key: Seed of the first Q.
    """
    return PowerSgdCodec(shape, compressor.columns, key)
