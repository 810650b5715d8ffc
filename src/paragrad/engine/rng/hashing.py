"""Random numbers as a hash of coordinates: (key, sample, block, element) -> a number, whoever
asks.

The hash is MurmurHash3's 32-bit finaliser (Appleby 2011, public domain), in wrapping int32
arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HASH_CHUNK = 1 << 16  # numbers hashed at a time: they stay in the cache
# elements of a sample up to which their hashes are kept for the next call
MAX_CACHED_ELEMENTS = 1 << 22
# of a uniform number, so that rounding never makes it 1; otherwise 24
UNIFORM_BITS = {torch.bfloat16: 8, torch.float16: 11}

# hashes (int32), type of the result -> numbers
Distribution = Callable[[Tensor, torch.dtype], Tensor]


def mix_hash(h: Tensor, complete: bool = True) -> Tensor:
    """The finaliser, in place; not whole: without its last line, which would mix the upper half
    of a number into the lower.
    """
    shifted = h >> 16
    h ^= shifted.bitwise_and_(0xFFFF)
    h *= -2048144789  # 0x85ebca6b
    torch.bitwise_right_shift(h, 13, out=shifted)
    h ^= shifted.bitwise_and_(0x7FFFF)
    h *= -1028477387  # 0xc2b2ae35
    if not complete:
        return h
    torch.bitwise_right_shift(h, 16, out=shifted)
    h ^= shifted.bitwise_and_(0xFFFF)
    return h


def hash_elements(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A hash of every place in a sample's part of a drawn tensor, by its coordinates: padding
    moves none.
    """
    kept = math.prod(shape) <= MAX_CACHED_ELEMENTS
    return (_hash_coordinates if kept else _hash_coordinates.__wrapped__)(
        tuple((range(length),) for length in shape), device
    )


@functools.lru_cache(maxsize=16)
def _hash_coordinates(ranges_by_dim: tuple[tuple[range, ...], ...], device: torch.device) -> Tensor:
    """places: of every dimension, which of its elements."""
    h = torch.zeros(1, dtype=torch.int32, device=device)
    for ranges in ranges_by_dim:
        place = torch.cat(
            [
                torch.arange(each.start, each.stop, dtype=torch.int32, device=device)
                for each in ranges
            ]
        )
        # 2^32 / golden ratio
        h = mix_hash((h.unsqueeze(-1) ^ place * -1640531527 + 0x5BD1E995).view(-1))
    return h


@functools.lru_cache(maxsize=16)
def _spread_positions(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32, device=device) * -1640531527


def hash_rows(key: int, positions: tuple[int, ...], blocks: int, device: torch.device) -> Tensor:
    """(samples * blocks,): a hash of every sample and block of a draw."""
    h = mix_hash(_spread_positions(positions, device) + key)
    if blocks == 1:
        return h
    return mix_hash(
        (
            h.view(-1, 1)
            ^ (torch.arange(blocks, dtype=torch.int32, device=device) * -2048144789 + 1)
        ).view(-1)
    )


def map_to_uniform(h: Tensor, dtype: torch.dtype) -> Tensor:
    """[0, 1), the same numbers in float32 and float64."""
    bits = UNIFORM_BITS.get(dtype, 24)
    return (h >> (32 - bits)).bitwise_and_((1 << bits) - 1).to(
        dtype if dtype.is_floating_point else torch.float32
    ) * 2.0**-bits


def map_to_open_interval(h: Tensor) -> Tensor:
    """(0, 1) in float64, for distributions that are turned from it."""
    return (h.double() + (2.0**31 + 0.5)) * 2.0**-32


def make_bernoulli(p: float) -> Distribution:
    """True with probability p."""
    if p >= 1.0:
        return lambda h, dtype: torch.ones_like(h, dtype=torch.bool)
    return lambda h, dtype: h < round(p * 2**32) - 2**31


def make_uniform_integers(low: int, high: int) -> Distribution:
    """Whole numbers from low, below high."""
    width = high - low
    if width <= 2**31:
        return lambda h, dtype: ((h.long() + 2**31) * width >> 32) + low
    return lambda h, dtype: (
        ((h.long() + 2**31 << 31) + (mix_hash(h ^ 0x3C6EF372).long() + 2**31)) % width + low
    )


def fill_from_hashes(
    tensor: Tensor,
    dim: int | None,
    row_hashes: Tensor,
    distribution: Distribution,
    places: Mapping[int, tuple[range, ...]] | None = None,
) -> None:
    """Numbers by the hashes of (row, element), chunk by chunk.

    places: of a part of a tensor, by dimension, which elements of the whole one are here; the
    rows are those of this part.
    """
    shape = tuple(tensor.shape)
    lines = tuple(
        (places or {}).get(at, (range(size),)) for at, size in enumerate(shape) if at != dim
    )
    element = (
        hash_elements(shape if dim is None else drop_dim(shape, dim), tensor.device)
        if not places
        else _hash_coordinates.__wrapped__(lines, tensor.device)
    )
    into = (
        tensor
        if tensor.is_contiguous() and not dim
        else torch.empty(
            len(row_hashes), *drop_dim(shape, dim or 0), dtype=tensor.dtype, device=tensor.device
        )
        if dim is not None
        else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    )
    at_once = max(1, HASH_CHUNK // element.numel())
    for some, out in zip(
        row_hashes.view(-1, 1).split(at_once),
        into.view(len(row_hashes), -1).split(at_once),
        strict=True,
    ):
        out.copy_(distribution(mix_hash(some ^ element, complete=False), tensor.dtype))
    if into is not tensor:
        tensor.copy_(into.movedim(0, dim) if dim else into)


def drop_dim(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
