"""The wire: play one rank's program over torch.distributed.

A Send is an isend whose Work is kept until its slot is written again or the walk ends. A Recv that adds receives into
scratch, waits for the slot's sends, then adds. While one message is waited for and added, the next one's receive is
already posted (the player's liberty: order between a pair of ranks stays what the program says).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.schedules.actions import Action, Collective, Compute, Recv, Send, Slot, evenly, parts_in, shown
from paragrad.world import World


def all_reduce(schedule: Collective, vector: Tensor, world: World) -> int:
    """Sum a contiguous one-dimensional vector over all ranks, in place, along a schedule; the bytes this rank sent."""
    return Play(list(schedule.program(world.rank, world.size)), vector, schedule.parts(world.size), world).run()


class Play:
    """One walk of one program over the vector of this rank, in equal parts."""

    def __init__(self, actions: Sequence[Action], vector: Tensor, parts: int, world: World) -> None:
        self.actions, self.vector, self.world = actions, vector, world
        self.parts = evenly(vector.numel(), parts)
        self.open: dict[Slot, list[Any]] = {}                       # part -> Works of its sends
        self.posted: dict[int, tuple[Any, Tensor]] = {}             # place in the program -> receive under way
        receives = [place for place, action in enumerate(actions) if isinstance(action, Recv)]
        self.following = dict(pairwise(receives))                   # the receive after a receive
        self.sent = 0

    def slot(self, slot: Slot) -> Tensor:
        """The piece of the vector that a slot names."""
        parts = parts_in(slot)
        assert isinstance(parts[0], int)
        assert isinstance(parts[-1], int)
        return self.vector[self.parts[parts[0]].start:self.parts[parts[-1]].stop]

    def run(self) -> int:
        """Play to the end; the bytes sent. Raises StepFailed that shows the schedule around the failure."""
        place = -1
        try:
            for place, action in enumerate(self.actions):
                if isinstance(action, Send):
                    self.send(action)
                elif isinstance(action, Recv):
                    self.recv(place, action)
                else:
                    self.compute(action)
            self.close(list(self.open))
        except RuntimeError as error:
            raise StepFailed(f"{error}\n{self.picture(place)}") from error
        return self.sent

    def send(self, action: Send) -> None:
        tensor = self.slot(action.slot)
        work = dist.isend(tensor, group=self.world.group, group_dst=action.to)
        self.sent += tensor.numel() * tensor.element_size()
        if action.wait:
            self.wait(work)
        else:
            for part in parts_in(action.slot):
                self.open.setdefault(part, []).append(work)

    def recv(self, place: int, action: Recv) -> None:
        if place not in self.posted:
            if not action.add:
                self.close(parts_in(action.slot))
            self.post(place, action)
        work, buffer = self.posted.pop(place)
        self.post_next(place)
        self.wait(work)
        if action.add:
            self.close(parts_in(action.slot))
            self.slot(action.slot).add_(buffer)

    def compute(self, action: Compute) -> None:
        """An exchange only adds. The one other thing that can stand here is a planted bug (`schedules/sabotage.py`)."""
        self.close(parts_in(action.at))
        if action.what != "mean":
            raise StepFailed(f"the wire cannot compute {action.what!r} on slot {shown(action.at)}")
        slot = self.slot(action.at)
        slot.div_(self.world.size, rounding_mode=None if slot.is_floating_point() else "floor")

    def post(self, place: int, action: Recv) -> None:
        slot = self.slot(action.slot)
        buffer = torch.empty_like(slot) if action.add else slot
        self.posted[place] = dist.irecv(buffer, group=self.world.group, group_src=action.frm), buffer

    def post_next(self, place: int) -> None:
        """Post the receive after this one early, where nothing on the way to it touches what it writes."""
        following = self.following.get(place)
        if following is None:
            return
        action = self.actions[following]
        assert isinstance(action, Recv)
        touched = {part for each in self.actions[place:following]
                   for part in parts_in(each.at if isinstance(each, Compute) else each.slot)}
        if action.add or touched.union(self.open).isdisjoint(parts_in(action.slot)):
            self.post(following, action)

    def close(self, parts: Sequence[Slot]) -> None:
        """Wait until the sends of some parts are over, each once: one send may be of several parts."""
        works = {id(work): work for part in parts for work in self.open.pop(part, [])}
        if works:
            self.open = {part: left for part, sends in self.open.items()
                         if (left := [work for work in sends if id(work) not in works])}
        for work in works.values():
            self.wait(work)

    def wait(self, work: Any) -> None:
        """Wait for a message, once (gloo waits for ever on a send that was waited for before), and not without end."""
        work.wait(timedelta(seconds=self.world.timeout))

    def picture(self, place: int) -> str:
        around = [f"[{action}]" if at == place else str(action) for at, action in enumerate(self.actions)]
        return f"   {self.world.rank} | " + " ".join(around[max(0, place - 3): place + 4])
