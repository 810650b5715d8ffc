"""How far apart are two models' tensors: each by its own size, and all of a kind by the largest
of the kind.

Difference of a tensor = max|a - b| / max(max|b|, floor). The floor of gradients and of
parameters is 1e-6 x the largest of their kind, that of buffers 1e-6 x the largest parameter: a
buffer may hold anything, such as a mask of -1e30, and is no measure of another. Places that are
not finite must be the same; what is above 1e20 stands for infinity, and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-6  # of the largest of a kind: below it a tensor is not its own measure
# what a mask is filled with to stand for infinity is above, what is computed below
INFINITY_SIZE = 1e20

NamedTensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """How far a tensor is from its reference: `own`, by its own size; `pooled`, by the largest
    of its kind.

    The own size of a tensor that is all rounding is rounding, so `own` has no upper end;
    `pooled` is a steady measure.
    """

    per_tensor: float
    per_kind: float


def measure_deviations(
    tensors: NamedTensors, references: NamedTensors, noise: float = 0.0
) -> dict[str, Deviation]:
    """The difference of every tensor of a kind; infinite where one side has none, or where both
    are not finite alike.

    noise: the share of the largest of the kind below which both sides count as zero.
    """
    largest = find_largest_value(references)
    found = {}
    for name, reference in references.items():
        value, size = _measure_difference(tensors[name], reference, noise * largest)
        found[name] = Deviation(
            _divide_by_scale(value, max(size, FLOOR * largest)), _divide_by_scale(value, largest)
        )
    return found


def measure_buffer_deviations(
    tensors: NamedTensors, references: NamedTensors, floor: float
) -> dict[str, Deviation]:
    """The same of buffers, each a kind of its own; floor: the least size that one is measured
    by.
    """
    found = {}
    for name, reference in references.items():
        value, size = _measure_difference(tensors[name], reference, 0.0)
        found[name] = Deviation(*[_divide_by_scale(value, max(size, floor))] * 2)
    return found


def list_tensor_deviations(
    tensors: NamedTensors, references: NamedTensors, noise: float = 0.0
) -> dict[str, float]:
    """The difference of every tensor of a kind, by its own size."""
    return {
        name: each.per_tensor
        for name, each in measure_deviations(tensors, references, noise).items()
    }


def find_largest_value(tensors: NamedTensors) -> float:
    """The largest finite number of a kind."""
    return max(
        (
            _find_largest_finite(_convert_to_real(tensor))
            for tensor in tensors.values()
            if tensor is not None
        ),
        default=0.0,
    )


def _measure_difference(
    tensor: Tensor | None, reference: Tensor | None, noise: float
) -> tuple[float, float]:
    """(the largest |a - b|, the size of b)."""
    if tensor is None or reference is None:
        return (0.0 if tensor is reference else math.inf), 0.0
    if torch.equal(tensor, reference):
        return 0.0, 0.0
    if tensor.shape != reference.shape:
        return math.inf, 0.0
    a = _convert_to_real(tensor)
    b = _convert_to_real(reference)
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not finite.all():
        if not ((a == b) | (a.isnan() & b.isnan()))[~finite].all():
            return math.inf, 0.0
        a = a[finite]
        b = b[finite]
    if max(_find_largest_finite(a), _find_largest_finite(b)) < noise:
        return 0.0, 0.0
    value = float((a - b).abs().max()) if a.numel() else 0.0
    return value, _find_largest_finite(b)


def _find_largest_finite(tensor: Tensor) -> float:
    """The largest finite number of a tensor that stands for no infinity."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.abs()
    found = float(sizes.max())
    if found < INFINITY_SIZE:
        return found
    sizes = sizes[torch.isfinite(sizes)]
    below = sizes[sizes < INFINITY_SIZE]
    return float(below.max() if below.numel() else sizes.max()) if sizes.numel() else 0.0


def _convert_to_real(tensor: Tensor) -> Tensor:
    """Without history; whole numbers and truth values as real numbers."""
    tensor = tensor.detach()
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _divide_by_scale(value: float, scale: float) -> float:
    if value == 0.0 or not math.isfinite(value):
        return value
    return value / scale if scale else math.inf
