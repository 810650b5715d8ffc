"""Rules for functions along some dimensions: reductions, sorting, and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    RULES,
    ShardedTensor,
    register_rule,
    wrap_local,
)


# ---- reductions ------------------------------------------------------------------------------
def apply_reduction(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce dimensions that are not divided; a sum or a mean also reduces divided ones."""
    if (
        not isinstance(x, ShardedTensor)
        or "out" in kwargs
        or (args and isinstance(args[0], Tensor))
    ):
        return NO_RULE
    dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    keep_dims = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    if (
        isinstance(dim, bool)
        or isinstance(keep_dims, Tensor)
        or (len(args) > 1 and func.__name__.endswith("_mean"))
    ):
        return NO_RULE
    dims = {
        each % x.dim()
        for each in (
            range(x.dim())
            if dim is None or dim in ((), [])
            else [dim]
            if isinstance(dim, int)
            else dim
        )
    }
    divided_dims = dims & set(x.shardings)
    if (divided_dims and func.__name__ not in ("sum", "mean")) or (
        divided_dims and func.__name__ == "mean" and not x.is_floating_point()
    ):
        return NO_RULE
    result = (Tensor.sum if divided_dims and func.__name__ == "mean" else func)(
        x.local, *args, **kwargs
    )
    for at in sorted(divided_dims):
        result = x.shardings[at].group.add_partial_results(result)
    if divided_dims and func.__name__ == "mean":
        count = 1
        for at in dims:
            count *= x.shape[at]
        result = result / count
    remaining = {
        at if keep_dims else at - sum(each < at for each in dims): sharding
        for at, sharding in x.shardings.items()
        if at not in divided_dims
    }
    return tree_map_only(Tensor, lambda each: wrap_local(each, remaining), result)


REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "prod",
    "var_mean",
    "std_mean",
    "logsumexp",
    "all",
    "any",
    "argmax",
    "argmin",
    "median",
    "nansum",
    "nanmean",
    "count_nonzero",
)
RULES.update(dict.fromkeys(REDUCTIONS, apply_reduction))


@register_rule("var", "std")
def apply_deviation(func: Any, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Apply a variance or standard deviation."""
    if isinstance(dim, bool) or args or not isinstance(x, ShardedTensor):
        return NO_RULE
    return apply_reduction(func, x, **{"dim": dim, **kwargs})


# ---- along a dimension -----------------------------------------------------------------------
LAST_TWO = "the last two dimensions"
# (position of the dimension after the first argument, its default)
ALONG_DIM: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip"),
        (0, None),
    ),
    **dict.fromkeys(("sort", "argsort", "glu"), (0, -1)),
    **dict.fromkeys(("topk", "diff"), (1, -1)),
    "roll": (1, None),
    "tril": (1, LAST_TWO),
    "triu": (1, LAST_TWO),
}


def apply_along_dim(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a function along dimensions that are not divided, which keeps the dimensions."""
    position, default = ALONG_DIM[func.__name__]
    if not isinstance(x, ShardedTensor) or any(
        isinstance(each, Tensor) for each in (*args, *kwargs.values())
    ):
        return NO_RULE
    dim_argument = (
        args
        if func.__name__ == "flip" and len(args) > 1
        else args[position]
        if len(args) > position
        else default
    )
    dim = (-2, -1) if default == LAST_TWO else kwargs.get("dim", kwargs.get("dims", dim_argument))
    if dim is None or isinstance(dim, bool):
        return NO_RULE
    if any(each % x.dim() in x.shardings for each in ([dim] if isinstance(dim, int) else dim)):
        return NO_RULE
    result = func(x.local, *args, **kwargs)
    return tree_map_only(Tensor, lambda each: wrap_local(each, x.shardings), result)


RULES.update(dict.fromkeys(ALONG_DIM, apply_along_dim))


@register_rule("vector_norm", "linalg_vector_norm")
def apply_vector_norm(
    func: Any, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Apply a norm along dimensions that are not divided."""
    if not isinstance(x, ShardedTensor) or dim is None:
        return NO_RULE
    reduced = apply_reduction(torch.amax, x, dim, keepdim)  # shows where the dimensions go
    if reduced is NO_RULE:
        return NO_RULE
    return wrap_local(func(x.local, ord, dim, keepdim, **kwargs), reduced.shardings)
