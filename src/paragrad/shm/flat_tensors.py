"""Tensors as collectives take them (flat and contiguous), and their description in messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragrad.shm.collectives import GroupAreas

FlatTensors = list[Tensor]
# (areas, outputs, inputs) of flat tensors
FlatOperation = Callable[[GroupAreas, FlatTensors, FlatTensors], None]


def run_on_flat_tensors(
    operation: FlatOperation, outputs: Sequence[Tensor], inputs: Sequence[Tensor], areas: GroupAreas
) -> None:
    """Run an operation on flat tensors, and copy the results into outputs that are not contiguous.

    Args:
        operation: The operation.
        outputs: Tensors that take the results.
        inputs: Tensors that the operation reads.
        areas: The areas of the group.
    """
    flat_outputs = [_flatten_tensor(each) for each in outputs]
    operation(areas, flat_outputs, [_flatten_tensor(each) for each in inputs])
    for index, output in enumerate(outputs):
        if not output.is_contiguous():
            output.detach().copy_(flat_outputs[index].view(output.shape))


def _flatten_tensor(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.contiguous().view(-1)


def check_dense_cpu_tensor(tensor: Tensor) -> None:
    """Check that the backend can take a tensor.

    Args:
        tensor: The tensor.

    Raises:
        ValueError: The tensor is not dense or not on the CPU.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(
            f"the backend shm takes dense tensors of the CPU, got {tensor.layout} on "
            f"{tensor.device}; use nccl or gloo for others"
        )


def describe_tensors(operation: str, tensors: Sequence[Tensor]) -> str:
    """Describe an operation and its tensors: `all_reduce SUM of float32 [1024], 4096 bytes`.

    Args:
        operation: The name of the operation.
        tensors: The tensors.
    """
    return _format_tensors(operation, *[(each.dtype, each.shape) for each in tensors])


@functools.lru_cache(maxsize=1024)
def _format_tensors(operation: str, *kinds: tuple[torch.dtype, torch.Size]) -> str:
    size = sum(shape.numel() * dtype.itemsize for dtype, shape in kinds)
    return (
        f"{operation} of "
        f"{', '.join(f'{_name_dtype(dtype)} {list(shape)}' for dtype, shape in kinds)}, {size} "
        "bytes"
    )


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_tensor_dtype(tensor: Tensor) -> str:
    """Name the type of a tensor, such as float32.

    Args:
        tensor: The tensor.
    """
    return _name_dtype(tensor.dtype)
