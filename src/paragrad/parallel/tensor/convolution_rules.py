"""Convolutions: channels out or in, whole groups of them, or rows and columns of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Self

from torch import Tensor
from torch.nn import functional

from paragrad.parallel.sharding.halo_regions import Spread, Window
from paragrad.parallel.sharding.partition import wishes
from paragrad.parallel.sharding.sharded_tensor import UNKNOWN, Cut, Divided, divided, rule
from paragrad.parallel.tensor.einsum_rules import Letters, Operand, fitted, spread
from paragrad.parallel.tensor.halo_exchange import Halo, convolved, edgewise
from paragrad.parallel.tensor.window_rules import each, enough, note, seen


@rule(
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    decides=True,
)
def convolution(
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
    if isinstance(input, Divided) and any(dim > channel for dim in input.cuts):
        return of_an_image(func, input, weight, bias, Options.of(func, input, weight, kwargs))
    kernel = ("i", "o", *rest) if "transpose" in func.__name__ else ("o", "i", *rest)
    if kwargs.get("groups", 1) == 1 or (
        isinstance(input, Divided) and set(input.cuts) == {0} and channel
    ):
        return spread(
            lambda x, w, b: func(x, w, b, **kwargs),
            [Operand(input, (*batch, "i", *rest)), Operand(weight, kernel)],
            (*batch, "o", *rest),
            [(1, "o")] if kwargs.get("groups", 1) == 1 else (),
            bias=Operand(bias, "o"),
        )
    if not isinstance(input, Divided) or set(input.cuts) != {channel}:
        return UNKNOWN
    groups = kwargs["groups"]
    cut = input.cuts[channel]
    into = input.shape[channel] // groups
    out = weight.shape[1] if kernel[0] == "i" else weight.shape[0] // groups
    if (here := groups_here(cut, into)) is None:
        return UNKNOWN
    after = Cut(cut.pieces.scaled(out, into), cut.line)
    local = fitted(Operand(weight, ("g", None, *rest)), {"g": cut if kernel[0] == "i" else after})
    made = func(
        input.local, local, fitted(Operand(bias, "o"), {"o": after}), **{**kwargs, "groups": here}
    )
    return divided(made, {channel: after})


def groups_here(cut: Cut, channels: int) -> int | None:
    """How many groups of so many channels this rank has; None, and a wish, where one is cut."""
    blocks = cut.pieces.blocks
    if all(block.size // block.grains % channels == 0 for block in blocks):
        return cut.pieces.length(cut.line.rank) // channels
    cut.line.wish(
        wish
        for block in blocks
        for wish in wishes(
            block,
            0 if block.size % channels else block.size // lcm(block.size // block.grains, channels),
        )
    )
    return None


# ---- of an image that is divided along its rows or columns -----------------------------------
@dataclass(frozen=True)
class Options:
    """Of a convolution over so many dimensions, from the first of an image's. sides: padding
    before and after;  more: of a transposed one, what is put behind its outputs.
    """

    first: int
    count: int
    stride: list[int]
    sides: list[tuple[int, int]]
    dilation: list[int]
    groups: int
    more: list[int]
    transposed: bool
    kernel: tuple[int, ...]

    @classmethod
    def of(cls, func: Any, input: Tensor, weight: Tensor, kwargs: Mapping[str, Any]) -> Self:
        count = weight.dim() - 2
        dilation = each(kwargs.get("dilation", 1), count)
        kernel = tuple(weight.shape[2:])
        return cls(
            input.dim() - count,
            count,
            each(kwargs.get("stride", 1), count),
            _sides(kwargs.get("padding", 0), kernel, dilation),
            dilation,
            kwargs.get("groups", 1),
            each(kwargs.get("output_padding", 0), count),
            "transpose" in func.__name__,
            kernel,
        )

    @property
    def sliding(self) -> dict[int, Spread] | dict[int, Window]:
        given = list(
            zip(self.kernel, self.stride, self.sides, self.dilation, self.more, strict=True)
        )
        if self.transposed:
            return {
                self.first + at: Spread(kernel, stride, *sides, dilation, more)
                for at, (kernel, stride, sides, dilation, more) in enumerate(given)
            }
        return {
            self.first + at: Window(kernel, stride, *sides, dilation)
            for at, (kernel, stride, sides, dilation, _) in enumerate(given)
        }


def _sides(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    if padding == "same":
        reaches = [times * (size - 1) for size, times in zip(kernel, dilation, strict=True)]
        return [(reach // 2, reach - reach // 2) for reach in reaches]
    return [(size, size) for size in each(0 if padding == "valid" else padding, len(kernel))]


def of_an_image(
    func: Any, input: Divided, weight: Tensor, bias: Tensor | None, options: Options
) -> Any:
    halo = next(
        (
            found
            for dim, window in options.sliding.items()
            if isinstance(window, Window)
            and dim in input.cuts
            and enough(window, input.shape[dim], input.cuts[dim])
            and (found := edgewise(window, input.shape[dim], dim, input.cuts[dim]))
        ),
        None,
    )
    x, local, after = seen(input, options.sliding, later=[halo.dim] if halo else [])
    if options.transposed:
        run = _transposed(func, local, x, after, options)
    else:
        run = _plain(func, local, after, options, halo)
    batch: Letters = (0,) if options.first == 2 else ()
    places = [
        dim if dim in after else None for dim in range(options.first, options.first + options.count)
    ]
    rest = (None,) * options.count
    kernel = ("i", "o", *rest) if options.transposed else ("o", "i", *rest)
    return spread(
        run,
        [Operand(x, (*batch, "i", *places)), Operand(weight, kernel)],
        (*batch, "o", *places),
        bias=Operand(bias, "o"),
        after=after,
    )


def _plain(
    func: Any, local: Tensor, after: Mapping[int, Cut], options: Options, halo: Halo | None
) -> Callable[..., Tensor]:
    """local: has all that the outputs see, but along the dimension of a halo."""

    def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        pads = []
        beside = dict[int, tuple[int, int]]()
        for at, (before, behind) in enumerate(options.sides):
            dim = options.first + at
            pads.append(
                padding if halo and dim == halo.dim else 0 if dim in after else min(before, behind)
            )
            # where sides differ
            beside[dim] = 0, 0 if dim in after else behind - min(before, behind)
        rows = (
            functional.pad(rows, as_pads(beside, rows.dim()))
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
        note(local, halo.dim, halo.cut, halo.wants)
        return convolved(
            lambda rows, padding, own: convolve(rows, weight, bias if own else None, padding),
            local,
            halo,
        )

    return run


def _transposed(
    func: Any, local: Tensor, x: Tensor, after: Mapping[int, Cut], options: Options
) -> Callable[..., Tensor]:
    """What inputs give to outputs of other ranks is cut off, and where nothing is given there
    is the bias alone.
    """
    around = dict[int, tuple[int, int]]()
    for dim, cut in after.items():
        here = cut.pieces.ranges(cut.line.rank)[0]
        spread = options.sliding[dim]
        assert isinstance(spread, Spread)
        around[dim] = spread.around(here, spread.sees(here, x.shape[dim]))
    dims = range(options.first, options.first + options.count)
    pads = [0 if dim in after else side[0] for dim, side in zip(dims, options.sides, strict=True)]
    more = [0 if dim in after else size for dim, size in zip(dims, options.more, strict=True)]

    def run(_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = func(
            local, weight, None, options.stride, pads, more, options.groups, options.dilation
        )
        out = functional.pad(out, as_pads(around, out.dim())) if around else out
        result: Tensor = (
            out if bias is None else out + bias.to(out.dtype).view(-1, *(1 for _ in dims))
        )
        return result

    return run


def as_pads(sides: Mapping[int, tuple[int, int]], dims: int) -> list[int]:
    """As torch's pad has them, from the last dimension."""
    return [size for dim in reversed(range(min(sides), dims)) for size in sides.get(dim, (0, 0))]
