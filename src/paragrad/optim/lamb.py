"""LAMB: Adam with updates that are scaled to the length of each layer's weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paragrad.optim.layerwise import LayerwiseOptimizer


class Lamb(LayerwiseOptimizer):
    """Layer-wise adaptive moments for batch training.

    The source is You et al. 2020, arXiv 1904.00962, algorithm 2. In step t, for a parameter w with
    gradient g::

        m = b1 m + (1 - b1) g           v = b2 v + (1 - b2) g^2
        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
        w = w - lr |w| / |r| r          lr r where |w| or |r| is 0

    The paper's function phi of the norm of w is the identity. The norms are those of whole tensors,
    as in Lars.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapted: bool = True,
    ) -> None:
        """Create the optimizer.

        Args:
            params: The parameters, as torch's optimizers take them.

            lr: The learning rate.

            betas: The decay rates (b1, b2) of the two moments.

            eps: A small number that is added to the divisor.

            weight_decay: The weight decay.

            adapted: False in a parameter group that is updated as in AdamW (biases, norms).

        Raises:
            ValueError: A number is out of range.
        """
        if len(betas) != 2 or not all(0 <= each < 1 for each in betas):
            raise ValueError(f"betas must be two numbers from 0 and below 1, got {betas}")
        super().__init__(
            params,
            {"lr": lr, "eps": eps, "weight_decay": weight_decay},
            betas=tuple(betas),
            adapted=adapted,
        )

    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if parameter.is_complex():
            raise ValueError(
                "a parameter is complex, which the paper on LAMB does not define; use "
                "torch.optim.Adam, or Lars"
            )
        state = self.state[parameter]
        if not state:
            state.update(
                step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter)
            )
        state["step"] += 1
        mean = state["mean"].mul_(first).add_(gradient, alpha=1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        move = mean / (1 - first ** state["step"])
        move.div_(square.sqrt().div_(math.sqrt(1 - second ** state["step"])).add_(group["eps"]))
        move.add_(parameter, alpha=group["weight_decay"])
        if group["adapted"]:
            length = torch.linalg.vector_norm(parameter)
            move_length = torch.linalg.vector_norm(move)
            move.mul_(torch.where((length > 0) & (move_length > 0), length / move_length, 1.0))
        parameter.sub_(group["lr"] * move)
