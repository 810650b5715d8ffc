"""What a step made before its update, and how far that is from what another made."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from paragrad.engine.state.values import is_differentiable, is_same_value

EQUAL_EPS = 8  # eps of the largest: equal
BASELINE_EPS = 1000  # eps up to which a twin is believed


@dataclass
class StepOutcome:
    """What a step made before its update: the mean loss, its weight, mean gradients, buffers.
    changed: which buffers it did.

    moved: parameters that the forward changed;  state: what it changed in Python, of one worker
    only if it reads that; tested: before that, the mean loss of some of the samples in a test;
    or why there is none, where it was asked for.
    """

    loss: float
    weight: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    changed_buffers: frozenset[str] = frozenset()
    changed_parameters: dict[str, Tensor] = field(default_factory=dict)
    changed_state: dict[str, Any] = field(default_factory=dict)
    test_loss: float | str = ""


@dataclass(frozen=True)
class Gap:
    """How far a kind of values is from others: the largest difference, where, and the largest
    value of the kind.
    """

    value: float = 0.0
    tensor: str | None = None
    largest: float = 0.0
    eps: float = 0.0  # of the coarsest among them

    @property
    def equality_tolerance(self) -> float:
        return EQUAL_EPS * self.eps * self.largest

    @property
    def is_rounding(self) -> bool:
        """Of a twin: is it rounding?"""
        return self.value <= BASELINE_EPS * self.eps * self.largest


# a kind (loss, weight, test, gradient, buffer, parameter, state) and a module
GapKey = tuple[str, str]


def compute_gaps(
    outcome: StepOutcome, reference: StepOutcome, eps: float = 0.0
) -> dict[GapKey, Gap]:
    """By kind and module, the largest difference from what another made. A buffer that nobody
    changed must be the same to the bit. eps: at least that of every tensor.
    """
    still = _find_unequal_buffer(outcome, reference)
    found = {
        ("loss", ""): Gap(abs(outcome.loss - reference.loss), "loss", abs(reference.loss), eps),
        ("weight", ""): Gap(
            abs(outcome.weight - reference.weight), "weight", abs(reference.weight), eps
        ),
        # the same keys on every rank
        ("buffer", ""): Gap(),
        ("parameter", ""): Gap(),
        ("state", ""): Gap(),
    }
    real = {
        name: reference.buffers[name]
        for name in sorted(reference.changed_buffers)
        if is_differentiable(reference.buffers[name])
    }
    for kind, mine, other in (
        ("gradient", outcome.gradients, reference.gradients),
        ("buffer", outcome.buffers, real),
        ("parameter", outcome.changed_parameters, reference.changed_parameters),
    ):
        for module, names in itertools.groupby(other, key=lambda name: name.rpartition(".")[0]):
            gap = _find_largest_gap({name: mine.get(name) for name in names}, other, eps)
            found[kind, module] = (
                _merge_gaps(found[kind, module], gap) if (kind, module) in found else gap
            )
    if isinstance(reference.test_loss, float):
        value = (
            abs(outcome.test_loss - reference.test_loss)
            if isinstance(outcome.test_loss, float)
            else math.inf
        )
        found["test", ""] = Gap(
            value if math.isfinite(value) else math.inf,
            "loss of a test",
            abs(reference.test_loss),
            # a test may be cast where a step is not
            max(eps, torch.finfo(torch.float32).eps),
        )
    if still is not None:
        found["buffer", ""] = Gap(math.inf, still, 0.0, eps)
    if alone := [
        name for name in outcome.changed_parameters if name not in reference.changed_parameters
    ]:
        found["parameter", ""] = Gap(math.inf, alone[0], 0.0, eps)
    if reference.changed_state:
        pairs = {
            name: _compute_state_difference(outcome.changed_state.get(name, ...), value)
            for name, value in reference.changed_state.items()
        }
        worst = max(pairs, key=lambda name: pairs[name][0])
        found["state", ""] = Gap(
            pairs[worst][0], worst, pairs[worst][1], max(eps, torch.finfo(torch.float32).eps)
        )
    return found


def _merge_gaps(one: Gap, other: Gap) -> Gap:
    worst = one if one.value >= other.value else other
    return replace(worst, largest=max(one.largest, other.largest), eps=max(one.eps, other.eps))


def pool_gaps(gaps: dict[GapKey, Gap]) -> dict[GapKey, Gap]:
    """Over all modules."""
    kinds: dict[GapKey, Gap] = {}
    for (kind, _), gap in gaps.items():
        kinds[kind, ""] = _merge_gaps(kinds[kind, ""], gap) if (kind, "") in kinds else gap
    return kinds


def _find_unequal_buffer(outcome: StepOutcome, reference: StepOutcome) -> str | None:
    for name, buffer in reference.buffers.items():
        exact = name not in reference.changed_buffers or not is_differentiable(buffer)
        mine = outcome.buffers.get(name)
        if exact and (
            mine is None
            or mine.shape != buffer.shape
            or not is_same_value(mine, buffer.to(mine.dtype))
        ):
            return name
    return None


def _find_largest_gap(
    tensors: dict[str, Tensor | None], references: Mapping[str, Tensor | None], eps: float
) -> Gap:
    there = {name: references[name] for name in tensors}
    worst = Gap(
        0.0,
        None,
        max(
            (_compute_largest_finite(each) for each in there.values() if each is not None),
            default=0.0,
        ),
        max([eps, *(torch.finfo(each.dtype).eps for each in there.values() if each is not None)]),
    )
    for name, reference in there.items():
        value = _compute_difference(tensors[name], reference)
        if value > worst.value:
            worst = replace(worst, value=value, tensor=name)
    return worst


def _compute_difference(tensor: Tensor | None, reference: Tensor | None) -> float:
    if tensor is None or reference is None:
        return 0.0 if tensor is reference else math.inf
    if tensor.shape != reference.shape:
        return math.inf
    wide = torch.promote_types(tensor.dtype, reference.dtype)
    tensor = tensor.detach().to(wide)
    reference = reference.detach().to(wide)
    apart = _compute_largest(tensor - reference)
    if math.isfinite(apart):  # so all of both is
        return apart
    same = torch.equal(torch.isfinite(reference), torch.isfinite(tensor))
    return _compute_largest_finite(tensor - reference) if same else math.inf


def _compute_state_difference(ours: Any, reference: Any) -> tuple[float, float]:
    """(how far values of Python are apart, the largest of them): numbers by their difference,
    anything else 0 or infinite.
    """
    pairs: list[tuple[float, float]] = []
    if isinstance(ours, dict) and isinstance(reference, dict) and ours.keys() == reference.keys():
        pairs = [_compute_state_difference(ours[key], reference[key]) for key in ours]
    elif (
        isinstance(ours, list | tuple | deque)
        and type(ours) is type(reference)
        and len(ours) == len(reference)
    ):
        pairs = list(
            itertools.starmap(_compute_state_difference, zip(ours, reference, strict=True))
        )
    elif is_same_value(ours, reference):
        return 0.0, 0.0
    elif isinstance(ours, float | Tensor | numpy.ndarray) and isinstance(
        reference, float | Tensor | numpy.ndarray
    ):
        mine = torch.as_tensor(ours)
        other = torch.as_tensor(reference)
        return (
            (_compute_difference(mine, other), _compute_largest_finite(other))
            if is_differentiable(other)
            else (math.inf, 0.0)
        )
    else:
        return math.inf, 0.0
    return max((value for value, _ in pairs), default=0.0), max(
        (largest for _, largest in pairs), default=0.0
    )


def _compute_largest_finite(tensor: Tensor) -> float:
    """The largest of the finite values."""
    value = _compute_largest(tensor)
    if math.isfinite(value):
        return value
    sizes = tensor.detach().abs()
    return float(torch.where(torch.isfinite(sizes), sizes, 0).max())


def _compute_largest(tensor: Tensor) -> float:
    """The largest size; not finite where one is not."""
    tensor = tensor.detach()
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().max())
    low, high = map(float, torch.aminmax(tensor))
    return max(-low, high) if low == low else math.nan
