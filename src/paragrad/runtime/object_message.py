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
