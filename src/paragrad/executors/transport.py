"""The wire: play one rank's program over torch.distributed.

A Send is an isend whose Work is kept until its slot is written again or the walk ends. A Recv
ends in the program's order, but is posted as early as possible, because gloo moves nothing
before it is: into scratch if it adds, or if what it overwrites is still needed, and otherwise
in place. So the messages of a round, and of the rounds after it, are under way together, while
waits, additions and what is computed keep the order of the program.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.executors.deadlock_report import Lines, Standing
from paragrad.runtime.world import World
from paragrad.schedules.actions import (
    Action,
    Collective,
    Compute,
    Recv,
    Send,
    Slot,
    evenly,
    parts_for,
    parts_in,
    shown,
)

# bytes of scratch for receives under way. Short messages need many, as each costs gloo 0.4 ms
# whatever its length. Of long ones one ahead is enough, and more do harm: what is asked for
# early comes early, and takes the link from what is waited for.
SCRATCH = 1 << 18
# bytes from which sends in a row to different ranks go one after the other, where they share a
# link
LONG = 1 << 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """What this rank sent in an exchange, in bytes, and where its time went, in seconds: the
    three add up to its duration.

    waiting: blocked until the first message came, as others were late;  transfer: blocked for
    messages after that;  own: all the rest: posting messages, adding, Python.  computed: the
    bytes are a closed form's, and nobody knows the times.
    """

    bytes: int
    waiting: float = 0.0
    transfer: float = 0.0
    own: float = 0.0
    computed: bool = False


# start: of the monotonic clock
Tell = Callable[[Send | Recv, str, float, float, int], None]


class Parts(Mapping[Slot, Tensor]):
    """A vector as the buffers of a collective: its equal parts by their numbers, neighbouring
    ones by their range.
    """

    def __init__(self, vector: Tensor, count: int) -> None:
        self.vector = vector
        self.ranges = evenly(vector.numel(), count)

    def __getitem__(self, slot: Slot) -> Tensor:
        first, last = (slot[0], slot[-1]) if isinstance(slot, range) else (slot, slot)
        return self.vector[self.ranges[first].start : self.ranges[last].stop]  # type: ignore[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(range(len(self.ranges)))

    def __len__(self) -> int:
        return len(self.ranges)


def all_reduce(
    schedule: Collective,
    vector: Tensor,
    world: World,
    compute: Callable[[Compute, Tensor], None] | None = None,
) -> Traffic:
    """Sum a contiguous one-dimensional vector over all ranks, in place, along a schedule.

    compute(action, part): does what the schedule computes on a part of the vector; an exchange
    only adds.
    """
    start = time.monotonic()
    parts = Parts(vector, parts_for(schedule, world.size))
    computes = None if compute is None else lambda action: compute(action, parts[action.at])
    play = Play(list(schedule.program(world.rank, world.size)), parts, world, computes)
    play.run()
    return Traffic(
        play.sent,
        play.waiting,
        play.transfer,
        time.monotonic() - start - play.waiting - play.transfer,
    )


class Play:
    """One walk of one rank's program over its buffers: what is sent is read from them, what is
    received written into them.

    buffers: contiguous tensors by slot; those that are received into are there from the start.
    compute(action): does a Compute, which comes when the sends of its slot are over.
    tell(action, lane, start, seconds, bytes): is told what each message cost this rank, one
    after the other: its posting (lane send), how long it was waited for (receive; of a send,
    wait). posts: receives that are under way at a time, at most, where buffers are made when
    they are asked for; nothing is received into one that holds anything then.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        buffers: Mapping[Slot, Tensor],
        world: World,
        compute: Callable[[Compute], None] | None = None,
        tell: Tell | None = None,
        posts: int | None = None,
    ) -> None:
        self.actions = actions
        self.buffers = buffers
        self.world = world
        self.posts = posts or len(actions)
        self.compute = compute or no_compute
        self.tell = tell
        self.walk = next(world.walks)
        self.limit = timedelta(seconds=world.timeout)
        self.position = 0
        # part -> its sends, with their Works
        self.open: dict[Slot, list[tuple[Send, Any]]] = {}
        # receives under way: their Work and scratch
        self.posted: deque[tuple[Recv, Any, Tensor | None]] = deque()
        # the first action that `look_ahead` has not passed
        self.ahead = 0
        # part -> actions from `position` to there that touch it
        self.touched: dict[Slot, int] = {}
        self.scratch = 0  # bytes
        # what is received in a row must be asked for before the sends that stand before it, or
        # it comes after them; also what does not add may need scratch, and be an element longer
        # than what does
        self.most = (
            SCRATCH if posts else max(SCRATCH, max(map(self.scratch_of, rows(actions)), default=0))
        )
        if self.most > SCRATCH:
            self.most = max(
                SCRATCH, min(self.most, sum(buffer.nbytes for buffer in buffers.values()))
            )
        # which messages under way at once share
        self.over_link = world.backend != "shm"
        self.sent = 0
        self.waiting = 0.0
        self.transfer = 0.0
        self.first_came = False
        self.waits_for: Send | Recv | None = None
        self.computing = False

    def scratch_of(self, row: Sequence[Action]) -> int:
        """Bytes that may come into scratch in a row of receives."""
        return sum(self.buffers[each.slot].nbytes for each in row if isinstance(each, Recv))

    def run(self) -> None:
        """Play to the end. Raises StepFailed that shows the schedule around the failure, with
        the last actions of all ranks.
        """
        try:
            for place, action in enumerate(self.actions):
                self.position = place
                if isinstance(action, Send):
                    self.send(action)
                elif isinstance(action, Recv):
                    self.recv(action)
                else:
                    self.close(parts_in(action.at))
                    self.computing = True
                    self.compute(action)
                    self.computing = False
                if place < self.ahead:
                    for part in touches(action):
                        self.touched[part] -= 1
            self.position = len(self.actions)
            self.close(list(self.open))
        except Exception as error:
            if not self.computing and not isinstance(error, RuntimeError):
                raise
            # no failure of the exchange: it tells its own story, and was first
            if self.computing:
                error.when = time.monotonic()  # type: ignore[attr-defined]
            lines = Lines(self.world, self.standing())
            self.world.hang_up()
            if self.computing:
                raise
            raise StepFailed(lines.picture(error)) from error

    def send(self, action: Send) -> None:
        # gloo tells a peer that a receive is posted over the connection that carries what is
        # sent to it: told after the send, the peer hears of it when all of that is through, and
        # the two directions go one after the other
        self.ahead = max(self.ahead, self.position)
        self.look_ahead()
        tensor = self.buffers[action.slot]
        if tensor.nbytes >= LONG and self.over_link:
            # at once they would share the link, and the first come as late as the last
            before = self.actions[self.position - 1] if self.position else None
            if action.after:
                self.close(
                    [
                        part
                        for part, sends in self.open.items()
                        if any(sent.to != action.to for sent, _ in sends)
                    ]
                )
            elif isinstance(before, Send) and before.to != action.to:
                self.close(parts_in(before.slot))
        start = time.monotonic()
        work = dist.isend(tensor, group=self.world.group, group_dst=action.to)
        if self.tell:
            self.tell(action, "send", start, time.monotonic() - start, tensor.nbytes)
        self.sent += tensor.nbytes
        if action.wait:
            self.wait(action, work)
        else:
            for part in parts_in(action.slot):
                self.open.setdefault(part, []).append((action, work))

    def recv(self, action: Recv) -> None:
        self.ahead = max(self.ahead, self.position)
        self.look_ahead()
        # it overwrites what is under way, and scratch is too short
        if not self.posted:
            self.close(parts_in(action.slot))
            self.look_ahead()
        _, work, buffer = self.posted.popleft()
        self.wait(action, work)
        self.first_came = True
        if buffer is not None:
            self.scratch -= buffer.nbytes
            self.close(parts_in(action.slot))
            if action.add:
                self.buffers[action.slot].add_(buffer)
            else:
                self.buffers[action.slot].copy_(buffer)

    def look_ahead(self) -> None:
        """Post the receives that come next, as far as scratch goes. Of those that add, whatever
        their length, also the one that comes next, and one more from the same rank: another's
        would share the link with it. Each action is passed once.
        """
        while self.ahead < len(self.actions):
            action = self.actions[self.ahead]
            if isinstance(action, Recv):
                if len(self.posted) == self.posts:
                    return
                slot = self.buffers[action.slot]
                buffer = None
                if action.add or self.needed(action.slot):
                    others = self.over_link and any(
                        each.frm != action.frm for each, *_ in self.posted
                    )
                    more = not others and len(self.posted) < 2
                    if self.scratch + slot.nbytes > self.most and not (action.add and more):
                        return
                    buffer = torch.empty_like(slot)
                    self.scratch += slot.nbytes
                work = dist.irecv(
                    slot if buffer is None else buffer, group=self.world.group, group_src=action.frm
                )
                self.posted.append((action, work, buffer))
            for part in touches(action):
                self.touched[part] = self.touched.get(part, 0) + 1
            self.ahead += 1

    def needed(self, slot: Slot) -> bool:
        """Does an action before the one ahead, or a send under way, still touch a part of the
        slot?
        """
        return any(self.touched.get(part) or part in self.open for part in parts_in(slot))

    def close(self, parts: Sequence[Slot]) -> None:
        """Wait until the sends of some parts are over, each once: one send may be of several
        parts.
        """
        for part in parts:
            for action, work in self.open.pop(part, ()):
                for other in parts_in(action.slot):
                    if left := [each for each in self.open.pop(other, ()) if each[1] is not work]:
                        self.open[other] = left
                self.wait(action, work)

    def wait(self, action: Send | Recv, work: Any) -> None:
        """Wait for a message, once (gloo waits for ever on a send that was waited for before),
        and not without end.
        """
        self.waits_for = action
        start = time.monotonic()
        work.wait(self.limit)
        seconds = time.monotonic() - start
        self.waits_for = None
        if self.tell:
            lane = "receive" if isinstance(action, Recv) else "wait"
            self.tell(action, lane, start, seconds, self.buffers[action.slot].nbytes)
        if self.first_came:
            self.transfer += seconds
        else:
            self.waiting += seconds

    # ---- when it fails -----------------------------------------------------------------------
    def standing(self) -> Standing:
        """Where this rank stands, for all to see."""
        around = [
            f"[{each}]" if at == self.position else str(each)
            for at, each in enumerate(map(self.named, self.actions))
        ]
        first = max(0, self.position - 3)
        stop = self.position + 4
        line = ["..."] * (first > 0) + around[first:stop] + ["..."] * (stop < len(around))
        peer = None
        waits_for = ""
        if isinstance(self.waits_for, Recv):
            peer = self.waits_for.frm
            waits_for = f"slot {shown(self.waits_for.slot)} from rank {self.world.launched[peer]}"
        elif isinstance(self.waits_for, Send):
            peer = self.waits_for.to
            waits_for = (
                f"rank {self.world.launched[peer]} to take slot {shown(self.waits_for.slot)}"
            )
        return Standing(self.walk, " ".join(line), waits_for, peer)

    def named(self, action: Any) -> Any:
        """An action as it is told: with the numbers by which ranks were launched."""
        names = self.world.launched
        if isinstance(action, Send):
            return replace(action, to=names[action.to])
        return replace(action, frm=names[action.frm]) if isinstance(action, Recv) else action


def no_compute(action: Compute) -> None:
    """Of an exchange, which only adds."""
    raise StepFailed(f"the wire cannot compute {action.what!r} on slot {shown(action.at)}")


def rows(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Actions of one kind in a row: sends, receives."""
    return (list(row) for _, row in groupby(actions, key=type))


def touches(action: Action) -> Sequence[Slot]:
    """The parts that an action reads or writes."""
    return parts_in(action.at if isinstance(action, Compute) else action.slot)
