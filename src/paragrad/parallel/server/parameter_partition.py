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

from paragrad.engine.layout import ShardSpec
from paragrad.engine.optimizer.update_slices import ParameterRange, assign_slices
from paragrad.engine.state.values import list_saved_buffers
from paragrad.parallel.server.message_header import DTYPES
from paragrad.strategies.server import Server
from paragrad.strategies.strategy import PER_ELEMENT


@dataclass(frozen=True)
class VectorSlot:
    """One vector of a slice: the stretches of one type, one after another. added: of values
    that forwards change, not of parameters: what comes is added to them;  flags: they are true
    or false, and travel as 1 or 0.
    """

    dtype: torch.dtype
    ranges: tuple[ParameterRange, ...]
    is_added: bool = False
    is_boolean: bool = False

    @property
    def elements(self) -> int:
        return sum(each.stop - each.start for each in self.ranges)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def split_vector(self, vector: Tensor) -> list[Tensor]:
        """Of a vector of its length, a flat place for each stretch."""
        return list(vector.split([each.stop - each.start for each in self.ranges]))


def build_slots(
    ranges: Sequence[ParameterRange], tensors: Sequence[Tensor], is_added: bool = False
) -> list[VectorSlot]:
    """A slice's vectors, by the types of what it has a part of."""
    types = dict.fromkeys(tensors[each.index].dtype for each in ranges)
    return [
        VectorSlot(
            torch.int8 if dtype == torch.bool else dtype,
            tuple(each for each in ranges if tensors[each.index].dtype == dtype),
            is_added,
            dtype == torch.bool,
        )
        for dtype in types
    ]


def view_slot_ranges(slot: VectorSlot, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where the stretches lie in contiguous tensors of the parameters' shapes."""
    return [tensors[each.index].detach().view(-1)[each.start : each.stop] for each in slot.ranges]


def scatter_vector(vector: Tensor, slot: VectorSlot, tensors: Sequence[Tensor]) -> None:
    """A vector's values into tensors; what is added is whole, and may lie in another order."""
    into = [tensors[each.index].detach() for each in slot.ranges]
    values = slot.split_vector(vector)
    if slot.is_added:
        values = [each.view(whole.shape) for each, whole in zip(values, into, strict=True)]
    torch._foreach_copy_(into if slot.is_added else view_slot_ranges(slot, tensors), values)


def build_shard_spec(
    element_range: ParameterRange, names: Sequence[str], parameters: Sequence[Tensor]
) -> ShardSpec:
    """The part of a serial tensor that a stretch is."""
    parameter = parameters[element_range.index]
    whole = element_range.stop - element_range.start == parameter.numel()
    return ShardSpec(
        names[element_range.index],
        tuple(parameter.shape),
        None if whole else range(element_range.start, element_range.stop),
    )


def mark_gradients(slot: VectorSlot, gradients: Sequence[Tensor | None]) -> bytes:
    """A byte for each stretch: is there a gradient?"""
    return bytes(gradients[each.index] is not None for each in slot.ranges)


def fill_vector(slot: VectorSlot, gradients: Sequence[Tensor | None], vector: Tensor) -> None:
    """Gradients into their places in a vector; zeros where there is none."""
    there: list[Tensor] = []
    values: list[Tensor] = []
    for each, place in zip(slot.ranges, slot.split_vector(vector), strict=True):
        gradient = gradients[each.index]
        if gradient is None:
            place.zero_()
        else:
            there.append(place)
            values.append(gradient.detach().reshape(-1)[each.start : each.stop])
    if there:
        torch._foreach_copy_(there, values)


@dataclass(frozen=True)
class ParameterPartition:
    """How a model is divided over servers. names, parameters: of what is trained;  slots: of
    every server;  added: what forwards change goes to the first one;  follows: names of
    parameters among that.
    """

    names: list[str]
    parameters: list[Tensor]
    slots: list[list[VectorSlot]]
    has_buffers: bool
    changed_by_forward: tuple[str, ...] = ()

    def collect_tensors(self, model: nn.Module) -> list[Tensor]:
        """What the slots are of, as it is now: parameters, and what forwards change; flags as
        numbers, where they lie.
        """
        added = collect_changing_tensors(model, self.changed_by_forward) if self.has_buffers else []
        return [
            *self.parameters,
            *(each.view(torch.int8) if each.dtype == torch.bool else each for each in added),
        ]

    @property
    def longest_bytes(self) -> int:
        """Bytes of the longest vector."""
        return max((slot.nbytes for slots in self.slots for slot in slots), default=0)

    def list_slots(self) -> Iterator[tuple[int, int, VectorSlot]]:
        """(server, number, slot) of all."""
        return (
            (server, number, slot)
            for server, slots in enumerate(self.slots)
            for number, slot in enumerate(slots)
        )


def partition_parameters(
    strategy: Server,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    changed_by_forward: tuple[str, ...] = (),
) -> ParameterPartition:
    """Flat ranges of all parameters of equal length; of one server all, each whole."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = list(trained)
    parameters = list(trained.values())
    lengths = [each.numel() for each in parameters]
    stretches = [[ParameterRange(index, 0, length) for index, length in enumerate(lengths)]]
    if strategy.servers > 1:
        stretches, _ = assign_slices(optimizer, PER_ELEMENT, lengths, strategy.servers, grain=1)
    slots = [build_slots(each, parameters) for each in stretches]
    # where all wait for all they are equal
    added = collect_changing_tensors(model, changed_by_forward) if strategy.uses_work_queue else []
    slots[0] += build_slots(
        [
            ParameterRange(len(parameters) + index, 0, each.numel())
            for index, each in enumerate(added)
        ],
        [*parameters, *added],
        is_added=True,
    )
    return ParameterPartition(
        names, parameters, slots, strategy.uses_work_queue, changed_by_forward
    )


def collect_changing_tensors(
    model: nn.Module, changed_by_forward: Sequence[str] = ()
) -> list[Tensor]:
    """Buffers that are saved with a model, as they are now: a forward may make them anew. And
    these of its parameters.
    """
    buffers = [
        each
        for each in list_saved_buffers(model).values()
        if each.dtype in (*DTYPES, torch.bool) and each.numel()
    ]
    return [*buffers, *map(model.get_parameter, changed_by_forward)]


def parse_optimizer_state(text: bytes, vector: Tensor, range_count: int) -> list[dict[str, Any]]:
    """What `Shard` tells of its optimizer's state, by stretch."""
    found: list[dict[str, Any]] = [{} for _ in range(range_count)]
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
