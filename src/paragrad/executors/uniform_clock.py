"""The clock for thousands of ranks: if every rank does the same, one numpy array holds them all.

A schedule that makes no choice by rank, such as the ring, can generate the program of *all* ranks
at once. Then `rank` is a RankNumber, and so are the peers and slots of its actions. It is the same
program, read for all ranks. The result is that of the clock
(tests/executors/test_clock.py compares them up to 64 ranks). All other schedules go to the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragrad.executors.clock import Timeline, time_schedule
from paragrad.executors.machine import Cluster, Link
from paragrad.executors.message_count import TooManyMessages, count_rank_sends, refuse_many_messages
from paragrad.executors.rank_number import NotUniform, RankNumber, find_distance
from paragrad.schedules.actions import Collective, Recv, Send, compute_slot_lengths

# Messages up to which the clock plays them one by one: a minute or two.
MAX_EVENT_MESSAGES = 1 << 20
MAX_ARRAY_MESSAGES = 2 * 10**10  # the limit if all ranks send at once
# After so many actions all ranks send at one distance, or this clock has given up.
WARMUP_ACTIONS = 8

ReportProgress = Callable[[int, int], None]  # (messages played, of how many)


def time_collective(
    schedule: Collective,
    size: int,
    length: int,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    report_progress: ReportProgress | None = None,
) -> Timeline:
    """Simulate a collective, by the quicker of both clocks.

    Args:
        schedule: The collective.

        size: The number of ranks.

        length: The elements of the vector.

        cluster: The cluster.

        element_bytes: The bytes of one element.

        report_progress: A function that gets the number of played messages and of all messages now
            and then.

    Raises:
        TooManyMessages: If the simulation would take too long.
    """
    if (
        timeline := time_uniform_collective(
            schedule, size, length, cluster, element_bytes, report_progress
        )
    ) is not None:
        return timeline
    total = refuse_many_messages(schedule, size, MAX_EVENT_MESSAGES, "timed")
    return time_schedule(
        schedule,
        size,
        length,
        cluster,
        element_bytes=element_bytes,
        report_progress=report_progress and (lambda done: report_progress(done, total)),
    )


def time_uniform_collective(
    schedule: Collective,
    size: int,
    length: int,
    cluster: Cluster,
    element_bytes: int = 4,
    report_progress: ReportProgress | None = None,
) -> Timeline | None:
    """Simulate all ranks at once.

    Args:
        schedule: The collective.

        size: The number of ranks.

        length: The elements of the vector.

        cluster: The cluster.

        element_bytes: The bytes of one element.

        report_progress: A function that gets the number of played messages and of all messages now
            and then.

    Returns:
        The timeline, or None if the schedule makes a choice by rank, or if ranks meet on a link or
        a core.

    Raises:
        TooManyMessages: If the simulation would take too long.
    """
    if cluster.sharing > 1 or size < 2 or cluster.cores > 1:
        return None
    try:
        return UniformClock(schedule, size, length, cluster, element_bytes).play_program(
            report_progress
        )
    except TooManyMessages:
        raise
    # NotUniform; or any error of a RankNumber, or of a user's program, at a choice by rank or at a
    # range of parts.
    except Exception:
        return None


class UniformClock:
    """The state of all ranks, an array each; an array of one number if all ranks are equal.

    Args:
        schedule: The collective.
        size: The number of ranks.
        length: The elements of the vector.
        cluster: The cluster.
        element_bytes: The bytes of one element.
    """

    def __init__(
        self, schedule: Collective, size: int, length: int, cluster: Cluster, element_bytes: int
    ) -> None:
        self.cluster = cluster
        self.size = size
        self.schedule = schedule
        self.program = schedule.program(RankNumber(size), size)  # type: ignore[arg-type]
        self.part_bytes = element_bytes * np.array(
            list(compute_slot_lengths(schedule, size, length).values())
        )
        self.has_slow_ranks = any(factor != 1 for _, factor in cluster.slow)
        self.has_equal_ranks = (
            not self.has_slow_ranks
            and cluster.group == 1
            and bool((self.part_bytes == self.part_bytes[0]).all())
        )
        # Equal ranks do the same at the same time: one of them stands for all.
        self.ranks = np.arange(1 if self.has_equal_ranks else size)
        self.slowdowns = np.array([cluster.find_slowdown(rank) for rank in self.ranks.tolist()])
        self.add_seconds = PartValues(cluster.gamma * self.part_bytes, size, len(self.ranks))
        self.port_seconds: dict[Link, PartValues] = {}
        # When a rank can continue, and when its out port is free. The in port of its receiver is
        # free at the same time: either it gets messages of this rank only, or all ranks are equal.
        self.now, self.ports_free = (np.zeros(len(self.ranks)) for _ in range(2))
        self.shift: int | None = None  # the distance at which all ranks send
        # For each shift, the slots and arrival times of messages, by their sender.
        self.in_flight: dict[int, deque[tuple[Any, Any]]] = {}
        self.links: dict[int, ShiftedLinks] = {}
        self.messages = 0

    def play_program(self, report_progress: ReportProgress | None = None) -> Timeline:
        """Simulate the program.

        Args:
            report_progress: A function that gets the number of played messages and of all messages
                now and then.

        Raises:
            NotUniform: If messages of different ranks meet.
            TooManyMessages: If the simulation would take too long.
        """
        total = 0
        for number, action in enumerate(self.program):
            if number == WARMUP_ACTIONS:
                total = self.count_all_messages()
            elif report_progress and total and number % 100 == 0:
                report_progress(self.messages, total)
            if isinstance(action, Send) and not action.wait:
                self.play_send(action)
            elif isinstance(action, Recv):
                self.play_recv(action)
            else:
                raise NotUniform
        ends = np.broadcast_to(self.now, self.size) if self.has_equal_ranks else self.now
        return Timeline(float(ends.max()), tuple(ends.tolist()), self.messages)

    def count_all_messages(self) -> int:
        """Return the messages of all ranks, each of which sends the same number.

        Raises:
            TooManyMessages: If the simulation would take too long.
        """

        def count_per_rank(size: int) -> int | None:
            return count_rank_sends(self.schedule, 0, size, MAX_ARRAY_MESSAGES // size)

        count = count_per_rank(self.size)
        if count is None:
            raise TooManyMessages(
                self.schedule, self.size, MAX_ARRAY_MESSAGES, "timed", count_per_rank
            )
        return self.size * count

    def play_send(self, action: Send) -> None:
        """Simulate a Send of all ranks."""
        shift = find_distance(action.to)
        if shift != self.shift:
            if self.shift is not None and not self.has_equal_ranks:
                # Two ranks may need the same receiver, in any order.
                raise NotUniform
            self.shift = shift
        link = self.find_links(shift)
        self.now = delay_times(self.now, link.send_overhead)
        seconds = link.find_message_seconds(action.slot)
        if self.has_slow_ranks:
            seconds = seconds * link.slowdown
        self.ports_free = np.maximum(self.now, self.ports_free) + seconds
        self.in_flight.setdefault(shift, deque()).append(
            (action.slot, delay_times(self.ports_free, link.latency))
        )
        self.messages += self.size

    def play_recv(self, action: Recv) -> None:
        """Simulate a Recv of all ranks."""
        shift = -find_distance(action.frm) % self.size
        slot, arrival = self.in_flight[shift].popleft()
        if isinstance(slot, RankNumber):
            slot = slot.look_from(-shift)
        if slot != action.slot:
            raise NotUniform  # an error, which the other clock names
        self.now = delay_times(
            np.maximum(self.now, np.roll(arrival, shift)), self.find_links(shift).receive_overhead
        )
        # The sends of the slot are over: the received sum depends on them.
        if action.add and self.cluster.gamma:
            seconds = self.add_seconds.look_up(action.slot)
            self.now = self.now + (seconds * self.slowdowns if self.has_slow_ranks else seconds)

    def find_links(self, shift: int) -> ShiftedLinks:
        """Return the links from every rank to the one at a distance.

        Args:
            shift: The distance.

        Raises:
            NotUniform: If ranks of one host share its link.
        """
        if shift not in self.links:
            receivers: Any = (self.ranks + shift) % self.size
            hosts: Any = self.ranks // self.cluster.group
            receiver_hosts: Any = receivers // self.cluster.group
            crossing = hosts != receiver_hosts
            if self.cluster.group > 1 and (
                np.bincount(hosts[crossing]).max(initial=0) > 1
                or np.bincount(receiver_hosts[crossing]).max(initial=0) > 1
            ):
                # Ranks of one host take turns on its link.
                raise NotUniform
            # A link depends on whether it leaves the host: that of one rank stands for its kind.
            _, examples, kinds = np.unique(crossing, return_index=True, return_inverse=True)
            links = [
                self.cluster.find_link(rank, int(receivers[rank])) for rank in examples.tolist()
            ]
            overhead = np.array([link.overhead for link in links])[kinds]
            self.links[shift] = ShiftedLinks(
                kinds,
                [self.list_port_seconds(link) for link in links],
                drop_zeros(np.array([link.latency for link in links])[kinds]),
                drop_zeros(overhead * self.slowdowns),
                drop_zeros(np.roll(overhead, shift) * self.slowdowns),
                np.maximum(self.slowdowns, np.roll(self.slowdowns, -shift)),
            )
        return self.links[shift]

    def list_port_seconds(self, link: Link) -> PartValues:
        """Return the seconds for which a message of each part occupies its ports on a link."""
        if link not in self.port_seconds:
            sizes, of_part = np.unique(self.part_bytes, return_inverse=True)
            seconds = np.array([link.compute_port_seconds(size) for size in sizes.tolist()])
            self.port_seconds[link] = PartValues(seconds[of_part], self.size, len(self.ranks))
        return self.port_seconds[link]


class PartValues:
    """A value of each part of the vector, which is looked up for all ranks at once.

    Args:
        values: The values, as an array over parts.
        size: The number of ranks.
        simulated_ranks: For how many of them, from rank 0, values are looked up.
    """

    def __init__(self, values: Any, size: int, simulated_ranks: int) -> None:
        self.values = values
        self.size = size
        self.simulated_ranks = simulated_ranks
        # For each (scale, offset), the values of the parts of all ranks, twice in sequence.
        self.columns: dict[tuple[int, int], Any] = {}

    def look_up(self, slot: Any) -> Any:
        """Return the values of a slot: an array over ranks, or one number for all of them.

        Args:
            slot: The number of a part, the same on all ranks or a RankNumber.

        Raises:
            NotUniform: If the slot is anything else, or no part of the vector.
        """
        if not isinstance(slot, RankNumber):
            if type(slot) is not int or not 0 <= slot < len(self.values):
                raise NotUniform
            return self.values[slot]
        key = slot.scale, slot.offset
        if key not in self.columns:
            column = self.values[slot.offset :: slot.scale][: self.size]
            if slot.offset < 0 or len(column) < self.size:
                raise NotUniform
            # The ranks around the ring, from any rank, are then a slice, which is not copied.
            self.columns[key] = np.concatenate((column, column))
        return self.columns[key][slot.shift : slot.shift + self.simulated_ranks]


@dataclass(frozen=True)
class ShiftedLinks:
    """The links from every rank to another, as arrays over ranks.

    Attributes:
        kinds: The kind of link to the receiver of each rank, 0 or 1.

        port_seconds: For each kind, the seconds for which a message of each part occupies ports.

        latency: The latency of the link, in seconds, or None if it is zero.

        send_overhead: The overhead of each rank to post a message, in seconds, or None if it is
            zero.

        receive_overhead: The overhead of each rank to receive a message, in seconds, or None if it
            is zero.

        slowdown: How many times slower the slower of each rank and its receiver is.
    """

    kinds: Any
    port_seconds: list[PartValues]
    latency: Any
    send_overhead: Any
    receive_overhead: Any
    slowdown: Any

    def find_message_seconds(self, slot: Any) -> Any:
        """Return the seconds for which the message of each rank occupies its ports.

        Args:
            slot: The slot that each rank sends.
        """
        seconds = [values.look_up(slot) for values in self.port_seconds]
        return seconds[0] if len(seconds) == 1 else np.where(self.kinds, seconds[1], seconds[0])


def drop_zeros(seconds: Any) -> Any:
    """Return seconds as they are, or None if all are zero, which need no addition."""
    return seconds if seconds.any() else None


def delay_times(times: Any, seconds: Any) -> Any:
    """Return times after some seconds; None stands for zero seconds."""
    return times if seconds is None else times + seconds
