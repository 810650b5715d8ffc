"""The transport: run one rank's program over torch.distributed.

A Send is an isend. Its Work is kept until its slot is written again or the program ends. A Recv
ends in the order of the program, but is posted as early as possible, because gloo moves nothing
before it is posted. It is posted into scratch if it adds, or if the data that it overwrites is
still needed, and otherwise in place. So the messages of a round, and of the rounds after it, travel
at the same time. Waits, additions and computations keep the order of the program.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any, NamedTuple

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

# Bytes of scratch for posted receives. Short messages need many receives, as each costs gloo 0.4 ms
# whatever its length. For long messages one receive ahead is enough, and more do harm. A message
# that is requested early arrives early, and takes the link from the message that is waited for.
SCRATCH_BYTES = 1 << 18
# From this length in bytes on, consecutive sends to different ranks go one after the other if they
# share a link.
LONG_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that this rank sent in an exchange, and the seconds that it took.

    The three times add up to the duration of the exchange.

    Attributes:
        bytes: The bytes sent.

        waiting: Seconds blocked until the first message came, as other ranks were late.

        transfer: Seconds blocked for messages after that.

        processing: The remaining seconds: posting messages, adding, Python.

        computed: Whether the bytes come from a formula; then the times are not known.
    """

    bytes: int
    waiting: float = 0.0
    transfer: float = 0.0
    processing: float = 0.0
    computed: bool = False


# A function of (action, lane, start, seconds, bytes); start is on the monotonic clock.
ReportMessage = Callable[[Send | Recv, str, float, float, int], None]


class VectorParts(Mapping[Slot, Tensor]):
    """A vector as the buffers of a collective.

    Its equal parts have numbers; neighbouring parts have their range.

    Args:
        vector: The vector, of one dimension.
        count: The number of parts.
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

    Args:
        schedule: The schedule.
        vector: The vector.
        world: The world of the ranks.
        compute: A function of (action, part) that runs a Compute on a part of the vector. A correct
            all-reduce only adds.

    Returns:
        The bytes sent and the times.

    Raises:
        StepFailed: If a message fails.
    """
    start = time.monotonic()
    parts = VectorParts(vector, count_parts(schedule, world.size))
    compute_action = None if compute is None else lambda action: compute(action, parts[action.at])
    run = ProgramRun(list(schedule.program(world.rank, world.size)), parts, world, compute_action)
    run.play_program()
    return Traffic(
        run.sent_bytes,
        run.waiting_seconds,
        run.transfer_seconds,
        time.monotonic() - start - run.waiting_seconds - run.transfer_seconds,
    )


class OpenSend(NamedTuple):
    """A send that is not over.

    Attributes:
        action: The send.
        parts: The parts of its slot.
        work: Its Work.
    """

    action: Send
    parts: Sequence[Slot]
    work: Any


class ProgramRun:
    """One run of one rank's program over its buffers.

    Messages are sent from the buffers and received into them.

    Args:
        actions: The program.

        buffers: Contiguous tensors by slot. Those that are received into exist from the start.

        world: The world of the ranks.

        compute: A function that runs a Compute. It is called when the sends of its slot are over.

        report_message: A function of (action, lane, start, seconds, bytes). It gets the time that
            each message costs this rank: its posting (lane send), and the wait for it (lane
            receive; for a send, lane wait).

        posts: How many receives are posted at a time, at most. It is for buffers that are created
            when they are requested; none of them is received into while it holds anything.

        touched_parts: The parts that each action touches (`list_touched_parts`), for a program that
            runs in every step; None: computed here.

        postings: The receives that are posted before each action (`plan_postings`), for a program
            that runs in every step; None: they are found while it runs.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        buffers: Mapping[Slot, Tensor],
        world: World,
        compute: Callable[[Compute], None] | None = None,
        report_message: ReportMessage | None = None,
        posts: int | None = None,
        touched_parts: Sequence[Sequence[Slot]] | None = None,
        postings: Sequence[Sequence[Recv]] | None = None,
    ) -> None:
        self.actions = actions
        self.postings = postings
        self.touched_parts = (
            [list_touched_parts(each) for each in actions]
            if touched_parts is None
            else touched_parts
        )
        self.buffers = buffers
        self.world = world
        self.posts = posts or len(actions)
        self.compute = compute or refuse_compute
        self.report_message = report_message
        # dist.isend and dist.irecv call these, after questions that take longer than a message
        self.group = world.group or dist.group.WORLD
        self.schedule_number = next(world.schedule_numbers)
        self.timeout = timedelta(seconds=world.timeout)
        self.position = 0
        # part -> its sends
        self.open_sends: dict[Slot, list[OpenSend]] = {}
        # Posted receives, with their Work and scratch.
        self.posted_receives: deque[tuple[Recv, Any, Tensor | None]] = deque()
        # The first action that `post_receives` has not passed.
        self.look_ahead_position = 0
        # part -> number of actions from `position` to `look_ahead_position` that touch it
        self.touch_counts: dict[Slot, int] = {}
        self.scratch_bytes = 0
        # A row of receives must be posted before the sends that precede it; otherwise its messages
        # come after these. A receive that does not add may need scratch too, and may be an element
        # longer than one that adds.
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
        # Whether messages that travel at the same time share a link.
        self.shares_link = world.backend != "shm"
        self.sent_bytes = 0
        self.waiting_seconds = 0.0
        self.transfer_seconds = 0.0
        self.has_received = False
        self.awaited_action: Send | Recv | None = None
        self.is_computing = False

    def count_row_scratch(self, row: Sequence[Action]) -> int:
        """Return the bytes that a row of receives may need in scratch."""
        return sum(self.buffers[each.slot].nbytes for each in row if isinstance(each, Recv))

    def play_program(self) -> None:
        """Run the program to its end.

        Raises:
            StepFailed: If a message fails. It shows the schedule around the failure, with the last
                actions of all ranks.
        """
        try:
            for index, action in enumerate(self.actions):
                self.position = index
                if isinstance(action, Send):
                    self.play_send(action)
                elif isinstance(action, Recv):
                    self.play_recv(action)
                else:
                    self.finish_sends(self.touched_parts[index])
                    self.is_computing = True
                    self.compute(action)
                    self.is_computing = False
                if index < self.look_ahead_position:
                    for part in self.touched_parts[index]:
                        self.touch_counts[part] -= 1
            self.position = len(self.actions)
            self.finish_sends(list(self.open_sends))
        except Exception as error:
            if not self.is_computing and not isinstance(error, RuntimeError):
                raise
            # A failure of a Compute is no failure of the exchange: its own message is raised, and
            # this rank failed first.
            if self.is_computing:
                error.when = time.monotonic()  # type: ignore[attr-defined]
            report = DeadlockReport(self.world, self.make_status())
            self.world.abort()
            if self.is_computing:
                raise
            raise StepFailed(report.format_report(error)) from error
        finally:
            self.group = None  # a group that an error keeps alive cannot be left

    def play_send(self, action: Send) -> None:
        """Post the next receives, then send a slot."""
        # gloo announces a posted receive to the peer over the connection that carries the messages
        # to this peer. If the receive is posted after the send, the announcement arrives after the
        # whole message. Then the two directions go one after the other.
        self.post_receives()
        tensor = self.buffers[action.slot]
        if tensor.nbytes >= LONG_MESSAGE_BYTES and self.shares_link:
            # At the same time they would share the link, and the first would come as late as the
            # last.
            previous = self.actions[self.position - 1] if self.position else None
            if action.after:
                self.finish_sends(
                    [
                        part
                        for part, sends in self.open_sends.items()
                        if any(sent.action.to != action.to for sent in sends)
                    ]
                )
            elif isinstance(previous, Send) and previous.to != action.to:
                self.finish_sends(self.touched_parts[self.position - 1])
        start = time.monotonic()
        work = self.group.send([view_real(tensor)], action.to, 0)
        if self.report_message:
            self.report_message(action, "send", start, time.monotonic() - start, tensor.nbytes)
        self.sent_bytes += tensor.nbytes
        if action.wait:
            self.wait_for_message(action, work)
        else:
            sent = OpenSend(action, self.touched_parts[self.position], work)
            for part in sent.parts:
                self.open_sends.setdefault(part, []).append(sent)

    def play_recv(self, action: Recv) -> None:
        """Wait for the message of a receive, then add it or write it."""
        self.post_receives()
        # The receive overwrites a slot that is still being sent, and scratch is too short.
        if not self.posted_receives:
            self.finish_sends(self.touched_parts[self.position])
            self.post_receives()
        _, work, buffer = self.posted_receives.popleft()
        self.wait_for_message(action, work)
        self.has_received = True
        if buffer is not None:
            self.scratch_bytes -= buffer.nbytes
            self.finish_sends(self.touched_parts[self.position])
            if action.add:
                self.buffers[action.slot].add_(buffer)
            else:
                self.buffers[action.slot].copy_(buffer)

    def post_receives(self) -> None:
        """Post the receives that come next, as far as scratch allows.

        Among receives that add, the next one is posted whatever its length, and one more from the
        same rank. One from another rank would share the link with it. Each action is passed once.
        """
        if self.postings is not None:
            for receive in self.postings[self.position]:
                self.post_receive(receive, None)
            return
        self.look_ahead_position = max(self.look_ahead_position, self.position)
        while self.look_ahead_position < len(self.actions):
            action = self.actions[self.look_ahead_position]
            parts = self.touched_parts[self.look_ahead_position]
            if isinstance(action, Recv):
                if len(self.posted_receives) == self.posts:
                    return
                slot = self.buffers[action.slot]
                buffer = None
                if action.add or self.is_needed(parts):
                    has_other_source = self.shares_link and any(
                        each.frm != action.frm for each, *_ in self.posted_receives
                    )
                    may_exceed = not has_other_source and len(self.posted_receives) < 2
                    if self.scratch_bytes + slot.nbytes > self.scratch_limit and not (
                        action.add and may_exceed
                    ):
                        return
                    buffer = torch.empty_like(slot)
                    self.scratch_bytes += slot.nbytes
                self.post_receive(action, buffer)
            for part in parts:
                self.touch_counts[part] = self.touch_counts.get(part, 0) + 1
            self.look_ahead_position += 1

    def post_receive(self, action: Recv, scratch: Tensor | None) -> None:
        """Post a receive, into scratch or into the buffer of its slot."""
        tensor = self.buffers[action.slot] if scratch is None else scratch
        work = self.group.recv([view_real(tensor)], action.frm, 0)
        self.posted_receives.append((action, work, scratch))

    def is_needed(self, parts: Sequence[Slot]) -> bool:
        """Return whether an earlier action, or an open send, still touches one of the parts.

        Earlier actions are those before the look-ahead position.
        """
        return any(self.touch_counts.get(part) or part in self.open_sends for part in parts)

    def finish_sends(self, parts: Sequence[Slot]) -> None:
        """Wait until the sends of some parts are over.

        Each send is waited for once, though it may be of several parts.
        """
        for part in parts:
            for sent in self.open_sends.pop(part, ()):
                for other in sent.parts:
                    if remaining := [
                        each for each in self.open_sends.pop(other, ()) if each is not sent
                    ]:
                        self.open_sends[other] = remaining
                self.wait_for_message(sent.action, sent.work)

    def wait_for_message(self, action: Send | Recv, work: Any) -> None:
        """Wait for a message, once and with a timeout.

        If a send is waited for twice, gloo waits for ever.

        Args:
            action: The Send or Recv of the message.
            work: Its Work.
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

    # ---- failures ----------------------------------------------------------------------------
    def make_status(self) -> RankStatus:
        """Return the status of this rank, for the report of all ranks."""
        actions = [
            f"[{each}]" if index == self.position else str(each)
            for index, each in enumerate(map(self.use_launched_ranks, self.actions))
        ]
        first = max(0, self.position - 3)
        stop = self.position + 4
        line = ["..."] * (first > 0) + actions[first:stop] + ["..."] * (stop < len(actions))
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
        """Return an action with the numbers of the ranks in the launched world."""
        names = self.world.global_ranks
        if isinstance(action, Send):
            return replace(action, to=names[action.to])
        return replace(action, frm=names[action.frm]) if isinstance(action, Recv) else action


def view_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, which every backend sends.

    Args:
        tensor: The tensor.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def plan_postings(actions: Sequence[Action], posts: int) -> list[list[Recv]]:
    """Plan which receives are posted before each action, as `ProgramRun` would find it.

    Args:
        actions: A program in which every slot is received into once, and nothing adds to it.
        posts: How many receives are posted at a time, at most.

    Returns:
        For each action, the receives.
    """
    receives = deque(action for action in actions if isinstance(action, Recv))
    postings: list[list[Recv]] = []
    posted = 0
    for action in actions:
        row: list[Recv] = []
        if not isinstance(action, Compute):
            while receives and posted < posts:
                row.append(receives.popleft())
                posted += 1
        posted -= isinstance(action, Recv)
        postings.append(row)
    return postings


def refuse_compute(action: Compute) -> None:
    """Refuse a Compute: an exchange only adds."""
    raise StepFailed(f"the wire cannot compute {action.what!r} on slot {format_slot(action.at)}")


def group_by_kind(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Group consecutive actions of one kind: sends, receives."""
    return (list(row) for _, row in groupby(actions, key=type))


def list_touched_parts(action: Action) -> Sequence[Slot]:
    """Return the parts that an action reads or writes."""
    return expand_slot(action.at if isinstance(action, Compute) else action.slot)
