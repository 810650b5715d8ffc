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
from paragrad.executors.deadlock_report import DeadlockReport, RankStatus
from paragrad.runtime.world import World
from paragrad.schedules.actions import (
    Action,
    Collective,
    Compute,
    Recv,
    Send,
    Slot,
    count_parts,
    expand_slot,
    format_slot,
    split_evenly,
)

# bytes of scratch for receives under way. Short messages need many, as each costs gloo 0.4 ms
# whatever its length. Of long ones one ahead is enough, and more do harm: what is asked for
# early comes early, and takes the link from what is waited for.
SCRATCH_BYTES = 1 << 18
# bytes from which sends in a row to different ranks go one after the other, where they share a
# link
LONG_MESSAGE_BYTES = 1 << 16


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
    processing: float = 0.0
    computed: bool = False


# start: of the monotonic clock
ReportMessage = Callable[[Send | Recv, str, float, float, int], None]


class VectorParts(Mapping[Slot, Tensor]):
    """A vector as the buffers of a collective: its equal parts by their numbers, neighbouring
    ones by their range.
    """

    def __init__(self, vector: Tensor, count: int) -> None:
        self.vector = vector
        self.ranges = split_evenly(vector.numel(), count)

    def __getitem__(self, slot: Slot) -> Tensor:
        first, last = (slot[0], slot[-1]) if isinstance(slot, range) else (slot, slot)
        return self.vector[self.ranges[first].start : self.ranges[last].stop]  # type: ignore[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(range(len(self.ranges)))

    def __len__(self) -> int:
        return len(self.ranges)


def run_all_reduce(
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
    parts = VectorParts(vector, count_parts(schedule, world.size))
    computes = None if compute is None else lambda action: compute(action, parts[action.at])
    play = ProgramRun(list(schedule.program(world.rank, world.size)), parts, world, computes)
    play.play_program()
    return Traffic(
        play.sent_bytes,
        play.waiting_seconds,
        play.transfer_seconds,
        time.monotonic() - start - play.waiting_seconds - play.transfer_seconds,
    )


class ProgramRun:
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
        report_message: ReportMessage | None = None,
        posts: int | None = None,
    ) -> None:
        self.actions = actions
        self.buffers = buffers
        self.world = world
        self.posts = posts or len(actions)
        self.compute = compute or refuse_compute
        self.report_message = report_message
        self.schedule_number = next(world.schedule_numbers)
        self.timeout = timedelta(seconds=world.timeout)
        self.position = 0
        # part -> its sends, with their Works
        self.open_sends: dict[Slot, list[tuple[Send, Any]]] = {}
        # receives under way: their Work and scratch
        self.posted_receives: deque[tuple[Recv, Any, Tensor | None]] = deque()
        # the first action that `look_ahead` has not passed
        self.look_ahead_position = 0
        # part -> actions from `position` to there that touch it
        self.touch_counts: dict[Slot, int] = {}
        self.scratch_bytes = 0  # bytes
        # what is received in a row must be asked for before the sends that stand before it, or
        # it comes after them; also what does not add may need scratch, and be an element longer
        # than what does
        self.scratch_limit = (
            SCRATCH_BYTES
            if posts
            else max(
                SCRATCH_BYTES, max(map(self.count_row_scratch, group_by_kind(actions)), default=0)
            )
        )
        if self.scratch_limit > SCRATCH_BYTES:
            self.scratch_limit = max(
                SCRATCH_BYTES,
                min(self.scratch_limit, sum(buffer.nbytes for buffer in buffers.values())),
            )
        # which messages under way at once share
        self.shares_link = world.backend != "shm"
        self.sent_bytes = 0
        self.waiting_seconds = 0.0
        self.transfer_seconds = 0.0
        self.has_received = False
        self.awaited_action: Send | Recv | None = None
        self.is_computing = False

    def count_row_scratch(self, row: Sequence[Action]) -> int:
        """Bytes that may come into scratch in a row of receives."""
        return sum(self.buffers[each.slot].nbytes for each in row if isinstance(each, Recv))

    def play_program(self) -> None:
        """Play to the end. Raises StepFailed that shows the schedule around the failure, with
        the last actions of all ranks.
        """
        try:
            for place, action in enumerate(self.actions):
                self.position = place
                if isinstance(action, Send):
                    self.play_send(action)
                elif isinstance(action, Recv):
                    self.play_recv(action)
                else:
                    self.finish_sends(expand_slot(action.at))
                    self.is_computing = True
                    self.compute(action)
                    self.is_computing = False
                if place < self.look_ahead_position:
                    for part in list_touched_parts(action):
                        self.touch_counts[part] -= 1
            self.position = len(self.actions)
            self.finish_sends(list(self.open_sends))
        except Exception as error:
            if not self.is_computing and not isinstance(error, RuntimeError):
                raise
            # no failure of the exchange: it tells its own story, and was first
            if self.is_computing:
                error.when = time.monotonic()  # type: ignore[attr-defined]
            lines = DeadlockReport(self.world, self.make_status())
            self.world.abort()
            if self.is_computing:
                raise
            raise StepFailed(lines.format_report(error)) from error

    def play_send(self, action: Send) -> None:
        # gloo tells a peer that a receive is posted over the connection that carries what is
        # sent to it: told after the send, the peer hears of it when all of that is through, and
        # the two directions go one after the other
        self.look_ahead_position = max(self.look_ahead_position, self.position)
        self.post_receives()
        tensor = self.buffers[action.slot]
        if tensor.nbytes >= LONG_MESSAGE_BYTES and self.shares_link:
            # at once they would share the link, and the first come as late as the last
            before = self.actions[self.position - 1] if self.position else None
            if action.after:
                self.finish_sends(
                    [
                        part
                        for part, sends in self.open_sends.items()
                        if any(sent.to != action.to for sent, _ in sends)
                    ]
                )
            elif isinstance(before, Send) and before.to != action.to:
                self.finish_sends(expand_slot(before.slot))
        start = time.monotonic()
        work = dist.isend(tensor, group=self.world.group, group_dst=action.to)
        if self.report_message:
            self.report_message(action, "send", start, time.monotonic() - start, tensor.nbytes)
        self.sent_bytes += tensor.nbytes
        if action.wait:
            self.wait_for_message(action, work)
        else:
            for part in expand_slot(action.slot):
                self.open_sends.setdefault(part, []).append((action, work))

    def play_recv(self, action: Recv) -> None:
        self.look_ahead_position = max(self.look_ahead_position, self.position)
        self.post_receives()
        # it overwrites what is under way, and scratch is too short
        if not self.posted_receives:
            self.finish_sends(expand_slot(action.slot))
            self.post_receives()
        _, work, buffer = self.posted_receives.popleft()
        self.wait_for_message(action, work)
        self.has_received = True
        if buffer is not None:
            self.scratch_bytes -= buffer.nbytes
            self.finish_sends(expand_slot(action.slot))
            if action.add:
                self.buffers[action.slot].add_(buffer)
            else:
                self.buffers[action.slot].copy_(buffer)

    def post_receives(self) -> None:
        """Post the receives that come next, as far as scratch goes. Of those that add, whatever
        their length, also the one that comes next, and one more from the same rank: another's
        would share the link with it. Each action is passed once.
        """
        while self.look_ahead_position < len(self.actions):
            action = self.actions[self.look_ahead_position]
            if isinstance(action, Recv):
                if len(self.posted_receives) == self.posts:
                    return
                slot = self.buffers[action.slot]
                buffer = None
                if action.add or self.is_needed(action.slot):
                    others = self.shares_link and any(
                        each.frm != action.frm for each, *_ in self.posted_receives
                    )
                    more = not others and len(self.posted_receives) < 2
                    if self.scratch_bytes + slot.nbytes > self.scratch_limit and not (
                        action.add and more
                    ):
                        return
                    buffer = torch.empty_like(slot)
                    self.scratch_bytes += slot.nbytes
                work = dist.irecv(
                    slot if buffer is None else buffer, group=self.world.group, group_src=action.frm
                )
                self.posted_receives.append((action, work, buffer))
            for part in list_touched_parts(action):
                self.touch_counts[part] = self.touch_counts.get(part, 0) + 1
            self.look_ahead_position += 1

    def is_needed(self, slot: Slot) -> bool:
        """Does an action before the one ahead, or a send under way, still touch a part of the
        slot?
        """
        return any(
            self.touch_counts.get(part) or part in self.open_sends for part in expand_slot(slot)
        )

    def finish_sends(self, parts: Sequence[Slot]) -> None:
        """Wait until the sends of some parts are over, each once: one send may be of several
        parts.
        """
        for part in parts:
            for action, work in self.open_sends.pop(part, ()):
                for other in expand_slot(action.slot):
                    if left := [
                        each for each in self.open_sends.pop(other, ()) if each[1] is not work
                    ]:
                        self.open_sends[other] = left
                self.wait_for_message(action, work)

    def wait_for_message(self, action: Send | Recv, work: Any) -> None:
        """Wait for a message, once (gloo waits for ever on a send that was waited for before),
        and not without end.
        """
        self.awaited_action = action
        start = time.monotonic()
        work.wait(self.timeout)
        seconds = time.monotonic() - start
        self.awaited_action = None
        if self.report_message:
            lane = "receive" if isinstance(action, Recv) else "wait"
            self.report_message(action, lane, start, seconds, self.buffers[action.slot].nbytes)
        if self.has_received:
            self.transfer_seconds += seconds
        else:
            self.waiting_seconds += seconds

    # ---- when it fails -----------------------------------------------------------------------
    def make_status(self) -> RankStatus:
        """Where this rank stands, for all to see."""
        around = [
            f"[{each}]" if at == self.position else str(each)
            for at, each in enumerate(map(self.use_launched_ranks, self.actions))
        ]
        first = max(0, self.position - 3)
        stop = self.position + 4
        line = ["..."] * (first > 0) + around[first:stop] + ["..."] * (stop < len(around))
        peer = None
        waits_for = ""
        if isinstance(self.awaited_action, Recv):
            peer = self.awaited_action.frm
            waits_for = (
                f"slot {format_slot(self.awaited_action.slot)} from rank "
                f"{self.world.global_ranks[peer]}"
            )
        elif isinstance(self.awaited_action, Send):
            peer = self.awaited_action.to
            waits_for = (
                f"rank {self.world.global_ranks[peer]} to take slot "
                f"{format_slot(self.awaited_action.slot)}"
            )
        return RankStatus(self.schedule_number, " ".join(line), waits_for, peer)

    def use_launched_ranks(self, action: Any) -> Any:
        """An action as it is told: with the numbers by which ranks were launched."""
        names = self.world.global_ranks
        if isinstance(action, Send):
            return replace(action, to=names[action.to])
        return replace(action, frm=names[action.frm]) if isinstance(action, Recv) else action


def refuse_compute(action: Compute) -> None:
    """Of an exchange, which only adds."""
    raise StepFailed(f"the wire cannot compute {action.what!r} on slot {format_slot(action.at)}")


def group_by_kind(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Actions of one kind in a row: sends, receives."""
    return (list(row) for _, row in groupby(actions, key=type))


def list_touched_parts(action: Action) -> Sequence[Slot]:
    """The parts that an action reads or writes."""
    return expand_slot(action.at if isinstance(action, Compute) else action.slot)
