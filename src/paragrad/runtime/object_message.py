"""Python objects as tensors of bytes, to send them to other processes.

Objects are pickled. torch's own pickle of a tensor writes its storage by `torch.save`, which takes
several times as long as to copy the values; here they are copied.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy
import torch
from torch import Tensor

LENGTH_BYTES = 8
SHORT_BYTES = 248  # a flag, a reason or a few numbers travel in one message
HEAD_BYTES = LENGTH_BYTES + SHORT_BYTES


class _TensorPickler(pickle.Pickler):
    """A pickler that writes plain tensors of the host as arrays of bytes."""

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not Tensor
            or value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.requires_grad
            or value.is_quantized
            or value.is_conj()
            or value.is_neg()
            or not value.numel()
        ):
            return NotImplemented
        raw = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _rebuild_tensor, (raw, value.dtype, tuple(value.shape))


def _rebuild_tensor(raw: numpy.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def encode_object(value: Any) -> Tensor:
    """Pickle an object into a tensor of bytes.

    Args:
        value: The object.

    Returns:
        Its bytes, of shape (length,).
    """
    stream = io.BytesIO()
    _TensorPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def decode_object(data: Tensor) -> Any:
    """Unpickle an object from the bytes that `encode_object` made.

    Args:
        data: The bytes.
    """
    return pickle.loads(data.cpu().numpy().data)


def make_head(data: Tensor) -> Tensor:
    """Make the first message of an object: its length, and the object itself if it is short.

    Args:
        data: The bytes of the object, on the CPU.

    Returns:
        `HEAD_BYTES` bytes.
    """
    head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
    head[:LENGTH_BYTES] = torch.tensor([data.numel()]).view(torch.uint8)
    if data.numel() <= SHORT_BYTES:
        head[LENGTH_BYTES : LENGTH_BYTES + data.numel()] = data
    return head


def read_head(head: Tensor) -> tuple[int, Tensor | None]:
    """Read what `make_head` made.

    Args:
        head: The first message of an object.

    Returns:
        (length, data): the number of bytes of the object; its bytes, or None if they follow in a
        second message.
    """
    head = head.cpu()
    length = int(head[:LENGTH_BYTES].view(torch.int64))
    is_short = length <= SHORT_BYTES
    return length, head[LENGTH_BYTES : LENGTH_BYTES + length] if is_short else None
