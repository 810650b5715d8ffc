"""The step of an optimizer: without what serves only a profiler, and with torch's fast kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as of_torch

from paragrad.engine.optimizer.update_probe import ELEMENTWISE_OPTIMIZERS

# classes of torch that are made to update by operations on lists of tensors
FOREACH_OPTIMIZERS = tuple(
    kind for kind in ELEMENTWISE_OPTIMIZERS if kind not in (torch.optim.ASGD, torch.optim.Rprop)
)
# classes of torch that have a fused kernel for the CPU
FUSED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def _find_wrapper_code() -> Any:
    """Return the code of the function that torch puts around the step of every optimizer class."""
    return torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


# The step that torch wraps is called only if the wrapper is this one. A class may have another one,
# which may look the same (functools.wraps).
WRAPPER_CODE = _find_wrapper_code()


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Do what `optimizer.step()` does.

    torch wraps the step of every optimizer class. The wrapper calls hooks, and notes the step for
    a profiler (`Optimizer.profile_hook_step`). The note takes 20 us if no profiler runs: almost as
    long as the update of a small model. Without hooks and profiler, the step inside is called.

    Args:
        optimizer: The optimizer.
    """
    step = type(optimizer).step
    if (
        getattr(step, "__code__", None) is WRAPPER_CODE
        and "step" not in vars(optimizer)
        and not (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or of_torch._global_optimizer_pre_hooks
            or of_torch._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )
    ):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def step_with_fast_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's step with torch's fastest kernel for the CPU.

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
