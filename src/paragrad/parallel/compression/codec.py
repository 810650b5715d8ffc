"""The codec: what stands for one tensor in a message, and what becomes of it.

    agreed  = codec.settled(the sum over ranks of codec.asks(vector))       # of codecs that
    must agree on something first payload = codec.compress(vector, agreed) codec.take(payload,
    vector)                                 # the vector is what was not sent: the next step's
    feedback codec.add(payload, into)                                    # of every rank, or of
    the sum of all where payloads add up

Vectors are flat, real, and in float32 or finer (`values.wide`), whatever the parameter is. How
many bytes a payload has the compressor says, which is a value without torch
(`strategies/compressors.py`).
"""

from __future__ import annotations

import importlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.strategies.compressors import Compressor

Payload = tuple[Tensor, ...]

# modules with a function codec(compressor, shape, key)
CODEC_MODULES = {
    name: f"paragrad.parallel.compression.{module}"
    for name, module in {
        "threshold": "threshold",
        "top_k": "top_k",
        "dgc": "top_k",
        "one_bit": "one_bit",
        "int8": "int8",
        "power_sgd": "power_sgd",
        "bf16": "half",
        "fp16": "half",
    }.items()
}


class Codec(ABC):
    """Of one tensor: of that shape, in a vector. varies: how long a payload is depends on the
    values; otherwise those of all ranks are equally long;  memory: what it goes on from in the
    next step, the same on all ranks; a checkpoint holds it.
    """

    has_variable_length: ClassVar[bool] = False
    memory: Tensor | None = None

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.elements = torch.Size(shape).numel()

    def propose_agreement(self, vector: Tensor) -> Tensor | None:
        """What has to be summed over all ranks before anybody compresses; None for most."""
        return None

    def conclude_agreement(self, summed: Tensor) -> Tensor:
        """What all ranks agree on, by the sum of what they asked."""
        return summed

    @abstractmethod
    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """What stands for a vector, which stays as it is. draw: seeds what is drawn, if
        something is. Raises StepFailed where the vector is not finite.
        """

    @abstractmethod
    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """The vector that a payload stands for, or the sum of payloads where these add up."""

    def add(self, payload: Payload, into: Tensor, agreement: Tensor | None = None) -> None:
        into.add_(self.extract(payload, agreement))

    def remove_sent(
        self, payload: Payload, vector: Tensor, agreement: Tensor | None = None
    ) -> None:
        """Leave of a vector what was not sent."""
        vector.sub_(self.extract(payload, agreement))

    def adopt_sum(self, payload: Payload) -> None:  # noqa: B027        # most keep nothing
        """The sum of all ranks' payloads is known."""

    def describe_payload(
        self, payload: Payload, entries: int | None
    ) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Types and shapes of the payload of another rank; entries: how many it has, where that
        varies.
        """
        return [(each.dtype, tuple(each.shape)) for each in payload]


def build_codec(compressor: Compressor, shape: Sequence[int], key: int = 0) -> Codec:
    """The one of a compressor for tensors of a shape. key: seeds what all ranks draw alike. One
    of a user's own has a method codec(shape, key).
    """
    if compressor.name not in CODEC_MODULES:
        found = compressor.codec(shape, key)
        if not isinstance(found, Codec):
            raise StepFailed(
                f"the codec of {compressor} is a {type(found).__name__}; return a paragrad.Codec"
            )
        return found
    made: Any = importlib.import_module(CODEC_MODULES[compressor.name]).make_codec
    return made(compressor, shape, key)  # type: ignore[no-any-return]


NONFINITE_MESSAGE = (
    "its gradient is not finite (nan or inf), and nothing can be compressed then; lower "
    "the rate, or clip"
)


def refuse_nonfinite(values: Tensor) -> None:
    """Raises StepFailed where some of these numbers are not finite."""
    # in one pass; nan is both
    if values.numel() and not all(math.isfinite(float(each)) for each in values.aminmax()):
        raise StepFailed(NONFINITE_MESSAGE)


def derive_seed(*place: object) -> int:
    """The seed of what is drawn at a place: the same whenever it is drawn again."""
    return zlib.crc32("/".join(map(str, place)).encode())


def split_into_chunks(vector: Tensor, chunk: int) -> Tensor:
    """(chunks, chunk): a vector in rows, the last one filled up with zeros; a view where
    nothing is to be filled up.
    """
    rest = -vector.numel() % chunk
    return (torch.nn.functional.pad(vector, (0, rest)) if rest else vector).view(-1, chunk)
