"""The branch strategy: independent sub-networks on ranks of their own; the rest is on all ranks.

This is branch parallelism.
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

from paragrad.datasets.loading import clone_batch
from paragrad.engine.layout import ShardSpec
from paragrad.engine.model_shard import ModelShard
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, call_model
from paragrad.parallel.branch.branch_detection import ModelBranch, assign_branches, time_forks
from paragrad.parallel.sharding.autograd_collectives import AxisGroup, FakeGroup, SplitOptions
from paragrad.parallel.tensor.sharding_plan import TransferNote
from paragrad.parallel.tensor.single_rank_tensor import SingleRankTensor, run_on_meta, share_value
from paragrad.parallel.tensor.split_context import (
    SplitContext,
    explain_model_errors,
    find_assigned_buffers,
    patch_torch_functions,
    refuse_compiled_model,
    substitute_tensors,
    use_test_mode,
)
from paragrad.parallel.tensor.summary import align_columns
from paragrad.parallel.tracing.cut_points import PLACEHOLDER_LOSS
from paragrad.parallel.tracing.tracer import track_modules
from paragrad.runtime.world import World
from paragrad.strategies.branch import Branch as Strategy

ROUNDS = 8  # runs at most, until no further function is found that needs values


@dataclass(frozen=True)
class BranchPlan:
    """How branches are assigned to ranks.

    Attributes:
        forks: The branches of each fork, in the order of a forward.

        owners: By parameter or buffer, the rank that has it.

        value_functions: Functions that need values on all ranks.

        transfers: What travels.

        element_counts: Number of elements of each parameter and buffer.
    """

    forks: list[list[ModelBranch]]
    owners: dict[str, int]
    value_functions: frozenset[str]
    transfers: tuple[TransferNote, ...]
    element_counts: dict[str, int]


def check_model(strategy: Strategy, model: nn.Module, example: Any, tested: bool) -> None:
    """Check that the model has branches.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.
        tested: Whether the model must run in eval mode too.

    Raises:
        StepFailed: It has too few; the message names the repair.
    """
    inspect_model(strategy, model, example, tested)


def inspect_model(
    strategy: Strategy, model: nn.Module, example: Any, tested: bool = False
) -> BranchPlan:
    """Find the branches of a model, and assign them to ranks.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.
        tested: Whether the model must run in eval mode too.

    Returns:
        The plan.

    Raises:
        StepFailed: The model has too few branches, or cannot run in this way.
    """
    ranks = strategy.size
    refuse_compiled_model(model)
    with (
        preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)),
        explain_model_errors("without gradients"),
    ):
        forks = time_forks(model, example, ranks)
    most = max(map(len, forks), default=1)
    if most < 2:
        raise StepFailed(
            "the model has no branches: everything in it that has parameters needs what came "
            "before; train it with data(n), tensor(n) or pipeline(n)"
        )
    if most < ranks:
        raise StepFailed(
            f"the model has at most {most} parallel branches, and the strategy asks for {ranks} "
            f"ranks; give at most branch({most})"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    owners = assign_branches(forks, ranks)
    value_functions = frozenset[str]()
    for _ in range(ROUNDS):
        training_trial, test_trial = (
            BranchTrial(model, owners, ranks, value_functions) for _ in range(2)
        )
        with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
            training_trial.run_forward(example)
        with (
            preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)),
            contextlib.nullcontext() if tested else contextlib.suppress(StepFailed),
        ):
            test_trial.run_forward(example, tested=True)
        previous = value_functions
        value_functions = frozenset(training_trial.value_functions | test_trial.value_functions)
        if value_functions == previous:
            break
    return BranchPlan(
        forks,
        owners,
        value_functions,
        tuple(training_trial.transfers),
        {name: each.numel() for name, each in tensors},
    )


class BranchTrial:
    """A run of the model on one rank that has all branches, and notes what branches would share.

    It implements what `AxisGroup.decider` needs of ShardingDecider.

    Attributes:
        model: The model.

        owners: By parameter or buffer, the rank that has it.

        value_functions: Functions that need values on all ranks, also those that this run finds.

        group: The ranks.

        transfers: The transfers so far.

        module_stack: Names of the modules that are being called.
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
        """Note a transfer of the module that is being called.

        Args:
            what: The kind of transfer.
            sent: Bytes that a rank sends.
            detail: Text for the summary.
        """
        self.transfers.append(TransferNote(self.module_stack[-1], what, sent, detail))

    def check_meta_call(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> None:
        """Check whether a call also works without values.

        If it does not, all ranks have to make it with values.

        Args:
            func: The function.
            name: Its name.
            args: Its arguments.
            kwargs: Its keyword arguments.
            draws: Whether it draws random numbers inside, so that all ranks must call it.
        """
        if draws:
            self.value_functions.add(name)
        try:
            with torch.no_grad():
                run_on_meta(func, name, args, kwargs)
        # After any error, the function is called with values on all ranks.
        except Exception:
            self.value_functions.add(name)

    def run_forward(self, inputs: Any, tested: bool = False) -> None:
        """Run the model.

        Args:
            inputs: Inputs of some samples.
            tested: Whether it runs in eval mode, without gradients.

        Raises:
            StepFailed: The model cannot run in this way.
        """
        substitutes = {
            id(tensor): SingleRankTensor(tensor, owner, self.group, is_persistent=True)
            for _, _, tensor, owner in _iterate_owned_tensors(self.model, self.owners)
        }
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with (
            substitute_tensors(self.model, substitutes),
            patch_torch_functions(),
            refuse_checkpoints(),
            track_modules(self.model) as self.module_stack,
            explain_model_errors("with some values on one rank only"),
            use_test_mode(self.model, tested),
        ):
            tree_map_only(
                SingleRankTensor, share_value, call_model(self.model, clone_batch(inputs))
            )
        if owned := [
            name
            for name in find_assigned_buffers(self.model, buffers, substitutes)
            if name in self.owners
        ]:
            raise StepFailed(
                f"a forward replaces the buffer {owned[0]}, which is in a branch; change it in "
                "place (self.name.copy_(...)), or train the model with data(n)",
                tensor=owned[0],
            )


@contextlib.contextmanager
def refuse_checkpoints() -> Iterator[None]:
    """Refuse checkpoints, temporarily: only some ranks would recompute a branch's forward."""
    originals = checkpoint.checkpoint, checkpoint._checkpoint_without_reentrant_generator

    def refuse(*_: Any, **__: Any) -> Any:
        raise StepFailed(
            "the model runs parts of its forward again in backward (torch.utils.checkpoint), and "
            "ranks with other branches do not; train it without checkpoints, or with data(n)"
        )

    checkpoint.checkpoint = refuse
    checkpoint._checkpoint_without_reentrant_generator = refuse
    try:
        yield
    finally:
        checkpoint.checkpoint, checkpoint._checkpoint_without_reentrant_generator = originals


def _iterate_owned_tensors(
    model: nn.Module, owners: dict[str, int]
) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    """Yield (module, attribute, tensor, owner) of each tensor that one rank has."""
    owner_by_id = {
        id(each): owners[name]
        for name, each in [*model.named_parameters(), *model.named_buffers()]
        if name in owners
    }
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for attribute, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) in owner_by_id:
                    yield module, attribute, tensor, owner_by_id[id(tensor)]


def describe_layers(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """Describe the forks branch by branch.

    Args:
        strategy: The strategy.
        model: The model.
        inputs: Inputs of some samples.
        samples: Number of these samples.

    Returns:
        Lines of a table.
    """
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
    sent = [
        sum(note.bytes for note in plan.transfers if note.kind == what)
        for what in ("shown", "copied")
    ]
    owned = sum(plan.element_counts[name] for name in plan.owners)
    total = sum(plan.element_counts.values())
    return [
        *align_columns(rows),
        f"{owned / max(total, 1):.1%} of {total:,} numbers are on one rank; sent at merges: "
        f"{sent[0]:,} bytes in a forward, gradients summed before forks: {sent[1]:,} in a "
        f"backward, for {samples} samples",
    ]


def shard_model(
    strategy: Strategy, model: nn.Module, example: Any, axis: World, plan: BranchPlan
) -> ModelShard:
    """Leave the trunk of a model and this rank's branches. Collective over the axis.

    Args:
        strategy: The strategy.
        model: The model, which is changed.
        example: Inputs of some samples.
        axis: The ranks.
        plan: The branches of each rank.

    Returns:
        This rank's shard of the model.
    """
    group = AxisGroup(axis, SplitOptions(value_functions=plan.value_functions))
    other_ids = {
        id(tensor)
        for _, _, tensor, owner in _iterate_owned_tensors(model, plan.owners)
        if owner != axis.rank
    }
    specs = {
        name: ShardSpec(name, tuple(tensor.shape), is_primary=name in plan.owners or axis.rank == 0)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if id(tensor) not in other_ids
    }
    substitutes: dict[int, SingleRankTensor] = {}
    absent_tensors: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for module, attribute, tensor, owner in list(_iterate_owned_tensors(model, plan.owners)):
        is_kept = id(tensor) not in other_ids
        if id(tensor) not in substitutes:
            substitutes[id(tensor)] = SingleRankTensor(
                tensor if is_kept else _make_valueless(tensor), owner, group, is_persistent=True
            )
        module.__dict__[attribute] = substitutes[id(tensor)]
        if not is_kept:
            tensors: dict[str, Any] = (
                module._parameters if attribute in module._parameters else module._buffers
            )
            tensors[attribute] = None
            absent_tensors.append((tensors, attribute, substitutes[id(tensor)].local))
    model.register_forward_hook(
        lambda _, args, out: tree_map_only(SingleRankTensor, share_value, out)
    )
    counts = [
        sum(1 for name, owner in plan.owners.items() if owner == rank) for rank in range(axis.size)
    ]
    substitutes_by_local = {id(each.local): each for each in substitutes.values()}
    return ModelShard(
        model,
        specs,
        choices=(
            (
                "branches",
                " + ".join(map(str, counts)) + " tensors",
                f"{sum(map(len, plan.forks))} branches of {len(plan.forks)} forks, by the time of "
                "their forwards",
            ),
        ),
        contexts=(SplitContext("branch", model, [group], substitutes_by_local, absent_tensors),),
    )


def _make_valueless(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return (
        nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else empty
    )
