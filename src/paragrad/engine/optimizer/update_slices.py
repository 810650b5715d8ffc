"""Slices: which rank adds up and updates which part of all gradients, where parameters are
shared by the ranks of a host.

A slice is a list of stretches, one per parameter it touches. Which ones may be cut out of a
parameter depends on the optimizer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from paragrad.engine.optimizer.update_probe import find_step_hook
from paragrad.strategies.strategy import PER_ELEMENT, PER_TENSOR

# torch's own classes with an update by operations over lists of tensors
FOREACH_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
# have a fused kernel for the CPU
FUSED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
SLICE_GRAIN = 64  # elements: no cache line of a float's is written by two ranks


@dataclass(frozen=True)
class ParameterRange:
    """Elements start to stop of parameter number `index`."""

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
    """(the stretches of every rank, why so), for parameters of some lengths (elements); kind:
    what `updates_by` found.
    """
    name = type(optimizer).__name__
    if kind == PER_ELEMENT:
        return _split_evenly(
            lengths, ranks, grain
        ), f"{name} updates element by element: every rank 1/{ranks} of all"
    if kind == PER_TENSOR:
        return _assign_whole_tensors(
            lengths, ranks
        ), f"{name} wants whole tensors: each is one rank's"
    everything = [ParameterRange(index, 0, length) for index, length in enumerate(lengths)]
    why = (
        "has a hook or a step of its own that may look at any parameter"
        if find_step_hook(optimizer)
        else "did not update element by element or tensor by tensor where it was tried"
    )
    return [everything] + [[] for _ in range(ranks - 1)], f"{name} {why}: rank 0 updates everything"


def step_with_fast_kernels(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step() by torch's fused kernel where it has one for the CPU, otherwise by
    operations over lists of tensors.

    torch by itself chooses neither on a CPU. What its user chose stays (so does an lr that is a
    tensor, which lists refuse, and capturable=True, of which torch says that it is for GPUs);
    no checkpoint says what was chosen here.
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
        optimizer.step()
    finally:
        for group, kernel in zip(groups, kernels, strict=True):
            group[kernel] = None


def _can_fuse(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """The fused kernels take no complex numbers, and not at once what had a gradient before and
    what has its first.
    """
    met = {
        bool(optimizer.state.get(parameter))
        for parameter in parameters
        if parameter.grad is not None
    }
    return len(met) <= 1 and all(map(torch.is_floating_point, parameters))


def _split_evenly(lengths: list[int], ranks: int, grain: int) -> list[list[ParameterRange]]:
    total = sum(lengths)
    cuts = [min(total, -(-total * rank // ranks // grain) * grain) for rank in range(ranks)] + [
        total
    ]
    found: list[list[ParameterRange]] = []
    for first, last in itertools.pairwise(cuts):
        begin = 0
        stretches = []
        for index, length in enumerate(lengths):
            start = max(first, begin) - begin
            stop = min(last, begin + length) - begin
            if start < stop:
                stretches.append(ParameterRange(index, start, stop))
            begin += length
        found.append(stretches)
    return found


def _assign_whole_tensors(lengths: list[int], ranks: int) -> list[list[ParameterRange]]:
    """The longest first, each to the rank that has least."""
    found: list[list[ParameterRange]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = loads.index(min(loads))
        found[rank].append(ParameterRange(index, 0, lengths[index]))
        loads[rank] += lengths[index]
    return [sorted(stretches, key=lambda stretch: stretch.index) for stretches in found]
