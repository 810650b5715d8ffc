"""Norms of activations: over channels, groups of them, features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paragrad.engine.batch_norm import BatchNorm, beside
from paragrad.parallel.sharding.sharded_tensor import UNKNOWN, Cut, Divided, divided, rule
from paragrad.parallel.tensor.convolution_rules import groups_here
from paragrad.parallel.tensor.einsum_rules import Operand, fitted, spread


@rule("batch_norm", "instance_norm")
def batch_norm(
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
        return UNKNOWN
    kept = next(
        (
            each.cuts[0]
            for each in (running_mean, running_var)
            if isinstance(each, Divided) and each.cuts
        ),
        None,
    )
    # which are changed where they are
    if kept is not None and not kept.alike(getattr(input, "cuts", {}).get(1)):
        letters = tuple("c" if dim == 1 else dim for dim in range(input.dim()))
        others: dict[Any, Cut] = {
            dim: cut for dim, cut in getattr(input, "cuts", {}).items() if dim != 1
        }
        local = fitted(Operand(input, letters), {"c": kept, **others})
        assert local is not None
        input = divided(local, {**others, 1: kept})
    if not isinstance(input, Divided) or (
        set(input.cuts) != {1} and (1 in input.cuts or func.__name__ == "instance_norm")
    ):
        return UNKNOWN
    along: dict[Any, Cut] = {"c" if dim == 1 else dim: cut for dim, cut in input.cuts.items()}
    found = [fitted(Operand(each, "c"), along) for each in (weight, bias)]
    alike = {"c": along["c"]} if "c" in along else {}
    statistics = [
        fitted(Operand(each, "c"), alike, must=training) for each in (running_mean, running_var)
    ]
    if any(
        each is None
        for each, given in zip(statistics, (running_mean, running_var), strict=True)
        if given is not None
    ):
        return UNKNOWN  # whole ones, which this rank would change in a copy
    lines = [cut.line for dim, cut in input.cuts.items() if dim != 1] if training else []
    for line in lines:  # backward: as many numbers, but for the count
        line.note("statistics", 8 * (2 * input.shape[1] + 1))
        line.note("statistics back", 8 * 2 * input.shape[1])
    now = torch.batch_norm if func.__name__ == "batch_norm" else torch.instance_norm
    with beside(tuple(line.world for line in lines if line.planning is None)):
        normed = now(input.local, *found, *statistics, training, *rest)  # type: ignore[arg-type]
        return divided(normed, input.cuts)


@rule("layer_norm", "rms_norm")
def layer_norm(func: Any, input: Tensor, normalized_shape: Any, *rest: Any) -> Any:
    """On whole features, beside which something else may be divided."""
    if not isinstance(input, Divided):
        return UNKNOWN
    before = input.dim() - len(normalized_shape)
    if any(dim >= before for dim in input.cuts):
        return UNKNOWN
    given = [each for each in rest if isinstance(each, Tensor)]
    places = [at for at, each in enumerate(rest) if isinstance(each, Tensor)]

    def run(x: Tensor, *tensors: Any) -> Tensor:
        arguments = list(rest)
        for at, tensor in zip(places, tensors, strict=True):
            arguments[at] = tensor
        return func(x, normalized_shape, *arguments)  # type: ignore[no-any-return]

    letters = (*range(before), *(None for _ in normalized_shape))
    return spread(
        run,
        [Operand(input, letters), *(Operand(each, (None,) * each.dim()) for each in given)],
        letters,
    )


@rule("group_norm")
def group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
) -> Any:
    """Whole groups of channels; of an image that is divided, by the sums of all ranks."""
    if isinstance(input, Divided) and 1 not in input.cuts and any(dim > 1 for dim in input.cuts):
        return _group_norm(input, num_groups, weight, bias, *rest)
    if not isinstance(input, Divided) or set(input.cuts) != {1}:
        return UNKNOWN
    cut = input.cuts[1]
    if (here := groups_here(cut, input.shape[1] // num_groups)) is None:
        return UNKNOWN
    own = [fitted(Operand(each, "c"), {"c": cut}) for each in (weight, bias)]
    return divided(func(input.local, here, *own, *rest), input.cuts)


def _group_norm(
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
