"""Rules for functions that slide a window along image dimensions: pooling, padding, resizing.

If such a dimension is divided, its outputs are divided evenly. Some inputs that the outputs of a
rank need are on neighbouring ranks: its halo (`halo_regions.py`). `fetch_halo` fetches them, and
then the rank needs no padding of its own. Convolutions use `fetch_windows` too.
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
    """Which inputs along a dimension an output needs."""

    def count_outputs(self, size: int) -> int:
        """Return the number of outputs for `size` inputs."""
        ...

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """Return the inputs that consecutive outputs need."""
        ...


def fetch_halo(
    x: Tensor, dim: int, sharding: Sharding, wanted: tuple[WantedIndices, ...], fill: float
) -> Tensor:
    """Fetch the elements that this rank needs.

    Args:
        x: This rank's piece.
        dim: The divided dimension.
        sharding: How it is divided.
        wanted: For each rank, the elements that it needs.
        fill: Value of padding.

    Returns:
        The elements that this rank needs; its own piece, if no rank needs anything else.
    """
    note_halo_fetch(x, dim, sharding, wanted)
    if all(
        needed == tuple(piece_range)
        for needed, (piece_range,) in zip(
            wanted, map(sharding.partition.list_ranges, range(sharding.group.size)), strict=True
        )
    ):
        return x  # every rank already holds what it needs
    window: Tensor = HaloFetch.apply(x, dim, sharding.partition, wanted, fill, sharding.group)
    return window


def note_halo_fetch(
    x: Tensor, dim: int, sharding: Sharding, wanted: tuple[WantedIndices, ...]
) -> None:
    """Note, during planning, what is fetched.

    Args:
        x: This rank's piece.
        dim: The divided dimension.
        sharding: How it is divided.
        wanted: For each rank, the elements that it needs.
    """
    group = sharding.group
    element_bytes = x.nbytes // max(1, x.shape[dim])
    if group.decider is not None:  # the rank that sends most counts
        ranks = range(group.size)
        counts = " + ".join(str(count_fetched(sharding.partition, wanted, rank)) for rank in ranks)
        group.note_transfer(
            "fetched",
            element_bytes * max(count_sent(sharding.partition, wanted, rank) for rank in ranks),
            f"{group.options.data_dim} {counts}",
        )
        if x.requires_grad and torch.is_grad_enabled():
            group.note_transfer(
                "returned",
                element_bytes
                * max(count_fetched(sharding.partition, wanted, rank) for rank in ranks),
            )


def fetch_windows(
    x: Tensor, windows: Mapping[int, InputWindow], fill: float = 0.0, deferred: Collection[int] = ()
) -> tuple[Tensor, Tensor, dict[int, Sharding]]:
    """Fetch what this rank's outputs need along all divided dimensions with a window.

    A dimension with fewer outputs than ranks is gathered first.

    Args:
        x: The input.
        windows: The window of each dimension that has one.
        fill: Value of padding.
        deferred: Dimensions along which nothing is fetched yet.

    Returns:
        (the input, the local elements that this rank's outputs need, shardings of the outputs).
    """
    few_outputs = (
        [
            dim
            for dim, sharding in x.shardings.items()
            if dim in windows and not has_enough_outputs(windows[dim], x.shape[dim], sharding)
        ]
        if isinstance(x, ShardedTensor)
        else []
    )
    x = gather_whole(x, few_outputs) if few_outputs else x
    local = x.local if isinstance(x, ShardedTensor) else x
    output_shardings = dict[int, Sharding]()
    for dim, sharding in x.shardings.items() if isinstance(x, ShardedTensor) else ():
        if dim in windows:
            output_shardings[dim] = Sharding(
                partition_evenly(windows[dim].count_outputs(x.shape[dim]), sharding.group.size),
                sharding.group,
            )
            wanted = tuple(
                windows[dim].find_inputs(
                    output_shardings[dim].partition.list_ranges(rank)[0], x.shape[dim]
                )
                for rank in range(sharding.group.size)
            )
            local = local if dim in deferred else fetch_halo(local, dim, sharding, wanted, fill)
    return x, local, output_shardings


def has_enough_outputs(window: InputWindow, size: int, sharding: Sharding) -> bool:
    """Return whether the inputs are one block, and every rank gets an output.

    Args:
        window: The window along the dimension.
        size: Number of inputs.
        sharding: How the inputs are divided.

    Returns:
        Whether both hold.
    """
    return len(sharding.partition.blocks) == 1 and window.count_outputs(size) >= sharding.group.size


def expand_argument(value: Any, count: int) -> list[Any]:
    """Return one value for each dimension, of an argument such as 2, (2,) or (2, 3)."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values


def count_spatial_dims(name: str) -> int:
    """Return the number of spatial dimensions in a function's name, such as 2 of conv2d."""
    return next(int(letter) for letter in reversed(name) if letter in "123")


# ---- functions of each channel ---------------------------------------------------------------
def apply_per_channel(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that treats each channel of each sample by itself.

    It works on the last dimensions, of which the function's name has the number. Dimensions before
    them may be divided.
    """
    if not isinstance(input, ShardedTensor) or any(
        dim >= input.dim() - count_spatial_dims(func.__name__) for dim in input.shardings
    ):
        return NO_RULE
    result = func(input.local, *args, **kwargs)
    shardings = input.shardings
    return (
        tuple(wrap_local(each, shardings) for each in result)
        if isinstance(result, tuple)
        else wrap_local(result, shardings)
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
    """Apply a max pooling."""
    if return_indices:  # indices are positions in the whole image
        return apply_per_channel(
            func, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True
        )
    count = count_spatial_dims(func.__name__)
    function = getattr(torch, f"max_pool{count}d")
    if not _is_image_sharded(func, input):
        return apply_per_channel(
            function, input, kernel_size, stride or (), padding, dilation, ceil_mode
        )
    kernel = expand_argument(kernel_size, count)
    pads = expand_argument(padding, count)
    dilations = expand_argument(dilation, count)
    strides = expand_argument(stride or kernel_size, count)
    first_dim = input.dim() - count
    x, local, output_shardings = fetch_windows(
        input,
        {
            first_dim + at: Window(
                kernel[at], strides[at], pads[at], pads[at], dilations[at], ceil_mode
            )
            for at in range(count)
        },
        -inf,
    )
    pads = [0 if first_dim + at in output_shardings else pads[at] for at in range(count)]
    result = function(local, kernel, strides, pads, dilations, ceil_mode)
    return wrap_local(result, {**getattr(x, "shardings", {}), **output_shardings})


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
    """Apply an average pooling: the sum over a window, divided by its number of elements."""
    if not _is_image_sharded(func, input):
        options = {} if divisor_override is None else {"divisor_override": divisor_override}
        return apply_per_channel(
            func, input, kernel_size, stride, padding, ceil_mode, count_include_pad, **options
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
    first_dim = input.dim() - count
    windows = {
        first_dim + at: Window(kernel[at], strides[at], pads[at], pads[at], 1, ceil_mode)
        for at in range(count)
    }
    x, local, output_shardings = fetch_windows(input, windows)
    pads = [0 if first_dim + at in output_shardings else pads[at] for at in range(count)]
    result = func(local, kernel, strides, pads, ceil_mode, True, 1)
    for dim, window in windows.items() if divisor_override is None else ():
        counts = result.new_tensor(window.count_window_inputs(input.shape[dim], count_include_pad))
        if dim in output_shardings:
            counts = output_shardings[dim].group.take_piece(
                counts, 0, output_shardings[dim].partition
            )
        result = result / counts.view(-1, *(1 for _ in range(input.dim() - 1 - dim)))
    return wrap_local(
        result if divisor_override is None else result / divisor_override,
        {**getattr(x, "shardings", {}), **output_shardings},
    )


def _is_image_sharded(func: Any, input: Tensor) -> bool:
    """Return whether a spatial dimension of the input is divided."""
    return isinstance(input, ShardedTensor) and any(
        dim >= input.dim() - count_spatial_dims(func.__name__) for dim in input.shardings
    )


@register_rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def apply_adaptive_avg_pool(func: Any, input: Tensor, output_size: Any) -> Any:
    """Apply an adaptive pooling.

    A single output is the mean over all ranks; several outputs need the whole image.
    """
    count = count_spatial_dims(func.__name__)
    if _is_image_sharded(func, input) and all(
        size == 1 for size in expand_argument(output_size, count)
    ):
        return input.mean(tuple(range(-count, 0)), keepdim=True)
    return apply_per_channel(func, input, output_size)


@register_rule("pad", "constant_pad_nd")
def apply_pad(func: Any, input: Tensor, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a padding; along divided dimensions, padding that is not constant is fetched."""
    if not isinstance(input, ShardedTensor):
        return NO_RULE
    options = dict(
        zip(("mode", "value") if func.__name__ == "pad" else ("value",), args, strict=False),
        **kwargs,
    )
    # `pad` lists (before, after) from the last dimension on
    mode = options.get("mode", "constant")
    last_dim = input.dim() - 1
    sides = {last_dim - at: (pad[2 * at], pad[2 * at + 1]) for at in range(len(pad) // 2)}
    windows = {
        dim: PaddingWindow(*sides[dim], mode) for dim in input.shardings if any(sides.get(dim, ()))
    }
    if any(
        not has_enough_outputs(windows[dim], input.shape[dim], sharding)
        for dim, sharding in input.shardings.items()
        if dim in windows
    ):
        return NO_RULE
    _, local, output_shardings = fetch_windows(input, windows, options.get("value") or 0.0)
    other_padding = [
        0 if last_dim - at // 2 in output_shardings else size for at, size in enumerate(pad)
    ]
    return wrap_local(
        func(local, other_padding, *args, **kwargs) if any(other_padding) else local,
        {**input.shardings, **output_shardings},
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
    """Apply an interpolation.

    Divided dimensions are resized one after another by their taps, and the other dimensions by
    torch.
    """
    if not _is_image_sharded(func, input):
        return apply_per_channel(func, input, output_size, *args)
    count = count_spatial_dims(func.__name__)
    aligned = args[0] if len(args) > 1 else False
    factors = args[-1] if args else None
    first_dim = input.dim() - count
    kind = INTERPOLATION_KINDS[
        func.__name__.strip("_").removeprefix("upsample_").rstrip("123d").removesuffix("_exact")
    ]
    sizes = (
        [int(input.shape[first_dim + at] * factors[at]) for at in range(count)]
        if factors
        else list(output_size)
    )
    times = {first_dim + at: size // input.shape[first_dim + at] for at, size in enumerate(sizes)}
    shardings: Any = getattr(input, "shardings")  # noqa: B009
    divided_dims = [dim for dim in shardings if dim >= first_dim]
    if any(
        sizes[dim - first_dim] != times[dim] * input.shape[dim]
        or (factors and factors[dim - first_dim] != times[dim])
        for dim in divided_dims
    ):
        return NO_RULE
    taps_of_dims = {
        dim: compute_taps(kind, input.shape[dim], times[dim], aligned) for dim in divided_dims
    }
    x, local, output_shardings = fetch_windows(
        input, {dim: ResizeWindow(taps_of_dims[dim]) for dim in divided_dims}
    )
    for dim, sharding in output_shardings.items():
        own_outputs = sharding.partition.list_ranges(sharding.group.rank)[0]
        start = min(position for at in own_outputs for position, _ in taps_of_dims[dim][at])
        local = _sum_taps(local, dim, [taps_of_dims[dim][at] for at in own_outputs], start)
    if len(output_shardings) < count:
        other_sizes = [
            local.shape[first_dim + at] if first_dim + at in output_shardings else size
            for at, size in enumerate(sizes)
        ]
        scale = (
            [
                1.0 if first_dim + at in output_shardings else factor
                for at, factor in enumerate(factors)
            ]
            if factors
            else None
        )
        local = func(local, None if factors else other_sizes, *args[:-1], scale)
    return wrap_local(local, {**getattr(x, "shardings", {}), **output_shardings})


def _sum_taps(x: Tensor, dim: int, points: list[list[tuple[int, float]]], start: int) -> Tensor:
    """Sum weighted elements along a dimension; the local elements begin at input `start`."""
    total: Any = 0
    for tap in zip(*points, strict=True):
        positions = torch.tensor([position - start for position, _ in tap], device=x.device)
        weights = torch.tensor([weight for _, weight in tap], dtype=x.dtype, device=x.device)
        elements = x.index_select(dim, positions)
        total = total + (
            elements
            if len(points[0]) == 1
            else elements * weights.view(-1, *(1 for _ in range(x.dim() - 1 - dim)))
        )
    return total  # type: ignore[no-any-return]
