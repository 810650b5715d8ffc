"""Values of a model that are not trained but that a forward pass can change.

These are buffers and frozen parameters. Without a work queue (bsp) they are exact, so they are
equal on all workers and stay with them. The first worker sends the changed values to a server, so
that another process can continue the training. They are serialized as torch saves tensors, and only
tensors are read from them.
"""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn


def collect_model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and frozen parameters of a model by name.

    Args:
        model: The model.
    """
    frozen = {
        name: each.detach() for name, each in model.named_parameters() if not each.requires_grad
    }
    return {**frozen, **dict(model.named_buffers())}


def estimate_buffer_bytes(model: nn.Module) -> int:
    """Return the maximum number of bytes of the serialized values.

    Args:
        model: The model.
    """
    return sum(each.nbytes + 4096 for each in collect_model_buffers(model).values())


def set_model_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Set such values in a model.

    Args:
        model: The model.
        values: The values by name. A buffer may have another shape than before.
    """
    current = collect_model_buffers(model)
    for name, value in values.items():
        if (
            name in current
            and current[name].shape == value.shape
            and current[name].dtype == value.dtype
        ):
            current[name].copy_(value)
        else:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = value.to(next(model.parameters()).device)


def serialize_tensors(tensors: dict[str, Tensor]) -> bytes:
    """Return tensors as bytes, as torch saves them.

    Args:
        tensors: The tensors by name.
    """
    file = io.BytesIO()
    torch.save({name: each.detach().cpu() for name, each in tensors.items()}, file)
    return file.getvalue()


def deserialize_tensors(text: bytes) -> dict[str, Tensor]:
    """Read tensors from bytes. torch refuses anything but tensors.

    Args:
        text: The bytes.

    Returns:
        The tensors by name.

    Raises:
        ValueError: The bytes hold something else.
    """
    tensors = torch.load(io.BytesIO(text), weights_only=True)
    if not isinstance(tensors, dict) or not all(
        isinstance(each, Tensor) for each in tensors.values()
    ):
        raise ValueError("no tensors by name")
    return tensors
