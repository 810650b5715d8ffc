"""Tensors as collectives take them, flat and contiguous, and as messages name them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragrad.shm.collectives import GroupAreas

FlatTensors = list[Tensor]
FlatOperation = Callable[[GroupAreas, FlatTensors, FlatTensors], None]  # on flat outputs and inputs


def run_on_flat_tensors(
    operation: FlatOperation, outputs: Sequence[Tensor], inputs: Sequence[Tensor], areas: GroupAreas
) -> None:
    """On flat tensors; outputs that are not contiguous get theirs copied back."""
    outs = [_flatten_tensor(each) for each in outputs]
    operation(areas, outs, [_flatten_tensor(each) for each in inputs])
    for place, output in enumerate(outputs):
        if not output.is_contiguous():
            output.detach().copy_(outs[place].view(output.shape))


def _flatten_tensor(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.contiguous().view(-1)


def check_dense_cpu_tensor(tensor: Tensor) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(
            f"the backend shm takes dense tensors of the CPU, got {tensor.layout} on "
            f"{tensor.device}; use "
            "nccl or gloo for others"
        )


def describe_tensors(operation: str, tensors: Sequence[Tensor]) -> str:
    """Such as `all_reduce SUM of float32 [1024], 4096 bytes`."""
    return _format_tensors(operation, *[(each.dtype, each.shape) for each in tensors])


@functools.lru_cache(maxsize=1024)
def _format_tensors(operation: str, *kinds: tuple[torch.dtype, torch.Size]) -> str:
    size = sum(shape.numel() * dtype.itemsize for dtype, shape in kinds)
    return (
        f"{operation} of "
        f"{', '.join(f'{_name_dtype(dtype)} {list(shape)}' for dtype, shape in kinds)}, "
        f"{size} bytes"
    )


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_tensor_dtype(tensor: Tensor) -> str:
    return _name_dtype(tensor.dtype)
