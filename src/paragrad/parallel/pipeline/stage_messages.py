"""Messages between the stages of a model.

All tensors that cross from one stage to the next travel in one vector of bytes. A message of
gradients ends with flags that say which gradients exist. A tensor without a gradient in the serial
run has none here either: for an optimizer that differs from zeros.
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

ALIGNMENT_BYTES = 16  # each tensor of a message begins at a multiple of so many bytes


class StageMessages(Mapping[Slot, Tensor]):
    """The messages of a step, as bytes on the device from which the backend sends.

    A message exists from when it is written or awaited until it is forgotten.

    Attributes:
        plans: The crossing plan of each micro-batch.
        axis: The ranks.
        meter: Counts the bytes of messages, if given.
        buffers: The messages.
        buffer_holds: What the meter tracks for each message.
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
        """List the tensors of a message."""
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
        """Write tensors into a message.

        Args:
            slot: Name of the message.
            tensors: The tensors; None for a gradient that does not exist.
        """
        for view, tensor in zip(self._iterate_views(slot), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())
        if is_gradient_slot(slot):
            self._view_presence(slot).copy_(
                torch.tensor([tensor is not None for tensor in tensors])
            )

    def read_message(self, slot: Slot) -> list[Tensor]:
        """Return the tensors of a message, on the rank's device."""
        return [each.to(self.axis.device) for each in self._iterate_views(slot)]

    def read_gradients(self, slot: Slot) -> list[Tensor | None]:
        """Return the gradients of a message; None for those that do not exist."""
        return [
            tensor if exists else None
            for tensor, exists in zip(
                self.read_message(slot), self._view_presence(slot).tolist(), strict=True
            )
        ]

    def _view_presence(self, slot: Slot) -> Tensor:
        """View the flags at the end of a message: whether each gradient exists."""
        count = len(self.list_crossing(slot))
        return self[slot][self[slot].numel() - _align_size(count) :][:count]

    def forget_message(self, slot: Slot) -> None:
        """Forget a message."""
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
    """Return whether a message has gradients.

    Its slot is then g{stage}.{micro}; for activations it is x{stage}.{micro}.
    """
    return str(slot)[0] == "g"


def _count_message_bytes(crossing: Crossing) -> int:
    """Return the bytes of a tensor in a message."""
    return _align_size(math.prod(crossing.shape) * crossing.dtype.itemsize)


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
