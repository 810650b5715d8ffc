"""Messages between the parts of a model: all tensors that cross from one to the next, in one vector of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from paragrad.schedules.actions import Slot
from paragrad.techniques.alive import Alive, Hold
from paragrad.techniques.model_parallel.plan import Crossing, Plan
from paragrad.world.world import World

ALIGNED = 16            # bytes at which each tensor of a message begins


class Messages(Mapping[Slot, Tensor]):
    """What travels, as bytes: all tensors that cross between two parts in one message, from when it is put together or awaited
    until it is forgotten. alive: counts them."""

    def __init__(self, plans: list[Plan], line: World, alive: Alive | None = None) -> None:
        self.plans, self.line, self.alive = plans, line, alive
        self.made: dict[Slot, Tensor] = {}
        self.held: dict[Slot, Hold] = {}

    def crossing(self, slot: Slot) -> list[Crossing]:
        what, (stage, micro) = str(slot)[0], map(int, str(slot)[1:].split("."))
        return [each for each in self.plans[micro].crossing[stage - 1] if what == "x" or each.grad]

    def __getitem__(self, slot: Slot) -> Tensor:
        if slot not in self.made:
            self.made[slot] = torch.empty(sum(map(_room, self.crossing(slot))), dtype=torch.uint8, device=self.line.device)
            if self.alive is not None:
                self.held[slot] = self.alive.hold(self.made[slot])
        return self.made[slot]

    def put(self, slot: Slot, tensors: list[Tensor]) -> None:
        for place, tensor in zip(self._views(slot), tensors, strict=True):
            place.copy_(tensor.detach())

    def read(self, slot: Slot) -> list[Tensor]:
        """The tensors of a message."""
        return list(self._views(slot))

    def forget(self, slot: Slot) -> None:
        self.made.pop(slot, None)
        self.held.pop(slot, None)

    def _views(self, slot: Slot) -> Iterator[Tensor]:
        message, start = self[slot], 0
        for each in self.crossing(slot):
            size = math.prod(each.shape) * each.dtype.itemsize
            yield message[start:start + size].view(each.dtype).view(each.shape)
            start += _room(each)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


def _room(crossing: Crossing) -> int:
    """Bytes in a message."""
    return -(-math.prod(crossing.shape) * crossing.dtype.itemsize // ALIGNED) * ALIGNED
