"""LARS: SGD with a learning rate for each layer, relative to the length of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paragrad.optim.layerwise import LayerwiseOptimizer


class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm 1).

    SGD with momentum, in which a parameter w with gradient g has a rate of its own::

        local = trust |w| / (|g| + weight_decay |w|)            1 where |w| or |g| is 0
        v     = momentum v + lr local (g + weight_decay w)
        w     = w - v

    v contains rates, unlike the buffer of torch's SGD. A rate that changes therefore needs Goyal's
    correction (arXiv 1706.02677, section 3, remark 3). It multiplies v by lr over the lr of the
    previous step. Here v / lr is stored, which is equivalent and needs no previous rate.

    The norms are those of whole tensors. In shared memory each tensor belongs to one rank. A
    strategy that divides tensors (state=fully_sharded, a partitioned tensor) refuses this
    optimizer.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapted: bool = True,
    ) -> None:
        """Create the optimizer.

        Args:
            params: The parameters, as torch's optimizers take them.

            lr: The global rate, which schedulers change.

            momentum: The momentum.

            weight_decay: The weight decay.

            trust: How much of its length a layer may move at lr 1.

            adapted: False in a parameter group that uses lr unchanged (local = 1). Later papers do
                so for parameters of one dimension (biases, norms).

        Raises:
            ValueError: A number is negative or not finite.
        """
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust},
            adapted=adapted,
        )

    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        state = self.state[parameter]
        move = gradient.add(parameter, alpha=decay) if decay else gradient.clone()
        if group["adapted"]:
            length = torch.linalg.vector_norm(parameter)
            gradient_length = torch.linalg.vector_norm(gradient)
            local_rate = group["trust"] * length / (gradient_length + decay * length)
            move.mul_(torch.where((length > 0) & (gradient_length > 0), local_rate, 1.0))
        if group["momentum"]:
            if "velocity" not in state:
                state["velocity"] = torch.zeros_like(parameter)
            move = state["velocity"].mul_(group["momentum"]).add_(move)
        parameter.sub_(group["lr"] * move)
