"""What forwards change besides gradients, and putting it back: parameters, buffers, Python
state, generators.
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
    """Afterwards gradients, parameters, buffers, Python state of model and loss, and all
    generators are as they were.
    """
    with (
        keep_generators(),
        torch.random.fork_rng(enabled=torch.cuda.is_available()),
        preserve_module_state(module),
    ):
        yield


@contextlib.contextmanager
def preserve_module_state(module: LossModule) -> Iterator[ModuleSnapshot]:
    """The same, but for the generators; what they were."""
    before = ModuleSnapshot(
        module, list(dict(module.model.named_parameters())), include_buffers=True
    )
    for parameter in before.parameters.values():
        parameter.grad = None
    try:
        yield before
    finally:
        before.restore_module()


class PythonState:
    """What objects keep in Python attributes, as it is; later, what changed. Of what can be
    copied and compared: numbers, text, generators, tensors that want no gradient, and lists,
    dicts, tuples of these. compared: it may be asked what changed.
    """

    def __init__(self, owners: Mapping[str, Any], comparable: bool = True) -> None:
        self.owners = owners
        self.attribute_names = {name: set(vars(owner)) for name, owner in self.owners.items()}
        self.values = {
            name: {
                what: (
                    copy_value(vars(owner)[what]) if comparable else None,
                    make_restorer(vars(owner)[what]),
                )
                for what in list_comparable_attributes(owner)
            }
            for name, owner in self.owners.items()
        }

    def collect_changes(self) -> dict[tuple[str, str], Any]:
        """What is not as it was, by owner and attribute, as it is now."""
        return {
            (name, what): copy_value(vars(owner)[what])
            for name, owner in self.owners.items()
            for what in list_comparable_attributes(owner)
            if not (
                what in self.values[name]
                and is_same_value(vars(owner)[what], self.values[name][what][0])
            )
        }

    def list_removed_attributes(self) -> list[tuple[str, str]]:
        """Attributes that are there no more."""
        return [
            (name, what)
            for name, owner in self.owners.items()
            for what in self.values[name]
            if what not in vars(owner)
        ]

    def restore_attributes(self, excluded: Iterable[nn.Module] = ()) -> None:
        """apart: modules that stay as they are, with their objects. Each attribute is the same
        object again, with what it held: others have it too.
        """
        spared = {id(each) for module in excluded for each in (module, *vars(module).values())}
        for name, owner in self.owners.items():
            if id(owner) in spared:
                continue
            now = vars(owner)
            for what in [
                what
                for what in _list_attribute_names(owner)
                if what not in self.attribute_names[name]
            ]:
                del now[what]
            for what, (_, put_back) in self.values[name].items():
                now[what] = put_back()


class ModuleSnapshot:
    """A model and its loss as they are; later, what changed.

    values: names of parameters whose values and gradients are kept too, to put them back;
    whether others changed is told by their versions, which `parameter.data` does not move.
    buffers: they are kept too, which parameters there are, and hooks: a model that registers
    them in its first forward, and notes in an attribute that it did, would do so again.
    """

    def __init__(
        self,
        module: LossModule,
        saved_parameters: Iterable[str] = (),
        include_buffers: bool = False,
    ) -> None:
        self.python_state = PythonState(_find_all_owners(module))
        # a shard is changed by no forward: that sees the whole parameter, which is gone after
        # it
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
            kept_as(each) for kept_as in (_save_buffers, _save_parameters) for each in modules
        ]
        self.hook_restorers = [_save_hooks(each) for each in modules]

    def collect_module_changes(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(parameters, Python state) that are not as they were, by name, as they are now."""
        return (
            {
                name: parameter.detach().clone()
                for name, parameter in self.parameters.items()
                if self._is_changed(name)
            },
            {
                f"{name}.{what}".lstrip("."): value
                for (name, what), value in self.python_state.collect_changes().items()
            },
        )

    def list_changed_frozen(self) -> tuple[str, ...]:
        """Names of parameters that are not trained, and are not as they were."""
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
        for name, (data, value, gradient) in self.saved_values.items():
            parameter = self.parameters[name]
            if self._is_changed(name) or parameter.data_ptr() != data.data_ptr():
                parameter.data = data
                data.copy_(value)
            parameter.grad = gradient
        for put_back in (
            *self.buffer_restorers,
            *self.hook_restorers,
            self.python_state.restore_attributes,
        ):
            put_back()


@contextlib.contextmanager
def undo_forward_effects(model: nn.Module, excluded: Iterable[nn.Module] = ()) -> Iterator[None]:
    """What a forward does to buffers, hooks and Python state is undone. apart: modules whose
    Python state stays what it is then.
    """
    state = PythonState(find_state_owners(model), comparable=False)
    kept = [kept_as(each) for kept_as in (_save_buffers, _save_hooks) for each in model.modules()]
    try:
        yield
    finally:
        for put_back in kept:
            put_back()
        state.restore_attributes(excluded)


def copy_python_attributes(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """What modules have in Python attributes, tensors and arrays with values left out."""
    return {
        (inner, what): copy_value(vars(inner)[what])
        for inner in module.modules()
        for what in _list_attribute_names(inner)
        if is_plain_value(vars(inner)[what])
        and all(
            isinstance(each, (*IMMUTABLE_TYPES, FakeTensor))
            for each in tree_leaves(vars(inner)[what])
        )
    }


def _save_buffers(module: nn.Module) -> Callable[[], None]:
    """Puts them back, and their values."""
    entries = _save_entries(module._buffers)
    held = dict(module._buffers)
    values = {name: buffer.detach().clone() for name, buffer in held.items() if buffer is not None}

    def put_back() -> None:
        for name, value in values.items():
            set_tensor_values(held[name], value)
        entries()

    return put_back


def _save_parameters(module: nn.Module) -> Callable[[], None]:
    return _save_entries(module._parameters)


def list_replaced_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of parameters that a forward took away, made, or put others in the place of."""
    now: dict[str, Any] = dict(model.named_parameters())
    return tuple(
        name for name in {**parameters, **now} if now.get(name) is not parameters.get(name)
    )


def list_hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [vars(module)[name] for name in HOOK_ATTRIBUTES]


def _save_hooks(module: nn.Module) -> Callable[[], None]:
    every = [_save_entries(hooks) for hooks in list_hook_dicts(module)]

    def put_back() -> None:
        for each in every:
            each()

    return put_back


def _save_entries(entries: Any) -> Callable[[], None]:
    """Puts back which there are, where others have come in their place (`self.seen += 1`), or
    beside them. A script of torch.jit has no dict of them, and lets nobody change it.
    """
    if not isinstance(entries, dict):
        return lambda: None
    held = entries.copy()

    def put_back() -> None:
        if len(entries) != len(held) or any(
            entries.get(name) is not each for name, each in held.items()
        ):
            entries.clear()
            entries.update(held)

    return put_back


def find_state_owners(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Who of a model may keep something in Python, by name, each once: its modules, and objects
    in attributes of these, such as a configuration.
    """
    found: dict[str, Any] = dict(model.named_modules(prefix=prefix))
    known = set(map(id, found.values()))
    for name, module in list(found.items()):
        for what in _list_attribute_names(module):
            value = vars(module)[what]
            if _can_own_state(value) and id(value) not in known:
                known.add(id(value))
                found[f"{name}.{what}".lstrip(".")] = value
    return found


def _can_own_state(value: Any) -> bool:
    with contextlib.suppress(Exception):  # a proxy of what has gone
        return (
            not isinstance(value, NON_OWNER_TYPES)
            and type(getattr(value, "__dict__", None)) is dict
        )
    return False


def list_comparable_attributes(owner: Any) -> list[str]:
    """Attributes that are copied and compared; of an object no containers, which may be a
    vocabulary or a dataset.
    """
    return [
        what
        for what in _list_attribute_names(owner)
        if is_plain_value(vars(owner)[what])
        and (
            isinstance(owner, nn.Module)
            or isinstance(vars(owner)[what], (*IMMUTABLE_TYPES, *GENERATOR_TYPES, Tensor))
        )
    ]


def _find_all_owners(module: LossModule) -> dict[str, Any]:
    """Those of the model and of the loss, or a loss that is an object."""
    loss = module.state_owner
    name = "the loss" if hasattr(module.model, "loss") else "loss"
    if isinstance(loss, nn.Module):
        return {**find_state_owners(module.model), **find_state_owners(loss, name)}
    return {**find_state_owners(module.model), **({name: loss} if _can_own_state(loss) else {})}


def _list_attribute_names(owner: Any) -> list[str]:
    return (
        [name for name in vars(owner) if name not in INTERNAL_ATTRIBUTES]
        if isinstance(owner, nn.Module)
        else list(vars(owner))
    )
