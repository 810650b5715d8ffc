"""Rules for normalization of activations, over channels, groups of channels, or features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paragrad.engine.batch_norm import BatchNorm, combine_sample_parts
from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    ShardedTensor,
    Sharding,
    register_rule,
    wrap_local,
)
from paragrad.parallel.tensor.convolution_rules import count_local_groups
from paragrad.parallel.tensor.einsum_rules import Operand, apply_einsum_rule, fit_operand


@register_rule("batch_norm", "instance_norm")
def apply_batch_norm(
    func: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *rest: Any,
) -> Any:
    """Apply a batch norm, channel by channel, as torch.batch_norm.

    If the function is replaced at the moment, the replacement is used. It may ask other replicas.
    """
    replacement = getattr(torch.batch_norm, "__self__", None)
    # A batch norm over divided samples needs whole samples.
    if isinstance(replacement, BatchNorm) and replacement.samples > 1 and input.shape[0] == 1:
        return NO_RULE
    statistics_sharding = next(
        (
            each.shardings[0]
            for each in (running_mean, running_var)
            if isinstance(each, ShardedTensor) and each.shardings
        ),
        None,
    )
    # The statistics are changed in place, so the input must be divided as they are.
    if statistics_sharding is not None and not statistics_sharding.is_same_sharding(
        getattr(input, "shardings", {}).get(1)
    ):
        letters = tuple("c" if dim == 1 else dim for dim in range(input.dim()))
        others: dict[Any, Sharding] = {
            dim: sharding for dim, sharding in getattr(input, "shardings", {}).items() if dim != 1
        }
        local = fit_operand(Operand(input, letters), {"c": statistics_sharding, **others})
        assert local is not None
        input = wrap_local(local, {**others, 1: statistics_sharding})
    if not isinstance(input, ShardedTensor) or (
        set(input.shardings) != {1} and (1 in input.shardings or func.__name__ == "instance_norm")
    ):
        return NO_RULE
    shardings: dict[Any, Sharding] = {
        "c" if dim == 1 else dim: sharding for dim, sharding in input.shardings.items()
    }
    parameters = [fit_operand(Operand(each, "c"), shardings) for each in (weight, bias)]
    channel_sharding = {"c": shardings["c"]} if "c" in shardings else {}
    statistics = [
        fit_operand(Operand(each, "c"), channel_sharding, required=training)
        for each in (running_mean, running_var)
    ]
    if any(
        each is None
        for each, original in zip(statistics, (running_mean, running_var), strict=True)
        if original is not None
    ):
        return NO_RULE  # whole statistics: this rank would change only a copy of them
    groups = (
        [sharding.group for dim, sharding in input.shardings.items() if dim != 1]
        if training
        else []
    )
    for group in groups:  # the backward sends as many numbers, except for the count
        group.note_transfer("statistics", 8 * (2 * input.shape[1] + 1))
        group.note_transfer("statistics back", 8 * 2 * input.shape[1])
    function = torch.batch_norm if func.__name__ == "batch_norm" else torch.instance_norm
    with combine_sample_parts(tuple(group.world for group in groups if group.decider is None)):
        arguments: Any = (*parameters, *statistics, training, *rest)
        normed = function(input.local, *arguments)
        return wrap_local(normed, input.shardings)


@register_rule("layer_norm", "rms_norm")
def apply_layer_norm(func: Any, input: Tensor, normalized_shape: Any, *rest: Any) -> Any:
    """Apply a norm over whole features; other dimensions may be divided."""
    if not isinstance(input, ShardedTensor):
        return NO_RULE
    first_normalized = input.dim() - len(normalized_shape)
    if any(dim >= first_normalized for dim in input.shardings):
        return NO_RULE
    parameters = [each for each in rest if isinstance(each, Tensor)]
    positions = [at for at, each in enumerate(rest) if isinstance(each, Tensor)]

    def compute(x: Tensor, *tensors: Any) -> Tensor:
        arguments = list(rest)
        for at, tensor in zip(positions, tensors, strict=True):
            arguments[at] = tensor
        return func(x, normalized_shape, *arguments)  # type: ignore[no-any-return]

    letters = (*range(first_normalized), *(None for _ in normalized_shape))
    return apply_einsum_rule(
        compute,
        [Operand(input, letters), *(Operand(each, (None,) * each.dim()) for each in parameters)],
        letters,
    )


@register_rule("group_norm")
def apply_group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
) -> Any:
    """Apply a group norm: whole groups on each rank, or divided images by the sums of all ranks."""
    if (
        isinstance(input, ShardedTensor)
        and 1 not in input.shardings
        and any(dim > 1 for dim in input.shardings)
    ):
        return _normalize_image_groups(input, num_groups, weight, bias, *rest)
    if not isinstance(input, ShardedTensor) or set(input.shardings) != {1}:
        return NO_RULE
    sharding = input.shardings[1]
    if (local_groups := count_local_groups(sharding, input.shape[1] // num_groups)) is None:
        return NO_RULE
    local_parameters = [fit_operand(Operand(each, "c"), {"c": sharding}) for each in (weight, bias)]
    return wrap_local(func(input.local, local_groups, *local_parameters, *rest), input.shardings)


def _normalize_image_groups(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Normalize groups of channels of an image that is divided along spatial dimensions."""
    x = input.to(torch.promote_types(input.dtype, torch.float32)).unflatten(1, (groups, -1))
    dims = tuple(range(2, x.dim()))
    x = x - x.mean(dims, keepdim=True)
    normal = (x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()).flatten(1, 2)
    channel_shape = (-1, *(1 for _ in range(input.dim() - 2)))
    normal = normal if weight is None else normal * weight.view(channel_shape)
    normal = normal if bias is None else normal + bias.view(channel_shape)
    return normal if torch.is_autocast_enabled(input.device.type) else normal.to(input.dtype)
