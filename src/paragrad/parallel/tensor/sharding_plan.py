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

from paragrad.datasets.loading import call_model, clone_batch
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.jobs.loss import LossModule
from paragrad.parallel.sharding.autograd_collectives import AxisGroup, FakeGroup, SplitOptions
from paragrad.parallel.sharding.partition import (
    Constraint,
    DimBlock,
    DimPartition,
    apply_constraints,
    partition_evenly,
)
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, Sharding

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
    explain_model_errors,
    find_assigned_buffers,
    patch_torch_functions,
    refuse_compiled_model,
    substitute_named_members,
    substitute_tensors,
    use_test_mode,
)
from paragrad.parallel.tensor.input_sharding import InputSharding, shard_inputs
from paragrad.parallel.tracing.cut_points import PLACEHOLDER_LOSS
from paragrad.parallel.tracing.tracer import track_modules

ROUNDS = 12  # of granting wishes
# what travels in a forward; the rest is of backward
FORWARD_TRANSFERS = {"summed", "gathered", "fetched", "statistics"}


@dataclass(frozen=True)
class TransferNote:
    """A message between ranks in a forward (FORWARD) or its backward. at: the module that is
    called;  bytes: of each rank, of the samples that the model was tried with;  detail: of what
    is fetched, how much comes to each rank.
    """

    module: str
    kind: str
    bytes: int
    detail: str = ""


@dataclass(frozen=True)
class ShardingPlan:
    """How parameters and buffers are divided. divided: by serial name, along which dimension,
    and its blocks;  roles: of those that say what they are (outputs, vocabulary);  shapes: of
    all;  notes: what travels, in the order of a forward;  why: what is not divided, and what it
    is used whole by.
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
        return [name for name in self.shapes if name not in self.sharded_tensors]

    def count_elements(self, name: str, rank: int) -> int:
        """How many of a tensor a rank has."""
        shape = self.shapes[name]
        if name not in self.sharded_tensors:
            return prod(shape)
        dim, blocks = self.sharded_tensors[name]
        return prod(shape) // shape[dim] * DimPartition(blocks, self.ranks).compute_length(rank)

    @property
    def total_bytes(self) -> int:
        return sum(note.bytes for note in self.transfers)

    def build_sharding(self, name: str, group: AxisGroup) -> tuple[int, Sharding]:
        dim, blocks = self.sharded_tensors[name]
        return dim, Sharding(DimPartition(blocks, self.ranks), group)


class SourceSharding(NamedTuple):
    """How a parameter is to be divided of which weights are made."""

    dim: int
    blocks: tuple[DimBlock, ...]
    role: str


class ShardingPlanner:
    """One run of a model, in which it is decided what is divided. domain: how its inputs are;
    then parameters are only where it says so.
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
        self.assigned_buffers: list[str] = []  # buffers
        self.roles: dict[str, str] = {}
        self.constraints: list[Constraint] = []
        self.sharded_by_id: dict[int, ShardedTensor] = {}
        for name, tensor in (
            [*model.named_parameters(), *model.named_buffers()] if input_sharding.dense else ()
        ):
            if type(tensor.data) is Tensor and tensor.dim():
                held = ShardedTensor(tensor, {}, name, self)
                self.sharded_by_id[id(tensor)] = held
                if (
                    name in self.source_shardings
                    and (own := self.blocks.get(name, self.source_shardings[name].blocks))
                    is not None
                ):
                    self.roles.update(
                        {name: self.source_shardings[name].role}
                        if self.source_shardings[name].role
                        else {}
                    )
                    self._shard_tensor(
                        held, self.source_shardings[name].dim, DimPartition(own, self.ranks)
                    )

    # ---- what rules ask ----------------------------------------------------------------------
    def decide_sharding(self, tensor: ShardedTensor, dim: int, role: str) -> bool:
        """By the outputs of a layer, or its vocabulary, as nothing says otherwise yet."""
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
        """As a value with which it is used."""
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
        """A weight that is made of parameters is divided in this run, and these are in the next
        one.
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
                same = each.dim() > dim and each.shape[dim] == partition.size
                at = dim if same else list(each.shape).index(partition.size)
                self.source_shardings.setdefault(
                    str(each.serial_name), SourceSharding(at, partition.blocks, role)
                )
        local = self.group.take_piece(tensor.local.detach(), dim, partition).requires_grad_(
            tensor.local.requires_grad
        )
        tensor.__dict__.update(local=local, shardings={dim: Sharding(partition, self.group)})
        return True

    def reconsider_sources(self, partition: DimPartition) -> None:
        """A weight that is made of parameters is divided by its outputs, and its inputs are
        divided by now.
        """
        for block in partition.blocks:
            for name, *_ in block.origins:
                self.source_shardings.pop(name, None)

    def note_whole_use(self, tensor: ShardedTensor, by: str) -> None:
        """A parameter is used as it is."""
        self.whole_reasons.setdefault(str(tensor.serial_name), by)

    def note_gather(self, tensor: ShardedTensor, dim: int) -> None:
        """A divided value is wanted whole."""
        # a parameter, in every step: it had better not be divided
        if tensor.serial_name is not None:
            self.constraints.append(Constraint((tensor.serial_name, 0, tensor.shape[dim])))
        cut = tensor.shardings[dim]
        cut.group.note_transfer("gathered", tensor.local.nbytes)

    def note_transfer(self, what: str, sent: int, detail: str) -> None:
        self.transfers.append(TransferNote(self.module_stack[-1], what, sent, detail))

    # ---- the run -----------------------------------------------------------------------------
    def run_forward(self, inputs: Any, tested: bool = False) -> None:
        refuse_compiled_model(self.model)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with preserve_all_state(LossModule(self.model, PLACEHOLDER_LOSS)):
            with (
                substitute_tensors(self.model, self.sharded_by_id),
                patch_torch_functions(),
                substitute_named_members(self.sharded_by_id),
                track_modules(self.model) as self.module_stack,
                explain_model_errors(
                    "of which every rank has some neurons and sees the shapes of the whole"
                ),
                use_test_mode(self.model, tested),
            ):
                call_model(self.model, shard_inputs(clone_batch(inputs), self.input_groups))
            # what a forward makes anew is not in the pieces that stand for what there was
            self.assigned_buffers = find_assigned_buffers(self.model, buffers, self.sharded_by_id)
            self.whole_reasons |= dict.fromkeys(self.assigned_buffers, "assigned")

    def plan_next_blocks(self) -> dict[str, tuple[DimBlock, ...] | None]:
        """How parameters are to be divided in the next run."""
        found = dict(self.blocks)
        known = {
            **{name: made.blocks for name, made in self.source_shardings.items()},
            **{name: pieces.blocks for name, (_, pieces) in self.chosen_partitions.items()},
            **found,
        }
        for name in {wish.origin[0] for wish in self.constraints} & known.keys():
            own = [wish for wish in self.constraints if wish.origin[0] == name]
            before = known[name]
            found[name] = (
                None if before is None else apply_constraints(before, name, own, self.ranks)
            )
        return found | dict.fromkeys(self.assigned_buffers)


def plan_sharding(
    model: nn.Module,
    example: Any,
    ranks: int,
    input_sharding: InputSharding | None = None,
    pairs: bool = True,
    tested: bool = False,
) -> ShardingPlan:
    """How a model is split over so many ranks: of two ways to go on where plain and divided
    values meet, by which less travels. example: inputs of some samples;  tested: it runs as in
    a test too. Raises StepFailed where the model cannot run so.
    """
    plans = [
        _plan_with_options(
            model, example, ranks, SplitOptions(gathers_mixed=gathers, pairs=pairs), input_sharding
        )
        for gathers in ((False,) if input_sharding else (False, True))
    ]
    plan, again = min(plans, key=lambda each: each[0].total_bytes)
    if tested:
        again().run_forward(example, tested)
    return plan


def _plan_with_options(
    model: nn.Module,
    example: Any,
    ranks: int,
    options: SplitOptions,
    input_sharding: InputSharding | None,
) -> tuple[ShardingPlan, Callable[[], ShardingPlanner]]:
    """(How it is split, another run of it)."""
    blocks: dict[str, tuple[DimBlock, ...] | None] = {}
    made: dict[str, SourceSharding] = {}

    def again() -> ShardingPlanner:
        return ShardingPlanner(model, ranks, blocks, options, made, input_sharding)

    for _ in range(ROUNDS):
        planning = again()
        planning.run_forward(example)
        if (planning.plan_next_blocks(), planning.source_shardings) == (blocks, made):
            break
        blocks = planning.plan_next_blocks()
        made = planning.source_shardings
    # what goes back and forth is on every rank
    else:
        blocks |= dict.fromkeys({*made, *(wish.origin[0] for wish in planning.constraints)})
        made = {}
        planning = again()
        planning.run_forward(example)
    names = {
        name: tuple(each.shape)
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    return ShardingPlan(
        ranks,
        options,
        {name: (dim, pieces.blocks) for name, (dim, pieces) in planning.chosen_partitions.items()},
        planning.roles,
        names,
        tuple(planning.transfers),
        {
            name: why
            for name, why in planning.whole_reasons.items()
            if name not in planning.chosen_partitions
        },
    ), again
