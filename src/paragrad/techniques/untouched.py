"""What forwards change besides gradients, and putting it back: parameters, buffers, Python state, generators."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from paragrad.world.generators import generators_kept

if TYPE_CHECKING:
    from paragrad.jobs.loss import Summed

INTERNAL = frozenset(name for name in vars(nn.Module()) if name[0] == "_")
HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))
UNCHANGING = (type(None), bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device)
NO_OWNERS = (Tensor, nn.Module, type, functools.partial, types.FunctionType, types.MethodType, types.ModuleType)
GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


@contextlib.contextmanager
def untouched(module: Summed) -> Iterator[None]:
    """Afterwards gradients, parameters, buffers, Python state of model and loss, and all generators are as they were."""
    with generators_kept(), torch.random.fork_rng(enabled=torch.cuda.is_available()), restored(module):
        yield


@contextlib.contextmanager
def restored(module: Summed) -> Iterator[None]:
    """The same, but for the generators."""
    before = Before(module, list(dict(module.model.named_parameters())), buffers=True)
    for parameter in before.parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        before.put_back()


class State:
    """What objects keep in Python attributes, as it is; later, what changed. Of what can be copied and compared: numbers, text,
    generators, tensors that want no gradient, and lists, dicts, tuples of these. compared: it may be asked what changed."""

    def __init__(self, owners: Mapping[str, Any], compared: bool = True) -> None:
        self.owners = owners
        self.names = {name: set(vars(owner)) for name, owner in self.owners.items()}
        self.values = {name: {what: (_copied(vars(owner)[what]) if compared else None, _keeping(vars(owner)[what]))
                              for what in _names(owner) if _plain(vars(owner)[what])} for name, owner in self.owners.items()}

    def changed(self) -> dict[tuple[str, str], Any]:
        """What is not as it was, by owner and attribute, as it is now."""
        return {(name, what): _copied(vars(owner)[what]) for name, owner in self.owners.items() for what in _names(owner)
                if _plain(vars(owner)[what]) and not (what in self.values[name] and same(
                    vars(owner)[what], self.values[name][what][0]))}

    def put_back(self, apart: Container[Any] = ()) -> None:
        """apart: owners that stay as they are. Each attribute is the same object again, with what it held: others have it too.
        """
        for name, owner in self.owners.items():
            if isinstance(owner, nn.Module) and owner in apart:
                continue
            now = vars(owner)
            for what in [what for what in _names(owner) if what not in self.names[name]]:
                del now[what]
            for what, (_, put_back) in self.values[name].items():
                now[what] = put_back()


class Before:
    """A model and its loss as they are; later, what changed.

    values: names of parameters whose values and gradients are kept too, to put them back; whether others changed is told by
    their versions, which `parameter.data` does not move.  buffers: they are kept too, and hooks: a model that registers them in
    its first forward, and notes in an attribute that it did, would do so again.
    """

    def __init__(self, module: Summed, values: Iterable[str] = (), buffers: bool = False) -> None:
        self.state = State(_owners(module))
        # a shard is changed by no forward: that sees the whole parameter, which is gone after it
        self.parameters = {name: parameter for name, parameter in module.model.named_parameters()
                           if not is_traceable_wrapper_subclass(parameter)}
        self.versions = {name: parameter._version for name, parameter in self.parameters.items()}
        self.values = {name: (self.parameters[name].data, self.parameters[name].detach().clone(), self.parameters[name].grad)
                       for name in values if name in self.parameters}
        modules = [owner for owner in self.state.owners.values() if isinstance(owner, nn.Module)] if buffers else []
        self.buffers = [_buffers_kept(each) for each in modules]
        self.hooks = [_hooks_kept(each) for each in modules]

    def changed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(parameters, Python state) that are not as they were, by name, as they are now."""
        return ({name: parameter.detach().clone() for name, parameter in self.parameters.items() if self._moved(name)},
                {f"{name}.{what}".lstrip("."): value for (name, what), value in self.state.changed().items()})

    def _moved(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter._version != self.versions[name] or (
            name in self.values and not same(parameter.detach(), self.values[name][1]))

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
def unchanged(model: nn.Module, apart: Container[nn.Module] = ()) -> Iterator[None]:
    """What a forward does to buffers, hooks and Python state is undone. apart: modules whose Python state stays what it is
    then."""
    state = State(owners(model), compared=False)
    kept = [keeping(each) for keeping in (_buffers_kept, _hooks_kept) for each in model.modules()]
    try:
        yield
    finally:
        for put_back in kept:
            put_back()
        state.put_back(apart)


def kept_by(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """What modules have in Python attributes, tensors and arrays with values left out."""
    return {(inner, what): _copied(vars(inner)[what]) for inner in module.modules() for what in _names(inner)
            if _plain(vars(inner)[what]) and all(isinstance(each, (*UNCHANGING, FakeTensor))
                                                 for each in tree_leaves(vars(inner)[what]))}


def _buffers_kept(module: nn.Module) -> Callable[[], None]:
    """Puts them back: their values, and where others have come in their place (`self.seen += 1`) or beside them."""
    held = dict(module._buffers)
    values = {name: buffer.detach().clone() for name, buffer in held.items() if buffer is not None}

    def put_back() -> None:
        for name, value in values.items():
            set_values(held[name], value)
        if any(module._buffers.get(name) is not buffer for name, buffer in held.items()) or len(module._buffers) > len(held):
            module._buffers.clear()
            module._buffers.update(held)
    return put_back


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [vars(module)[name] for name in HOOKS]


def _hooks_kept(module: nn.Module) -> Callable[[], None]:
    held = [(hooks, hooks.copy()) for hooks in hooks_of(module)]

    def put_back() -> None:
        for hooks, before in held:
            if hooks.keys() != before.keys():
                hooks.clear()
                hooks.update(before)
    return put_back


def differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def set_values(buffer: Tensor, values: Tensor) -> None:
    """In place where the shape is the same."""
    if isinstance(buffer, FakeTensor) or buffer.is_meta:
        return
    if buffer.shape != values.shape:
        buffer.data = values.clone()
    elif not torch.equal(buffer, values):
        buffer.data.copy_(values)


def owners(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Who of a model may keep something in Python, by name, each once: its modules, and objects in attributes of these, such as
    a configuration."""
    found: dict[str, Any] = dict(model.named_modules(prefix=prefix))
    known = set(map(id, found.values()))
    for name, module in list(found.items()):
        for what in _names(module):
            value = vars(module)[what]
            if hasattr(value, "__dict__") and not isinstance(value, NO_OWNERS) and id(value) not in known:
                known.add(id(value))
                found[f"{name}.{what}".lstrip(".")] = value
    return found


def _owners(module: Summed) -> dict[str, Any]:
    """Those of the model and of the loss, or a loss that is an object."""
    loss = module.loss.__self__ if isinstance(module.loss, types.MethodType) else module.loss
    name = "the loss" if hasattr(module.model, "loss") else "loss"
    if isinstance(loss, nn.Module):
        return {**owners(module.model), **owners(loss, name)}
    own = {name: loss} if hasattr(loss, "__dict__") and not isinstance(loss, NO_OWNERS) else {}
    return {**owners(module.model), **own}


def _names(owner: Any) -> list[str]:
    return [name for name in vars(owner) if name not in INTERNAL] if isinstance(owner, nn.Module) else list(vars(owner))


# ---- values that can be copied and compared ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Drawing:
    """A random generator's state."""
    state: Any


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_unchanging, value)) and all(map(_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_plain, value))
    return isinstance(value, (*UNCHANGING, *GENERATORS, numpy.ndarray)) or (
        isinstance(value, Tensor) and not value.requires_grad)


def _unchanging(key: Any) -> bool:
    return isinstance(key, UNCHANGING) or (isinstance(key, tuple) and all(map(_unchanging, key)))


def _copied(value: Any) -> Any:
    if isinstance(value, (*UNCHANGING, FakeTensor)):
        return value
    if isinstance(value, GENERATORS):
        return Drawing(_generator_state(value))
    return copy.deepcopy(value, {id(each): each for each in tree_leaves(value) if isinstance(each, FakeTensor)})


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _keeping(value: Any) -> Callable[[], Any]:
    """Gives the same object back, with what it holds now."""
    if isinstance(value, (*UNCHANGING, FakeTensor)):
        return lambda: value
    put_back = _contents(value)

    def again() -> Any:
        put_back()
        return value
    return again


def _contents(value: Any) -> Callable[[], Any]:
    if isinstance(value, GENERATORS):
        return functools.partial(_set_generator, value, _generator_state(value))
    if isinstance(value, Tensor):
        return functools.partial(set_values, value, value.detach().clone())
    if isinstance(value, numpy.ndarray):
        return functools.partial(_set_array, value, value.copy())
    held = {key: _keeping(each) for key, each in (value.items() if isinstance(value, dict) else enumerate(value))}

    def put_back() -> None:
        again = {key: each() for key, each in held.items()}
        if isinstance(value, dict | set):
            value.clear()
            value.update(again if isinstance(value, dict) else again.values())
        elif not isinstance(value, tuple):
            value.clear()
            value.extend(again.values())
    return put_back


def _set_array(array: numpy.ndarray[Any, Any], values: numpy.ndarray[Any, Any]) -> None:
    if not numpy.array_equal(array, values):            # it may be for reading alone
        numpy.copyto(array, values)


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, Drawing):
        return same(a.state if isinstance(a, Drawing) else _generator_state(a) if isinstance(a, GENERATORS) else None, b.state)
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):         # of a part that another rank holds
        return type(a) is type(b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.is_meta or b.is_meta):           # as in a model given away
            return a.is_meta and b.is_meta and a.shape == b.shape
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and (
            torch.equal(a, b) or (a.is_floating_point() and a.shape == b.shape and bool(
                torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))))
    if isinstance(a, numpy.ndarray) or isinstance(b, numpy.ndarray):
        return bool(numpy.array_equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)
