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

from paragrad.engine.state.values import differentiable, same

FLOOR = 8  # eps of the largest: equal
BELIEVED = 1000  # eps up to which a twin is believed


@dataclass
class Made:
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
    changed: frozenset[str] = frozenset()
    moved: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    tested: float | str = ""


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
    def floor(self) -> float:
        return FLOOR * self.eps * self.largest

    @property
    def believed(self) -> bool:
        """Of a twin: is it rounding?"""
        return self.value <= BELIEVED * self.eps * self.largest


# a kind (loss, weight, test, gradient, buffer, parameter, state) and a module
Key = tuple[str, str]


def gaps(ours: Made, theirs: Made, eps: float = 0.0) -> dict[Key, Gap]:
    """By kind and module, the largest difference from what another made. A buffer that nobody
    changed must be the same to the bit. eps: at least that of every tensor.
    """
    still = _still(ours, theirs)
    found = {
        ("loss", ""): Gap(abs(ours.loss - theirs.loss), "loss", abs(theirs.loss), eps),
        ("weight", ""): Gap(abs(ours.weight - theirs.weight), "weight", abs(theirs.weight), eps),
        # the same keys on every rank
        ("buffer", ""): Gap(),
        ("parameter", ""): Gap(),
        ("state", ""): Gap(),
    }
    real = {
        name: theirs.buffers[name]
        for name in sorted(theirs.changed)
        if differentiable(theirs.buffers[name])
    }
    for kind, mine, other in (
        ("gradient", ours.gradients, theirs.gradients),
        ("buffer", ours.buffers, real),
        ("parameter", ours.moved, theirs.moved),
    ):
        for module, names in itertools.groupby(other, key=lambda name: name.rpartition(".")[0]):
            gap = _largest({name: mine.get(name) for name in names}, other, eps)
            found[kind, module] = (
                _worse(found[kind, module], gap) if (kind, module) in found else gap
            )
    if isinstance(theirs.tested, float):
        value = abs(ours.tested - theirs.tested) if isinstance(ours.tested, float) else math.inf
        found["test", ""] = Gap(
            value if math.isfinite(value) else math.inf,
            "loss of a test",
            abs(theirs.tested),
            # a test may be cast where a step is not
            max(eps, torch.finfo(torch.float32).eps),
        )
    if still is not None:
        found["buffer", ""] = Gap(math.inf, still, 0.0, eps)
    if alone := [name for name in ours.moved if name not in theirs.moved]:
        found["parameter", ""] = Gap(math.inf, alone[0], 0.0, eps)
    if theirs.state:
        pairs = {
            name: _state_apart(ours.state.get(name, ...), value)
            for name, value in theirs.state.items()
        }
        worst = max(pairs, key=lambda name: pairs[name][0])
        found["state", ""] = Gap(
            pairs[worst][0], worst, pairs[worst][1], max(eps, torch.finfo(torch.float32).eps)
        )
    return found


def _worse(one: Gap, other: Gap) -> Gap:
    worst = one if one.value >= other.value else other
    return replace(worst, largest=max(one.largest, other.largest), eps=max(one.eps, other.eps))


def pooled(found: dict[Key, Gap]) -> dict[Key, Gap]:
    """Over all modules."""
    kinds: dict[Key, Gap] = {}
    for (kind, _), gap in found.items():
        kinds[kind, ""] = _worse(kinds[kind, ""], gap) if (kind, "") in kinds else gap
    return kinds


def _still(ours: Made, theirs: Made) -> str | None:
    for name, buffer in theirs.buffers.items():
        exact = name not in theirs.changed or not differentiable(buffer)
        mine = ours.buffers.get(name)
        if exact and (
            mine is None or mine.shape != buffer.shape or not same(mine, buffer.to(mine.dtype))
        ):
            return name
    return None


def _largest(
    ours: dict[str, Tensor | None], theirs: Mapping[str, Tensor | None], eps: float
) -> Gap:
    there = {name: theirs[name] for name in ours}
    worst = Gap(
        0.0,
        None,
        max((_most(each) for each in there.values() if each is not None), default=0.0),
        max([eps, *(torch.finfo(each.dtype).eps for each in there.values() if each is not None)]),
    )
    for name, reference in there.items():
        value = _apart(ours[name], reference)
        if value > worst.value:
            worst = replace(worst, value=value, tensor=name)
    return worst


def _apart(ours: Tensor | None, reference: Tensor | None) -> float:
    if ours is None or reference is None:
        return 0.0 if ours is reference else math.inf
    if ours.shape != reference.shape:
        return math.inf
    wide = torch.promote_types(ours.dtype, reference.dtype)
    ours = ours.detach().to(wide)
    reference = reference.detach().to(wide)
    apart = _extreme(ours - reference)
    if math.isfinite(apart):  # so all of both is
        return apart
    same = torch.equal(torch.isfinite(reference), torch.isfinite(ours))
    return _most(ours - reference) if same else math.inf


def _state_apart(ours: Any, theirs: Any) -> tuple[float, float]:
    """(how far values of Python are apart, the largest of them): numbers by their difference,
    anything else 0 or infinite.
    """
    pairs: list[tuple[float, float]] = []
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [_state_apart(ours[key], theirs[key]) for key in ours]
    elif (
        isinstance(ours, list | tuple | deque)
        and type(ours) is type(theirs)
        and len(ours) == len(theirs)
    ):
        pairs = list(itertools.starmap(_state_apart, zip(ours, theirs, strict=True)))
    elif same(ours, theirs):
        return 0.0, 0.0
    elif isinstance(ours, float | Tensor | numpy.ndarray) and isinstance(
        theirs, float | Tensor | numpy.ndarray
    ):
        mine = torch.as_tensor(ours)
        other = torch.as_tensor(theirs)
        return (_apart(mine, other), _most(other)) if differentiable(other) else (math.inf, 0.0)
    else:
        return math.inf, 0.0
    return max((value for value, _ in pairs), default=0.0), max(
        (largest for _, largest in pairs), default=0.0
    )


def _most(tensor: Tensor) -> float:
    """The largest of the finite values."""
    value = _extreme(tensor)
    if math.isfinite(value):
        return value
    sizes = tensor.detach().abs()
    return float(torch.where(torch.isfinite(sizes), sizes, 0).max())


def _extreme(tensor: Tensor) -> float:
    """The largest size; not finite where one is not."""
    tensor = tensor.detach()
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().max())
    low, high = map(float, torch.aminmax(tensor))
    return max(-low, high) if low == low else math.nan
