"""The loss scale of float16: gradients are multiplied by it, so that small ones do not become 0.

Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2. The rules and the
numbers are those of `torch.amp.GradScaler`. The scale is a power of two, so it rounds nothing.
"""

from __future__ import annotations

import torch

from paragrad.strategies.compressors import find_compressor
from paragrad.strategies.strategy import Strategy

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale is doubled
LEAST_SCALE = 2.0**-24  # below it, the smallest gradients of float16 are more than 1


class LossScale:
    """The loss scale of a training, the same on all ranks.

    Args:
        value: The scale, a power of two.
        good_steps: The steps since the last change.
        growth_interval: The steps without an overflow before the scale is doubled.

    Attributes:
        value: The present scale.
        good_steps: The steps since the last change.
        growth_interval: As the argument.
    """

    def __init__(
        self,
        value: float = INITIAL_SCALE,
        good_steps: int = 0,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        self.value = value
        self.good_steps = good_steps
        self.growth_interval = growth_interval

    @property
    def is_exhausted(self) -> bool:
        """Whether the scale is so small that gradients overflow for another reason."""
        return self.value < LEAST_SCALE

    def update(self, overflowed: bool) -> None:
        """Halve the scale after an overflow, and double it after many steps without one.

        Args:
            overflowed: Whether a gradient of the step overflowed, on any rank.
        """
        if overflowed:
            self.value /= 2.0
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value *= 2.0
            self.good_steps = 0

    def restore(self, value: float, good_steps: int) -> None:
        """Go on from a checkpoint.

        Args:
            value: The saved scale.
            good_steps: The saved number of steps since the last change.
        """
        self.value = value
        self.good_steps = good_steps


def has_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient of this rank is not finite.

    Args:
        optimizer: The optimizer over the parameters, or the parts of them, of this rank.
    """
    gradients = [
        each.grad.to_dense() if each.grad.is_sparse else each.grad
        for group in optimizer.param_groups
        for each in group["params"]
        if each.grad is not None and each.grad.numel()
    ]
    # a rank may have no gradients: of a part without parameters, or of a step that uses none
    return bool(gradients) and any(
        not bool(norm.isfinite()) for norm in torch._foreach_norm(gradients, float("inf"))
    )


def explain_no_loss_scale(strategy: Strategy) -> str | None:
    """Explain why a strategy has no loss scale, with the repair.

    Args:
        strategy: A resolved strategy.

    Returns:
        The explanation, or None if it has one.
    """
    if strategy.servers:
        reason = "servers update before a worker knows that a gradient overflowed"
    elif strategy.trains_clients or not strategy.guarantees.replicas_equal:
        reason = "workers step by themselves, each with its own scale"
    elif find_compressor(strategy) is not None:
        reason = "what a compressor keeps of a gradient that overflowed stays infinite"
    else:
        return None
    return f"float16 needs one loss scale for all ranks, and {reason}; train in bfloat16"
