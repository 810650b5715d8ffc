"""Rules for functions along some dimensions: reductions, softmax, sorting, and embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    RULES,
    ShardedTensor,
    Sharding,
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


# ---- the vocabulary --------------------------------------------------------------------------
@register_rule("softmax", "log_softmax")
def apply_softmax(func: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Apply a softmax; along a divided dimension by the maximum and the sum of all ranks.

    As under autocast, low-precision types are computed in float32.
    """
    dim = dim % x.dim()
    dtype = kwargs.get("dtype", args[0] if args else None)
    if dim not in getattr(x, "shardings", ()):
        return apply_along_dim(func, x, dim, *args, **kwargs)
    x = x if dtype is None else x.to(dtype)
    input_dtype = x.dtype
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    shifted = x - compute_maximum(x, dim)
    exponentials = shifted.exp()
    total = exponentials.sum(dim, keepdim=True)
    result = exponentials / total if func.__name__ == "softmax" else shifted - total.log()
    return result if torch.is_autocast_enabled(x.device.type) else result.to(input_dtype)


def compute_maximum(x: ShardedTensor, dim: int) -> Tensor:
    """Compute the maximum along a divided dimension, without a gradient."""
    sharding = x.shardings[dim]
    maximum = sharding.group.sum_over_ranks(x.local.detach().amax(dim, keepdim=True), "MAX")
    sharding.group.note_transfer("summed", maximum.nbytes)
    return wrap_local(maximum, {at: each for at, each in x.shardings.items() if at != dim})


@register_rule("gather")
def apply_gather(func: Any, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """Apply a gather; along a divided dimension, each rank contributes the elements that it has."""
    if (
        not isinstance(x, ShardedTensor)
        or set(x.shardings) != {dim % x.dim()}
        or isinstance(index, ShardedTensor)
        or kwargs
    ):
        return NO_RULE
    dim %= x.dim()
    local_index = map_to_local_indices(x.shardings[dim], index)[index]
    # Index by positions along all dimensions: the backward of torch's own gather keeps its whole
    # input.
    positions = [
        local_index.clamp(min=0)
        if at == dim
        else torch.arange(size, device=index.device).view(
            [-1 if each == at else 1 for each in range(x.dim())]
        )
        for at, size in enumerate(index.shape)
    ]
    return x.shardings[dim].group.add_partial_results(
        x.local[tuple(positions)].masked_fill(local_index < 0, 0)
    )


def map_to_local_indices(sharding: Sharding, index: Tensor) -> Tensor:
    """Map the elements of a dimension to their positions in this rank's piece.

    Args:
        sharding: How the dimension is divided.
        index: Indices of elements, which are checked.

    Returns:
        For each element of the dimension, its position in the piece; -1 if this rank does not have
        it.

    Raises:
        IndexError: An index is out of range. Negative ones are refused too, as torch does.
    """
    device = index.device
    positions = torch.full((sharding.partition.size,), -1, dtype=torch.int64, device=device)
    if (
        not isinstance(index, FakeTensor)
        and index.numel()
        and not 0 <= int(index.min()) <= int(index.max()) < len(positions)
    ):
        raise IndexError(
            f"index {int(index.min())} to {int(index.max())} is out of range of 0 to "
            f"{len(positions) - 1}"
        )
    start = 0
    for each in sharding.partition.list_ranges(sharding.group.rank):
        positions[each.start : each.stop] = torch.arange(start, start + len(each), device=device)
        start += len(each)
    return positions


@register_rule("embedding", decides=True)
def apply_embedding(
    func: Any,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Apply an embedding; each rank contributes the rows or the features that it has."""
    if (
        isinstance(indices, ShardedTensor)
        or scale_grad_by_freq
        or sparse
        or not isinstance(weight, ShardedTensor)
    ):
        return NO_RULE
    if not weight.shardings and not (
        weight.decider and weight.decider.decide_sharding(weight, 0, "vocabulary")
    ):
        return NO_RULE
    if 1 in weight.shardings:
        return wrap_local(
            func(weight.local, indices, padding_idx), {indices.dim(): weight.shardings[1]}
        )
    sharding = weight.shardings[0]
    positions = map_to_local_indices(sharding, indices)
    local_index = positions[indices]
    padding = int(positions[padding_idx]) if padding_idx >= 0 else -1
    rows = func(weight.local, local_index.clamp(min=0), padding).masked_fill(
        (local_index < 0).unsqueeze(-1), 0
    )
    return sharding.group.add_partial_results(rows)
