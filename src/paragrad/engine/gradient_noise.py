"""Measure gradient norms for the gradient noise scale.

The scale compares the norm of the gradient of a few samples with that of the whole batch. The first
norm is that of the first micro-batch of a rank, as backward leaves the gradient. It is then not yet
exchanged, compensated or clipped. The second norm is measured once the gradient of the batch is a
mean.

No message is sent. Each rank writes its norms into the record, which computes the scale from all of
them (`record.noise_scale`). In a measured step every gradient is read twice more.
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
    """Measures gradient norms on one rank.

    Args:
        parameters: The parameters of this rank.

        interval: Measure in the steps 0, interval, 2 * interval, ...; 0: never.

    Attributes:
        interval: As the argument.

        measurement: [|g|^2 of the first micro-batch, its weight, |g|^2 of the whole batch] of this
            step, or None.

        is_measured: Whether this step is measured.

        squares: Squared norm of each gradient of the first micro-batch while its backward runs,
            else None.

        first_micro_batch: (|g|^2, weight) of the first micro-batch, or None.

        handles: The hooks on the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], interval: int) -> None:
        self.interval = interval
        self.measurement: list[float] | None = None
        self.is_measured = False
        self.squares: dict[int, Tensor] | None = None
        self.first_micro_batch: tuple[float, float] | None = None
        self.handles = [
            each.register_post_accumulate_grad_hook(self._record_gradient)
            for each in parameters
            if each.requires_grad and interval
        ]

    def begin_step(self, step: int) -> None:
        """Start a step.

        Args:
            step: Number of the step.
        """
        self.is_measured = bool(self.interval) and step % self.interval == 0
        self.first_micro_batch = None
        self.measurement = None

    @contextlib.contextmanager
    def measure_backward(self, number: int, weight: float, divisor: float | None) -> Iterator[None]:
        """Measure the gradient of the first micro-batch while its backward pass runs.

        Args:
            number: Index of the micro-batch; only 0 is measured.
            weight: The weight of the micro-batch; 0 if no sample counts.
            divisor: By what its sum is divided, as `LossModule.divisor`.
        """
        if number or not self.is_measured:
            yield
            return
        self.squares = {}
        try:
            yield
            if weight and self.squares:
                # the gradient of the share, divided by this factor, is that of the own mean
                factor = weight / divisor if divisor else 1.0
                self.first_micro_batch = _sum_squares(self.squares.values()) / factor**2, weight
        finally:
            self.squares = None

    def _record_gradient(self, parameter: Tensor) -> None:
        if self.squares is not None and parameter.grad is not None:
            self.squares[id(parameter)] = _compute_squared_norm(parameter.grad)

    def measure_mean_gradient(
        self, gather_gradients: Callable[[], Mapping[str, Tensor | None]]
    ) -> None:
        """Measure the gradient of the whole batch.

        Args:
            gather_gradients: Returns the mean gradients by name.
        """
        squares = [
            _compute_squared_norm(each)
            for each in (gather_gradients().values() if self.is_measured else ())
            if each is not None
        ]
        if self.first_micro_batch is not None and squares:
            measurement = [*self.first_micro_batch, _sum_squares(squares)]
            self.measurement = measurement if all(map(math.isfinite, measurement)) else None

    def end_step(self) -> None:
        """End a step: what comes before the next one is not measured."""
        self.is_measured = False

    @property
    def record_entry(self) -> dict[str, list[float] | None]:
        """The entry of the record for this step."""
        return {"noise": self.measurement} if self.interval else {}

    def close(self) -> None:
        """Remove the hooks from the parameters."""
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
    """Explain why the noise scale of a strategy cannot be measured, with the repair.

    Args:
        strategy: A resolved strategy.

    Returns:
        The explanation, or None if it can be measured.
    """
    divides_model = any(axis.divides != "samples" for axis in strategy.axes)
    compressed = find_compressor(strategy) is not None
    if (
        divides_model
        or strategy.shards_parameters
        or strategy.servers
        or not (strategy.exact or compressed)
    ):
        return (
            "compares the gradient of each share with that of the whole batch, and no rank "
            "has both; train for a while under data(n), or serial(micro=2)"
        )
    if not strategy.exact:
        return (
            "compares the gradient of each share with that of the whole batch, of which ranks "
            "have only the compressed form; leave out compress for a while"
        )
    division = strategy.division
    if len(division.shares) * division.micro < 2:
        return (
            "compares gradients of parts of a batch with that of all, and this batch has one part; "
            "give data(n), or micro=2 or more"
        )
    return None
