"""Which objects a model keeps: a quick check that nothing in it was replaced."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paragrad.engine.state.preserve_state import INTERNAL_ATTRIBUTES, find_state_owners
from paragrad.engine.state.values import GENERATOR_TYPES

# the same object may have another content later
MUTABLE_TYPES = (Tensor, numpy.ndarray, *GENERATOR_TYPES, dict, list, tuple, set, deque)
MUTABLE_ATTRIBUTES = Tensor, *GENERATOR_TYPES  # of objects that are no modules


class ModelIdentity:
    """The objects that a model and its optimizer keep, when this object was made.

    Modules, parameters, buffers, hooks, Python attributes, and the parameter groups of the
    optimizer are compared by identity. An attribute whose content may change in place, such as a
    tensor, cannot be compared so: then `is_unchanged` is always false, and a comparison of values
    must decide. Lists and dicts of a module are compared element by element.

    Args:
        model: The model.
        optimizer: The optimizer.

    Attributes:
        optimizer: The optimizer.

        owners: (module, or object in an attribute of one; its attributes) of each.

        containers: (dict or list, copy) of each that modules keep.

        parameters: The parameters of the model.

        trained: Whether each parameter requires a gradient.

        groups: The parameters of each group of the optimizer.

        has_mutable_values: Whether an attribute may change in place without being noticed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.owners = [(owner, vars(owner).copy()) for owner in find_state_owners(model).values()]
        self.containers: list[tuple[Any, Any]] = []
        self.parameters = list(model.parameters())
        self.trained = [each.requires_grad for each in self.parameters]
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self.has_mutable_values = not all(
            self._can_watch(owner, name, value)
            for owner, attributes in self.owners
            for name, value in attributes.items()
        )
        if self.has_mutable_values:  # then nothing is compared, and no object is kept alive
            self.owners.clear()
            self.containers.clear()

    def _can_watch(self, owner: Any, name: str, value: Any) -> bool:
        """Watch an attribute; return whether every change of it will be noticed."""
        if not isinstance(owner, nn.Module):
            return not issubclass(type(value), MUTABLE_ATTRIBUTES)
        if name not in INTERNAL_ATTRIBUTES:
            return self._can_watch_value(value)
        if isinstance(value, dict):
            self.containers.append((value, value.copy()))
        return True

    def _can_watch_value(self, value: Any) -> bool:
        kind = type(value)
        if kind in (dict, OrderedDict, list):
            self.containers.append((value, value.copy()))
            return all(map(self._can_watch_value, value if kind is list else value.values()))
        if issubclass(kind, tuple):
            return all(map(self._can_watch_value, value))
        return not issubclass(kind, MUTABLE_TYPES) or any(value is each for each in self.parameters)

    def is_unchanged(self) -> bool:
        """Return whether everything is certainly as it was."""
        if self.has_mutable_values:
            return False
        # tensors without values answer their attributes by a function
        with torch._C.DisableTorchFunctionSubclass():
            if [each.requires_grad for each in self.parameters] != self.trained:
                return False
        groups = [group["params"] for group in self.optimizer.param_groups]
        return (
            len(groups) == len(self.groups)
            and all(
                len(now) == len(before) and all(map(operator.is_, now, before))
                for now, before in zip(groups, self.groups, strict=True)
            )
            and all(
                (now := vars(owner)).keys() == before.keys()
                and all(map(operator.is_, map(now.get, before), before.values()))
                for owner, before in self.owners
            )
            and all(
                len(now) == len(before)
                and (
                    all(map(operator.is_, now, before))
                    if type(now) is list
                    else now.keys() == before.keys()
                    and all(map(operator.is_, map(now.get, before), before.values()))
                )
                for now, before in self.containers
            )
        )
