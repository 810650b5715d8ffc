"""Compression of pushed vectors.

A compressed form of the vector travels, and the server decompresses it before anything else. Worker
and server both know from the strategy which vectors are compressed. Random numbers are derived from
step, share and place, so a push that is sent again has the same bits.
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
    """Compresses one vector of a slice.

    Args:
        compressor: The compressor of the strategy. Its payload must have a fixed length, and it
            must not need an agreement between ranks.
        slot: The vector.

    Attributes:
        dtype: Dtype of the vector.
        codec: Compresses the vector.
        payload_types: Description of the payload.
        nbytes: Bytes of the compressed form.
    """

    def __init__(self, compressor: Compressor, slot: VectorSlot) -> None:
        self.dtype = slot.dtype
        self.codec = build_codec(compressor, (slot.elements,))
        if (
            self.codec.has_variable_length
            or type(self.codec).propose_agreement is not Codec.propose_agreement
        ):
            raise StepFailed(
                f"{compressor}: what it sends varies in length, or its ranks agree on something "
                "first, and workers push by themselves; compress by int8 or bf16, or by that "
                "under data(n)"
            )
        zeros = torch.zeros(slot.elements, dtype=get_accumulation_dtype(slot.dtype))
        self.payload_types = [self.codec.describe_payload(self.codec.compress(zeros), None)]
        self.nbytes = count_message_bytes(self.payload_types)

    def encode_vector(self, vector: Tensor, *seeds: int) -> memoryview:
        """Compress a vector.

        Args:
            vector: The vector.
            seeds: Numbers from which the seed of random numbers is derived.

        Returns:
            The frame of the message.

        Raises:
            StepFailed: The vector is not finite.
        """
        payload = self.codec.compress(
            vector.to(get_accumulation_dtype(vector.dtype)), None, derive_seed(*seeds)
        )
        return view_bytes(pack_payloads([payload], vector.device))

    def decode_vector(self, frame: Any) -> Tensor:
        """Decompress a vector.

        Args:
            frame: The frame of the message.

        Raises:
            InvalidMessage: The frame has another length.
        """
        if len(frame) != self.nbytes:
            raise InvalidMessage(
                f"{len(frame)} bytes, where this vector has {self.nbytes} when compressed"
            )
        (payload,) = unpack_payloads(
            torch.frombuffer(bytearray(frame), dtype=torch.uint8), self.payload_types
        )
        return self.codec.extract(payload).to(self.dtype)


def build_push_codec(strategy: Server, slot: VectorSlot) -> PushCodec | None:
    """Build the codec of a vector.

    Args:
        strategy: The resolved strategy.
        slot: The vector.

    Returns:
        The codec, or None if the vector is not compressed.
    """
    has_gradients = not slot.is_added and slot.dtype.is_floating_point and slot.elements
    if (
        strategy.compress is None
        or not has_gradients
        or not strategy.compress.compresses((slot.elements,))
    ):
        return None
    return PushCodec(strategy.compress, slot)
