"""Modules one after another: the Python of a Sequential is known, and a part of one is its
modules in turn, unwatched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paragrad.errors import StepFailed
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, gather_whole
from paragrad.parallel.tracing.tracer import Unit

StageModules = list[list[nn.Module]]  # the modules of each part


def find_sequential_stages(
    model: nn.Module, stages: Sequence[Sequence[Unit]], outputs: Sequence[Any]
) -> StageModules | None:
    """Where a Sequential, nested ones too, calls nothing but the units of the parts, each
    giving one tensor, and no hook looks on; otherwise None. outputs: of each unit.
    """
    units = [unit for part in stages for unit in part]
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
    return [[model.get_submodule(name) for name, _ in part] for part in stages]


def _iterate_called_units(module: nn.Module, name: str) -> Iterator[Unit]:
    """What a Sequential calls, nested ones opened; another module is called as it is."""
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
    """What modules make of a tensor, one after another. like: what it must be then, where it
    goes on to another part.
    """
    for module in modules:
        given = module(given)
    given = given if expected is None else gather_whole(given)
    if expected is not None and (tuple(given.shape), given.dtype) != expected:
        raise StepFailed(
            f"a part of the model gave a tensor of {tuple(given.shape)}, {given.dtype}, and "
            f"without values of "
            f"{expected[0]}, {expected[1]}; let modules look at no values that decide these, or "
            f"train it "
            f"with data(n)"
        )
    return given
