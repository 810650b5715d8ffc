"""Messages between the parts of a model: all tensors that cross from one to the next, in one
vector of bytes; after gradients stands which of them are there: what has none in serial has
none here, which to an optimizer is not the same as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paragrad.engine.activation_meter import ActivationMeter, TrackedTensor
from paragrad.parallel.tracing.crossing_plan import Crossing, CrossingPlan
from paragrad.runtime.world import World
from paragrad.schedules.actions import Slot

ALIGNMENT_BYTES = 16  # bytes at which each tensor of a message begins


class StageMessages(Mapping[Slot, Tensor]):
    """What travels, as bytes where the backend takes them from: all tensors that cross between
    two parts in one message, from when it is put together or awaited until it is forgotten.
    alive: counts them.
    """

    def __init__(
        self, plans: list[CrossingPlan], axis: World, meter: ActivationMeter | None = None
    ) -> None:
        self.plans = plans
        self.axis = axis
        self.meter = meter
        self.buffers: dict[Slot, Tensor] = {}
        self.buffer_holds: dict[Slot, TrackedTensor] = {}

    def list_crossing(self, slot: Slot) -> list[Crossing]:
        stage, micro = map(int, str(slot)[1:].split("."))
        return [
            each
            for each in self.plans[micro].crossing[stage - 1]
            if each.has_gradient or not is_gradient_slot(slot)
        ]

    def __getitem__(self, slot: Slot) -> Tensor:
        if slot not in self.buffers:
            crossing = self.list_crossing(slot)
            size = sum(map(_count_message_bytes, crossing)) + (
                _align_size(len(crossing)) if is_gradient_slot(slot) else 0
            )
            self.buffers[slot] = torch.empty(
                size, dtype=torch.uint8, device=self.axis.transport_device
            )
            if self.meter is not None:
                self.buffer_holds[slot] = self.meter.track_tensor(self.buffers[slot])
        return self.buffers[slot]

    def write_message(self, slot: Slot, tensors: Sequence[Tensor | None]) -> None:
        """None: of gradients, there is none."""
        for place, tensor in zip(self._iterate_views(slot), tensors, strict=True):
            if tensor is not None:
                place.copy_(tensor.detach())
        if is_gradient_slot(slot):
            self._view_presence(slot).copy_(
                torch.tensor([tensor is not None for tensor in tensors])
            )

    def read_message(self, slot: Slot) -> list[Tensor]:
        """The tensors of a message, on the rank's device."""
        return [each.to(self.axis.device) for each in self._iterate_views(slot)]

    def read_gradients(self, slot: Slot) -> list[Tensor | None]:
        """Those of a message that goes back; None where there is none."""
        return [
            tensor if there else None
            for tensor, there in zip(
                self.read_message(slot), self._view_presence(slot).tolist(), strict=True
            )
        ]

    def _view_presence(self, slot: Slot) -> Tensor:
        """Of each tensor, is it there? At the end of the message."""
        count = len(self.list_crossing(slot))
        return self[slot][self[slot].numel() - _align_size(count) :][:count]

    def forget_message(self, slot: Slot) -> None:
        self.buffers.pop(slot, None)
        self.buffer_holds.pop(slot, None)

    def _iterate_views(self, slot: Slot) -> Iterator[Tensor]:
        message = self[slot]
        start = 0
        for each in self.list_crossing(slot):
            size = math.prod(each.shape) * each.dtype.itemsize
            yield (
                message[start : start + size].view(each.dtype).as_strided(each.shape, each.strides)
            )
            start += _count_message_bytes(each)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)


def is_gradient_slot(slot: Slot) -> bool:
    """Is it a message of gradients, g{stage}.{micro}, and not of activations,
    x{stage}.{micro}?
    """
    return str(slot)[0] == "g"


def _count_message_bytes(crossing: Crossing) -> int:
    """Bytes in a message."""
    return _align_size(math.prod(crossing.shape) * crossing.dtype.itemsize)


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
