"""A convolution along a divided dimension, while its halo travels.

It is computed of this rank's own rows, with zeros beyond them. Meanwhile the rows come that its
neighbours have; what the outputs at an edge lack is a convolution of these alone, and is added:
it is linear. So nobody copies the rows that are here, or waits before computing of them.
Backward goes the other way: what goes back to a neighbour is sent before the gradient of the
own rows is computed, and what comes is added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paragrad.parallel.sharding.autograd_collectives import Returned
from paragrad.parallel.sharding.halo_regions import Want, Window
from paragrad.parallel.sharding.partition import evenly_divided
from paragrad.parallel.sharding.sharded_tensor import Cut

# outputs of a rank for each row of a halo, from which on its edges are computed apart
WORTH = 8


class Edge(NamedTuple):
    """Some outputs that see rows of others. at: the first of these, among those of this rank;
    halo: which of the rows that come they see;  before, after: how many others, in front of
    those and behind them.
    """

    at: int
    halo: range
    before: int
    after: int


class Around(NamedTuple):
    """How a convolution is made of this rank's rows and of those around. padding: zeros beyond
    its own, on both sides.
    """

    padding: int
    edges: tuple[Edge, ...]


def around(window: Window, size: int, own: range, outputs: range) -> tuple[Around, Want] | None:
    """Also the rows that come from others; None where outputs do not begin as those of the own
    rows do.
    """
    start = outputs.start * window.stride - window.before
    stop = (outputs.stop - 1) * window.stride - window.before + window.reach
    padding = own.start - start
    behind = stop - own.stop
    count = (len(own) + 2 * padding - window.reach) // window.stride + 1
    if padding < 0 or behind > padding or count != len(outputs):
        return None
    front = range(max(start, 0), own.start)
    back = range(own.stop, min(stop, size))
    edges = []
    if front:  # outputs up to the first that sees none of them
        last = min(-(-(own.start + window.before) // window.stride), outputs.stop)
        end = (last - 1) * window.stride - window.before + window.reach
        edges.append(Edge(0, range(len(front)), front.start - start, end - front.stop))
    if back:
        first = max((own.stop + window.before - window.reach) // window.stride + 1, outputs.start)
        begin = first * window.stride - window.before
        edges.append(
            Edge(
                first - outputs.start,
                range(len(front), len(front) + len(back)),
                back.start - begin,
                stop - back.stop,
            )
        )
    return Around(padding, tuple(edges)), (*front, *back)


class Halo(NamedTuple):
    """What comes to each rank along a dimension (wants), and how this one goes about it. cut:
    of the inputs.
    """

    dim: int
    cut: Cut
    wants: tuple[Want, ...]
    how: Around


def edgewise(window: Window, size: int, dim: int, cut: Cut) -> Halo | None:
    """None where a rank cannot, or its edges are no small part."""
    after = evenly_divided(window.outputs(size), cut.line.size)
    found = [
        around(window, size, cut.pieces.ranges(rank)[0], after.ranges(rank)[0])
        for rank in range(cut.line.size)
    ]
    able = [each for each in found if each]
    many = window.outputs(size) < WORTH * cut.line.size * (window.reach - window.stride)
    if len(able) < len(found) or many or not any(want for _, want in able):
        return None
    return Halo(dim, cut, tuple(want for _, want in able), able[cut.line.rank][0])


class Swap:
    """A halo under way: to this rank in a forward, back in its backward."""

    def __init__(self, halo: Halo) -> None:
        self.dim = halo.dim
        self.pieces = halo.cut.pieces
        self.line = halo.cut.line
        self.wants = halo.wants
        self.coming: Callable[[], Tensor] | None = None
        self.back: Callable[[Tensor], Tensor] | None = None

    def ask(self, x: Tensor) -> None:
        self.coming = self.line.asked(x.detach(), self.dim, self.pieces, self.wants, 0.0)


def convolved(run: Callable[[Tensor, int, bool], Tensor], x: Tensor, halo: Halo) -> Tensor:
    """run(rows, padding, own): the convolution of rows, with so much padding along them; own:
    with its bias. x: of this rank.
    """
    swap = Swap(halo)
    how = halo.how
    inner = Inner.apply(x, swap)
    swap.ask(x)
    out = run(inner, how.padding, True)
    came = Asked.apply(inner, swap)
    for edge in how.edges:
        rows = came.narrow(swap.dim, edge.halo.start, len(edge.halo))
        around = [0, 0] * (x.dim() - 1 - swap.dim) + [edge.before, edge.after]
        out = Added.apply(out, run(functional.pad(rows, around), 0, False), swap.dim, edge.at)
    return out if how.edges else Tied.apply(out, came)  # type: ignore[no-any-return]


class Inner(torch.autograd.Function):
    """This rank's rows; what comes back for them is added to their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, swap: Swap) -> Tensor:
        ctx.swap = swap
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        back = ctx.swap.back
        ctx.swap.back = None
        # which a convolution just made
        return gradient if back is None else back(gradient), None


class Asked(torch.autograd.Function):
    """The rows that came. Made after the convolution of the own rows: autograd runs what was
    made last first, so that the halo's gradient is on its way before theirs is computed.
    """

    @staticmethod
    def forward(ctx: Any, inner: Tensor, swap: Swap) -> Tensor:
        ctx.swap = swap
        assert swap.coming is not None
        coming, swap.coming = swap.coming, None
        return coming()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        swap = ctx.swap
        if torch.is_grad_enabled():  # a backward of this backward is to come
            return Returned.apply(gradients[0], swap.dim, swap.pieces, swap.wants, swap.line), None
        swap.back = swap.line.returned(gradients[0], swap.dim, swap.pieces, swap.wants)
        return None, None


class Tied(torch.autograd.Function):
    """Where nothing comes: something may come in backward, of those who see rows of this
    rank.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, halo: Tensor) -> Tensor:
        ctx.shape = halo.shape
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].new_zeros(ctx.shape)


class Added(torch.autograd.Function):
    """Some outputs are added to, in place: nobody has seen them yet."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, edge: Tensor, dim: int, at: int) -> Tensor:
        ctx.place = dim, at, edge.shape[dim]
        out.narrow(dim, at, edge.shape[dim]).add_(edge)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].narrow(*ctx.place), None, None
