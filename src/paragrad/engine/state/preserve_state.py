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
    GENERATORS,
    UNCHANGING,
    copied,
    keeping,
    plain,
    same,
    set_values,
)
from paragrad.runtime.generators import generators_kept

if TYPE_CHECKING:
    from paragrad.jobs.loss import Summed

INTERNAL = frozenset(name for name in vars(nn.Module()) if name[0] == "_")
HOOKS = tuple(
    name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)
)
NO_OWNERS = (
    Tensor,
    nn.Module,
    type,
    functools.partial,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


@contextlib.contextmanager
def untouched(module: Summed) -> Iterator[None]:
    """Afterwards gradients, parameters, buffers, Python state of model and loss, and all
    generators are as they were.
    """
    with (
        generators_kept(),
        torch.random.fork_rng(enabled=torch.cuda.is_available()),
        restored(module),
    ):
        yield


@contextlib.contextmanager
def restored(module: Summed) -> Iterator[Before]:
    """The same, but for the generators; what they were."""
    before = Before(module, list(dict(module.model.named_parameters())), buffers=True)
    for parameter in before.parameters.values():
        parameter.grad = None
    try:
        yield before
    finally:
        before.put_back()


class State:
    """What objects keep in Python attributes, as it is; later, what changed. Of what can be
    copied and compared: numbers, text, generators, tensors that want no gradient, and lists,
    dicts, tuples of these. compared: it may be asked what changed.
    """

    def __init__(self, owners: Mapping[str, Any], compared: bool = True) -> None:
        self.owners = owners
        self.names = {name: set(vars(owner)) for name, owner in self.owners.items()}
        self.values = {
            name: {
                what: (copied(vars(owner)[what]) if compared else None, keeping(vars(owner)[what]))
                for what in seen_of(owner)
            }
            for name, owner in self.owners.items()
        }

    def changed(self) -> dict[tuple[str, str], Any]:
        """What is not as it was, by owner and attribute, as it is now."""
        return {
            (name, what): copied(vars(owner)[what])
            for name, owner in self.owners.items()
            for what in seen_of(owner)
            if not (
                what in self.values[name] and same(vars(owner)[what], self.values[name][what][0])
            )
        }

    def gone(self) -> list[tuple[str, str]]:
        """Attributes that are there no more."""
        return [
            (name, what)
            for name, owner in self.owners.items()
            for what in self.values[name]
            if what not in vars(owner)
        ]

    def put_back(self, apart: Iterable[nn.Module] = ()) -> None:
        """apart: modules that stay as they are, with their objects. Each attribute is the same
        object again, with what it held: others have it too.
        """
        spared = {id(each) for module in apart for each in (module, *vars(module).values())}
        for name, owner in self.owners.items():
            if id(owner) in spared:
                continue
            now = vars(owner)
            for what in [what for what in _names(owner) if what not in self.names[name]]:
                del now[what]
            for what, (_, put_back) in self.values[name].items():
                now[what] = put_back()


class Before:
    """A model and its loss as they are; later, what changed.

    values: names of parameters whose values and gradients are kept too, to put them back;
    whether others changed is told by their versions, which `parameter.data` does not move.
    buffers: they are kept too, which parameters there are, and hooks: a model that registers
    them in its first forward, and notes in an attribute that it did, would do so again.
    """

    def __init__(self, module: Summed, values: Iterable[str] = (), buffers: bool = False) -> None:
        self.state = State(_owners(module))
        # a shard is changed by no forward: that sees the whole parameter, which is gone after
        # it
        self.parameters = {
            name: parameter
            for name, parameter in module.model.named_parameters()
            if not is_traceable_wrapper_subclass(parameter)
        }
        self.versions = {name: parameter._version for name, parameter in self.parameters.items()}
        self.values = {
            name: (
                self.parameters[name].data,
                self.parameters[name].detach().clone(),
                self.parameters[name].grad,
            )
            for name in values
            if name in self.parameters
        }
        modules = (
            [owner for owner in self.state.owners.values() if isinstance(owner, nn.Module)]
            if buffers
            else []
        )
        self.buffers = [
            kept_as(each) for kept_as in (_buffers_kept, _parameters_kept) for each in modules
        ]
        self.hooks = [_hooks_kept(each) for each in modules]

    def changed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(parameters, Python state) that are not as they were, by name, as they are now."""
        return (
            {
                name: parameter.detach().clone()
                for name, parameter in self.parameters.items()
                if self._moved(name)
            },
            {
                f"{name}.{what}".lstrip("."): value
                for (name, what), value in self.state.changed().items()
            },
        )

    def frozen(self) -> tuple[str, ...]:
        """Names of parameters that are not trained, and are not as they were."""
        return tuple(
            name
            for name, each in self.parameters.items()
            if not each.requires_grad and self._moved(name)
        )

    def _moved(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter._version != self.versions[name] or (
            name in self.values and not same(parameter.detach(), self.values[name][1])
        )

    def put_back(self) -> None:
        for name, (data, value, gradient) in self.values.items():
            parameter = self.parameters[name]
            if self._moved(name) or parameter.data_ptr() != data.data_ptr():
                parameter.data = data
                data.copy_(value)
            parameter.grad = gradient
        for put_back in (*self.buffers, *self.hooks, self.state.put_back):
            put_back()


@contextlib.contextmanager
def unchanged(model: nn.Module, apart: Iterable[nn.Module] = ()) -> Iterator[None]:
    """What a forward does to buffers, hooks and Python state is undone. apart: modules whose
    Python state stays what it is then.
    """
    state = State(owners(model), compared=False)
    kept = [kept_as(each) for kept_as in (_buffers_kept, _hooks_kept) for each in model.modules()]
    try:
        yield
    finally:
        for put_back in kept:
            put_back()
        state.put_back(apart)


def kept_by(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """What modules have in Python attributes, tensors and arrays with values left out."""
    return {
        (inner, what): copied(vars(inner)[what])
        for inner in module.modules()
        for what in _names(inner)
        if plain(vars(inner)[what])
        and all(
            isinstance(each, (*UNCHANGING, FakeTensor)) for each in tree_leaves(vars(inner)[what])
        )
    }


def _buffers_kept(module: nn.Module) -> Callable[[], None]:
    """Puts them back, and their values."""
    entries = _entries_kept(module._buffers)
    held = dict(module._buffers)
    values = {name: buffer.detach().clone() for name, buffer in held.items() if buffer is not None}

    def put_back() -> None:
        for name, value in values.items():
            set_values(held[name], value)
        entries()

    return put_back


def _parameters_kept(module: nn.Module) -> Callable[[], None]:
    return _entries_kept(module._parameters)


def replaced(model: nn.Module, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of parameters that a forward took away, made, or put others in the place of."""
    now: dict[str, Any] = dict(model.named_parameters())
    return tuple(
        name for name in {**parameters, **now} if now.get(name) is not parameters.get(name)
    )


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [vars(module)[name] for name in HOOKS]


def _hooks_kept(module: nn.Module) -> Callable[[], None]:
    every = [_entries_kept(hooks) for hooks in hooks_of(module)]

    def put_back() -> None:
        for each in every:
            each()

    return put_back


def _entries_kept(entries: Any) -> Callable[[], None]:
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


def owners(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Who of a model may keep something in Python, by name, each once: its modules, and objects
    in attributes of these, such as a configuration.
    """
    found: dict[str, Any] = dict(model.named_modules(prefix=prefix))
    known = set(map(id, found.values()))
    for name, module in list(found.items()):
        for what in _names(module):
            value = vars(module)[what]
            if _owns(value) and id(value) not in known:
                known.add(id(value))
                found[f"{name}.{what}".lstrip(".")] = value
    return found


def _owns(value: Any) -> bool:
    with contextlib.suppress(Exception):  # a proxy of what has gone
        return not isinstance(value, NO_OWNERS) and type(getattr(value, "__dict__", None)) is dict
    return False


def seen_of(owner: Any) -> list[str]:
    """Attributes that are copied and compared; of an object no containers, which may be a
    vocabulary or a dataset.
    """
    return [
        what
        for what in _names(owner)
        if plain(vars(owner)[what])
        and (
            isinstance(owner, nn.Module)
            or isinstance(vars(owner)[what], (*UNCHANGING, *GENERATORS, Tensor))
        )
    ]


def _owners(module: Summed) -> dict[str, Any]:
    """Those of the model and of the loss, or a loss that is an object."""
    loss = module.keeper
    name = "the loss" if hasattr(module.model, "loss") else "loss"
    if isinstance(loss, nn.Module):
        return {**owners(module.model), **owners(loss, name)}
    return {**owners(module.model), **({name: loss} if _owns(loss) else {})}


def _names(owner: Any) -> list[str]:
    return (
        [name for name in vars(owner) if name not in INTERNAL]
        if isinstance(owner, nn.Module)
        else list(vars(owner))
    )
