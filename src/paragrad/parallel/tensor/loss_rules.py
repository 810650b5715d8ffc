"""Rules for losses.

Either the classes are in pieces, and no rank has the scores of all, or samples or pixels are.
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

# position of the reduction among the arguments
REDUCTION_POSITIONS = {
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"), 2
    ),
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "poisson_nll_loss": 5,
}


def apply_elementwise_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a loss of each element, and the sum or mean of these."""
    arguments = list(args)
    position = REDUCTION_POSITIONS[func.__name__]
    reduction = kwargs.pop("reduction", arguments[position] if len(arguments) > position else 1)
    arguments[position : position + 1] = [0] if len(arguments) > position else []
    losses = apply_elementwise(
        func, *arguments, **kwargs, **({} if len(arguments) > position else {"reduction": 0})
    )
    if losses is NO_RULE:
        return NO_RULE
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


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
    """Apply a negative log likelihood; with smoothed labels it is the rest of a cross entropy."""
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
    is_counted = target != ignore_index
    classes = target.masked_fill(~is_counted, 0)
    losses = -logs.gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    weight = None if weight is None else gather_whole(weight)
    weights = (
        is_counted.to(losses.dtype)
        if weight is None
        else weight[classes].masked_fill(~is_counted, 0)
    )
    losses = losses.masked_fill(~is_counted, 0) * weights
    if label_smoothing:
        scaled = (
            logs
            if weight is None
            else logs * weight.view(-1, *(1 for _ in range(logs.dim() - 1 - dim)))
        )
        smoothed = -scaled.sum(dim).masked_fill(~is_counted, 0) / logs.shape[dim]
        losses = (1 - label_smoothing) * losses + label_smoothing * smoothed
    return (
        losses
        if reduction == 0
        else losses.sum()
        if reduction == 2
        else losses.sum() / weights.sum()
    )


def compute_pixel_loss(
    func: Any,
    scores: ShardedTensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Compute the loss of samples, or of positions in them, that have the scores of all classes.

    Args:
        func: The loss function of torch.

        scores: The sharded scores or logarithms, (samples, classes, ...).

        target: The classes, whole.

        weight: Weight of each class, or None.

        reduction: 0: none, 1: mean, 2: sum.

        ignore_index: Target that does not count.

        label_smoothing: As in torch; not used by a negative log likelihood.

    Returns:
        The loss.
    """
    local_target = ShardedTensor(target, {})
    for dim, sharding in scores.shardings.items():
        target_dim = dim - (dim > 1)
        local_target = ShardedTensor(
            slice_local(local_target.local, target_dim, sharding),
            {**local_target.shardings, target_dim: sharding},
        )
    weight = None if weight is None else gather_whole(weight)
    options = () if func.__name__.startswith("nll") else (label_smoothing,)
    losses = wrap_local(
        func(scores.local, local_target.local, weight, 0, ignore_index, *options),
        local_target.shardings,
    )
    if reduction != 1:
        return losses if reduction == 0 else losses.sum()
    is_counted = target != ignore_index
    counts = (
        is_counted
        if weight is None
        else weight[target.masked_fill(~is_counted, 0)].masked_fill(~is_counted, 0)
    )
    return losses.sum() / counts.sum()


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
    """Apply a cross entropy, over classes in pieces, or over samples or pixels in pieces."""
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
    log_probabilities = x.log_softmax(dim)
    if target.shape != x.shape:
        return apply_nll_loss(
            func, log_probabilities, target, weight, reduction, ignore_index, label_smoothing
        )
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
    if weight is not None:
        target = target * gather_whole(weight).view(-1, *(1 for _ in range(x.dim() - 1 - dim)))
    losses = -(log_probabilities * target).sum(dim)
    return (
        losses
        if reduction == 0
        else losses.sum() / (x.numel() // x.shape[dim] if reduction == 1 else 1)
    )
