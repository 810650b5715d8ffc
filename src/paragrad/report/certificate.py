"""The result of a verification: the difference of a training from serial's, and its certificate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EXACT_BOUND = 1e-10  # the bound of an exact strategy in float64


@dataclass(frozen=True)
class Difference:
    """How far a training was from serial's (`report.equivalence.lockstep`).

    Attributes:
        value: The largest difference.

        tensor: The tensor with the largest difference.

        step: The step with the largest difference.

        tensors: The largest difference of each tensor.

        first: (tensor, step) of the first difference beyond both bounds, or None.

        twin: The largest difference of the rounding baseline from serial.

        twins: The largest difference of the rounding baseline, for each tensor.

        bound: The bound of a tensor's difference, relative to its own size. Above it, the rounding
            baseline decides.

        allowed: The bound that the rounding baseline sets: 4 times its difference, by the largest
            of the tensor's kind. It is the one that `first` exceeded, or else the largest that was
            needed.

        chaotic: The step from which the rounding baseline diverges, so that nothing can be
            compared, or None.

        dtype: The number type of the computation.

        why: Why the type is not float64, or None.

        reference: What the training was compared with: serial, or serial with the same
            micro-batches if the model has batch norm.
    """

    value: float
    tensor: str | None = None
    step: int | None = None
    tensors: dict[str, float] = field(default_factory=dict, compare=False)
    first: tuple[str, int] | None = None
    twin: float = 0.0
    twins: dict[str, float] = field(default_factory=dict, compare=False)
    bound: float = EXACT_BOUND
    allowed: float = 0.0
    chaotic: int | None = None
    dtype: str = "float64"
    why: str | None = None
    reference: str = "serial"


@dataclass(frozen=True, kw_only=True)
class Certificate(Difference):
    """Whether a strategy made the same training as serial, and what was compared.

    Attributes:
        job: The name of the job.

        digest: A digest of the job: its settings, initial parameters and first batch, in float64.

        strategy: The strategy as written.

        resolved: The strategy with every `auto` replaced.

        device: The device of the ranks.

        backend: The backend.

        steps: The number of steps.

        failure: What a rank reported about replicas that differ, or why there was nothing to
            compare.

        cause: The cause of a difference, or a possible one.

        sabotage: The fault that was injected, or None.

        machine: The machine as in a record: cpu, cores, load, versions.

        folder: The folder of the verification.
    """

    job: str
    digest: str
    strategy: str
    resolved: str
    device: str
    backend: str
    steps: int
    failure: str | None
    cause: str | None
    sabotage: str | None
    machine: dict[str, Any]
    folder: Path

    @property
    def difference(self) -> float | None:
        """The largest difference, or None if the ranks did not finish."""
        return None if self.failure else self.value

    @property
    def same(self) -> bool:
        """Whether it is the same training."""
        return self.difference is not None and self.first is None

    def to_json(self) -> dict[str, Any]:
        """Convert the certificate to plain JSON.

        What the certificate is about comes first. A difference that is not finite is null, and
        `tensor` names its place.

        Returns:
            The values, by name.
        """
        values = {
            "schema": 2,
            **dict.fromkeys(Certificate.__annotations__),
            **asdict(self),
            "folder": str(self.folder),
            "difference": self.difference,
            "same": self.same,
        }
        del values["value"], values["step"]
        return values | {
            name: _replace_non_finite(values[name])
            for name in ("difference", "twin", "allowed", "tensors", "twins")
        }


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_non_finite(each) for name, each in value.items()}
    return value if value is not None and math.isfinite(value) else None
