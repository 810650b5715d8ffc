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

from paragrad.parallel.sharding.autograd_collectives import Fetched
from paragrad.parallel.sharding.halo_regions import (
    Padded,
    Resized,
    Want,
    Window,
    fetched,
    given,
    taps,
)
from paragrad.parallel.sharding.partition import evenly_divided
from paragrad.parallel.sharding.sharded_tensor import (
    RULES,
    UNKNOWN,
    Cut,
    Divided,
    divided,
    rule,
    whole,
)


# ---- what is fetched -------------------------------------------------------------------------
class Sliding(Protocol):
    """What outputs along a dimension see of its inputs."""

    def outputs(self, size: int) -> int: ...
    def sees(self, outputs: range, size: int) -> Want: ...


def fetch(x: Tensor, dim: int, cut: Cut, wants: tuple[Want, ...], fill: float) -> Tensor:
    """Of a local part what this rank wants of all."""
    note(x, dim, cut, wants)
    if all(
        want == tuple(have)
        for want, (have,) in zip(wants, map(cut.pieces.ranges, range(cut.line.size)), strict=True)
    ):
        return x  # each has what it wants
    return Fetched.apply(x, dim, cut.pieces, wants, fill, cut.line)  # type: ignore[no-any-return]


def note(x: Tensor, dim: int, cut: Cut, wants: tuple[Want, ...]) -> None:
    """What is fetched, while it is found out what travels."""
    line = cut.line
    one = x.nbytes // max(1, x.shape[dim])
    if line.planning is not None:  # of the rank that sends most
        ranks = range(line.size)
        shown = " + ".join(str(fetched(cut.pieces, wants, rank)) for rank in ranks)
        line.note(
            "fetched",
            one * max(given(cut.pieces, wants, rank) for rank in ranks),
            f"{line.manner.data} {shown}",
        )
        if x.requires_grad and torch.is_grad_enabled():
            line.note("returned", one * max(fetched(cut.pieces, wants, rank) for rank in ranks))


def seen(
    x: Tensor, sliding: Mapping[int, Sliding], fill: float = 0.0, later: Collection[int] = ()
) -> tuple[Tensor, Tensor, dict[int, Cut]]:
    """(x, what this rank's outputs see of it, how these are divided). x is whole along a
    dimension that has fewer outputs than ranks; later: along these nothing is fetched yet.
    """
    few = (
        [
            dim
            for dim, cut in x.cuts.items()
            if dim in sliding and not enough(sliding[dim], x.shape[dim], cut)
        ]
        if isinstance(x, Divided)
        else []
    )
    x = whole(x, few) if few else x
    local = x.local if isinstance(x, Divided) else x
    after = dict[int, Cut]()
    for dim, cut in x.cuts.items() if isinstance(x, Divided) else ():
        if dim in sliding:
            after[dim] = Cut(
                evenly_divided(sliding[dim].outputs(x.shape[dim]), cut.line.size), cut.line
            )
            wants = tuple(
                sliding[dim].sees(after[dim].pieces.ranges(rank)[0], x.shape[dim])
                for rank in range(cut.line.size)
            )
            local = local if dim in later else fetch(local, dim, cut, wants, fill)
    return x, local, after


def enough(sliding: Sliding, size: int, cut: Cut) -> bool:
    """Are there outputs for every rank, of inputs in one piece each?"""
    return len(cut.pieces.blocks) == 1 and sliding.outputs(size) >= cut.line.size


def each(value: Any, count: int) -> list[Any]:
    """2 or (2,) or (2, 3), of so many dimensions."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values


def dimensions(name: str) -> int:
    return next(int(letter) for letter in reversed(name) if letter in "123")


# ---- each channel of each sample by itself ---------------------------------------------------
def per_channel(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The last one, two or three dimensions as the function's name says: what stands before
    them may be divided.
    """
    if not isinstance(input, Divided) or any(
        dim >= input.dim() - dimensions(func.__name__) for dim in input.cuts
    ):
        return UNKNOWN
    made = func(input.local, *args, **kwargs)
    cuts = input.cuts
    return (
        tuple(divided(each, cuts) for each in made)
        if isinstance(made, tuple)
        else divided(made, cuts)
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
        per_channel,
    )
)
RULES.update(dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), per_channel))


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
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
        return per_channel(
            func, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True
        )
    count = dimensions(func.__name__)
    plain = getattr(torch, f"max_pool{count}d")
    if not _of_images(func, input):
        return per_channel(plain, input, kernel_size, stride or (), padding, dilation, ceil_mode)
    kernel = each(kernel_size, count)
    pads = each(padding, count)
    dilations = each(dilation, count)
    strides = each(stride or kernel_size, count)
    first = input.dim() - count
    x, local, after = seen(
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
    return divided(made, {**getattr(x, "cuts", {}), **after})


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
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
    if not _of_images(func, input):
        more = {} if divisor_override is None else {"divisor_override": divisor_override}
        return per_channel(
            func, input, kernel_size, stride, padding, ceil_mode, count_include_pad, **more
        )
    count = dimensions(func.__name__)
    if count == 1:
        return functional.avg_pool2d(
            input.unsqueeze(-2),
            (1, *each(kernel_size, 1)),
            (1, *each(stride or kernel_size, 1)),
            (0, *each(padding, 1)),
            ceil_mode,
            count_include_pad,
        ).squeeze(-2)
    kernel = each(kernel_size, count)
    pads = each(padding, count)
    strides = each(stride or kernel_size, count)
    first = input.dim() - count
    windows = {
        first + at: Window(kernel[at], strides[at], pads[at], pads[at], 1, ceil_mode)
        for at in range(count)
    }
    x, local, after = seen(input, windows)
    pads = [0 if first + at in after else pads[at] for at in range(count)]
    made = func(local, kernel, strides, pads, ceil_mode, True, 1)
    for dim, window in windows.items() if divisor_override is None else ():
        counts = made.new_tensor(window.counts(input.shape[dim], count_include_pad))
        if dim in after:
            counts = after[dim].line.piece(counts, 0, after[dim].pieces)
        made = made / counts.view(-1, *(1 for _ in range(input.dim() - 1 - dim)))
    return divided(
        made if divisor_override is None else made / divisor_override,
        {**getattr(x, "cuts", {}), **after},
    )


def _of_images(func: Any, input: Tensor) -> bool:
    return isinstance(input, Divided) and any(
        dim >= input.dim() - dimensions(func.__name__) for dim in input.cuts
    )


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(func: Any, input: Tensor, output_size: Any) -> Any:
    """One output: the mean over all ranks; several want the image whole."""
    count = dimensions(func.__name__)
    if _of_images(func, input) and all(size == 1 for size in each(output_size, count)):
        return input.mean(tuple(range(-count, 0)), keepdim=True)
    return per_channel(func, input, output_size)


@rule("pad", "constant_pad_nd")
def pad(func: Any, input: Tensor, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """Along divided dimensions what stands outside is fetched, if it is not a constant."""
    if not isinstance(input, Divided):
        return UNKNOWN
    given = dict(
        zip(("mode", "value") if func.__name__ == "pad" else ("value",), args, strict=False),
        **kwargs,
    )
    # of which pad has the first two numbers
    mode = given.get("mode", "constant")
    last = input.dim() - 1
    sides = {last - at: (pad[2 * at], pad[2 * at + 1]) for at in range(len(pad) // 2)}
    along = {dim: Padded(*sides[dim], mode) for dim in input.cuts if any(sides.get(dim, ()))}
    if any(
        not enough(along[dim], input.shape[dim], cut)
        for dim, cut in input.cuts.items()
        if dim in along
    ):
        return UNKNOWN
    _, local, after = seen(input, along, given.get("value") or 0.0)
    rest = [0 if last - at // 2 in after else size for at, size in enumerate(pad)]
    return divided(
        func(local, rest, *args, **kwargs) if any(rest) else local, {**input.cuts, **after}
    )


# ---- resizing --------------------------------------------------------------------------------
KINDS = {
    "nearest": "nearest",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
    "bicubic": "cubic",
}


@rule(
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
def resized(func: Any, input: Tensor, output_size: Any, *args: Any) -> Any:
    """Divided dimensions one after the other, each output by its taps; what is not divided by
    torch.
    """
    if not _of_images(func, input):
        return per_channel(func, input, output_size, *args)
    count = dimensions(func.__name__)
    aligned = args[0] if len(args) > 1 else False
    factors = args[-1] if args else None
    first = input.dim() - count
    kind = KINDS[
        func.__name__.strip("_").removeprefix("upsample_").rstrip("123d").removesuffix("_exact")
    ]
    sizes = (
        [int(input.shape[first + at] * factors[at]) for at in range(count)]
        if factors
        else list(output_size)
    )
    times = {first + at: size // input.shape[first + at] for at, size in enumerate(sizes)}
    cuts = [dim for dim in input.cuts if dim >= first]  # type: ignore[attr-defined]
    if any(
        sizes[dim - first] != times[dim] * input.shape[dim]
        or (factors and factors[dim - first] != times[dim])
        for dim in cuts
    ):
        return UNKNOWN
    points = {dim: taps(kind, input.shape[dim], times[dim], aligned) for dim in cuts}
    x, local, after = seen(input, {dim: Resized(points[dim]) for dim in cuts})
    for dim, cut in after.items():
        here = cut.pieces.ranges(cut.line.rank)[0]
        start = min(place for at in here for place, _ in points[dim][at])
        local = _tapped(local, dim, [points[dim][at] for at in here], start)
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
    return divided(local, {**getattr(x, "cuts", {}), **after})


def _tapped(x: Tensor, dim: int, points: list[list[tuple[int, float]]], start: int) -> Tensor:
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
