"""Functions that work channel by channel, or sample by sample: convolutions, norms, pooling, resizing."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor

from paragrad.techniques.width.divided import RULES, UNKNOWN, Cut, Divided, divided, rule
from paragrad.techniques.width.letters import Operand, fitted, spread
from paragrad.techniques.width.pieces import wishes


# ---- convolutions ------------------------------------------------------------------------------------------------------------
@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", decides=True)
def convolution(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Channels out, or in; of a grouped one whole groups."""
    spatial = weight.dim() - 2
    names = ("stride", "padding", "output_padding", "groups", "dilation") if "transpose" in func.__name__ else (
        "stride", "padding", "dilation", "groups")
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    rest, batch = (None,) * spatial, (0,) if input.dim() == spatial + 2 else ()
    kernel = ("i", "o", *rest) if "transpose" in func.__name__ else ("o", "i", *rest)
    if kwargs.get("groups", 1) == 1:
        return spread(lambda x, w, b: func(x, w, b, **kwargs), [Operand(input, (*batch, "i", *rest)), Operand(weight, kernel)],
                      (*batch, "o", *rest), [(1, "o")], bias=Operand(bias, "o"))
    channel = len(batch)
    if not isinstance(input, Divided) or set(input.cuts) != {channel}:
        return UNKNOWN
    groups, cut = kwargs["groups"], input.cuts[channel]
    into = input.shape[channel] // groups
    out = weight.shape[1] if kernel[0] == "i" else weight.shape[0] // groups
    if (here := _groups(cut, into)) is None:
        return UNKNOWN
    after = Cut(cut.pieces.scaled(out, into), cut.line)
    local = fitted(Operand(weight, ("g", None, *rest)), {"g": cut if kernel[0] == "i" else after})
    made = func(input.local, local, fitted(Operand(bias, "o"), {"o": after}), **{**kwargs, "groups": here})
    return divided(made, {channel: after})


def _groups(cut: Cut, channels: int) -> int | None:
    """How many groups of so many channels this rank has; None, and a wish, where one is cut."""
    blocks = cut.pieces.blocks
    if all(block.size // block.grains % channels == 0 for block in blocks):
        return cut.pieces.length(cut.line.rank) // channels
    cut.line.wish(wish for block in blocks for wish in wishes(
        block, 0 if block.size % channels else block.size // lcm(block.size // block.grains, channels)))
    return None


# ---- norms -------------------------------------------------------------------------------------------------------------------
@rule("batch_norm", "instance_norm")
def batch_norm(func: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
               running_var: Tensor | None, training: bool, *rest: Any) -> Any:
    """As torch.batch_norm: channel by channel. By whatever is in its place now, which may ask other replicas."""
    if not isinstance(input, Divided) or set(input.cuts) != {1}:
        return UNKNOWN
    cuts: dict[Any, Cut] = {"c": input.cuts[1]}
    found = [fitted(Operand(each, "c"), cuts) for each in (weight, bias)]
    statistics = [fitted(Operand(each, "c"), cuts, must=training) for each in (running_mean, running_var)]
    if any(each is None for each, given in zip(statistics, (running_mean, running_var), strict=True) if given is not None):
        return UNKNOWN                      # whole ones, which this rank would change in a copy
    now = torch.batch_norm if func.__name__ == "batch_norm" else torch.instance_norm
    return divided(now(input.local, *found, *statistics, training, *rest), input.cuts)          # type: ignore[arg-type]


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
        return func(x, normalized_shape, *arguments)                # type: ignore[no-any-return]
    letters = (*range(before), *(None for _ in normalized_shape))
    return spread(run, [Operand(input, letters), *(Operand(each, (None,) * each.dim()) for each in given)], letters)


@rule("group_norm")
def group_norm(func: Any, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
               *rest: Any) -> Any:
    """Whole groups of channels."""
    if not isinstance(input, Divided) or set(input.cuts) != {1}:
        return UNKNOWN
    cut = input.cuts[1]
    if (here := _groups(cut, input.shape[1] // num_groups)) is None:
        return UNKNOWN
    own = [fitted(Operand(each, "c"), {"c": cut}) for each in (weight, bias)]
    return divided(func(input.local, here, *own, *rest), input.cuts)


# ---- each channel of each sample by itself -----------------------------------------------------------------------------------
def per_channel(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The last one, two or three dimensions as the function's name says: what stands before them may be divided."""
    spatial = next(int(letter) for letter in reversed(func.__name__) if letter in "123")
    if not isinstance(input, Divided) or any(dim >= input.dim() - spatial for dim in input.cuts):
        return UNKNOWN
    made, cuts = func(input.local, *args, **kwargs), input.cuts
    return tuple(divided(each, cuts) for each in made) if isinstance(made, tuple) else divided(made, cuts)


RULES.update(dict.fromkeys((f"{kind}{spatial}d{more}" for spatial in "123" for more in ("", "_with_indices") for kind in (
    "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "reflection_pad", "replication_pad", "upsample_nearest",
    "_upsample_nearest_exact")), per_channel))
RULES.update(dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
                            "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), per_channel))


@rule("pad", "constant_pad_nd")
def pad(func: Any, input: Tensor, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """What is not padded may be divided."""
    if not isinstance(input, Divided):
        return UNKNOWN
    last = input.dim() - 1                          # of which pad has the first two numbers
    if any(any(pad[2 * (last - dim):2 * (last - dim) + 2]) for dim in input.cuts):
        return UNKNOWN
    return divided(func(input.local, pad, *args, **kwargs), input.cuts)


