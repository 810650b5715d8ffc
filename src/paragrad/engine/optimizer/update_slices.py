"""Slices: which rank sums and updates which part of all gradients.

They are used if the ranks of a host share parameters. A slice is a list of ranges, one for each
parameter that it touches. The optimizer determines which ranges of a parameter are possible.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from paragrad.engine.exchange import find_step_hook, step_optimizer
from paragrad.engine.optimizer.update_probe import ELEMENTWISE_OPTIMIZERS
from paragrad.strategies.strategy import PER_ELEMENT, PER_TENSOR

# classes of torch that are made to update by operations on lists of tensors
FOREACH_OPTIMIZERS = tuple(
    kind for kind in ELEMENTWISE_OPTIMIZERS if kind not in (torch.optim.ASGD, torch.optim.Rprop)
)
# classes of torch that have a fused kernel for the CPU
FUSED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
SLICE_GRAIN = 64  # elements: two ranks never write the same cache line of floats


@dataclass(frozen=True)
class ParameterRange:
    """Elements start to stop - 1 of a parameter.

    Attributes:
        index: Number of the parameter.
        start: The first element.
        stop: One more than the last element.
    """

    index: int
    start: int
    stop: int


def assign_slices(
    optimizer: torch.optim.Optimizer,
    kind: str,
    lengths: list[int],
    ranks: int,
    grain: int = SLICE_GRAIN,
) -> tuple[list[list[ParameterRange]], str]:
    """Divide the elements of all parameters among ranks.

    Args:
        optimizer: The optimizer.

        kind: The result of `find_update_granularity`.

        lengths: Number of elements of each parameter.

        ranks: Number of ranks.

        grain: A slice starts at a multiple of so many elements.

    Returns:
        (the ranges of every rank, the reason for this division).
    """
    name = type(optimizer).__name__
    if kind == PER_ELEMENT:
        return _split_evenly(
            lengths, ranks, grain
        ), f"{name} updates element by element: every rank 1/{ranks} of all"
    if kind == PER_TENSOR:
        return _assign_whole_tensors(
            lengths, ranks
        ), f"{name} needs whole tensors: each is one rank's"
    everything = [ParameterRange(index, 0, length) for index, length in enumerate(lengths)]
    reason = (
        "has a hook or a step of its own that may look at any parameter"
        if find_step_hook(optimizer)
        else "did not update element by element or tensor by tensor where it was tried"
    )
    return [everything] + [
        [] for _ in range(ranks - 1)
    ], f"{name} {reason}: rank 0 updates everything"


def step_with_fast_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Run optimizer.step() with torch's fastest kernel for the CPU.

    That is a fused kernel if torch has one, otherwise the operations on lists of tensors. By
    default torch chooses neither on a CPU. A choice of the user stays. So does an lr that is a
    tensor, which operations on lists refuse, and capturable=True, which torch reserves for GPUs. A
    checkpoint does not show what was chosen here.

    Args:
        optimizer: The optimizer.
    """
    groups = [
        group
        for group in optimizer.param_groups
        if type(optimizer) in FOREACH_OPTIMIZERS
        and group["foreach"] is None
        and group.get("fused") is None
        and not group["differentiable"]
        and not group.get("capturable")
        and not any(isinstance(each, torch.Tensor) for each in group.values())
    ]
    kernels = [
        "fused"
        if type(optimizer) in FUSED_OPTIMIZERS and _can_fuse(optimizer, group["params"])
        else "foreach"
        for group in groups
    ]
    for group, kernel in zip(groups, kernels, strict=True):
        group[kernel] = True
    try:
        step_optimizer(optimizer)
    finally:
        for group, kernel in zip(groups, kernels, strict=True):
            group[kernel] = None


def _can_fuse(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Return whether the fused kernel can update these parameters.

    It takes no complex numbers. It also does not take parameters with state and parameters without
    state in the same call.
    """
    has_state = {
        bool(optimizer.state.get(parameter))
        for parameter in parameters
        if parameter.grad is not None
    }
    return len(has_state) <= 1 and all(map(torch.is_floating_point, parameters))


def _split_evenly(lengths: list[int], ranks: int, grain: int) -> list[list[ParameterRange]]:
    total = sum(lengths)
    bounds = [min(total, -(-total * rank // ranks // grain) * grain) for rank in range(ranks)] + [
        total
    ]
    slices: list[list[ParameterRange]] = []
    for first, last in itertools.pairwise(bounds):
        offset = 0
        ranges = []
        for index, length in enumerate(lengths):
            start = max(first, offset) - offset
            stop = min(last, offset + length) - offset
            if start < stop:
                ranges.append(ParameterRange(index, start, stop))
            offset += length
        slices.append(ranges)
    return slices


def _assign_whole_tensors(lengths: list[int], ranks: int) -> list[list[ParameterRange]]:
    """Assign each tensor to the rank with the smallest load, the longest tensor first."""
    slices: list[list[ParameterRange]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = loads.index(min(loads))
        slices[rank].append(ParameterRange(index, 0, lengths[index]))
        loads[rank] += lengths[index]
    return [sorted(ranges, key=lambda each: each.index) for ranges in slices]
