"""A matrix as the product of two narrow ones: one step of the power method, which goes on from
the last (Vogels et al. 2019, arXiv 1905.13727, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, finite
from paragrad.strategies.compressors import PowerSgd, matrix_of


class Factors(Codec):
    """All ranks agree on P: the sum of M Q over ranks, by the Q of the last step, which is its
    memory, its columns made orthonormal. A payload is M' P, of which the sum is the next Q; P
    Q' is what it stands for.
    """

    def __init__(self, shape: Sequence[int], columns: int, key: int) -> None:
        super().__init__(shape)
        self.rows, self.others = matrix_of(shape)
        self.columns = min(columns, self.rows, self.others)
        self.key = key

    def asks(self, vector: Tensor) -> Tensor:
        # of other columns, or another cut
        if self.memory is None or self.memory.shape != (self.others, self.columns):
            self.memory = self._anew()
        self.memory = self.memory.to(vector)
        # a column of zeros, once of a gradient of zeros, would stay so
        if not (there := self.memory.any(0)).all():
            self.memory = self.memory.where(there, self._anew().to(vector))
        product = self._matrix(vector) @ self.memory
        finite(product)
        return product

    def settled(self, summed: Tensor) -> Tensor:
        return torch.linalg.qr(summed).Q

    def compress(self, vector: Tensor, agreed: Tensor | None = None, draw: int = 0) -> Payload:
        assert agreed is not None
        return (self._matrix(vector).T @ agreed,)

    def extract(self, payload: Payload, agreed: Tensor | None = None) -> Tensor:
        assert agreed is not None
        return (agreed @ payload[0].T).view(-1)

    def add(
        self, payload: Payload, into: Tensor, agreed: Tensor | None = None, times: int = 1
    ) -> None:
        assert agreed is not None
        # without the product, which is as large
        self._matrix(into).addmm_(agreed, payload[0].T, alpha=times)

    def take(self, payload: Payload, vector: Tensor, agreed: Tensor | None = None) -> None:
        self.add(payload, vector, agreed, times=-1)

    def summed(self, payload: Payload) -> None:
        self.memory = payload[0]

    def _anew(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.key)
        return torch.randn(self.others, self.columns, generator=generator, dtype=torch.float64)

    def _matrix(self, vector: Tensor) -> Tensor:
        return vector.view(self.rows, self.others)


def codec(compressor: PowerSgd, shape: Sequence[int], key: int) -> Factors:
    return Factors(shape, compressor.columns, key)
