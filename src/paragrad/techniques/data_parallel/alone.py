"""The exchange of a world of one, and the update of whoever holds all gradients: serial's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.jobs.loss import Summed
from paragrad.techniques.updating import in_eval_mode, set_mode

OptimizerState = dict[Tensor, dict[str, Any]]       # by parameter


class Alone:
    """Gradients stay where backward puts them: nothing is exchanged.

    An exchange is asked, in every step: begin(); per micro-batch `micro_batch`, forward and backward of `module`; finish();
    counted(); average(); update(). `stop`, set before the last micro-batch: this rank was asked to stop;  `doubt`: of its
    weight, what may be that of nothing (`Summed.doubtful`);  sent: bytes by kind in this step;  largest: bytes it keeps in
    memory;  sharing: ranks that hold the parameters together.
    """
    sharing = 1
    stop = False
    doubt = 0.0

    def __init__(self, module: Summed, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
        self.summed, self.optimizer, self.clip_norm = module, optimizer, clip_norm
        self.module: nn.Module = module
        self.every = list(module.model.parameters())
        self.sent: dict[str, dict[str, Any]] = {}
        self.largest = 0

    def begin(self) -> None:
        """A step begins."""
        set_mode(self.optimizer, "train")

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Parameters as an optimizer with modes wants them evaluated; afterwards as they were. Collective."""
        return in_eval_mode(self.optimizer, self.every)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch."""
        return contextlib.nullcontext()

    def finish(self, weight: float, loss: float) -> None:
        """After the last backward, with this rank's own sums over the micro-batches."""
        self.told = [weight, loss, float(self.stop), self.doubt]

    def counted(self) -> list[float]:
        """(weight, loss, ranks asked to stop, doubtful weight), summed over ranks."""
        return self.told

    def average(self, weight: float) -> None:
        """The one division by the global weight."""
        gradients = [parameter.grad for parameter in self.every if parameter.grad is not None]
        torch._foreach_div_(gradients, weight)

    def averaged(self) -> dict[str, Tensor | None]:
        """The mean gradient of every parameter, between `average` and `update`. Collective."""
        return self.gradients()

    def update(self) -> None:
        """Clipping and the optimizer."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.every, self.clip_norm)
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter as the last update used it (mean, clipped)."""
        return {name: parameter.grad for name, parameter in self.summed.model.named_parameters()}

    def optimizer_state(self) -> OptimizerState:
        """The optimizer's state in serial shapes, by parameter; whole on rank 0. Collective."""
        return dict(self.optimizer.state)

    def count(self, kind: str, number: int, *, computed: bool) -> None:
        """Bytes of a kind that this rank sends in this step; computed: by a closed form."""
        before = self.sent.get(kind, {"bytes": 0})["bytes"]
        self.sent[kind] = {"bytes": before + number, "computed": computed}

    def close(self) -> None:
        """Let go of what the exchange holds; the model is a plain one again."""
