"""Tensors as collectives take them, flat and contiguous, and as messages name them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragrad.shm.collectives import Port

Flats = list[Tensor]
Run = Callable[[Port, Flats, Flats], None]  # on flat outputs and inputs


def performed(run: Run, outputs: Sequence[Tensor], inputs: Sequence[Tensor], port: Port) -> None:
    """On flat tensors; outputs that are not contiguous get theirs copied back."""
    outs = [_flat(each) for each in outputs]
    run(port, outs, [_flat(each) for each in inputs])
    for place, output in enumerate(outputs):
        if not output.is_contiguous():
            output.detach().copy_(outs[place].view(output.shape))


def _flat(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.contiguous().view(-1)


def check(tensor: Tensor) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(
            f"the backend shm takes dense tensors of the CPU, got {tensor.layout} on "
            f"{tensor.device}; use "
            "nccl or gloo for others"
        )


def described(what: str, tensors: Sequence[Tensor]) -> str:
    """Such as `all_reduce SUM of float32 [1024], 4096 bytes`."""
    return _described(what, *[(each.dtype, each.shape) for each in tensors])


@functools.lru_cache(maxsize=1024)
def _described(what: str, *kinds: tuple[torch.dtype, torch.Size]) -> str:
    size = sum(shape.numel() * dtype.itemsize for dtype, shape in kinds)
    return (
        f"{what} of {', '.join(f'{_name(dtype)} {list(shape)}' for dtype, shape in kinds)}, "
        f"{size} bytes"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_of(tensor: Tensor) -> str:
    return _name(tensor.dtype)
