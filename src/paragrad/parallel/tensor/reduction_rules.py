"""Functions along some dimensions: reductions, softmax, sorting; and the loss on parts of the
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from paragrad.parallel.sharding.sharded_tensor import RULES, UNKNOWN, Cut, Divided, divided, rule


# ---- reductions ------------------------------------------------------------------------------
def reduced(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Over dimensions that are not divided, or, of a sum and a mean, over others too."""
    if not isinstance(x, Divided) or "out" in kwargs or (args and isinstance(args[0], Tensor)):
        return UNKNOWN
    dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    keep = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    if (
        isinstance(dim, bool)
        or isinstance(keep, Tensor)
        or (len(args) > 1 and func.__name__.endswith("_mean"))
    ):
        return UNKNOWN
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
    over = dims & set(x.cuts)
    if (over and func.__name__ not in ("sum", "mean")) or (
        over and func.__name__ == "mean" and not x.is_floating_point()
    ):
        return UNKNOWN
    made = (Tensor.sum if over and func.__name__ == "mean" else func)(x.local, *args, **kwargs)
    for at in sorted(over):
        made = x.cuts[at].line.added(made)
    if over and func.__name__ == "mean":
        count = 1
        for at in dims:
            count *= x.shape[at]
        made = made / count
    rest = {
        at if keep else at - sum(each < at for each in dims): cut
        for at, cut in x.cuts.items()
        if at not in over
    }
    return tree_map_only(Tensor, lambda each: divided(each, rest), made)


REDUCING = (
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
RULES.update(dict.fromkeys(REDUCING, reduced))


@rule("var", "std")
def deviation(func: Any, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(dim, bool) or args or not isinstance(x, Divided):
        return UNKNOWN
    return reduced(func, x, **{"dim": dim, **kwargs})


# ---- along a dimension -----------------------------------------------------------------------
LAST_TWO = "the last two dimensions"
# where the dimension stands after the first argument, and which it is otherwise
ALONG: dict[str, tuple[int, Any]] = {
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


def along(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along dimensions that are not divided. As many dimensions come out."""
    place, otherwise = ALONG[func.__name__]
    if not isinstance(x, Divided) or any(
        isinstance(each, Tensor) for each in (*args, *kwargs.values())
    ):
        return UNKNOWN
    given = (
        args
        if func.__name__ == "flip" and len(args) > 1
        else args[place]
        if len(args) > place
        else otherwise
    )
    dim = (-2, -1) if otherwise == LAST_TWO else kwargs.get("dim", kwargs.get("dims", given))
    if dim is None or isinstance(dim, bool):
        return UNKNOWN
    if any(each % x.dim() in x.cuts for each in ([dim] if isinstance(dim, int) else dim)):
        return UNKNOWN
    made = func(x.local, *args, **kwargs)
    return tree_map_only(Tensor, lambda each: divided(each, x.cuts), made)


RULES.update(dict.fromkeys(ALONG, along))


@rule("vector_norm", "linalg_vector_norm")
def vector_norm(
    func: Any, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    if not isinstance(x, Divided) or dim is None:
        return UNKNOWN
    made = reduced(torch.amax, x, dim, keepdim)  # for where its dimensions go
    if made is UNKNOWN:
        return UNKNOWN
    return divided(func(x.local, ord, dim, keepdim, **kwargs), made.cuts)


# ---- the vocabulary --------------------------------------------------------------------------
@rule("softmax", "log_softmax")
def softmax(func: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Over a divided dimension by the largest and the sum of all ranks; of low types in
    float32, as autocast has it.
    """
    dim = dim % x.dim()
    dtype = kwargs.get("dtype", args[0] if args else None)
    if dim not in getattr(x, "cuts", ()):
        return along(func, x, dim, *args, **kwargs)
    x = x if dtype is None else x.to(dtype)
    low = x.dtype
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    shifted = x - largest(x, dim)
    raised = shifted.exp()
    total = raised.sum(dim, keepdim=True)
    found = raised / total if func.__name__ == "softmax" else shifted - total.log()
    return found if torch.is_autocast_enabled(x.device.type) else found.to(low)


def largest(x: Divided, dim: int) -> Tensor:
    """Along a divided dimension; without a gradient."""
    cut = x.cuts[dim]
    most = cut.line.summed(x.local.detach().amax(dim, keepdim=True), "MAX")
    cut.line.note("summed", most.nbytes)
    return divided(most, {at: each for at, each in x.cuts.items() if at != dim})


@rule("gather")
def gather(func: Any, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """Along a divided dimension each rank gives what it has."""
    if (
        not isinstance(x, Divided)
        or set(x.cuts) != {dim % x.dim()}
        or isinstance(index, Divided)
        or kwargs
    ):
        return UNKNOWN
    dim %= x.dim()
    here = local_places(x.cuts[dim], index)[index]
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
    return x.cuts[dim].line.added(x.local[tuple(places)].masked_fill(here < 0, 0))


def local_places(cut: Cut, index: Tensor) -> Tensor:
    """Of every element of a dimension, where it is in this rank's piece; -1: it is not. index:
    of elements. Raises IndexError where there is none of it, as torch does, also below 0.
    """
    device = index.device
    places = torch.full((cut.pieces.size,), -1, dtype=torch.int64, device=device)
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
    for each in cut.pieces.ranges(cut.line.rank):
        places[each.start : each.stop] = torch.arange(start, start + len(each), device=device)
        start += len(each)
    return places


@rule("embedding", decides=True)
def embedding(
    func: Any,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of the vocabulary: each rank gives those that it has. Or features."""
    if (
        isinstance(indices, Divided)
        or scale_grad_by_freq
        or sparse
        or not isinstance(weight, Divided)
    ):
        return UNKNOWN
    if not weight.cuts and not (weight.asking and weight.asking.divide(weight, 0, "vocabulary")):
        return UNKNOWN
    if 1 in weight.cuts:
        return divided(func(weight.local, indices, padding_idx), {indices.dim(): weight.cuts[1]})
    cut = weight.cuts[0]
    places = local_places(cut, indices)
    here = places[indices]
    padding = int(places[padding_idx]) if padding_idx >= 0 else -1
    rows = func(weight.local, here.clamp(min=0), padding).masked_fill((here < 0).unsqueeze(-1), 0)
    return cut.line.added(rows)
