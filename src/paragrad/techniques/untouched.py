"""What forwards change besides gradients, and putting it back: parameters, buffers, Python state, generators."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paragrad.world.generators import generators_kept

if TYPE_CHECKING:
    from paragrad.jobs.loss import Summed

INTERNAL = frozenset(name for name in vars(nn.Module()) if name[0] == "_")
HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))
UNCHANGING = (type(None), bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device)
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


class Before:
    """A model and its loss as they are; later, what changed.

    values: names of parameters whose values and gradients are kept too, to put them back; whether others changed is told by
    their versions, which `parameter.data` does not move.  buffers: they are kept too, and hooks: a model that registers them in
    its first forward, and notes in an attribute that it did, would do so again.
    """

    def __init__(self, module: Summed, values: Iterable[str] = (), buffers: bool = False) -> None:
        self.owners = dict(_owners(module))
        modules = [owner for owner in self.owners.values() if isinstance(owner, nn.Module)]
        # a shard is changed by no forward: that sees the whole parameter, which is gone after it
        self.parameters = {name: parameter for name, parameter in module.model.named_parameters()
                           if not is_traceable_wrapper_subclass(parameter)}
        self.versions = {name: parameter._version for name, parameter in self.parameters.items()}
        self.names = {name: set(vars(owner)) for name, owner in self.owners.items()}
        self.state = {name: {what: _copied(vars(owner)[what]) for what in _names(owner) if _plain(vars(owner)[what])}
                      for name, owner in self.owners.items()}
        self.values = {name: (self.parameters[name].data, self.parameters[name].detach().clone(), self.parameters[name].grad)
                       for name in values if name in self.parameters}
        self.buffers = [(each, dict(each._buffers), {name: buffer.detach().clone() for name, buffer in each._buffers.items()
                                                     if buffer is not None}) for each in modules] if buffers else []
        self.hooks = [(hooks, hooks.copy()) for each in modules for hooks in _hooks(each)] if buffers else []

    def changed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(parameters, Python state) that are not as they were, by name, as they are now."""
        state = {}
        for name, owner in self.owners.items():
            now, before = vars(owner), self.state[name]
            state.update({f"{name}.{what}".lstrip("."): _copied(now[what]) for what in _names(owner)
                          if _plain(now[what]) and not (what in before and same(now[what], before[what]))})
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items() if self._moved(name)}, state

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
        for each, held, values in self.buffers:
            for name, value in values.items():
                set_values(held[name], value)
            if any(each._buffers.get(name) is not buffer for name, buffer in held.items()) or len(each._buffers) > len(held):
                each._buffers.clear()
                each._buffers.update(held)
        for hooks, held in self.hooks:
            if hooks.keys() != held.keys():
                hooks.clear()
                hooks.update(held)
        for name, owner in self.owners.items():
            before, now = self.state[name], vars(owner)
            for what in [what for what in _names(owner) if what not in self.names[name]]:
                del now[what]
            for what, value in before.items():
                if what not in now or not same(now[what], value):
                    _put(now, what, value)


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [vars(module)[name] for name in HOOKS]


def differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def set_values(buffer: Tensor, values: Tensor) -> None:
    """In place where the shape is the same."""
    if buffer.shape != values.shape:
        buffer.data = values.clone()
    elif not torch.equal(buffer, values):
        buffer.data.copy_(values)


def _owners(module: Summed) -> Iterator[tuple[str, Any]]:
    """What may keep something in Python, by name: the modules of the model and of the loss; a loss that is an object."""
    yield from module.model.named_modules()
    loss = module.loss.__self__ if isinstance(module.loss, types.MethodType) else module.loss
    if isinstance(loss, nn.Module):
        yield from loss.named_modules(prefix="loss")
    elif hasattr(loss, "__dict__") and not isinstance(loss, types.FunctionType | functools.partial | type):
        yield "loss", loss


def _names(owner: Any) -> list[str]:
    return [name for name in vars(owner) if name not in INTERNAL] if isinstance(owner, nn.Module) else list(vars(owner))


# ---- values that can be copied and compared ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Drawing:
    """A random generator's state."""
    state: Any


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_plain, value))
    return isinstance(value, (*UNCHANGING, *GENERATORS, numpy.ndarray)) or (
        isinstance(value, Tensor) and not value.requires_grad)


def _copied(value: Any) -> Any:
    if isinstance(value, (*UNCHANGING, FakeTensor)):
        return value
    return Drawing(_generator_state(value)) if isinstance(value, GENERATORS) else copy.deepcopy(value)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put(into: dict[str, Any], name: str, value: Any) -> None:
    """Put a kept value back; a generator is another's too, so it stays the same object."""
    generator = into.get(name)
    if not isinstance(value, Drawing) or not isinstance(generator, GENERATORS):
        into[name] = value
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = value.state
    elif isinstance(generator, random.Random):
        generator.setstate(value.state)
    else:
        generator.set_state(value.state)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, Drawing):
        return same(a.state if isinstance(a, Drawing) else _generator_state(a) if isinstance(a, GENERATORS) else None, b.state)
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):         # of a part that another rank holds
        return type(a) is type(b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
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
