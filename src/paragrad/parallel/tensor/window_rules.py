"""Functions that slide a window along the dimensions of an image: pooling, padding, resizing;
and what they all fetch.

Where such a dimension is divided each rank fetches what its outputs see (`fetching.py`), which
are divided evenly, and does without padding there what one worker does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paragrad.parallel.sharding.autograd_collectives import HaloFetch
from paragrad.parallel.sharding.halo_regions import (
    PaddingWindow,
    ResizeWindow,
    WantedIndices,
    Window,
    compute_taps,
    count_fetched,
    count_sent,
)
from paragrad.parallel.sharding.partition import partition_evenly
from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    RULES,
    ShardedTensor,
    Sharding,
    gather_whole,
    register_rule,
    wrap_local,
)


# ---- what is fetched -------------------------------------------------------------------------
class InputWindow(Protocol):
    """What outputs along a dimension see of its inputs."""

    def count_outputs(self, size: int) -> int: ...
    def find_inputs(self, outputs: range, size: int) -> WantedIndices: ...


def fetch_halo(
    x: Tensor, dim: int, sharding: Sharding, wanted: tuple[WantedIndices, ...], fill: float
) -> Tensor:
    """Of a local part what this rank wants of all."""
    note_halo_fetch(x, dim, sharding, wanted)
    if all(
        want == tuple(have)
        for want, (have,) in zip(
            wanted, map(sharding.partition.list_ranges, range(sharding.group.size)), strict=True
        )
    ):
        return x  # each has what it wants
    return HaloFetch.apply(x, dim, sharding.partition, wanted, fill, sharding.group)  # type: ignore[no-any-return]


def note_halo_fetch(
    x: Tensor, dim: int, sharding: Sharding, wanted: tuple[WantedIndices, ...]
) -> None:
    """What is fetched, while it is found out what travels."""
    line = sharding.group
    one = x.nbytes // max(1, x.shape[dim])
    if line.decider is not None:  # of the rank that sends most
        ranks = range(line.size)
        shown = " + ".join(str(count_fetched(sharding.partition, wanted, rank)) for rank in ranks)
        line.note_transfer(
            "fetched",
            one * max(count_sent(sharding.partition, wanted, rank) for rank in ranks),
            f"{line.options.data_dim} {shown}",
        )
        if x.requires_grad and torch.is_grad_enabled():
            line.note_transfer(
                "returned",
                one * max(count_fetched(sharding.partition, wanted, rank) for rank in ranks),
            )


def fetch_windows(
    x: Tensor, windows: Mapping[int, InputWindow], fill: float = 0.0, deferred: Collection[int] = ()
) -> tuple[Tensor, Tensor, dict[int, Sharding]]:
    """(x, what this rank's outputs see of it, how these are divided). x is whole along a
    dimension that has fewer outputs than ranks; later: along these nothing is fetched yet.
    """
    few = (
        [
            dim
            for dim, cut in x.shardings.items()
            if dim in windows and not has_enough_outputs(windows[dim], x.shape[dim], cut)
        ]
        if isinstance(x, ShardedTensor)
        else []
    )
    x = gather_whole(x, few) if few else x
    local = x.local if isinstance(x, ShardedTensor) else x
    after = dict[int, Sharding]()
    for dim, cut in x.shardings.items() if isinstance(x, ShardedTensor) else ():
        if dim in windows:
            after[dim] = Sharding(
                partition_evenly(windows[dim].count_outputs(x.shape[dim]), cut.group.size),
                cut.group,
            )
            wants = tuple(
                windows[dim].find_inputs(after[dim].partition.list_ranges(rank)[0], x.shape[dim])
                for rank in range(cut.group.size)
            )
            local = local if dim in deferred else fetch_halo(local, dim, cut, wants, fill)
    return x, local, after


def has_enough_outputs(window: InputWindow, size: int, sharding: Sharding) -> bool:
    """Are there outputs for every rank, of inputs in one piece each?"""
    return len(sharding.partition.blocks) == 1 and window.count_outputs(size) >= sharding.group.size


def expand_argument(value: Any, count: int) -> list[Any]:
    """2 or (2,) or (2, 3), of so many dimensions."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values


def count_spatial_dims(name: str) -> int:
    return next(int(letter) for letter in reversed(name) if letter in "123")


# ---- each channel of each sample by itself ---------------------------------------------------
def apply_per_channel(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The last one, two or three dimensions as the function's name says: what stands before
    them may be divided.
    """
    if not isinstance(input, ShardedTensor) or any(
        dim >= input.dim() - count_spatial_dims(func.__name__) for dim in input.shardings
    ):
        return NO_RULE
    made = func(input.local, *args, **kwargs)
    cuts = input.shardings
    return (
        tuple(wrap_local(each, cuts) for each in made)
        if isinstance(made, tuple)
        else wrap_local(made, cuts)
    )


RULES.update(
    dict.fromkeys(
        (
            f"{kind}{spatial}d{more}"
            for spatial in "123"
            for kind, more in (
                ("adaptive_max_pool", ""),
                ("adaptive_max_pool", "_with_indices"),
                ("max_pool", "_with_indices"),
                ("reflection_pad", ""),
                ("replication_pad", ""),
            )
        ),
        apply_per_channel,
    )
)
RULES.update(
    dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), apply_per_channel)
)


@register_rule("max_pool1d", "max_pool2d", "max_pool3d")
def apply_max_pool(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices:  # each of a place in the whole image
        return apply_per_channel(
            func, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True
        )
    count = count_spatial_dims(func.__name__)
    plain = getattr(torch, f"max_pool{count}d")
    if not _is_image_sharded(func, input):
        return apply_per_channel(
            plain, input, kernel_size, stride or (), padding, dilation, ceil_mode
        )
    kernel = expand_argument(kernel_size, count)
    pads = expand_argument(padding, count)
    dilations = expand_argument(dilation, count)
    strides = expand_argument(stride or kernel_size, count)
    first = input.dim() - count
    x, local, after = fetch_windows(
        input,
        {
            first + at: Window(
                kernel[at], strides[at], pads[at], pads[at], dilations[at], ceil_mode
            )
            for at in range(count)
        },
        -inf,
    )
    pads = [0 if first + at in after else pads[at] for at in range(count)]
    made = plain(local, kernel, strides, pads, dilations, ceil_mode)
    return wrap_local(made, {**getattr(x, "shardings", {}), **after})


@register_rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def apply_avg_pool(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """The sum over a window, by how many are in it."""
    if not _is_image_sharded(func, input):
        more = {} if divisor_override is None else {"divisor_override": divisor_override}
        return apply_per_channel(
            func, input, kernel_size, stride, padding, ceil_mode, count_include_pad, **more
        )
    count = count_spatial_dims(func.__name__)
    if count == 1:
        return functional.avg_pool2d(
            input.unsqueeze(-2),
            (1, *expand_argument(kernel_size, 1)),
            (1, *expand_argument(stride or kernel_size, 1)),
            (0, *expand_argument(padding, 1)),
            ceil_mode,
            count_include_pad,
        ).squeeze(-2)
    kernel = expand_argument(kernel_size, count)
    pads = expand_argument(padding, count)
    strides = expand_argument(stride or kernel_size, count)
    first = input.dim() - count
    windows = {
        first + at: Window(kernel[at], strides[at], pads[at], pads[at], 1, ceil_mode)
        for at in range(count)
    }
    x, local, after = fetch_windows(input, windows)
    pads = [0 if first + at in after else pads[at] for at in range(count)]
    made = func(local, kernel, strides, pads, ceil_mode, True, 1)
    for dim, window in windows.items() if divisor_override is None else ():
        counts = made.new_tensor(window.count_window_inputs(input.shape[dim], count_include_pad))
        if dim in after:
            counts = after[dim].group.take_piece(counts, 0, after[dim].partition)
        made = made / counts.view(-1, *(1 for _ in range(input.dim() - 1 - dim)))
    return wrap_local(
        made if divisor_override is None else made / divisor_override,
        {**getattr(x, "shardings", {}), **after},
    )


def _is_image_sharded(func: Any, input: Tensor) -> bool:
    return isinstance(input, ShardedTensor) and any(
        dim >= input.dim() - count_spatial_dims(func.__name__) for dim in input.shardings
    )


@register_rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def apply_adaptive_avg_pool(func: Any, input: Tensor, output_size: Any) -> Any:
    """One output: the mean over all ranks; several want the image whole."""
    count = count_spatial_dims(func.__name__)
    if _is_image_sharded(func, input) and all(
        size == 1 for size in expand_argument(output_size, count)
    ):
        return input.mean(tuple(range(-count, 0)), keepdim=True)
    return apply_per_channel(func, input, output_size)


@register_rule("pad", "constant_pad_nd")
def apply_pad(func: Any, input: Tensor, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """Along divided dimensions what stands outside is fetched, if it is not a constant."""
    if not isinstance(input, ShardedTensor):
        return NO_RULE
    given = dict(
        zip(("mode", "value") if func.__name__ == "pad" else ("value",), args, strict=False),
        **kwargs,
    )
    # of which pad has the first two numbers
    mode = given.get("mode", "constant")
    last = input.dim() - 1
    sides = {last - at: (pad[2 * at], pad[2 * at + 1]) for at in range(len(pad) // 2)}
    along = {
        dim: PaddingWindow(*sides[dim], mode) for dim in input.shardings if any(sides.get(dim, ()))
    }
    if any(
        not has_enough_outputs(along[dim], input.shape[dim], cut)
        for dim, cut in input.shardings.items()
        if dim in along
    ):
        return NO_RULE
    _, local, after = fetch_windows(input, along, given.get("value") or 0.0)
    rest = [0 if last - at // 2 in after else size for at, size in enumerate(pad)]
    return wrap_local(
        func(local, rest, *args, **kwargs) if any(rest) else local, {**input.shardings, **after}
    )


# ---- resizing --------------------------------------------------------------------------------
INTERPOLATION_KINDS = {
    "nearest": "nearest",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
    "bicubic": "cubic",
}


@register_rule(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
)
def apply_resize(func: Any, input: Tensor, output_size: Any, *args: Any) -> Any:
    """Divided dimensions one after the other, each output by its taps; what is not divided by
    torch.
    """
    if not _is_image_sharded(func, input):
        return apply_per_channel(func, input, output_size, *args)
    count = count_spatial_dims(func.__name__)
    aligned = args[0] if len(args) > 1 else False
    factors = args[-1] if args else None
    first = input.dim() - count
    kind = INTERPOLATION_KINDS[
        func.__name__.strip("_").removeprefix("upsample_").rstrip("123d").removesuffix("_exact")
    ]
    sizes = (
        [int(input.shape[first + at] * factors[at]) for at in range(count)]
        if factors
        else list(output_size)
    )
    times = {first + at: size // input.shape[first + at] for at, size in enumerate(sizes)}
    cuts = [dim for dim in input.shardings if dim >= first]  # type: ignore[attr-defined]
    if any(
        sizes[dim - first] != times[dim] * input.shape[dim]
        or (factors and factors[dim - first] != times[dim])
        for dim in cuts
    ):
        return NO_RULE
    points = {dim: compute_taps(kind, input.shape[dim], times[dim], aligned) for dim in cuts}
    x, local, after = fetch_windows(input, {dim: ResizeWindow(points[dim]) for dim in cuts})
    for dim, cut in after.items():
        here = cut.partition.list_ranges(cut.group.rank)[0]
        start = min(place for at in here for place, _ in points[dim][at])
        local = _sum_taps(local, dim, [points[dim][at] for at in here], start)
    if len(after) < count:
        rest = [
            local.shape[first + at] if first + at in after else size
            for at, size in enumerate(sizes)
        ]
        scale = (
            [1.0 if first + at in after else factor for at, factor in enumerate(factors)]
            if factors
            else None
        )
        local = func(local, None if factors else rest, *args[:-1], scale)
    return wrap_local(local, {**getattr(x, "shardings", {}), **after})


def _sum_taps(x: Tensor, dim: int, points: list[list[tuple[int, float]]], start: int) -> Tensor:
    """Sums of weighted elements along a dimension."""
    total: Any = 0
    for tap in zip(*points, strict=True):
        places = torch.tensor([place - start for place, _ in tap], device=x.device)
        weights = torch.tensor([weight for _, weight in tap], dtype=x.dtype, device=x.device)
        taken = x.index_select(dim, places)
        total = total + (
            taken
            if len(points[0]) == 1
            else taken * weights.view(-1, *(1 for _ in range(x.dim() - 1 - dim)))
        )
    return total  # type: ignore[no-any-return]
