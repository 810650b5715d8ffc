"""Functions that move elements about: reshaping, permuting, slicing, putting together. What
they make of pieces: pieces.py.
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
    """(2, 3), or ((2, 3),)."""
    return list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)


def _move_shardings(x: ShardedTensor, local: Tensor, new_dims: Mapping[int, int]) -> Tensor:
    """The local result of a function that puts the dimensions elsewhere."""
    return wrap_local(local, {new_dims[dim]: cut for dim, cut in x.shardings.items()})


# ---- views -----------------------------------------------------------------------------------
def reshape_sharded(x: ShardedTensor, sizes: Sequence[int]) -> Any:
    """In another shape, of which all sizes are given."""
    local = list(sizes)
    cuts = dict[int, Sharding]()
    for dim, cut in x.shardings.items():
        found = reshape_partition(x.shape, sizes, dim, cut.partition)
        if isinstance(found, list):
            cut.group.add_constraints(found)
            return NO_RULE
        at, pieces = found
        if at in cuts:
            return NO_RULE
        cuts[at] = Sharding(pieces, cut.group)
        local[at] = pieces.compute_length(cut.group.rank)
    return wrap_local(x.local.reshape(local), cuts)


@register_rule("view", "reshape")
def apply_view(func: Any, x: ShardedTensor, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape or isinstance(shape[0], torch.dtype):
        return NO_RULE
    sizes = _unpack_sizes(shape)
    if -1 in sizes:
        rest = prod(size for size in sizes if size != -1)
        sizes = [x.numel() // rest if size == -1 and rest else size for size in sizes]
    return reshape_sharded(x, sizes) if prod(sizes) == x.numel() else NO_RULE


@register_rule("view_as", "reshape_as")
def apply_view_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.reshape(other.shape)


@register_rule("flatten")
def apply_flatten(func: Any, x: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start = start_dim % x.dim()
    end = end_dim % x.dim()
    return reshape_sharded(
        x, [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]]
    )


@register_rule("unflatten")
def apply_unflatten(func: Any, x: ShardedTensor, dim: int, sizes: Any) -> Any:
    dim = dim % x.dim()
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = -x.shape[dim] // prod(sizes)
    return reshape_sharded(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@register_rule("squeeze")
def apply_squeeze(func: Any, x: ShardedTensor, dim: Any = None) -> Any:
    dims = {
        each % x.dim()
        for each in (range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim)
    }
    kept = [at for at in range(x.dim()) if at not in dims or x.shape[at] != 1]
    return _move_shardings(
        x,
        x.local.squeeze(tuple(set(range(x.dim())) - set(kept))),
        {at: new for new, at in enumerate(kept)},
    )


@register_rule("unsqueeze")
def apply_unsqueeze(func: Any, x: ShardedTensor, dim: int) -> Any:
    dim %= x.dim() + 1
    return _move_shardings(
        x, x.local.unsqueeze(dim), {at: at + (at >= dim) for at in range(x.dim())}
    )


@register_rule("permute")
def apply_permute(func: Any, x: ShardedTensor, *dims: Any, **kwargs: Any) -> Any:
    order = [dim % x.dim() for dim in (kwargs["dims"] if "dims" in kwargs else _unpack_sizes(dims))]
    return _move_shardings(x, x.local.permute(order), {old: new for new, old in enumerate(order)})


@register_rule(
    "transpose", "swapaxes", "swapdims", "t", "T", "mT", "H", "mH", "adjoint", "movedim", "moveaxis"
)
def apply_transpose(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Where dimensions went is seen on a small tensor."""
    probe = torch.empty(tuple(range(2, 2 + x.dim())))
    places = [size - 2 for size in func(probe, *args, **kwargs).shape]
    return _move_shardings(
        x, func(x.local, *args, **kwargs), {old: new for new, old in enumerate(places)}
    )


@register_rule("expand", "broadcast_to")
def apply_expand(func: Any, x: ShardedTensor, *sizes: Any) -> Any:
    wanted = _unpack_sizes(sizes)
    more = len(wanted) - x.dim()
    for dim, cut in x.shardings.items():
        wanted[dim + more] = cut.partition.compute_length(cut.group.rank)
    return _move_shardings(x, x.local.expand(wanted), {dim: dim + more for dim in x.shardings})


@register_rule("expand_as")
def apply_expand_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.expand(other.shape)


@register_rule("broadcast_tensors")
def apply_broadcast_tensors(func: Any, *tensors: Any) -> Any:
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    return tuple(each if each.shape == shape else each.expand(shape) for each in given)


@register_rule("repeat", "tile")
def apply_repeat(func: Any, x: ShardedTensor, *times: Any) -> Any:
    counts = _unpack_sizes(times)
    counts = [1] * (x.dim() - len(counts)) + counts
    more = len(counts) - x.dim()
    return wrap_local(
        x.local.repeat(counts),
        {
            dim + more: Sharding(cut.partition.repeat_blocks(counts[dim + more]), cut.group)
            for dim, cut in x.shardings.items()
        },
    )


@register_rule("repeat_interleave")
def apply_repeat_interleave(
    func: Any, x: ShardedTensor, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Any:
    if dim is None or not isinstance(repeats, int):
        return NO_RULE
    dim %= x.dim()
    return wrap_local(
        x.local.repeat_interleave(repeats, dim),
        {
            at: Sharding(cut.partition.scale_elements(repeats), cut.group) if at == dim else cut
            for at, cut in x.shardings.items()
        },
    )


# ---- slices ----------------------------------------------------------------------------------
def slice_along_dim(x: ShardedTensor, dim: int, ends: Sequence[int]) -> list[Tensor] | None:
    """Slices along a dimension, from each end to the next; None, and a wish, where one is cut
    out of the middle of a block.
    """
    if dim not in x.shardings:
        return [
            wrap_local(each, x.shardings)
            for each in x.local.split([b - a for a, b in itertools.pairwise(ends)], dim)
        ]
    cut = x.shardings[dim]
    found = [cut.partition.find_blocks(start, stop) for start, stop in itertools.pairwise(ends)]
    lengths = list(itertools.accumulate(cut.partition.list_lengths(cut.group.rank), initial=0))
    slices = []
    for each in found:
        if each is None:
            cut.group.add_constraints(constrain_block_ends(cut.partition, ends))
            return None
        local = x.local.narrow(dim, lengths[each[0]], lengths[each[1]] - lengths[each[0]])
        slices.append(
            wrap_local(
                local, {**x.shardings, dim: Sharding(cut.partition.select_blocks(*each), cut.group)}
            )
        )
    return slices


def _constrain_each_element(x: ShardedTensor, dim: int) -> None:
    """Each element of that dimension had better be divided by itself: it is queries, keys or
    values.
    """
    x.shardings[dim].group.add_constraints(
        constrain_block_ends(x.shardings[dim].partition, range(1, x.shape[dim]))
    )


def _return_slices(slices: list[Tensor] | None) -> Any:
    return NO_RULE if slices is None else tuple(slices)


@register_rule("split", "split_with_sizes")
def apply_split(func: Any, x: ShardedTensor, sizes: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    given = next(
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
        [*range(0, size, given), size]
        if isinstance(given, int)
        else list(itertools.accumulate(given, initial=0))
    )
    return _return_slices(slice_along_dim(x, dim, ends)) if ends[-1] == size else NO_RULE


@register_rule("chunk")
def apply_chunk(func: Any, x: ShardedTensor, chunks: int, dim: int = 0) -> Any:
    dim %= x.dim()
    return apply_split(func, x, -(-x.shape[dim] // chunks), dim)


@register_rule("narrow")
def apply_narrow(func: Any, x: ShardedTensor, dim: int, start: Any, length: int) -> Any:
    dim = dim % x.dim()
    start = int(start)
    start += x.shape[dim] if start < 0 else 0
    return x[(slice(None),) * dim + (slice(start, start + length),)]


@register_rule("select")
def apply_select(func: Any, x: ShardedTensor, dim: int, index: int) -> Any:
    return x[(slice(None),) * (dim % x.dim()) + (index,)]


@register_rule("unbind")
def apply_unbind(func: Any, x: ShardedTensor, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim in x.shardings:
        _constrain_each_element(x, dim)
        return NO_RULE
    to = {at: at - (at > dim) for at in x.shardings}
    return tuple(_move_shardings(x, each, to) for each in x.local.unbind(dim))


@register_rule("__getitem__")
def apply_getitem(func: Any, x: ShardedTensor, index: Any) -> Any:
    """Divided dimensions are taken whole, or in blocks."""
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [each for each in items if isinstance(each, Tensor)]
    if any(
        (not isinstance(each, (int, slice, Tensor)) and each is not None and each is not Ellipsis)
        or isinstance(each, bool)
        for each in items
    ) or any(isinstance(each, ShardedTensor) or each.dtype == torch.bool for each in tensors):
        return NO_RULE
    used = sum(each is not None and each is not Ellipsis for each in items)
    if Ellipsis not in [each for each in items if not isinstance(each, Tensor)]:
        items.append(Ellipsis)
    at = next(at for at, each in enumerate(items) if each is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.dim() - used)
    places = [at for at, each in enumerate(items) if isinstance(each, Tensor)]
    if places and (
        places != list(range(places[0], places[-1] + 1))
        or any(isinstance(each, int) for each in items)
    ):
        return NO_RULE
    wide = max((each.dim() for each in tensors), default=0)
    return _index_sharded(x, items, wide)


def _index_sharded(x: ShardedTensor, items: list[Any], index_dims: int) -> Any:
    """wide: dimensions that come in the place of those with tensors."""
    old = 0
    new = 0
    seen = False
    to = dict[int, int]()
    found = list[Any]()
    for item in items:
        if item is None:
            found = [*found, None]
            new = new + 1
            continue
        if isinstance(item, Tensor):
            if old in x.shardings:
                return NO_RULE
            new = new + (0 if seen else index_dims)
            seen = True
        elif old in x.shardings:
            start, stop, step = (
                item.indices(x.shape[old]) if isinstance(item, slice) else (item, item + 1, 1)
            )
            if not isinstance(item, slice) or step != 1:
                _constrain_each_element(x, old)
                return NO_RULE
            if stop <= start:
                return NO_RULE
            if (start, stop) != (0, x.shape[old]):
                slices = slice_along_dim(x, old, sorted({0, start, max(start, stop), x.shape[old]}))
                return (
                    NO_RULE
                    if slices is None
                    else slices[1 if start else 0][
                        tuple(
                            slice(None) if at == len(found) else each
                            for at, each in enumerate(items)
                        )
                    ]
                )
            to[old] = new
            item = slice(None)
            new = new + 1
        else:
            new += isinstance(item, slice)
        found = [*found, item]
        old = old + 1
    return _move_shardings(x, x.local[tuple(found)], to)


@register_rule("index_select")
def apply_index_select(func: Any, x: ShardedTensor, dim: int, index: Tensor) -> Any:
    dim %= x.dim()
    return (
        NO_RULE
        if not isinstance(x, ShardedTensor) or dim in x.shardings
        else wrap_local(x.local.index_select(dim, index), x.shardings)
    )


@register_rule("__setitem__")
def apply_setitem(func: Any, x: Tensor, index: Any, value: Any) -> Any:
    """As copying into a slice that is taken along whole dimensions."""
    if not isinstance(x, ShardedTensor) or not x.shardings:
        return NO_RULE
    place = apply_getitem(func, x, index)
    if (
        not isinstance(place, ShardedTensor)
        or isinstance(index, Tensor)
        or (isinstance(index, tuple) and any(isinstance(each, Tensor) for each in index))
    ):
        return NO_RULE
    return place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)


# ---- putting together ------------------------------------------------------------------------
@register_rule("cat", "concat", "concatenate")
def apply_cat(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    tensors = [each for each in tensors if each.shape != (0,)]
    if "out" in kwargs or not tensors:
        return NO_RULE
    dims = tensors[0].dim()
    dim %= dims
    along = next(
        (
            each.shardings[dim]
            for each in tensors
            if isinstance(each, ShardedTensor) and dim in each.shardings
        ),
        None,
    )
    if along is None:
        letters = tuple(None if at == dim else at for at in range(dims))
        return apply_einsum_rule(
            lambda *given: torch.cat(given, dim),
            [Operand(each, letters) for each in tensors],
            letters,
        )
    parts = list[Tensor]()
    blocks = list[DimBlock]()
    for each in tensors:
        if isinstance(each, ShardedTensor) and each.shardings:
            if set(each.shardings) != {dim}:
                return NO_RULE
            pieces = each.shardings[dim].partition
            local = each.local
        else:
            if each.shape[dim] < along.group.size:
                return NO_RULE
            pieces = partition_evenly(each.shape[dim], along.group.size)
            local = slice_local(
                each.local if isinstance(each, ShardedTensor) else each,
                dim,
                Sharding(pieces, along.group),
            )
        parts.append(local)
        blocks += pieces.blocks
    return wrap_local(
        torch.cat(parts, dim),
        {dim: Sharding(DimPartition(tuple(blocks), along.group.size), along.group)},
    )


@register_rule("stack")
def apply_stack(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    dim %= tensors[0].dim() + 1
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim) if not kwargs else NO_RULE
