"""Rules for functions that keep the elements but change their type, device or memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    RULES,
    ShardedTensor,
    gather_whole,
    register_rule,
    slice_local,
    wrap_local,
)


def apply_cast(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that changes type, device or memory, or sets `data`."""
    if not isinstance(x, ShardedTensor):
        return NO_RULE
    if func.__name__ == "__set__":  # x.data = value
        (value,) = args
        for dim, sharding in x.shardings.items():
            value = slice_local(gather_whole(value).detach(), dim, sharding)
        x.local.data.copy_(value)
        return None
    leaves, _ = tree_flatten((args, kwargs))
    if any(isinstance(each, Tensor) for each in leaves):
        other = next(each for each in leaves if isinstance(each, Tensor))
        return x.to(other.dtype) if func.__name__ in ("to", "type_as") else NO_RULE
    result = func(x.local, *args, **kwargs)
    return (
        x
        if result is x.local
        else wrap_local(result, x.shardings)
        if isinstance(result, Tensor)
        else result
    )


RULES.update(
    dict.fromkeys(
        (
            "clone",
            "contiguous",
            "detach",
            "to",
            "float",
            "double",
            "half",
            "bfloat16",
            "long",
            "int",
            "bool",
            "type",
            "type_as",
            "cpu",
            "cuda",
            "requires_grad_",
            "data",
            "alias",
            "zeros_like",
            "ones_like",
            "empty_like",
            "full_like",
            "zero_",
            "fill_",
            "detach_",
            "positive",
        ),
        apply_cast,
    )
)


@register_rule("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def apply_new(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Make a plain tensor of the same type and device."""
    return func(x.local, *args, **kwargs)
