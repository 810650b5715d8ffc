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

from paragrad.parallel.sharding.halo_regions import PADDING, Run, Want, runs
from paragrad.parallel.sharding.partition import Pieces, Wish
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.runtime.world import World

COLLECTIVES = {
    "copied": "all_reduce",
    "summed": "all_reduce",
    "gathered": "all_gather",
    "sliced": "all_gather",
    "statistics": "all_gather",
    "statistics back": "all_gather",
    "shown": "broadcast",
}
# plain values that were copied last: queries, keys and values are made of one
KEPT = 4


class Deciding(Protocol):
    """While it is found out how to divide parameters, who decides. divide: by the outputs of a
    layer, or the vocabulary (role); follow: as a value with which it is used;  the others note
    what travels, and what is used as it is.
    """

    wishes: list[Wish]

    def divide(self, tensor: Any, dim: int, role: str) -> bool: ...
    def follow(self, tensor: Any, dim: int, cut: Any) -> bool: ...
    def reconsider(self, pieces: Pieces) -> None: ...
    def used(self, tensor: Any, by: str) -> None: ...
    def gathered(self, tensor: Any, dim: int) -> None: ...
    def tried(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> None: ...
    def noted(self, what: str, sent: int, detail: str) -> None: ...


class Nobody:
    """A world of so many ranks, of which this is the first, and no other is there. What it
    answers has the shape alone.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduced(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        return tensor.clone()

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size

    def copy_from(self, tensor: Tensor, rank: int) -> None:
        """What there is is what it would be."""

    def passing(
        self, sends: Mapping[int, Tensor], takes: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        for tensor in takes.values():
            tensor.zero_()
        return lambda: None


class Manner(NamedTuple):
    """How layers are split over a line, where there are several ways. data: what of the data is
    divided (rows, columns, samples), if any;  gathers: where a plain and a divided value of one
    size meet, both are plain from there on, not divided; pairs: a layer that is given divided
    features may be divided by its inputs, otherwise they are gathered;  dense: samples are
    divided up to the first fully connected layer, and neurons from there on;  shows: functions
    that want a branch's values on all ranks.
    """

    data: str = ""
    gathers: bool = False
    pairs: bool = True
    dense: bool = False
    shows: frozenset[str] = frozenset()


PLAIN = Manner()


class Line:
    """Ranks over which layers are split. planning: where it is being found out how to divide
    parameters, who decides; sent: bytes since somebody set it to 0.
    """

    def __init__(
        self, world: World, manner: Manner = PLAIN, planning: Deciding | None = None
    ) -> None:
        self.world = world
        self.manner = manner
        self.planning = planning
        self.sent = 0
        self.copies: deque[tuple[Tensor, int, Tensor]] = deque(maxlen=KEPT)
        self.early: dict[int, tuple[Tensor, int, Tensor]] = {}

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def summed(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        if isinstance(tensor, FakeTensor):  # without values nobody is asked
            return tensor.clone()
        self.sent += computed_bytes("all_reduce", tensor.nbytes, self.size)
        return self.world.all_reduced(tensor.contiguous(), operation)

    def together(self, piece: Tensor, dim: int, pieces: Pieces) -> Tensor:
        """All ranks' pieces, in their places."""
        # one after the other, as one of them
        if len(set(pieces.blocks)) == 1 < len(count := pieces.blocks):
            found = self.together(
                piece.unflatten(dim, (len(count), -1)), dim + 1, pieces.some(0, 1)
            )
            # no view: it may be changed in place
            return found.flatten(dim, dim + 1).detach()
        lengths = [pieces.length(rank) for rank in range(self.size)]
        if (most := max(lengths)) > piece.shape[dim]:
            wide = piece.new_zeros(*piece.shape[:dim], most, *piece.shape[dim + 1 :])
            wide.narrow(dim, 0, piece.shape[dim]).copy_(piece)
            piece = wide
        found = [piece] * self.size
        if not isinstance(piece, FakeTensor):
            self.sent += computed_bytes("all_gather", piece.nbytes, self.size)
            found = self.world.gathered(piece)
        every = [each.narrow(dim, 0, length) for each, length in zip(found, lengths, strict=True)]
        if len(pieces.blocks) == 1:
            return torch.cat(every, dim)
        parts = [each.split(pieces.lengths(rank), dim) for rank, each in enumerate(every)]
        return torch.cat([part for block in zip(*parts, strict=True) for part in block], dim)

    def piece(self, whole: Tensor, dim: int, pieces: Pieces) -> Tensor:
        """This rank's, a view where it is one block."""
        parts = [whole.narrow(dim, each.start, len(each)) for each in pieces.ranges(self.rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def asked(
        self, piece: Tensor, dim: int, have: Pieces, wants: tuple[Want, ...], fill: float
    ) -> Callable[[], Tensor]:
        """Begins to get what this rank wants of all ranks' pieces; what is returned waits for
        it. fill: stands where there is nothing.
        """
        mine = runs(have, wants[self.rank])
        came, over = self._passed(
            piece,
            dim,
            {
                peer: [run for run in runs(have, want) if run.owner == self.rank]
                for peer, want in enumerate(wants)
            },
            {
                peer: sum(run.length for run in mine if run.owner == peer)
                for peer in range(self.size)
            },
        )

        def together() -> Tensor:
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

        return together

    def returned(
        self, wanted: Tensor, dim: int, have: Pieces, wants: tuple[Want, ...]
    ) -> Callable[[Tensor], Tensor]:
        """The other way, begun: of what all ranks have for what they wanted, that for this
        rank's piece is added to a tensor.
        """
        places = dict[int, list[Run]]()
        at = 0
        for run in runs(have, wants[self.rank]):
            places.setdefault(run.owner, []).append(run._replace(start=at))
            at += run.length
        theirs = {
            peer: [run for run in runs(have, want) if run.owner == self.rank]
            for peer, want in enumerate(wants)
        }
        came, over = self._passed(
            wanted,
            dim,
            {peer: places.get(peer, []) for peer in range(self.size)},
            {peer: sum(run.length for run in found) for peer, found in theirs.items()},
        )
        if self.rank in places:
            came[self.rank] = _taken(wanted, dim, places[self.rank])

        def added(total: Tensor) -> Tensor:
            over()
            for peer, found in theirs.items():  # in the order of ranks
                at = 0
                for run in found:
                    total.narrow(dim, run.start, run.length).add_(
                        came[peer].narrow(dim, at, run.length)
                    )
                    at += run.length
            return total

        return added

    def _passed(
        self, source: Tensor, dim: int, out: dict[int, list[Run]], into: dict[int, int]
    ) -> tuple[dict[int, Tensor], Callable[[], None]]:
        """To every rank its runs of a tensor, from each so many elements: (what comes, until
        when it has).
        """
        takes = {
            peer: source.new_empty(*source.shape[:dim], count, *source.shape[dim + 1 :])
            for peer, count in into.items()
            if count and peer != self.rank
        }
        if isinstance(source, FakeTensor):
            return takes, lambda: None
        sends = {
            peer: _taken(source, dim, found)
            for peer, found in out.items()
            if found and peer != self.rank
        }
        self.sent += sum(each.nbytes for each in sends.values())
        return takes, self.world.passing(sends, takes)

    def copied(self, x: Tensor) -> Tensor:
        """Of a plain value of which every rank makes something else: its gradient is summed,
        once for all that is made.
        """
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        for known, version, before in filter(None, (*self.copies, self.early.get(id(x)))):
            if known is x and version == x._version:
                return before
        self.note("copied", x.nbytes)
        made: Tensor = Copied.apply(x, self)
        self.copies.append((x, x._version, made))
        return made

    def copied_early(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copies of parameters, before a forward: autograd runs what was made first last, so
        that their gradients are summed one after the other behind the whole backward, and no
        rank waits for another in every layer.
        """
        given = [each for each in tensors if each.requires_grad and torch.is_grad_enabled()]
        self.early = {id(each): (each, each._version, Copied.apply(each, self)) for each in given}
        return [made for _, _, made in self.early.values()]

    def added(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have."""
        made: Tensor = Summed.apply(x, self)
        self.note("summed", made.nbytes)
        return made

    def note(self, what: str, payload: int, detail: str = "") -> None:
        """Something travels: a tensor of so many bytes, by a collective, or, of what is
        fetched, so many as a rank sends.
        """
        if self.planning is not None:
            sent = (
                computed_bytes(COLLECTIVES[what], payload, self.size)
                if what in COLLECTIVES
                else payload
            )
            self.planning.noted(what, sent, detail)

    def wish(self, wishes: Iterable[Wish]) -> None:
        """Parameters had better be divided so."""
        if self.planning is not None:
            self.planning.wishes.extend(wishes)

    def shown(
        self, value: Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """What one rank has, on all."""
        found = (
            torch.empty(shape, dtype=dtype, device=self.world.device)
            if value is None
            else value.clone(memory_format=torch.contiguous_format)
        )
        if self.rank == owner:
            self.sent += computed_bytes("broadcast", found.nbytes, self.size)
        self.world.copy_from(found, owner)
        return found

    def let_go(self) -> None:
        """A forward is over."""
        self.copies.clear()
        self.early.clear()


def _taken(source: Tensor, dim: int, found: list[Run]) -> Tensor:
    parts = [source.narrow(dim, run.start, run.length) for run in found]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# each is the other's adjoint, so that a backward has a backward (forces, gradient penalties)
class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        # the same memory, and no view of x: that may be changed in place afterwards
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Summed.apply(gradients[0], ctx.line), None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.summed(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Copied.apply(gradients[0], ctx.line), None


class Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, pieces: Pieces, line: Line) -> Tensor:
        ctx.dim = dim
        ctx.pieces = pieces
        ctx.line = line
        return line.piece(x, dim, pieces).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Gathered.apply(gradients[0], ctx.dim, ctx.pieces, ctx.line), None, None, None


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, pieces: Pieces, line: Line) -> Tensor:
        ctx.dim = dim
        ctx.pieces = pieces
        ctx.line = line
        return line.together(x, dim, pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Sliced.apply(gradients[0], ctx.dim, ctx.pieces, ctx.line), None, None, None


class Fetched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        have: Pieces,
        wants: tuple[Want, ...],
        fill: float,
        line: Line,
    ) -> Tensor:
        ctx.given = dim, have, wants, line
        return line.asked(x, dim, have, wants, fill)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Returned.apply(gradients[0], *ctx.given), None, None, None, None, None


class Returned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, have: Pieces, wants: tuple[Want, ...], line: Line
    ) -> Tensor:
        ctx.given = dim, have, wants, line
        zeros = x.new_zeros(*x.shape[:dim], have.length(line.rank), *x.shape[dim + 1 :])
        return line.returned(x, dim, have, wants)(zeros)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dim, have, wants, line = ctx.given
        return Fetched.apply(gradients[0], dim, have, wants, 0.0, line), None, None, None, None
