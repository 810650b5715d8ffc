"""Losses: of classes in pieces, of which no rank has the scores of all, and of samples or
pixels in pieces.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paragrad.parallel.sharding.sharded_tensor import (
    RULES,
    UNKNOWN,
    Divided,
    divided,
    piece,
    rule,
    whole,
)
from paragrad.parallel.tensor.einsum_rules import each_element

# where the number of the reduction stands among the arguments
REDUCTION = {
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"), 2
    ),
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "poisson_nll_loss": 5,
}


def of_elements(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of each element, and their sum or mean."""
    given = list(args)
    place = REDUCTION[func.__name__]
    reduction = kwargs.pop("reduction", given[place] if len(given) > place else 1)
    given[place : place + 1] = [0] if len(given) > place else []
    each = each_element(func, *given, **kwargs, **({} if len(given) > place else {"reduction": 0}))
    if each is UNKNOWN:
        return UNKNOWN
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()


RULES.update(dict.fromkeys(REDUCTION, of_elements))


@rule("nll_loss", "nll_loss_nd", "nll_loss2d")
def nll_loss(
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
    if isinstance(logs, Divided) and dim not in logs.cuts and not isinstance(target, Divided):
        return of_pixels(func, logs, target, weight, reduction, ignore_index, label_smoothing)
    if not isinstance(logs, Divided) or set(logs.cuts) != {dim} or isinstance(target, Divided):
        return UNKNOWN
    kept = target != ignore_index
    known = target.masked_fill(~kept, 0)
    each = -logs.gather(dim, known.unsqueeze(dim)).squeeze(dim)
    weight = None if weight is None else whole(weight)
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


def of_pixels(
    func: Any,
    scores: Divided,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Scores of all classes for some samples, or places in them."""
    own = Divided(target, {})
    for dim, cut in scores.cuts.items():
        at = dim - (dim > 1)
        own = Divided(piece(own.local, at, cut), {**own.cuts, at: cut})
    weight = None if weight is None else whole(weight)
    given = () if func.__name__.startswith("nll") else (label_smoothing,)
    each = divided(func(scores.local, own.local, weight, 0, ignore_index, *given), own.cuts)
    if reduction != 1:
        return each if reduction == 0 else each.sum()
    kept = target != ignore_index
    counts = kept if weight is None else weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0)
    return each.sum() / counts.sum()


@rule("cross_entropy_loss")
def cross_entropy(
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
        isinstance(x, Divided)
        and dim not in x.cuts
        and target.shape != x.shape
        and not isinstance(target, Divided)
    ):
        return of_pixels(func, x, target, weight, reduction, ignore_index, label_smoothing)
    if not isinstance(x, Divided) or set(x.cuts) != {dim} or isinstance(target, Divided):
        return UNKNOWN
    logs = x.log_softmax(dim)
    if target.shape != x.shape:
        return nll_loss(func, logs, target, weight, reduction, ignore_index, label_smoothing)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
    if weight is not None:
        target = target * whole(weight).view(-1, *(1 for _ in range(x.dim() - 1 - dim)))
    each = -(logs * target).sum(dim)
    return (
        each
        if reduction == 0
        else each.sum() / (x.numel() // x.shape[dim] if reduction == 1 else 1)
    )
