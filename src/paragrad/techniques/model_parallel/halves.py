"""Backward in two halves: gradients of what came in at once, those of weights later (Qi et al. 2024, arXiv 2401.10241).

Functions in which a weight meets the data run apart from the graph around them: its backward asks them for the gradient of
their input alone, and keeps that of their output for `Deferring.weights`. Autograd computes both halves, so they are to the bit
what one backward gives. In between, a function keeps its input and the gradient of its output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FUNCTIONS = (functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
             torch.conv_transpose3d, torch.embedding, functional.embedding, torch.addmm)


class Deferring(TorchFunctionMode):
    """Around a forward. moved: bytes of weights whose gradients wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Tensor, list[Tensor], Tensor]] = []
        self.moved: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS and torch.is_grad_enabled():
            weights = [each for each in (*args, *kwargs.values()) if isinstance(each, nn.Parameter) and each.requires_grad]
            if weights:
                self.moved.update(map(id, weights))
                return _Apart.apply(self, func, weights, kwargs, *args)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def weights(self) -> None:
        """The other half of every backward that was made since."""
        for out, weights, gradient in self.waiting:
            torch.autograd.backward(out, gradient, inputs=weights)
        self.waiting.clear()


class _Apart(torch.autograd.Function):
    """A function with a graph of its own."""

    @staticmethod
    def forward(ctx: Any, deferring: Deferring, func: Any, weights: list[Tensor], kwargs: Any, *args: Any) -> Tensor:
        own = {id(weight) for weight in weights}
        ctx.inputs = [each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) and id(each) not in own
                      else each for each in args]
        with torch.enable_grad():
            out = func(*ctx.inputs, **kwargs)
        ctx.deferring, ctx.weights, ctx.out, ctx.own = deferring, weights, out, own
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        wanted = [isinstance(each, Tensor) and id(each) not in ctx.own and each.requires_grad for each in ctx.inputs]
        inputs = [each for each, asked in zip(ctx.inputs, wanted, strict=True) if asked]
        found = iter(torch.autograd.grad(ctx.out, inputs, gradient, retain_graph=True) if inputs else ())
        ctx.deferring.waiting.append((ctx.out, ctx.weights, gradient))
        ctx.out = None
        return (None, None, None, None, *(next(found) if asked else None for asked in wanted))
