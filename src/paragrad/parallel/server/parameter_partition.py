"""Which server has what: a slice of the parameters, and of each slice the vectors in which it
travels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.layout import Held
from paragrad.engine.optimizer.update_slices import Stretch, slices
from paragrad.engine.state.values import saved_buffers
from paragrad.parallel.server.message_header import DTYPES
from paragrad.strategies.server import Server
from paragrad.strategies.strategy import ELEMENT


@dataclass(frozen=True)
class Slot:
    """One vector of a slice: the stretches of one type, one after another. added: of values
    that forwards change, not of parameters: what comes is added to them;  flags: they are true
    or false, and travel as 1 or 0.
    """

    dtype: torch.dtype
    stretches: tuple[Stretch, ...]
    added: bool = False
    flags: bool = False

    @property
    def elements(self) -> int:
        return sum(each.stop - each.start for each in self.stretches)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def views(self, vector: Tensor) -> list[Tensor]:
        """Of a vector of its length, a flat place for each stretch."""
        return list(vector.split([each.stop - each.start for each in self.stretches]))


def slots_of(
    stretches: Sequence[Stretch], tensors: Sequence[Tensor], added: bool = False
) -> list[Slot]:
    """A slice's vectors, by the types of what it has a part of."""
    types = dict.fromkeys(tensors[each.index].dtype for each in stretches)
    return [
        Slot(
            torch.int8 if dtype == torch.bool else dtype,
            tuple(each for each in stretches if tensors[each.index].dtype == dtype),
            added,
            dtype == torch.bool,
        )
        for dtype in types
    ]


def places(slot: Slot, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where the stretches lie in contiguous tensors of the parameters' shapes."""
    return [
        tensors[each.index].detach().view(-1)[each.start : each.stop] for each in slot.stretches
    ]


def spread(vector: Tensor, slot: Slot, tensors: Sequence[Tensor]) -> None:
    """A vector's values into tensors; what is added is whole, and may lie in another order."""
    into = [tensors[each.index].detach() for each in slot.stretches]
    values = slot.views(vector)
    if slot.added:
        values = [each.view(whole.shape) for each, whole in zip(values, into, strict=True)]
    torch._foreach_copy_(into if slot.added else places(slot, tensors), values)


def held(stretch: Stretch, names: Sequence[str], parameters: Sequence[Tensor]) -> Held:
    """The part of a serial tensor that a stretch is."""
    parameter = parameters[stretch.index]
    whole = stretch.stop - stretch.start == parameter.numel()
    return Held(
        names[stretch.index],
        tuple(parameter.shape),
        None if whole else range(stretch.start, stretch.stop),
    )


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
            values.append(gradient.detach().reshape(-1)[each.start : each.stop])
    if there:
        torch._foreach_copy_(there, values)


@dataclass(frozen=True)
class Cut:
    """How a model is divided over servers. names, parameters: of what is trained;  slots: of
    every server;  added: what forwards change goes to the first one;  follows: names of
    parameters among that.
    """

    names: list[str]
    parameters: list[Tensor]
    slots: list[list[Slot]]
    added: bool
    follows: tuple[str, ...] = ()

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """What the slots are of, as it is now: parameters, and what forwards change; flags as
        numbers, where they lie.
        """
        added = changing(model, self.follows) if self.added else []
        return [
            *self.parameters,
            *(each.view(torch.int8) if each.dtype == torch.bool else each for each in added),
        ]

    @property
    def longest(self) -> int:
        """Bytes of the longest vector."""
        return max((slot.nbytes for slots in self.slots for slot in slots), default=0)

    def every(self) -> Iterator[tuple[int, int, Slot]]:
        """(server, number, slot) of all."""
        return (
            (server, number, slot)
            for server, slots in enumerate(self.slots)
            for number, slot in enumerate(slots)
        )


def cut_of(
    strategy: Server,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    follows: tuple[str, ...] = (),
) -> Cut:
    """Flat ranges of all parameters of equal length; of one server all, each whole."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = list(trained)
    parameters = list(trained.values())
    lengths = [each.numel() for each in parameters]
    stretches = [[Stretch(index, 0, length) for index, length in enumerate(lengths)]]
    if strategy.servers > 1:
        stretches, _ = slices(optimizer, ELEMENT, lengths, strategy.servers, grain=1)
    slots = [slots_of(each, parameters) for each in stretches]
    # where all wait for all they are equal
    added = changing(model, follows) if strategy.hands_out else []
    slots[0] += slots_of(
        [Stretch(len(parameters) + index, 0, each.numel()) for index, each in enumerate(added)],
        [*parameters, *added],
        added=True,
    )
    return Cut(names, parameters, slots, strategy.hands_out, follows)


def changing(model: nn.Module, follows: Sequence[str] = ()) -> list[Tensor]:
    """Buffers that are saved with a model, as they are now: a forward may make them anew. And
    these of its parameters.
    """
    buffers = [
        each
        for each in saved_buffers(model).values()
        if each.dtype in (*DTYPES, torch.bool) and each.numel()
    ]
    return [*buffers, *map(model.get_parameter, follows)]


def state_of(text: bytes, vector: Tensor, stretches: int) -> list[dict[str, Any]]:
    """What `Shard` tells of its optimizer's state, by stretch."""
    found: list[dict[str, Any]] = [{} for _ in range(stretches)]
    start = 0
    for number, what, *said in json.loads(text):
        if len(said) == 1:
            found[number][what] = said[0]
            continue
        dtype = getattr(torch, said[0])
        shape = said[1]
        stop = start + math.prod(shape) * dtype.itemsize
        found[number][what] = vector[start:stop].clone().view(dtype).reshape(shape)
        start = stop
    return found
