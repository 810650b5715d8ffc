"""A matrix as the product of two narrow ones: one step of the power method, which goes on from
the last (Vogels et al. 2019, arXiv 1905.13727, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite
from paragrad.strategies.compressors import PowerSgd, compute_matrix_shape


class PowerSgdCodec(Codec):
    """All ranks agree on P: the sum of M Q over ranks, by the Q of the last step, which is its
    memory, its columns made orthonormal. A payload is M' P, of which the sum is the next Q; P
    Q' is what it stands for.
    """

    def __init__(self, shape: Sequence[int], columns: int, key: int) -> None:
        super().__init__(shape)
        self.rows, self.row_length = compute_matrix_shape(shape)
        self.columns = min(columns, self.rows, self.row_length)
        self.key = key

    def propose_agreement(self, vector: Tensor) -> Tensor:
        # of other columns, or another cut
        if self.memory is None or self.memory.shape != (self.row_length, self.columns):
            self.memory = self._make_initial_factor()
        self.memory = self.memory.to(vector)
        # a column of zeros, once of a gradient of zeros, would stay so
        if not (there := self.memory.any(0)).all():
            self.memory = self.memory.where(there, self._make_initial_factor().to(vector))
        product = self._view_as_matrix(vector) @ self.memory
        refuse_nonfinite(product)
        return product

    def conclude_agreement(self, summed: Tensor) -> Tensor:
        return torch.linalg.qr(summed).Q

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        assert agreement is not None
        return (self._view_as_matrix(vector).T @ agreement,)

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        assert agreement is not None
        return (agreement @ payload[0].T).view(-1)

    def add(
        self, payload: Payload, into: Tensor, agreement: Tensor | None = None, scale: int = 1
    ) -> None:
        assert agreement is not None
        # without the product, which is as large
        self._view_as_matrix(into).addmm_(agreement, payload[0].T, alpha=scale)

    def remove_sent(
        self, payload: Payload, vector: Tensor, agreement: Tensor | None = None
    ) -> None:
        self.add(payload, vector, agreement, scale=-1)

    def adopt_sum(self, payload: Payload) -> None:
        self.memory = payload[0]

    def _make_initial_factor(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.key)
        return torch.randn(self.row_length, self.columns, generator=generator, dtype=torch.float64)

    def _view_as_matrix(self, vector: Tensor) -> Tensor:
        return vector.view(self.rows, self.row_length)


def make_codec(compressor: PowerSgd, shape: Sequence[int], key: int) -> PowerSgdCodec:
    return PowerSgdCodec(shape, compressor.columns, key)
