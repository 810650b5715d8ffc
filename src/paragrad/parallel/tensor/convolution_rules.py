"""Convolutions: channels out or in, whole groups of them, or rows and columns of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Self

from torch import Tensor
from torch.nn import functional

from paragrad.parallel.sharding.halo_regions import TransposedWindow, Window
from paragrad.parallel.sharding.partition import make_constraints
from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    ShardedTensor,
    Sharding,
    register_rule,
    wrap_local,
)
from paragrad.parallel.tensor.einsum_rules import Letters, Operand, apply_einsum_rule, fit_operand
from paragrad.parallel.tensor.halo_exchange import Halo, convolve_with_halo, plan_halo
from paragrad.parallel.tensor.window_rules import (
    expand_argument,
    fetch_windows,
    has_enough_outputs,
    note_halo_fetch,
)


@register_rule(
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    decides=True,
)
def apply_convolution(
    func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Channels out, or in; of a grouped one whole groups; rows and columns of images."""
    spatial = weight.dim() - 2
    names = (
        ("stride", "padding", "output_padding", "groups", "dilation")
        if "transpose" in func.__name__
        else ("stride", "padding", "dilation", "groups")
    )
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = (None,) * spatial
    batch = (0,) if input.dim() == spatial + 2 else ()
    channel = len(batch)
    if isinstance(input, ShardedTensor) and any(dim > channel for dim in input.shardings):
        return convolve_image(
            func,
            input,
            weight,
            bias,
            ConvolutionOptions.read_arguments(func, input, weight, kwargs),
        )
    kernel = ("i", "o", *rest) if "transpose" in func.__name__ else ("o", "i", *rest)
    if kwargs.get("groups", 1) == 1 or (
        isinstance(input, ShardedTensor) and set(input.shardings) == {0} and channel
    ):
        return apply_einsum_rule(
            lambda x, w, b: func(x, w, b, **kwargs),
            [Operand(input, (*batch, "i", *rest)), Operand(weight, kernel)],
            (*batch, "o", *rest),
            [(1, "o")] if kwargs.get("groups", 1) == 1 else (),
            bias=Operand(bias, "o"),
        )
    if not isinstance(input, ShardedTensor) or set(input.shardings) != {channel}:
        return NO_RULE
    groups = kwargs["groups"]
    cut = input.shardings[channel]
    into = input.shape[channel] // groups
    out = weight.shape[1] if kernel[0] == "i" else weight.shape[0] // groups
    if (here := count_local_groups(cut, into)) is None:
        return NO_RULE
    after = Sharding(cut.partition.scale_elements(out, into), cut.group)
    local = fit_operand(
        Operand(weight, ("g", None, *rest)), {"g": cut if kernel[0] == "i" else after}
    )
    made = func(
        input.local,
        local,
        fit_operand(Operand(bias, "o"), {"o": after}),
        **{**kwargs, "groups": here},
    )
    return wrap_local(made, {channel: after})


def count_local_groups(sharding: Sharding, channels: int) -> int | None:
    """How many groups of so many channels this rank has; None, and a wish, where one is cut."""
    blocks = sharding.partition.blocks
    if all(block.size // block.grains % channels == 0 for block in blocks):
        return sharding.partition.compute_length(sharding.group.rank) // channels
    sharding.group.add_constraints(
        wish
        for block in blocks
        for wish in make_constraints(
            block,
            0 if block.size % channels else block.size // lcm(block.size // block.grains, channels),
        )
    )
    return None


# ---- of an image that is divided along its rows or columns -----------------------------------
@dataclass(frozen=True)
class ConvolutionOptions:
    """Of a convolution over so many dimensions, from the first of an image's. sides: padding
    before and after;  more: of a transposed one, what is put behind its outputs.
    """

    first_dim: int
    dim_count: int
    stride: list[int]
    padding_sides: list[tuple[int, int]]
    dilation: list[int]
    groups: int
    output_padding: list[int]
    transposed: bool
    kernel: tuple[int, ...]

    @classmethod
    def read_arguments(
        cls, func: Any, input: Tensor, weight: Tensor, kwargs: Mapping[str, Any]
    ) -> Self:
        count = weight.dim() - 2
        dilation = expand_argument(kwargs.get("dilation", 1), count)
        kernel = tuple(weight.shape[2:])
        return cls(
            input.dim() - count,
            count,
            expand_argument(kwargs.get("stride", 1), count),
            _resolve_padding(kwargs.get("padding", 0), kernel, dilation),
            dilation,
            kwargs.get("groups", 1),
            expand_argument(kwargs.get("output_padding", 0), count),
            "transpose" in func.__name__,
            kernel,
        )

    @property
    def windows(self) -> dict[int, TransposedWindow] | dict[int, Window]:
        given = list(
            zip(
                self.kernel,
                self.stride,
                self.padding_sides,
                self.dilation,
                self.output_padding,
                strict=True,
            )
        )
        if self.transposed:
            return {
                self.first_dim + at: TransposedWindow(kernel, stride, *sides, dilation, more)
                for at, (kernel, stride, sides, dilation, more) in enumerate(given)
            }
        return {
            self.first_dim + at: Window(kernel, stride, *sides, dilation)
            for at, (kernel, stride, sides, dilation, _) in enumerate(given)
        }


def _resolve_padding(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "same":
        reaches = [times * (size - 1) for size, times in zip(kernel, dilation, strict=True)]
        return [(reach // 2, reach - reach // 2) for reach in reaches]
    return [
        (size, size) for size in expand_argument(0 if padding == "valid" else padding, len(kernel))
    ]


def convolve_image(
    func: Any,
    input: ShardedTensor,
    weight: Tensor,
    bias: Tensor | None,
    options: ConvolutionOptions,
) -> Any:
    halo = next(
        (
            found
            for dim, window in options.windows.items()
            if isinstance(window, Window)
            and dim in input.shardings
            and has_enough_outputs(window, input.shape[dim], input.shardings[dim])
            and (found := plan_halo(window, input.shape[dim], dim, input.shardings[dim]))
        ),
        None,
    )
    x, local, after = fetch_windows(input, options.windows, deferred=[halo.dim] if halo else [])
    if options.transposed:
        run = _make_transposed_convolution(func, local, x, after, options)
    else:
        run = _make_convolution(func, local, after, options, halo)
    batch: Letters = (0,) if options.first_dim == 2 else ()
    places = [
        dim if dim in after else None
        for dim in range(options.first_dim, options.first_dim + options.dim_count)
    ]
    rest = (None,) * options.dim_count
    kernel = ("i", "o", *rest) if options.transposed else ("o", "i", *rest)
    return apply_einsum_rule(
        run,
        [Operand(x, (*batch, "i", *places)), Operand(weight, kernel)],
        (*batch, "o", *places),
        bias=Operand(bias, "o"),
        output_shardings=after,
    )


def _make_convolution(
    func: Any,
    local: Tensor,
    output_shardings: Mapping[int, Sharding],
    options: ConvolutionOptions,
    halo: Halo | None,
) -> Callable[..., Tensor]:
    """local: has all that the outputs see, but along the dimension of a halo."""

    def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        pads = []
        beside = dict[int, tuple[int, int]]()
        for at, (before, behind) in enumerate(options.padding_sides):
            dim = options.first_dim + at
            pads.append(
                padding
                if halo and dim == halo.dim
                else 0
                if dim in output_shardings
                else min(before, behind)
            )
            # where sides differ
            beside[dim] = 0, 0 if dim in output_shardings else behind - min(before, behind)
        rows = (
            functional.pad(rows, order_padding(beside, rows.dim()))
            if any(map(any, beside.values()))
            else rows
        )
        result: Tensor = func(
            rows, weight, bias, options.stride, pads, options.dilation, options.groups
        )
        return result

    def run(_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if halo is None:
            return convolve(local, weight, bias, 0)
        note_halo_fetch(local, halo.dim, halo.sharding, halo.wanted)
        return convolve_with_halo(
            lambda rows, padding, own: convolve(rows, weight, bias if own else None, padding),
            local,
            halo,
        )

    return run


def _make_transposed_convolution(
    func: Any,
    local: Tensor,
    x: Tensor,
    output_shardings: Mapping[int, Sharding],
    options: ConvolutionOptions,
) -> Callable[..., Tensor]:
    """What inputs give to outputs of other ranks is cut off, and where nothing is given there
    is the bias alone.
    """
    around = dict[int, tuple[int, int]]()
    for dim, cut in output_shardings.items():
        here = cut.partition.list_ranges(cut.group.rank)[0]
        spread = options.windows[dim]
        assert isinstance(spread, TransposedWindow)
        around[dim] = spread.compute_padding(here, spread.find_inputs(here, x.shape[dim]))
    dims = range(options.first_dim, options.first_dim + options.dim_count)
    pads = [
        0 if dim in output_shardings else side[0]
        for dim, side in zip(dims, options.padding_sides, strict=True)
    ]
    more = [
        0 if dim in output_shardings else size
        for dim, size in zip(dims, options.output_padding, strict=True)
    ]

    def run(_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = func(
            local, weight, None, options.stride, pads, more, options.groups, options.dilation
        )
        out = functional.pad(out, order_padding(around, out.dim())) if around else out
        result: Tensor = (
            out if bias is None else out + bias.to(out.dtype).view(-1, *(1 for _ in dims))
        )
        return result

    return run


def order_padding(padding_sides: Mapping[int, tuple[int, int]], dims: int) -> list[int]:
    """As torch's pad has them, from the last dimension."""
    return [
        size
        for dim in reversed(range(min(padding_sides), dims))
        for size in padding_sides.get(dim, (0, 0))
    ]
