"""Base of optimizers that update one tensor at a time and use its length."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LayerwiseOptimizer(Optimizer):
    """An optimizer that updates each parameter with a gradient by itself."""

    def __init__(self, params: Any, non_negative: dict[str, float], **other_defaults: Any) -> None:
        """Check the options and create the optimizer.

        Args:
            params: The parameters, as torch's optimizers take them.
            non_negative: The defaults that must be finite numbers from 0.
            **other_defaults: The other defaults.

        Raises:
            ValueError: A number is negative or not finite.
        """
        for name, value in non_negative.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number from 0, got {value}")
        super().__init__(params, {**non_negative, **other_defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update all parameters once.

        Args:
            closure: Computes the loss again, as torch's optimizers take it.

        Returns:
            The loss of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place."""
