"""Which server has what: a slice of the parameters, and of each slice the vectors in which it travels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.techniques.layout import Held
from paragrad.techniques.served.header import DTYPES
from paragrad.techniques.slices import Stretch


@dataclass(frozen=True)
class Slot:
    """One vector of a slice: the stretches of one type, one after another. added: of values that forwards change, not of
    parameters: what comes is added to them."""
    dtype: torch.dtype
    stretches: tuple[Stretch, ...]
    added: bool = False

    @property
    def elements(self) -> int:
        return sum(each.stop - each.start for each in self.stretches)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def views(self, vector: Tensor) -> list[Tensor]:
        """Of a vector of its length, a flat place for each stretch."""
        return list(vector.split([each.stop - each.start for each in self.stretches]))


def slots_of(stretches: Sequence[Stretch], tensors: Sequence[Tensor], added: bool = False) -> list[Slot]:
    """A slice's vectors, by the types of what it has a part of."""
    types = dict.fromkeys(tensors[each.index].dtype for each in stretches)
    return [Slot(dtype, tuple(each for each in stretches if tensors[each.index].dtype == dtype), added) for dtype in types]


def places(slot: Slot, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where the stretches lie in contiguous tensors of the parameters' shapes."""
    return [tensors[each.index].detach().view(-1)[each.start:each.stop] for each in slot.stretches]


def held(stretch: Stretch, names: Sequence[str], parameters: Sequence[Tensor]) -> Held:
    """The part of a serial tensor that a stretch is."""
    parameter = parameters[stretch.index]
    whole = stretch.stop - stretch.start == parameter.numel()
    return Held(names[stretch.index], tuple(parameter.shape), None if whole else range(stretch.start, stretch.stop))


def marks(slot: Slot, gradients: Sequence[Tensor | None]) -> bytes:
    """A byte for each stretch: is there a gradient?"""
    return bytes(gradients[each.index] is not None for each in slot.stretches)


def fill(slot: Slot, gradients: Sequence[Tensor | None], vector: Tensor) -> None:
    """Gradients into their places in a vector; zeros where there is none."""
    there: list[Tensor] = []
    values: list[Tensor] = []
    for each, place in zip(slot.stretches, slot.views(vector), strict=True):
        gradient = gradients[each.index]
        if gradient is None:
            place.zero_()
        else:
            there.append(place)
            values.append(gradient.detach().reshape(-1)[each.start:each.stop])
    if there:
        torch._foreach_copy_(there, values)


def changing(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved with a model, by name, as they are now: a forward may make them anew."""
    saved = model.state_dict(keep_vars=True)
    return {name: each for name, each in model.named_buffers() if name in saved and each.dtype in DTYPES and each.numel()}


def trained_of(named: Mapping[str, Any]) -> tuple[list[str], list[Tensor]]:
    """(names, tensors) of the parameters that are trained, in the model's order."""
    trained = {name: each for name, each in named.items() if each.requires_grad}
    return list(trained), list(trained.values())


def state_of(text: bytes, vector: Tensor, stretches: int) -> list[dict[str, Any]]:
    """What `Shard` tells of its optimizer's state, by stretch."""
    found: list[dict[str, Any]] = [{} for _ in range(stretches)]
    start = 0
    for number, what, *said in json.loads(text):
        if len(said) == 1:
            found[number][what] = said[0]
            continue
        dtype, shape = getattr(torch, said[0]), said[1]
        stop = start + math.prod(shape) * dtype.itemsize
        found[number][what] = vector[start:stop].clone().view(dtype).reshape(shape)
        start = stop
    return found
