"""Late steps of verify: the reference continues from the strategy's state, or makes all steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp, measure_difference
from torch import nn

from paragrad.launch import Launcher
from paragrad.report.certificate import EXACT_BOUND
from paragrad.report.equivalence.deviation import measure_deviations

pytestmark = pytest.mark.processes


class Rule(torch.optim.Optimizer):
    """An optimizer whose subclasses compute the step of a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._hidden: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.compute_step(parameter))
        self.count_step()

    def compute_step(self, parameter: nn.Parameter) -> torch.Tensor:
        raise NotImplementedError

    def count_step(self) -> None:
        pass


class Queued(Rule):
    """An optimizer that keeps the last gradients in a queue.

    Earlier, the reference changed the queue of the strategy itself.
    """

    def compute_step(self, parameter: nn.Parameter) -> torch.Tensor:
        queue = self.state[parameter].setdefault("queue", deque(maxlen=3))
        queue.append(parameter.grad.clone())
        return sum(queue) / len(queue)


class OneNumber(Rule):
    """An optimizer that keeps one number for a parameter, in a tensor of one element.

    Earlier, this tensor was taken for a part of the parameter, and its number filled a tensor of
    the size of the parameter.
    """

    def compute_step(self, parameter: nn.Parameter) -> torch.Tensor:
        weight = self.state[parameter].setdefault("weight", torch.zeros(1))
        weight.mul_(0.9).add_(1.0)
        return parameter.grad / weight.reshape(())


class Dropping(Rule):
    """An optimizer that updates in every second step, and then deletes its state.

    Earlier, the reference continued with its own state instead.
    """

    def compute_step(self, parameter: nn.Parameter) -> torch.Tensor:
        state = self.state[parameter]
        if "sum" in state:
            return state.pop("sum") + parameter.grad
        state["sum"] = parameter.grad.clone()
        return torch.zeros_like(parameter)


class Counting(Rule):
    """An optimizer that keeps a number next to the states of its parameters.

    Earlier, servers could not send this number.
    """

    def compute_step(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.grad / (1 + self.state.get("count", {}).get("value", 0))  # type: ignore

    def count_step(self) -> None:
        kept = self.state.setdefault("count", {"value": 0})  # type: ignore[call-overload]
        kept["value"] += 0.1


class Hiding(Rule):
    """An optimizer that keeps tensors in its own dict, with the key id(parameter).

    Earlier, the late steps began without these tensors.
    """

    def compute_step(self, parameter: nn.Parameter) -> torch.Tensor:
        kept = self._hidden.setdefault(id(parameter), torch.zeros_like(parameter))
        kept.mul_(0.9).add_(parameter.grad)
        return kept


@pytest.mark.parametrize(
    ("rule", "strategy"),
    [
        (Queued, "data(2, state=replicated, reduce=ring)"),
        (OneNumber, "data(2, state=shared_memory)"),
        *(
            pytest.param(*each, marks=pytest.mark.table)
            for each in (
                (Queued, "place(2)"),
                (OneNumber, "data(2, state=fully_sharded)"),
                (OneNumber, "server(2, servers=2)"),
            )
        ),
        pytest.param(Dropping, "data(2, state=replicated, reduce=ring)", marks=pytest.mark.table),
        (Counting, "server(2)"),
        (Hiding, "data(2, state=replicated, reduce=ring)"),
    ],
)
def test_late_steps_are_serials(rule: type[Rule], strategy: str, pool: Launcher) -> None:
    made = make_job("vectors", make_mlp, VECTORS).replace(
        dtype=torch.float64, batch=8, optimizer=rule
    )
    difference = measure_difference(pool, strategy, made)
    assert difference.first is None
    assert difference.value <= EXACT_BOUND


def test_schedule_of_a_short_job_is_not_overrun(pool: Launcher) -> None:
    """Earlier, a learning-rate schedule of 40 steps ended a comparison of 45 steps in an error."""
    made = make_job("vectors", make_mlp, VECTORS).replace(
        dtype=torch.float64,
        batch=8,
        scheduler=lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.1, 40),
        scheduler_every="step",
    )
    assert measure_difference(pool, "data(2)", made).first is None


def test_rounding_is_measured_by_the_largest_gradient_so_far() -> None:
    """If a model has learnt its data, a gradient is a probability near 1, minus 1.

    Its rounding error is that of 1, which is large compared with the gradient. Earlier, the
    comparison therefore said that a divided model trained differently in step 41 (timm's NFNet).
    """
    reference = {"a": torch.tensor([1e-9], dtype=torch.float64)}
    ours = {"a": reference["a"] + 1e-16}
    alone = measure_deviations(ours, reference)["a"]
    assert alone.per_kind == pytest.approx(1e-7, rel=1e-3)
    assert measure_deviations(ours, reference, least_scale=1.0)["a"].per_kind < 2e-16
