"""The plan of how layers are split, found by running the model.

A layer that is divided by its outputs is a column-parallel layer. A layer that is divided by
its inputs is a row-parallel layer.

The model runs as rank 0 of so many ranks, with a stand-in for the other ranks. At first all
parameters are whole. The first product with a parameter decides how it is divided:

    - with a plain value, the parameter is divided by its outputs (columns)
    - with a sharded value, it is divided by its inputs (rows), and the results are summed;
      without the option `pairs`, the value is gathered, and outputs are divided again
    - what is used with a sharded value (a bias, a norm's statistics) is divided like it

An operation may be impossible with the pieces as they are: a head would be split, or a fused
query-key-value layer is one block. Then it requests other blocks, and the model runs again, until
there are no more requests.

A small last layer stays whole if less is transferred then. If it is divided by its outputs, the
ranks sum the gradient of its input, and they exchange numbers for the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from paragrad.datasets.loading import clone_batch
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, call_model
from paragrad.parallel.sharding.autograd_collectives import AxisGroup, FakeGroup, SplitOptions
from paragrad.parallel.sharding.partition import (
    Constraint,
    DimBlock,
    DimPartition,
    apply_constraints,
    partition_evenly,
)
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, Sharding

# the import of a module of rules registers them
from paragrad.parallel.tensor import (  # noqa: F401
    cast_rules,
    class_rules,
    convolution_rules,
    einsum_rules,
    norm_rules,
    reduction_rules,
    shape_rules,
    window_rules,
)
from paragrad.parallel.tensor.input_sharding import InputSharding, shard_inputs
from paragrad.parallel.tensor.split_context import (
    explain_model_errors,
    find_assigned_buffers,
    patch_torch_functions,
    refuse_compiled_model,
    substitute_named_members,
    substitute_tensors,
    use_test_mode,
)
from paragrad.parallel.tracing.cut_points import PLACEHOLDER_LOSS
from paragrad.parallel.tracing.tracer import find_tensors, track_modules

ROUNDS = 12  # runs of the model at most
# A last layer stays whole only if it has at most so many outputs: with more, the products that
# every rank then computes take longer than the transfers.
MOST_WHOLE_OUTPUTS = 64
# the share by which the divided elements of a rank may grow for it
MOST_GROWTH = 1 / 32
# transfers of a forward; all others belong to the backward
FORWARD_TRANSFERS = {"summed", "gathered", "fetched", "statistics"}


@dataclass(frozen=True)
class TransferNote:
    """A transfer between ranks, in a forward or its backward.

    Attributes:
        module: Name of the module that is called.

        kind: Such as "gathered"; FORWARD_TRANSFERS lists those of a forward.

        bytes: Bytes that each rank sends, for the samples with which the model was tried.

        detail: For halos, how many elements each rank fetches.
    """

    module: str
    kind: str
    bytes: int
    detail: str = ""


@dataclass(frozen=True)
class ShardingPlan:
    """How parameters and buffers are divided.

    Attributes:
        ranks: Number of ranks.

        options: How layers are split.

        sharded_tensors: By serial name, the divided dimension and its blocks.

        roles: What the divided dimension is, where it is known ("outputs", "vocabulary").

        shapes: The shapes of all parameters and buffers.

        transfers: What travels, in the order of a forward.

        whole_reasons: For tensors that are not divided, the operation that uses them whole, or
            another reason.
    """

    ranks: int
    options: SplitOptions
    sharded_tensors: Mapping[str, tuple[int, tuple[DimBlock, ...]]]
    roles: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    transfers: tuple[TransferNote, ...]
    whole_reasons: Mapping[str, str]

    @property
    def whole_names(self) -> list[str]:
        """Names of the tensors that are not divided."""
        return [name for name in self.shapes if name not in self.sharded_tensors]

    def count_elements(self, name: str, rank: int) -> int:
        """Count the elements of a tensor that a rank holds."""
        shape = self.shapes[name]
        if name not in self.sharded_tensors:
            return prod(shape)
        dim, blocks = self.sharded_tensors[name]
        return prod(shape) // shape[dim] * DimPartition(blocks, self.ranks).compute_length(rank)

    @property
    def total_bytes(self) -> int:
        """Bytes of all transfers."""
        return sum(note.bytes for note in self.transfers)

    def build_sharding(self, name: str, group: AxisGroup) -> tuple[int, Sharding]:
        """Return (dimension, sharding) of a divided tensor, for the ranks of a group."""
        dim, blocks = self.sharded_tensors[name]
        return dim, Sharding(DimPartition(blocks, self.ranks), group)


class SourceSharding(NamedTuple):
    """How a parameter from which weights are computed is to be divided.

    Attributes:
        dim: The divided dimension.
        blocks: Its blocks.
        role: What the dimension is, or "".
    """

    dim: int
    blocks: tuple[DimBlock, ...]
    role: str


class ShardingPlanner:
    """One run of a model that decides what is divided. It implements ShardingDecider.

    Attributes:
        model: The model.

        ranks: Number of ranks.

        blocks: Blocks that earlier runs found, by parameter; None: not to be divided.

        source_shardings: How parameters are divided from which weights are computed.

        group: The ranks over which parameters are divided.

        input_groups: The ranks of each divided dimension of the inputs.

        chosen_partitions: (dimension, partition) of each parameter that is divided.

        transfers: The transfers so far.

        whole_reasons: The operations that use parameters whole.

        assigned_buffers: Buffers to which the forward assigned other tensors.

        roles: What divided dimensions are.

        constraints: Requested changes, for the next run.

        sharded_by_id: What stands for parameters and buffers, by their ids.

        module_stack: Names of the modules that are being called.

        output_sources: Names of the parameters whose sharding the output of the model has.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        blocks: Mapping[str, tuple[DimBlock, ...] | None],
        options: SplitOptions,
        source_shardings: Mapping[str, SourceSharding] | None = None,
        input_sharding: InputSharding | None = None,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.blocks = blocks
        self.source_shardings = dict(source_shardings or {})
        self.group = AxisGroup(FakeGroup(ranks), options, self)  # type: ignore[arg-type]
        input_sharding = input_sharding or InputSharding({}, dense=True)
        options = options._replace(dense=input_sharding.dense)
        self.input_groups = {
            dim: AxisGroup(
                FakeGroup(each.ranks),  # type: ignore[arg-type]
                options._replace(data_dim=each.name),
                self,  # type: ignore[arg-type]
            )
            for dim, each in input_sharding.dims.items()
        }
        if input_sharding.dims and input_sharding.dense:
            (self.group,) = self.input_groups.values()
        self.chosen_partitions: dict[str, tuple[int, DimPartition]] = {}
        self.transfers: list[TransferNote] = []
        self.whole_reasons: dict[str, str] = {}
        self.assigned_buffers: list[str] = []
        self.roles: dict[str, str] = {}
        self.constraints: list[Constraint] = []
        self.sharded_by_id: dict[int, ShardedTensor] = {}
        self.output_sources: set[str] = set()
        for name, tensor in (
            [*model.named_parameters(), *model.named_buffers()] if input_sharding.dense else ()
        ):
            if type(tensor.data) is Tensor and tensor.dim():
                sharded = ShardedTensor(tensor, {}, name, self)
                self.sharded_by_id[id(tensor)] = sharded
                if (
                    name in self.source_shardings
                    and (
                        blocks_of_tensor := self.blocks.get(
                            name, self.source_shardings[name].blocks
                        )
                    )
                    is not None
                ):
                    self.roles.update(
                        {name: self.source_shardings[name].role}
                        if self.source_shardings[name].role
                        else {}
                    )
                    self._shard_tensor(
                        sharded,
                        self.source_shardings[name].dim,
                        DimPartition(blocks_of_tensor, self.ranks),
                    )

    # ---- interface for rules -----------------------------------------------------------------
    def decide_sharding(self, tensor: ShardedTensor, dim: int, role: str) -> bool:
        """Shard a tensor by the outputs of a layer or by the vocabulary, if nothing contradicts.

        Args:
            tensor: The tensor, which is changed.
            dim: The dimension to divide.
            role: What the dimension is.

        Returns:
            Whether the tensor is sharded now.
        """
        size = tensor.shape[dim]
        name = tensor.serial_name or next(
            (str(each.serial_name) for each in tensor.sources if size in each.shape), ""
        )
        blocks = self.blocks.get(name, partition_evenly(size, self.ranks, name).blocks)
        if size < self.ranks or blocks is None or sum(block.size for block in blocks) != size:
            return False
        if tensor.serial_name is not None:
            self.roles[tensor.serial_name] = role
        return self._shard_tensor(tensor, dim, DimPartition(blocks, self.ranks), role)

    def follow_sharding(self, tensor: ShardedTensor, dim: int, sharding: Sharding) -> bool:
        """Shard a tensor like a value with which it is used.

        Args:
            tensor: The tensor, which is changed.
            dim: Its dimension that matches the divided one.
            sharding: The sharding of the value.

        Returns:
            Whether the tensor is sharded now.
        """
        if (
            (tensor.serial_name and self.blocks.get(tensor.serial_name, ()) is None)
            or tensor.shardings
            or any(sharding.partition.compute_length(rank) == 0 for rank in range(self.ranks))
        ):
            return False
        return self._shard_tensor(tensor, dim, sharding.partition)

    def _shard_tensor(
        self, tensor: ShardedTensor, dim: int, partition: DimPartition, role: str = ""
    ) -> bool:
        """Shard a tensor.

        A weight that is computed from parameters is sharded in this run; the parameters are sharded
        in the next one.
        """
        if tensor.serial_name is not None:
            self.chosen_partitions[tensor.serial_name] = dim, partition
        elif not (
            sources := [
                each
                for each in tensor.sources
                if partition.size in each.shape
                and self.blocks.get(str(each.serial_name), ()) is not None
            ]
        ):
            return False
        else:
            for each in sources:
                same_dim = each.dim() > dim and each.shape[dim] == partition.size
                source_dim = dim if same_dim else list(each.shape).index(partition.size)
                self.source_shardings.setdefault(
                    str(each.serial_name), SourceSharding(source_dim, partition.blocks, role)
                )
        local = self.group.take_piece(tensor.local.detach(), dim, partition).requires_grad_(
            tensor.local.requires_grad
        )
        tensor.__dict__.update(local=local, shardings={dim: Sharding(partition, self.group)})
        return True

    def reconsider_sources(self, partition: DimPartition) -> None:
        """Withdraw the sharding of parameters from which a weight is computed.

        The weight was divided by its outputs, and its inputs are divided now.

        Args:
            partition: How the weight's outputs are divided.
        """
        for block in partition.blocks:
            for name, *_ in block.origins:
                self.source_shardings.pop(name, None)

    def note_whole_use(self, tensor: ShardedTensor, by: str) -> None:
        """Note that an operation uses a parameter whole.

        Args:
            tensor: The parameter.
            by: Name of the operation.
        """
        self.whole_reasons.setdefault(str(tensor.serial_name), by)

    def note_gather(self, tensor: ShardedTensor, dim: int) -> None:
        """Note that a sharded value is gathered.

        Args:
            tensor: The value.
            dim: The dimension that is gathered.
        """
        # A parameter would be gathered in every step, so it should not be divided.
        if tensor.serial_name is not None:
            self.constraints.append(Constraint((tensor.serial_name, 0, tensor.shape[dim])))
        sharding = tensor.shardings[dim]
        sharding.group.note_transfer("gathered", tensor.local.nbytes)

    def note_transfer(self, what: str, sent: int, detail: str) -> None:
        """Note a transfer of the module that is being called.

        Args:
            what: The kind of transfer.
            sent: Bytes that a rank sends.
            detail: Text for the summary.
        """
        self.transfers.append(TransferNote(self.module_stack[-1], what, sent, detail))

    # ---- the run -----------------------------------------------------------------------------
    def run_forward(self, inputs: Any, tested: bool = False) -> None:
        """Run the model.

        Args:
            inputs: Inputs of some samples.
            tested: Whether it runs in eval mode, without gradients.
        """
        refuse_compiled_model(self.model)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with preserve_all_state(LossModule(self.model, PLACEHOLDER_LOSS)):
            with (
                substitute_tensors(self.model, self.sharded_by_id),
                patch_torch_functions(),
                substitute_named_members(self.sharded_by_id),
                track_modules(self.model) as self.module_stack,
                explain_model_errors(
                    "with some neurons on each rank and the shapes of the whole model"
                ),
                use_test_mode(self.model, tested),
            ):
                output = call_model(
                    self.model, shard_inputs(clone_batch(inputs), self.input_groups)
                )
                self.output_sources = _list_sources(output)
            # an assigned buffer is not among the pieces that replace the old one
            self.assigned_buffers = find_assigned_buffers(self.model, buffers, self.sharded_by_id)
            self.whole_reasons |= dict.fromkeys(self.assigned_buffers, "assigned")

    def plan_next_blocks(self) -> dict[str, tuple[DimBlock, ...] | None]:
        """Return how parameters are to be divided in the next run."""
        next_blocks = dict(self.blocks)
        known_blocks = {
            **{name: source.blocks for name, source in self.source_shardings.items()},
            **{name: partition.blocks for name, (_, partition) in self.chosen_partitions.items()},
            **next_blocks,
        }
        for name in {constraint.origin[0] for constraint in self.constraints} & known_blocks.keys():
            requests = [
                constraint for constraint in self.constraints if constraint.origin[0] == name
            ]
            current = known_blocks[name]
            next_blocks[name] = (
                None if current is None else apply_constraints(current, name, requests, self.ranks)
            )
        return next_blocks | dict.fromkeys(self.assigned_buffers)


def plan_sharding(
    model: nn.Module,
    example: Any,
    ranks: int,
    input_sharding: InputSharding | None = None,
    pairs: bool = True,
    tested: bool = False,
) -> ShardingPlan:
    """Plan how a model is split.

    There are two ways to continue where plain and sharded values meet; the plan takes the one with
    fewer transferred bytes. A small last layer may then stay whole.

    Args:
        model: The model.

        example: Inputs of some samples.

        ranks: Number of ranks.

        input_sharding: How the inputs are divided; None: they are not.

        pairs: As in SplitOptions.

        tested: Whether the model must run in eval mode too.

    Returns:
        The plan.

    Raises:
        StepFailed: The model cannot run in this way.
    """
    ways = [
        SplitOptions(gathers_mixed=gathers, pairs=pairs)
        for gathers in ((False,) if input_sharding else (False, True))
    ]
    plans = [_plan_with_options(model, example, ranks, way, input_sharding) for way in ways]
    best = min(plans, key=lambda each: each.plan.total_bytes)
    if pairs and not input_sharding and (head := _list_head_tensors(best)):
        with suppress(StepFailed):
            without = _plan_with_options(
                model, example, ranks, best.plan.options, input_sharding, whole=head
            )
            best = without if _is_better_whole(best.plan, without.plan) else best
    if tested:
        best.make_planner().run_forward(example, tested)
    return best.plan


class PlannedRun(NamedTuple):
    """A plan, and the run of the model that found it.

    Attributes:
        plan: The plan.
        make_planner: Makes another run.
        output_sources: As in `ShardingPlanner`.
    """

    plan: ShardingPlan
    make_planner: Callable[[], ShardingPlanner]
    output_sources: set[str]


def _list_sources(output: Any) -> set[str]:
    """List the parameters whose sharding the output of a model has."""
    return {
        name
        for each in find_tensors(output)
        if isinstance(each, ShardedTensor)
        for sharding in each.shardings.values()
        for block in sharding.partition.blocks
        for name, *_ in block.origins
    }


def _list_head_tensors(run: PlannedRun) -> set[str]:
    """List the parameters that divide the output of a model, if it has few outputs.

    A vocabulary is no such layer.
    """
    plan = run.plan
    head = run.output_sources & plan.sharded_tensors.keys()
    sizes = [plan.shapes[name][plan.sharded_tensors[name][0]] for name in head]
    is_small = all(size <= MOST_WHOLE_OUTPUTS for size in sizes)
    has_vocabulary = any(plan.roles.get(name) == "vocabulary" for name in head)
    return head if is_small and not has_vocabulary else set()


def _is_better_whole(plan: ShardingPlan, whole: ShardingPlan) -> bool:
    """Return whether to take the plan in which the last layer is whole.

    It must divide something else, transfer less, and leave little more on a rank.
    """
    growth = sum(
        whole.count_elements(name, 0) - plan.count_elements(name, 0) for name in plan.shapes
    )
    divided = sum(plan.count_elements(name, 0) for name in plan.sharded_tensors)
    return (
        bool(whole.sharded_tensors)
        and whole.total_bytes < plan.total_bytes
        and growth <= MOST_GROWTH * divided
    )


def _plan_with_options(
    model: nn.Module,
    example: Any,
    ranks: int,
    options: SplitOptions,
    input_sharding: InputSharding | None,
    whole: Collection[str] = (),
) -> PlannedRun:
    """Plan with given options; the parameters of some names stay whole."""
    blocks: dict[str, tuple[DimBlock, ...] | None] = dict.fromkeys(whole)
    source_shardings: dict[str, SourceSharding] = {}

    def make_planner() -> ShardingPlanner:
        return ShardingPlanner(model, ranks, blocks, options, source_shardings, input_sharding)

    for _ in range(ROUNDS):
        planning = make_planner()
        planning.run_forward(example)
        if (planning.plan_next_blocks(), planning.source_shardings) == (blocks, source_shardings):
            break
        blocks = planning.plan_next_blocks()
        source_shardings = planning.source_shardings
    # parameters that are still changed after all rounds stay whole
    else:
        blocks |= dict.fromkeys(
            {*source_shardings, *(constraint.origin[0] for constraint in planning.constraints)}
        )
        source_shardings = {}
        planning = make_planner()
        planning.run_forward(example)
    shapes = {
        name: tuple(each.shape)
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    plan = ShardingPlan(
        ranks,
        options,
        {
            name: (dim, partition.blocks)
            for name, (dim, partition) in planning.chosen_partitions.items()
        },
        planning.roles,
        shapes,
        tuple(planning.transfers),
        {
            name: reason
            for name, reason in {
                **planning.whole_reasons,
                **dict.fromkeys(whole, "a small last layer"),
            }.items()
            if name not in planning.chosen_partitions
        },
    )
    return PlannedRun(plan, make_planner, planning.output_sources)
