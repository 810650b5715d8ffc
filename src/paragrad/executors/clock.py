"""The clock: when does every action of a schedule happen on a cluster? Events in order of time,
nothing random.

A Send posts its message and goes on; the message takes its sender's way out and its receiver's
way in as soon as both are free: first the one that its receiver waits for, then first come,
first served. A Recv ends when its message is there; what it adds holds a core, and so does a
Compute, for as long as the clock is told. Writing a slot waits for its sends, as always. The
result is a Timeline: the record's span lines, predicted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from paragrad.executors.machine import Cluster, Link
from paragrad.executors.program_reader import read_program
from paragrad.schedules.actions import (
    Compute,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Slot,
    compute_slot_lengths,
    expand_slot,
    format_slot,
)

PROGRESS_INTERVAL = 1000  # messages after which somebody is told how many there were

# seconds of a Compute: by its name, or of (rank, action)
Durations = Mapping[str, float] | Callable[[int, Compute], float]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while, as the record has it; times in seconds from the
    beginning.
    """

    rank: int
    name: str
    lane: str  # send, receive, compute
    start: float
    seconds: float
    bytes: int
    peer: int | None = None


@dataclass(frozen=True)
class Timeline:
    """What a clock saw. seconds: until the last rank was done."""

    seconds: float
    ends: tuple[float, ...]  # of each rank
    messages: int
    spans: tuple[Span, ...] = ()


@dataclass(slots=True, eq=False)
class Transfer:
    """A message on its way; `end`: when its receiver can have it, once that is known."""

    send: Send
    source: int
    size: int
    link: Link
    slowdown: float
    post_time: float
    # out of the sender, into the receiver (or their hosts)
    ports: tuple[Any, Any]
    # which it carries: first, and the one after the last
    part_range: tuple[int, int]
    receiver_waits: bool = False  # its receiver has come to it
    end: float | None = None
    # who waits for the end
    callbacks: list[Callable[[float], None]] = field(default_factory=list)


def time_schedule(
    schedule: Schedule,
    size: int,
    length: int | Mapping[Slot, int],
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    durations: Durations | None = None,
    keep_spans: bool = False,
    report_progress: Callable[[int], None] | None = None,
) -> Timeline:
    """Play a schedule over a vector of `length` elements of `element` bytes on a cluster of
    `size` ranks.

    length: or the elements of every slot, by name;  durations: of what is computed, in seconds
    of a rank that is not slow; spans: also keep every message, addition and Compute;  tell: now
    and then, how many messages there were. Raises ScheduleError where the ranks wait for one
    another.
    """
    clock = Clock(
        schedule,
        size,
        compute_slot_lengths(schedule, size, length),
        cluster,
        element_bytes,
        durations,
        keep_spans,
    )
    clock.play_events(report_progress)
    return Timeline(max(clock.ends), tuple(clock.ends), clock.messages, tuple(clock.spans or ()))


class Clock:
    """The state of a cluster while a schedule is played on it."""

    def __init__(
        self,
        schedule: Schedule,
        size: int,
        lengths: dict[Slot, int],
        cluster: Cluster,
        element_bytes: int,
        durations: Durations | None,
        keep_spans: bool,
    ) -> None:
        self.cluster = cluster
        self.durations = durations
        self.lengths = lengths
        self.element_bytes = element_bytes
        self.slot_order = {slot: place for place, slot in enumerate(lengths)}
        self.slot_extents: dict[Slot, tuple[int, int, int]] = {}
        self.programs = [read_program(schedule.program, rank, size) for rank in range(size)]
        self.slowdowns = [cluster.find_slowdown(rank) for rank in range(size)]
        self.ends = [-1.0] * size
        # ways out and in that a message has taken
        self.busy_ports: set[Any] = set()
        # messages that want a way, as they were posted
        self.waiting_transfers: dict[Any, dict[Transfer, None]] = {}
        # heaps of times
        self.cores = [[0.0] * cluster.cores for _ in range(-(-size // cluster.sharing))]
        self.unmatched_sends: dict[tuple[int, int], deque[Transfer]] = {}
        self.unmatched_receives: dict[tuple[int, int], Callable[[Transfer], None]] = {}
        # sends that may not be over, by rank
        self.open_sends: list[list[Transfer]] = [[] for _ in range(size)]
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.event_numbers = count()
        self.messages = 0
        self.spans: list[Span] | None = [] if keep_spans else None

    def play_events(self, report_progress: Callable[[int], None] | None = None) -> None:
        for rank in range(len(self.programs)):
            self.schedule_event(0.0, self.advance_program, rank)
        due = PROGRESS_INTERVAL
        while self.events:
            time, _, _, event, arguments = heapq.heappop(self.events)
            event(time, *arguments)
            if report_progress and self.messages >= due:
                report_progress(self.messages)
                due += PROGRESS_INTERVAL
        if stuck := [rank for rank, end in enumerate(self.ends) if end < 0]:
            raise ScheduleError(f"rank {stuck[0]} waits for ever (and {len(stuck) - 1} more)")

    def schedule_event(
        self, time: float, event: Callable[..., None], *arguments: Any, last: bool = False
    ) -> None:
        """after: when everything else of that time has happened."""
        heapq.heappush(self.events, (time, last, next(self.event_numbers), event, arguments))

    def occupy_core(self, rank: int, time: float, seconds: float) -> float:
        """Hold one of a rank's cores from `time` on, or from when one is free; when it is
        done.
        """
        if seconds == 0.0:
            return time
        pool = self.cores[rank // self.cluster.sharing]
        end = max(time, pool[0]) + seconds * self.slowdowns[rank]
        heapq.heapreplace(pool, end)
        return end

    # ---- a rank's program --------------------------------------------------------------------
    def advance_program(self, time: float, rank: int) -> None:
        """Go on with a program until it has to wait."""
        for action in self.programs[rank]:
            if isinstance(action, Send):
                message = self.post_send(time, rank, action)
                if action.wait:
                    message.callbacks.append(
                        lambda end, rank=rank: self.schedule_event(end, self.advance_program, rank)  # type: ignore[misc]
                    )
                    return
                if message.post_time > time:
                    self.schedule_event(message.post_time, self.advance_program, rank)
                    return
            elif isinstance(action, Recv):
                self.begin_receive(time, rank, action)
                return
            else:
                self.write_slot(time, rank, action)
                return
        self.ends[rank] = time

    def post_send(self, time: float, rank: int, action: Send) -> Transfer:
        link = self.cluster.find_link(rank, action.to)
        posted = self.occupy_core(rank, time, link.overhead)
        start, stop, size = self.find_extent(action.slot)
        message = Transfer(
            action,
            rank,
            size,
            link,
            max(self.slowdowns[rank], self.slowdowns[action.to]),
            posted,
            self.find_ports(rank, action.to),
            (start, stop),
        )
        self.messages += 1
        self.open_sends[rank].append(message)
        pair = rank, action.to
        if expecting := self.unmatched_receives.pop(pair, None):
            expecting(message)
        else:
            self.unmatched_sends.setdefault(pair, deque()).append(message)
        # with wait: when its receiver is there
        if not action.wait:
            self.schedule_event(posted, self.request_ports, message)
        return message

    def find_ports(self, source: int, target: int) -> tuple[Any, Any]:
        """The way out and the way in of a message: the ranks' own, or that of their hosts."""
        group = self.cluster.group
        if group > 1 and source // group != target // group:
            return ("out of host", source // group), ("into host", target // group)
        return ("out", source), ("into", target)

    def begin_receive(self, time: float, rank: int, action: Recv) -> None:
        """The rank has come to a receive: go on when its message is there, or comes."""

        def matched(message: Transfer) -> None:
            if message.send.slot != action.slot:
                raise ScheduleError(
                    f"rank {rank} expects slot {format_slot(action.slot)} from rank {action.frm}, "
                    f"which "
                    f"sends slot "
                    f"{format_slot(message.send.slot)}: first sent is first received"
                )
            message.receiver_waits = True
            if message.send.wait:
                self.schedule_event(max(time, message.post_time), self.request_ports, message)
            if message.end is None:
                message.callbacks.append(
                    lambda end: self.schedule_event(
                        max(time, end), self.finish_receive, rank, action, message
                    )
                )
            else:
                self.schedule_event(
                    max(time, message.end), self.finish_receive, rank, action, message
                )

        queue = self.unmatched_sends.get((action.frm, rank))
        if queue:
            matched(queue.popleft())
        else:
            self.unmatched_receives[action.frm, rank] = matched

    # ---- messages ----------------------------------------------------------------------------
    def request_ports(self, time: float, message: Transfer) -> None:
        """The message wants its ways."""
        for way in message.ports:
            self.waiting_transfers.setdefault(way, {})[message] = None
        self.schedule_event(time, self.start_transfer, message.ports[1], last=True)

    def start_transfer(self, time: float, in_port: Any) -> None:
        """Give a free way into a receiver to a message whose way out is free too."""
        free = [
            message
            for message in self.waiting_transfers.get(in_port, ())
            if self.busy_ports.isdisjoint(message.ports)
        ]
        if free:
            self.carry_message(time, min(free, key=self.compute_priority))

    def start_sender_transfers(self, time: float, out_port: Any) -> None:
        """A way out is free: it may be what a message of its sender waited for."""
        for message in list(self.waiting_transfers.get(out_port, ())):
            if out_port in self.busy_ports:
                return
            self.start_transfer(time, message.ports[1])

    def compute_priority(self, message: Transfer) -> tuple[bool, bool]:
        """Who goes first into a receiver: whom it waits for, then whose sender has nothing to
        send before.
        """
        return not message.receiver_waits, next(
            iter(self.waiting_transfers[message.ports[0]])
        ) is not message

    def carry_message(self, time: float, message: Transfer) -> None:
        """Take both ways, for as long as the message needs."""
        source = message.source
        target = message.send.to
        link = message.link
        for way in message.ports:
            self.busy_ports.add(way)
            del self.waiting_transfers[way][message]
        free = time + link.compute_port_seconds(message.size) * message.slowdown
        self.schedule_event(free, self.release_ports, message)
        end = free
        # on a core of its own a rank works while it sends
        if self.cluster.sharing > 1:
            work = link.work * message.size
            end = max(
                free, self.occupy_core(source, time, work), self.occupy_core(target, time, work)
            )
        message.end = end + link.latency
        if self.spans is not None:
            text = format_slot(message.send.slot)
            self.spans.append(Span(source, text, "send", time, free - time, message.size, target))
            self.spans.append(
                Span(target, text, "receive", time, message.end - time, message.size, source)
            )
        for told in message.callbacks:
            told(message.end)

    def release_ports(self, time: float, message: Transfer) -> None:
        """Both ways are free for others."""
        self.busy_ports.difference_update(message.ports)
        if self.waiting_transfers[message.ports[1]]:
            self.schedule_event(time, self.start_transfer, message.ports[1], last=True)
        if self.waiting_transfers[message.ports[0]]:
            self.schedule_event(time, self.start_sender_transfers, message.ports[0], last=True)

    def finish_receive(self, time: float, rank: int, action: Recv, message: Transfer) -> None:
        """The message is there: take it."""
        self.write_slot(self.occupy_core(rank, time, message.link.overhead), rank, action)

    # ---- slots -------------------------------------------------------------------------------
    def find_extent(self, slot: Slot) -> tuple[int, int, int]:
        """The place of a slot's first part, the one after its last, and its bytes."""
        if slot not in self.slot_extents:
            parts = expand_slot(slot)
            if unknown := [part for part in parts if part not in self.lengths]:
                raise ScheduleError(
                    f"the clock was not told how long slot {format_slot(unknown[0])} is"
                )
            size = sum(self.lengths[part] for part in parts) * self.element_bytes
            self.slot_extents[slot] = (
                self.slot_order[parts[0]],
                self.slot_order[parts[-1]] + 1,
                size,
            )
        return self.slot_extents[slot]

    def find_compute_extent(self, slot: Slot) -> tuple[int, int, int]:
        """The same of what is computed at: also a name that is no buffer, such as the number of
        a micro-batch.
        """
        parts = expand_slot(slot)
        places = [self.slot_order.setdefault(part, len(self.slot_order)) for part in parts]
        return (
            places[0],
            places[-1] + 1,
            sum(self.lengths.get(part, 0) for part in parts) * self.element_bytes,
        )

    def write_slot(self, time: float, rank: int, action: Recv | Compute) -> None:
        """Wait for the sends of the slot, then add or compute."""
        start, stop, size = (
            self.find_compute_extent(action.at)
            if isinstance(action, Compute)
            else self.find_extent(action.slot)
        )
        left = []
        for sent in self.open_sends[rank]:
            if sent.part_range[0] >= stop or start >= sent.part_range[1]:
                if sent.end is None or sent.end > time:
                    left.append(sent)
            elif sent.end is None:  # it has not begun
                sent.callbacks.append(
                    lambda end, time=time: self.schedule_event(  # type: ignore[misc]
                        max(time, end), self.write_slot, rank, action
                    )
                )
                return
            else:
                time = max(time, sent.end)
        self.open_sends[rank] = left
        if isinstance(action, Compute):
            self.schedule_event(
                time, self.perform_work, rank, str(action), self.find_duration(rank, action), size
            )
        elif action.add and self.cluster.gamma and size:
            self.schedule_event(
                time,
                self.perform_work,
                rank,
                f"+{format_slot(action.slot)}",
                self.cluster.gamma * size,
                size,
            )
        else:
            self.schedule_event(time, self.advance_program, rank)

    def perform_work(self, time: float, rank: int, name: str, seconds: float, size: int) -> None:
        """Hold a core, then go on."""
        end = self.occupy_core(rank, time, seconds)
        if self.spans is not None:
            seconds *= self.slowdowns[rank]
            self.spans.append(Span(rank, name, "compute", end - seconds, seconds, size))
        self.schedule_event(end, self.advance_program, rank)

    def find_duration(self, rank: int, action: Compute) -> float:
        """Seconds of a Compute. One that nobody gave is refused: taken for nothing, it would
        make a bubble look free.
        """
        if callable(self.durations):
            return self.durations(rank, action)
        if self.durations is None or action.what not in self.durations:
            known = ", ".join(self.durations or ()) or "none"
            raise ScheduleError(
                f"rank {rank} computes {action}, and the clock was not told for how long "
                f"(durations of: "
                f"{known}); give durations={{{action.what!r}: seconds}}"
            )
        return self.durations[action.what]
