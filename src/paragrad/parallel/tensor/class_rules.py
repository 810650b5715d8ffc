"""Rules for classes: softmax, gather, embedding, and losses.

Either the classes, or the words of a vocabulary, are in pieces, and no rank has the scores of all.
Or samples or pixels are in pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    RULES,
    ShardedTensor,
    Sharding,
    gather_whole,
    register_rule,
    slice_local,
    wrap_local,
)
from paragrad.parallel.tensor.einsum_rules import apply_elementwise
from paragrad.parallel.tensor.reduction_rules import apply_along_dim


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
    compute_dtype = torch.promote_types(input_dtype, torch.float32)
    x = x if input_dtype == compute_dtype else x.to(compute_dtype)
    shifted = x - compute_maximum(x, dim)
    exponentials = shifted.exp()
    total = compute_sum(exponentials, dim)
    result = exponentials / total if func.__name__ == "softmax" else shifted - total.log()
    has_final_dtype = input_dtype == compute_dtype or torch.is_autocast_enabled(x.device.type)
    return result if has_final_dtype else result.to(input_dtype)


def compute_maximum(x: ShardedTensor, dim: int) -> Tensor:
    """Compute the maximum along a divided dimension, without a gradient."""
    sharding = x.shardings[dim]
    maximum = sharding.group.sum_over_ranks(x.local.detach().amax(dim, keepdim=True), "MAX")
    sharding.group.note_transfer("summed", maximum.nbytes)
    return wrap_local(maximum, {at: each for at, each in x.shardings.items() if at != dim})


def compute_sum(x: ShardedTensor, dim: int) -> Tensor:
    """Compute the sum along a divided dimension."""
    total = x.shardings[dim].group.add_partial_results(x.local.sum(dim, keepdim=True))
    return wrap_local(total, {at: each for at, each in x.shardings.items() if at != dim})


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
    for each in sharding.partition.ranges[sharding.group.rank]:
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


# ---- losses ----------------------------------------------------------------------------------
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
