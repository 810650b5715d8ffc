"""Stages of a Sequential. Its Python is known, so a stage runs its modules in turn, untraced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paragrad.errors import StepFailed
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, gather_whole
from paragrad.parallel.tracing.tracer import Unit

StageModules = list[list[nn.Module]]  # the modules of each stage


def find_sequential_stages(
    model: nn.Module, stages: Sequence[Sequence[Unit]], outputs: Sequence[Any]
) -> StageModules | None:
    """Find the modules of each stage of a Sequential.

    Nested Sequentials count too. The model must call only the units of the stages. Each unit
    returns one tensor, and there are no hooks.

    Args:
        model: The model.
        stages: The units of each stage.
        outputs: The output of each unit.

    Returns:
        The modules of each stage, or None if the model must be traced.
    """
    units = [unit for stage in stages for unit in stage]
    if list(_iterate_called_units(model, "")) != units or not all(
        isinstance(each, FakeTensor | ShardedTensor) for each in outputs
    ):
        return None
    if any(
        each._forward_hooks
        or each._forward_pre_hooks
        or each._backward_hooks
        or each._backward_pre_hooks
        for each in model.modules()
    ):
        return None
    return [[model.get_submodule(name) for name, _ in stage] for stage in stages]


def _iterate_called_units(module: nn.Module, name: str) -> Iterator[Unit]:
    """Yield what a Sequential calls; nested ones are opened, other modules are called whole."""
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        yield name, 0
        return
    for child, each in module._modules.items():
        assert each is not None
        yield from _iterate_called_units(each, f"{name}.{child}" if name else child)


def run_modules(
    modules: Sequence[nn.Module],
    given: Tensor,
    expected: tuple[tuple[int, ...], torch.dtype] | None,
) -> Tensor:
    """Run modules one after another.

    Args:
        modules: The modules.
        given: The input of the first.
        expected: (shape, type) that the result must have to cross to another stage; None: any.

    Returns:
        The output of the last.

    Raises:
        StepFailed: The result is not as expected.
    """
    for module in modules:
        given = module(given)
    given = given if expected is None else gather_whole(given)
    if expected is not None and (tuple(given.shape), given.dtype) != expected:
        raise StepFailed(
            f"a part of the model gave a tensor of {tuple(given.shape)}, {given.dtype}, and "
            f"without values of {expected[0]}, {expected[1]}; let modules look at no values that "
            "decide these, or train it with data(n)"
        )
    return given
