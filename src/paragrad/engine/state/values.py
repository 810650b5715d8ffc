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

from paragrad.engine.state.empty_parameter import EmptyTensor

IMMUTABLE_TYPES = (
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
GENERATOR_TYPES = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
# values: of a part that another rank holds; of a model given away
VALUELESS_TYPES = FakeTensor, EmptyTensor
# another's own may not let itself be changed
CONTAINER_TYPES = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@dataclass(frozen=True)
class GeneratorState:
    """A random generator's state."""

    state: Any


def is_plain_value(value: Any) -> bool:
    # of what may have gone: isinstance asks it
    if type(value) in weakref.ProxyTypes:
        return False
    if isinstance(value, dict):
        return (
            type(value) in CONTAINER_TYPES
            and all(map(_is_immutable_key, value))
            and all(map(is_plain_value, value.values()))
        )
    if isinstance(value, list | tuple | set | deque):
        return (type(value) in CONTAINER_TYPES or isinstance(value, tuple)) and all(
            map(is_plain_value, value)
        )
    return isinstance(value, (*IMMUTABLE_TYPES, *GENERATOR_TYPES, numpy.ndarray)) or (
        isinstance(value, Tensor) and not value.requires_grad
    )


def _is_immutable_key(key: Any) -> bool:
    return isinstance(key, IMMUTABLE_TYPES) or (
        isinstance(key, tuple) and all(map(_is_immutable_key, key))
    )


def copy_value(value: Any) -> Any:
    if isinstance(value, (*IMMUTABLE_TYPES, *VALUELESS_TYPES)):
        return value
    if isinstance(value, GENERATOR_TYPES):
        return GeneratorState(_get_generator_state(value))
    return copy.deepcopy(
        value, {id(each): each for each in tree_leaves(value) if isinstance(each, VALUELESS_TYPES)}
    )


def _get_generator_state(generator: Any) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def make_restorer(value: Any) -> Callable[[], Any]:
    """Gives the same object back, with what it holds now."""
    if isinstance(value, (*IMMUTABLE_TYPES, *VALUELESS_TYPES)):
        return lambda: value
    put_back = _make_content_restorer(value)

    def again() -> Any:
        put_back()
        return value

    return again


def _make_content_restorer(value: Any) -> Callable[[], Any]:
    if isinstance(value, GENERATOR_TYPES):
        return functools.partial(_set_generator_state, value, _get_generator_state(value))
    if isinstance(value, Tensor):
        return functools.partial(set_tensor_values, value, value.detach().clone())
    if isinstance(value, numpy.ndarray):
        return functools.partial(_restore_array, value, value.copy())
    held = {
        key: make_restorer(each)
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


def _restore_array(array: numpy.ndarray[Any, Any], values: numpy.ndarray[Any, Any]) -> None:
    if not numpy.array_equal(array, values):  # it may be for reading alone
        numpy.copyto(array, values)


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def is_same_value(a: Any, b: Any) -> bool:
    if isinstance(b, GeneratorState):
        return is_same_value(
            a.state
            if isinstance(a, GeneratorState)
            else _get_generator_state(a)
            if isinstance(a, GENERATOR_TYPES)
            else None,
            b.state,
        )
    if isinstance(a, VALUELESS_TYPES) or isinstance(b, VALUELESS_TYPES):
        return type(a) is type(b) and a.shape == b.shape
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.dtype == b.dtype
            and (
                _is_equal_tensor(a, b)
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
        return a.keys() == b.keys() and all(is_same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    return bool(a == b) or (a != a and b != b)


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def set_tensor_values(buffer: Tensor, values: Tensor) -> None:
    """In place where the shape is the same."""
    if isinstance(buffer, VALUELESS_TYPES):
        return
    if buffer.shape != values.shape:
        buffer.data = values.clone()
    elif not _is_equal_tensor(buffer, values):
        buffer.data.copy_(values)


def _is_equal_tensor(a: Tensor, b: Tensor) -> bool:
    if a.layout == b.layout == torch.strided:
        return torch.equal(a, b)
    return a.layout == b.layout and a.shape == b.shape and torch.equal(a.to_dense(), b.to_dense())


def list_saved_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Buffers that its state_dict holds, each once, as they are now: a forward may make them
    anew.
    """
    kept = {id(each) for each in module.state_dict(keep_vars=True).values()}
    return {name: each for name, each in module.named_buffers(prefix) if id(each) in kept}


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of a type are summed."""
    return (
        torch.promote_types(dtype, torch.float32)
        if dtype.is_floating_point or dtype.is_complex
        else torch.float64
    )
