"""An optimizer's step without torch's wrapper does the same, and hooks and profilers see a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paragrad.engine.exchange import step_optimizer
from paragrad.engine.optimizer.update_slices import FOREACH_OPTIMIZERS

pytestmark = pytest.mark.pure


def make_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(1.0, 13.0).reshape(3, 4))
    parameter.grad = torch.linspace(-1, 1, 12).reshape(3, 4)
    return parameter


class Counted(torch.optim.SGD):
    """Its step looks like torch's: functools.wraps copies the marks of torch's wrapper."""

    steps = 0

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.steps += 1
        return super().step(closure)


@pytest.mark.parametrize("kind", FOREACH_OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_short_way_does_the_same_bit_for_bit(kind: type[torch.optim.Optimizer]) -> None:
    parameters = make_parameter(), make_parameter()
    optimizers = [kind([each], lr=0.1) for each in parameters]  # type: ignore[call-arg]
    for _ in range(3):
        optimizers[0].step()
        step_optimizer(optimizers[1])
    assert torch.equal(*parameters)
    states = [optimizer.state[each] for optimizer, each in zip(optimizers, parameters, strict=True)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][name]))


def test_the_note_for_a_profiler_is_left_out_if_none_runs() -> None:
    optimizer = torch.optim.SGD([make_parameter()], lr=0.1)
    with mock.patch("torch.autograd.profiler.record_function") as note:
        step_optimizer(optimizer)
        assert not note.called
        optimizer.step()
        assert note.called


def test_a_profiler_sees_the_step() -> None:
    optimizer = torch.optim.SGD([make_parameter()], lr=0.1)
    with torch.profiler.profile() as profile:
        step_optimizer(optimizer)
    assert "Optimizer.step#SGD.step" in [event.name for event in profile.events()]


@pytest.mark.parametrize(
    "register",
    [
        torch.optim.SGD.register_step_pre_hook,
        torch.optim.SGD.register_step_post_hook,
        lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
        lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    ],
    ids=["before", "after", "before, of all optimizers", "after, of all optimizers"],
)
def test_hooks_are_called(register: Callable[..., torch.utils.hooks.RemovableHandle]) -> None:
    optimizer = torch.optim.SGD([make_parameter()], lr=0.1)
    seen = []
    with register(optimizer, lambda *arguments: seen.append(arguments[0])):
        step_optimizer(optimizer)
    step_optimizer(optimizer)
    assert seen == [optimizer]


def test_a_step_that_only_looks_like_torchs_is_called() -> None:
    optimizer = Counted([make_parameter()], lr=0.1)
    step_optimizer(optimizer)
    assert optimizer.steps == 1


class Observed(torch.optim.SGD):
    """Overrides what torch's wrapper calls after each step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.observed: list[str] = []

    def _optimizer_step_code(self) -> None:
        self.observed.append("code")


class Registering(torch.optim.SGD):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[tuple[object, object]] = []

    def step(self, closure: Any = None) -> Any:
        if not self._optimizer_step_post_hooks:
            self.register_step_post_hook(lambda _, *given: self.seen.append(given))
        return super().step(closure)


def test_what_a_class_adds_to_the_wrapper_is_called() -> None:
    optimizer = Observed([make_parameter()])
    step_optimizer(optimizer)
    assert optimizer.observed == ["code"]


def test_a_hook_that_the_step_itself_registers_is_called() -> None:
    """torch's wrapper reads the hooks after the step."""
    plain, short = Registering([make_parameter()]), Registering([make_parameter()])
    plain.step()
    step_optimizer(short)
    assert len(short.seen) == len(plain.seen) > 0


def test_a_step_put_on_the_object_is_called() -> None:
    optimizer = torch.optim.SGD([make_parameter()], lr=0.1)
    optimizer.step = mock.Mock()  # type: ignore[method-assign]
    step_optimizer(optimizer)
    optimizer.step.assert_called_once_with()


def test_a_scheduler_sees_the_step_on_the_short_way() -> None:
    optimizer = torch.optim.SGD([make_parameter()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with mock.patch("torch.autograd.profiler.record_function") as note:
        step_optimizer(optimizer)
    assert not note.called
    scheduler.step()  # warns, which is an error here, if the optimizer made no step
    assert optimizer._opt_called  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
