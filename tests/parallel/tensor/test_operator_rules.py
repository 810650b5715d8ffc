"""torch's functions give the same values and gradients for sharded tensors as for whole ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality_table import draw_integers, draw_numbers
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from paragrad.launch import Launcher
from paragrad.parallel.sharding.autograd_collectives import (
    AxisCopy,
    AxisGather,
    AxisGroup,
    AxisReduce,
    AxisScatter,
)
from paragrad.parallel.sharding.partition import DimBlock, DimPartition, partition_evenly
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, Sharding
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
# (function, shapes of its tensors, {index of a divided tensor: its divided dimension})
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[int, int]]

CLASSES = draw_integers(7, 5, seed=90).masked_fill(draw_integers(4, 5, seed=91) == 0, -100)
GRID = draw_integers(7, 5, 3, seed=92)
INDEX = draw_integers(6, 4, seed=93)
CHANCES = draw_numbers(5, 7, seed=94).softmax(1)
SCALES = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0, 1.0, 0.1], dtype=torch.float64)


def set_columns(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] = y
    return x


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x += y
    return x.mul_(3).relu_()


def _replace_data(x: Tensor, values: Tensor) -> Tensor:
    out = x * 1
    out.data = values.data.clone()
    return out


def _set_by_mask(x: Tensor) -> Tensor:
    x.view(-1, 6)[INDEX > 2] = 0.5
    return x


def _compute_gradient_penalty(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Return a penalty on a gradient through layers split by columns, rows and columns.

    Each backward has a backward.
    """
    x = x * 1
    out = gathered(
        functional.linear(
            functional.linear(functional.linear(x, first).tanh(), second).tanh(), third
        ).tanh()
    )
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square() + out.sum()


def compute_packed_attention(x: Tensor) -> Tensor:
    """Compute attention from one tensor that holds queries, keys and values."""
    q, k, v = x.split(6, dim=2)
    q, k, v = (each.view(2, 4, 3, 2).transpose(1, 2) for each in (q, k, v))
    return (
        functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        .transpose(1, 2)
        .reshape(2, 4, 6)
    )


CASES: dict[str, Case] = {
    "linear, outputs": (functional.linear, ((4, 6), (7, 6), (7,)), {1: 0, 2: 0}),
    "linear, inputs": (functional.linear, ((4, 6), (7, 6), (7,)), {0: 1, 1: 1}),
    "linear, outputs, whole bias": (functional.linear, ((2, 4, 6), (7, 6), (7,)), {1: 0}),
    "linear, whole weight of a divided value": (functional.linear, ((4, 6), (7, 6), (7,)), {0: 1}),
    "linear, inputs, whole value": (functional.linear, ((4, 6), (7, 6)), {1: 1}),
    "linear, batch and outputs": (functional.linear, ((4, 6), (7, 6)), {0: 0, 1: 0}),
    "addmm, outputs": (torch.addmm, ((7,), (4, 6), (6, 7)), {2: 1, 0: 0}),
    "addmm, inputs": (torch.addmm, ((7,), (4, 6), (6, 7)), {1: 1, 2: 0}),
    "addmm, scaled": (
        lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=3),
        ((4, 7), (4, 6), (6, 7)),
        {1: 1, 2: 0},
    ),
    "matmul of heads": (torch.matmul, ((2, 5, 4, 3), (2, 5, 3, 4)), {0: 1, 1: 1}),
    "matmul of heads with one": (torch.matmul, ((2, 5, 4, 3), (2, 1, 3, 4)), {0: 1}),
    "matmul with a matrix": (torch.matmul, ((2, 4, 6), (6, 7)), {1: 1}),
    "matmul with a vector": (torch.matmul, ((4, 6), (6,)), {0: 1}),
    "bmm": (torch.bmm, ((5, 2, 3), (5, 3, 4)), {0: 0, 1: 0}),
    "baddbmm": (torch.baddbmm, ((5, 2, 4), (5, 2, 3), (5, 3, 4)), {1: 0, 2: 0}),
    "einsum": (
        lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y),
        ((2, 5, 4, 3), (2, 5, 4, 3)),
        {0: 1},
    ),
    "einsum, summed": (
        lambda x, y: torch.einsum("bi,oi->bo", x, y),
        ((4, 6), (7, 6)),
        {0: 1, 1: 1},
    ),
    "einsum, implicit": (lambda x, y: torch.einsum("bi,io", x, y), ((4, 6), (6, 7)), {1: 1}),
    "attention": (
        functional.scaled_dot_product_attention,
        ((2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 3)),
        {0: 1, 1: 1, 2: 1},
    ),
    "attention, grouped": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 6, 4, 3), (2, 3, 4, 3), (2, 3, 4, 3)),
        {0: 1},
    ),
    "attention, mask with a gradient": (
        functional.scaled_dot_product_attention,
        ((2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 3), (1, 5, 4, 4)),
        {0: 1, 1: 1, 2: 1},
    ),
    "a fused attention": (compute_packed_attention, ((2, 4, 18),), {}),
    "element by element": (
        lambda x, y: functional.gelu(x) * y.sigmoid() + x**2,
        ((4, 6), (4, 6)),
        {0: 1},
    ),
    "two divided otherwise": (lambda x, y: x * y, ((6, 6), (6, 6)), {0: 1, 1: 0}),
    "broadcast": (lambda x, y, z: x * y + z, ((4, 6), (6,), (4, 1)), {0: 1}),
    "broadcast, divided scale": (lambda x, y: x * y, ((2, 4, 6), (6,)), {1: 0}),
    "where": (lambda x, y: torch.where(x > 0, y, x * 0.1), ((4, 6), (4, 6)), {0: 1}),
    "masked": (lambda x: x.masked_fill(INDEX.unsqueeze(1) > 2, -1.0), ((4, 6),), {0: 1}),
    "reflected": (lambda x: 1.0 - x / 2.0 - (2.0 / (x.exp() + 1)), ((4, 6),), {0: 1}),
    "in place": (add_in_place, ((4, 6), (4, 6)), {0: 1}),
    "in place, whole one": (add_in_place, ((4, 6), (4, 6)), {1: 1}),
    "set": (set_columns, ((4, 6), (4, 2)), {0: 0}),
    "set across": (set_columns, ((4, 6), (4, 2)), {0: 1}),
    "set in a whole one": (set_columns, ((4, 6), (4, 2)), {1: 0}),
    "conv, outputs": (functional.conv2d, ((2, 3, 5, 5), (4, 3, 3, 3), (4,)), {1: 0, 2: 0}),
    "conv, inputs": (
        lambda x, w, b: functional.conv2d(x, w, b, padding=1, stride=2),
        ((2, 4, 5, 5), (3, 4, 3, 3), (3,)),
        {0: 1, 1: 1},
    ),
    "conv, one image": (functional.conv2d, ((4, 5, 5), (3, 4, 3, 3), (3,)), {0: 0, 1: 1}),
    "conv, depthwise": (
        lambda x, w, b: functional.conv2d(x, w, b, groups=4),
        ((2, 4, 5, 5), (8, 1, 3, 3), (8,)),
        {0: 1},
    ),
    "conv, groups cut": (
        lambda x, w: functional.conv2d(x, w, None, 1, 0, 1, 2),
        ((2, 6, 5, 5), (4, 3, 3, 3)),
        {0: 1},
    ),
    "conv1d": (functional.conv1d, ((2, 3, 8), (4, 3, 3), (4,)), {1: 0, 2: 0}),
    "conv_transpose": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2),
        ((2, 4, 3, 3), (4, 5, 2, 2), (5,)),
        {1: 1, 2: 0},
    ),
    "conv_transpose, inputs": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, 2),
        ((2, 4, 3, 3), (4, 5, 2, 2), (5,)),
        {0: 1, 1: 0},
    ),
    "conv_transpose, groups": (
        lambda x, w: functional.conv_transpose2d(x, w, groups=4),
        ((2, 4, 3, 3), (4, 2, 2, 2)),
        {0: 1},
    ),
    "batch_norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, True),
        ((4, 6, 3), (6,), (6,)),
        {0: 1},
    ),
    "instance_norm": (
        lambda x, w, b: functional.instance_norm(x, None, None, w, b),
        ((4, 6, 3), (6,), (6,)),
        {0: 1},
    ),
    "layer_norm beside": (
        lambda x, w, b: functional.layer_norm(x, (3,), w, b),
        ((4, 6, 3), (3,), (3,)),
        {0: 1},
    ),
    "layer_norm across": (
        lambda x, w, b: functional.layer_norm(x, (6,), w, b),
        ((4, 6), (6,), (6,)),
        {0: 1},
    ),
    "rms_norm beside": (lambda x, w: functional.rms_norm(x, (3,), w), ((4, 6, 3), (3,)), {0: 1}),
    "group_norm": (
        lambda x, w, b: functional.group_norm(x, 6, w, b),
        ((4, 12, 3), (12,), (12,)),
        {0: 1},
    ),
    "group_norm, groups cut": (
        lambda x, w, b: functional.group_norm(x, 2, w, b),
        ((4, 6, 3), (6,), (6,)),
        {0: 1},
    ),
    "max_pool": (lambda x: functional.max_pool2d(x, 2), ((2, 4, 6, 6),), {0: 1}),
    "adaptive pool": (
        lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1),
        ((2, 4, 6, 6),),
        {0: 1},
    ),
    "resized": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        ((2, 4, 3, 3),),
        {0: 1},
    ),
    "padded": (lambda x: functional.pad(x, (1, 2)), ((4, 6, 3),), {0: 1}),
    "padded across": (lambda x: functional.pad(x, (1, 2)), ((4, 6),), {0: 1}),
    "flattened": (lambda x: x.flatten(1), ((2, 4, 3, 3),), {0: 1}),
    "unflattened": (lambda x: x.unflatten(1, (3, -1)), ((4, 12),), {0: 1}),
    "viewed": (lambda x: x.view(4, 6, 2).permute(1, 0, 2).reshape(6, 8), ((4, 12),), {0: 1}),
    "squeezed": (lambda x: x.unsqueeze(0).squeeze().unsqueeze(-1).mT, ((4, 6),), {0: 1}),
    "moved": (lambda x: x.movedim(1, 0).T, ((4, 6),), {0: 1}),
    "expanded": (lambda x: x[:, :, None].expand(4, 6, 3).reshape(4, 18), ((4, 6),), {0: 1}),
    "repeated": (lambda x: x.repeat(2, 3), ((4, 6),), {0: 1}),
    "repeated in place": (lambda x: x.repeat_interleave(3, 1), ((4, 6),), {0: 1}),
    "chunks": (lambda x: torch.stack(x.chunk(2, dim=1)), ((4, 12, 2),), {0: 0}),
    "chunks across": (lambda x: x.chunk(3, dim=1)[1], ((4, 12),), {0: 1}),
    "unbound": (lambda x: x.unbind(0)[2] * x[1], ((4, 6),), {0: 1}),
    "unbound across": (lambda x: x.unbind(1)[2] * x[:, 1], ((4, 6),), {0: 1}),
    "sliced": (lambda x: x[..., 1:, None, :] * x[:, :2].unsqueeze(2), ((4, 3, 6),), {0: 2}),
    "sliced across": (lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1), ((4, 6),), {0: 1}),
    "indexed": (lambda x: x[INDEX] + x[INDEX, :], ((6, 6),), {0: 1}),
    "indexed across": (lambda x: x[:, INDEX], ((6, 6),), {0: 1}),
    "selected": (
        lambda x: x.index_select(0, INDEX).narrow(0, 1, 2).select(0, 1),
        ((6, 6),),
        {0: 1},
    ),
    "cat along": (lambda x, y: torch.cat((x, y), 1).relu(), ((4, 6), (4, 5)), {0: 1}),
    "cat beside": (lambda x, y: torch.cat((x, y)), ((4, 6), (3, 6)), {0: 1}),
    "stacked": (lambda x, y: torch.stack((x, y), 1), ((4, 6), (4, 6)), {0: 1}),
    "sum": (lambda x: x.sum() * x.sum(1, keepdim=True) * x.sum(0), ((4, 6),), {0: 1}),
    "mean": (lambda x: x.mean() + x.mean(-1) + x.mean((0, 1), keepdim=True), ((4, 6),), {0: 1}),
    "max": (lambda x: x.max(0).values + x.amax((1,)).sum() + x.max(), ((4, 6),), {0: 1}),
    "deviation": (
        lambda x: x.var(0) + x.std(1).sum() + x.var(dim=0, unbiased=False),
        ((4, 6),),
        {0: 1},
    ),
    "norm": (lambda x: x.norm(dim=0) + torch.linalg.vector_norm(x), ((4, 6),), {0: 1}),
    "normalised": (
        lambda x: functional.normalize(x, dim=0) + functional.normalize(x, dim=1),
        ((4, 6),),
        {0: 1},
    ),
    "softmax": (lambda x: x.softmax(0) + x.softmax(1) * x.log_softmax(-1), ((4, 6),), {0: 1}),
    "sorted": (lambda x: x.sort(0).values + x.topk(4, 0).values + x.cumsum(0), ((4, 6),), {0: 1}),
    "sorted across": (lambda x: x.sort(1).values + x.cumsum(1), ((4, 6),), {0: 1}),
    "glu": (lambda x: functional.glu(x, 1), ((4, 6, 5),), {0: 2}),
    "embedding": (lambda w: functional.embedding(INDEX, w, padding_idx=1), ((6, 3),), {0: 0}),
    "embedding, features": (lambda w: functional.embedding(INDEX, w), ((6, 4),), {0: 1}),
    "cross_entropy": (lambda x: functional.cross_entropy(x, CLASSES), ((5, 7),), {0: 1}),
    "cross_entropy, weights, smoothed": (
        lambda x: functional.cross_entropy(x, CLASSES, SCALES, label_smoothing=0.1),
        ((5, 7),),
        {0: 1},
    ),
    "cross_entropy, smoothed": (
        lambda x: functional.cross_entropy(x, CLASSES, label_smoothing=0.1),
        ((5, 7),),
        {0: 1},
    ),
    "cross_entropy, sum": (
        lambda x: functional.cross_entropy(x, CLASSES, reduction="sum"),
        ((5, 7),),
        {0: 1},
    ),
    "cross_entropy, none": (
        lambda x: functional.cross_entropy(x, GRID, reduction="none"),
        ((5, 7, 3),),
        {0: 1},
    ),
    "cross_entropy, grid, weights": (
        lambda x: functional.cross_entropy(x, GRID, SCALES, label_smoothing=0.2),
        ((5, 7, 3),),
        {0: 1},
    ),
    "cross_entropy, chances": (
        lambda x: functional.cross_entropy(x, CHANCES, SCALES, label_smoothing=0.1),
        ((5, 7),),
        {0: 1},
    ),
    "cross_entropy, shifted": (
        lambda x: functional.cross_entropy(
            x[:, :-1].to(torch.float64).contiguous().view(-1, 7), GRID[:4, :2].flatten()
        ),
        ((4, 3, 7),),
        {0: 2},
    ),
    "nll": (lambda x: functional.nll_loss(x.log_softmax(1), CLASSES, SCALES), ((5, 7),), {0: 1}),
    "cosine": (functional.cosine_similarity, ((4, 6), (4, 6)), {0: 1}),
    "flipped": (lambda x: x.flip(0, 1) + x.flip((0,)), ((4, 6),), {0: 1}),
    "by axis": (
        lambda x: (
            torch.cat((x, x), axis=1) * x.sum(axis=1, keepdims=True)
            + torch.cat((x.sort(axis=0).values, x), 1)
        ),
        ((4, 6),),
        {0: 1},
    ),
    "mean and variance": (lambda x: torch.var_mean(x, 0, False, True)[0] * x, ((4, 6),), {0: 1}),
    "from behind": (
        lambda x: x.narrow(1, -2, 2) + x[..., 4:] + x[..., :0].sum(),
        ((4, 6),),
        {0: 1},
    ),
    "nothing of it": (lambda x: torch.cat(x.split([6, 0], 1), 1), ((4, 6),), {0: 1}),
    "one slice twice": (lambda x: x[slice(0, 3), slice(0, 3)], ((6, 6),), {0: 1}),
    "by name": (
        lambda x, y: torch.matmul(input=x, other=y).baddbmm(batch1=x, batch2=y, beta=0.5, alpha=2),
        ((5, 2, 3), (5, 3, 3)),
        {0: 0},
    ),
    "nothing added": (
        lambda x, y: torch.baddbmm(torch.full((5, 2, 3), torch.nan, dtype=x.dtype), x, y, beta=0),
        ((5, 2, 3), (5, 3, 3)),
        {0: 0},
    ),
    "given other values": (lambda x: _replace_data(x, x * 3), ((4, 6),), {0: 1}),
    "equal": (lambda x: x * (2.0 if torch.equal(x, x.flip(0)) else 3.0), ((4, 6),), {0: 1}),
    "set by a mask in a view": (lambda x: _set_by_mask(x * 1), ((4, 6),), {0: 1}),
    "a gradient inside, three layers": (
        lambda x, a, b, c: _compute_gradient_penalty(x, a, b, c),
        ((4, 6), (8, 6), (6, 8), (5, 6)),
        {1: 0, 2: 1, 3: 0},
    ),
    "no rule": (
        lambda x: torch.linalg.inv(x @ x.T + 4 * torch.eye(6, dtype=x.dtype)).roll(1, 0),
        ((6, 6),),
        {0: 1},
    ),
    "multi-head attention": (
        lambda x, w, b, o, c: functional.multi_head_attention_forward(
            x, x, x, 6, 3, w, b, None, None, False, 0.0, o, c, need_weights=False
        )[0],
        ((4, 2, 6), (18, 6), (18,), (6, 6), (6,)),
        {3: 1},
    ),
}


def measure_case(world: World, name: str, blocks: int) -> float:
    """Return the largest difference of a case's values and gradients from whole tensors' ones."""
    function, sizes, places = CASES[name]
    line = AxisGroup(world)
    plain = [
        draw_numbers(*shape, seed=60 + at).double().requires_grad_()
        for at, shape in enumerate(sizes)
    ]
    expected = function(*plain)
    towards = draw_numbers(expected.numel(), seed=77).double().view(expected.shape)
    (expected * towards).sum().backward()
    leaves = []
    given = []
    cuts = []
    for at, tensor in enumerate(plain):
        cut = None
        if at in places:
            size = tensor.shape[places[at]]
            cut = Sharding(
                partition_evenly(size, world.size)
                if blocks == 1 or size % blocks or size // blocks < world.size
                else DimPartition((DimBlock(size // blocks, size // blocks),) * blocks, world.size),
                line,
            )
        value = (
            tensor.detach()
            if cut is None
            else line.take_piece(tensor.detach(), places[at], cut.partition)
        )
        leaves.append(value.clone().requires_grad_())
        given.append(leaves[-1] if cut is None else ShardedTensor(leaves[-1], {places[at]: cut}))
        cuts.append(cut)
    found = function(*given)
    assert tuple(found.shape) == tuple(expected.shape)
    found = gathered(found)
    (found * towards).sum().backward()
    worst = [(found - expected).detach().abs().max()]
    for at, (leaf, tensor) in enumerate(zip(leaves, plain, strict=True)):
        assert tensor.grad is not None
        assert leaf.grad is not None, at
        cut = cuts[at]
        own = (
            tensor.grad if cut is None else line.take_piece(tensor.grad, places[at], cut.partition)
        )
        worst += [(leaf.grad - own).abs().max()] if own.numel() else []
    # not a number if a value is not a number
    return float(torch.stack(worst).max())


def measure_all_cases(world: World, blocks: int) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name in CASES:
        try:
            found[name] = measure_case(world, name, blocks)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (2, 1),
        (3, 1),
        (2, 2),
        pytest.param(4, 1, marks=pytest.mark.table),
        pytest.param(3, 2, marks=pytest.mark.table),
    ],
)
def test_every_function_of_shards_equals_whole_tensors(
    pool: Launcher, size: int, blocks: int
) -> None:
    for found in pool.run(measure_all_cases, blocks, size=size):
        assert {
            name: value
            for name, value in found.items()
            if not isinstance(value, float) or not value <= 1e-9
        } == {}


# ---- the tables of functions along a dimension -----------------------------------------------
BESIDE = {"topk": (2,), "roll": (1,)}  # arguments before the dimension
OTHERS = {
    "flip": lambda x, dim: x.flip((dim,)),
    "glu": functional.glu,
    "tril": lambda x, _: x.tril(),
    "triu": lambda x, _: x.triu(1),
}
KEEPING = {*reduction_rules.REDUCTIONS} - {"count_nonzero", "std_mean", "var_mean"}


def find_wrong_functions(world: World) -> list[str]:
    """Return the functions of both tables that give another result for shards than for the whole.

    Each function runs along each dimension of a tensor that is divided along each dimension.
    """
    line = AxisGroup(world)
    x = draw_numbers(4, 6, 5, seed=8).double()
    wrong = []
    for name, cut, dim in itertools.product(
        (*reduction_rules.REDUCTIONS, *reduction_rules.ALONG_DIM), range(3), range(3)
    ):
        if name == "glu" and dim != 1:  # glu halves the dimension
            continue
        plain = OTHERS.get(
            name,
            lambda x, dim, name=name, **more: getattr(torch, name)(
                x, *BESIDE.get(name, ()), dim, **more
            ),
        )
        pieces = partition_evenly(x.shape[cut], world.size)
        here = ShardedTensor(line.take_piece(x, cut, pieces).clone(), {cut: Sharding(pieces, line)})
        for more in ({}, {"keepdim": True}) if name in KEEPING else ({},):
            found, expected = (tree_leaves(plain(each, dim, **more)) for each in (here, x))
            if [tuple(each.shape) for each in found] != [
                tuple(each.shape) for each in expected
            ] or not all(
                torch.allclose(gathered(one).double(), other.double(), rtol=1e-12)
                for one, other in zip(found, expected, strict=True)
            ):
                wrong.append(f"{name} along {dim} of a tensor divided along {cut}, {more}")
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_every_function_along_a_dimension(pool: Launcher, size: int) -> None:
    """Earlier, kthvalue was among the functions that keep the dimension, and no test called it."""
    assert pool.run(find_wrong_functions, size=size) == [[]] * size


# ---- pairs of collectives --------------------------------------------------------------------
def check_pairs(world: World, uneven: bool) -> list[bool]:
    """Return for each pair whether its gradient equals the one from differences of values.

    Values differ on every rank. The function is the sum of the results of all ranks; each rank's
    gradient is a part of its gradient.
    """
    line = AxisGroup(world)
    length = 5 if uneven else 2 * world.size
    pieces = partition_evenly(length, world.size)
    mine = pieces.compute_length(world.rank)
    found = []
    for pair, shape, plain in (
        (AxisCopy, (3, length), True),
        (AxisReduce, (3, length), False),
        (AxisScatter, (3, length), True),
        (AxisGather, (3, mine), False),
    ):
        x = draw_numbers(*shape, seed=5 if plain else 10 + world.rank).double().requires_grad_()
        arguments = (x, line) if pair in (AxisCopy, AxisReduce) else (x, 1, pieces, line)
        out = pair.apply(*arguments)
        # if the result is equal on all ranks, its gradient is the same on all ranks
        towards = draw_numbers(
            *out.shape, seed=20 if pair in (AxisReduce, AxisGather) else 30 + world.rank
        ).double()
        (gradient,) = torch.autograd.grad(out, x, towards)
        found.append(
            torch.allclose(
                gradient,
                _compute_gradient_by_differences(world, pair, arguments, towards, plain),
                rtol=1e-6,
                atol=1e-8,
            )
        )
    return found


def _compute_gradient_by_differences(
    world: World, pair: Any, arguments: Any, towards: Tensor, plain: bool
) -> Tensor:
    """Return d (sum of towards * result) / d x, computed by differences.

    The sum is taken once if the result is equal on all ranks, and otherwise over all ranks. If x is
    equal on all ranks, it changes on all ranks together, and otherwise on one rank after the other.
    """
    x, *rest = arguments
    result_plain = pair in (AxisReduce, AxisGather)
    gradient = torch.zeros_like(x)
    movers = [None] if plain else range(world.size)
    for mover in movers:
        shape = torch.tensor(x.shape)
        sizes = [tuple(each.tolist()) for each in world.all_gather(shape)]
        for place in itertools.product(*map(range, sizes[mover or 0])):
            values = []
            for by in (1e-4, -1e-4):
                moved = x.detach().clone()
                if mover is None or mover == world.rank:
                    moved[place] += by
                out = (pair.apply(moved, *rest) * towards).sum().detach()
                values.append(out if result_plain else world.all_reduce(out))
            if mover is None or mover == world.rank:
                gradient[place] = (values[0] - values[1]) / 2e-4
    return gradient


@pytest.mark.parametrize(("size", "uneven"), [(2, False), (3, True)])
def test_gradients_of_split_pairs(pool: Launcher, size: int, uneven: bool) -> None:
    assert pool.run(check_pairs, uneven, size=size) == [[True] * 4] * size


def test_hook_on_a_sharded_value_is_refused() -> None:
    x = ShardedTensor(torch.zeros(2, 3), {0: Sharding(partition_evenly(4, 2), AxisGroup(World()))})
    with pytest.raises(Exception, match="puts a hook on a value that is divided"):
        x.register_hook(print)


def measure_shared_value(world: World) -> list[float]:
    """Return (error of the gradient, sent bytes) of a value that several layers use.

    The gradient of the value is summed once for two layers. A change in place makes another value
    for the third layer.
    """
    line = AxisGroup(world)
    weights = [
        ShardedTensor(
            draw_numbers(2, 6, seed=at + world.rank).double(),
            {0: Sharding(partition_evenly(2 * world.size, world.size), line)},
        )
        for at in (1, 10, 20)
    ]
    x = draw_numbers(4, 6, seed=3).double().requires_grad_()
    hidden = x * 1
    out = sum(gathered(functional.linear(hidden, weight)).sum() for weight in weights[:2])
    hidden += 1
    out = out + gathered(functional.linear(hidden, weights[2])).sum()
    line.sent_bytes = 0
    out.backward()
    whole = torch.cat([torch.cat(world.all_gather(weight.local.detach())) for weight in weights])
    return [float((x.grad - whole.sum(0)).abs().max()), line.sent_bytes]  # type: ignore[operator]


def test_value_used_by_several_layers_is_summed_once(pool: Launcher) -> None:
    for difference, sent in pool.run(measure_shared_value, size=2):
        assert difference < 1e-12
        # two all-reduces of x's gradient over two ranks, each of its bytes
        assert sent == 2 * 4 * 6 * 8
