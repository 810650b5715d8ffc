"""A pushed vector, compressed: what stands for it travels, and the server makes the vector of
it before anything else.

Which vectors those are both sides know by the strategy. What is drawn goes by step, share and
place, so a push that is brought again is the same to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paragrad.engine.state.values import wide
from paragrad.errors import StepFailed
from paragrad.parallel.compression.codec import Codec, codec_of, seeded
from paragrad.parallel.compression.packing import length_of, packed, unpacked
from paragrad.parallel.server.message_header import Unfit, bytes_of
from paragrad.parallel.server.parameter_partition import Slot
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.server import Server


class Parcel:
    """Of one vector of a slice."""

    def __init__(self, compressor: Compressor, slot: Slot) -> None:
        self.dtype = slot.dtype
        self.codec = codec_of(compressor, (slot.elements,))
        if self.codec.varies or type(self.codec).asks is not Codec.asks:
            raise StepFailed(
                f"{compressor}: what it sends varies in length, or its ranks agree on something "
                f"first, and "
                "workers push by themselves; compress by int8 or bf16, or by that under data(n)"
            )
        nothing = torch.zeros(slot.elements, dtype=wide(slot.dtype))
        self.kinds = [self.codec.like(self.codec.compress(nothing), None)]
        self.nbytes = length_of(self.kinds)

    def sent(self, vector: Tensor, *place: int) -> memoryview:
        """The frame that stands for a vector. Raises StepFailed where it is not finite."""
        payload = self.codec.compress(vector.to(wide(vector.dtype)), None, seeded(*place))
        return bytes_of(packed([payload], vector.device))

    def came(self, frame: Any) -> Tensor:
        """The vector. Raises Unfit."""
        if len(frame) != self.nbytes:
            raise Unfit(f"{len(frame)} bytes, where what stands for this vector has {self.nbytes}")
        (payload,) = unpacked(torch.frombuffer(bytearray(frame), dtype=torch.uint8), self.kinds)
        return self.codec.extract(payload).to(self.dtype)


def parcel_of(strategy: Server, slot: Slot) -> Parcel | None:
    """None where it travels as it is, or lies."""
    gradients = not slot.added and slot.dtype.is_floating_point and slot.elements
    if (
        strategy.compress is None
        or not gradients
        or not strategy.compress.compresses((slot.elements,))
    ):
        return None
    return Parcel(strategy.compress, slot)
