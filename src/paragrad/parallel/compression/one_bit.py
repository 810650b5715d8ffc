"""Signs in bits; for each chunk two means, of the negative numbers and of the others.

This is 1-bit SGD with feedback.

Source: Seide et al. 2014, where the means are those of columns.
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
        """Keep the signs, and the two means of each chunk.

        Args:
            vector: The vector.
            agreement: Not used.
            seed: Not used.

        Raises:
            StepFailed: A number is not finite.
        """
        rows = split_into_chunks(vector, CHUNK_ELEMENTS)
        is_positive = rows >= 0
        real_lengths = torch.full((len(rows), 1), CHUNK_ELEMENTS, device=vector.device)
        # the zeros that fill up the last chunk would count as numbers that are not negative
        if len(rows):
            real_lengths[-1] = self.elements - (len(rows) - 1) * CHUNK_ELEMENTS
        above = rows.clamp(min=0).sum(1, keepdim=True)
        below = rows.sum(1, keepdim=True) - above
        positive_counts = is_positive.sum(1, keepdim=True) - (CHUNK_ELEMENTS - real_lengths)
        means = torch.cat(
            [
                above / positive_counts.clamp(min=1),
                below / (real_lengths - positive_counts).clamp(min=1),
            ],
            1,
        ).float()
        refuse_nonfinite(means)
        return pack_bits(is_positive.view(-1))[: -(-self.elements // 8)], means

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Return for each number the mean for its sign in its chunk.

        Args:
            payload: The payload.
            agreement: Not used.
        """
        packed, means = payload
        # multiply by 1 or 0: torch.where takes five times as long
        rows = split_into_chunks(unpack_bits(packed), CHUNK_ELEMENTS).to(means.dtype)
        return (rows * means[:, :1]).addcmul_(1 - rows, means[:, 1:]).view(-1)[: self.elements]


def pack_bits(flags: Tensor) -> Tensor:
    """Pack flags into bits: eight in a byte, the first one in the highest bit.

    Args:
        flags: The flags; their number is a multiple of eight.
    """
    if not flags.is_cuda:
        return torch.from_numpy(numpy.packbits(flags.numpy()))
    return (
        (flags.view(-1, 8) << torch.arange(7, -1, -1, device=flags.device)).sum(1).to(torch.uint8)
    )


def unpack_bits(bits: Tensor) -> Tensor:
    """Unpack flags from bits.

    Args:
        bits: The bytes.
    """
    if not bits.is_cuda:
        return torch.from_numpy(numpy.unpackbits(bits.numpy())).view(torch.bool)
    return (bits.view(-1, 1) >> torch.arange(7, -1, -1, device=bits.device) & 1).view(-1).bool()


def make_codec(compressor: OneBit, shape: Sequence[int], key: int) -> SignCodec:
    """Make the codec of a compressor.

    Args:
        compressor: The compressor.
        shape: Shape of the tensor.
        key: Not used.
    """
    return SignCodec(shape)
