"""How the layers of a model are split: found by running it, as the first of so many ranks
would, with nobody to answer.

Parameters are whole at first. The first product with one decides: of a plain value its outputs
are divided (columns), of a value that is divided its inputs are (rows, and the results summed;
without pairs its outputs again, and the value is gathered), and what goes with a divided value
(a bias, a norm's statistics) is divided as that is. What cannot be done with pieces as they are
(heads cut in two, a fused qkv in one piece) leaves a wish, and the model runs again with the
wishes granted, until there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from paragrad.datasets.loading import called, copied
from paragrad.engine.state.preserve_state import untouched
from paragrad.jobs.loss import Summed
from paragrad.parallel.sharding.autograd_collectives import Line, Manner, Nobody
from paragrad.parallel.sharding.partition import Block, Pieces, Wish, evenly_divided, granted
from paragrad.parallel.sharding.sharded_tensor import Cut, Divided

# -- the rules
from paragrad.parallel.tensor import (  # noqa: F401
    cast_rules,
    convolution_rules,
    einsum_rules,
    loss_rules,
    norm_rules,
    reduction_rules,
    shape_rules,
    window_rules,
)
from paragrad.parallel.tensor.function_patches import (
    anew,
    as_tested,
    asked,
    members,
    refuse_compiled,
    standing,
    telling,
)
from paragrad.parallel.tensor.input_sharding import Domain, entering
from paragrad.parallel.tracing.cut_points import NO_LOSS
from paragrad.parallel.tracing.tracer import whereabouts

ROUNDS = 12  # of granting wishes
# what travels in a forward; the rest is of backward
FORWARD = {"summed", "gathered", "fetched", "statistics"}


@dataclass(frozen=True)
class Note:
    """A message between ranks in a forward (FORWARD) or its backward. at: the module that is
    called;  bytes: of each rank, of the samples that the model was tried with;  detail: of what
    is fetched, how much comes to each rank.
    """

    at: str
    what: str
    bytes: int
    detail: str = ""


@dataclass(frozen=True)
class Plan:
    """How parameters and buffers are divided. divided: by serial name, along which dimension,
    and its blocks;  roles: of those that say what they are (outputs, vocabulary);  shapes: of
    all;  notes: what travels, in the order of a forward;  why: what is not divided, and what it
    is used whole by.
    """

    ranks: int
    manner: Manner
    divided: Mapping[str, tuple[int, tuple[Block, ...]]]
    roles: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[Note, ...]
    why: Mapping[str, str]

    @property
    def whole(self) -> list[str]:
        return [name for name in self.shapes if name not in self.divided]

    def numbers(self, name: str, rank: int) -> int:
        """How many of a tensor a rank has."""
        shape = self.shapes[name]
        if name not in self.divided:
            return prod(shape)
        dim, blocks = self.divided[name]
        return prod(shape) // shape[dim] * Pieces(blocks, self.ranks).length(rank)

    @property
    def bytes(self) -> int:
        return sum(note.bytes for note in self.notes)

    def cut(self, name: str, line: Line) -> tuple[int, Cut]:
        dim, blocks = self.divided[name]
        return dim, Cut(Pieces(blocks, self.ranks), line)


class Made(NamedTuple):
    """How a parameter is to be divided of which weights are made."""

    dim: int
    blocks: tuple[Block, ...]
    role: str


class Planning:
    """One run of a model, in which it is decided what is divided. domain: how its inputs are;
    then parameters are only where it says so.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        blocks: Mapping[str, tuple[Block, ...] | None],
        manner: Manner,
        made: Mapping[str, Made] | None = None,
        domain: Domain | None = None,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.blocks = blocks
        self.made = dict(made or {})
        self.line = Line(Nobody(ranks), manner, self)  # type: ignore[arg-type]
        domain = domain or Domain({}, dense=True)
        manner = manner._replace(dense=domain.dense)
        self.lines = {
            dim: Line(
                Nobody(each.ranks),  # type: ignore[arg-type]
                manner._replace(data=each.name),
                self,  # type: ignore[arg-type]
            )
            for dim, each in domain.dims.items()
        }
        if domain.dims and domain.dense:
            (self.line,) = self.lines.values()
        self.chosen: dict[str, tuple[int, Pieces]] = {}
        self.notes: list[Note] = []
        self.why: dict[str, str] = {}
        self.assigned: list[str] = []  # buffers
        self.roles: dict[str, str] = {}
        self.wishes: list[Wish] = []
        self.held: dict[int, Divided] = {}
        for name, tensor in (
            [*model.named_parameters(), *model.named_buffers()] if domain.dense else ()
        ):
            if type(tensor.data) is Tensor and tensor.dim():
                held = Divided(tensor, {}, name, self)
                self.held[id(tensor)] = held
                if (
                    name in self.made
                    and (own := self.blocks.get(name, self.made[name].blocks)) is not None
                ):
                    self.roles.update({name: self.made[name].role} if self.made[name].role else {})
                    self._chosen(held, self.made[name].dim, Pieces(own, self.ranks))

    # ---- what rules ask ----------------------------------------------------------------------
    def divide(self, tensor: Divided, dim: int, role: str) -> bool:
        """By the outputs of a layer, or its vocabulary, as nothing says otherwise yet."""
        size = tensor.shape[dim]
        name = tensor.serial or next(
            (str(each.serial) for each in tensor.sources if size in each.shape), ""
        )
        blocks = self.blocks.get(name, evenly_divided(size, self.ranks, name).blocks)
        if size < self.ranks or blocks is None or sum(block.size for block in blocks) != size:
            return False
        if tensor.serial is not None:
            self.roles[tensor.serial] = role
        return self._chosen(tensor, dim, Pieces(blocks, self.ranks), role)

    def follow(self, tensor: Divided, dim: int, cut: Cut) -> bool:
        """As a value with which it is used."""
        if (
            (tensor.serial and self.blocks.get(tensor.serial, ()) is None)
            or tensor.cuts
            or any(cut.pieces.length(rank) == 0 for rank in range(self.ranks))
        ):
            return False
        return self._chosen(tensor, dim, cut.pieces)

    def _chosen(self, tensor: Divided, dim: int, pieces: Pieces, role: str = "") -> bool:
        """A weight that is made of parameters is divided in this run, and these are in the next
        one.
        """
        if tensor.serial is not None:
            self.chosen[tensor.serial] = dim, pieces
        elif not (
            sources := [
                each
                for each in tensor.sources
                if pieces.size in each.shape and self.blocks.get(str(each.serial), ()) is not None
            ]
        ):
            return False
        else:
            for each in sources:
                same = each.dim() > dim and each.shape[dim] == pieces.size
                at = dim if same else list(each.shape).index(pieces.size)
                self.made.setdefault(str(each.serial), Made(at, pieces.blocks, role))
        local = self.line.piece(tensor.local.detach(), dim, pieces).requires_grad_(
            tensor.local.requires_grad
        )
        tensor.__dict__.update(local=local, cuts={dim: Cut(pieces, self.line)})
        return True

    def reconsider(self, pieces: Pieces) -> None:
        """A weight that is made of parameters is divided by its outputs, and its inputs are
        divided by now.
        """
        for block in pieces.blocks:
            for name, *_ in block.origins:
                self.made.pop(name, None)

    def used(self, tensor: Divided, by: str) -> None:
        """A parameter is used as it is."""
        self.why.setdefault(str(tensor.serial), by)

    def gathered(self, tensor: Divided, dim: int) -> None:
        """A divided value is wanted whole."""
        # a parameter, in every step: it had better not be divided
        if tensor.serial is not None:
            self.wishes.append(Wish((tensor.serial, 0, tensor.shape[dim])))
        cut = tensor.cuts[dim]
        cut.line.note("gathered", tensor.local.nbytes)

    def noted(self, what: str, sent: int, detail: str) -> None:
        self.notes.append(Note(self.at[-1], what, sent, detail))

    # ---- the run -----------------------------------------------------------------------------
    def run(self, inputs: Any, tested: bool = False) -> None:
        refuse_compiled(self.model)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with untouched(Summed(self.model, NO_LOSS)):
            with (
                standing(self.model, self.held),
                asked(),
                members(self.held),
                whereabouts(self.model) as self.at,
                telling("of which every rank has some neurons and sees the shapes of the whole"),
                as_tested(self.model, tested),
            ):
                called(self.model, entering(copied(inputs), self.lines))
            # what a forward makes anew is not in the pieces that stand for what there was
            self.assigned = anew(self.model, buffers, self.held)
            self.why |= dict.fromkeys(self.assigned, "assigned")

    def after(self) -> dict[str, tuple[Block, ...] | None]:
        """How parameters are to be divided in the next run."""
        found = dict(self.blocks)
        known = {
            **{name: made.blocks for name, made in self.made.items()},
            **{name: pieces.blocks for name, (_, pieces) in self.chosen.items()},
            **found,
        }
        for name in {wish.origin[0] for wish in self.wishes} & known.keys():
            own = [wish for wish in self.wishes if wish.origin[0] == name]
            before = known[name]
            found[name] = None if before is None else granted(before, name, own, self.ranks)
        return found | dict.fromkeys(self.assigned)


def planned(
    model: nn.Module,
    example: Any,
    ranks: int,
    domain: Domain | None = None,
    pairs: bool = True,
    tested: bool = False,
) -> Plan:
    """How a model is split over so many ranks: of two ways to go on where plain and divided
    values meet, by which less travels. example: inputs of some samples;  tested: it runs as in
    a test too. Raises StepFailed where the model cannot run so.
    """
    plans = [
        _planned(model, example, ranks, Manner(gathers=gathers, pairs=pairs), domain)
        for gathers in ((False,) if domain else (False, True))
    ]
    plan, again = min(plans, key=lambda each: each[0].bytes)
    if tested:
        again().run(example, tested)
    return plan


def _planned(
    model: nn.Module, example: Any, ranks: int, manner: Manner, domain: Domain | None
) -> tuple[Plan, Callable[[], Planning]]:
    """(How it is split, another run of it)."""
    blocks: dict[str, tuple[Block, ...] | None] = {}
    made: dict[str, Made] = {}

    def again() -> Planning:
        return Planning(model, ranks, blocks, manner, made, domain)

    for _ in range(ROUNDS):
        planning = again()
        planning.run(example)
        if (planning.after(), planning.made) == (blocks, made):
            break
        blocks = planning.after()
        made = planning.made
    # what goes back and forth is on every rank
    else:
        blocks |= dict.fromkeys({*made, *(wish.origin[0] for wish in planning.wishes)})
        made = {}
        planning = again()
        planning.run(example)
    names = {
        name: tuple(each.shape)
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    return Plan(
        ranks,
        manner,
        {name: (dim, pieces.blocks) for name, (dim, pieces) in planning.chosen.items()},
        planning.roles,
        names,
        tuple(planning.notes),
        {name: why for name, why in planning.why.items() if name not in planning.chosen},
    ), again
