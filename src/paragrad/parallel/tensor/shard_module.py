"""Sharding of a model's parameters, and the context in which the sharded model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paragrad.engine.layout import ShardSpec
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.sharding.partition import DimPartition
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor, gather_whole
from paragrad.parallel.tensor.function_patches import (
    patch_torch_functions,
    substitute_named_members,
)
from paragrad.parallel.tensor.sharding_plan import ShardingPlan
from paragrad.parallel.tensor.single_rank_tensor import SingleRankTensor, share_value


def shard_module_tensors(
    model: nn.Module, plan: ShardingPlan, group: AxisGroup, counts_whole: bool
) -> tuple[dict[str, ShardSpec], dict[int, ShardedTensor]]:
    """Replace a model's parameters and buffers by this rank's pieces.

    Args:
        model: The model, which is changed.
        plan: How its parameters are divided.
        group: The ranks.
        counts_whole: Whether whole tensors count on this rank (`ShardSpec.is_primary`).

    Returns:
        (specs of this rank's tensors by name, sharded tensors by the ids of their local parts).
    """
    specs = dict[str, ShardSpec]()
    names = {id(tensor): name for name, tensor in reversed(_list_named_tensors(model))}
    replacements: dict[int, tuple[Tensor, ShardedTensor]] = {}
    # other strategies may have divided the model before
    for name, tensor in _list_named_tensors(model):
        if names[id(tensor)] == name:
            if name not in plan.sharded_tensors:
                specs[name] = ShardSpec(name, tuple(tensor.shape), is_primary=counts_whole)
                continue
            dim, sharding = plan.build_sharding(name, group)
            local = group.take_piece(tensor.detach(), dim, sharding.partition).clone()
            if isinstance(tensor, nn.Parameter):
                local = nn.Parameter(local, requires_grad=tensor.requires_grad)
            replacements[id(tensor)] = local, ShardedTensor(local, {dim: sharding}, name)
            specs[name] = ShardSpec(
                name,
                tuple(tensor.shape),
                _find_shard_boxes(tensor, dim, sharding.partition, group.rank),
                dim,
            )
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for attribute, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) in replacements:
                    # A forward finds the sharded tensor in the module's own attributes;
                    # parameters() lists the local piece.
                    tensors[attribute], module.__dict__[attribute] = replacements[id(tensor)]
    return specs, {id(local): sharded for local, sharded in replacements.values()}


def _list_named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _find_shard_boxes(
    tensor: Tensor, dim: int, partition: DimPartition, rank: int
) -> tuple[tuple[slice, ...], ...]:
    leading = tuple(slice(0, size) for size in tensor.shape[:dim])
    return tuple((*leading, slice(each.start, each.stop)) for each in partition.list_ranges(rank))


class SplitContext:
    """The context of passes of a model with sharded tensors.

    Attributes:
        name: Name of the strategy, for the record.

        groups: The axis groups.

        substitutes: The sharded tensors, by the ids of what this rank holds.

        absent_tensors: Tensors of other ranks: (dict of a module's parameters or buffers, name in
            it, substitute). During passes, a module lists the substitute.

        sent_bytes: Bytes that this rank sent in the last passes.

        initial_buffers: All buffers before a forward: (dict of buffers, name in it, buffer).
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        groups: Sequence[AxisGroup],
        substitutes: Mapping[int, Tensor],
        absent_tensors: Sequence[tuple[dict[str, Any], str, Tensor]] = (),
    ) -> None:
        self.name = name
        self.groups = groups
        self.substitutes = substitutes
        self.absent_tensors = absent_tensors
        self.sent_bytes = 0
        self.initial_buffers = [
            (module._buffers, attribute, each)
            for module in model.modules()
            for attribute, each in module._buffers.items()
        ]

    @contextlib.contextmanager
    def enter_passes(self) -> Iterator[None]:
        """Enter the context of the forwards and backwards of a step, or of a test."""
        for group in self.groups:
            group.sent_bytes = 0
        for tensors, attribute, local in self.absent_tensors:
            tensors[attribute] = local
        try:
            with patch_torch_functions(), substitute_named_members(self.substitutes):
                yield
                self._restore_buffers()
        finally:
            for tensors, attribute, _ in self.absent_tensors:
                tensors[attribute] = None
            for group in self.groups:
                group.clear_copies()
            self.sent_bytes = sum(group.sent_bytes for group in self.groups)

    def _restore_buffers(self) -> None:
        """Make buffers whole, on every rank, to which a forward assigned something."""
        for tensors, name, initial in self.initial_buffers:
            if (current := tensors.get(name)) is initial:
                continue
            # The buffer was changed in place and assigned to itself. `initial` is None if it is on
            # another rank.
            if current is self.substitutes.get(id(initial)) or (
                initial is None and isinstance(current, SingleRankTensor) and current.is_persistent
            ):
                tensors[name] = initial
            else:
                if id(initial) in self.substitutes:
                    raise StepFailed(
                        f"a forward makes the buffer {name} anew, of which ranks have pieces, and "
                        "did not when the model was looked at; change it in place "
                        "(self.name.copy_(...))",
                        tensor=name,
                    )
                tensors[name] = (
                    share_value(current)
                    if isinstance(current, SingleRankTensor)
                    else gather_whole(current)
                )
