"""Two bytes for every number: bfloat16 or float16.

bfloat16 has the range of float32; float16 has a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import Codec, Payload, refuse_nonfinite
from paragrad.strategies.compressors import Bf16, Fp16

MAX_SCALE_EXPONENT = 126  # of a scale; float32 has exponents from -126 on
# after scaling, the sum over ranks is at most this; float16 allows 65,504
SUM_LIMIT = 2.0**15


class BFloat16Codec(Codec):
    """A payload contains the numbers in bfloat16."""

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Convert the vector to bfloat16.

        Args:
            vector: The vector.
            agreement: Not used.
            seed: Not used.

        Raises:
            StepFailed: A number is not finite, or too large for bfloat16.
        """
        numbers = vector.bfloat16()
        refuse_nonfinite(numbers)
        return (numbers,)

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Convert the payload to float32.

        Args:
            payload: The payload, or the sum of payloads.
            agreement: Not used.
        """
        return payload[0].float()


class Float16Codec(Codec):
    """A payload contains the numbers in float16, times a power of two.

    The scale is such that the sum of the largest numbers of all ranks fits.
    """

    def propose_agreement(self, vector: Tensor) -> Tensor:
        """Return the largest magnitude, in float64.

        float32 may not hold the sum of two numbers that it holds.

        Args:
            vector: The vector of this rank.

        Raises:
            StepFailed: A number is not finite.
        """
        if not self.elements:
            return vector.new_zeros(1, dtype=torch.float64)
        largest = torch.stack(vector.aminmax()).abs().amax().view(1)
        refuse_nonfinite(largest)
        return largest.double()

    def conclude_agreement(self, summed: Tensor) -> Tensor:
        """Return the scale: the largest power of two with which the sum fits.

        Args:
            summed: The sum of the largest magnitudes. If it is 0, the scale is 1.
        """
        largest = float(summed)
        return summed.new_tensor(
            2.0 ** min(MAX_SCALE_EXPONENT, math.floor(math.log2(SUM_LIMIT) - math.log2(largest)))
            if largest
            else 1.0
        )

    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Scale the vector and convert it to float16.

        Args:
            vector: The vector.
            agreement: The scale.
            seed: Not used.
        """
        assert agreement is not None
        return ((vector * float(agreement)).half(),)

    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Convert the payload to float32 (float64 if the numbers need it) and divide by the scale.

        Args:
            payload: The payload, or the sum of payloads.
            agreement: The scale.
        """
        assert agreement is not None
        # for numbers that only float64 holds, float32 cannot represent the scale
        scale = float(agreement)
        return (
            payload[0].float() if scale >= 2.0**-MAX_SCALE_EXPONENT else payload[0].double()
        ) / scale


def make_codec(compressor: Bf16 | Fp16, shape: Sequence[int], key: int) -> Codec:
    """Make the codec of a compressor.

    Args:
        compressor: The compressor.
        shape: Shape of the tensor.
        key: Not used.
    """
    return Float16Codec(shape) if isinstance(compressor, Fp16) else BFloat16Codec(shape)
