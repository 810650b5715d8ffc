"""Find and undo what forward passes change besides gradients.

This covers parameters, buffers, Python state, hooks and random generators.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from paragrad.engine.compiled_modules import disable_compile
from paragrad.engine.state.values import (
    GENERATOR_TYPES,
    IMMUTABLE_TYPES,
    copy_value,
    is_plain_value,
    is_same_value,
    make_restorer,
    set_tensor_values,
)
from paragrad.runtime.generators import keep_generators

if TYPE_CHECKING:
    from paragrad.jobs.loss import LossModule

INTERNAL_ATTRIBUTES = frozenset(name for name in vars(nn.Module()) if name[0] == "_")
HOOK_ATTRIBUTES = tuple(
    name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)
)
NON_OWNER_TYPES = (
    Tensor,
    nn.Module,
    type,
    functools.partial,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


@contextlib.contextmanager
def preserve_all_state(module: LossModule) -> Iterator[None]:
    """Restore a module and all random generators afterwards.

    Gradients, parameters, buffers, and the Python state of model and loss are restored.

    Args:
        module: The model and the loss.
    """
    with (
        keep_generators(),
        torch.random.fork_rng(enabled=torch.cuda.is_available()),
        preserve_module_state(module),
    ):
        yield


@contextlib.contextmanager
def preserve_module_state(module: LossModule) -> Iterator[ModuleSnapshot]:
    """Restore a module afterwards, but not the random generators.

    Passes inside the context belong to no step of the training, so they run without torch.compile.

    Args:
        module: The model and the loss. Their gradients are None inside the context.

    Yields:
        The snapshot of the module.
    """
    snapshot = ModuleSnapshot(
        module, list(dict(module.model.named_parameters())), include_buffers=True
    )
    for parameter in snapshot.parameters.values():
        parameter.grad = None
    try:
        with disable_compile():
            yield snapshot
    finally:
        snapshot.restore_module()


class PythonState:
    """What objects keep in Python attributes, as it was when this object was made.

    It covers what can be copied and compared: numbers, text, generators, tensors that need no
    gradient, and lists, dicts and tuples of these.

    Args:
        owners: The objects by name.
        comparable: Keep copies, so that changes can be listed.

    Attributes:
        owners: The objects by name.
        attribute_names: For each object, the names of all its attributes.
        values: For each object and attribute, (copy or None, function that restores it).
    """

    def __init__(self, owners: Mapping[str, Any], comparable: bool = True) -> None:
        self.owners = owners
        self.attribute_names = {name: set(vars(owner)) for name, owner in self.owners.items()}
        self.values = {
            name: {
                attribute: (
                    copy_value(vars(owner)[attribute]) if comparable else None,
                    make_restorer(vars(owner)[attribute]),
                )
                for attribute in list_comparable_attributes(owner)
            }
            for name, owner in self.owners.items()
        }

    def collect_changes(self) -> dict[tuple[str, str], Any]:
        """Return the present values of attributes that have changed, by (owner, attribute)."""
        return {
            (name, attribute): copy_value(vars(owner)[attribute])
            for name, owner in self.owners.items()
            for attribute in list_comparable_attributes(owner)
            if not (
                attribute in self.values[name]
                and is_same_value(vars(owner)[attribute], self.values[name][attribute][0])
            )
        }

    def list_removed_attributes(self) -> list[tuple[str, str]]:
        """Return (owner, attribute) of attributes that no longer exist."""
        return [
            (name, attribute)
            for name, owner in self.owners.items()
            for attribute in self.values[name]
            if attribute not in vars(owner)
        ]

    def restore_attributes(self, excluded: Iterable[nn.Module] = ()) -> None:
        """Restore all attributes.

        Each attribute is again the same object with its old content, because other code may refer
        to that object.

        Args:
            excluded: Modules that stay as they are, with the objects in their attributes.
        """
        excluded_ids = {
            id(each) for module in excluded for each in (module, *vars(module).values())
        }
        for name, owner in self.owners.items():
            if id(owner) in excluded_ids:
                continue
            attributes = vars(owner)
            for attribute in [
                attribute
                for attribute in _list_attribute_names(owner)
                if attribute not in self.attribute_names[name]
            ]:
                del attributes[attribute]
            for attribute, (_, restore) in self.values[name].items():
                attributes[attribute] = restore()


class ModuleSnapshot:
    """A model and its loss as they were when this object was made.

    Changes of parameters are detected by their versions. A change through `parameter.data` does not
    increase the version, so it is found only for saved parameters.

    Args:
        module: The model and the loss.

        saved_parameters: Names of parameters to restore; their values and gradients are saved too.

        include_buffers: Also save buffers, hooks, and the set of parameters. A model may register
            hooks in its first forward pass and note that in an attribute. If only the attribute
            were restored, it would register them again.

    Attributes:
        python_state: The Python state of model and loss.

        parameters: The parameters by name.

        versions: The version of each parameter.

        saved_values: (data, copy of the values, gradient) of each saved parameter.

        buffer_restorers: Functions that restore buffers and the set of parameters.

        hook_restorers: Functions that restore hooks.
    """

    def __init__(
        self,
        module: LossModule,
        saved_parameters: Iterable[str] = (),
        include_buffers: bool = False,
    ) -> None:
        self.python_state = PythonState(find_all_owners(module))
        # A forward pass cannot change a shard: it works on the whole parameter, which is freed
        # after the pass.
        self.parameters = {
            name: parameter
            for name, parameter in module.model.named_parameters()
            if not is_traceable_wrapper_subclass(parameter)
        }
        self.versions = {name: parameter._version for name, parameter in self.parameters.items()}
        self.saved_values = {
            name: (
                self.parameters[name].data,
                self.parameters[name].detach().clone(),
                self.parameters[name].grad,
            )
            for name in saved_parameters
            if name in self.parameters
        }
        modules = (
            [owner for owner in self.python_state.owners.values() if isinstance(owner, nn.Module)]
            if include_buffers
            else []
        )
        self.buffer_restorers = [
            save(each) for save in (_save_buffers, _save_parameters) for each in modules
        ]
        self.hook_restorers = [_save_hooks(each) for each in modules]

    def collect_module_changes(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what has changed.

        Returns:
            (parameters, Python state) by name, with their present values.
        """
        return (
            {
                name: parameter.detach().clone()
                for name, parameter in self.parameters.items()
                if self._is_changed(name)
            },
            {
                f"{name}.{attribute}".lstrip("."): value
                for (name, attribute), value in self.python_state.collect_changes().items()
            },
        )

    def list_changed_frozen(self) -> tuple[str, ...]:
        """Return the names of parameters that are not trained and have changed."""
        return tuple(
            name
            for name, each in self.parameters.items()
            if not each.requires_grad and self._is_changed(name)
        )

    def _is_changed(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter._version != self.versions[name] or (
            name in self.saved_values
            and not is_same_value(parameter.detach(), self.saved_values[name][1])
        )

    def restore_module(self) -> None:
        """Restore everything that was saved."""
        for name, (data, value, gradient) in self.saved_values.items():
            parameter = self.parameters[name]
            if self._is_changed(name) or parameter.data_ptr() != data.data_ptr():
                parameter.data = data
                data.copy_(value)
            parameter.grad = gradient
        for restore in (
            *self.buffer_restorers,
            *self.hook_restorers,
            self.python_state.restore_attributes,
        ):
            restore()


@contextlib.contextmanager
def undo_forward_effects(model: nn.Module, excluded: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Undo what a forward pass does to buffers, hooks and Python state.

    Args:
        model: The model.
        excluded: Modules that keep their present Python state.
    """
    state = PythonState(find_state_owners(model), comparable=False)
    restorers = [save(each) for save in (_save_buffers, _save_hooks) for each in model.modules()]
    try:
        yield
    finally:
        for restore in restorers:
            restore()
        state.restore_attributes(excluded)


def copy_python_attributes(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Copy what modules keep in Python attributes, without tensors and arrays that have values.

    Args:
        module: The module; its submodules are included.

    Returns:
        The values by (module, attribute).
    """
    return {
        (inner, attribute): copy_value(vars(inner)[attribute])
        for inner in module.modules()
        for attribute in _list_attribute_names(inner)
        if is_plain_value(vars(inner)[attribute])
        and all(
            isinstance(each, (*IMMUTABLE_TYPES, FakeTensor))
            for each in tree_leaves(vars(inner)[attribute])
        )
    }


def _save_buffers(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the buffers of a module and their values."""
    restore_entries = _save_entries(module._buffers)
    buffers = dict(module._buffers)
    values = {
        name: buffer.detach().clone() for name, buffer in buffers.items() if buffer is not None
    }

    def restore() -> None:
        for name, value in values.items():
            set_tensor_values(buffers[name], value)
        restore_entries()

    return restore


def _save_parameters(module: nn.Module) -> Callable[[], None]:
    return _save_entries(module._parameters)


def list_replaced_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of parameters that a forward pass removed, created or replaced.

    Args:
        model: The model after the forward pass.
        parameters: Its parameters before, by name.
    """
    present: dict[str, Any] = dict(model.named_parameters())
    return tuple(
        name for name in {**parameters, **present} if present.get(name) is not parameters.get(name)
    )


def list_hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts in which a module keeps its hooks.

    Args:
        module: The module.
    """
    return [vars(module)[name] for name in HOOK_ATTRIBUTES]


def _save_hooks(module: nn.Module) -> Callable[[], None]:
    restorers = [_save_entries(hooks) for hooks in list_hook_dicts(module)]

    def restore() -> None:
        for restore_entries in restorers:
            restore_entries()

    return restore


def _save_entries(entries: Any) -> Callable[[], None]:
    """Return a function that restores the entries of a dict.

    Entries may have been replaced (`self.seen += 1`) or added. A torch.jit script has no such dict
    and does not allow changes.
    """
    if not isinstance(entries, dict):
        return lambda: None
    saved = entries.copy()

    def restore() -> None:
        if len(entries) != len(saved) or any(
            entries.get(name) is not each for name, each in saved.items()
        ):
            entries.clear()
            entries.update(saved)

    return restore


def find_state_owners(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Find the objects of a model that may keep Python state, each once.

    These are its modules, and objects in attributes of modules, such as a configuration.

    Args:
        model: The model.
        prefix: Prefix of the names.

    Returns:
        The objects by name.
    """
    owners: dict[str, Any] = dict(model.named_modules(prefix=prefix))
    known_ids = set(map(id, owners.values()))
    for name, module in list(owners.items()):
        for attribute in _list_attribute_names(module):
            value = vars(module)[attribute]
            if _can_own_state(value) and id(value) not in known_ids:
                known_ids.add(id(value))
                owners[f"{name}.{attribute}".lstrip(".")] = value
    return owners


def _can_own_state(value: Any) -> bool:
    with contextlib.suppress(Exception):  # a proxy of an object that is gone
        return (
            not isinstance(value, NON_OWNER_TYPES)
            and type(getattr(value, "__dict__", None)) is dict
        )
    return False


def list_comparable_attributes(owner: Any) -> list[str]:
    """Return the names of attributes that are copied and compared.

    For an object that is not a module, containers are left out: they may be a vocabulary or a
    dataset.

    Args:
        owner: A module or another object.
    """
    return [
        attribute
        for attribute in _list_attribute_names(owner)
        if is_plain_value(vars(owner)[attribute])
        and (
            isinstance(owner, nn.Module)
            or isinstance(vars(owner)[attribute], (*IMMUTABLE_TYPES, *GENERATOR_TYPES, Tensor))
        )
    ]


def find_all_owners(module: LossModule) -> dict[str, Any]:
    """Find the objects of a model and of its loss that may keep Python state, each once.

    Args:
        module: The model and the loss, which may be a plain object.

    Returns:
        The objects by name.
    """
    loss = module.state_owner
    name = "the loss" if hasattr(module.model, "loss") else "loss"
    if isinstance(loss, nn.Module):
        return {**find_state_owners(module.model), **find_state_owners(loss, name)}
    return {**find_state_owners(module.model), **({name: loss} if _can_own_state(loss) else {})}


def _list_attribute_names(owner: Any) -> list[str]:
    if not isinstance(owner, nn.Module):
        return list(vars(owner))
    # a sharded parameter or buffer stands in an attribute of its name too
    return [
        name
        for name in vars(owner)
        if name not in INTERNAL_ATTRIBUTES
        and name not in owner._parameters
        and name not in owner._buffers
    ]
