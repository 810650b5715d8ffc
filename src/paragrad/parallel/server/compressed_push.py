"""A pushed vector, compressed: what stands for it travels, and the server makes the vector of
it before anything else.

Which vectors those are both sides know by the strategy. What is drawn goes by step, share and
place, so a push that is brought again is the same to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.errors import StepFailed
from paragrad.parallel.compression.codec import Codec, build_codec, derive_seed
from paragrad.parallel.compression.packing import (
    count_message_bytes,
    pack_payloads,
    unpack_payloads,
)
from paragrad.parallel.server.message_header import InvalidMessage, view_bytes
from paragrad.parallel.server.parameter_partition import VectorSlot
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.server import Server


class PushCodec:
    """Of one vector of a slice."""

    def __init__(self, compressor: Compressor, slot: VectorSlot) -> None:
        self.dtype = slot.dtype
        self.codec = build_codec(compressor, (slot.elements,))
        if (
            self.codec.has_variable_length
            or type(self.codec).propose_agreement is not Codec.propose_agreement
        ):
            raise StepFailed(
                f"{compressor}: what it sends varies in length, or its ranks agree on something "
                f"first, and "
                "workers push by themselves; compress by int8 or bf16, or by that under data(n)"
            )
        nothing = torch.zeros(slot.elements, dtype=get_accumulation_dtype(slot.dtype))
        self.payload_types = [self.codec.describe_payload(self.codec.compress(nothing), None)]
        self.nbytes = count_message_bytes(self.payload_types)

    def encode_vector(self, vector: Tensor, *seeds: int) -> memoryview:
        """The frame that stands for a vector. Raises StepFailed where it is not finite."""
        payload = self.codec.compress(
            vector.to(get_accumulation_dtype(vector.dtype)), None, derive_seed(*seeds)
        )
        return view_bytes(pack_payloads([payload], vector.device))

    def decode_vector(self, frame: Any) -> Tensor:
        """The vector. Raises Unfit."""
        if len(frame) != self.nbytes:
            raise InvalidMessage(
                f"{len(frame)} bytes, where what stands for this vector has {self.nbytes}"
            )
        (payload,) = unpack_payloads(
            torch.frombuffer(bytearray(frame), dtype=torch.uint8), self.payload_types
        )
        return self.codec.extract(payload).to(self.dtype)


def build_push_codec(strategy: Server, slot: VectorSlot) -> PushCodec | None:
    """None where it travels as it is, or lies."""
    gradients = not slot.is_added and slot.dtype.is_floating_point and slot.elements
    if (
        strategy.compress is None
        or not gradients
        or not strategy.compress.compresses((slot.elements,))
    ):
        return None
    return PushCodec(strategy.compress, slot)
