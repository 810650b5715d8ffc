"""The trial that decides whether an optimizer may update the model in pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from unusual_optimizers import DistanceSgd

from paragrad.engine.optimizer import update_probe
from paragrad.engine.optimizer.update_probe import ELEMENTWISE_OPTIMIZERS, find_update_granularity
from paragrad.engine.optimizer.update_trial import MAX_PIECE_ELEMENTS, MAX_TRIAL_ELEMENTS

pytestmark = pytest.mark.pure


class Rule(torch.optim.Optimizer):
    """SGD that first calls a rule (optimizer, group, parameter, state) for each parameter."""

    def __init__(self, parameters: Any, rule: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.01, "number": 0.0})
        self.rule = [rule]  # in a list: no attribute with a value

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.rule[0](self, group, parameter, self.state[parameter])
                    parameter.sub_(group["lr"] * parameter.grad)


def make_parameters() -> list[nn.Parameter]:
    """Return two matrices, a bias and a scale without dimensions, of random values."""
    generator = torch.Generator().manual_seed(3)
    shapes: tuple[tuple[int, ...], ...] = ((200, 140), (7, 5), (9,), ())
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def find_kind(rule: Callable[..., None]) -> str:
    return find_update_granularity(Rule(make_parameters(), rule))


def sum_in_group(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    group["number"] += float(parameter.grad.sum())  # type: ignore[union-attr]


def sum_in_attribute(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    assert parameter.grad is not None
    optimizer.total = getattr(optimizer, "total", 0.0) + float(parameter.grad.sum())


def sum_in_global_state(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    sums = optimizer.state["sums"]
    sums["all"] = sums.get("all", 0.0) + float(parameter.grad.sum())  # type: ignore[union-attr]


def count_large(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    group["number"] += float(parameter.grad.abs().max() > 100)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", [sum_in_group, sum_in_attribute, sum_in_global_state, count_large])
def test_number_of_all_parameters_keeps_the_model_whole(rule: Callable[..., None]) -> None:
    """The trial finds numbers that depend on all parameters.

    Earlier, it compared parameters only. The estimate of Prodigy grows from sums that exist from
    the beginning, but only after the trial. So each rank had its own estimate, and trained
    differently without a message.

    In a trial, a count of large gradients is the same in whole tensors and in pieces. It is found
    because it differs between two sequences of gradients.
    """
    assert find_kind(rule) == "all"


def test_estimated_distance_keeps_the_model_whole() -> None:
    """The estimate of Prodigy starts so small that random gradients never made it grow."""
    assert find_update_granularity(DistanceSgd(make_parameters())) == "all"


def keep_norm(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    state["norm"] = parameter.grad.norm()  # type: ignore[union-attr]


def keep_extreme(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    state["is large"] = bool(parameter.grad.abs().mean() > 100)  # type: ignore[union-attr]
    state["large steps"] = state.get("large steps", 0) + state["is large"]


def project_orthogonal(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    """Normalize a gradient that is nearly orthogonal to the weights (similar to AdamP)."""
    gradient: Any = parameter.grad
    inner = (gradient * parameter).sum()
    if parameter.dim() > 1 and abs(inner) < 0.05 * parameter.norm() * gradient.norm() / math.sqrt(
        parameter.numel()
    ):
        gradient.div_(gradient.norm())


def begin_late(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    """Use the norm of a whole tensor after 25 steps, as Shampoo with a warm-up."""
    state["step"] = state.get("step", 0) + 1
    if state["step"] > 25:
        parameter.grad.div_(parameter.grad.norm() + 1)  # type: ignore[union-attr]


def keep_sums_by_rate(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    """Keep momenta in a dictionary, as AggMo."""
    momenta = state.setdefault("momenta", {0.0: torch.zeros_like(parameter)})
    momenta[0.0].add_(parameter.grad)


class Sums:
    """Numbers that an optimizer keeps in an object of its own."""

    def __init__(self) -> None:
        self.total = 0.0


def keep_object(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    assert parameter.grad is not None
    state.setdefault("sums", Sums()).total += float(parameter.grad.sum())


@pytest.mark.parametrize(
    "rule",
    [keep_norm, keep_extreme, project_orthogonal, begin_late, keep_sums_by_rate, keep_object],
)
def test_state_of_a_tensor_keeps_it_whole(rule: Callable[..., None]) -> None:
    """A number in the state of a parameter belongs to the whole tensor: a piece has another one.

    Some optimizers use the whole tensor in rare cases only (AdamP), or after many steps
    (ScalableShampoo). State in a container cannot be put together from pieces: earlier, a
    checkpoint had only a part of it.
    """
    assert find_kind(rule) == "tensor"


def count_steps(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
    state["step"] = state.get("step", torch.zeros(())) + 1
    state["decay"] = 0.9 ** int(state["step"])
    state.setdefault("history", []).append(state["decay"])
    state["last"] = parameter.grad.clone()  # type: ignore[union-attr]


def test_counts_of_steps_are_no_obstacle() -> None:
    """Numbers that are the same after every sequence of gradients belong to no tensor."""
    assert find_kind(count_steps) == "element"


def test_number_that_only_a_held_parameter_moves() -> None:
    """A rank that does not hold the parameter does not count, and rank 0 writes the checkpoint."""

    def count_in_group(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
        if parameter is group["params"][0]:
            group["number"] += 1

    assert find_kind(count_in_group) == "all"


@pytest.mark.parametrize("cls", ELEMENTWISE_OPTIMIZERS)
def test_classes_of_torch_are_known_by_exact_type(cls: type[torch.optim.Optimizer]) -> None:
    """Earlier, every rank ran a trial of torch's own classes before each training."""
    subclass: Any = type("Own", (cls,), {})
    with mock.patch.object(
        update_probe, "_try_granularity", side_effect=AssertionError("tried")
    ) as trial:
        optimizer = cls(make_parameters())  # type: ignore[call-arg]
        assert find_update_granularity(optimizer) == "element"
        with pytest.raises(AssertionError, match="tried"):
            find_update_granularity(subclass(make_parameters()))
    assert trial.call_count == 1
    assert find_update_granularity(subclass(make_parameters()[:3], lr=0.01)) == "element"


def test_trial_is_bounded_for_any_model() -> None:
    """Earlier, a trial of Kron took minutes.

    For a flat piece of a 160 x 160 matrix, it requested a matrix of 17067 x 17067. One group for
    each layer multiplied the time.
    """
    calls = []

    def count_work(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
        calls.append((parameter.dim(), parameter.numel()))

    shapes = [(512, 512, 3, 3), (64, 512, 512), (1000, 1000), (300, 200), (1000,), (5,)] * 50
    with torch.device("meta"):
        parameters = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    groups = [
        {"params": parameters[start : start + 6], "lr": 0.01 * (start + 1)}
        for start in range(0, len(parameters), 6)
    ]
    assert find_update_granularity(Rule(groups, count_work)) == "element"
    assert max(elements for dims, elements in calls if dims == 1) <= MAX_PIECE_ELEMENTS
    assert max(elements for _, elements in calls) <= MAX_TRIAL_ELEMENTS
    assert sum(elements for _, elements in calls) < 8e6
    assert len(calls) < 5000


def test_resumed_containers_are_tried() -> None:
    """Earlier, a resumed AggMo was refused, although it had been trained.

    The small copy in the trial got the whole state, a dictionary of tensors, so its step failed.
    """
    parameters = make_parameters()
    optimizer = Rule(parameters, keep_sums_by_rate)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert find_update_granularity(optimizer) == "tensor"


def test_slow_step_is_tried_a_few_times() -> None:
    """Earlier, a trial of 32 steps in each run could take longer than the training.

    SpectralSphere needs 20 ms for a step of tiny matrices, and half a second on two threads.
    """
    steps = []

    def take_long(optimizer: Any, group: Any, parameter: Tensor, state: Any) -> None:
        if parameter is group["params"][0]:
            steps.append(torch.get_num_threads())
            start = time.thread_time()
            while time.thread_time() - start < 9e-3:
                parameter.grad.mul_(1)  # type: ignore[union-attr]

    threads = torch.get_num_threads()
    assert find_update_granularity(Rule(make_parameters()[1:3], take_long)) == "element"
    assert len(steps) < 40
    assert set(steps) == {1}
    assert torch.get_num_threads() == threads
