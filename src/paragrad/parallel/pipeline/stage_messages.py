"""Messages between the parts of a model: all tensors that cross from one to the next, in one
vector of bytes; after gradients stands which of them are there: what has none in serial has
none here, which to an optimizer is not the same as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paragrad.engine.activation_meter import Alive, Hold
from paragrad.parallel.tracing.crossing_plan import Crossing, Plan
from paragrad.runtime.world import World
from paragrad.schedules.actions import Slot

ALIGNED = 16  # bytes at which each tensor of a message begins


class Messages(Mapping[Slot, Tensor]):
    """What travels, as bytes where the backend takes them from: all tensors that cross between
    two parts in one message, from when it is put together or awaited until it is forgotten.
    alive: counts them.
    """

    def __init__(self, plans: list[Plan], line: World, alive: Alive | None = None) -> None:
        self.plans = plans
        self.line = line
        self.alive = alive
        self.made: dict[Slot, Tensor] = {}
        self.held: dict[Slot, Hold] = {}

    def crossing(self, slot: Slot) -> list[Crossing]:
        stage, micro = map(int, str(slot)[1:].split("."))
        return [
            each for each in self.plans[micro].crossing[stage - 1] if each.grad or not back(slot)
        ]

    def __getitem__(self, slot: Slot) -> Tensor:
        if slot not in self.made:
            crossing = self.crossing(slot)
            size = sum(map(_room, crossing)) + (_aligned(len(crossing)) if back(slot) else 0)
            self.made[slot] = torch.empty(size, dtype=torch.uint8, device=self.line.carrier)
            if self.alive is not None:
                self.held[slot] = self.alive.hold(self.made[slot])
        return self.made[slot]

    def put(self, slot: Slot, tensors: Sequence[Tensor | None]) -> None:
        """None: of gradients, there is none."""
        for place, tensor in zip(self._views(slot), tensors, strict=True):
            if tensor is not None:
                place.copy_(tensor.detach())
        if back(slot):
            self._there(slot).copy_(torch.tensor([tensor is not None for tensor in tensors]))

    def read(self, slot: Slot) -> list[Tensor]:
        """The tensors of a message, on the rank's device."""
        return [each.to(self.line.device) for each in self._views(slot)]

    def gradients(self, slot: Slot) -> list[Tensor | None]:
        """Those of a message that goes back; None where there is none."""
        return [
            tensor if there else None
            for tensor, there in zip(self.read(slot), self._there(slot).tolist(), strict=True)
        ]

    def _there(self, slot: Slot) -> Tensor:
        """Of each tensor, is it there? At the end of the message."""
        count = len(self.crossing(slot))
        return self[slot][self[slot].numel() - _aligned(count) :][:count]

    def forget(self, slot: Slot) -> None:
        self.made.pop(slot, None)
        self.held.pop(slot, None)

    def _views(self, slot: Slot) -> Iterator[Tensor]:
        message = self[slot]
        start = 0
        for each in self.crossing(slot):
            size = math.prod(each.shape) * each.dtype.itemsize
            yield (
                message[start : start + size].view(each.dtype).as_strided(each.shape, each.strides)
            )
            start += _room(each)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


def back(slot: Slot) -> bool:
    """Is it a message of gradients, g{stage}.{micro}, and not of activations,
    x{stage}.{micro}?
    """
    return str(slot)[0] == "g"


def _room(crossing: Crossing) -> int:
    """Bytes in a message."""
    return _aligned(math.prod(crossing.shape) * crossing.dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
