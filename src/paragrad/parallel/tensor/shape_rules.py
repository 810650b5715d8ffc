"""Rules for functions that move elements: reshaping, permuting, slicing, concatenating.

`partition.py` computes what they do to partitions of dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from paragrad.parallel.sharding.partition import (
    DimBlock,
    DimPartition,
    constrain_block_ends,
    partition_evenly,
    reshape_partition,
)
from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    ShardedTensor,
    Sharding,
    register_rule,
    slice_local,
    wrap_local,
)
from paragrad.parallel.tensor.einsum_rules import Operand, apply_einsum_rule


def _unpack_sizes(given: Sequence[Any]) -> list[int]:
    """Return the sizes of arguments such as (2, 3) or ((2, 3),)."""
    return list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)


def _move_shardings(x: ShardedTensor, local: Tensor, new_dims: Mapping[int, int]) -> Tensor:
    """Wrap the local result of a function that moves each dimension to a new one."""
    return wrap_local(local, {new_dims[dim]: sharding for dim, sharding in x.shardings.items()})


# ---- views -----------------------------------------------------------------------------------
def reshape_sharded(x: ShardedTensor, sizes: Sequence[int]) -> Any:
    """Reshape a tensor to sizes of which none is -1."""
    local_sizes = list(sizes)
    shardings = dict[int, Sharding]()
    for dim, sharding in x.shardings.items():
        result = reshape_partition(x.shape, sizes, dim, sharding.partition)
        if isinstance(result, list):
            sharding.group.add_constraints(result)
            return NO_RULE
        new_dim, partition = result
        if new_dim in shardings:
            return NO_RULE
        shardings[new_dim] = Sharding(partition, sharding.group)
        local_sizes[new_dim] = partition.compute_length(sharding.group.rank)
    return wrap_local(x.local.reshape(local_sizes), shardings)


@register_rule("view", "reshape")
def apply_view(func: Any, x: ShardedTensor, *shape: Any, **kwargs: Any) -> Any:
    """Apply a view or a reshape."""
    if kwargs or not shape or isinstance(shape[0], torch.dtype):
        return NO_RULE
    sizes = _unpack_sizes(shape)
    if -1 in sizes:
        other_elements = prod(size for size in sizes if size != -1)
        sizes = [
            x.numel() // other_elements if size == -1 and other_elements else size for size in sizes
        ]
    return reshape_sharded(x, sizes) if prod(sizes) == x.numel() else NO_RULE


@register_rule("view_as", "reshape_as")
def apply_view_as(func: Any, x: Tensor, other: Tensor) -> Any:
    """Apply a reshape to the shape of another tensor."""
    return x.reshape(other.shape)


@register_rule("flatten")
def apply_flatten(func: Any, x: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten some dimensions."""
    start = start_dim % x.dim()
    end = end_dim % x.dim()
    return reshape_sharded(
        x, [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]]
    )


@register_rule("unflatten")
def apply_unflatten(func: Any, x: ShardedTensor, dim: int, sizes: Any) -> Any:
    """Unflatten a dimension."""
    dim = dim % x.dim()
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = -x.shape[dim] // prod(sizes)
    return reshape_sharded(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@register_rule("squeeze")
def apply_squeeze(func: Any, x: ShardedTensor, dim: Any = None) -> Any:
    """Remove dimensions of size 1."""
    dims = {
        each % x.dim()
        for each in (range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim)
    }
    kept_dims = [at for at in range(x.dim()) if at not in dims or x.shape[at] != 1]
    return _move_shardings(
        x,
        x.local.squeeze(tuple(set(range(x.dim())) - set(kept_dims))),
        {at: new for new, at in enumerate(kept_dims)},
    )


@register_rule("unsqueeze")
def apply_unsqueeze(func: Any, x: ShardedTensor, dim: int) -> Any:
    """Insert a dimension of size 1."""
    dim %= x.dim() + 1
    return _move_shardings(
        x, x.local.unsqueeze(dim), {at: at + (at >= dim) for at in range(x.dim())}
    )


@register_rule("permute")
def apply_permute(func: Any, x: ShardedTensor, *dims: Any, **kwargs: Any) -> Any:
    """Permute the dimensions."""
    order = [dim % x.dim() for dim in (kwargs["dims"] if "dims" in kwargs else _unpack_sizes(dims))]
    return _move_shardings(x, x.local.permute(order), {old: new for new, old in enumerate(order)})


@register_rule(
    "transpose", "swapaxes", "swapdims", "t", "T", "mT", "H", "mH", "adjoint", "movedim", "moveaxis"
)
def apply_transpose(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a kind of transpose; a small tensor shows where the dimensions go."""
    probe = torch.empty(tuple(range(2, 2 + x.dim())))
    old_dims = [size - 2 for size in func(probe, *args, **kwargs).shape]
    return _move_shardings(
        x, func(x.local, *args, **kwargs), {old: new for new, old in enumerate(old_dims)}
    )


@register_rule("expand", "broadcast_to")
def apply_expand(func: Any, x: ShardedTensor, *sizes: Any) -> Any:
    """Expand dimensions of size 1."""
    local_sizes = _unpack_sizes(sizes)
    new_dims = len(local_sizes) - x.dim()
    for dim, sharding in x.shardings.items():
        local_sizes[dim + new_dims] = sharding.partition.compute_length(sharding.group.rank)
    return _move_shardings(
        x, x.local.expand(local_sizes), {dim: dim + new_dims for dim in x.shardings}
    )


@register_rule("expand_as")
def apply_expand_as(func: Any, x: Tensor, other: Tensor) -> Any:
    """Expand to the shape of another tensor."""
    return x.expand(other.shape)


@register_rule("broadcast_tensors")
def apply_broadcast_tensors(func: Any, *tensors: Any) -> Any:
    """Expand tensors to their common shape."""
    tensor_list = (
        tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    )
    shape = torch.broadcast_shapes(*(each.shape for each in tensor_list))
    return tuple(each if each.shape == shape else each.expand(shape) for each in tensor_list)


@register_rule("repeat", "tile")
def apply_repeat(func: Any, x: ShardedTensor, *times: Any) -> Any:
    """Repeat a tensor along its dimensions."""
    counts = _unpack_sizes(times)
    counts = [1] * (x.dim() - len(counts)) + counts
    new_dims = len(counts) - x.dim()
    return wrap_local(
        x.local.repeat(counts),
        {
            dim + new_dims: Sharding(
                sharding.partition.repeat_blocks(counts[dim + new_dims]), sharding.group
            )
            for dim, sharding in x.shardings.items()
        },
    )


@register_rule("repeat_interleave")
def apply_repeat_interleave(
    func: Any, x: ShardedTensor, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Any:
    """Repeat each element along a dimension."""
    if dim is None or not isinstance(repeats, int):
        return NO_RULE
    dim %= x.dim()
    return wrap_local(
        x.local.repeat_interleave(repeats, dim),
        {
            at: Sharding(sharding.partition.scale_elements(repeats), sharding.group)
            if at == dim
            else sharding
            for at, sharding in x.shardings.items()
        },
    )


# ---- slices ----------------------------------------------------------------------------------
def slice_along_dim(x: ShardedTensor, dim: int, ends: Sequence[int]) -> list[Tensor] | None:
    """Slice a tensor along a dimension.

    Args:
        x: The tensor.
        dim: The dimension.
        ends: Borders of the slices; each slice reaches from one to the next.

    Returns:
        The slices. None, after a request for other blocks, if a slice begins or ends inside a
        block.
    """
    if dim not in x.shardings:
        return [
            wrap_local(each, x.shardings)
            for each in x.local.split([b - a for a, b in itertools.pairwise(ends)], dim)
        ]
    sharding = x.shardings[dim]
    block_ranges = [
        sharding.partition.find_blocks(start, stop) for start, stop in itertools.pairwise(ends)
    ]
    offsets = list(
        itertools.accumulate(sharding.partition.list_lengths(sharding.group.rank), initial=0)
    )
    slices = []
    for each in block_ranges:
        if each is None:
            sharding.group.add_constraints(constrain_block_ends(sharding.partition, ends))
            return None
        local = x.local.narrow(dim, offsets[each[0]], offsets[each[1]] - offsets[each[0]])
        slices.append(
            wrap_local(
                local,
                {
                    **x.shardings,
                    dim: Sharding(sharding.partition.select_blocks(*each), sharding.group),
                },
            )
        )
    return slices


def _constrain_each_element(x: ShardedTensor, dim: int) -> None:
    """Request that each element of a dimension is a block of its own.

    Such a dimension separates queries, keys and values.
    """
    x.shardings[dim].group.add_constraints(
        constrain_block_ends(x.shardings[dim].partition, range(1, x.shape[dim]))
    )


def _return_slices(slices: list[Tensor] | None) -> Any:
    """Return the result of a rule that slices."""
    return NO_RULE if slices is None else tuple(slices)


@register_rule("split", "split_with_sizes")
def apply_split(func: Any, x: ShardedTensor, sizes: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """Split a tensor along a dimension."""
    split_sizes = next(
        (
            kwargs[name]
            for name in ("split_size", "split_sizes", "split_size_or_sections")
            if name in kwargs
        ),
        sizes,
    )
    dim %= x.dim()
    size = x.shape[dim]
    ends = (
        [*range(0, size, split_sizes), size]
        if isinstance(split_sizes, int)
        else list(itertools.accumulate(split_sizes, initial=0))
    )
    return _return_slices(slice_along_dim(x, dim, ends)) if ends[-1] == size else NO_RULE


@register_rule("chunk")
def apply_chunk(func: Any, x: ShardedTensor, chunks: int, dim: int = 0) -> Any:
    """Split a tensor into chunks."""
    dim %= x.dim()
    return apply_split(func, x, -(-x.shape[dim] // chunks), dim)


@register_rule("narrow")
def apply_narrow(func: Any, x: ShardedTensor, dim: int, start: Any, length: int) -> Any:
    """Take a range along a dimension."""
    dim = dim % x.dim()
    start = int(start)
    start += x.shape[dim] if start < 0 else 0
    return x[(slice(None),) * dim + (slice(start, start + length),)]


@register_rule("select")
def apply_select(func: Any, x: ShardedTensor, dim: int, index: int) -> Any:
    """Take one element along a dimension."""
    return x[(slice(None),) * (dim % x.dim()) + (index,)]


@register_rule("unbind")
def apply_unbind(func: Any, x: ShardedTensor, dim: int = 0) -> Any:
    """Take all elements along a dimension."""
    dim %= x.dim()
    if dim in x.shardings:
        _constrain_each_element(x, dim)
        return NO_RULE
    new_dims = {at: at - (at > dim) for at in x.shardings}
    return tuple(_move_shardings(x, each, new_dims) for each in x.local.unbind(dim))


@register_rule("__getitem__")
def apply_getitem(func: Any, x: ShardedTensor, index: Any) -> Any:
    """Index a tensor; divided dimensions are taken whole or in blocks."""
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [each for each in items if isinstance(each, Tensor)]
    if any(
        (not isinstance(each, (int, slice, Tensor)) and each is not None and each is not Ellipsis)
        or isinstance(each, bool)
        for each in items
    ) or any(isinstance(each, ShardedTensor) or each.dtype == torch.bool for each in tensors):
        return NO_RULE
    used_dims = sum(each is not None and each is not Ellipsis for each in items)
    if Ellipsis not in [each for each in items if not isinstance(each, Tensor)]:
        items.append(Ellipsis)
    at = next(at for at, each in enumerate(items) if each is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.dim() - used_dims)
    tensor_positions = [at for at, each in enumerate(items) if isinstance(each, Tensor)]
    if tensor_positions and (
        tensor_positions != list(range(tensor_positions[0], tensor_positions[-1] + 1))
        or any(isinstance(each, int) for each in items)
    ):
        return NO_RULE
    index_dims = max((each.dim() for each in tensors), default=0)
    return _index_sharded(x, items, index_dims)


def _index_sharded(x: ShardedTensor, items: list[Any], index_dims: int) -> Any:
    """Index a tensor by one item for each dimension.

    Dimensions with index tensors are replaced by `index_dims` dimensions.
    """
    old_dim = 0
    new_dim = 0
    has_index = False
    new_dims = dict[int, int]()
    local_items = list[Any]()
    for item in items:
        if item is None:
            local_items = [*local_items, None]
            new_dim = new_dim + 1
            continue
        if isinstance(item, Tensor):
            if old_dim in x.shardings:
                return NO_RULE
            new_dim = new_dim + (0 if has_index else index_dims)
            has_index = True
        elif old_dim in x.shardings:
            start, stop, step = (
                item.indices(x.shape[old_dim]) if isinstance(item, slice) else (item, item + 1, 1)
            )
            if not isinstance(item, slice) or step != 1:
                _constrain_each_element(x, old_dim)
                return NO_RULE
            if stop <= start:
                return NO_RULE
            if (start, stop) != (0, x.shape[old_dim]):
                slices = slice_along_dim(
                    x, old_dim, sorted({0, start, max(start, stop), x.shape[old_dim]})
                )
                return (
                    NO_RULE
                    if slices is None
                    else slices[1 if start else 0][
                        tuple(
                            slice(None) if at == len(local_items) else each
                            for at, each in enumerate(items)
                        )
                    ]
                )
            new_dims[old_dim] = new_dim
            item = slice(None)
            new_dim = new_dim + 1
        else:
            new_dim += isinstance(item, slice)
        local_items = [*local_items, item]
        old_dim = old_dim + 1
    return _move_shardings(x, x.local[tuple(local_items)], new_dims)


@register_rule("index_select")
def apply_index_select(func: Any, x: ShardedTensor, dim: int, index: Tensor) -> Any:
    """Select elements along a dimension that is not divided."""
    dim %= x.dim()
    return (
        NO_RULE
        if not isinstance(x, ShardedTensor) or dim in x.shardings
        else wrap_local(x.local.index_select(dim, index), x.shardings)
    )


@register_rule("__setitem__")
def apply_setitem(func: Any, x: Tensor, index: Any, value: Any) -> Any:
    """Set items: a copy into a slice that takes divided dimensions whole."""
    if not isinstance(x, ShardedTensor) or not x.shardings:
        return NO_RULE
    target = apply_getitem(func, x, index)
    if (
        not isinstance(target, ShardedTensor)
        or isinstance(index, Tensor)
        or (isinstance(index, tuple) and any(isinstance(each, Tensor) for each in index))
    ):
        return NO_RULE
    return target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)


# ---- concatenating ---------------------------------------------------------------------------
@register_rule("cat", "concat", "concatenate")
def apply_cat(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """Concatenate tensors, along a divided dimension too."""
    tensors = [each for each in tensors if each.shape != (0,)]
    if "out" in kwargs or not tensors:
        return NO_RULE
    dims = tensors[0].dim()
    dim %= dims
    dim_sharding = next(
        (
            each.shardings[dim]
            for each in tensors
            if isinstance(each, ShardedTensor) and dim in each.shardings
        ),
        None,
    )
    if dim_sharding is None:
        letters = tuple(None if at == dim else at for at in range(dims))
        return apply_einsum_rule(
            lambda *given: torch.cat(given, dim),
            [Operand(each, letters) for each in tensors],
            letters,
        )
    local_parts = list[Tensor]()
    blocks = list[DimBlock]()
    for each in tensors:
        if isinstance(each, ShardedTensor) and each.shardings:
            if set(each.shardings) != {dim}:
                return NO_RULE
            partition = each.shardings[dim].partition
            local = each.local
        else:
            if each.shape[dim] < dim_sharding.group.size:
                return NO_RULE
            partition = partition_evenly(each.shape[dim], dim_sharding.group.size)
            local = slice_local(
                each.local if isinstance(each, ShardedTensor) else each,
                dim,
                Sharding(partition, dim_sharding.group),
            )
        local_parts.append(local)
        blocks += partition.blocks
    return wrap_local(
        torch.cat(local_parts, dim),
        {dim: Sharding(DimPartition(tuple(blocks), dim_sharding.group.size), dim_sharding.group)},
    )


@register_rule("stack")
def apply_stack(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """Stack tensors along a new dimension."""
    dim %= tensors[0].dim() + 1
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim) if not kwargs else NO_RULE
