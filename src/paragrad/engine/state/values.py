"""Copy, compare and restore values: numbers, text, generators, tensors, and containers."""

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

from paragrad.engine.state.empty_tensor import EmptyTensor

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
# tensors without values: of a part on another rank; of a model that ranks train in parts
VALUELESS_TYPES = FakeTensor, EmptyTensor
# subclasses are left out: they may refuse changes
CONTAINER_TYPES = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@dataclass(frozen=True)
class GeneratorState:
    """The state of a random generator.

    Attributes:
        state: The state, in the form of the library of the generator.
    """

    state: Any


def is_plain_value(value: Any) -> bool:
    """Return whether a value can be copied, compared and restored.

    Args:
        value: Any value.
    """
    # the object behind a proxy may be gone, and isinstance would access it
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
    """Copy a value; of a generator, copy the state.

    Args:
        value: A plain value. Tensors without values are not copied.
    """
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
    """Remember a value and its content.

    Args:
        value: A plain value.

    Returns:
        A function that restores the content and returns the same object.
    """
    if isinstance(value, (*IMMUTABLE_TYPES, *VALUELESS_TYPES)):
        return lambda: value
    restore_content = _make_content_restorer(value)

    def restore() -> Any:
        restore_content()
        return value

    return restore


def _make_content_restorer(value: Any) -> Callable[[], Any]:
    if isinstance(value, GENERATOR_TYPES):
        return functools.partial(_set_generator_state, value, _get_generator_state(value))
    if isinstance(value, Tensor):
        return functools.partial(set_tensor_values, value, value.detach().clone())
    if isinstance(value, numpy.ndarray):
        return functools.partial(_restore_array, value, value.copy())
    restorers = {
        key: make_restorer(each)
        for key, each in (value.items() if isinstance(value, dict) else enumerate(value))
    }

    def restore() -> None:
        restored = {key: each() for key, each in restorers.items()}
        present = dict(value.items() if isinstance(value, dict) else enumerate(value))
        if present.keys() == restored.keys() and all(
            present[key] is each for key, each in restored.items()
        ):
            return  # unchanged, and the container may refuse changes
        if isinstance(value, dict | set):
            value.clear()
            value.update(restored if isinstance(value, dict) else restored.values())
        elif not isinstance(value, tuple):
            value.clear()
            value.extend(restored.values())

    return restore


def _restore_array(array: numpy.ndarray[Any, Any], values: numpy.ndarray[Any, Any]) -> None:
    if not numpy.array_equal(array, values):  # the array may be read-only
        numpy.copyto(array, values)


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def is_same_value(a: Any, b: Any) -> bool:
    """Return whether two values are equal; nan equals nan.

    Args:
        a: A value.
        b: A value, or a `GeneratorState` to compare with the generator a.
    """
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
    """Return whether a tensor has a type that allows gradients.

    Args:
        tensor: The tensor.
    """
    return bool(tensor.is_floating_point() or tensor.is_complex())


def set_tensor_values(buffer: Tensor, values: Tensor) -> None:
    """Give a tensor new values, in place if the shape is the same.

    Args:
        buffer: The tensor to change. A tensor without values is left alone.
        values: The new values.
    """
    if isinstance(buffer, VALUELESS_TYPES):
        return
    if buffer.shape != values.shape:
        buffer.data = values.clone()
    elif not _is_equal_tensor(buffer, values):
        buffer.data.copy_(values)


def _is_equal_tensor(a: Tensor, b: Tensor) -> bool:
    if a.layout == b.layout == torch.strided:
        return bool(torch.equal(a, b))
    same_form = a.layout == b.layout and a.shape == b.shape
    return same_form and bool(torch.equal(a.to_dense(), b.to_dense()))


def list_saved_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the buffers that the state_dict of a module contains, each once.

    A forward pass may replace buffers, so the result is valid for now only.

    Args:
        module: The module.
        prefix: Prefix of the names.
    """
    saved = {id(each) for each in module.state_dict(keep_vars=True).values()}
    return {name: each for name, each in module.named_buffers(prefix) if id(each) in saved}


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are summed.

    Args:
        dtype: Type of the numbers.

    Returns:
        float32 or finer; float64 for integers.
    """
    return (
        torch.promote_types(dtype, torch.float32)
        if dtype.is_floating_point or dtype.is_complex
        else torch.float64
    )
