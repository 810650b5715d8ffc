"""Sharding of a model's parameters and buffers."""

from __future__ import annotations

from torch import Tensor, nn

from paragrad.engine.layout import ShardSpec
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.sharding.partition import DimPartition
from paragrad.parallel.sharding.sharded_tensor import ShardedTensor
from paragrad.parallel.tensor.sharding_plan import ShardingPlan


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
