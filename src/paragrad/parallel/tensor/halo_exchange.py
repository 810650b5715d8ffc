"""A convolution along a divided dimension that overlaps with the exchange of its halo.

The convolution is computed from this rank's own rows, with zeros beyond them. Meanwhile the
neighbours' rows arrive. What the outputs at an edge lack is a convolution of these rows alone. It
is added, because a convolution is linear. So the own rows are not copied, and the computation does
not wait for a message.

The backward runs in the opposite order. Gradients for a neighbour's rows are sent before the
gradient of the own rows is computed. The gradients that arrive are added to it.
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

# Edges are computed apart if a rank has at least this many outputs for each row of a halo.
MIN_OUTPUTS_PER_HALO_ROW = 8


class HaloEdge(NamedTuple):
    """Outputs that need rows of other ranks.

    Attributes:
        first_output: The first of these outputs, among those of this rank.

        halo_rows: The received rows that they need.

        before: Number of other rows in front of these.

        after: Number of other rows behind these.
    """

    first_output: int
    halo_rows: range
    before: int
    after: int


class EdgeSplit(NamedTuple):
    """How a convolution is computed from this rank's rows and from its halo.

    Attributes:
        padding: Zeros beyond the own rows, on both sides.
        edges: The outputs that need other rows.
    """

    padding: int
    edges: tuple[HaloEdge, ...]


def split_edges(
    window: Window, size: int, own_rows: range, outputs: range
) -> tuple[EdgeSplit, WantedIndices] | None:
    """Split the outputs of a rank into those of its own rows and those at its edges.

    Args:
        window: The window of the convolution.
        size: Number of rows of all ranks.
        own_rows: The rows of this rank.
        outputs: The outputs of this rank.

    Returns:
        (the split, the rows of other ranks). None if the outputs are not aligned with those of a
        convolution of the own rows.
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
    if front:  # the outputs before the first one that needs none of these rows
        end_output = min(-(-(own_rows.start + window.before) // window.stride), outputs.stop)
        end = (end_output - 1) * window.stride - window.before + window.reach
        edges.append(HaloEdge(0, range(len(front)), front.start - start, end - front.stop))
    if back:
        start_output = max(
            (own_rows.stop + window.before - window.reach) // window.stride + 1, outputs.start
        )
        window_start = start_output * window.stride - window.before
        edges.append(
            HaloEdge(
                start_output - outputs.start,
                range(len(front), len(front) + len(back)),
                back.start - window_start,
                stop - back.stop,
            )
        )
    return EdgeSplit(padding, tuple(edges)), (*front, *back)


class Halo(NamedTuple):
    """A halo along a dimension.

    Attributes:
        dim: The dimension.
        sharding: How the inputs are divided.
        wanted: For each rank, the rows of others that it needs.
        edge_split: How this rank computes its outputs.
    """

    dim: int
    sharding: Sharding
    wanted: tuple[WantedIndices, ...]
    edge_split: EdgeSplit


def plan_halo(window: Window, size: int, dim: int, sharding: Sharding) -> Halo | None:
    """Plan a convolution that computes its edges apart.

    Args:
        window: The window of the convolution.
        size: Number of rows of all ranks.
        dim: The dimension.
        sharding: How the rows are divided.

    Returns:
        The halo. None if a rank cannot do this, or if its edges are too large a part.
    """
    output_partition = partition_evenly(window.count_outputs(size), sharding.group.size)
    splits = [
        split_edges(
            window,
            size,
            sharding.partition.list_ranges(rank)[0],
            output_partition.list_ranges(rank)[0],
        )
        for rank in range(sharding.group.size)
    ]
    possible = [each for each in splits if each]
    is_costly = window.count_outputs(size) < MIN_OUTPUTS_PER_HALO_ROW * sharding.group.size * (
        window.reach - window.stride
    )
    if len(possible) < len(splits) or is_costly or not any(needed for _, needed in possible):
        return None
    return Halo(
        dim, sharding, tuple(needed for _, needed in possible), possible[sharding.group.rank][0]
    )


class HaloTransfer:
    """A halo that travels: to this rank in a forward, back in its backward.

    Attributes:
        dim: The dimension.

        partition: How the inputs are divided.

        group: The ranks.

        wanted: For each rank, the rows of others that it needs.

        pending_fetch: Waits for the rows in the forward.

        pending_return: Waits for returned gradients, and adds them to a tensor.
    """

    def __init__(self, halo: Halo) -> None:
        self.dim = halo.dim
        self.partition = halo.sharding.partition
        self.group = halo.sharding.group
        self.wanted = halo.wanted
        self.pending_fetch: Callable[[], Tensor] | None = None
        self.pending_return: Callable[[Tensor], Tensor] | None = None

    def start_halo_fetch(self, x: Tensor) -> None:
        """Start to fetch the halo of this rank's rows."""
        self.pending_fetch = self.group.start_fetch(
            x.detach(), self.dim, self.partition, self.wanted, 0.0
        )


def convolve_with_halo(
    convolve: Callable[[Tensor, int, bool], Tensor], x: Tensor, halo: Halo
) -> Tensor:
    """Convolve this rank's rows and its halo.

    Args:
        convolve: convolve(rows, padding, own) convolves rows with so much padding along them. If
            `own` is true, it adds the bias.
        x: The rows of this rank.
        halo: The halo.

    Returns:
        The outputs of this rank.
    """
    transfer = HaloTransfer(halo)
    edge_split = halo.edge_split
    inner_rows = InnerRows.apply(x, transfer)
    transfer.start_halo_fetch(x)
    out = convolve(inner_rows, edge_split.padding, True)
    received = ReceivedRows.apply(inner_rows, transfer)
    for edge in edge_split.edges:
        rows = received.narrow(transfer.dim, edge.halo_rows.start, len(edge.halo_rows))
        padding = [0, 0] * (x.dim() - 1 - transfer.dim) + [edge.before, edge.after]
        out = EdgeAddition.apply(
            out, convolve(functional.pad(rows, padding), 0, False), transfer.dim, edge.first_output
        )
    return out if edge_split.edges else HaloLink.apply(out, received)  # type: ignore[no-any-return]


class InnerRows(torch.autograd.Function):
    """This rank's rows; gradients that other ranks return are added to their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: HaloTransfer) -> Tensor:
        ctx.swap = transfer
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        add_returned = ctx.swap.pending_return
        ctx.swap.pending_return = None
        # the gradient may be changed in place: a convolution has just computed it
        return gradient if add_returned is None else add_returned(gradient), None


class ReceivedRows(torch.autograd.Function):
    """The received rows.

    They are made after the convolution of the own rows. Autograd runs the backward of what was made
    last first, so the halo's gradient is on its way before that of the own rows is computed.
    """

    @staticmethod
    def forward(ctx: Any, inner_rows: Tensor, transfer: HaloTransfer) -> Tensor:
        ctx.swap = transfer
        assert transfer.pending_fetch is not None
        wait_for_rows, transfer.pending_fetch = transfer.pending_fetch, None
        return wait_for_rows()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        transfer = ctx.swap
        if torch.is_grad_enabled():  # a backward of this backward will follow
            return HaloReturn.apply(
                gradients[0], transfer.dim, transfer.partition, transfer.wanted, transfer.group
            ), None
        transfer.pending_return = transfer.group.start_return(
            gradients[0], transfer.dim, transfer.partition, transfer.wanted
        )
        return None, None


class HaloLink(torch.autograd.Function):
    """Outputs of a rank that receives no rows.

    In the backward it may still receive gradients, from ranks that need its rows.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, halo: Tensor) -> Tensor:
        ctx.shape = halo.shape
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].new_zeros(ctx.shape)


class EdgeAddition(torch.autograd.Function):
    """Adds to some outputs in place, before anything else uses them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, edge: Tensor, dim: int, first_output: int) -> Tensor:
        ctx.place = dim, first_output, edge.shape[dim]
        out.narrow(dim, first_output, edge.shape[dim]).add_(edge)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].narrow(*ctx.place), None, None
