"""Random numbers as a hash of coordinates: (key, sample, block, element) -> a number.

The number does not depend on the rank that computes it. The hash is the 32-bit finalizer of
MurmurHash3 (Appleby 2011, public domain), in wrapping int32 arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HASH_CHUNK = 1 << 16  # numbers hashed at a time: they stay in the cache
# up to so many elements of a sample, their hashes are kept for the next call
MAX_CACHED_ELEMENTS = 1 << 22
# bits of a uniform number (other types: 24), such that rounding never gives 1
UNIFORM_BITS = {torch.bfloat16: 8, torch.float16: 11}

# hashes (int32), type of the result -> numbers
Distribution = Callable[[Tensor, torch.dtype], Tensor]


def mix_hash(h: Tensor, complete: bool = True) -> Tensor:
    """Apply the finalizer in place.

    Args:
        h: Hashes (int32), changed in place.
        complete: False: leave out the last line, which mixes the upper half of a number into the
            lower half.

    Returns:
        h itself.
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
    """Hash the coordinates of every element in the part of a drawn tensor that belongs to a sample.

    The hash of an element does not change with the size of the tensor, so padding does not move it.

    Args:
        shape: Shape of the part.
        device: Device of the result.

    Returns:
        The hashes, flat (int32).
    """
    is_cached = math.prod(shape) <= MAX_CACHED_ELEMENTS
    return (_hash_coordinates if is_cached else _hash_coordinates.__wrapped__)(
        tuple((range(length),) for length in shape), device
    )


@functools.lru_cache(maxsize=16)
def _hash_coordinates(ranges_by_dim: tuple[tuple[range, ...], ...], device: torch.device) -> Tensor:
    """Hash the coordinates of the elements that are selected in every dimension."""
    h = torch.zeros(1, dtype=torch.int32, device=device)
    for ranges in ranges_by_dim:
        coordinates = torch.cat(
            [
                torch.arange(each.start, each.stop, dtype=torch.int32, device=device)
                for each in ranges
            ]
        )
        # 2^32 / golden ratio
        h = mix_hash((h.unsqueeze(-1) ^ coordinates * -1640531527 + 0x5BD1E995).view(-1))
    return h


@functools.lru_cache(maxsize=16)
def _spread_positions(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32, device=device) * -1640531527


def hash_rows(key: int, positions: tuple[int, ...], blocks: int, device: torch.device) -> Tensor:
    """Hash every sample and block of a draw.

    Args:
        key: Key of the draw.
        positions: Places of the samples in the global batch.
        blocks: Blocks of each sample.
        device: Device of the result.

    Returns:
        The hashes, of shape (samples * blocks,).
    """
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
    """Map hashes to uniform numbers in [0, 1), the same in float32 and float64.

    Args:
        h: Hashes (int32).
        dtype: Type of the numbers; for an integer type the result is float32.
    """
    bits = UNIFORM_BITS.get(dtype, 24)
    return (h >> (32 - bits)).bitwise_and_((1 << bits) - 1).to(
        dtype if dtype.is_floating_point else torch.float32
    ) * 2.0**-bits


def map_to_open_interval(h: Tensor) -> Tensor:
    """Map hashes to uniform numbers in (0, 1) in float64.

    Other distributions are computed from these by the inverse of their distribution function.

    Args:
        h: Hashes (int32).
    """
    return (h.double() + (2.0**31 + 0.5)) * 2.0**-32


def make_bernoulli(p: float) -> Distribution:
    """Return the distribution that is True with probability p.

    Args:
        p: The probability.
    """
    if p >= 1.0:
        return lambda h, dtype: torch.ones_like(h, dtype=torch.bool)
    return lambda h, dtype: h < round(p * 2**32) - 2**31


def make_uniform_integers(low: int, high: int) -> Distribution:
    """Return the uniform distribution over the integers from low to high - 1.

    Args:
        low: The smallest integer.
        high: One more than the largest integer.
    """
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
    """Fill a tensor with numbers from the hashes of (row, element), chunk by chunk.

    Args:
        tensor: The tensor, filled in place.

        dim: Dimension of the rows (samples and blocks); None: all elements are one row.

        row_hashes: The hash of each row that is here.

        distribution: Maps hashes to numbers.

        places: If the tensor is a part of a whole one: for a dimension, which elements of the whole
            tensor are here.
    """
    shape = tuple(tensor.shape)
    ranges_by_dim = tuple(
        (places or {}).get(at, (range(size),)) for at, size in enumerate(shape) if at != dim
    )
    element = (
        hash_elements(shape if dim is None else drop_dim(shape, dim), tensor.device)
        if not places
        else _hash_coordinates.__wrapped__(ranges_by_dim, tensor.device)
    )
    target = (
        tensor
        if tensor.is_contiguous() and not dim
        else torch.empty(
            len(row_hashes), *drop_dim(shape, dim or 0), dtype=tensor.dtype, device=tensor.device
        )
        if dim is not None
        else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    )
    rows_per_chunk = max(1, HASH_CHUNK // element.numel())
    for chunk, out in zip(
        row_hashes.view(-1, 1).split(rows_per_chunk),
        target.view(len(row_hashes), -1).split(rows_per_chunk),
        strict=True,
    ):
        out.copy_(distribution(mix_hash(chunk ^ element, complete=False), tensor.dtype))
    if target is not tensor:
        tensor.copy_(target.movedim(0, dim) if dim else target)


def drop_dim(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return a shape without one dimension.

    Args:
        shape: The shape.
        dim: The dimension to leave out.
    """
    return shape[:dim] + shape[dim + 1 :]
