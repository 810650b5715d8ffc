"""Integers of eight bits, and a scale for each chunk.

This is quantization with random rounding.

This is QSGD (Alistarh et al. 2017) with the largest entry as the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite, split_into_chunks
from paragrad.strategies.compressors import CHUNK_ELEMENTS, Int8

MAX_LEVEL = 127


class Int8Codec(Codec):
    """A payload is (integers, the scale of each chunk in float32).

    A number is rounded up with a probability equal to its distance from the integer below. So the
    expectation of the result is the number itself.
    """

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Round the numbers at random to integers of their chunk's scale.

        Args:
            vector: The vector.
            agreement: Not used.
            seed: Seed of the rounding.

        Raises:
            StepFailed: A number is not finite.
        """
        rows = split_into_chunks(vector, CHUNK_ELEMENTS)
        scales = rows.abs().amax(1, keepdim=True).div_(MAX_LEVEL).float()
        refuse_nonfinite(scales)
        numbers = (
            (rows / scales.where(scales > 0, 1.0))
            .add_(draw_rounding_offsets(rows, seed))
            .floor_()
            .clamp_(-MAX_LEVEL, MAX_LEVEL)
        )
        return numbers.to(torch.int8).view(-1)[: self.elements], scales

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Multiply the integers by the scale of their chunk.

        Args:
            payload: The payload.
            agreement: Not used.
        """
        numbers, scales = payload
        return (split_into_chunks(numbers, CHUNK_ELEMENTS) * scales).view(-1)[: self.elements]


def draw_rounding_offsets(rows: Tensor, seed: int) -> Tensor:
    """Draw numbers in (0, 1) that are odd multiples of 2^-17.

    Near 127, float32 has no finer numbers. One draw gives four numbers, because draws take time.

    Args:
        rows: A tensor with the shape and the device of the result.
        seed: The seed.
    """
    generator = torch.Generator(rows.device).manual_seed(seed)
    draws = torch.empty(-(-rows.numel() // 4), dtype=torch.int64, device=rows.device).random_(
        -(2**63), None, generator=generator
    )
    return (
        draws.view(torch.int16)[: rows.numel()]
        .view_as(rows)
        .float()
        .mul_(2**-16)
        .add_(0.5 + 2**-17)
    )


def make_codec(compressor: Int8, shape: Sequence[int], key: int) -> Int8Codec:
    """Make the codec of a compressor.

    Args:
        compressor: The compressor.
        shape: Shape of the tensor.
        key: Not used.
    """
    return Int8Codec(shape)
