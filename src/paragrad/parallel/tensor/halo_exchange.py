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

from paragrad.parallel.sharding.autograd_collectives import HaloReturn
from paragrad.parallel.sharding.halo_regions import WantedIndices, Window
from paragrad.parallel.sharding.partition import partition_evenly
from paragrad.parallel.sharding.sharded_tensor import Sharding

# outputs of a rank for each row of a halo, from which on its edges are computed apart
MIN_OUTPUTS_PER_HALO_ROW = 8


class HaloEdge(NamedTuple):
    """Some outputs that see rows of others. at: the first of these, among those of this rank;
    halo: which of the rows that come they see;  before, after: how many others, in front of
    those and behind them.
    """

    first_output: int
    halo_rows: range
    before: int
    after: int


class EdgeSplit(NamedTuple):
    """How a convolution is made of this rank's rows and of those around. padding: zeros beyond
    its own, on both sides.
    """

    padding: int
    edges: tuple[HaloEdge, ...]


def split_edges(
    window: Window, size: int, own_rows: range, outputs: range
) -> tuple[EdgeSplit, WantedIndices] | None:
    """Also the rows that come from others; None where outputs do not begin as those of the own
    rows do.
    """
    start = outputs.start * window.stride - window.before
    stop = (outputs.stop - 1) * window.stride - window.before + window.reach
    padding = own_rows.start - start
    behind = stop - own_rows.stop
    count = (len(own_rows) + 2 * padding - window.reach) // window.stride + 1
    if padding < 0 or behind > padding or count != len(outputs):
        return None
    front = range(max(start, 0), own_rows.start)
    back = range(own_rows.stop, min(stop, size))
    edges = []
    if front:  # outputs up to the first that sees none of them
        last = min(-(-(own_rows.start + window.before) // window.stride), outputs.stop)
        end = (last - 1) * window.stride - window.before + window.reach
        edges.append(HaloEdge(0, range(len(front)), front.start - start, end - front.stop))
    if back:
        first = max(
            (own_rows.stop + window.before - window.reach) // window.stride + 1, outputs.start
        )
        begin = first * window.stride - window.before
        edges.append(
            HaloEdge(
                first - outputs.start,
                range(len(front), len(front) + len(back)),
                back.start - begin,
                stop - back.stop,
            )
        )
    return EdgeSplit(padding, tuple(edges)), (*front, *back)


class Halo(NamedTuple):
    """What comes to each rank along a dimension (wants), and how this one goes about it. cut:
    of the inputs.
    """

    dim: int
    sharding: Sharding
    wanted: tuple[WantedIndices, ...]
    edge_split: EdgeSplit


def plan_halo(window: Window, size: int, dim: int, sharding: Sharding) -> Halo | None:
    """None where a rank cannot, or its edges are no small part."""
    after = partition_evenly(window.count_outputs(size), sharding.group.size)
    found = [
        split_edges(
            window, size, sharding.partition.list_ranges(rank)[0], after.list_ranges(rank)[0]
        )
        for rank in range(sharding.group.size)
    ]
    able = [each for each in found if each]
    many = window.count_outputs(size) < MIN_OUTPUTS_PER_HALO_ROW * sharding.group.size * (
        window.reach - window.stride
    )
    if len(able) < len(found) or many or not any(want for _, want in able):
        return None
    return Halo(dim, sharding, tuple(want for _, want in able), able[sharding.group.rank][0])


class HaloTransfer:
    """A halo under way: to this rank in a forward, back in its backward."""

    def __init__(self, halo: Halo) -> None:
        self.dim = halo.dim
        self.partition = halo.sharding.partition
        self.group = halo.sharding.group
        self.wanted = halo.wanted
        self.pending_fetch: Callable[[], Tensor] | None = None
        self.pending_return: Callable[[Tensor], Tensor] | None = None

    def start_halo_fetch(self, x: Tensor) -> None:
        self.pending_fetch = self.group.start_fetch(
            x.detach(), self.dim, self.partition, self.wanted, 0.0
        )


def convolve_with_halo(
    convolve: Callable[[Tensor, int, bool], Tensor], x: Tensor, halo: Halo
) -> Tensor:
    """run(rows, padding, own): the convolution of rows, with so much padding along them; own:
    with its bias. x: of this rank.
    """
    swap = HaloTransfer(halo)
    how = halo.edge_split
    inner = InnerRows.apply(x, swap)
    swap.start_halo_fetch(x)
    out = convolve(inner, how.padding, True)
    came = ReceivedRows.apply(inner, swap)
    for edge in how.edges:
        rows = came.narrow(swap.dim, edge.halo_rows.start, len(edge.halo_rows))
        around = [0, 0] * (x.dim() - 1 - swap.dim) + [edge.before, edge.after]
        out = EdgeAddition.apply(
            out, convolve(functional.pad(rows, around), 0, False), swap.dim, edge.first_output
        )
    return out if how.edges else HaloLink.apply(out, came)  # type: ignore[no-any-return]


class InnerRows(torch.autograd.Function):
    """This rank's rows; what comes back for them is added to their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: HaloTransfer) -> Tensor:
        ctx.swap = transfer
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        back = ctx.swap.pending_return
        ctx.swap.pending_return = None
        # which a convolution just made
        return gradient if back is None else back(gradient), None


class ReceivedRows(torch.autograd.Function):
    """The rows that came. Made after the convolution of the own rows: autograd runs what was
    made last first, so that the halo's gradient is on its way before theirs is computed.
    """

    @staticmethod
    def forward(ctx: Any, inner_rows: Tensor, transfer: HaloTransfer) -> Tensor:
        ctx.swap = transfer
        assert transfer.pending_fetch is not None
        coming, transfer.pending_fetch = transfer.pending_fetch, None
        return coming()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        swap = ctx.swap
        if torch.is_grad_enabled():  # a backward of this backward is to come
            return HaloReturn.apply(
                gradients[0], swap.dim, swap.partition, swap.wanted, swap.group
            ), None
        swap.pending_return = swap.group.start_return(
            gradients[0], swap.dim, swap.partition, swap.wanted
        )
        return None, None


class HaloLink(torch.autograd.Function):
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


class EdgeAddition(torch.autograd.Function):
    """Some outputs are added to, in place: nobody has seen them yet."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, edge: Tensor, dim: int, first_output: int) -> Tensor:
        ctx.place = dim, first_output, edge.shape[dim]
        out.narrow(dim, first_output, edge.shape[dim]).add_(edge)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].narrow(*ctx.place), None, None
