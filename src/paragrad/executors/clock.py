"""The clock simulates when every action of a schedule happens on a cluster.

Events are simulated in order of time; nothing is random.

A Send posts its message and continues. The message occupies the out port of its sender and the in
port of its receiver as soon as both are free. The message that its receiver waits for goes first,
then first come, first served. A Recv ends when its message has arrived. An addition holds a core,
and so does a Compute, for the given durations. A write to a slot waits for the sends of the slot,
as always. The result is a Timeline: a prediction of the span lines of a record.
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

PROGRESS_INTERVAL = 1000  # messages between two progress reports

# Seconds of a Compute: by its name, or a function of (rank, action).
Durations = Mapping[str, float] | Callable[[int, Compute], float]


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a rank, as in the record; times in seconds from the beginning.

    Attributes:
        rank: The rank.

        name: The slot, or the Compute.

        lane: send, receive or compute.

        start: When it begins.

        seconds: How long it lasts.

        bytes: The bytes sent, received, added or computed on.

        peer: The other rank of a message.
    """

    rank: int
    name: str
    lane: str
    start: float
    seconds: float
    bytes: int
    peer: int | None = None


@dataclass(frozen=True)
class Timeline:
    """The result of a clock.

    Attributes:
        seconds: The time until the last rank ends.

        ends: The time at which each rank ends, in seconds.

        messages: The number of messages.

        spans: The spans, if they were kept.
    """

    seconds: float
    ends: tuple[float, ...]
    messages: int
    spans: tuple[Span, ...] = ()


@dataclass(slots=True, eq=False)
class Transfer:
    """A message on its way.

    Attributes:
        send: The action that sends it.

        source: The rank that sends it.

        size: Its bytes.

        link: The link that it takes.

        slowdown: How many times slower the slower of both ranks is.

        post_time: When it is posted, in seconds.

        ports: The out port of the sender and the in port of the receiver, or those of their hosts.

        part_range: The first part that it carries, and the one after the last.

        receiver_waits: Whether its receiver has reached the Recv.

        end: When its receiver can have it, in seconds, once that is known.

        callbacks: Functions to call with the end.
    """

    send: Send
    source: int
    size: int
    link: Link
    slowdown: float
    post_time: float
    ports: tuple[Any, Any]
    part_range: tuple[int, int]
    receiver_waits: bool = False
    end: float | None = None
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
    """Simulate a schedule on a cluster.

    Args:
        schedule: The schedule.

        size: The number of ranks.

        length: The elements of the vector, or of every slot by name.

        cluster: The cluster.

        element_bytes: The bytes of one element.

        durations: The seconds of each Compute, on a rank that is not slow.

        keep_spans: Whether to keep every message, addition and Compute.

        report_progress: A function that gets the number of messages now and then.

    Raises:
        ScheduleError: If the ranks wait for one another.
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
    """The state of a cluster while a schedule is simulated on it.

    Args:
        schedule: The schedule.

        size: The number of ranks.

        lengths: The elements of every slot.

        cluster: The cluster.

        element_bytes: The bytes of one element.

        durations: The seconds of each Compute, on a rank that is not slow.

        keep_spans: Whether to keep spans.
    """

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
        # Ports that a message occupies.
        self.busy_ports: set[Any] = set()
        # Messages that wait for a port, in the order of posting.
        self.waiting_transfers: dict[Any, dict[Transfer, None]] = {}
        # For each pool of cores, a heap of the times at which each core is free.
        self.cores = [[0.0] * cluster.cores for _ in range(-(-size // cluster.sharing))]
        self.unmatched_sends: dict[tuple[int, int], deque[Transfer]] = {}
        self.unmatched_receives: dict[tuple[int, int], Callable[[Transfer], None]] = {}
        # Sends that may not be over, by rank.
        self.open_sends: list[list[Transfer]] = [[] for _ in range(size)]
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.event_numbers = count()
        self.messages = 0
        self.spans: list[Span] | None = [] if keep_spans else None

    def play_events(self, report_progress: Callable[[int], None] | None = None) -> None:
        """Simulate all events in order of time.

        Args:
            report_progress: A function that gets the number of messages now and then.

        Raises:
            ScheduleError: If a rank waits for ever.
        """
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
        """Schedule an event.

        Args:
            time: When it happens, in seconds.

            event: The function to call with the time and the arguments.

            arguments: Its further arguments.

            last: Whether it happens after everything else of that time.
        """
        heapq.heappush(self.events, (time, last, next(self.event_numbers), event, arguments))

    def occupy_core(self, rank: int, time: float, seconds: float) -> float:
        """Occupy one of a rank's cores as soon as one is free.

        Args:
            rank: The rank.
            time: The earliest beginning, in seconds.
            seconds: How long, on a rank that is not slow.

        Returns:
            The time at which the core is free again.
        """
        if seconds == 0.0:
            return time
        core_times = self.cores[rank // self.cluster.sharing]
        end = max(time, core_times[0]) + seconds * self.slowdowns[rank]
        heapq.heapreplace(core_times, end)
        return end

    # ---- the program of a rank ---------------------------------------------------------------
    def advance_program(self, time: float, rank: int) -> None:
        """Continue the program of a rank until it has to wait."""
        for action in self.programs[rank]:
            if isinstance(action, Send):
                message = self.post_send(time, rank, action)
                if action.wait:
                    message.callbacks.append(
                        lambda end, rank=rank: self.schedule_event(  # type: ignore[misc]
                            end, self.advance_program, rank
                        )
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
        """Post the message of a Send and return it."""
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
        # With wait, the message goes when its receiver has reached the Recv.
        if not action.wait:
            self.schedule_event(posted, self.request_ports, message)
        return message

    def find_ports(self, source: int, target: int) -> tuple[Any, Any]:
        """Return the out port and the in port of a message: of the ranks, or of their hosts."""
        group = self.cluster.group
        if group > 1 and source // group != target // group:
            return ("out of host", source // group), ("into host", target // group)
        return ("out", source), ("into", target)

    def begin_receive(self, time: float, rank: int, action: Recv) -> None:
        """Begin a Recv; the rank continues when the message has arrived."""

        def match_message(message: Transfer) -> None:
            if message.send.slot != action.slot:
                raise ScheduleError(
                    f"rank {rank} expects slot {format_slot(action.slot)} from rank {action.frm}, "
                    f"which sends slot {format_slot(message.send.slot)}: first sent is first "
                    "received"
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
            match_message(queue.popleft())
        else:
            self.unmatched_receives[action.frm, rank] = match_message

    # ---- messages ----------------------------------------------------------------------------
    def request_ports(self, time: float, message: Transfer) -> None:
        """Let a message wait for its ports."""
        for port in message.ports:
            self.waiting_transfers.setdefault(port, {})[message] = None
        self.schedule_event(time, self.start_transfer, message.ports[1], last=True)

    def start_transfer(self, time: float, in_port: Any) -> None:
        """Give a free in port to a message with a free out port."""
        candidates = [
            message
            for message in self.waiting_transfers.get(in_port, ())
            if self.busy_ports.isdisjoint(message.ports)
        ]
        if candidates:
            self.carry_message(time, min(candidates, key=self.compute_priority))

    def start_sender_transfers(self, time: float, out_port: Any) -> None:
        """Start messages of a sender after its out port became free."""
        for message in list(self.waiting_transfers.get(out_port, ())):
            if out_port in self.busy_ports:
                return
            self.start_transfer(time, message.ports[1])

    def compute_priority(self, message: Transfer) -> tuple[bool, bool]:
        """Return the priority of a message at its receiver; the lowest goes first.

        A message that its receiver waits for comes first. Then comes one that is the next of its
        sender.
        """
        return not message.receiver_waits, next(
            iter(self.waiting_transfers[message.ports[0]])
        ) is not message

    def carry_message(self, time: float, message: Transfer) -> None:
        """Occupy both ports for as long as the message needs."""
        source = message.source
        target = message.send.to
        link = message.link
        for port in message.ports:
            self.busy_ports.add(port)
            del self.waiting_transfers[port][message]
        free = time + link.compute_port_seconds(message.size) * message.slowdown
        self.schedule_event(free, self.release_ports, message)
        end = free
        # A rank with a core of its own works while it sends.
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
        for callback in message.callbacks:
            callback(message.end)

    def release_ports(self, time: float, message: Transfer) -> None:
        """Free both ports of a message for others."""
        self.busy_ports.difference_update(message.ports)
        if self.waiting_transfers[message.ports[1]]:
            self.schedule_event(time, self.start_transfer, message.ports[1], last=True)
        if self.waiting_transfers[message.ports[0]]:
            self.schedule_event(time, self.start_sender_transfers, message.ports[0], last=True)

    def finish_receive(self, time: float, rank: int, action: Recv, message: Transfer) -> None:
        """Write a message that has arrived."""
        self.write_slot(self.occupy_core(rank, time, message.link.overhead), rank, action)

    # ---- slots -------------------------------------------------------------------------------
    def find_extent(self, slot: Slot) -> tuple[int, int, int]:
        """Return the place of a slot's first part, the place after its last part, and its bytes."""
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
        """Return the extent of the slot of a Compute.

        Its name may belong to no buffer, such as the number of a micro-batch.
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
        still_open = []
        for sent in self.open_sends[rank]:
            if sent.part_range[0] >= stop or start >= sent.part_range[1]:
                if sent.end is None or sent.end > time:
                    still_open.append(sent)
            elif sent.end is None:  # the transfer has not begun
                sent.callbacks.append(
                    lambda end, time=time: self.schedule_event(  # type: ignore[misc]
                        max(time, end), self.write_slot, rank, action
                    )
                )
                return
            else:
                time = max(time, sent.end)
        self.open_sends[rank] = still_open
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
        """Occupy a core, then continue the program."""
        end = self.occupy_core(rank, time, seconds)
        if self.spans is not None:
            seconds *= self.slowdowns[rank]
            self.spans.append(Span(rank, name, "compute", end - seconds, seconds, size))
        self.schedule_event(end, self.advance_program, rank)

    def find_duration(self, rank: int, action: Compute) -> float:
        """Return the seconds of a Compute.

        A Compute without a duration is refused. If it took no time, a bubble would look free.

        Args:
            rank: The rank.
            action: The Compute.

        Raises:
            ScheduleError: If no duration is given for it.
        """
        if callable(self.durations):
            return self.durations(rank, action)
        if self.durations is None or action.what not in self.durations:
            known = ", ".join(self.durations or ()) or "none"
            raise ScheduleError(
                f"rank {rank} computes {action}, and the clock was not told how long that "
                f"takes (durations of: {known}); give durations={{{action.what!r}: seconds}}"
            )
        return self.durations[action.what]
