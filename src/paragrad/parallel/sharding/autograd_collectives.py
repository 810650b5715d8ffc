"""Collectives inside a forward, in pairs: each has the other as its backward.

A plain tensor is equal on all ranks of an axis group, and each rank has its whole gradient. A
sharded tensor is in pieces, and so is its gradient.

    function     forward                           backward                      use
    AxisCopy     the same tensor                   sum over ranks                a plain value of
                                                                                 which each rank
                                                                                 makes another one
    AxisReduce   sum over ranks                    the same tensor               partial results to
                                                                                 a plain value
    AxisScatter  the piece of this rank            all pieces, concatenated      plain to sharded
    AxisGather   all pieces, concatenated          the piece of this rank        sharded to plain
    HaloFetch    the elements that this rank       added to the pieces of their  pieces to the
                 needs of other ranks' pieces      owners                        inputs of outputs
    HaloReturn   added to the pieces of their      the elements that this rank   the other way
                 owners                            needs of other ranks' pieces

The first four are f and g of Shoeybi et al. 2019 (arXiv 1909.08053), and their sequence-parallel
counterparts of Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paragrad.parallel.sharding.halo_regions import PADDING, ElementRun, WantedIndices, find_runs
from paragrad.parallel.sharding.partition import Constraint, DimPartition
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.runtime.world import World

TRANSFER_COLLECTIVES = {
    "copied": "all_reduce",
    "summed": "all_reduce",
    "gathered": "all_gather",
    "sliced": "all_gather",
    "statistics": "all_gather",
    "statistics back": "all_gather",
    "shown": "broadcast",
}
# number of recently copied plain values that are remembered: queries, keys and values are computed
# from one value
COPY_CACHE_SIZE = 4


class ShardingDecider(Protocol):
    """Decides how parameters are sharded, during a run that finds out.

    Attributes:
        constraints: Requested changes of partitions, for the next run.
    """

    constraints: list[Constraint]

    def decide_sharding(self, tensor: Any, dim: int, role: str) -> bool:
        """Shard a tensor by the outputs of a layer or by the vocabulary, if possible.

        Args:
            tensor: The tensor, which is changed.
            dim: The dimension to divide.
            role: "outputs" or "vocabulary".

        Returns:
            Whether it is sharded now.
        """
        ...

    def follow_sharding(self, tensor: Any, dim: int, sharding: Any) -> bool:
        """Shard a tensor like a value with which it is used, if possible.

        Args:
            tensor: The tensor, which is changed.
            dim: Its dimension that matches the divided one.
            sharding: The sharding of the value.

        Returns:
            Whether it is sharded now.
        """
        ...

    def reconsider_sources(self, partition: DimPartition) -> None:
        """Withdraw the sharding of parameters from which a weight is computed."""
        ...

    def note_whole_use(self, tensor: Any, by: str) -> None:
        """Note that an operation uses a parameter whole."""
        ...

    def note_gather(self, tensor: Any, dim: int) -> None:
        """Note that a sharded value is gathered."""
        ...

    def check_meta_call(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> None:
        """Check whether a call of a branch also works without values.

        Args:
            func: The function.
            name: Its name.
            args: Its arguments.
            kwargs: Its keyword arguments.
            draws: Whether it draws random numbers inside.
        """
        ...

    def note_transfer(self, what: str, sent: int, detail: str) -> None:
        """Note a transfer.

        Args:
            what: The kind of transfer.
            sent: Bytes that a rank sends.
            detail: Text for the summary.
        """
        ...


class FakeGroup:
    """A stand-in for a world of several ranks, used on one process as rank 0.

    Its collectives return tensors with the right shape and arbitrary values.

    Attributes:
        size: Number of ranks.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """Return a copy of the tensor."""
        return tensor.clone()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor once for each rank."""
        return [tensor] * self.size

    def copy_from(self, tensor: Tensor, rank: int) -> None:
        """Leave the tensor as it is."""

    def start_transfers(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Fill the received tensors with zeros; the returned function does nothing."""
        for tensor in receives.values():
            tensor.zero_()
        return lambda: None


class SplitOptions(NamedTuple):
    """How layers are split over an axis group, where there are several ways.

    Attributes:
        data_dim: Which dimension of the data is divided: "rows", "columns", "samples", or "" if
            none.

        gathers_mixed: Whether a plain and a sharded value of one size that meet both become plain,
            instead of both sharded.

        pairs: Whether a layer that gets sharded features may be divided by its inputs; otherwise
            the features are gathered.

        dense: Whether samples are divided up to the first fully connected layer, and neurons from
            there on.

        value_functions: Functions that need the values of a branch on all ranks.
    """

    data_dim: str = ""
    gathers_mixed: bool = False
    pairs: bool = True
    dense: bool = False
    value_functions: frozenset[str] = frozenset()


DEFAULT_SPLIT_OPTIONS = SplitOptions()


class AxisGroup:
    """The ranks over which layers are split.

    Attributes:
        world: The communicator of the ranks.

        options: How layers are split.

        decider: During planning, the object that decides which parameters are sharded.

        sent_bytes: Bytes sent since the last passes began.

        recent_copies: The last plain values that were copied to ranks, with their copies.

        early_copies: Copies of parameters that were made before the forward, by their ids.
    """

    def __init__(
        self,
        world: World,
        options: SplitOptions = DEFAULT_SPLIT_OPTIONS,
        decider: ShardingDecider | None = None,
    ) -> None:
        self.world = world
        self.options = options
        self.decider = decider
        self.sent_bytes = 0
        self.recent_copies: deque[tuple[Tensor, int, Tensor]] = deque(maxlen=COPY_CACHE_SIZE)
        self.early_copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self.world.size

    def sum_over_ranks(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """All-reduce a tensor; the operation is a name of torch.distributed.ReduceOp."""
        if isinstance(tensor, FakeTensor):  # a fake tensor has no values to send
            return tensor.clone()
        self.sent_bytes += count_collective_bytes("all_reduce", tensor.nbytes, self.size)
        return self.world.all_reduce(tensor.contiguous(), operation)

    def gather_pieces(self, piece: Tensor, dim: int, partition: DimPartition) -> Tensor:
        """Concatenate the pieces of all ranks, in serial order.

        Args:
            piece: This rank's piece.
            dim: The divided dimension.
            partition: How it is divided.

        Returns:
            The whole tensor.
        """
        # equal blocks are gathered as one block with an extra dimension
        if len(set(partition.blocks)) == 1 < len(blocks := partition.blocks):
            pieces = self.gather_pieces(
                piece.unflatten(dim, (len(blocks), -1)), dim + 1, partition.select_blocks(0, 1)
            )
            # not a view, because it may be changed in place
            return pieces.flatten(dim, dim + 1).detach()
        lengths = [partition.compute_length(rank) for rank in range(self.size)]
        if (longest := max(lengths)) > piece.shape[dim]:
            padded = piece.new_zeros(*piece.shape[:dim], longest, *piece.shape[dim + 1 :])
            padded.narrow(dim, 0, piece.shape[dim]).copy_(piece)
            piece = padded
        pieces = [piece] * self.size
        if not isinstance(piece, FakeTensor):
            self.sent_bytes += count_collective_bytes("all_gather", piece.nbytes, self.size)
            pieces = self.world.all_gather(piece)
        trimmed = [
            each.narrow(dim, 0, length) for each, length in zip(pieces, lengths, strict=True)
        ]
        if len(partition.blocks) == 1:
            return torch.cat(trimmed, dim)
        blocks_of_ranks = [
            each.split(partition.list_lengths(rank), dim) for rank, each in enumerate(trimmed)
        ]
        return torch.cat(
            [
                block_piece
                for same_block in zip(*blocks_of_ranks, strict=True)
                for block_piece in same_block
            ],
            dim,
        )

    def take_piece(self, whole: Tensor, dim: int, partition: DimPartition) -> Tensor:
        """Take this rank's piece of a whole tensor.

        Args:
            whole: The tensor.
            dim: The dimension to divide.
            partition: How it is divided.

        Returns:
            The piece: a view, if it is one block.
        """
        blocks = [
            whole.narrow(dim, each.start, len(each)) for each in partition.list_ranges(self.rank)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)

    def start_fetch(
        self,
        piece: Tensor,
        dim: int,
        partition: DimPartition,
        wanted: tuple[WantedIndices, ...],
        fill: float,
    ) -> Callable[[], Tensor]:
        """Start to fetch the elements that this rank needs of all ranks' pieces.

        Args:
            piece: This rank's piece.

            dim: The divided dimension.

            partition: How it is divided.

            wanted: For each rank, the elements that it needs.

            fill: Value where an element does not exist.

        Returns:
            A function that waits for the elements and returns them, in the order of `wanted`.
        """
        own_runs = find_runs(partition, wanted[self.rank])
        received, wait = self._start_transfer(
            piece,
            dim,
            {
                peer: [run for run in find_runs(partition, needed) if run.owner == self.rank]
                for peer, needed in enumerate(wanted)
            },
            {
                peer: sum(run.length for run in own_runs if run.owner == peer)
                for peer in range(self.size)
            },
        )

        def concatenate() -> Tensor:
            wait()
            slices = list[Tensor]()
            offsets = dict.fromkeys(received, 0)
            for run in own_runs:
                if run.owner == PADDING:
                    slices.append(
                        piece.new_full(
                            (*piece.shape[:dim], run.length, *piece.shape[dim + 1 :]), fill
                        )
                    )
                elif run.owner == self.rank:
                    slices.append(piece.narrow(dim, run.start, run.length))
                else:
                    slices.append(received[run.owner].narrow(dim, offsets[run.owner], run.length))
                    offsets[run.owner] += run.length
            return torch.cat(slices, dim) if slices else piece.narrow(dim, 0, 0)

        return concatenate

    def start_return(
        self, gradient: Tensor, dim: int, partition: DimPartition, wants: tuple[WantedIndices, ...]
    ) -> Callable[[Tensor], Tensor]:
        """Start to return what belongs to the fetched elements of all ranks to their owners.

        This is the adjoint of `start_fetch`.

        Args:
            gradient: This rank's tensor for the elements that it fetched.
            dim: The divided dimension.
            partition: How it is divided.
            wants: For each rank, the elements that it fetched.

        Returns:
            A function that waits for the returned tensors, and adds them to a tensor like this
            rank's piece.
        """
        own_runs = dict[int, list[ElementRun]]()
        offset = 0
        for run in find_runs(partition, wants[self.rank]):
            own_runs.setdefault(run.owner, []).append(run._replace(start=offset))
            offset += run.length
        runs_of_peers = {
            peer: [run for run in find_runs(partition, needed) if run.owner == self.rank]
            for peer, needed in enumerate(wants)
        }
        received, wait = self._start_transfer(
            gradient,
            dim,
            {peer: own_runs.get(peer, []) for peer in range(self.size)},
            {
                peer: sum(run.length for run in peer_runs)
                for peer, peer_runs in runs_of_peers.items()
            },
        )
        if self.rank in own_runs:
            received[self.rank] = _concatenate_runs(gradient, dim, own_runs[self.rank])

        def add_received(total: Tensor) -> Tensor:
            wait()
            # the order of ranks makes the sum reproducible
            for peer, peer_runs in runs_of_peers.items():
                offset = 0
                for run in peer_runs:
                    total.narrow(dim, run.start, run.length).add_(
                        received[peer].narrow(dim, offset, run.length)
                    )
                    offset += run.length
            return total

        return add_received

    def _start_transfer(
        self,
        source: Tensor,
        dim: int,
        send_runs: dict[int, list[ElementRun]],
        receive_counts: dict[int, int],
    ) -> tuple[dict[int, Tensor], Callable[[], None]]:
        """Start to send runs of a tensor to each rank, and to receive so many elements from each.

        The result is (received tensors by rank, function that waits for them).
        """
        receives = {
            peer: source.new_empty(*source.shape[:dim], count, *source.shape[dim + 1 :])
            for peer, count in receive_counts.items()
            if count and peer != self.rank
        }
        if isinstance(source, FakeTensor):
            return receives, lambda: None
        sends = {
            peer: _concatenate_runs(source, dim, runs)
            for peer, runs in send_runs.items()
            if runs and peer != self.rank
        }
        self.sent_bytes += sum(each.nbytes for each in sends.values())
        return receives, self.world.start_transfers(sends, receives)

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """Copy a plain value of which each rank makes another value.

        The gradient of the copy is summed over ranks, once for all values that are made of it.
        """
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        for source, version, copy in filter(
            None, (*self.recent_copies, self.early_copies.get(id(x)))
        ):
            if source is x and version == x._version:
                return copy
        self.note_transfer("copied", x.nbytes)
        result: Tensor = AxisCopy.apply(x, self)
        self.recent_copies.append((x, x._version, result))
        return result

    def copy_parameters_early(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copy parameters before a forward.

        Autograd runs the backward of what was made first last. So all gradients of these parameters
        are summed one after another behind the whole backward, and no rank waits for another one in
        every layer.
        """
        trained = [each for each in tensors if each.requires_grad and torch.is_grad_enabled()]
        self.early_copies = {
            id(each): (each, each._version, AxisCopy.apply(each, self)) for each in trained
        }
        return [copy for _, _, copy in self.early_copies.values()]

    def add_partial_results(self, x: Tensor) -> Tensor:
        """Sum the partial results of all ranks."""
        total: Tensor = AxisReduce.apply(x, self)
        self.note_transfer("summed", total.nbytes)
        return total

    def note_transfer(self, what: str, payload: int, detail: str = "") -> None:
        """Note, during planning, that a tensor travels.

        Args:
            what: The kind of transfer, such as "gathered" or "fetched".

            payload: Bytes of the tensor of a collective; for other transfers, bytes that a rank
                sends.

            detail: Text for the summary.
        """
        if self.decider is not None:
            sent = (
                count_collective_bytes(TRANSFER_COLLECTIVES[what], payload, self.size)
                if what in TRANSFER_COLLECTIVES
                else payload
            )
            self.decider.note_transfer(what, sent, detail)

    def add_constraints(self, constraints: Iterable[Constraint]) -> None:
        """Request, during planning, that parameters are divided in another way."""
        if self.decider is not None:
            self.decider.constraints.extend(constraints)

    def broadcast_value(
        self, value: Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Broadcast a value of one rank to all.

        Args:
            value: The value, or None on other ranks.
            owner: The rank that has it.
            shape: Shape of the value.
            dtype: Type of the value.

        Returns:
            A copy of the value.
        """
        result = (
            torch.empty(shape, dtype=dtype, device=self.world.device)
            if value is None
            else value.clone(memory_format=torch.contiguous_format)
        )
        if self.rank == owner:
            self.sent_bytes += count_collective_bytes("broadcast", result.nbytes, self.size)
        self.world.copy_from(result, owner)
        return result

    def begin_passes(self) -> None:
        """Count the sent bytes anew: the passes of a step, or of a test, begin."""
        self.sent_bytes = 0

    def clear_copies(self) -> None:
        """Forget the copies of a forward that is over."""
        self.recent_copies.clear()
        self.early_copies.clear()


def _concatenate_runs(source: Tensor, dim: int, runs: list[ElementRun]) -> Tensor:
    slices = [source.narrow(dim, run.start, run.length) for run in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim)


# Each function is the adjoint of its partner, so that a backward has a backward (forces, gradient
# penalties).
class AxisCopy(torch.autograd.Function):
    """The same tensor; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.line = group
        # the same memory, but not a view of x, because x may be changed in place afterwards
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return AxisReduce.apply(gradients[0], ctx.line), None


class AxisReduce(torch.autograd.Function):
    """The sum over ranks; the gradient is the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.line = group
        return group.sum_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return AxisCopy.apply(gradients[0], ctx.line), None


class AxisScatter(torch.autograd.Function):
    """The piece of this rank; the gradient is all pieces, concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, partition: DimPartition, group: AxisGroup) -> Tensor:
        ctx.dim = dim
        ctx.pieces = partition
        ctx.line = group
        return group.take_piece(x, dim, partition).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return AxisGather.apply(gradients[0], ctx.dim, ctx.pieces, ctx.line), None, None, None


class AxisGather(torch.autograd.Function):
    """All pieces, concatenated; the gradient is the piece of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, partition: DimPartition, group: AxisGroup) -> Tensor:
        ctx.dim = dim
        ctx.pieces = partition
        ctx.line = group
        return group.gather_pieces(x, dim, partition)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return AxisScatter.apply(gradients[0], ctx.dim, ctx.pieces, ctx.line), None, None, None


class HaloFetch(torch.autograd.Function):
    """Elements of other ranks' pieces; the gradient is returned to their owners."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        partition: DimPartition,
        wanted: tuple[WantedIndices, ...],
        fill: float,
        group: AxisGroup,
    ) -> Tensor:
        ctx.given = dim, partition, wanted, group
        return group.start_fetch(x, dim, partition, wanted, fill)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return HaloReturn.apply(gradients[0], *ctx.given), None, None, None, None, None


class HaloReturn(torch.autograd.Function):
    """Tensors for fetched elements, added to their owners' pieces; the adjoint of HaloFetch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        partition: DimPartition,
        wanted: tuple[WantedIndices, ...],
        group: AxisGroup,
    ) -> Tensor:
        ctx.given = dim, partition, wanted, group
        zeros = x.new_zeros(
            *x.shape[:dim], partition.compute_length(group.rank), *x.shape[dim + 1 :]
        )
        return group.start_return(x, dim, partition, wanted)(zeros)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dim, partition, wanted, group = ctx.given
        return (
            HaloFetch.apply(gradients[0], dim, partition, wanted, 0.0, group),
            None,
            None,
            None,
            None,
        )
