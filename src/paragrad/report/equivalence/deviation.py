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
INFINITE = 1e20

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Apart:
    """How far a tensor is from its reference: `own`, by its own size; `pooled`, by the largest
    of its kind.

    The own size of a tensor that is all rounding is rounding, so `own` has no upper end;
    `pooled` is a steady measure.
    """

    own: float
    pooled: float


def apart(ours: Tensors, theirs: Tensors, noise: float = 0.0) -> dict[str, Apart]:
    """The difference of every tensor of a kind; infinite where one side has none, or where both
    are not finite alike.

    noise: the share of the largest of the kind below which both sides count as zero.
    """
    largest = most(theirs)
    found = {}
    for name, reference in theirs.items():
        value, size = _difference(ours[name], reference, noise * largest)
        found[name] = Apart(_relative(value, max(size, FLOOR * largest)), _relative(value, largest))
    return found


def each_apart(ours: Tensors, theirs: Tensors, floor: float) -> dict[str, Apart]:
    """The same of buffers, each a kind of its own; floor: the least size that one is measured
    by.
    """
    found = {}
    for name, reference in theirs.items():
        value, size = _difference(ours[name], reference, 0.0)
        found[name] = Apart(*[_relative(value, max(size, floor))] * 2)
    return found


def differences(ours: Tensors, theirs: Tensors, noise: float = 0.0) -> dict[str, float]:
    """The difference of every tensor of a kind, by its own size."""
    return {name: each.own for name, each in apart(ours, theirs, noise).items()}


def most(tensors: Tensors) -> float:
    """The largest finite number of a kind."""
    return max(
        (_size(_numeric(tensor)) for tensor in tensors.values() if tensor is not None), default=0.0
    )


def _difference(ours: Tensor | None, reference: Tensor | None, noise: float) -> tuple[float, float]:
    """(the largest |a - b|, the size of b)."""
    if ours is None or reference is None:
        return (0.0 if ours is reference else math.inf), 0.0
    if torch.equal(ours, reference):
        return 0.0, 0.0
    if ours.shape != reference.shape:
        return math.inf, 0.0
    a = _numeric(ours)
    b = _numeric(reference)
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not finite.all():
        if not ((a == b) | (a.isnan() & b.isnan()))[~finite].all():
            return math.inf, 0.0
        a = a[finite]
        b = b[finite]
    if max(_size(a), _size(b)) < noise:
        return 0.0, 0.0
    value = float((a - b).abs().max()) if a.numel() else 0.0
    return value, _size(b)


def _size(tensor: Tensor) -> float:
    """The largest finite number of a tensor that stands for no infinity."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.abs()
    found = float(sizes.max())
    if found < INFINITE:
        return found
    sizes = sizes[torch.isfinite(sizes)]
    below = sizes[sizes < INFINITE]
    return float(below.max() if below.numel() else sizes.max()) if sizes.numel() else 0.0


def _numeric(tensor: Tensor) -> Tensor:
    """Without history; whole numbers and truth values as real numbers."""
    tensor = tensor.detach()
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _relative(value: float, scale: float) -> float:
    if value == 0.0 or not math.isfinite(value):
        return value
    return value / scale if scale else math.inf
