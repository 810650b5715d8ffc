"""Reductions: how contributions of several ranks become one, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# added in float32: p roundings of eight bits would show
NARROW_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reduction:
    """name: torch's;  pair(a, b, out=...) combines two;  scale: what the result is multiplied
    by;  mean: or divided.
    """

    name: str
    combine_pair: Callable[..., Tensor]
    scale: float | None = None
    is_mean: bool = False

    @property
    def is_plain(self) -> bool:
        return self.scale is None and not self.is_mean

    def combine(self, out: Tensor, contributions: Sequence[Tensor]) -> None:
        """out = all contributions combined; it may be the first of them, and no other of more
        than two.
        """
        if len(contributions) == 2 and self.is_plain:
            self.combine_pair(*contributions, out=out)
            return
        wide = out.dtype in NARROW_DTYPES
        into = torch.empty_like(out, dtype=torch.float32) if wide else out
        first, *rest = contributions
        if rest:
            self.combine_pair(first.float() if wide else first, rest[0], out=into)
        else:
            into.copy_(first)
        for each in rest[1:]:
            self.combine_pair(into, each, out=into)
        if self.is_mean:
            into.div_(
                len(contributions),
                rounding_mode=None if into.is_floating_point() or into.is_complex() else "trunc",
            )
        if self.scale is not None:
            into.mul_(self.scale)
        if wide:
            out.copy_(into)


SUM = dist.ReduceOp.SUM
_SUM = Reduction("SUM", torch.add)
_REDUCTIONS = (
    _SUM,
    Reduction("AVG", torch.add, is_mean=True),
    Reduction("PRODUCT", torch.mul),
    Reduction("MIN", torch.minimum),
    Reduction("MAX", torch.maximum),
    Reduction("BAND", torch.bitwise_and),
    Reduction("BOR", torch.bitwise_or),
    Reduction("BXOR", torch.bitwise_xor),
)


def find_reduction(operation: Any, dtype: torch.dtype) -> Reduction:
    """What a torch.distributed.ReduceOp stands for. Raises ValueError where it does not go with
    the type.

    Compared with ==: the object is neither the enumeration's member nor reliably printed as
    one.
    """
    if operation == SUM:
        return _SUM
    if operation == dist.ReduceOp.PREMUL_SUM:
        _, factor = operation.__getstate__()
        if isinstance(factor, Tensor):
            raise ValueError("the backend shm takes PREMUL_SUM with a number, not with a tensor")
        return Reduction(f"PREMUL_SUM by {factor}", torch.add, scale=factor)
    found = next(
        (each for each in _REDUCTIONS if operation == getattr(dist.ReduceOp, each.name)), None
    )
    if found is None:
        raise ValueError(f"the backend shm does not know the reduce operation {operation}")
    if found.name in ("BAND", "BOR", "BXOR") and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{found.name} wants whole numbers or bools, got {dtype}")
    if found.name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"{found.name} does not order complex numbers")
    return found
