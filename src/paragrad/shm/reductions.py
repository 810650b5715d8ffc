"""Reductions: combine the contributions of several ranks, always in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# These types are added in float32: p roundings to eight bits would be visible in the result.
NARROW_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reduction:
    """A reduction of tensors.

    Attributes:
        name: The name in torch.distributed.ReduceOp.

        combine_pair: combine_pair(a, b, out=...) combines two tensors.

        scale: A factor for the result; None for none.

        is_mean: Whether the result is divided by the number of contributions.
    """

    name: str
    combine_pair: Callable[..., Tensor]
    scale: float | None = None
    is_mean: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the result needs neither a factor nor a division."""
        return self.scale is None and not self.is_mean

    def combine(self, out: Tensor, contributions: Sequence[Tensor]) -> None:
        """Combine all contributions.

        Args:
            out: Takes the result. It may be the first contribution; of two contributions it may be
                either.
            contributions: The tensors to combine, in rank order.
        """
        if len(contributions) == 2 and self.is_plain:
            self.combine_pair(*contributions, out=out)
            return
        needs_wide_sum = out.dtype in NARROW_DTYPES
        result = torch.empty_like(out, dtype=torch.float32) if needs_wide_sum else out
        first, *rest = contributions
        if rest:
            self.combine_pair(first.float() if needs_wide_sum else first, rest[0], out=result)
        else:
            result.copy_(first)
        for each in rest[1:]:
            self.combine_pair(result, each, out=result)
        if self.is_mean:
            result.div_(
                len(contributions),
                rounding_mode=None
                if result.is_floating_point() or result.is_complex()
                else "trunc",
            )
        if self.scale is not None:
            result.mul_(self.scale)
        if needs_wide_sum:
            out.copy_(result)


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
    """Find the reduction that a torch.distributed.ReduceOp means.

    The operation is compared with ==, because it is not a member of the enumeration and does not
    reliably print as one.

    Args:
        operation: The operation.
        dtype: The type of the tensors.

    Returns:
        The reduction.

    Raises:
        ValueError: The operation is unknown, or does not work with the type.
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
        raise ValueError(f"{found.name} needs whole numbers or bools, got {dtype}")
    if found.name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"{found.name} does not order complex numbers")
    return found
