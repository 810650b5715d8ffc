"""What a training has beside its parameters: buffers, and frozen parameters, that forwards
change.

Under bsp it is exact, and so the same on all workers: it stays with them, and the first one
tells a server what changed, for whoever may have to go on. It travels as torch saves tensors,
and is read as tensors alone.
"""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn


def collect_model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What of a model is not trained, and a forward may change."""
    frozen = {
        name: each.detach() for name, each in model.named_parameters() if not each.requires_grad
    }
    return {**frozen, **dict(model.named_buffers())}


def estimate_buffer_bytes(model: nn.Module) -> int:
    """Bytes that all of it takes at most, as it travels."""
    return sum(each.nbytes + 4096 for each in collect_model_buffers(model).values())


def set_model_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Such values into a model. A buffer may have another shape than it began with."""
    now = collect_model_buffers(model)
    for name, value in values.items():
        if name in now and now[name].shape == value.shape and now[name].dtype == value.dtype:
            now[name].copy_(value)
        else:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = value.to(next(model.parameters()).device)


def serialize_tensors(tensors: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save({name: each.detach().cpu() for name, each in tensors.items()}, file)
    return file.getvalue()


def deserialize_tensors(text: bytes) -> dict[str, Tensor]:
    """Tensors alone: whatever else is in it is refused by torch."""
    found = torch.load(io.BytesIO(text), weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ValueError("no tensors by name")
    return found
