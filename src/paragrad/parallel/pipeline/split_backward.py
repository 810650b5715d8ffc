"""Backward in two halves: gradients of what came in at once, those of weights later (Qi et al.
2024, arXiv 2401.10241).

Functions in which a weight meets the data run apart from the graph around them: its backward
asks them for the gradient of their input alone, and keeps that of their output for
`Deferring.weights`. Autograd computes both halves, so they are to the bit what one backward
gives (under autocast, of a weight that is met twice, but for the type in which its gradient is
summed). In between, a function keeps its input and the gradient of its output, and of the
output itself no more than an edge of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paragrad.engine.activation_meter import ActivationMeter, TrackedTensor
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor

WEIGHT_FUNCTIONS = (
    functional.linear,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    torch.embedding,
    functional.embedding,
    torch.addmm,
)


class DeferredWeightGradients(TorchFunctionMode):
    """Around a forward. moved: where it notes the weights whose gradients wait, by their ids;
    alive: counts the gradients that are kept.
    """

    def __init__(self, deferred_ids: set[int], meter: ActivationMeter | None = None) -> None:
        super().__init__()
        self.deferred_ids = deferred_ids
        self.meter = meter
        self.pending: list[tuple[GradientEdge, list[Tensor], Tensor, TrackedTensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # which asks for it of what is here
        if func in WEIGHT_FUNCTIONS and any(isinstance(each, ShardedTensor) for each in args):
            with self:
                return ShardedTensor.__torch_function__(func, types, args, kwargs)
        # what is given by its name has no place in the graph of its own; and torch.func takes
        # no functions such as ours
        if (
            func in WEIGHT_FUNCTIONS
            and torch.is_grad_enabled()
            and not any(isinstance(each, Tensor) for each in kwargs.values())
            and not torch._C._are_functorch_transforms_active()
        ):
            weights = [
                each for each in args if isinstance(each, nn.Parameter) and each.requires_grad
            ]
            if weights:
                self.deferred_ids.update(map(id, weights))
                return _SeparateGraph.apply(self, func, weights, kwargs, *args)
        return func(*args, **kwargs)

    def compute_weight_gradients(self) -> None:
        """The other half of every backward that was made since."""
        while self.pending:
            out, weights, gradient, _ = self.pending.pop(0)
            torch.autograd.backward(out, gradient, inputs=weights)


class _SeparateGraph(torch.autograd.Function):
    """A function with a graph of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredWeightGradients,
        func: Any,
        weights: list[Tensor],
        kwargs: Any,
        *args: Any,
    ) -> Tensor:
        own = {id(weight) for weight in weights}
        ctx.inputs = [
            each.detach().requires_grad_(each.requires_grad)
            if isinstance(each, Tensor) and id(each) not in own
            else each
            for each in args
        ]
        with torch.enable_grad():
            out = func(*ctx.inputs, **kwargs)
        ctx.deferring = deferred
        ctx.weights = weights
        ctx.out = get_gradient_edge(out)
        ctx.own = own
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        wanted = [
            isinstance(each, Tensor) and id(each) not in ctx.own and each.requires_grad
            for each in ctx.inputs
        ]
        inputs = [each for each, asked in zip(ctx.inputs, wanted, strict=True) if asked]
        found = iter(
            torch.autograd.grad(ctx.out, inputs, gradient, retain_graph=True) if inputs else ()
        )
        alive = ctx.deferring.meter
        ctx.deferring.pending.append(
            (ctx.out, ctx.weights, gradient, alive and alive.track_tensor(gradient))
        )
        ctx.out = None
        ctx.inputs = None
        return (None, None, None, None, *(next(found) if asked else None for asked in wanted))
