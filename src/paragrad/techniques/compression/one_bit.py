"""Signs in bits; for each chunk the mean of what is not negative, and that of what is (Seide et al. 2014, there by columns)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.strategies.compressors import CHUNK, OneBit
from paragrad.techniques.compression.codec import Codec, Payload, chunked, finite


class Signs(Codec):
    """A payload is (bits, 8 in a byte; two means of each chunk, in float32)."""

    def compress(self, vector: Tensor, agreed: Tensor | None = None, draw: int = 0) -> Payload:
        rows = chunked(vector, CHUNK)
        up = rows >= 0
        real = torch.full((len(rows), 1), CHUNK, device=vector.device)
        if len(rows):                               # what fills the last chunk up is 0, and would count among the others
            real[-1] = self.elements - (len(rows) - 1) * CHUNK
        above = rows.clamp(min=0).sum(1, keepdim=True)
        below = rows.sum(1, keepdim=True) - above
        counted = up.sum(1, keepdim=True) - (CHUNK - real)
        means = torch.cat([above / counted.clamp(min=1), below / (real - counted).clamp(min=1)], 1).float()
        finite(means)
        bits = up.view(-1, 8).to(torch.uint8)
        packed = bits[:, 0].clone()
        for place in range(1, 8):
            packed |= bits[:, place] << place
        return packed[:-(-self.elements // 8)], means

    def extract(self, payload: Payload, agreed: Tensor | None = None) -> Tensor:
        packed, means = payload
        up = torch.stack([packed >> place & 1 for place in range(8)], 1).view(-1).bool()
        rows = chunked(up, CHUNK)
        return torch.where(rows, means[:, :1], means[:, 1:]).view(-1)[:self.elements]


def codec(compressor: OneBit, shape: Sequence[int], key: int) -> Signs:
    return Signs(shape)
