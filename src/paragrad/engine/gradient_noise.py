"""What the gradient noise scale is made of: how long the gradient of a few samples is, and that
of all.

Of a rank's first micro-batch it is taken as backward leaves it, before anything is exchanged,
fed back or clipped; of the whole batch once it is a mean. No message is sent for it: each rank
writes its own into the record, which makes the scale of all (`record.noise_scale`). In a step
that is measured every gradient is read twice more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from paragrad.engine.state.values import wide
from paragrad.strategies.compressors import compressor_of
from paragrad.strategies.strategy import Strategy


class GradientNorms:
    """Of one rank. every: measured in every so many steps, from the first on (0: never);  told:
    of this step [|g|^2 of the first micro-batch, what that weighs, |g|^2 of the whole batch],
    or None.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], every: int) -> None:
        self.every = every
        self.told: list[float] | None = None
        self.on = False  # is this step measured?
        # of the first micro-batch, while its backward runs
        self.squares: dict[int, Tensor] | None = None
        self.first: tuple[float, float] | None = None
        self.handles = [
            each.register_post_accumulate_grad_hook(self._accumulated)
            for each in parameters
            if each.requires_grad and every
        ]

    def begin(self, step: int, rehearsed: bool) -> None:
        """A step begins. rehearsed: it is put back."""
        self.on = bool(self.every) and step % self.every == 0 and not rehearsed
        self.first = None
        self.told = None

    @contextlib.contextmanager
    def over(self, number: int, divisor: float) -> Iterator[None]:
        """Around the backward of a micro-batch. divisor: by which its gradient becomes a mean,
        0 where nothing counts.
        """
        if number or not self.on:
            yield
            return
        self.squares = {}
        try:
            yield
            if divisor and self.squares:
                self.first = _sum(self.squares.values()) / divisor**2, divisor
        finally:
            self.squares = None

    def _accumulated(self, parameter: Tensor) -> None:
        if self.squares is not None and parameter.grad is not None:
            self.squares[id(parameter)] = _square(parameter.grad)

    def mean(self, averaged: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """The gradients are means now, which that function tells."""
        found = [
            _square(each) for each in (averaged().values() if self.on else ()) if each is not None
        ]
        if self.first is not None and found:
            told = [*self.first, _sum(found)]
            self.told = told if all(map(math.isfinite, told)) else None

    @property
    def line(self) -> dict[str, list[float] | None]:
        """What the record says of the step."""
        return {"noise": self.told} if self.every else {}

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.detach(), dtype=wide(gradient.dtype)).double() ** 2


def _sum(squares: Iterable[Tensor]) -> float:
    return float(torch.stack([each.cpu() for each in squares]).sum())


def unmeasured(strategy: Strategy) -> str | None:
    """Why a resolved strategy's noise scale cannot be measured, with the repair, or None."""
    divided = any(axis.divides != "samples" for axis in strategy.axes)
    compressed = compressor_of(strategy) is not None
    if divided or strategy.sharded or strategy.servers or not (strategy.exact or compressed):
        return (
            "compares the gradient of each share with that of the whole batch, and here no rank "
            "has both; train for a "
            "while under data(n), or serial(micro=2)"
        )
    if not strategy.exact:
        return (
            "compares the gradient of each share with that of the whole batch, of which every rank "
            "has what was sent; "
            "leave out compress for a while"
        )
    division = strategy.division
    if len(division.shares) * division.micro < 2:
        return (
            "compares gradients of parts of a batch with that of all, and here is one part; give "
            "data(n), or micro=2 or "
            "more"
        )
    return None
