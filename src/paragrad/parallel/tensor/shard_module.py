"""What a rank holds of a model that is split, where its modules find that, and what goes around
forwards and backwards.
"""

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
    """Leave this rank's pieces of a model's parameters: (what is held, what its modules find,
    by the ids of that). first: what is whole counts here.
    """
    held = dict[str, ShardSpec]()
    names = {id(tensor): name for name, tensor in reversed(_list_named_tensors(model))}
    pieces: dict[int, tuple[Tensor, ShardedTensor]] = {}
    for name, tensor in _list_named_tensors(model):  # of what other cuts left
        if names[id(tensor)] == name:
            if name not in plan.sharded_tensors:
                held[name] = ShardSpec(name, tuple(tensor.shape), is_primary=counts_whole)
                continue
            dim, cut = plan.build_sharding(name, group)
            local = group.take_piece(tensor.detach(), dim, cut.partition).clone()
            if isinstance(tensor, nn.Parameter):
                local = nn.Parameter(local, requires_grad=tensor.requires_grad)
            pieces[id(tensor)] = local, ShardedTensor(local, {dim: cut}, name)
            held[name] = ShardSpec(
                name,
                tuple(tensor.shape),
                _find_shard_boxes(tensor, dim, cut.partition, group.rank),
                dim,
            )
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for own, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) in pieces:
                    # a forward finds the divided one, in the module's own attributes; who asks
                    # for parameters, the piece
                    tensors[own], module.__dict__[own] = pieces[id(tensor)]
    return held, {id(local): each for local, each in pieces.values()}


def _list_named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _find_shard_boxes(
    tensor: Tensor, dim: int, partition: DimPartition, rank: int
) -> tuple[tuple[slice, ...], ...]:
    before = tuple(slice(0, size) for size in tensor.shape[:dim])
    return tuple((*before, slice(each.start, each.stop)) for each in partition.list_ranges(rank))


class SplitContext:
    """Around passes of a model whose modules find divided tensors where their parameters were.
    pieces: these, by the ids of what ranks hold;  absent: where others hold one (a module's
    parameters or buffers, its name there, what stands for it), for who asks a module for all of
    them.
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
            (module._buffers, own, each)
            for module in model.modules()
            for own, each in module._buffers.items()
        ]

    @contextlib.contextmanager
    def enter_passes(self) -> Iterator[None]:
        for line in self.groups:
            line.sent_bytes = 0
        for tensors, own, local in self.absent_tensors:
            tensors[own] = local
        try:
            with patch_torch_functions(), substitute_named_members(self.substitutes):
                yield
                self._restore_buffers()
        finally:
            for tensors, own, _ in self.absent_tensors:
                tensors[own] = None
            for line in self.groups:
                line.clear_copies()
            self.sent_bytes = sum(line.sent_bytes for line in self.groups)

    def _restore_buffers(self) -> None:
        """What a forward assigned to a buffer is whole on every rank."""
        for tensors, own, before in self.initial_buffers:
            if (now := tensors.get(own)) is before:
                continue
            # changed in place, and assigned to itself; before is None where it is another
            # rank's
            if now is self.substitutes.get(id(before)) or (
                before is None and isinstance(now, SingleRankTensor) and now.is_persistent
            ):
                tensors[own] = before
            else:
                if id(before) in self.substitutes:
                    raise StepFailed(
                        f"a forward makes the buffer {own} anew, of which ranks have pieces, and "
                        f"did not when "
                        "the model was looked at; change it in place (self.name.copy_(...))",
                        tensor=own,
                    )
                tensors[own] = (
                    share_value(now) if isinstance(now, SingleRankTensor) else gather_whole(now)
                )
