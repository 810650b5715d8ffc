"""What an optimizer keeps: in the state of its parameters, and outside of it."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paragrad.engine.state.values import is_same_value

# attributes of torch's Optimizer, which checkpoints save or which hold no values
TORCH_CONTAINERS = ("state", "param_groups", "defaults")


def select_global_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the entries of the state that belong to no parameter.

    An example is a step count for all parameters.

    Args:
        optimizer: The optimizer.
    """
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def copy_optimizer_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy the numbers and tensors that an optimizer keeps in its own attributes.

    Names that start with _ belong to torch or to a wrapper. Flags are left out, because they only
    say what is there.

    Args:
        optimizer: The optimizer.

    Returns:
        The values by attribute name.
    """
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
        and isinstance(value, int | float | Tensor)
        and not isinstance(value, bool)
    }


def copy_unsaved_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy the values that an optimizer keeps neither in its state nor in its groups.

    These are its numbers and tensors (`copy_optimizer_attributes`), and the tensors in dicts and
    lists of its own, also of a wrapper that keeps them by id(parameter). Parameters, gradients and
    what is in the state do not count.

    Args:
        optimizer: The optimizer.

    Returns:
        The values by attribute name.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    known = {id(each.grad) for each in parameters} | {
        id(each)
        for each in tree_leaves(
            [dict(each) for each in optimizer.state.values() if isinstance(each, Mapping)]
        )
    }
    kept = {}
    for name, value in vars(optimizer).items():
        if name not in TORCH_CONTAINERS and isinstance(value, dict | list | tuple | deque):
            tensors = [
                each.clone()
                for each in tree_leaves(list(value) if isinstance(value, deque) else value)
                if isinstance(each, Tensor)
                and not isinstance(each, nn.Parameter)
                and id(each) not in known
            ]
            if tensors:
                kept[name] = tensors
    return copy_optimizer_attributes(optimizer) | kept


def list_unsaved_state(
    optimizer: torch.optim.Optimizer, initial_values: Mapping[str, Any]
) -> list[str]:
    """List what an optimizer keeps in no parameter state and in no group, by name.

    Args:
        optimizer: The optimizer.
        initial_values: What it kept at the start (`copy_unsaved_values`). Only values that have
            changed since then are listed.
    """
    now = copy_unsaved_values(optimizer)
    return [
        *map(str, select_global_state(optimizer)),
        *(
            name
            for name, value in now.items()
            if not is_same_value(value, initial_values.get(name))
        ),
    ]


def get_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the first group; 0 if the optimizer has no rate.

    Args:
        optimizer: The optimizer.
    """
    return float(optimizer.param_groups[0].get("lr") or 0.0)


def copy_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[Any, Any],
    memo: dict[int, Any] | None = None,
) -> torch.optim.Optimizer:
    """Copy an optimizer (class and attributes) for other parameters.

    The copy function of torch's Optimizer loses the attributes. Hooks, and a step method that a
    scheduler set on the object, are left out.

    Args:
        optimizer: The optimizer.
        groups: The groups of the copy, with its parameters.
        state: The state of the copy.
        memo: As of `copy.deepcopy`, for the attributes.
    """
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "step") and not name.startswith("_optimizer_")
    }
    vars(copied).update(copy.deepcopy(attributes, memo))
    torch.optim.Optimizer.__setstate__(
        copied, {"state": defaultdict(dict, state), "param_groups": groups}
    )
    return copied


def load_parameter_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Any]
) -> None:
    """Load the state of a parameter into an optimizer.

    A tensor goes to the device of the tensor that it replaces. A new tensor goes to the device of
    the parameter. A new step count (a tensor without dimensions) is moved only if the step is fused
    or captured.

    Args:
        optimizer: The optimizer.
        parameter: The parameter.
        state: Its state; the tensors may be on another device.
    """
    current = optimizer.state[parameter]
    moves_counts = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for key, value in state.items():
        replaced = current.get(key)
        if isinstance(value, Tensor) and (
            isinstance(replaced, Tensor) or value.dim() or moves_counts
        ):
            value = value.to(replaced.device if isinstance(replaced, Tensor) else parameter.device)
        current[key] = value
