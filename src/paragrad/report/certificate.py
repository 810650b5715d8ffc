"""What a verification found: the difference of a training from serial's, and its
certificate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EXACT_BOUND = 1e-10  # of an exact strategy in float64


@dataclass(frozen=True)
class Difference:
    """How far a training was from serial's (`verbs.lockstep`): the largest difference, and the
    largest of every tensor.
    """

    value: float  # the largest
    tensor: str | None = None  # where it is largest
    step: int | None = None  # and when
    # the largest of every tensor
    tensors: dict[str, float] = field(default_factory=dict, compare=False)
    # (tensor, step) of the first beyond both bounds
    first: tuple[str, int] | None = None
    # the largest of the rounding twin from serial
    twin: float = 0.0
    # of every tensor
    twins: dict[str, float] = field(default_factory=dict, compare=False)
    # of a tensor by its own size; above it, the twin is asked
    bound: float = EXACT_BOUND
    # then: 4 times the twin's, by the largest of the tensor's kind; where
    allowed: float = 0.0
    # `first` left it, or the largest that was asked for
    # the step from which the twin goes another way, so that nothing can be said
    chaotic: int | None = None
    dtype: str = "float64"  # what was computed in
    why: str | None = None  # it is not float64
    # with the same micro-batches where batch norm is
    reference: str = "serial"


@dataclass(frozen=True, kw_only=True)
class Certificate(Difference):
    """Whether a strategy made the same training as serial, and what was compared: the
    difference, and what it is of.
    """

    job: str
    # of the job: its settings, initial parameters and first batch, in float64
    digest: str
    strategy: str
    resolved: str
    device: str
    backend: str
    steps: int
    # what a rank said of replicas that are not equal, or why there was nothing to compare
    failure: str | None
    cause: str | None  # the likeliest, where it is not the same and one is known
    sabotage: str | None
    machine: dict[str, Any]  # as in a record: cpu, cores, load, versions
    folder: Path

    @property
    def difference(self) -> float | None:
        """The largest; None where the ranks did not come to its end."""
        return None if self.failure else self.value

    @property
    def same(self) -> bool:
        return self.difference is not None and self.first is None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, what it is of first: a difference that is not finite is null, and
        `tensor` says where.
        """
        told = {
            "schema": 2,
            **dict.fromkeys(Certificate.__annotations__),
            **asdict(self),
            "folder": str(self.folder),
            "difference": self.difference,
            "same": self.same,
        }
        del told["value"], told["step"]
        return told | {
            name: _replace_non_finite(told[name])
            for name in ("difference", "twin", "allowed", "tensors", "twins")
        }


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_non_finite(each) for name, each in value.items()}
    return value if value is not None and math.isfinite(value) else None
