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

from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.strategies.compressors import find_compressor
from paragrad.strategies.strategy import Strategy


class GradientNorms:
    """Of one rank. every: measured in every so many steps, from the first on (0: never);  told:
    of this step [|g|^2 of the first micro-batch, what that weighs, |g|^2 of the whole batch],
    or None.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], interval: int) -> None:
        self.interval = interval
        self.measurement: list[float] | None = None
        self.is_measured = False  # is this step measured?
        # of the first micro-batch, while its backward runs
        self.squares: dict[int, Tensor] | None = None
        self.first_micro_batch: tuple[float, float] | None = None
        self.handles = [
            each.register_post_accumulate_grad_hook(self._record_gradient)
            for each in parameters
            if each.requires_grad and interval
        ]

    def begin_step(self, step: int, rehearsed: bool) -> None:
        """A step begins. rehearsed: it is put back."""
        self.is_measured = bool(self.interval) and step % self.interval == 0 and not rehearsed
        self.first_micro_batch = None
        self.measurement = None

    @contextlib.contextmanager
    def measure_backward(self, number: int, divisor: float) -> Iterator[None]:
        """Around the backward of a micro-batch. divisor: by which its gradient becomes a mean,
        0 where nothing counts.
        """
        if number or not self.is_measured:
            yield
            return
        self.squares = {}
        try:
            yield
            if divisor and self.squares:
                self.first_micro_batch = _sum_squares(self.squares.values()) / divisor**2, divisor
        finally:
            self.squares = None

    def _record_gradient(self, parameter: Tensor) -> None:
        if self.squares is not None and parameter.grad is not None:
            self.squares[id(parameter)] = _compute_squared_norm(parameter.grad)

    def measure_mean_gradient(
        self, gather_gradients: Callable[[], Mapping[str, Tensor | None]]
    ) -> None:
        """The gradients are means now, which that function tells."""
        found = [
            _compute_squared_norm(each)
            for each in (gather_gradients().values() if self.is_measured else ())
            if each is not None
        ]
        if self.first_micro_batch is not None and found:
            told = [*self.first_micro_batch, _sum_squares(found)]
            self.measurement = told if all(map(math.isfinite, told)) else None

    @property
    def record_entry(self) -> dict[str, list[float] | None]:
        """What the record says of the step."""
        return {"noise": self.measurement} if self.interval else {}

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _compute_squared_norm(gradient: Tensor) -> Tensor:
    return (
        torch.linalg.vector_norm(
            gradient.detach(), dtype=get_accumulation_dtype(gradient.dtype)
        ).double()
        ** 2
    )


def _sum_squares(squares: Iterable[Tensor]) -> float:
    return float(torch.stack([each.cpu() for each in squares]).sum())


def explain_no_measurement(strategy: Strategy) -> str | None:
    """Why a resolved strategy's noise scale cannot be measured, with the repair, or None."""
    divided = any(axis.divides != "samples" for axis in strategy.axes)
    compressed = find_compressor(strategy) is not None
    if (
        divided
        or strategy.shards_parameters
        or strategy.servers
        or not (strategy.exact or compressed)
    ):
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
