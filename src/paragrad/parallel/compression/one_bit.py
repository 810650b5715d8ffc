"""Signs in bits; for each chunk the mean of what is not negative, and that of what is (Seide et
al. 2014, there by columns).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite, split_into_chunks
from paragrad.strategies.compressors import CHUNK_ELEMENTS, OneBit


class SignCodec(Codec):
    """A payload is (bits, 8 in a byte; two means of each chunk, in float32)."""

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        rows = split_into_chunks(vector, CHUNK_ELEMENTS)
        up = rows >= 0
        real = torch.full((len(rows), 1), CHUNK_ELEMENTS, device=vector.device)
        # what fills the last chunk up is 0, and would count among the others
        if len(rows):
            real[-1] = self.elements - (len(rows) - 1) * CHUNK_ELEMENTS
        above = rows.clamp(min=0).sum(1, keepdim=True)
        below = rows.sum(1, keepdim=True) - above
        counted = up.sum(1, keepdim=True) - (CHUNK_ELEMENTS - real)
        means = torch.cat(
            [above / counted.clamp(min=1), below / (real - counted).clamp(min=1)], 1
        ).float()
        refuse_nonfinite(means)
        return pack_bits(up.view(-1))[: -(-self.elements // 8)], means

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        packed, means = payload
        # 1 or 0: torch.where takes five times as long
        rows = split_into_chunks(unpack_bits(packed), CHUNK_ELEMENTS).to(means.dtype)
        return (rows * means[:, :1]).addcmul_(1 - rows, means[:, 1:]).view(-1)[: self.elements]


def pack_bits(flags: Tensor) -> Tensor:
    """Flags, a multiple of eight, as bits: eight in a byte, the first in its highest."""
    if not flags.is_cuda:
        return torch.from_numpy(numpy.packbits(flags.numpy()))
    return (
        (flags.view(-1, 8) << torch.arange(7, -1, -1, device=flags.device)).sum(1).to(torch.uint8)
    )


def unpack_bits(bits: Tensor) -> Tensor:
    if not bits.is_cuda:
        return torch.from_numpy(numpy.unpackbits(bits.numpy())).view(torch.bool)
    return (bits.view(-1, 1) >> torch.arange(7, -1, -1, device=bits.device) & 1).view(-1).bool()


def make_codec(compressor: OneBit, shape: Sequence[int], key: int) -> SignCodec:
    return SignCodec(shape)
