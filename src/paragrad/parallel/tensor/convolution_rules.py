"""Rules for convolutions, divided by channels, groups of channels, or dimensions of images."""

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
    """Apply a convolution.

    It may be divided by output channels, input channels, whole groups, samples, or image
    dimensions.
    """
    dim_count = weight.dim() - 2
    names = (
        ("stride", "padding", "output_padding", "groups", "dilation")
        if "transpose" in func.__name__
        else ("stride", "padding", "dilation", "groups")
    )
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    spatial_letters = (None,) * dim_count
    batch = (0,) if input.dim() == dim_count + 2 else ()
    channel = len(batch)
    if isinstance(input, ShardedTensor) and any(dim > channel for dim in input.shardings):
        return convolve_image(
            func,
            input,
            weight,
            bias,
            ConvolutionOptions.read_arguments(func, input, weight, kwargs),
        )
    kernel = (
        ("i", "o", *spatial_letters)
        if "transpose" in func.__name__
        else ("o", "i", *spatial_letters)
    )
    if kwargs.get("groups", 1) == 1 or (
        isinstance(input, ShardedTensor) and set(input.shardings) == {0} and channel
    ):
        return apply_einsum_rule(
            lambda x, w, b: func(x, w, b, **kwargs),
            [Operand(input, (*batch, "i", *spatial_letters)), Operand(weight, kernel)],
            (*batch, "o", *spatial_letters),
            [(1, "o")] if kwargs.get("groups", 1) == 1 else (),
            bias=Operand(bias, "o"),
        )
    if not isinstance(input, ShardedTensor) or set(input.shardings) != {channel}:
        return NO_RULE
    groups = kwargs["groups"]
    sharding = input.shardings[channel]
    inputs_per_group = input.shape[channel] // groups
    outputs_per_group = weight.shape[1] if kernel[0] == "i" else weight.shape[0] // groups
    if (local_groups := count_local_groups(sharding, inputs_per_group)) is None:
        return NO_RULE
    output_sharding = Sharding(
        sharding.partition.scale_elements(outputs_per_group, inputs_per_group), sharding.group
    )
    local = fit_operand(
        Operand(weight, ("g", None, *spatial_letters)),
        {"g": sharding if kernel[0] == "i" else output_sharding},
    )
    result = func(
        input.local,
        local,
        fit_operand(Operand(bias, "o"), {"o": output_sharding}),
        **{**kwargs, "groups": local_groups},
    )
    return wrap_local(result, {channel: output_sharding})


def count_local_groups(sharding: Sharding, channels: int) -> int | None:
    """Count the groups of channels that this rank holds.

    Args:
        sharding: How the channels are divided.
        channels: Number of channels of a group.

    Returns:
        The number of groups. None, after a request for another division, if a group is split.
    """
    blocks = sharding.partition.blocks
    if all(block.size // block.grains % channels == 0 for block in blocks):
        return sharding.partition.compute_length(sharding.group.rank) // channels
    sharding.group.add_constraints(
        constraint
        for block in blocks
        for constraint in make_constraints(
            block,
            0 if block.size % channels else block.size // lcm(block.size // block.grains, channels),
        )
    )
    return None


# ---- images that are divided along rows or columns -------------------------------------------
@dataclass(frozen=True)
class ConvolutionOptions:
    """The arguments of a convolution, for an image with divided dimensions.

    Attributes:
        first_dim: First spatial dimension of the input.

        dim_count: Number of spatial dimensions.

        stride: Stride of each spatial dimension.

        padding_sides: Padding of each spatial dimension, (before, after).

        dilation: Dilation of each spatial dimension.

        groups: Number of groups.

        output_padding: For a transposed convolution, outputs that are added at the end of each
            dimension.

        transposed: Whether the convolution is transposed.

        kernel: Size of the kernel.
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
        """Read the arguments of a function of torch.

        Args:
            func: The function, such as torch.conv2d.
            input: The input.
            weight: The weight.
            kwargs: The other arguments, by name.

        Returns:
            The options.
        """
        dim_count = weight.dim() - 2
        dilation = expand_argument(kwargs.get("dilation", 1), dim_count)
        kernel = tuple(weight.shape[2:])
        return cls(
            input.dim() - dim_count,
            dim_count,
            expand_argument(kwargs.get("stride", 1), dim_count),
            _resolve_padding(kwargs.get("padding", 0), kernel, dilation),
            dilation,
            kwargs.get("groups", 1),
            expand_argument(kwargs.get("output_padding", 0), dim_count),
            "transpose" in func.__name__,
            kernel,
        )

    @property
    def windows(self) -> dict[int, TransposedWindow] | dict[int, Window]:
        """The window of each spatial dimension."""
        arguments = list(
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
                self.first_dim + at: TransposedWindow(kernel, stride, *sides, dilation, extra)
                for at, (kernel, stride, sides, dilation, extra) in enumerate(arguments)
            }
        return {
            self.first_dim + at: Window(kernel, stride, *sides, dilation)
            for at, (kernel, stride, sides, dilation, _) in enumerate(arguments)
        }


def _resolve_padding(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (before, after) of each dimension, for padding as numbers, "same" or "valid"."""
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
    """Convolve an image that is divided along spatial dimensions.

    Args:
        func: The convolution of torch.
        input: The image, (samples, channels, ...) or (channels, ...).
        weight: The weight.
        bias: The bias, or None.
        options: The other arguments.

    Returns:
        The sharded result.
    """
    halo = next(
        (
            planned
            for dim, window in options.windows.items()
            if isinstance(window, Window)
            and dim in input.shardings
            and has_enough_outputs(window, input.shape[dim], input.shardings[dim])
            and (planned := plan_halo(window, input.shape[dim], dim, input.shardings[dim]))
        ),
        None,
    )
    x, local, output_shardings = fetch_windows(
        input, options.windows, deferred=[halo.dim] if halo else []
    )
    if options.transposed:
        convolve = _make_transposed_convolution(func, local, x, output_shardings, options)
    else:
        convolve = _make_convolution(func, local, output_shardings, options, halo)
    batch: Letters = (0,) if options.first_dim == 2 else ()
    spatial_letters = [
        dim if dim in output_shardings else None
        for dim in range(options.first_dim, options.first_dim + options.dim_count)
    ]
    kernel_letters = (None,) * options.dim_count
    kernel = ("i", "o", *kernel_letters) if options.transposed else ("o", "i", *kernel_letters)
    return apply_einsum_rule(
        convolve,
        [Operand(x, (*batch, "i", *spatial_letters)), Operand(weight, kernel)],
        (*batch, "o", *spatial_letters),
        bias=Operand(bias, "o"),
        output_shardings=output_shardings,
    )


def _make_convolution(
    func: Any,
    local: Tensor,
    output_shardings: Mapping[int, Sharding],
    options: ConvolutionOptions,
    halo: Halo | None,
) -> Callable[..., Tensor]:
    """Return a function that convolves the local part of an image.

    The local part has all inputs that the outputs need, except along the dimension of the halo.
    """

    def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        pads = []
        extra_padding = dict[int, tuple[int, int]]()
        for at, (before, after) in enumerate(options.padding_sides):
            dim = options.first_dim + at
            pads.append(
                padding
                if halo and dim == halo.dim
                else 0
                if dim in output_shardings
                else min(before, after)
            )
            # torch pads both sides equally; the difference of the sides is padded here
            extra_padding[dim] = 0, 0 if dim in output_shardings else after - min(before, after)
        rows = (
            functional.pad(rows, order_padding(extra_padding, rows.dim()))
            if any(map(any, extra_padding.values()))
            else rows
        )
        result: Tensor = func(
            rows, weight, bias, options.stride, pads, options.dilation, options.groups
        )
        return result

    def compute(_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if halo is None:
            return convolve(local, weight, bias, 0)
        note_halo_fetch(local, halo.dim, halo.sharding, halo.wanted)
        return convolve_with_halo(
            lambda rows, padding, with_bias: convolve(
                rows, weight, bias if with_bias else None, padding
            ),
            local,
            halo,
        )

    return compute


def _make_transposed_convolution(
    func: Any,
    local: Tensor,
    x: Tensor,
    output_shardings: Mapping[int, Sharding],
    options: ConvolutionOptions,
) -> Callable[..., Tensor]:
    """Return a function that applies a transposed convolution to the local part of an image.

    Contributions to outputs of other ranks are cut off. Outputs without any contribution get only
    the bias.
    """
    paddings = dict[int, tuple[int, int]]()
    for dim, sharding in output_shardings.items():
        own_outputs = sharding.partition.list_ranges(sharding.group.rank)[0]
        window = options.windows[dim]
        assert isinstance(window, TransposedWindow)
        paddings[dim] = window.compute_padding(
            own_outputs, window.find_inputs(own_outputs, x.shape[dim])
        )
    dims = range(options.first_dim, options.first_dim + options.dim_count)
    pads = [
        0 if dim in output_shardings else side[0]
        for dim, side in zip(dims, options.padding_sides, strict=True)
    ]
    output_padding = [
        0 if dim in output_shardings else size
        for dim, size in zip(dims, options.output_padding, strict=True)
    ]

    def compute(_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = func(
            local,
            weight,
            None,
            options.stride,
            pads,
            output_padding,
            options.groups,
            options.dilation,
        )
        out = functional.pad(out, order_padding(paddings, out.dim())) if paddings else out
        result: Tensor = (
            out if bias is None else out + bias.to(out.dtype).view(-1, *(1 for _ in dims))
        )
        return result

    return compute


def order_padding(padding_sides: Mapping[int, tuple[int, int]], dims: int) -> list[int]:
    """Return paddings in the order of torch.nn.functional.pad, from the last dimension on."""
    return [
        size
        for dim in reversed(range(min(padding_sides), dims))
        for size in padding_sides.get(dim, (0, 0))
    ]
