"""Optimizers that go tensor by tensor, and look at the length of each."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LayerwiseOptimizer(Optimizer):
    """An update of each parameter that has a gradient. numbers: of the defaults, those that are
    to be from 0. Raises ValueError.
    """

    def __init__(self, params: Any, non_negative: dict[str, float], **other_defaults: Any) -> None:
        for name, value in non_negative.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number from 0, got {value}")
        super().__init__(params, {**non_negative, **other_defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update. closure: makes the loss anew, as torch's optimizers take it."""
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
        """Of one parameter, in place."""
