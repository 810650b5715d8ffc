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

from paragrad.datasets.loading import call_model, clone_batch
from paragrad.engine.layout import ShardSpec
from paragrad.engine.model_shard import ModelShard
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule
from paragrad.parallel.branch.branch_detection import ModelBranch, assign_branches, time_forks
from paragrad.parallel.sharding.autograd_collectives import AxisGroup, FakeGroup, SplitOptions
from paragrad.parallel.tensor.function_patches import (
    explain_model_errors,
    find_assigned_buffers,
    patch_torch_functions,
    refuse_compiled_model,
    substitute_tensors,
    use_test_mode,
)
from paragrad.parallel.tensor.shard_module import SplitContext
from paragrad.parallel.tensor.sharding_plan import TransferNote
from paragrad.parallel.tensor.single_rank_tensor import SingleRankTensor, run_on_meta, share_value
from paragrad.parallel.tensor.summary import align_columns
from paragrad.parallel.tracing.cut_points import PLACEHOLDER_LOSS
from paragrad.parallel.tracing.tracer import track_modules
from paragrad.runtime.world import World
from paragrad.strategies.branch import Branch as Strategy

ROUNDS = 8  # until no other function is found that wants values


@dataclass(frozen=True)
class BranchPlan:
    """forks: their branches, in the order of a forward;  owners: by parameter or buffer, whose
    it is;  whole: functions that want values on all ranks;  notes: what travels;  numbers: of
    each parameter and buffer, how many.
    """

    forks: list[list[ModelBranch]]
    owners: dict[str, int]
    value_functions: frozenset[str]
    transfers: tuple[TransferNote, ...]
    element_counts: dict[str, int]


def check_model(strategy: Strategy, model: nn.Module, example: Any, tested: bool) -> None:
    """Has the model branches? Raises StepFailed with the repair."""
    inspect_model(strategy, model, example, tested)


def inspect_model(
    strategy: Strategy, model: nn.Module, example: Any, tested: bool = False
) -> BranchPlan:
    """Which branches there are, and whose each is. tested: a test has to be possible too."""
    ranks = strategy.size
    refuse_compiled_model(model)
    with (
        preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)),
        explain_model_errors("without gradients"),
    ):
        found = time_forks(model, example, ranks)
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
    owners = assign_branches(found, ranks)
    whole = frozenset[str]()
    for _ in range(ROUNDS):
        looking, testing = (BranchTrial(model, owners, ranks, whole) for _ in range(2))
        with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
            looking.run_forward(example)
        with (
            preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)),
            contextlib.nullcontext() if tested else contextlib.suppress(StepFailed),
        ):
            testing.run_forward(example, tested=True)
        before = whole
        whole = frozenset(looking.value_functions | testing.value_functions)
        if whole == before:
            break
    return BranchPlan(
        found,
        owners,
        whole,
        tuple(looking.transfers),
        {name: each.numel() for name, each in tensors},
    )


class BranchTrial:
    """A run of the model in which one rank has all branches, and notes what they would show
    each other.
    """

    def __init__(
        self, model: nn.Module, owners: dict[str, int], ranks: int, value_functions: frozenset[str]
    ) -> None:
        self.model = model
        self.owners = owners
        self.value_functions = set(value_functions)
        self.group = AxisGroup(
            FakeGroup(ranks),  # type: ignore[arg-type]
            SplitOptions(value_functions=value_functions),
            self,  # type: ignore[arg-type]
        )
        self.transfers: list[TransferNote] = []

    def note_transfer(self, what: str, sent: int, detail: str) -> None:
        self.transfers.append(TransferNote(self.module_stack[-1], what, sent, detail))

    def check_meta_call(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> None:
        """Can it be told without values? draws: it draws inside of what it does, so that all
        ranks have to call it.
        """
        if draws:
            self.value_functions.add(name)
        try:
            with torch.no_grad():
                run_on_meta(func, name, args, kwargs)
        # whatever it says: then it is called with values, everywhere
        except Exception:
            self.value_functions.add(name)

    def run_forward(self, inputs: Any, tested: bool = False) -> None:
        held = {
            id(tensor): SingleRankTensor(tensor, owner, self.group, standing=True)
            for _, _, tensor, owner in _iterate_owned_tensors(self.model, self.owners)
        }
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with (
            substitute_tensors(self.model, held),
            patch_torch_functions(),
            refuse_checkpoints(),
            track_modules(self.model) as self.module_stack,
            explain_model_errors("some of whose values one rank alone has"),
            use_test_mode(self.model, tested),
        ):
            tree_map_only(
                SingleRankTensor, share_value, call_model(self.model, clone_batch(inputs))
            )
        if own := [
            name for name in find_assigned_buffers(self.model, buffers, held) if name in self.owners
        ]:
            raise StepFailed(
                f"a forward makes the buffer {own[0]} anew, which is in a branch; change it in "
                f"place "
                "(self.name.copy_(...)), or train the model with data(n)",
                tensor=own[0],
            )


@contextlib.contextmanager
def refuse_checkpoints() -> Iterator[None]:
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


def _iterate_owned_tensors(
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


def describe_layers(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """The forks, branch by branch. inputs: of so many samples."""
    plan = inspect_model(strategy, model, inputs)
    rows = [
        ("fork", "branch", "rank", "numbers", "forward [ms]"),
        *(
            (
                str(number),
                ", ".join(branch.modules),
                str(plan.owners[next(iter(branch.parameters))]),
                f"{sum(plan.element_counts[name] for name in branch.parameters):,}",
                f"{1e3 * branch.seconds:.3g}",
            )
            for number, branches in enumerate(plan.forks, 1)
            for branch in branches
        ),
    ]
    sums = [
        sum(note.bytes for note in plan.transfers if note.kind == what)
        for what in ("shown", "copied")
    ]
    own = sum(plan.element_counts[name] for name in plan.owners)
    every = sum(plan.element_counts.values())
    return [
        *align_columns(rows),
        f"{own / max(every, 1):.1%} of {every:,} numbers are one rank's; shown at merges: "
        f"{sums[0]:,} bytes "
        f"in a forward, gradients summed before forks: {sums[1]:,} in a backward, for {samples} "
        f"samples",
    ]


def shard_model(
    strategy: Strategy, model: nn.Module, example: Any, axis: World, plan: BranchPlan
) -> ModelShard:
    """The trunk, and this rank's branches. Collective over the axis."""
    line = AxisGroup(axis, SplitOptions(value_functions=plan.value_functions))
    of_others = {
        id(tensor)
        for _, _, tensor, owner in _iterate_owned_tensors(model, plan.owners)
        if owner != axis.rank
    }
    held = {
        name: ShardSpec(name, tuple(tensor.shape), is_primary=name in plan.owners or axis.rank == 0)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if id(tensor) not in of_others
    }
    known: dict[int, SingleRankTensor] = {}
    absent: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for module, own, tensor, owner in list(_iterate_owned_tensors(model, plan.owners)):
        kept = id(tensor) not in of_others
        if id(tensor) not in known:
            known[id(tensor)] = SingleRankTensor(
                tensor if kept else _make_valueless(tensor), owner, line, standing=True
            )
        module.__dict__[own] = known[id(tensor)]
        if not kept:
            tensors: dict[str, Any] = (
                module._parameters if own in module._parameters else module._buffers
            )
            tensors[own] = None
            absent.append((tensors, own, known[id(tensor)].local))
    model.register_forward_hook(
        lambda _, args, out: tree_map_only(SingleRankTensor, share_value, out)
    )
    counts = [
        sum(1 for name, owner in plan.owners.items() if owner == rank) for rank in range(axis.size)
    ]
    pieces = {id(each.local): each for each in known.values()}
    return ModelShard(
        model,
        held,
        choices=(
            (
                "branches",
                " + ".join(map(str, counts)) + " tensors",
                f"{sum(map(len, plan.forks))} branches of {len(plan.forks)} "
                "forks, by the time of their forwards",
            ),
        ),
        contexts=(SplitContext("branch", model, [line], pieces, absent),),
    )


def _make_valueless(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return (
        nn.Parameter(made, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else made
    )
