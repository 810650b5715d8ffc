"""branch: sub-networks of which none needs another, on ranks of their own; the rest of the
model is on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import called, copied
from paragrad.engine.layout import Held
from paragrad.engine.model_shard import Share
from paragrad.engine.state.preserve_state import untouched
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed
from paragrad.parallel.branch.branch_detection import Branch, placed, timed
from paragrad.parallel.sharding.autograd_collectives import Line, Manner, Nobody
from paragrad.parallel.tensor.function_patches import (
    anew,
    as_tested,
    asked,
    refuse_compiled,
    standing,
    telling,
)
from paragrad.parallel.tensor.shard_module import Split
from paragrad.parallel.tensor.sharding_plan import Note
from paragrad.parallel.tensor.single_rank_tensor import Lone, of_shapes, shown
from paragrad.parallel.tensor.summary import table
from paragrad.parallel.tracing.cut_points import NO_LOSS
from paragrad.parallel.tracing.tracer import whereabouts
from paragrad.runtime.world import World
from paragrad.strategies.branch import Branch as Strategy

ROUNDS = 8  # until no other function is found that wants values


@dataclass(frozen=True)
class Plan:
    """forks: their branches, in the order of a forward;  owners: by parameter or buffer, whose
    it is;  whole: functions that want values on all ranks;  notes: what travels;  numbers: of
    each parameter and buffer, how many.
    """

    forks: list[list[Branch]]
    owners: dict[str, int]
    whole: frozenset[str]
    notes: tuple[Note, ...]
    numbers: dict[str, int]


def check(strategy: Strategy, model: nn.Module, example: Any, tested: bool) -> None:
    """Has the model branches? Raises StepFailed with the repair."""
    look(strategy, model, example, tested)


def look(strategy: Strategy, model: nn.Module, example: Any, tested: bool = False) -> Plan:
    """Which branches there are, and whose each is. tested: a test has to be possible too."""
    ranks = strategy.size
    refuse_compiled(model)
    with untouched(Summed(model, NO_LOSS)), telling("without gradients"):
        found = timed(model, example, ranks)
    most = max(map(len, found), default=1)
    if most < 2:
        raise StepFailed(
            "the model has no branches: everything in it that has parameters needs what came "
            "before; train it "
            "with data(n), tensor(n) or pipeline(n)"
        )
    if most < ranks:
        raise StepFailed(
            f"the model has at most {most} branches beside each other, and {ranks} ranks are "
            f"wanted; give at most "
            f"branch({most})"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    owners = placed(found, ranks)
    whole = frozenset[str]()
    for _ in range(ROUNDS):
        looking, testing = (Looking(model, owners, ranks, whole) for _ in range(2))
        with untouched(Summed(model, NO_LOSS)):
            looking.run(example)
        with (
            untouched(Summed(model, NO_LOSS)),
            contextlib.nullcontext() if tested else contextlib.suppress(StepFailed),
        ):
            testing.run(example, tested=True)
        before = whole
        whole = frozenset(looking.whole | testing.whole)
        if whole == before:
            break
    return Plan(
        found, owners, whole, tuple(looking.notes), {name: each.numel() for name, each in tensors}
    )


class Looking:
    """A run of the model in which one rank has all branches, and notes what they would show
    each other.
    """

    def __init__(
        self, model: nn.Module, owners: dict[str, int], ranks: int, whole: frozenset[str]
    ) -> None:
        self.model = model
        self.owners = owners
        self.whole = set(whole)
        self.line = Line(Nobody(ranks), Manner(shows=whole), self)  # type: ignore[arg-type]
        self.notes: list[Note] = []

    def noted(self, what: str, sent: int, detail: str) -> None:
        self.notes.append(Note(self.at[-1], what, sent, detail))

    def tried(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> None:
        """Can it be told without values? draws: it draws inside of what it does, so that all
        ranks have to call it.
        """
        if draws:
            self.whole.add(name)
        try:
            with torch.no_grad():
                of_shapes(func, name, args, kwargs)
        # whatever it says: then it is called with values, everywhere
        except Exception:
            self.whole.add(name)

    def run(self, inputs: Any, tested: bool = False) -> None:
        held = {
            id(tensor): Lone(tensor, owner, self.line, standing=True)
            for _, _, tensor, owner in _owned(self.model, self.owners)
        }
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with (
            standing(self.model, held),
            asked(),
            no_checkpoints(),
            whereabouts(self.model) as self.at,
            telling("some of whose values one rank alone has"),
            as_tested(self.model, tested),
        ):
            tree_map_only(Lone, shown, called(self.model, copied(inputs)))
        if own := [name for name in anew(self.model, buffers, held) if name in self.owners]:
            raise StepFailed(
                f"a forward makes the buffer {own[0]} anew, which is in a branch; change it in "
                f"place "
                "(self.name.copy_(...)), or train the model with data(n)",
                tensor=own[0],
            )


@contextlib.contextmanager
def no_checkpoints() -> Iterator[None]:
    """A forward that is made again in backward would be made by some ranks alone."""
    plain = checkpoint.checkpoint, checkpoint._checkpoint_without_reentrant_generator

    def refused(*_: Any, **__: Any) -> Any:
        raise StepFailed(
            "the model makes parts of its forward again in backward (torch.utils.checkpoint), and "
            "ranks with "
            "other branches would not; train it without, or with data(n)"
        )

    checkpoint.checkpoint = refused
    checkpoint._checkpoint_without_reentrant_generator = refused
    try:
        yield
    finally:
        checkpoint.checkpoint, checkpoint._checkpoint_without_reentrant_generator = plain


def _owned(
    model: nn.Module, owners: dict[str, int]
) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    of = {
        id(each): owners[name]
        for name, each in [*model.named_parameters(), *model.named_buffers()]
        if name in owners
    }
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for own, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) in of:
                    yield module, own, tensor, of[id(tensor)]


def told(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """The forks, branch by branch. inputs: of so many samples."""
    plan = look(strategy, model, inputs)
    rows = [
        ("fork", "branch", "rank", "numbers", "forward [ms]"),
        *(
            (
                str(number),
                ", ".join(branch.modules),
                str(plan.owners[next(iter(branch.parameters))]),
                f"{sum(plan.numbers[name] for name in branch.parameters):,}",
                f"{1e3 * branch.seconds:.3g}",
            )
            for number, branches in enumerate(plan.forks, 1)
            for branch in branches
        ),
    ]
    sums = [
        sum(note.bytes for note in plan.notes if note.what == what) for what in ("shown", "copied")
    ]
    own = sum(plan.numbers[name] for name in plan.owners)
    every = sum(plan.numbers.values())
    return [
        *table(rows),
        f"{own / max(every, 1):.1%} of {every:,} numbers are one rank's; shown at merges: "
        f"{sums[0]:,} bytes "
        f"in a forward, gradients summed before forks: {sums[1]:,} in a backward, for {samples} "
        f"samples",
    ]


def share(strategy: Strategy, model: nn.Module, example: Any, axis: World, plan: Plan) -> Share:
    """The trunk, and this rank's branches. Collective over the axis."""
    line = Line(axis, Manner(shows=plan.whole))
    of_others = {
        id(tensor) for _, _, tensor, owner in _owned(model, plan.owners) if owner != axis.rank
    }
    held = {
        name: Held(name, tuple(tensor.shape), counts=name in plan.owners or axis.rank == 0)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if id(tensor) not in of_others
    }
    known: dict[int, Lone] = {}
    absent: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for module, own, tensor, owner in list(_owned(model, plan.owners)):
        kept = id(tensor) not in of_others
        if id(tensor) not in known:
            known[id(tensor)] = Lone(
                tensor if kept else _without_values(tensor), owner, line, standing=True
            )
        module.__dict__[own] = known[id(tensor)]
        if not kept:
            tensors: dict[str, Any] = (
                module._parameters if own in module._parameters else module._buffers
            )
            tensors[own] = None
            absent.append((tensors, own, known[id(tensor)].local))
    model.register_forward_hook(lambda _, args, out: tree_map_only(Lone, shown, out))
    counts = [
        sum(1 for name, owner in plan.owners.items() if owner == rank) for rank in range(axis.size)
    ]
    pieces = {id(each.local): each for each in known.values()}
    return Share(
        model,
        held,
        chose=(
            (
                "branches",
                " + ".join(map(str, counts)) + " tensors",
                f"{sum(map(len, plan.forks))} branches of {len(plan.forks)} "
                "forks, by the time of their forwards",
            ),
        ),
        around=(Split("branch", model, [line], pieces, absent),),
    )


def _without_values(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return (
        nn.Parameter(made, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else made
    )
