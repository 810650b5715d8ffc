"""A base class for tensors that stand for a plain tensor, and helpers that all such classes use.

A sharded tensor (`parallel/sharding/sharded_tensor.py`) has the shape of the whole tensor and
holds a part of its values. The engine does not know how it is divided: it calls `unwrap`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor


class WrappedTensor(Tensor):
    """A tensor subclass that can give the plain tensor that it stands for."""

    def unwrap(self) -> Tensor:
        """Return the plain tensor. Collective over the ranks that hold the parts."""
        raise NotImplementedError


def unwrap(value: Tensor) -> Tensor:
    """Return the plain tensor that a tensor stands for.

    Args:
        value: A wrapped tensor, or a plain tensor, which is returned as it is.
    """
    return value.unwrap() if isinstance(value, WrappedTensor) else value


# properties and functions that depend on shape, type and layout alone, never on values
VALUE_FREE_ATTRIBUTES = frozenset(
    (
        "shape",
        "size",
        "dim",
        "ndim",
        "ndimension",
        "numel",
        "nelement",
        "dtype",
        "device",
        "layout",
        "is_floating_point",
        "is_complex",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_mps",
        "is_xpu",
        "is_mkldnn",
        "is_nested",
        "element_size",
        "itemsize",
        "nbytes",
        "__hash__",
        "__len__",
        "is_contiguous",
        "stride",
        "is_signed",
        "get_device",
        "names",
        "is_same_size",
        "is_inference",
        "is_conj",
        "is_neg",
        "is_tensor",
        "result_type",
        "can_cast",
    )
)


@functools.lru_cache(maxsize=4096)
def get_function_name(func: Any) -> str:
    """Return the name of a torch function, or of the attribute that it gets or sets.

    Args:
        func: The function that `__torch_function__` receives.
    """
    name = func.__name__
    result: str = func.__self__.__name__ if name in ("__get__", "__set__") else name
    return result
