"""Two bytes for every number: bfloat16, whose range is float32's, or float16, whose is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite
from paragrad.strategies.compressors import Bf16, Fp16

MAX_SCALE_EXPONENT = 126  # the largest of a scale, and the least, of float32's exponents
# of float16's 65,504: the sum of all ranks is at most this, after scaling
SUM_LIMIT = 2.0**15


class BFloat16Codec(Codec):
    """A payload is the numbers in bfloat16."""

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        numbers = vector.bfloat16()
        refuse_nonfinite(numbers)
        return (numbers,)

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        return payload[0].float()


class Float16Codec(Codec):
    """A payload is the numbers in float16, times a power of two by which the sum of all ranks'
    largest fits.
    """

    def propose_agreement(self, vector: Tensor) -> Tensor:
        """In float64: the sum of two numbers that float32 holds it may not."""
        if not self.elements:
            return vector.new_zeros(1, dtype=torch.float64)
        largest = torch.stack(vector.aminmax()).abs().amax().view(1)
        refuse_nonfinite(largest)
        return largest.double()

    def conclude_agreement(self, summed: Tensor) -> Tensor:
        """The scale: the largest power of two that leaves room for the sum; of nothing but
        zeros, 1.
        """
        most = float(summed)
        return summed.new_tensor(
            2.0 ** min(MAX_SCALE_EXPONENT, math.floor(math.log2(SUM_LIMIT) - math.log2(most)))
            if most
            else 1.0
        )

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        assert agreement is not None
        return ((vector * float(agreement)).half(),)

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        assert agreement is not None
        # which float32 has not for what float64 alone holds
        scale = float(agreement)
        return (
            payload[0].float() if scale >= 2.0**-MAX_SCALE_EXPONENT else payload[0].double()
        ) / scale


def make_codec(compressor: Bf16 | Fp16, shape: Sequence[int], key: int) -> Codec:
    return Float16Codec(shape) if isinstance(compressor, Fp16) else BFloat16Codec(shape)
