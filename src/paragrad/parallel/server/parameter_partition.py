"""Which server holds which slice of the parameters, and the vectors in which a slice travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """One vector of a slice: ranges of one dtype, one after another.

    Attributes:
        dtype: Dtype of the vector.
        ranges: The ranges of parameters.
        is_added: Whether it holds values that forward passes change, not parameters. A pushed
            vector is added to them.
        is_boolean: Whether the values are booleans, which travel as 1 and 0.
    """

    dtype: torch.dtype
    ranges: tuple[ParameterRange, ...]
    is_added: bool = False
    is_boolean: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the vector."""
        return sum(each.stop - each.start for each in self.ranges)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the vector."""
        return self.elements * self.dtype.itemsize

    def split_vector(self, vector: Tensor) -> list[Tensor]:
        """Return a flat view of the vector for each range.

        Args:
            vector: A vector of this length.
        """
        return list(vector.split([each.stop - each.start for each in self.ranges]))


def build_slots(
    ranges: Sequence[ParameterRange], tensors: Sequence[Tensor], is_added: bool = False
) -> list[VectorSlot]:
    """Build the vectors of a slice: one for each dtype.

    Args:
        ranges: The ranges of the slice.
        tensors: The tensors to which the ranges refer.
        is_added: As in VectorSlot.
    """
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
    """Return flat views of the ranges in contiguous tensors.

    Args:
        slot: The vector.
        tensors: Tensors in the shapes of the parameters.
    """
    return [tensors[each.index].detach().view(-1)[each.start : each.stop] for each in slot.ranges]


def scatter_vector(vector: Tensor, slot: VectorSlot, tensors: Sequence[Tensor]) -> None:
    """Copy the values of a vector into tensors.

    Added values are whole tensors, and their memory may have another order.

    Args:
        vector: The vector.
        slot: Its ranges.
        tensors: The tensors, changed in place.
    """
    targets = [tensors[each.index].detach() for each in slot.ranges]
    values = slot.split_vector(vector)
    if slot.is_added:
        values = [each.view(whole.shape) for each, whole in zip(values, targets, strict=True)]
    torch._foreach_copy_(targets if slot.is_added else view_slot_ranges(slot, tensors), values)


def build_shard_spec(
    element_range: ParameterRange, names: Sequence[str], parameters: Sequence[Tensor]
) -> ShardSpec:
    """Return the spec of a range: which part of a serial tensor it is.

    Args:
        element_range: The range.
        names: Names of the parameters.
        parameters: The parameters.
    """
    parameter = parameters[element_range.index]
    is_whole = element_range.stop - element_range.start == parameter.numel()
    return ShardSpec(
        names[element_range.index],
        tuple(parameter.shape),
        None if is_whole else range(element_range.start, element_range.stop),
    )


def mark_gradients(slot: VectorSlot, gradients: Sequence[Tensor | None]) -> bytes:
    """Return one byte for each range: 1 if it has a gradient.

    Args:
        slot: The vector.
        gradients: The gradients of the parameters.
    """
    return bytes(gradients[each.index] is not None for each in slot.ranges)


def fill_vector(slot: VectorSlot, gradients: Sequence[Tensor | None], vector: Tensor) -> None:
    """Copy gradients into a vector; zeros if there is none.

    Args:
        slot: The ranges of the vector.
        gradients: The gradients of the parameters.
        vector: The vector, changed in place.
    """
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for each, view in zip(slot.ranges, slot.split_vector(vector), strict=True):
        gradient = gradients[each.index]
        if gradient is None:
            view.zero_()
        else:
            targets.append(view)
            values.append(gradient.detach().reshape(-1)[each.start : each.stop])
    if targets:
        torch._foreach_copy_(targets, values)


@dataclass(frozen=True)
class ParameterPartition:
    """The partition of a model over servers.

    Attributes:
        names: Names of the trained parameters.

        parameters: The trained parameters.

        slots: The vectors of each server.

        has_buffers: Whether the first server also holds values that forward passes change.

        changed_by_forward: Names of parameters among those values.
    """

    names: list[str]
    parameters: list[Tensor]
    slots: list[list[VectorSlot]]
    has_buffers: bool
    changed_by_forward: tuple[str, ...] = ()

    def collect_tensors(self, model: nn.Module) -> list[Tensor]:
        """Return the current tensors to which the slots refer.

        These are parameters and values that forward passes change. Booleans are viewed as numbers.

        Args:
            model: The model.
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
        """Yield (server, number, slot) of all vectors."""
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
    """Partition the parameters over the servers.

    Several servers hold flat ranges of equal total length. A single server holds all parameters
    whole.

    Args:
        strategy: The resolved strategy.
        optimizer: The optimizer.
        model: The model.
        changed_by_forward: Names of parameters that are not trained and that forward passes change.

    Returns:
        The partition.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = list(trained)
    parameters = list(trained.values())
    lengths = [each.numel() for each in parameters]
    ranges = [[ParameterRange(index, 0, length) for index, length in enumerate(lengths)]]
    if strategy.servers > 1:
        ranges, _ = assign_slices(optimizer, PER_ELEMENT, lengths, strategy.servers, grain=1)
    slots = [build_slots(each, parameters) for each in ranges]
    # Without a work queue these values are equal on all workers, so no server holds them.
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
    """Return the saved buffers of a model and some of its parameters.

    They are looked up each time, because a forward pass may replace a buffer.

    Args:
        model: The model.
        changed_by_forward: Names of the parameters.
    """
    buffers = [
        each
        for each in list_saved_buffers(model).values()
        if each.dtype in (*DTYPES, torch.bool) and each.numel()
    ]
    return [*buffers, *map(model.get_parameter, changed_by_forward)]
