"""What a partition or a shard of the model would not follow.

This is how the loss or the model reads parameters, and what the user changes later.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paragrad.engine.layout import Layout, remove_model_values
from paragrad.engine.passes import Passes
from paragrad.engine.state.empty_tensor import NO_VALUES_MESSAGE
from paragrad.engine.state.preserve_state import (
    INTERNAL_ATTRIBUTES,
    PythonState,
    find_state_owners,
    list_comparable_attributes,
    list_hook_dicts,
    preserve_all_state,
)
from paragrad.engine.state.values import GENERATOR_TYPES, is_same_value, make_restorer
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, call_model

# _flat_weights is an LSTM's attribute; the LSTM updates it with new parameters.
PARAMETER_CONTAINERS = {"_parameters", "_buffers", "_modules", "_flat_weights"}
# Copies are never exchanged. Each rank computes their gradients itself, and these are equal only if
# torch's operations are deterministic.
NONDETERMINISM_HINT = (
    "If its gradient is a sum that several threads make in any order (of x[index], say), call "
    "torch.use_deterministic_algorithms(True) where the job begins"
)
# the same object may have another content later
MUTABLE_TYPES = (Tensor, numpy.ndarray, *GENERATOR_TYPES, dict, list, tuple, set, deque)
MUTABLE_ATTRIBUTES = Tensor, *GENERATOR_TYPES  # of objects that are no modules


def refuse_parameter_views(model: nn.Module) -> None:
    """Refuse a module that keeps a parameter, or its values, in a plain attribute.

    If the parameter moves to another rank, the attribute stays unchanged. Parameters of a
    TorchScript module cannot be moved either.

    Args:
        model: The model.

    Raises:
        StepFailed: If an attribute keeps a parameter or a view of one, or a module is a script.
    """
    if scripts := [
        name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)
    ]:
        raise StepFailed(
            f"{scripts[0] or 'the model'} is a script of torch.jit, which hides its parameters; "
            "give the module that it was made of, or train it with data(n)"
        )
    storages = {
        each.untyped_storage()._cdata: name
        for name, each in model.named_parameters()
        if each.layout == torch.strided
    }
    buffer_ids = {id(each) for each in model.buffers()}
    names = {id(each): name for name, each in model.named_parameters()}
    for name, module in model.named_modules():
        # attributes that a pre-forward hook computes anew, as spectral_norm does
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for key, value in vars(module).items():
            for each in (
                _list_attribute_tensors(value) if key not in PARAMETER_CONTAINERS | computed else ()
            ):
                if id(each) in names:
                    raise StepFailed(
                        f"the attribute {key} of {name or 'the model'} keeps the parameter "
                        f"{names[id(each)]}, and would not change with it; take it from its module "
                        "in forward, or train it with data(n)"
                    )
                if (
                    id(each) not in buffer_ids
                    and each.layout == torch.strided
                    and each.untyped_storage()._cdata in storages
                ):
                    parameter = storages[each.untyped_storage()._cdata]
                    raise StepFailed(
                        f"the attribute {key} of {name or 'the model'} is a view of the parameter "
                        f"{parameter}, and would not change with it; take the view in forward, or "
                        "train it with data(n)"
                    )


def _list_attribute_tensors(value: Any) -> list[Tensor]:
    """List the tensors of an attribute: in containers, and in attributes of plain objects."""
    leaves = _list_leaves(value)
    inside = [
        _list_leaves(vars(leaf))
        for leaf in leaves
        if hasattr(leaf, "__dict__")
        and not isinstance(leaf, Tensor | nn.Module | type | FunctionType | ModuleType)
    ]
    return [each for each in (*leaves, *itertools.chain(*inside)) if isinstance(each, Tensor)]


def _list_leaves(value: Any) -> list[Any]:
    """List the leaves of a value, also of sets.

    Weak proxies are left out: they raise if the object behind them is gone.
    """
    leaves = [leaf for leaf in tree_leaves(value) if type(leaf) not in weakref.ProxyTypes]
    return [
        each for leaf in leaves for each in (leaf if isinstance(leaf, set | frozenset) else [leaf])
    ]


def refuse_loss_reading_parameters(module: LossModule, inputs: Any, target: Any) -> None:
    """Refuse a loss that reads parameters of the model itself.

    These parameters would be on another rank, or copies.

    Args:
        module: Model and loss.
        inputs: The inputs of a small batch.
        target: The target of that batch.

    Raises:
        StepFailed: If the graph of the loss contains a parameter of the model.
    """
    names = {id(each): name for name, each in module.model.named_parameters()}
    with preserve_all_state(module):
        try:
            with torch.no_grad():
                output = call_model(module.model, inputs)
            value = module.loss(output, target)
        except Exception:  # The first step reports any other error.
            return
    nodes = [each.grad_fn for each in tree_leaves(value) if isinstance(each, Tensor)]
    visited = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [following for following, _ in node.next_functions]
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            raise StepFailed(
                f"the loss reads the parameter {name} of the model from outside, and it is on "
                "another rank, or a copy; let the model return what its loss needs of it, such as "
                "(output, penalty)"
            )


def refuse_unequal_copies(
    layout: Layout, parameters: Mapping[str, Tensor], model: nn.Module
) -> None:
    """Check that the copies that several ranks of a replica hold are bit-equal.

    Collective. A forward may write to a copy on one rank alone without being traced.

    Args:
        layout: The layout of the partitioned model.
        parameters: This rank's parameters by name.
        model: This rank's part of the model.

    Raises:
        StepFailed: If copies differ.
    """
    if unequal := layout.find_unequal_copies(
        {**layout.select_copies(parameters, 1), **dict(model.named_buffers())}, layout.world
    ):
        raise StepFailed(
            "ranks {} and {} hold copies of it with other values: a forward writes to it (by "
            ".data, or later than "
            "in the first step), and not on every rank; write to it in the optimizer's step, or "
            "train it with "
            "data(n). {}".format(*unequal[:2], NONDETERMINISM_HINT),
            tensor=unequal[2],
            differs=True,
        )


def refuse_empty_model_use(*arguments: object) -> None:
    """Refuse to use a partitioned model; a hook of all its modules."""
    raise StepFailed(NO_VALUES_MESSAGE.format("this object"))


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


class UserModel:
    """The model and optimizer of the user's own loop, of which the ranks train parts.

    The parts do not see changes of this model, with one exception: they follow its Python
    attributes.

    Attributes:
        model: The user's model.

        optimizer: The user's optimizer.

        initial_properties: Modules, parameters and groups at the time of the partitioning; None
            before it.

        python_state: The Python attributes of the model at that time.

        hooks: The hooks that refuse to use the model while it is partitioned.

        pinned_objects: Objects that are kept alive, so that their ids stay unique.

        initial_modes: The training or eval mode of each module at that time.

        identity: The objects that the model kept at the last comparison, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.initial_properties: dict[str, tuple[str, object]] | None = None
        self.python_state: PythonState | None = None
        self.hooks: list[RemovableHandle] = []
        self.pinned_objects: list[object] = []
        self.initial_modes: dict[str, tuple[str, object]] = {}
        self.identity: ModelIdentity | None = None

    def release_values(self) -> None:
        """Release the values of the model when it is partitioned; once.

        Outdated values could otherwise be taken for current ones.
        """
        if self.initial_properties is not None:
            return
        remove_model_values(self.model)
        for module in self.model.modules():
            self.hooks += [
                module.register_forward_pre_hook(refuse_empty_model_use),
                module.register_state_dict_pre_hook(refuse_empty_model_use),
                module.register_load_state_dict_pre_hook(refuse_empty_model_use),
            ]
        self.pinned_objects = [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.model.modules(),
            *self._list_other_attributes().values(),
        ]
        self.initial_properties, self.initial_modes, self.python_state = (
            self._describe_properties(),
            self._describe_modes(),
            PythonState(find_state_owners(self.model)),
        )
        self.identity = ModelIdentity(self.model, self.optimizer)

    def remove_hooks(self) -> None:
        """Remove the hooks when the context ends."""
        for hook in self.hooks:
            hook.remove()

    def follow_changes(
        self, local_model: nn.Module, passes: Passes | None, check_modes: bool = True
    ) -> None:
        """Copy new attributes of the user's modules, and of objects they keep, to this rank's part.

        Args:
            local_model: This rank's part of the model.
            passes: The passes of the strategy, or None before the first step.
            check_modes: Whether the training and eval modes must be unchanged.

        Raises:
            StepFailed: If something was frozen, set to eval mode, replaced, given a hook, or given
                to the optimizer.
        """
        if self.initial_properties is None or self.python_state is None:
            return
        if self.identity is not None and self.identity.is_unchanged():
            return
        if change := next(self._list_changes(check_modes), None):
            raise StepFailed(change)
        known_owners = self.python_state.owners
        if changed := {
            (name, what): value
            for (name, what), value in self.python_state.collect_changes().items()
            if what != "training" or not isinstance(known_owners[name], nn.Module)
        }:
            local_owners = find_state_owners(local_model)
            for (name, what), value in changed.items():
                vars(local_owners[name])[what] = value
            self.python_state = PythonState(find_state_owners(self.model))
            self.identity = None  # it has the objects before the change
            if passes is not None:
                passes.invalidate_plans()
        can_compare = self.identity is None or not self.identity.has_mutable_values
        if check_modes and can_compare:  # the modes are those of the partitioning
            self.identity = ModelIdentity(self.model, self.optimizer)

    def write_back_numbers(self, numbers: Mapping[tuple[str, str], Any]) -> None:
        """Write numbers that the forwards changed on every rank back to the user's model.

        The user reads them there, and may reset them.

        Args:
            numbers: The values by (owner, attribute).
        """
        if self.python_state is None:
            return
        for (name, what), value in numbers.items():
            if (owner := self.python_state.owners.get(name)) is not None and not is_same_value(
                vars(owner).get(what), value
            ):
                vars(owner)[what] = value
                self.identity = None
                self.python_state.values[name][what] = value, make_restorer(value)
                self.python_state.attribute_names[name].add(what)

    def _list_changes(self, check_modes: bool) -> Iterator[str]:
        assert self.initial_properties is not None
        assert self.python_state is not None
        initial = self.initial_properties
        current = self._describe_properties()
        current |= {
            f"the attribute {'.'.join(filter(None, each))}": ("is gone", True)
            for each in self.python_state.list_removed_attributes()
        }
        if check_modes:
            initial = initial | self.initial_modes
            current = current | self._describe_modes()
        for what in dict.fromkeys((*initial, *current)):
            if initial.get(what) != current.get(what):
                now, _ = current.get(what, ("is gone", None))
                yield (
                    f"{what} {now}, other than when the model was divided, and its parts on the "
                    "ranks would not change with it; change it before the first step, or between "
                    "two calls of parallelize, or train it with data(n)"
                )

    def _list_other_attributes(self) -> dict[str, object]:
        """Return the attributes of modules, and of objects they keep, that cannot be followed."""
        return {
            f"{name}.{what}".lstrip("."): value
            for name, owner in find_state_owners(self.model).items()
            for what, value in vars(owner).items()
            if what not in (INTERNAL_ATTRIBUTES if isinstance(owner, nn.Module) else ())
            and (what not in list_comparable_attributes(owner))
        }

    def _describe_modes(self) -> dict[str, tuple[str, object]]:
        return {
            f"the module {name}" if name else "the model": (
                f"is in {'training' if module.training else 'eval'} mode",
                module.training,
            )
            for name, module in self.model.named_modules()
        }

    def _describe_properties(self) -> dict[str, tuple[str, object]]:
        """Return a phrase for a message, and a value for the comparison, for each property."""
        properties: dict[str, tuple[str, object]] = {}
        for name, module in self.model.named_modules():
            properties[f"what is called {name}" if name else "it"] = "is another module", id(module)
            properties[f"{name or 'the model'}'s list of hooks"] = (
                "has others",
                [*map(list, list_hook_dicts(module))],
            )
        for name, parameter in self.model.named_parameters():
            properties[f"the parameter {name}"] = "is another tensor", id(parameter)
            properties[f"{name}.requires_grad"] = (
                f"is {parameter.requires_grad}",
                parameter.requires_grad,
            )
        for name, buffer in self.model.named_buffers():
            properties[f"the buffer {name}"] = "is another tensor", id(buffer)
        for what, value in self._list_other_attributes().items():
            properties[f"the attribute {what}"] = "is another object", id(value)
        for number, group in enumerate(self.optimizer.param_groups):
            properties[f"group {number} of the optimizer"] = (
                "has other parameters",
                [id(each) for each in group["params"]],
            )
        return properties
