"""How far two models' tensors deviate: each by its own size, and by the largest of its kind.

The deviation of a tensor is max|a - b| / max(max|b|, floor). The floor of gradients and of
parameters is 1e-6 times the largest of their kind. The floor of buffers is 1e-6 times the largest
parameter. A buffer may hold anything, such as a mask of -1e30, and is no measure of another one.

Elements that are not finite must be the same. Numbers above 1e20 stand for infinity and measure
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# the share of the largest of a kind below which a tensor is not measured by its own size
FLOOR = 1e-6
# Masks are filled with larger numbers, which stand for infinity. Computed numbers are smaller.
INFINITY_SIZE = 1e20

NamedTensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """How far a tensor deviates from its reference.

    A tensor that is all rounding has a size that is rounding, too, so `per_tensor` has no upper
    bound; `per_kind` is a steady measure.

    Attributes:
        per_tensor: relative to the tensor's own size.
        per_kind: relative to the largest tensor of its kind.
    """

    per_tensor: float
    per_kind: float


def measure_deviations(
    tensors: NamedTensors,
    references: NamedTensors,
    noise: float = 0.0,
    least_scale: float = 0.0,
) -> dict[str, Deviation]:
    """Measure the deviation of every tensor of a kind.

    It is infinite if one side has no tensor, or if the elements that are not finite differ.

    Args:
        tensors: the tensors by name.
        references: the reference tensors by name.
        noise: the share of the largest of the kind below which both sides count as zero.
        least_scale: the least number that counts as the largest of the kind.
    """
    largest_now = find_largest_value(references)
    largest = max(largest_now, least_scale)
    deviations = {}
    for name, reference in references.items():
        value, size = _measure_difference(tensors[name], reference, noise * largest_now)
        deviations[name] = Deviation(
            _divide_by_scale(value, max(size, FLOOR * largest)), _divide_by_scale(value, largest)
        )
    return deviations


def measure_buffer_deviations(
    tensors: NamedTensors, references: NamedTensors, floor: float
) -> dict[str, Deviation]:
    """Measure the deviation of every buffer. Each buffer is a kind of its own.

    Args:
        tensors: the buffers by name.
        references: the reference buffers by name.
        floor: the least size by which a buffer is measured.
    """
    deviations = {}
    for name, reference in references.items():
        value, size = _measure_difference(tensors[name], reference, 0.0)
        deviations[name] = Deviation(*[_divide_by_scale(value, max(size, floor))] * 2)
    return deviations


def list_tensor_deviations(
    tensors: NamedTensors, references: NamedTensors, noise: float = 0.0
) -> dict[str, float]:
    """List the deviation of every tensor of a kind, relative to its own size.

    Args:
        tensors: the tensors by name.
        references: the reference tensors by name.
        noise: the share of the largest of the kind below which both sides count as zero.
    """
    return {
        name: each.per_tensor
        for name, each in measure_deviations(tensors, references, noise).items()
    }


def find_largest_value(tensors: NamedTensors) -> float:
    """Find the largest finite number of a kind."""
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
    """Return (the largest |a - b|, the size of b)."""
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
    """The largest finite number of a tensor that does not stand for infinity."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.abs()
    largest = float(sizes.max())
    if largest < INFINITY_SIZE:
        return largest
    sizes = sizes[torch.isfinite(sizes)]
    below = sizes[sizes < INFINITY_SIZE]
    return float(below.max() if below.numel() else sizes.max()) if sizes.numel() else 0.0


def _convert_to_real(tensor: Tensor) -> Tensor:
    """Detach the tensor; integers and booleans become floating-point numbers."""
    tensor = tensor.detach()
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _divide_by_scale(value: float, scale: float) -> float:
    if value == 0.0 or not math.isfinite(value):
        return value
    return value / scale if scale else math.inf
