"""Messages between the stages of a model.

All tensors that cross from one stage to the next travel in one vector of bytes. A message of
gradients ends with flags that say which gradients exist. A tensor without a gradient in the serial
run has none here either: for an optimizer that differs from zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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


class MessageBuffer:
    """The memory of a message, with the views of its tensors, which are made once.

    Args:
        layout: The layout of the message.

        device: The device from which the backend sends.

    Attributes:
        layout: As the argument.

        bytes: The bytes of the message.

        tensors: The views of its tensors.

        flags: The view of the flags of gradients.

        has_all: Whether the flags are known to say that all gradients exist.

        own_uses: How many tensors of this object use the memory.

        storage: The memory itself.
    """

    __slots__ = ("bytes", "flags", "has_all", "layout", "own_uses", "storage", "tensors")

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        self.layout = layout
        self.bytes = torch.empty(layout.size, dtype=torch.uint8, device=device)
        self.tensors = layout.view_tensors(self.bytes)
        self.flags = layout.view_flags(self.bytes)
        self.has_all = False
        self.storage = self.bytes.untyped_storage()
        self.own_uses = self._count_uses()

    def write_flags(self, gradients: Sequence[Tensor | None]) -> None:
        """Write which gradients exist.

        Args:
            gradients: The gradients.
        """
        flags = [each is not None for each in gradients]
        has_all = False not in flags
        if not (has_all and self.has_all):
            self.flags.copy_(torch.tensor(flags))
        self.has_all = has_all

    def read_flags(self) -> list[bool]:
        """Read which gradients exist; a peer has written it."""
        self.has_all = False
        return list(map(bool, self.flags.tolist()))

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether another tensor uses the memory: a graph keeps it, or the model does."""
        return self._count_uses() > self.own_uses

    def _count_uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)


class MessageBuffers:
    """The memory of messages, which stays from step to step.

    Otherwise every message would be memory that the system has to give and to clear.

    Args:
        device: The device from which the backend sends.

    Attributes:
        device: As the argument.

        free: The buffers that no message uses, by the identity of their layout.

        used_layouts: The layouts of the messages since the last `drop_unused`, by identity.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[int, list[MessageBuffer]] = {}
        self.used_layouts: set[int] = set()

    def take_buffer(self, layout: MessageLayout) -> MessageBuffer:
        """Return a buffer for a message.

        Args:
            layout: The layout of the message.
        """
        self.used_layouts.add(id(layout))
        free = self.free.get(id(layout))
        return free.pop() if free else MessageBuffer(layout, self.device)

    def return_buffer(self, buffer: MessageBuffer) -> None:
        """Take a buffer back, unless something still uses its memory.

        Args:
            buffer: The buffer; its message is not needed any more.
        """
        if not buffer.is_used_elsewhere:
            self.free.setdefault(id(buffer.layout), []).append(buffer)

    def drop_unused(self) -> None:
        """Drop buffers for messages of which there was none since the last call."""
        for each in self.free.keys() - self.used_layouts:
            del self.free[each]
        self.used_layouts.clear()


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class StageMessages(Mapping[Slot, Tensor]):
    """The messages of a step, as bytes on the device from which the backend sends.

    A message exists from when it is written or awaited until it is forgotten.

    Args:
        plans: The crossing plan of each micro-batch.

        axis: The ranks.

        memory: The memory of messages.

        meter: Counts the bytes of messages, if given.

    Attributes:
        plans: As the argument.

        axis: As the argument.

        memory: As the argument.

        meter: As the argument.

        buffers: The messages.

        kept_buffers: Of forgotten messages, those that a graph may still use.

        buffer_holds: What the meter tracks for each message.
    """

    def __init__(
        self,
        plans: list[CrossingPlan],
        axis: World,
        memory: MessageBuffers,
        meter: ActivationMeter | None = None,
    ) -> None:
        self.plans = plans
        self.axis = axis
        self.memory = memory
        self.meter = meter
        self.buffers: dict[Slot, MessageBuffer] = {}
        self.kept_buffers: dict[Slot, MessageBuffer] = {}
        self.buffer_holds: dict[Slot, TrackedTensor] = {}

    def find_buffer(self, slot: Slot) -> MessageBuffer:
        """Return the memory of a message.

        Args:
            slot: Name of the message.
        """
        buffer = self.buffers.get(slot)
        if buffer is None:
            buffer = self.buffers[slot] = self.memory.take_buffer(self._get_layout(slot))
            if self.meter is not None:
                self.buffer_holds[slot] = self.meter.track_tensor(buffer.bytes)
        return buffer

    def _get_layout(self, slot: Slot) -> MessageLayout:
        is_gradient, stage, micro = parse_message_slot(slot)
        plan = self.plans[micro]
        layout: MessageLayout | None = plan.layouts.get((stage, is_gradient))
        if layout is None:
            crossing = plan.crossing[stage - 1]
            if is_gradient:
                crossing = [each for each in crossing if each.has_gradient]
            layout = plan.layouts[stage, is_gradient] = MessageLayout.build(
                crossing, has_flags=is_gradient
            )
        return layout

    def __getitem__(self, slot: Slot) -> Tensor:
        return self.find_buffer(slot).bytes

    def write_message(self, slot: Slot, tensors: Sequence[Tensor | None]) -> None:
        """Write tensors into a message.

        Args:
            slot: Name of the message.
            tensors: The tensors; None for a gradient that does not exist.
        """
        buffer = self.find_buffer(slot)
        for view, tensor in zip(buffer.tensors, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())
        if parse_message_slot(slot)[0]:
            buffer.write_flags(tensors)

    def read_message(self, slot: Slot) -> list[Tensor]:
        """Return the tensors of a message, on the rank's device.

        The memory is that of the message where the devices are the same.
        """
        tensors = [each.data for each in self.find_buffer(slot).tensors]
        device = self.axis.device
        if device == self.axis.transport_device:
            return tensors
        return [each.to(device) for each in tensors]

    def read_gradients(self, slot: Slot) -> list[Tensor | None]:
        """Return the gradients of a message; None for those that do not exist."""
        flags = self.find_buffer(slot).read_flags()
        return [
            tensor if exists else None
            for tensor, exists in zip(self.read_message(slot), flags, strict=True)
        ]

    def forget_message(self, slot: Slot, is_in_graph: bool = False) -> None:
        """Forget a message.

        Args:
            slot: Name of the message.
            is_in_graph: Whether a graph may use its memory, until `free_graph`.
        """
        buffer = self.buffers.pop(slot, None)
        if buffer is not None and is_in_graph and buffer.is_used_elsewhere:
            self.kept_buffers[slot] = buffer
            return
        self.buffer_holds.pop(slot, None)
        if buffer is not None:
            self.memory.return_buffer(buffer)

    def free_graph(self, slot: Slot) -> None:
        """Free the memory of a forgotten message: the graph that used it is gone.

        Args:
            slot: Name of the message.
        """
        if (buffer := self.kept_buffers.pop(slot, None)) is not None:
            self.buffer_holds.pop(slot, None)
            self.memory.return_buffer(buffer)

    def close(self) -> None:
        """Forget all messages at the end of the step."""
        self.buffer_holds.clear()
        for buffer in (*self.buffers.values(), *self.kept_buffers.values()):
            self.memory.return_buffer(buffer)
        self.buffers.clear()
        self.kept_buffers.clear()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)


@lru_cache(maxsize=4096)
def parse_message_slot(slot: Slot) -> tuple[bool, int, int]:
    """Return what a message is, from its slot x{stage}.{micro} or g{stage}.{micro}.

    Args:
        slot: The slot; x stands for activations, g for gradients.

    Returns:
        (whether it has gradients, stage, micro-batch).
    """
    stage, micro = map(int, str(slot)[1:].split("."))
    return str(slot)[0] == "g", stage, micro
