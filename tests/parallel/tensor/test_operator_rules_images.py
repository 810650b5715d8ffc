"""torch's functions give the same values and gradients for divided images as for whole ones.

Images are divided by rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality_table import draw_integers, draw_numbers
from torch import Tensor, nn
from torch.nn import functional

from paragrad.launch import Launcher
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.sharding.sharded_tensor import gather_whole as gathered
from paragrad.parallel.tensor import (
    cast_rules,
    class_rules,
    convolution_rules,
    einsum_rules,
    norm_rules,
    reduction_rules,
    shape_rules,
    window_rules,
)
from paragrad.parallel.tensor.input_sharding import shard_inputs
from paragrad.runtime.world import World

pytestmark = pytest.mark.processes

# the import of these modules fills the table of rules
RULES = (
    reduction_rules,
    convolution_rules,
    cast_rules,
    einsum_rules,
    class_rules,
    norm_rules,
    shape_rules,
    window_rules,
)
# (function, shapes of the image and of tensors that are whole on all ranks)
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]
PIXELS = draw_integers(4, 2, 7, 9, seed=80).masked_fill(
    draw_integers(5, 2, 7, 9, seed=81) == 0, -100
)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)


def make_conv(**options: Any) -> Callable[..., Tensor]:
    return lambda x, weight, bias=None: functional.conv2d(x, weight, bias, **options)


def make_transposed_conv(**options: Any) -> Callable[..., Tensor]:
    return lambda x, weight, bias=None: functional.conv_transpose2d(x, weight, bias, **options)


def make_resize(**options: Any) -> Callable[..., Tensor]:
    return lambda x: functional.interpolate(x, **options)


def make_padded_conv(mode: str, kernel: int, **options: Any) -> Callable[..., Tensor]:
    layer = nn.Conv2d(4, 3, kernel, padding=kernel // 2, padding_mode=mode, bias=False, **options)
    return lambda x, weight: torch.func.functional_call(layer, {"weight": weight}, (x,))


def compute_gradient_penalty(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return a penalty on a gradient, so that each backward has a backward."""
    x = x * 1
    out = functional.conv2d(functional.conv2d(x, first, padding=1).tanh(), second, padding=1).tanh()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square()


def compute_u_net(x: Tensor, down: Tensor, deep: Tensor, up: Tensor) -> Tensor:
    """Compute a U-Net of one level: down, up, and a connection beside both."""
    first = functional.conv2d(x, down, padding=1).relu()
    second = functional.conv2d(
        functional.max_pool2d(first, 2, ceil_mode=True), deep, padding=1
    ).relu()
    third = functional.interpolate(second, scale_factor=2, mode="nearest")[
        :, :, : x.shape[2], : x.shape[3]
    ]
    return functional.conv2d(torch.cat([first, third], 1), up)


# for tall images, edges are computed separately
IMAGE = (2, 4, 11, 9)
TALL = (2, 4, 70, 5)
KERNEL = (3, 4, 3, 3)
CASES: dict[str, Case] = {
    "conv": (make_conv(), (IMAGE, KERNEL, (3,))),
    "conv, padded": (make_conv(padding=1), (IMAGE, KERNEL, (3,))),
    "conv, padded by 2": (make_conv(padding=2), (IMAGE, KERNEL, (3,))),
    "conv, one by one": (make_conv(), (IMAGE, (3, 4, 1, 1), (3,))),
    "conv, one by one, stride 2": (make_conv(stride=2), (IMAGE, (3, 4, 1, 1))),
    "conv, stride 2": (make_conv(stride=2, padding=1), (IMAGE, KERNEL, (3,))),
    "conv, stride 2, even": (make_conv(stride=2, padding=1), ((2, 4, 12, 8), KERNEL, (3,))),
    "conv, stride 3, kernel 2": (make_conv(stride=3, padding=(1, 0)), (IMAGE, (3, 4, 2, 2))),
    "conv, stride larger than the kernel": (
        make_conv(stride=(4, 3)),
        ((2, 4, 17, 13), (3, 4, 2, 2)),
    ),
    "conv, dilated": (make_conv(dilation=2, padding=2), (IMAGE, KERNEL, (3,))),
    "conv, same": (make_conv(padding="same"), (IMAGE, (3, 4, 5, 3), (3,))),
    "conv, same, dilated": (
        make_conv(padding="same", dilation=(2, 1)),
        (IMAGE, (3, 4, 2, 5), (3,)),
    ),
    "conv, same, even": (make_conv(padding="same"), (IMAGE, (3, 4, 4, 3))),
    "conv, valid": (make_conv(padding="valid"), (IMAGE, KERNEL)),
    "conv, wide kernel": (make_conv(padding=5), (IMAGE, (3, 4, 11, 9))),
    "conv, patches": (make_conv(stride=4), ((2, 4, 16, 12), (5, 4, 4, 4), (5,))),
    "conv, in groups": (make_conv(groups=2, padding=1), (IMAGE, (6, 2, 3, 3), (6,))),
    "conv, depthwise": (make_conv(groups=4, padding=1), (IMAGE, (4, 1, 3, 3))),
    "conv, circular": (make_padded_conv("circular", 3), (IMAGE, KERNEL)),
    "conv, reflect": (make_padded_conv("reflect", 5), (IMAGE, (3, 4, 5, 5))),
    "conv, replicate": (make_padded_conv("replicate", 3, stride=2), (IMAGE, KERNEL)),
    "conv, fewer rows than ranks": (make_conv(stride=8), (IMAGE, KERNEL, (3,))),
    "tall, conv": (make_conv(), (TALL, KERNEL, (3,))),
    "tall, padded": (make_conv(padding=1), (TALL, KERNEL, (3,))),
    "tall, padded by 2": (make_conv(padding=2), (TALL, KERNEL, (3,))),
    "tall, stride 2": (make_conv(stride=2, padding=1), (TALL, KERNEL, (3,))),
    "tall, stride 2, even": (make_conv(stride=2, padding=1), ((2, 4, 144, 4), KERNEL, (3,))),
    "tall, stride 2, kernel 5": (make_conv(stride=2, padding=2), ((2, 4, 240, 4), (3, 4, 5, 5))),
    "tall, dilated": (make_conv(dilation=2, padding=2), ((1, 4, 140, 5), KERNEL, (3,))),
    "tall, same, even": (make_conv(padding="same"), ((1, 4, 140, 5), (3, 4, 4, 2), (3,))),
    "tall, in groups": (make_conv(groups=2, padding=1), (TALL, (6, 2, 3, 3), (6,))),
    "tall, reflect": (make_padded_conv("reflect", 3), (TALL, KERNEL)),
    "tall, no rows of others": (make_conv(padding=(0, 1)), (TALL, (3, 4, 1, 3))),
    "tall, one after another": (
        lambda x, a, b: (
            functional.conv2d(functional.conv2d(x, a, padding=1).relu(), b, padding=1) + (x[:, :3])
        ),
        (TALL, KERNEL, (3, 3, 3, 3)),
    ),
    "tall, a penalty of a gradient": (compute_gradient_penalty, (TALL, (3, 4, 3, 3), (2, 3, 3, 3))),
    "conv3d": (lambda x, w: functional.conv3d(x, w, padding=1), ((2, 3, 7, 5, 4), (2, 3, 3, 3, 3))),
    "transposed conv": (make_transposed_conv(), (IMAGE, (4, 3, 3, 3), (3,))),
    "transposed conv, stride 2": (
        make_transposed_conv(stride=2, padding=1, output_padding=1),
        (IMAGE, (4, 3, 3, 3), (3,)),
    ),
    "transposed conv, stride 2, kernel 2": (
        make_transposed_conv(stride=2),
        (IMAGE, (4, 3, 2, 2), (3,)),
    ),
    "transposed conv, stride 3, kernel 2": (
        make_transposed_conv(stride=3, output_padding=2),
        (IMAGE, (4, 3, 2, 2), (3,)),
    ),
    "transposed conv, dilated": (
        make_transposed_conv(dilation=2, padding=2),
        (IMAGE, (4, 3, 3, 3)),
    ),
    "transposed conv, in groups": (
        make_transposed_conv(groups=2, stride=2),
        (IMAGE, (4, 3, 3, 3), (6,)),
    ),
    "max pool": (lambda x: functional.max_pool2d(x, 2), (IMAGE,)),
    "max pool, padded": (lambda x: functional.max_pool2d(x, 3, 2, 1), (IMAGE,)),
    "max pool, ceil": (lambda x: functional.max_pool2d(x, 2, ceil_mode=True), (IMAGE,)),
    "max pool, overlapping, dilated": (
        lambda x: functional.max_pool2d(x, 2, 1, dilation=3),
        (IMAGE,),
    ),
    "max pool, with indices": (
        lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
        (IMAGE,),
    ),
    "average pool": (lambda x: functional.avg_pool2d(x, 2), (IMAGE,)),
    "average pool, padded": (lambda x: functional.avg_pool2d(x, 3, 2, 1), (IMAGE,)),
    "average pool, padding not counted": (
        lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        (IMAGE,),
    ),
    "average pool, ceil": (lambda x: functional.avg_pool2d(x, 4, 3, 1, ceil_mode=True), (IMAGE,)),
    "average pool, ceil, not counted": (
        lambda x: functional.avg_pool2d(x, 4, 3, 1, True, False),
        (IMAGE,),
    ),
    "average pool, by 5": (lambda x: functional.avg_pool2d(x, 2, divisor_override=5), (IMAGE,)),
    "average pool of volumes": (lambda x: functional.avg_pool3d(x, 2, 1), ((2, 3, 7, 5, 4),)),
    "power pool": (lambda x: functional.lp_pool2d(x.abs(), 2, 3, 2), (IMAGE,)),
    "adaptive, 1": (lambda x: functional.adaptive_avg_pool2d(x, 1), (IMAGE,)),
    "adaptive, 3": (lambda x: functional.adaptive_avg_pool2d(x, (3, 2)), (IMAGE,)),
    "adaptive max": (lambda x: functional.adaptive_max_pool2d(x, 1), (IMAGE,)),
    "pad": (lambda x: functional.pad(x, (1, 2, 3, 0), value=0.5), (IMAGE,)),
    "pad, cropping": (lambda x: functional.pad(x, (-1, 0, -2, 1)), (IMAGE,)),
    "pad, reflect": (lambda x: functional.pad(x, (2, 2, 3, 1), mode="reflect"), (IMAGE,)),
    "pad, circular": (lambda x: functional.pad(x, (2, 2, 3, 1), mode="circular"), (IMAGE,)),
    "pad, replicate": (lambda x: functional.pad(x, (2, 5, 3, 1), mode="replicate"), (IMAGE,)),
    "pad, columns only": (lambda x: functional.pad(x, (1, 1)), (IMAGE,)),
    "nearest": (make_resize(scale_factor=2), (IMAGE,)),
    "nearest, to a size": (make_resize(size=(22, 27)), (IMAGE,)),
    "nearest, exact": (make_resize(scale_factor=3, mode="nearest-exact"), (IMAGE,)),
    "bilinear": (make_resize(scale_factor=2, mode="bilinear"), (IMAGE,)),
    "bilinear, corners": (
        make_resize(scale_factor=2, mode="bilinear", align_corners=True),
        (IMAGE,),
    ),
    "bilinear, to a size": (
        make_resize(size=(33, 18), mode="bilinear", align_corners=False),
        (IMAGE,),
    ),
    "bilinear, by a fraction": (make_resize(scale_factor=1.5, mode="bilinear"), (IMAGE,)),
    "bicubic": (make_resize(scale_factor=2, mode="bicubic"), (IMAGE,)),
    "bicubic, corners": (
        make_resize(scale_factor=(3, 2), mode="bicubic", align_corners=True),
        (IMAGE,),
    ),
    "bilinear, antialiased": (
        make_resize(scale_factor=2, mode="bilinear", antialias=True),
        (IMAGE,),
    ),
    "group norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), (IMAGE, (4,), (4,))),
    "layer norm": (lambda x: functional.layer_norm(x, x.shape[1:]), (IMAGE,)),
    "instance norm": (lambda x: functional.instance_norm(x), (IMAGE,)),
    "softmax of channels": (lambda x: x.softmax(1), (IMAGE,)),
    "softmax of rows": (lambda x: x.softmax(2), (IMAGE,)),
    "mean of places": (lambda x: x.mean((2, 3)), (IMAGE,)),
    "flattened": (lambda x, w: functional.linear(x.flatten(1), w), (IMAGE, (5, 396))),
    "flattened, many samples": (
        lambda x, w: functional.linear(x.flatten(1), w),
        ((30, 2, 4, 3), (2, 24)),
    ),
    "patches as a row": (
        lambda x, w: functional.conv2d(x, w, stride=4).flatten(2).transpose(1, 2).softmax(1),
        ((2, 4, 16, 12), (5, 4, 4, 4)),
    ),
    "channels last": (
        lambda x, w: functional.linear(x.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2),
        (IMAGE, (5, 4)),
    ),
    "channels last norm": (
        lambda x, w: functional.layer_norm(x.permute(0, 2, 3, 1), (4,), w),
        (IMAGE, (4,)),
    ),
    "turned": (lambda x, w: functional.conv2d(x.transpose(2, 3), w, padding=1), (IMAGE, KERNEL)),
    "flipped": (lambda x, w: functional.conv2d(x.flip(2), w, padding=1), (IMAGE, KERNEL)),
    "cropped": (lambda x, w: functional.conv2d(x[:, :, 2:-3, 1:], w, padding=1), (IMAGE, KERNEL)),
    "scaled by a value per row": (lambda x, w: x * w, (IMAGE, (11, 1))),
    "pixels shuffled": (lambda x: functional.pixel_shuffle(x, 2), (IMAGE,)),
    "unfolded": (lambda x: functional.unfold(x, 3), (IMAGE,)),
    "u-net": (compute_u_net, (IMAGE, (3, 4, 3, 3), (5, 3, 3, 3), (2, 8, 1, 1))),
    "a penalty of a gradient": (compute_gradient_penalty, (IMAGE, (3, 4, 3, 3), (2, 3, 3, 3))),
    "loss of pixels": (lambda x: functional.cross_entropy(x, PIXELS), ((2, 4, 7, 9),)),
    "loss of pixels, weighted, smoothed": (
        lambda x: functional.cross_entropy(x, PIXELS, WEIGHTS, label_smoothing=0.1),
        ((2, 4, 7, 9),),
    ),
    "loss of pixels, each": (
        lambda x: functional.cross_entropy(x, PIXELS, reduction="none"),
        ((2, 4, 7, 9),),
    ),
    "loss of pixels, summed": (
        lambda x: functional.cross_entropy(x, PIXELS, reduction="sum"),
        ((2, 4, 7, 9),),
    ),
    "loss of pixels by logarithms": (
        lambda x: functional.nll_loss(x.log_softmax(1), PIXELS, WEIGHTS),
        ((2, 4, 7, 9),),
    ),
    "squares": (lambda x, y: functional.mse_loss(x, y), (IMAGE, IMAGE)),
    "differences, each": (lambda x, y: functional.l1_loss(x, y, reduction="none"), (IMAGE, IMAGE)),
    "differences, summed": (
        lambda x, y: functional.smooth_l1_loss(x, y, reduction="sum", beta=0.5),
        (IMAGE, IMAGE),
    ),
    "large differences": (lambda x, y: functional.huber_loss(x, y, delta=0.3), (IMAGE, IMAGE)),
    "yes or no": (
        lambda x, y: functional.binary_cross_entropy_with_logits(
            x, y.sigmoid(), pos_weight=y[0, :, :1, :1].detach().exp()
        ),
        (IMAGE, IMAGE),
    ),
    "yes or no of chances": (
        lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        (IMAGE, IMAGE),
    ),
    "divergence": (
        lambda x, y: functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        (IMAGE, IMAGE),
    ),
    "counts": (lambda x, y: functional.poisson_nll_loss(x, y.exp()), (IMAGE, IMAGE)),
}


# these functions need the whole image
GATHERED = {
    "max pool, with indices",
    "adaptive, 3",
    "adaptive max",
    "bilinear, by a fraction",
    "bilinear, antialiased",
    "layer norm",
    "instance norm",
    "softmax of rows",
    "flattened",
    "flattened, many samples",
    "flipped",
    "cropped",
    "pixels shuffled",
    "unfolded",
    "conv, fewer rows than ranks",
    "u-net",
    "bicubic",
    "patches as a row",
}


class Counting(AxisGroup):
    """An axis group that counts how often the pieces of all ranks are gathered."""

    count = 0

    def gather_pieces(self, *arguments: Any) -> Tensor:
        self.count += 1
        return super().gather_pieces(*arguments)


def measure_case(world: World, name: str, columns: int) -> tuple[float, bool]:
    """Return (largest relative difference of values and gradients, was a value gathered?)."""
    run, shapes = CASES[name]
    world = world.add_axes(("rows", world.size // columns), ("columns", columns))
    lines = {2: Counting(world.select_axes("rows"))} | (
        {3: Counting(world.select_axes("columns"))} if columns > 1 else {}
    )
    given = [draw_numbers(*shape, seed=20 + at).double() for at, shape in enumerate(shapes)]
    serial, here = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    expected = run(*serial)
    towards = draw_numbers(expected.numel(), seed=9).double().view(expected.shape)
    (expected * towards).sum().backward()
    found = run(shard_inputs(here[0], lines), *here[1:])
    counts = sum(line.count for line in lines.values())
    found = gathered(found)
    (found * towards).sum().backward()
    pairs = [(found, expected)]
    for own, other in zip(here, serial, strict=True):
        assert own.grad is not None
        gradient = own.grad
        if own is here[0]:  # the sum over all pieces
            for line in lines.values():
                gradient = line.sum_over_ranks(gradient)
        pairs.append((gradient, other.grad))  # type: ignore[arg-type]
    worst = [(a - b).detach().abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    # not a number if a value is not a number
    return float(torch.stack(worst).detach().max()), counts > 0


def measure_all_cases(world: World, columns: int) -> dict[str, tuple[float, bool] | str]:
    found: dict[str, tuple[float, bool] | str] = {}
    for name in CASES:
        try:
            found[name] = measure_case(world, name, columns)
        except Exception as error:  # only this case failed; the others continue
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(
    ("size", "columns"),
    [
        pytest.param(3, 1, marks=pytest.mark.story),
        *(
            pytest.param(*each, marks=pytest.mark.table)
            for each in ((2, 1), (4, 2), (2, 2), (4, 1))
        ),
    ],
)
def test_every_function_of_image_shards_equals_whole_images(
    pool: Launcher, size: int, columns: int
) -> None:
    for found in pool.run(measure_all_cases, columns, size=size):
        wrong = {
            name: value
            for name, value in found.items()
            if isinstance(value, str) or not value[0] < 1e-10 or (value[1] and name not in GATHERED)
        }
        assert not wrong, "\n".join(f"{name}: {value}" for name, value in wrong.items())
