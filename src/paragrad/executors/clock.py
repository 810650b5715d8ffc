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
from paragrad.executors.program_reader import read
from paragrad.schedules.actions import (
    Compute,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Slot,
    lengths_of,
    parts_in,
    shown,
)

TOLD = 1000  # messages after which somebody is told how many there were

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
    slow: float
    posted: float
    # out of the sender, into the receiver (or their hosts)
    ways: tuple[Any, Any]
    # which it carries: first, and the one after the last
    parts: tuple[int, int]
    awaited: bool = False  # its receiver has come to it
    end: float | None = None
    # who waits for the end
    then: list[Callable[[float], None]] = field(default_factory=list)


def timed(
    schedule: Schedule,
    size: int,
    length: int | Mapping[Slot, int],
    cluster: Cluster,
    *,
    element: int = 4,
    durations: Durations | None = None,
    spans: bool = False,
    tell: Callable[[int], None] | None = None,
) -> Timeline:
    """Play a schedule over a vector of `length` elements of `element` bytes on a cluster of
    `size` ranks.

    length: or the elements of every slot, by name;  durations: of what is computed, in seconds
    of a rank that is not slow; spans: also keep every message, addition and Compute;  tell: now
    and then, how many messages there were. Raises ScheduleError where the ranks wait for one
    another.
    """
    clock = Clock(
        schedule, size, lengths_of(schedule, size, length), cluster, element, durations, spans
    )
    clock.run(tell)
    return Timeline(max(clock.ends), tuple(clock.ends), clock.messages, tuple(clock.spans or ()))


class Clock:
    """The state of a cluster while a schedule is played on it."""

    def __init__(
        self,
        schedule: Schedule,
        size: int,
        lengths: dict[Slot, int],
        cluster: Cluster,
        element: int,
        durations: Durations | None,
        spans: bool,
    ) -> None:
        self.cluster = cluster
        self.durations = durations
        self.lengths = lengths
        self.element = element
        self.order = {slot: place for place, slot in enumerate(lengths)}
        self.extents: dict[Slot, tuple[int, int, int]] = {}
        self.programs = [read(schedule.program, rank, size) for rank in range(size)]
        self.slow = [cluster.factor(rank) for rank in range(size)]
        self.ends = [-1.0] * size
        # ways out and in that a message has taken
        self.busy: set[Any] = set()
        # messages that want a way, as they were posted
        self.waiting: dict[Any, dict[Transfer, None]] = {}
        # heaps of times
        self.cores = [[0.0] * cluster.cores for _ in range(-(-size // cluster.sharing))]
        self.sent: dict[tuple[int, int], deque[Transfer]] = {}
        self.expected: dict[tuple[int, int], Callable[[Transfer], None]] = {}
        # sends that may not be over, by rank
        self.open: list[list[Transfer]] = [[] for _ in range(size)]
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = count()
        self.messages = 0
        self.spans: list[Span] | None = [] if spans else None

    def run(self, tell: Callable[[int], None] | None = None) -> None:
        for rank in range(len(self.programs)):
            self.at(0.0, self.advance, rank)
        due = TOLD
        while self.events:
            time, _, _, event, arguments = heapq.heappop(self.events)
            event(time, *arguments)
            if tell and self.messages >= due:
                tell(self.messages)
                due += TOLD
        if stuck := [rank for rank, end in enumerate(self.ends) if end < 0]:
            raise ScheduleError(f"rank {stuck[0]} waits for ever (and {len(stuck) - 1} more)")

    def at(
        self, time: float, event: Callable[..., None], *arguments: Any, after: bool = False
    ) -> None:
        """after: when everything else of that time has happened."""
        heapq.heappush(self.events, (time, after, next(self.number), event, arguments))

    def working(self, rank: int, time: float, seconds: float) -> float:
        """Hold one of a rank's cores from `time` on, or from when one is free; when it is
        done.
        """
        if seconds == 0.0:
            return time
        pool = self.cores[rank // self.cluster.sharing]
        end = max(time, pool[0]) + seconds * self.slow[rank]
        heapq.heapreplace(pool, end)
        return end

    # ---- a rank's program --------------------------------------------------------------------
    def advance(self, time: float, rank: int) -> None:
        """Go on with a program until it has to wait."""
        for action in self.programs[rank]:
            if isinstance(action, Send):
                message = self.post(time, rank, action)
                if action.wait:
                    message.then.append(
                        lambda end, rank=rank: self.at(end, self.advance, rank)  # type: ignore[misc]
                    )
                    return
                if message.posted > time:
                    self.at(message.posted, self.advance, rank)
                    return
            elif isinstance(action, Recv):
                self.take(time, rank, action)
                return
            else:
                self.write(time, rank, action)
                return
        self.ends[rank] = time

    def post(self, time: float, rank: int, action: Send) -> Transfer:
        link = self.cluster.between(rank, action.to)
        posted = self.working(rank, time, link.overhead)
        start, stop, size = self.extent(action.slot)
        message = Transfer(
            action,
            rank,
            size,
            link,
            max(self.slow[rank], self.slow[action.to]),
            posted,
            self.ways(rank, action.to),
            (start, stop),
        )
        self.messages += 1
        self.open[rank].append(message)
        pair = rank, action.to
        if expecting := self.expected.pop(pair, None):
            expecting(message)
        else:
            self.sent.setdefault(pair, deque()).append(message)
        # with wait: when its receiver is there
        if not action.wait:
            self.at(posted, self.want, message)
        return message

    def ways(self, source: int, target: int) -> tuple[Any, Any]:
        """The way out and the way in of a message: the ranks' own, or that of their hosts."""
        group = self.cluster.group
        if group > 1 and source // group != target // group:
            return ("out of host", source // group), ("into host", target // group)
        return ("out", source), ("into", target)

    def take(self, time: float, rank: int, action: Recv) -> None:
        """The rank has come to a receive: go on when its message is there, or comes."""

        def matched(message: Transfer) -> None:
            if message.send.slot != action.slot:
                raise ScheduleError(
                    f"rank {rank} expects slot {shown(action.slot)} from rank {action.frm}, which "
                    f"sends slot "
                    f"{shown(message.send.slot)}: first sent is first received"
                )
            message.awaited = True
            if message.send.wait:
                self.at(max(time, message.posted), self.want, message)
            if message.end is None:
                message.then.append(
                    lambda end: self.at(max(time, end), self.arrived, rank, action, message)
                )
            else:
                self.at(max(time, message.end), self.arrived, rank, action, message)

        queue = self.sent.get((action.frm, rank))
        if queue:
            matched(queue.popleft())
        else:
            self.expected[action.frm, rank] = matched

    # ---- messages ----------------------------------------------------------------------------
    def want(self, time: float, message: Transfer) -> None:
        """The message wants its ways."""
        for way in message.ways:
            self.waiting.setdefault(way, {})[message] = None
        self.at(time, self.serve, message.ways[1], after=True)

    def serve(self, time: float, way_in: Any) -> None:
        """Give a free way into a receiver to a message whose way out is free too."""
        free = [
            message
            for message in self.waiting.get(way_in, ())
            if self.busy.isdisjoint(message.ways)
        ]
        if free:
            self.travel(time, min(free, key=self.turn))

    def serve_sender(self, time: float, way_out: Any) -> None:
        """A way out is free: it may be what a message of its sender waited for."""
        for message in list(self.waiting.get(way_out, ())):
            if way_out in self.busy:
                return
            self.serve(time, message.ways[1])

    def turn(self, message: Transfer) -> tuple[bool, bool]:
        """Who goes first into a receiver: whom it waits for, then whose sender has nothing to
        send before.
        """
        return not message.awaited, next(iter(self.waiting[message.ways[0]])) is not message

    def travel(self, time: float, message: Transfer) -> None:
        """Take both ways, for as long as the message needs."""
        source = message.source
        target = message.send.to
        link = message.link
        for way in message.ways:
            self.busy.add(way)
            del self.waiting[way][message]
        free = time + link.held(message.size) * message.slow
        self.at(free, self.release, message)
        end = free
        # on a core of its own a rank works while it sends
        if self.cluster.sharing > 1:
            work = link.work * message.size
            end = max(free, self.working(source, time, work), self.working(target, time, work))
        message.end = end + link.latency
        if self.spans is not None:
            text = shown(message.send.slot)
            self.spans.append(Span(source, text, "send", time, free - time, message.size, target))
            self.spans.append(
                Span(target, text, "receive", time, message.end - time, message.size, source)
            )
        for told in message.then:
            told(message.end)

    def release(self, time: float, message: Transfer) -> None:
        """Both ways are free for others."""
        self.busy.difference_update(message.ways)
        if self.waiting[message.ways[1]]:
            self.at(time, self.serve, message.ways[1], after=True)
        if self.waiting[message.ways[0]]:
            self.at(time, self.serve_sender, message.ways[0], after=True)

    def arrived(self, time: float, rank: int, action: Recv, message: Transfer) -> None:
        """The message is there: take it."""
        self.write(self.working(rank, time, message.link.overhead), rank, action)

    # ---- slots -------------------------------------------------------------------------------
    def extent(self, slot: Slot) -> tuple[int, int, int]:
        """The place of a slot's first part, the one after its last, and its bytes."""
        if slot not in self.extents:
            parts = parts_in(slot)
            if unknown := [part for part in parts if part not in self.lengths]:
                raise ScheduleError(f"the clock was not told how long slot {shown(unknown[0])} is")
            size = sum(self.lengths[part] for part in parts) * self.element
            self.extents[slot] = self.order[parts[0]], self.order[parts[-1]] + 1, size
        return self.extents[slot]

    def labelled(self, slot: Slot) -> tuple[int, int, int]:
        """The same of what is computed at: also a name that is no buffer, such as the number of
        a micro-batch.
        """
        parts = parts_in(slot)
        places = [self.order.setdefault(part, len(self.order)) for part in parts]
        return (
            places[0],
            places[-1] + 1,
            sum(self.lengths.get(part, 0) for part in parts) * self.element,
        )

    def write(self, time: float, rank: int, action: Recv | Compute) -> None:
        """Wait for the sends of the slot, then add or compute."""
        start, stop, size = (
            self.labelled(action.at) if isinstance(action, Compute) else self.extent(action.slot)
        )
        left = []
        for sent in self.open[rank]:
            if sent.parts[0] >= stop or start >= sent.parts[1]:
                if sent.end is None or sent.end > time:
                    left.append(sent)
            elif sent.end is None:  # it has not begun
                sent.then.append(
                    lambda end, time=time: self.at(  # type: ignore[misc]
                        max(time, end), self.write, rank, action
                    )
                )
                return
            else:
                time = max(time, sent.end)
        self.open[rank] = left
        if isinstance(action, Compute):
            self.at(time, self.work, rank, str(action), self.duration(rank, action), size)
        elif action.add and self.cluster.gamma and size:
            self.at(
                time, self.work, rank, f"+{shown(action.slot)}", self.cluster.gamma * size, size
            )
        else:
            self.at(time, self.advance, rank)

    def work(self, time: float, rank: int, name: str, seconds: float, size: int) -> None:
        """Hold a core, then go on."""
        end = self.working(rank, time, seconds)
        if self.spans is not None:
            seconds *= self.slow[rank]
            self.spans.append(Span(rank, name, "compute", end - seconds, seconds, size))
        self.at(end, self.advance, rank)

    def duration(self, rank: int, action: Compute) -> float:
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
