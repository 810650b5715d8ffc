"""Messages between the stages of a model.

All tensors that cross from one stage to the next travel in one vector of bytes. A message of
gradients ends with flags that say which gradients exist. A tensor without a gradient in the serial
run has none here either: for an optimizer that differs from zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragrad.engine.activation_meter import ActivationMeter, TrackedTensor
from paragrad.parallel.tracing.crossing_plan import Crossing, CrossingPlan
from paragrad.runtime.world import World
from paragrad.schedules.actions import Slot

ALIGNMENT_BYTES = 16  # each tensor of a message begins at a multiple of so many bytes


@dataclass(frozen=True)
class MessageLayout:
    """Where the tensors of a message are in its bytes.

    Attributes:
        crossing: The tensors.

        starts: The first element of each, in elements of its type.

        flags_start: The byte at which the flags of gradients begin.

        size: The bytes of the message.
    """

    crossing: list[Crossing]
    starts: list[int]
    flags_start: int
    size: int

    @classmethod
    def build(cls, crossing: list[Crossing], has_flags: bool) -> MessageLayout:
        """Lay out a message.

        Args:
            crossing: The tensors.
            has_flags: Whether a flag for each tensor follows.
        """
        starts = []
        end = 0
        for each in crossing:
            starts.append(end // each.dtype.itemsize)
            end += _align_size(math.prod(each.shape) * each.dtype.itemsize)
        return cls(crossing, starts, end, end + (_align_size(len(crossing)) if has_flags else 0))

    def view_tensors(self, message: Tensor) -> list[Tensor]:
        """View the tensors of a message.

        Args:
            message: The bytes.
        """
        return [
            message.view(each.dtype).as_strided(each.shape, each.strides, start)
            for each, start in zip(self.crossing, self.starts, strict=True)
        ]

    def view_flags(self, message: Tensor) -> Tensor:
        """View the flags that say which gradients exist.

        Args:
            message: The bytes.
        """
        return message[self.flags_start : self.flags_start + len(self.crossing)]


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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

    def get_layout(self, slot: Slot) -> MessageLayout:
        """Return the layout of a message."""
        stage, micro = map(int, str(slot)[1:].split("."))
        plan = self.plans[micro]
        key = stage, is_gradient_slot(slot)
        layout: MessageLayout | None = plan.layouts.get(key)
        if layout is None:
            crossing = plan.crossing[stage - 1]
            if key[1]:
                crossing = [each for each in crossing if each.has_gradient]
            layout = plan.layouts[key] = MessageLayout.build(crossing, has_flags=key[1])
        return layout

    def __getitem__(self, slot: Slot) -> Tensor:
        if slot not in self.buffers:
            self.buffers[slot] = torch.empty(
                self.get_layout(slot).size, dtype=torch.uint8, device=self.axis.transport_device
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
        message = self[slot]
        layout = self.get_layout(slot)
        for view, tensor in zip(layout.view_tensors(message), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())
        if is_gradient_slot(slot):
            flags = layout.view_flags(message)
            flags.fill_(1)
            for number, tensor in enumerate(tensors):
                if tensor is None:
                    flags[number] = 0

    def read_message(self, slot: Slot) -> list[Tensor]:
        """Return the tensors of a message, on the rank's device."""
        return [
            each.to(self.axis.device) for each in self.get_layout(slot).view_tensors(self[slot])
        ]

    def read_gradients(self, slot: Slot) -> list[Tensor | None]:
        """Return the gradients of a message; None for those that do not exist."""
        flags = self.get_layout(slot).view_flags(self[slot]).tolist()
        return [
            tensor if exists else None
            for tensor, exists in zip(self.read_message(slot), flags, strict=True)
        ]

    def forget_message(self, slot: Slot) -> None:
        """Forget a message."""
        self.buffers.pop(slot, None)
        self.buffer_holds.pop(slot, None)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)


def is_gradient_slot(slot: Slot) -> bool:
    """Return whether a message has gradients.

    Its slot is then g{stage}.{micro}; for activations it is x{stage}.{micro}.
    """
    return str(slot)[0] == "g"
