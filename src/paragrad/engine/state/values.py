"""Values that can be copied, compared and put back: numbers, text, generators, tensors, and
what holds them.
"""

from __future__ import annotations

import copy
import functools
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from paragrad.engine.state.empty_parameter import Vacant

UNCHANGING = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    complex,
    torch.Size,
    torch.dtype,
    torch.device,
)
GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
# values: of a part that another rank holds; of a model given away
WITHOUT = FakeTensor, Vacant
# another's own may not let itself be changed
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@dataclass(frozen=True)
class Drawing:
    """A random generator's state."""

    state: Any


def plain(value: Any) -> bool:
    # of what may have gone: isinstance asks it
    if type(value) in weakref.ProxyTypes:
        return False
    if isinstance(value, dict):
        return (
            type(value) in CONTAINERS
            and all(map(_unchanging, value))
            and all(map(plain, value.values()))
        )
    if isinstance(value, list | tuple | set | deque):
        return (type(value) in CONTAINERS or isinstance(value, tuple)) and all(map(plain, value))
    return isinstance(value, (*UNCHANGING, *GENERATORS, numpy.ndarray)) or (
        isinstance(value, Tensor) and not value.requires_grad
    )


def _unchanging(key: Any) -> bool:
    return isinstance(key, UNCHANGING) or (isinstance(key, tuple) and all(map(_unchanging, key)))


def copied(value: Any) -> Any:
    if isinstance(value, (*UNCHANGING, *WITHOUT)):
        return value
    if isinstance(value, GENERATORS):
        return Drawing(_generator_state(value))
    return copy.deepcopy(
        value, {id(each): each for each in tree_leaves(value) if isinstance(each, WITHOUT)}
    )


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def keeping(value: Any) -> Callable[[], Any]:
    """Gives the same object back, with what it holds now."""
    if isinstance(value, (*UNCHANGING, *WITHOUT)):
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
    held = {
        key: keeping(each)
        for key, each in (value.items() if isinstance(value, dict) else enumerate(value))
    }

    def put_back() -> None:
        again = {key: each() for key, each in held.items()}
        now = dict(value.items() if isinstance(value, dict) else enumerate(value))
        if now.keys() == again.keys() and all(now[key] is each for key, each in again.items()):
            return  # it may be one that is not to be changed
        if isinstance(value, dict | set):
            value.clear()
            value.update(again if isinstance(value, dict) else again.values())
        elif not isinstance(value, tuple):
            value.clear()
            value.extend(again.values())

    return put_back


def _set_array(array: numpy.ndarray[Any, Any], values: numpy.ndarray[Any, Any]) -> None:
    if not numpy.array_equal(array, values):  # it may be for reading alone
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
        return same(
            a.state
            if isinstance(a, Drawing)
            else _generator_state(a)
            if isinstance(a, GENERATORS)
            else None,
            b.state,
        )
    if isinstance(a, WITHOUT) or isinstance(b, WITHOUT):
        return type(a) is type(b) and a.shape == b.shape
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.dtype == b.dtype
            and (
                _equal(a, b)
                or (
                    a.is_floating_point()
                    and a.shape == b.shape
                    and bool(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))
                )
            )
        )
    if isinstance(a, numpy.ndarray) or isinstance(b, numpy.ndarray):
        return bool(numpy.array_equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


def differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def set_values(buffer: Tensor, values: Tensor) -> None:
    """In place where the shape is the same."""
    if isinstance(buffer, WITHOUT):
        return
    if buffer.shape != values.shape:
        buffer.data = values.clone()
    elif not _equal(buffer, values):
        buffer.data.copy_(values)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout == b.layout == torch.strided:
        return torch.equal(a, b)
    return a.layout == b.layout and a.shape == b.shape and torch.equal(a.to_dense(), b.to_dense())


def saved_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Buffers that its state_dict holds, each once, as they are now: a forward may make them
    anew.
    """
    kept = {id(each) for each in module.state_dict(keep_vars=True).values()}
    return {name: each for name, each in module.named_buffers(prefix) if id(each) in kept}


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of a type are summed."""
    return (
        torch.promote_types(dtype, torch.float32)
        if dtype.is_floating_point or dtype.is_complex
        else torch.float64
    )
