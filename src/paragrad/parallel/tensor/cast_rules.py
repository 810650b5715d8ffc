"""Functions that give the same elements in another type, place or memory, or as many others."""

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
    """The type, the device, the memory are others."""
    if not isinstance(x, ShardedTensor):
        return NO_RULE
    if func.__name__ == "__set__":  # x.data = value
        (value,) = args
        for dim, cut in x.shardings.items():
            value = slice_local(gather_whole(value).detach(), dim, cut)
        x.local.data.copy_(value)
        return None
    leaves, _ = tree_flatten((args, kwargs))
    if any(isinstance(each, Tensor) for each in leaves):
        other = next(each for each in leaves if isinstance(each, Tensor))
        return x.to(other.dtype) if func.__name__ in ("to", "type_as") else NO_RULE
    made = func(x.local, *args, **kwargs)
    return (
        x
        if made is x.local
        else wrap_local(made, x.shardings)
        if isinstance(made, Tensor)
        else made
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
    """Plain, of the same type and device."""
    return func(x.local, *args, **kwargs)
