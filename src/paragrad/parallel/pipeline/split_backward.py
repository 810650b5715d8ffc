"""The backward in two halves (Qi et al. 2024, arXiv 2401.10241).

Gradients of inputs are computed at once, those of weights later. A function in which a weight meets
the data runs apart from the graph around it. The outer backward asks it only for the gradient of
its input. The gradient of its output is kept for
`DeferredWeightGradients.compute_weight_gradients`.

Autograd computes both halves, so the result equals that of one backward bit for bit. There is one
exception: under autocast, a weight that is used twice may have its gradient summed in another type.
Between the halves, a function keeps its input and the gradient of its output. Of the output itself
it keeps only an edge of the graph.
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
    """A mode for a forward that defers the gradients of weights.

    Attributes:
        deferred_ids: Receives the ids of the weights with deferred gradients.

        meter: Counts the gradients that are kept, if given.

        pending: The second half of each backward so far: (edge of the output, weights, gradient of
            the output, its entry in the meter).
    """

    def __init__(self, deferred_ids: set[int], meter: ActivationMeter | None = None) -> None:
        super().__init__()
        self.deferred_ids = deferred_ids
        self.meter = meter
        self.pending: list[tuple[GradientEdge, list[Tensor], Tensor, TrackedTensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # the rule of a sharded tensor calls the function again with local tensors
        if func in WEIGHT_FUNCTIONS and any(isinstance(each, ShardedTensor) for each in args):
            with self:
                return ShardedTensor.__torch_function__(func, types, args, kwargs)
        # Keyword arguments have no place in the separate graph, and torch.func does not take such
        # functions.
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
        """Compute the second half of all backwards so far."""
        while self.pending:
            out, weights, gradient, _ = self.pending.pop(0)
            torch.autograd.backward(out, gradient, inputs=weights)


class _SeparateGraph(torch.autograd.Function):
    """Runs a function in a graph of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredWeightGradients,
        func: Any,
        weights: list[Tensor],
        kwargs: Any,
        *args: Any,
    ) -> Tensor:
        weight_ids = {id(weight) for weight in weights}
        ctx.inputs = [
            each.detach().requires_grad_(each.requires_grad)
            if isinstance(each, Tensor) and id(each) not in weight_ids
            else each
            for each in args
        ]
        with torch.enable_grad():
            out = func(*ctx.inputs, **kwargs)
        ctx.deferring = deferred
        ctx.weights = weights
        ctx.out = get_gradient_edge(out)
        ctx.own = weight_ids
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        wanted = [
            isinstance(each, Tensor) and id(each) not in ctx.own and each.requires_grad
            for each in ctx.inputs
        ]
        inputs = [each for each, is_wanted in zip(ctx.inputs, wanted, strict=True) if is_wanted]
        input_gradients = iter(
            torch.autograd.grad(ctx.out, inputs, gradient, retain_graph=True) if inputs else ()
        )
        meter = ctx.deferring.meter
        ctx.deferring.pending.append(
            (ctx.out, ctx.weights, gradient, meter and meter.track_tensor(gradient))
        )
        ctx.out = None
        ctx.inputs = None
        return (
            None,
            None,
            None,
            None,
            *(next(input_gradients) if is_wanted else None for is_wanted in wanted),
        )
