"""Certificate: whether a strategy made the same training as serial, and what was compared."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Certificate:
    """Whether a strategy made the same training as serial, and what was compared."""
    job: str
    digest: str                     # of the job: its settings, initial parameters and first batch, in float64
    strategy: str
    resolved: str
    reference: str                  # what it was compared with: serial; with the same micro-batches where batch norm is
    device: str
    backend: str
    steps: int
    dtype: str                      # what was computed in
    why: str | None                 # it is not float64
    bound: float                    # of a tensor by its own size; above it, the twin is asked
    allowed: float                  # then: 4 times the twin's, by the largest of the tensor's kind (`lockstep.Difference`)
    difference: float | None        # the largest; None where the ranks did not come to its end
    tensor: str | None              # where it is largest
    first: tuple[str, int] | None   # (tensor, step) of the first difference beyond both
    tensors: dict[str, float]       # the largest difference of every tensor
    twin: float                     # the largest difference of the rounding twin from serial
    twins: dict[str, float]         # of every tensor
    chaotic: int | None             # the step from which the twin goes another way, so that nothing can be said
    failure: str | None             # what a rank said of replicas that are not equal
    cause: str | None               # the likeliest, where it is not the same and one is known
    sabotage: str | None
    versions: dict[str, str]
    folder: Path

    @property
    def same(self) -> bool:
        return self.failure is None and self.difference is not None and self.first is None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON: a difference that is not finite is null, and `tensor` says where."""
        told = {"schema": 1, **asdict(self), "same": self.same, "folder": str(self.folder)}
        told |= {name: _finite(told[name]) for name in ("difference", "twin", "allowed", "tensors", "twins")}
        return told


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return value if value is not None and math.isfinite(value) else None
