"""The codec: how one tensor is compressed into a message, and what the receivers do with it.

    agreement = codec.conclude_agreement(sum over ranks of codec.propose_agreement(vector))
    payload = codec.compress(vector, agreement)
    codec.remove_sent(payload, vector)      # the rest is the feedback of the next step
    codec.add(payload, into)                # for every rank, or for the sum if payloads add up

Only some codecs need the first line: those for which all ranks must agree on something first.

Vectors are flat, real, and in float32 or finer (`values.get_accumulation_dtype`), whatever the type
of the parameter is. The compressor says how many bytes a payload has. It is a value without torch
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

from paragrad.errors import Refused, StepFailed
from paragrad.notation.choices import find_renamed_member
from paragrad.strategies.compressors import Compressor

Payload = tuple[Tensor, ...]

# modules with a function make_codec(compressor, shape, key)
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


# members that had another name until version 0.1, and the names that they have now
RENAMED_CODEC_MEMBERS = {
    "asks": "propose_agreement",
    "settled": "conclude_agreement",
    "take": "remove_sent",
    "summed": "adopt_sum",
    "like": "describe_payload",
    "varies": "has_variable_length",
}


class Codec(ABC):
    """Compresses one tensor, which is given as a vector.

    Args:
        shape: Shape of the tensor.

    Attributes:
        has_variable_length: The length of a payload depends on the values. Otherwise the payloads
            of all ranks have the same length.
        memory: What the codec continues from in the next step, the same on all ranks. A checkpoint
            saves it.
        shape: Shape of the tensor.
        elements: Number of elements of the tensor.
    """

    has_variable_length: ClassVar[bool] = False
    memory: Tensor | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if problem := find_renamed_member(cls, RENAMED_CODEC_MEMBERS):
            raise Refused(problem)

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.elements = torch.Size(shape).numel()

    def propose_agreement(self, vector: Tensor) -> Tensor | None:
        """Return what must be summed over all ranks before any rank compresses.

        Args:
            vector: The vector of this rank.

        Returns:
            The tensor to sum; None for most codecs.
        """
        return None

    def conclude_agreement(self, summed: Tensor) -> Tensor:
        """Compute what all ranks agree on.

        Args:
            summed: The sum over ranks of `propose_agreement`.
        """
        return summed

    @abstractmethod
    def compress(self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0) -> Payload:
        """Compress a vector, which stays unchanged.

        Args:
            vector: The vector.
            agreement: What all ranks agree on, or None.
            seed: Seed of random draws, if the codec draws.

        Returns:
            The payload.

        Raises:
            StepFailed: The vector is not finite.
        """

    @abstractmethod
    def extract(self, payload: Payload, agreement: Tensor | None = None) -> Tensor:
        """Return the vector that a payload represents.

        Args:
            payload: A payload, or the sum of payloads if they add up.
            agreement: What all ranks agree on, or None.
        """

    def add(self, payload: Payload, into: Tensor, agreement: Tensor | None = None) -> None:
        """Add the vector that a payload represents to another vector.

        Args:
            payload: A payload, or the sum of payloads if they add up.
            into: The vector, changed in place.
            agreement: What all ranks agree on, or None.
        """
        into.add_(self.extract(payload, agreement))

    def remove_sent(
        self, payload: Payload, vector: Tensor, agreement: Tensor | None = None
    ) -> None:
        """Leave in a vector what was not sent.

        Args:
            payload: The payload that was sent.
            vector: The vector, changed in place.
            agreement: What all ranks agree on, or None.
        """
        vector.sub_(self.extract(payload, agreement))

    def adopt_sum(self, payload: Payload) -> None:  # noqa: B027        # most keep nothing
        """Take note of the sum of all ranks' payloads.

        Args:
            payload: The sum.
        """

    def describe_payload(
        self, payload: Payload, entries: int | None
    ) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return the types and shapes of the payload of another rank.

        Args:
            payload: The payload of this rank.
            entries: Number of entries of the other payload, if that varies; else None.
        """
        return [(each.dtype, tuple(each.shape)) for each in payload]


def build_codec(compressor: Compressor, shape: Sequence[int], key: int = 0) -> Codec:
    """Build the codec of a compressor for tensors of a shape.

    A compressor of the user has a method codec(shape, key).

    Args:
        compressor: The compressor.
        shape: Shape of the tensors.
        key: Seed of what all ranks draw with the same result.

    Raises:
        StepFailed: The compressor of the user returned something else than a codec.
    """
    if compressor.name not in CODEC_MODULES:
        codec = compressor.codec(shape, key)
        if not isinstance(codec, Codec):
            raise StepFailed(
                f"the codec of {compressor} is a {type(codec).__name__}; return a paragrad.Codec"
            )
        return codec
    make: Any = importlib.import_module(CODEC_MODULES[compressor.name]).make_codec
    return make(compressor, shape, key)  # type: ignore[no-any-return]


NONFINITE_MESSAGE = (
    "its gradient is not finite (nan or inf), and cannot be compressed; lower the rate, or clip"
)


def refuse_nonfinite(values: Tensor) -> None:
    """Refuse numbers that are not finite.

    Args:
        values: The numbers.

    Raises:
        StepFailed: Some of them are not finite.
    """
    # one pass finds all: if there is a nan, both the minimum and the maximum are nan
    if values.numel() and not all(math.isfinite(float(each)) for each in values.aminmax()):
        raise StepFailed(NONFINITE_MESSAGE)


def derive_seed(*place: object) -> int:
    """Derive the seed of a draw from its place, so that it can be drawn again.

    Args:
        *place: What identifies the draw.
    """
    return zlib.crc32("/".join(map(str, place)).encode())


def split_into_chunks(vector: Tensor, chunk: int) -> Tensor:
    """View a vector as rows.

    Args:
        vector: The vector.
        chunk: Length of a row.

    Returns:
        A tensor of shape (chunks, chunk). The last row is filled up with zeros. It is a view if
        nothing must be filled up.
    """
    rest = -vector.numel() % chunk
    return (torch.nn.functional.pad(vector, (0, rest)) if rest else vector).view(-1, chunk)
