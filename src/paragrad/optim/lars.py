"""LARS: a learning rate for every layer, so that none is moved by much more of its length than
another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paragrad.optim.layerwise import LayerwiseOptimizer


class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm
    1): SGD with momentum, in which a parameter w with gradient g has a rate of its own,

        local = trust |w| / (|g| + weight_decay |w|)            1 where |w| or |g| is 0
        v     = momentum v + lr local (g + weight_decay w)
        w     = w - v

    lr: the global rate, of which schedulers speak;  trust: how much of its length a layer may
    move at lr 1;  adapted: False in a group whose parameters take lr as it is (local = 1):
    those of one dimension (biases, norms), as later papers have it.

    v holds rates, unlike the buffer of torch's SGD, so a rate that changes needs Goyal's
    correction (arXiv 1706.02677, section 3, remark 3): v is multiplied by lr over that of the
    step before. It is kept as v / lr, which is the same and knows no step before. The norms are
    those of whole tensors: in shared memory each tensor is one rank's, and a strategy that
    divides tensors (state=fully_sharded, a cut one) refuses. Raises ValueError.
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
            slope = torch.linalg.vector_norm(gradient)
            local = group["trust"] * length / (slope + decay * length)
            move.mul_(torch.where((length > 0) & (slope > 0), local, 1.0))
        if group["momentum"]:
            if "velocity" not in state:
                state["velocity"] = torch.zeros_like(parameter)
            move = state["velocity"].mul_(group["momentum"]).add_(move)
        parameter.sub_(group["lr"] * move)
