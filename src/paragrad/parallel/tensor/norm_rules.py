"""Norms of activations: over channels, groups of them, features."""

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
    """As torch.batch_norm: channel by channel. By whatever is in its place now, which may ask
    other replicas.
    """
    of = getattr(torch.batch_norm, "__self__", None)
    # inside of samples: of whole ones
    if isinstance(of, BatchNorm) and of.samples > 1 and input.shape[0] == 1:
        return NO_RULE
    kept = next(
        (
            each.shardings[0]
            for each in (running_mean, running_var)
            if isinstance(each, ShardedTensor) and each.shardings
        ),
        None,
    )
    # which are changed where they are
    if kept is not None and not kept.is_same_sharding(getattr(input, "shardings", {}).get(1)):
        letters = tuple("c" if dim == 1 else dim for dim in range(input.dim()))
        others: dict[Any, Sharding] = {
            dim: cut for dim, cut in getattr(input, "shardings", {}).items() if dim != 1
        }
        local = fit_operand(Operand(input, letters), {"c": kept, **others})
        assert local is not None
        input = wrap_local(local, {**others, 1: kept})
    if not isinstance(input, ShardedTensor) or (
        set(input.shardings) != {1} and (1 in input.shardings or func.__name__ == "instance_norm")
    ):
        return NO_RULE
    along: dict[Any, Sharding] = {
        "c" if dim == 1 else dim: cut for dim, cut in input.shardings.items()
    }
    found = [fit_operand(Operand(each, "c"), along) for each in (weight, bias)]
    alike = {"c": along["c"]} if "c" in along else {}
    statistics = [
        fit_operand(Operand(each, "c"), alike, required=training)
        for each in (running_mean, running_var)
    ]
    if any(
        each is None
        for each, given in zip(statistics, (running_mean, running_var), strict=True)
        if given is not None
    ):
        return NO_RULE  # whole ones, which this rank would change in a copy
    lines = [cut.group for dim, cut in input.shardings.items() if dim != 1] if training else []
    for line in lines:  # backward: as many numbers, but for the count
        line.note_transfer("statistics", 8 * (2 * input.shape[1] + 1))
        line.note_transfer("statistics back", 8 * 2 * input.shape[1])
    now = torch.batch_norm if func.__name__ == "batch_norm" else torch.instance_norm
    with combine_sample_parts(tuple(line.world for line in lines if line.decider is None)):
        normed = now(input.local, *found, *statistics, training, *rest)  # type: ignore[arg-type]
        return wrap_local(normed, input.shardings)


@register_rule("layer_norm", "rms_norm")
def apply_layer_norm(func: Any, input: Tensor, normalized_shape: Any, *rest: Any) -> Any:
    """On whole features, beside which something else may be divided."""
    if not isinstance(input, ShardedTensor):
        return NO_RULE
    before = input.dim() - len(normalized_shape)
    if any(dim >= before for dim in input.shardings):
        return NO_RULE
    given = [each for each in rest if isinstance(each, Tensor)]
    places = [at for at, each in enumerate(rest) if isinstance(each, Tensor)]

    def run(x: Tensor, *tensors: Any) -> Tensor:
        arguments = list(rest)
        for at, tensor in zip(places, tensors, strict=True):
            arguments[at] = tensor
        return func(x, normalized_shape, *arguments)  # type: ignore[no-any-return]

    letters = (*range(before), *(None for _ in normalized_shape))
    return apply_einsum_rule(
        run,
        [Operand(input, letters), *(Operand(each, (None,) * each.dim()) for each in given)],
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
    """Whole groups of channels; of an image that is divided, by the sums of all ranks."""
    if (
        isinstance(input, ShardedTensor)
        and 1 not in input.shardings
        and any(dim > 1 for dim in input.shardings)
    ):
        return _normalize_image_groups(input, num_groups, weight, bias, *rest)
    if not isinstance(input, ShardedTensor) or set(input.shardings) != {1}:
        return NO_RULE
    cut = input.shardings[1]
    if (here := count_local_groups(cut, input.shape[1] // num_groups)) is None:
        return NO_RULE
    own = [fit_operand(Operand(each, "c"), {"c": cut}) for each in (weight, bias)]
    return wrap_local(func(input.local, here, *own, *rest), input.shardings)


def _normalize_image_groups(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32)).unflatten(1, (groups, -1))
    dims = tuple(range(2, x.dim()))
    x = x - x.mean(dims, keepdim=True)
    normal = (x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()).flatten(1, 2)
    wide = (-1, *(1 for _ in range(input.dim() - 2)))
    normal = normal if weight is None else normal * weight.view(wide)
    normal = normal if bias is None else normal + bias.view(wide)
    return normal if torch.is_autocast_enabled(input.device.type) else normal.to(input.dtype)
