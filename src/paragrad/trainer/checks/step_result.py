"""The outcome of a step before its update, and its difference from another outcome."""

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

EQUAL_EPS = 8  # in eps of the largest value: values that differ by less are equal
BASELINE_EPS = 1000  # in eps of the largest value: up to here, a baseline shows rounding


@dataclass
class StepOutcome:
    """The outcome of a step before its update.

    Attributes:
        loss: The mean loss.

        weight: The weight of the mean (samples or tokens).

        gradients: The mean gradients.

        buffers: The buffers.

        changed_buffers: The names of the buffers that the step changed.

        changed_parameters: The parameters that the forward changed.

        changed_state: The Python state that the forward changed; of one worker, only if the forward
            reads it.

        test_loss: The mean loss of some samples in a test before the step; or why there is none.
    """

    loss: float
    weight: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    changed_buffers: frozenset[str] = frozenset()
    changed_parameters: dict[str, Tensor] = field(default_factory=dict)
    changed_state: dict[str, Any] = field(default_factory=dict)
    test_loss: float | str = ""

    def move_to(self, device: torch.device) -> StepOutcome:
        """Return the outcome with gradients and buffers on a device.

        Args:
            device: The device.
        """
        return replace(
            self,
            gradients={
                name: None if each is None else each.detach().to(device)
                for name, each in self.gradients.items()
            },
            buffers={name: each.to(device) for name, each in self.buffers.items()},
        )


@dataclass(frozen=True)
class Gap:
    """The difference of a kind of values from a reference.

    Attributes:
        value: The largest difference.
        tensor: The tensor with the largest difference.
        largest: The largest value of the kind.
        eps: The eps of the coarsest type among the tensors.
    """

    value: float = 0.0
    tensor: str | None = None
    largest: float = 0.0
    eps: float = 0.0

    @property
    def equality_tolerance(self) -> float:
        """The difference up to which values count as equal."""
        return EQUAL_EPS * self.eps * self.largest

    @property
    def is_rounding(self) -> bool:
        """Whether the difference of a baseline is small enough to be rounding."""
        return self.value <= BASELINE_EPS * self.eps * self.largest


# (kind, module), with the kinds loss, weight, test, gradient, buffer, parameter and state
GapKey = tuple[str, str]


def compute_gaps(
    outcome: StepOutcome, reference: StepOutcome, eps: float = 0.0
) -> dict[GapKey, Gap]:
    """Compute the largest difference from a reference, by kind and module.

    A buffer that no step changed must be bit-equal.

    Args:
        outcome: The outcome to compare.
        reference: The outcome with which it is compared.
        eps: A lower bound of the eps of every tensor.
    """
    unequal_buffer = _find_unequal_buffer(outcome, reference)
    gaps = {
        ("loss", ""): Gap(abs(outcome.loss - reference.loss), "loss", abs(reference.loss), eps),
        ("weight", ""): Gap(
            abs(outcome.weight - reference.weight), "weight", abs(reference.weight), eps
        ),
        # The keys must be the same on every rank.
        ("buffer", ""): Gap(),
        ("parameter", ""): Gap(),
        ("state", ""): Gap(),
    }
    real_buffers = {
        name: reference.buffers[name]
        for name in sorted(reference.changed_buffers)
        if is_differentiable(reference.buffers[name])
    }
    for kind, tensors, references in (
        ("gradient", outcome.gradients, reference.gradients),
        ("buffer", outcome.buffers, real_buffers),
        ("parameter", outcome.changed_parameters, reference.changed_parameters),
    ):
        for module, names in itertools.groupby(
            references, key=lambda name: name.rpartition(".")[0]
        ):
            gap = _find_largest_gap({name: tensors.get(name) for name in names}, references, eps)
            gaps[kind, module] = (
                _merge_gaps(gaps[kind, module], gap) if (kind, module) in gaps else gap
            )
    if isinstance(reference.test_loss, float):
        value = (
            abs(outcome.test_loss - reference.test_loss)
            if isinstance(outcome.test_loss, float)
            else math.inf
        )
        gaps["test", ""] = Gap(
            value if math.isfinite(value) else math.inf,
            "loss of a test",
            abs(reference.test_loss),
            # Autocast may apply to the test and not to the step.
            max(eps, torch.finfo(torch.float32).eps),
        )
    if unequal_buffer is not None:
        gaps["buffer", ""] = Gap(math.inf, unequal_buffer, 0.0, eps)
    if unexpected := [
        name for name in outcome.changed_parameters if name not in reference.changed_parameters
    ]:
        gaps["parameter", ""] = Gap(math.inf, unexpected[0], 0.0, eps)
    if reference.changed_state:
        pairs = {
            name: _compute_state_difference(outcome.changed_state.get(name, ...), value)
            for name, value in reference.changed_state.items()
        }
        worst = max(pairs, key=lambda name: pairs[name][0])
        gaps["state", ""] = Gap(
            pairs[worst][0], worst, pairs[worst][1], max(eps, torch.finfo(torch.float32).eps)
        )
    return gaps


def _merge_gaps(one: Gap, other: Gap) -> Gap:
    worst = one if one.value >= other.value else other
    return replace(worst, largest=max(one.largest, other.largest), eps=max(one.eps, other.eps))


def pool_gaps(gaps: dict[GapKey, Gap]) -> dict[GapKey, Gap]:
    """Merge the gaps of all modules into one for each kind."""
    kinds: dict[GapKey, Gap] = {}
    for (kind, _), gap in gaps.items():
        kinds[kind, ""] = _merge_gaps(kinds[kind, ""], gap) if (kind, "") in kinds else gap
    return kinds


def _find_unequal_buffer(outcome: StepOutcome, reference: StepOutcome) -> str | None:
    for name, buffer in reference.buffers.items():
        exact = name not in reference.changed_buffers or not is_differentiable(buffer)
        own_buffer = outcome.buffers.get(name)
        if exact and (
            own_buffer is None
            or own_buffer.shape != buffer.shape
            or not is_same_value(own_buffer, buffer.to(own_buffer.dtype))
        ):
            return name
    return None


def _find_largest_gap(
    tensors: dict[str, Tensor | None], references: Mapping[str, Tensor | None], eps: float
) -> Gap:
    selected = {name: references[name] for name in tensors}
    worst = Gap(
        0.0,
        None,
        max(
            (compute_largest_finite(each) for each in selected.values() if each is not None),
            default=0.0,
        ),
        max(
            [eps, *(torch.finfo(each.dtype).eps for each in selected.values() if each is not None)]
        ),
    )
    for name, reference in selected.items():
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
    difference = compute_largest(tensor - reference)
    if math.isfinite(difference):  # All values of both tensors are finite then.
        return difference
    same_finiteness = torch.equal(torch.isfinite(reference), torch.isfinite(tensor))
    return compute_largest_finite(tensor - reference) if same_finiteness else math.inf


def _compute_state_difference(ours: Any, reference: Any) -> tuple[float, float]:
    """Compute the difference of Python values.

    Numbers are compared by their difference. Any other values differ by 0 or infinity.

    Returns:
        (difference, largest value).
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
        tensor = torch.as_tensor(ours)
        reference_tensor = torch.as_tensor(reference)
        return (
            (
                _compute_difference(tensor, reference_tensor),
                compute_largest_finite(reference_tensor),
            )
            if is_differentiable(reference_tensor)
            else (math.inf, 0.0)
        )
    else:
        return math.inf, 0.0
    return max((value for value, _ in pairs), default=0.0), max(
        (largest for _, largest in pairs), default=0.0
    )


def compute_largest_finite(tensor: Tensor) -> float:
    """Return the largest magnitude of the finite values.

    Args:
        tensor: A tensor of any shape; an empty one gives 0.
    """
    value = compute_largest(tensor)
    if math.isfinite(value):
        return value
    sizes = tensor.detach().abs()
    return float(torch.where(torch.isfinite(sizes), sizes, 0).max())


def compute_largest(tensor: Tensor) -> float:
    """Return the largest magnitude; it is not finite if any value is not.

    Args:
        tensor: A tensor of any shape; an empty one gives 0.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().max())
    low, high = map(float, torch.aminmax(tensor))
    return max(-low, high) if low == low else math.nan
