"""Tensors that every rank can compute for all ranks, for the tests of the backend shm."""

from __future__ import annotations

import torch
from torch import Tensor

LONG = 1_200_001  # as float32, more than two shared memory areas; an odd number


def make_values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small whole numbers that differ by rank; every sum is exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (rank + 1) + 3 * rank) % 5).to(dtype).view(shape)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted), (found, wanted)
