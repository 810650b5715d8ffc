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

from paragrad.parallel.sharding.partition import Block, Pieces, evenly_divided, reshaped, to_cut_at
from paragrad.parallel.sharding.sharded_tensor import UNKNOWN, Cut, Divided, divided, piece, rule
from paragrad.parallel.tensor.einsum_rules import Operand, spread


def _sizes(given: Sequence[Any]) -> list[int]:
    """(2, 3), or ((2, 3),)."""
    return list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)


def _moved(x: Divided, local: Tensor, to: Mapping[int, int]) -> Tensor:
    """The local result of a function that puts the dimensions elsewhere."""
    return divided(local, {to[dim]: cut for dim, cut in x.cuts.items()})


# ---- views -----------------------------------------------------------------------------------
def shaped(x: Divided, sizes: Sequence[int]) -> Any:
    """In another shape, of which all sizes are given."""
    local = list(sizes)
    cuts = dict[int, Cut]()
    for dim, cut in x.cuts.items():
        found = reshaped(x.shape, sizes, dim, cut.pieces)
        if isinstance(found, list):
            cut.line.wish(found)
            return UNKNOWN
        at, pieces = found
        if at in cuts:
            return UNKNOWN
        cuts[at] = Cut(pieces, cut.line)
        local[at] = pieces.length(cut.line.rank)
    return divided(x.local.reshape(local), cuts)


@rule("view", "reshape")
def view(func: Any, x: Divided, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape or isinstance(shape[0], torch.dtype):
        return UNKNOWN
    sizes = _sizes(shape)
    if -1 in sizes:
        rest = prod(size for size in sizes if size != -1)
        sizes = [x.numel() // rest if size == -1 and rest else size for size in sizes]
    return shaped(x, sizes) if prod(sizes) == x.numel() else UNKNOWN


@rule("view_as", "reshape_as")
def view_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.reshape(other.shape)


@rule("flatten")
def flatten(func: Any, x: Divided, start_dim: int = 0, end_dim: int = -1) -> Any:
    start = start_dim % x.dim()
    end = end_dim % x.dim()
    return shaped(x, [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@rule("unflatten")
def unflatten(func: Any, x: Divided, dim: int, sizes: Any) -> Any:
    dim = dim % x.dim()
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = -x.shape[dim] // prod(sizes)
    return shaped(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@rule("squeeze")
def squeeze(func: Any, x: Divided, dim: Any = None) -> Any:
    dims = {
        each % x.dim()
        for each in (range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim)
    }
    kept = [at for at in range(x.dim()) if at not in dims or x.shape[at] != 1]
    return _moved(
        x,
        x.local.squeeze(tuple(set(range(x.dim())) - set(kept))),
        {at: new for new, at in enumerate(kept)},
    )


@rule("unsqueeze")
def unsqueeze(func: Any, x: Divided, dim: int) -> Any:
    dim %= x.dim() + 1
    return _moved(x, x.local.unsqueeze(dim), {at: at + (at >= dim) for at in range(x.dim())})


@rule("permute")
def permute(func: Any, x: Divided, *dims: Any, **kwargs: Any) -> Any:
    order = [dim % x.dim() for dim in (kwargs["dims"] if "dims" in kwargs else _sizes(dims))]
    return _moved(x, x.local.permute(order), {old: new for new, old in enumerate(order)})


@rule(
    "transpose", "swapaxes", "swapdims", "t", "T", "mT", "H", "mH", "adjoint", "movedim", "moveaxis"
)
def transposed(func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    """Where dimensions went is seen on a small tensor."""
    probe = torch.empty(tuple(range(2, 2 + x.dim())))
    places = [size - 2 for size in func(probe, *args, **kwargs).shape]
    return _moved(x, func(x.local, *args, **kwargs), {old: new for new, old in enumerate(places)})


@rule("expand", "broadcast_to")
def expand(func: Any, x: Divided, *sizes: Any) -> Any:
    wanted = _sizes(sizes)
    more = len(wanted) - x.dim()
    for dim, cut in x.cuts.items():
        wanted[dim + more] = cut.pieces.length(cut.line.rank)
    return _moved(x, x.local.expand(wanted), {dim: dim + more for dim in x.cuts})


@rule("expand_as")
def expand_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.expand(other.shape)


@rule("broadcast_tensors")
def broadcast_tensors(func: Any, *tensors: Any) -> Any:
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    return tuple(each if each.shape == shape else each.expand(shape) for each in given)


@rule("repeat", "tile")
def repeat(func: Any, x: Divided, *times: Any) -> Any:
    counts = _sizes(times)
    counts = [1] * (x.dim() - len(counts)) + counts
    more = len(counts) - x.dim()
    return divided(
        x.local.repeat(counts),
        {
            dim + more: Cut(cut.pieces.repeated(counts[dim + more]), cut.line)
            for dim, cut in x.cuts.items()
        },
    )


@rule("repeat_interleave")
def repeat_interleave(
    func: Any, x: Divided, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Any:
    if dim is None or not isinstance(repeats, int):
        return UNKNOWN
    dim %= x.dim()
    return divided(
        x.local.repeat_interleave(repeats, dim),
        {
            at: Cut(cut.pieces.scaled(repeats), cut.line) if at == dim else cut
            for at, cut in x.cuts.items()
        },
    )


# ---- slices ----------------------------------------------------------------------------------
def taken(x: Divided, dim: int, ends: Sequence[int]) -> list[Tensor] | None:
    """Slices along a dimension, from each end to the next; None, and a wish, where one is cut
    out of the middle of a block.
    """
    if dim not in x.cuts:
        return [
            divided(each, x.cuts)
            for each in x.local.split([b - a for a, b in itertools.pairwise(ends)], dim)
        ]
    cut = x.cuts[dim]
    found = [cut.pieces.between(start, stop) for start, stop in itertools.pairwise(ends)]
    lengths = list(itertools.accumulate(cut.pieces.lengths(cut.line.rank), initial=0))
    slices = []
    for each in found:
        if each is None:
            cut.line.wish(to_cut_at(cut.pieces, ends))
            return None
        local = x.local.narrow(dim, lengths[each[0]], lengths[each[1]] - lengths[each[0]])
        slices.append(divided(local, {**x.cuts, dim: Cut(cut.pieces.some(*each), cut.line)}))
    return slices


def _wish_apart(x: Divided, dim: int) -> None:
    """Each element of that dimension had better be divided by itself: it is queries, keys or
    values.
    """
    x.cuts[dim].line.wish(to_cut_at(x.cuts[dim].pieces, range(1, x.shape[dim])))


def _found(slices: list[Tensor] | None) -> Any:
    return UNKNOWN if slices is None else tuple(slices)


@rule("split", "split_with_sizes")
def split(func: Any, x: Divided, sizes: Any = None, dim: int = 0, **kwargs: Any) -> Any:
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
    return _found(taken(x, dim, ends)) if ends[-1] == size else UNKNOWN


@rule("chunk")
def chunk(func: Any, x: Divided, chunks: int, dim: int = 0) -> Any:
    dim %= x.dim()
    return split(func, x, -(-x.shape[dim] // chunks), dim)


@rule("narrow")
def narrow(func: Any, x: Divided, dim: int, start: Any, length: int) -> Any:
    dim = dim % x.dim()
    start = int(start)
    start += x.shape[dim] if start < 0 else 0
    return x[(slice(None),) * dim + (slice(start, start + length),)]


@rule("select")
def select(func: Any, x: Divided, dim: int, index: int) -> Any:
    return x[(slice(None),) * (dim % x.dim()) + (index,)]


@rule("unbind")
def unbind(func: Any, x: Divided, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim in x.cuts:
        _wish_apart(x, dim)
        return UNKNOWN
    to = {at: at - (at > dim) for at in x.cuts}
    return tuple(_moved(x, each, to) for each in x.local.unbind(dim))


@rule("__getitem__")
def getitem(func: Any, x: Divided, index: Any) -> Any:
    """Divided dimensions are taken whole, or in blocks."""
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [each for each in items if isinstance(each, Tensor)]
    if any(
        (not isinstance(each, (int, slice, Tensor)) and each is not None and each is not Ellipsis)
        or isinstance(each, bool)
        for each in items
    ) or any(isinstance(each, Divided) or each.dtype == torch.bool for each in tensors):
        return UNKNOWN
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
        return UNKNOWN
    wide = max((each.dim() for each in tensors), default=0)
    return _item(x, items, wide)


def _item(x: Divided, items: list[Any], wide: int) -> Any:
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
            if old in x.cuts:
                return UNKNOWN
            new = new + (0 if seen else wide)
            seen = True
        elif old in x.cuts:
            start, stop, step = (
                item.indices(x.shape[old]) if isinstance(item, slice) else (item, item + 1, 1)
            )
            if not isinstance(item, slice) or step != 1:
                _wish_apart(x, old)
                return UNKNOWN
            if stop <= start:
                return UNKNOWN
            if (start, stop) != (0, x.shape[old]):
                slices = taken(x, old, sorted({0, start, max(start, stop), x.shape[old]}))
                return (
                    UNKNOWN
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
    return _moved(x, x.local[tuple(found)], to)


@rule("index_select")
def index_select(func: Any, x: Divided, dim: int, index: Tensor) -> Any:
    dim %= x.dim()
    return (
        UNKNOWN
        if not isinstance(x, Divided) or dim in x.cuts
        else divided(x.local.index_select(dim, index), x.cuts)
    )


@rule("__setitem__")
def setitem(func: Any, x: Tensor, index: Any, value: Any) -> Any:
    """As copying into a slice that is taken along whole dimensions."""
    if not isinstance(x, Divided) or not x.cuts:
        return UNKNOWN
    place = getitem(func, x, index)
    if (
        not isinstance(place, Divided)
        or isinstance(index, Tensor)
        or (isinstance(index, tuple) and any(isinstance(each, Tensor) for each in index))
    ):
        return UNKNOWN
    return place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)


# ---- putting together ------------------------------------------------------------------------
@rule("cat", "concat", "concatenate")
def cat(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    tensors = [each for each in tensors if each.shape != (0,)]
    if "out" in kwargs or not tensors:
        return UNKNOWN
    dims = tensors[0].dim()
    dim %= dims
    along = next(
        (each.cuts[dim] for each in tensors if isinstance(each, Divided) and dim in each.cuts), None
    )
    if along is None:
        letters = tuple(None if at == dim else at for at in range(dims))
        return spread(
            lambda *given: torch.cat(given, dim),
            [Operand(each, letters) for each in tensors],
            letters,
        )
    parts = list[Tensor]()
    blocks = list[Block]()
    for each in tensors:
        if isinstance(each, Divided) and each.cuts:
            if set(each.cuts) != {dim}:
                return UNKNOWN
            pieces = each.cuts[dim].pieces
            local = each.local
        else:
            if each.shape[dim] < along.line.size:
                return UNKNOWN
            pieces = evenly_divided(each.shape[dim], along.line.size)
            local = piece(
                each.local if isinstance(each, Divided) else each, dim, Cut(pieces, along.line)
            )
        parts.append(local)
        blocks += pieces.blocks
    return divided(
        torch.cat(parts, dim), {dim: Cut(Pieces(tuple(blocks), along.line.size), along.line)}
    )


@rule("stack")
def stack(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    dim %= tensors[0].dim() + 1
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim) if not kwargs else UNKNOWN
