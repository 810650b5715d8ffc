"""Losses: of classes in pieces, of which no rank has the scores of all, and of samples or
pixels in pieces.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    RULES,
    ShardedTensor,
    gather_whole,
    register_rule,
    slice_local,
    wrap_local,
)
from paragrad.parallel.tensor.einsum_rules import apply_elementwise

# where the number of the reduction stands among the arguments
REDUCTION_POSITIONS = {
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"), 2
    ),
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "poisson_nll_loss": 5,
}


def apply_elementwise_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of each element, and their sum or mean."""
    given = list(args)
    place = REDUCTION_POSITIONS[func.__name__]
    reduction = kwargs.pop("reduction", given[place] if len(given) > place else 1)
    given[place : place + 1] = [0] if len(given) > place else []
    each = apply_elementwise(
        func, *given, **kwargs, **({} if len(given) > place else {"reduction": 0})
    )
    if each is NO_RULE:
        return NO_RULE
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()


RULES.update(dict.fromkeys(REDUCTION_POSITIONS, apply_elementwise_loss))


@register_rule("nll_loss", "nll_loss_nd", "nll_loss2d")
def apply_nll_loss(
    func: Any,
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Of logarithms of probabilities; as cross_entropy_loss where labels are smoothed."""
    dim = 1 if logs.dim() > 1 else 0
    if (
        isinstance(logs, ShardedTensor)
        and dim not in logs.shardings
        and not isinstance(target, ShardedTensor)
    ):
        return compute_pixel_loss(
            func, logs, target, weight, reduction, ignore_index, label_smoothing
        )
    if (
        not isinstance(logs, ShardedTensor)
        or set(logs.shardings) != {dim}
        or isinstance(target, ShardedTensor)
    ):
        return NO_RULE
    kept = target != ignore_index
    known = target.masked_fill(~kept, 0)
    each = -logs.gather(dim, known.unsqueeze(dim)).squeeze(dim)
    weight = None if weight is None else gather_whole(weight)
    own = kept.to(each.dtype) if weight is None else weight[known].masked_fill(~kept, 0)
    each = each.masked_fill(~kept, 0) * own
    if label_smoothing:
        scaled = (
            logs
            if weight is None
            else logs * weight.view(-1, *(1 for _ in range(logs.dim() - 1 - dim)))
        )
        smooth = -scaled.sum(dim).masked_fill(~kept, 0) / logs.shape[dim]
        each = (1 - label_smoothing) * each + label_smoothing * smooth
    return each if reduction == 0 else each.sum() if reduction == 2 else each.sum() / own.sum()


def compute_pixel_loss(
    func: Any,
    scores: ShardedTensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Scores of all classes for some samples, or places in them."""
    own = ShardedTensor(target, {})
    for dim, cut in scores.shardings.items():
        at = dim - (dim > 1)
        own = ShardedTensor(slice_local(own.local, at, cut), {**own.shardings, at: cut})
    weight = None if weight is None else gather_whole(weight)
    given = () if func.__name__.startswith("nll") else (label_smoothing,)
    each = wrap_local(func(scores.local, own.local, weight, 0, ignore_index, *given), own.shardings)
    if reduction != 1:
        return each if reduction == 0 else each.sum()
    kept = target != ignore_index
    counts = kept if weight is None else weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0)
    return each.sum() / counts.sum()


@register_rule("cross_entropy_loss")
def apply_cross_entropy(
    func: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Of classes in pieces: no rank has the scores of all. Of pixels in pieces, each of its
    own.
    """
    dim = 1 if x.dim() > 1 else 0
    if (
        isinstance(x, ShardedTensor)
        and dim not in x.shardings
        and target.shape != x.shape
        and not isinstance(target, ShardedTensor)
    ):
        return compute_pixel_loss(func, x, target, weight, reduction, ignore_index, label_smoothing)
    if (
        not isinstance(x, ShardedTensor)
        or set(x.shardings) != {dim}
        or isinstance(target, ShardedTensor)
    ):
        return NO_RULE
    logs = x.log_softmax(dim)
    if target.shape != x.shape:
        return apply_nll_loss(func, logs, target, weight, reduction, ignore_index, label_smoothing)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
    if weight is not None:
        target = target * gather_whole(weight).view(-1, *(1 for _ in range(x.dim() - 1 - dim)))
    each = -(logs * target).sum(dim)
    return (
        each
        if reduction == 0
        else each.sum() / (x.numel() // x.shape[dim] if reduction == 1 else 1)
    )
