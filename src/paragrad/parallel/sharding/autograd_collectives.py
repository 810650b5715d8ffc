"""Collectives inside of a forward, in pairs: what each does to values, and its backward to
gradients.

A plain tensor is on all ranks of a line, and so is its whole gradient; a divided one is in
pieces, and its gradient too.

    Copied    the same                      sum over ranks          a plain value, of which each
    rank makes something else Summed    sum over ranks                the same                a
    plain value, made of what each rank has Sliced    this rank's piece             all pieces
    together     from plain to divided Gathered  all pieces together           this rank's piece
    from divided to plain Fetched   some of other ranks' pieces   added to whose it is    from
    pieces to what this rank's outputs see of them Returned  added to whose it is          some
    of other ranks'    the other way

(f and g, and their sequence-parallel kin, of Shoeybi et al. 2019, arXiv 1909.08053, and
Korthikanti et al. 2022, 2205.05198.)
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
# plain values that were copied last: queries, keys and values are made of one
COPY_CACHE_SIZE = 4


class ShardingDecider(Protocol):
    """While it is found out how to divide parameters, who decides. divide: by the outputs of a
    layer, or the vocabulary (role); follow: as a value with which it is used;  the others note
    what travels, and what is used as it is.
    """

    constraints: list[Constraint]

    def decide_sharding(self, tensor: Any, dim: int, role: str) -> bool: ...
    def follow_sharding(self, tensor: Any, dim: int, sharding: Any) -> bool: ...
    def reconsider_sources(self, partition: DimPartition) -> None: ...
    def note_whole_use(self, tensor: Any, by: str) -> None: ...
    def note_gather(self, tensor: Any, dim: int) -> None: ...
    def check_meta_call(
        self, func: Any, name: str, args: Any, kwargs: Any, draws: bool
    ) -> None: ...
    def note_transfer(self, what: str, sent: int, detail: str) -> None: ...


class FakeGroup:
    """A world of so many ranks, of which this is the first, and no other is there. What it
    answers has the shape alone.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        return tensor.clone()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size

    def copy_from(self, tensor: Tensor, rank: int) -> None:
        """What there is is what it would be."""

    def start_transfers(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        for tensor in receives.values():
            tensor.zero_()
        return lambda: None


class SplitOptions(NamedTuple):
    """How layers are split over a line, where there are several ways. data: what of the data is
    divided (rows, columns, samples), if any;  gathers: where a plain and a divided value of one
    size meet, both are plain from there on, not divided; pairs: a layer that is given divided
    features may be divided by its inputs, otherwise they are gathered;  dense: samples are
    divided up to the first fully connected layer, and neurons from there on;  shows: functions
    that want a branch's values on all ranks.
    """

    data_dim: str = ""
    gathers_mixed: bool = False
    pairs: bool = True
    dense: bool = False
    value_functions: frozenset[str] = frozenset()


DEFAULT_SPLIT_OPTIONS = SplitOptions()


class AxisGroup:
    """Ranks over which layers are split. planning: where it is being found out how to divide
    parameters, who decides; sent: bytes since somebody set it to 0.
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
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def sum_over_ranks(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        if isinstance(tensor, FakeTensor):  # without values nobody is asked
            return tensor.clone()
        self.sent_bytes += count_collective_bytes("all_reduce", tensor.nbytes, self.size)
        return self.world.all_reduce(tensor.contiguous(), operation)

    def gather_pieces(self, piece: Tensor, dim: int, partition: DimPartition) -> Tensor:
        """All ranks' pieces, in their places."""
        # one after the other, as one of them
        if len(set(partition.blocks)) == 1 < len(count := partition.blocks):
            found = self.gather_pieces(
                piece.unflatten(dim, (len(count), -1)), dim + 1, partition.select_blocks(0, 1)
            )
            # no view: it may be changed in place
            return found.flatten(dim, dim + 1).detach()
        lengths = [partition.compute_length(rank) for rank in range(self.size)]
        if (most := max(lengths)) > piece.shape[dim]:
            wide = piece.new_zeros(*piece.shape[:dim], most, *piece.shape[dim + 1 :])
            wide.narrow(dim, 0, piece.shape[dim]).copy_(piece)
            piece = wide
        found = [piece] * self.size
        if not isinstance(piece, FakeTensor):
            self.sent_bytes += count_collective_bytes("all_gather", piece.nbytes, self.size)
            found = self.world.all_gather(piece)
        every = [each.narrow(dim, 0, length) for each, length in zip(found, lengths, strict=True)]
        if len(partition.blocks) == 1:
            return torch.cat(every, dim)
        parts = [each.split(partition.list_lengths(rank), dim) for rank, each in enumerate(every)]
        return torch.cat([part for block in zip(*parts, strict=True) for part in block], dim)

    def take_piece(self, whole: Tensor, dim: int, partition: DimPartition) -> Tensor:
        """This rank's, a view where it is one block."""
        parts = [
            whole.narrow(dim, each.start, len(each)) for each in partition.list_ranges(self.rank)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def start_fetch(
        self,
        piece: Tensor,
        dim: int,
        partition: DimPartition,
        wanted: tuple[WantedIndices, ...],
        fill: float,
    ) -> Callable[[], Tensor]:
        """Begins to get what this rank wants of all ranks' pieces; what is returned waits for
        it. fill: stands where there is nothing.
        """
        mine = find_runs(partition, wanted[self.rank])
        came, over = self._start_transfer(
            piece,
            dim,
            {
                peer: [run for run in find_runs(partition, want) if run.owner == self.rank]
                for peer, want in enumerate(wanted)
            },
            {
                peer: sum(run.length for run in mine if run.owner == peer)
                for peer in range(self.size)
            },
        )

        def gather_pieces() -> Tensor:
            over()
            parts = list[Tensor]()
            at = dict.fromkeys(came, 0)
            for run in mine:
                if run.owner == PADDING:
                    parts.append(
                        piece.new_full(
                            (*piece.shape[:dim], run.length, *piece.shape[dim + 1 :]), fill
                        )
                    )
                elif run.owner == self.rank:
                    parts.append(piece.narrow(dim, run.start, run.length))
                else:
                    parts.append(came[run.owner].narrow(dim, at[run.owner], run.length))
                    at[run.owner] += run.length
            return torch.cat(parts, dim) if parts else piece.narrow(dim, 0, 0)

        return gather_pieces

    def start_return(
        self, gradient: Tensor, dim: int, partition: DimPartition, wants: tuple[WantedIndices, ...]
    ) -> Callable[[Tensor], Tensor]:
        """The other way, begun: of what all ranks have for what they wanted, that for this
        rank's piece is added to a tensor.
        """
        places = dict[int, list[ElementRun]]()
        at = 0
        for run in find_runs(partition, wants[self.rank]):
            places.setdefault(run.owner, []).append(run._replace(start=at))
            at += run.length
        theirs = {
            peer: [run for run in find_runs(partition, want) if run.owner == self.rank]
            for peer, want in enumerate(wants)
        }
        came, over = self._start_transfer(
            gradient,
            dim,
            {peer: places.get(peer, []) for peer in range(self.size)},
            {peer: sum(run.length for run in found) for peer, found in theirs.items()},
        )
        if self.rank in places:
            came[self.rank] = _concatenate_runs(gradient, dim, places[self.rank])

        def add_partial_results(total: Tensor) -> Tensor:
            over()
            for peer, found in theirs.items():  # in the order of ranks
                at = 0
                for run in found:
                    total.narrow(dim, run.start, run.length).add_(
                        came[peer].narrow(dim, at, run.length)
                    )
                    at += run.length
            return total

        return add_partial_results

    def _start_transfer(
        self,
        source: Tensor,
        dim: int,
        send_runs: dict[int, list[ElementRun]],
        receive_counts: dict[int, int],
    ) -> tuple[dict[int, Tensor], Callable[[], None]]:
        """To every rank its runs of a tensor, from each so many elements: (what comes, until
        when it has).
        """
        takes = {
            peer: source.new_empty(*source.shape[:dim], count, *source.shape[dim + 1 :])
            for peer, count in receive_counts.items()
            if count and peer != self.rank
        }
        if isinstance(source, FakeTensor):
            return takes, lambda: None
        sends = {
            peer: _concatenate_runs(source, dim, found)
            for peer, found in send_runs.items()
            if found and peer != self.rank
        }
        self.sent_bytes += sum(each.nbytes for each in sends.values())
        return takes, self.world.start_transfers(sends, takes)

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """Of a plain value of which every rank makes something else: its gradient is summed,
        once for all that is made.
        """
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        for known, version, before in filter(
            None, (*self.recent_copies, self.early_copies.get(id(x)))
        ):
            if known is x and version == x._version:
                return before
        self.note_transfer("copied", x.nbytes)
        made: Tensor = AxisCopy.apply(x, self)
        self.recent_copies.append((x, x._version, made))
        return made

    def copy_parameters_early(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copies of parameters, before a forward: autograd runs what was made first last, so
        that their gradients are summed one after the other behind the whole backward, and no
        rank waits for another in every layer.
        """
        given = [each for each in tensors if each.requires_grad and torch.is_grad_enabled()]
        self.early_copies = {
            id(each): (each, each._version, AxisCopy.apply(each, self)) for each in given
        }
        return [made for _, _, made in self.early_copies.values()]

    def add_partial_results(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have."""
        made: Tensor = AxisReduce.apply(x, self)
        self.note_transfer("summed", made.nbytes)
        return made

    def note_transfer(self, what: str, payload: int, detail: str = "") -> None:
        """Something travels: a tensor of so many bytes, by a collective, or, of what is
        fetched, so many as a rank sends.
        """
        if self.decider is not None:
            sent = (
                count_collective_bytes(TRANSFER_COLLECTIVES[what], payload, self.size)
                if what in TRANSFER_COLLECTIVES
                else payload
            )
            self.decider.note_transfer(what, sent, detail)

    def add_constraints(self, constraints: Iterable[Constraint]) -> None:
        """Parameters had better be divided so."""
        if self.decider is not None:
            self.decider.constraints.extend(constraints)

    def broadcast_value(
        self, value: Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """What one rank has, on all."""
        found = (
            torch.empty(shape, dtype=dtype, device=self.world.device)
            if value is None
            else value.clone(memory_format=torch.contiguous_format)
        )
        if self.rank == owner:
            self.sent_bytes += count_collective_bytes("broadcast", found.nbytes, self.size)
        self.world.copy_from(found, owner)
        return found

    def clear_copies(self) -> None:
        """A forward is over."""
        self.recent_copies.clear()
        self.early_copies.clear()


def _concatenate_runs(source: Tensor, dim: int, runs: list[ElementRun]) -> Tensor:
    parts = [source.narrow(dim, run.start, run.length) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# each is the other's adjoint, so that a backward has a backward (forces, gradient penalties)
class AxisCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.line = group
        # the same memory, and no view of x: that may be changed in place afterwards
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return AxisReduce.apply(gradients[0], ctx.line), None


class AxisReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.line = group
        return group.sum_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return AxisCopy.apply(gradients[0], ctx.line), None


class AxisScatter(torch.autograd.Function):
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
        dim, have, wants, line = ctx.given
        return HaloFetch.apply(gradients[0], dim, have, wants, 0.0, line), None, None, None, None
