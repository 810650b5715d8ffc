"""What an optimizer keeps: in the states of its parameters, and beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.state.values import is_same_value


def select_global_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What it keeps in its state under names of its own, as a count of steps for all
    parameters.
    """
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def copy_optimizer_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers and tensors that it keeps as attributes of its own, as they are now. What begins
    with _ is torch's, or a wrapper's; flags say what is there already.
    """
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
        and isinstance(value, int | float | Tensor)
        and not isinstance(value, bool)
    }


def list_unsaved_state(
    optimizer: torch.optim.Optimizer, initial_attributes: Mapping[str, Any]
) -> list[str]:
    """What of an optimizer is in no state of a parameter and in no group, by name; of its
    attributes those that are not as they began.
    """
    now = copy_optimizer_attributes(optimizer)
    return [
        *map(str, select_global_state(optimizer)),
        *(
            name
            for name, value in now.items()
            if not is_same_value(value, initial_attributes.get(name))
        ),
    ]


def load_parameter_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Any]
) -> None:
    """An optimizer goes on from a parameter's state, of which the tensors may be elsewhere:
    each goes to where the one is that it replaces; a first one to the parameter, but for
    counts, which steps want there only if they are fused or captured.
    """
    own = optimizer.state[parameter]
    counts = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for what, value in state.items():
        before = own.get(what)
        if isinstance(value, Tensor) and (isinstance(before, Tensor) or value.dim() or counts):
            value = value.to(before.device if isinstance(before, Tensor) else parameter.device)
        own[what] = value
