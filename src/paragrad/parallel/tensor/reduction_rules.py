"""Functions along some dimensions: reductions, softmax, sorting; and the loss on parts of the
vocabulary.
"""

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
    """Over dimensions that are not divided, or, of a sum and a mean, over others too."""
    if (
        not isinstance(x, ShardedTensor)
        or "out" in kwargs
        or (args and isinstance(args[0], Tensor))
    ):
        return NO_RULE
    dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    keep = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    if (
        isinstance(dim, bool)
        or isinstance(keep, Tensor)
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
    over = dims & set(x.shardings)
    if (over and func.__name__ not in ("sum", "mean")) or (
        over and func.__name__ == "mean" and not x.is_floating_point()
    ):
        return NO_RULE
    made = (Tensor.sum if over and func.__name__ == "mean" else func)(x.local, *args, **kwargs)
    for at in sorted(over):
        made = x.shardings[at].group.add_partial_results(made)
    if over and func.__name__ == "mean":
        count = 1
        for at in dims:
            count *= x.shape[at]
        made = made / count
    rest = {
        at if keep else at - sum(each < at for each in dims): cut
        for at, cut in x.shardings.items()
        if at not in over
    }
    return tree_map_only(Tensor, lambda each: wrap_local(each, rest), made)


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
    if isinstance(dim, bool) or args or not isinstance(x, ShardedTensor):
        return NO_RULE
    return apply_reduction(func, x, **{"dim": dim, **kwargs})


# ---- along a dimension -----------------------------------------------------------------------
LAST_TWO = "the last two dimensions"
# where the dimension stands after the first argument, and which it is otherwise
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
    """Along dimensions that are not divided. As many dimensions come out."""
    place, otherwise = ALONG_DIM[func.__name__]
    if not isinstance(x, ShardedTensor) or any(
        isinstance(each, Tensor) for each in (*args, *kwargs.values())
    ):
        return NO_RULE
    given = (
        args
        if func.__name__ == "flip" and len(args) > 1
        else args[place]
        if len(args) > place
        else otherwise
    )
    dim = (-2, -1) if otherwise == LAST_TWO else kwargs.get("dim", kwargs.get("dims", given))
    if dim is None or isinstance(dim, bool):
        return NO_RULE
    if any(each % x.dim() in x.shardings for each in ([dim] if isinstance(dim, int) else dim)):
        return NO_RULE
    made = func(x.local, *args, **kwargs)
    return tree_map_only(Tensor, lambda each: wrap_local(each, x.shardings), made)


RULES.update(dict.fromkeys(ALONG_DIM, apply_along_dim))


@register_rule("vector_norm", "linalg_vector_norm")
def apply_vector_norm(
    func: Any, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    if not isinstance(x, ShardedTensor) or dim is None:
        return NO_RULE
    made = apply_reduction(torch.amax, x, dim, keepdim)  # for where its dimensions go
    if made is NO_RULE:
        return NO_RULE
    return wrap_local(func(x.local, ord, dim, keepdim, **kwargs), made.shardings)


# ---- the vocabulary --------------------------------------------------------------------------
@register_rule("softmax", "log_softmax")
def apply_softmax(func: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Over a divided dimension by the largest and the sum of all ranks; of low types in
    float32, as autocast has it.
    """
    dim = dim % x.dim()
    dtype = kwargs.get("dtype", args[0] if args else None)
    if dim not in getattr(x, "shardings", ()):
        return apply_along_dim(func, x, dim, *args, **kwargs)
    x = x if dtype is None else x.to(dtype)
    low = x.dtype
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    shifted = x - compute_maximum(x, dim)
    raised = shifted.exp()
    total = raised.sum(dim, keepdim=True)
    found = raised / total if func.__name__ == "softmax" else shifted - total.log()
    return found if torch.is_autocast_enabled(x.device.type) else found.to(low)


def compute_maximum(x: ShardedTensor, dim: int) -> Tensor:
    """Along a divided dimension; without a gradient."""
    cut = x.shardings[dim]
    most = cut.group.sum_over_ranks(x.local.detach().amax(dim, keepdim=True), "MAX")
    cut.group.note_transfer("summed", most.nbytes)
    return wrap_local(most, {at: each for at, each in x.shardings.items() if at != dim})


@register_rule("gather")
def apply_gather(func: Any, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """Along a divided dimension each rank gives what it has."""
    if (
        not isinstance(x, ShardedTensor)
        or set(x.shardings) != {dim % x.dim()}
        or isinstance(index, ShardedTensor)
        or kwargs
    ):
        return NO_RULE
    dim %= x.dim()
    here = map_to_local_indices(x.shardings[dim], index)[index]
    # by places along all dimensions: the backward of torch's own gather keeps all that it took
    # from
    places = [
        here.clamp(min=0)
        if at == dim
        else torch.arange(size, device=index.device).view(
            [-1 if each == at else 1 for each in range(x.dim())]
        )
        for at, size in enumerate(index.shape)
    ]
    return x.shardings[dim].group.add_partial_results(
        x.local[tuple(places)].masked_fill(here < 0, 0)
    )


def map_to_local_indices(sharding: Sharding, index: Tensor) -> Tensor:
    """Of every element of a dimension, where it is in this rank's piece; -1: it is not. index:
    of elements. Raises IndexError where there is none of it, as torch does, also below 0.
    """
    device = index.device
    places = torch.full((sharding.partition.size,), -1, dtype=torch.int64, device=device)
    if (
        not isinstance(index, FakeTensor)
        and index.numel()
        and not 0 <= int(index.min()) <= int(index.max()) < len(places)
    ):
        raise IndexError(
            f"index {int(index.min())} to {int(index.max())} is out of range of 0 to "
            f"{len(places) - 1}"
        )
    start = 0
    for each in sharding.partition.list_ranges(sharding.group.rank):
        places[each.start : each.stop] = torch.arange(start, start + len(each), device=device)
        start += len(each)
    return places


@register_rule("embedding", decides=True)
def apply_embedding(
    func: Any,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of the vocabulary: each rank gives those that it has. Or features."""
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
    cut = weight.shardings[0]
    places = map_to_local_indices(cut, indices)
    here = places[indices]
    padding = int(places[padding_idx]) if padding_idx >= 0 else -1
    rows = func(weight.local, here.clamp(min=0), padding).masked_fill((here < 0).unsqueeze(-1), 0)
    return cut.group.add_partial_results(rows)
