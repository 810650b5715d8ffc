"""Tensors that every rank can compute for all ranks, for the tests of the backend shm."""

from __future__ import annotations

import torch
from torch import Tensor

LONG = 1_200_001  # float32: more than two areas, and an odd number


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, other ones on every rank: every sum is exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (rank + 1) + 3 * rank) % 5).to(dtype).view(shape)


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted), (found, wanted)
