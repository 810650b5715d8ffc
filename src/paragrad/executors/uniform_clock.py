"""The clock for thousands of ranks: if every rank does the same, one numpy array holds them all.

A schedule that makes no choice by rank, such as the ring, can generate the program of *all* ranks
at once. Then `rank` is an array, and so are the peers and slots of its actions. It is the same
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
from paragrad.executors.machine import Cluster
from paragrad.executors.message_count import TooManyMessages, count_rank_sends, refuse_many_messages
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
    # NotUniform; or any error of numpy, or of a user's program, at a choice by rank or at a range
    # of parts.
    except Exception:
        return None


class NotUniform(Exception):
    """Messages of different ranks meet."""


class UniformClock:
    """The state of all ranks, an array each.

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
        self.ranks = np.arange(size)
        self.cluster = cluster
        self.size = size
        self.schedule = schedule
        self.program = schedule.program(self.ranks, size)  # type: ignore[arg-type]
        self.part_bytes = element_bytes * np.array(
            list(compute_slot_lengths(schedule, size, length).values())
        )
        self.slowdowns = np.array([cluster.find_slowdown(rank) for rank in range(size)])
        self.has_equal_ranks = (
            bool((self.slowdowns == 1).all())
            and cluster.group == 1
            and len(set(self.part_bytes.tolist())) == 1
        )
        self.now, self.out_free, self.in_free = (np.zeros(size) for _ in range(3))
        self.shift: int | None = None  # the distance at which all ranks send
        # For each shift, the arrival times and bytes of messages, by their receiver.
        self.in_flight: dict[int, deque[Any]] = {}
        self.links: dict[int, ShiftedLinks] = {}
        self.peers: dict[int, Any] = {}
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
        return Timeline(float(self.now.max()), tuple(self.now.tolist()), self.messages)

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
        shift = self.find_shift(action.to)
        if shift != self.shift:
            if self.shift is not None and not self.has_equal_ranks:
                # Two ranks may need the same receiver, in any order.
                raise NotUniform
            self.shift = shift
        link = self.find_links(shift)
        posted = self.occupy_cores(self.now, link.overhead)
        self.now = posted
        start = np.maximum(np.maximum(posted, self.out_free), self.in_free[link.receivers])
        self.out_free = start + link.port_seconds[link.link_kinds, action.slot] * link.slowdown
        self.in_free = self.out_free[link.senders]
        self.in_flight.setdefault(shift, deque()).append(
            (
                (self.out_free + link.latency)[link.senders],
                self.part_bytes[action.slot][link.senders],
            )
        )
        self.messages += self.size

    def play_recv(self, action: Recv) -> None:
        """Simulate a Recv of all ranks."""
        shift = -self.find_shift(action.frm) % self.size
        arrival, size = self.in_flight[shift].popleft()
        self.now = self.occupy_cores(
            np.maximum(self.now, arrival), self.find_links(shift).receive_overhead
        )
        # The sends of the slot are over: the received sum depends on them.
        if action.add:
            self.now = self.occupy_cores(self.now, self.cluster.gamma * size)

    def occupy_cores(self, since: Any, seconds: Any) -> Any:
        """Occupy the core of each rank; return when it is free again.

        The core belongs to one rank: it is free when the rank is.

        Args:
            since: When each rank begins, in seconds.
            seconds: How long, on a rank that is not slow.
        """
        return since + seconds * self.slowdowns if np.any(seconds) else since

    def find_shift(self, peers: Any) -> int:
        """Return the one distance, around the ring of ranks, at which all peers are.

        Args:
            peers: The peer of each rank.

        Raises:
            NotUniform: If there are several distances.
        """
        shift = int(peers[0]) % self.size
        if not np.array_equal(peers, self.shift_ranks(shift)):
            raise NotUniform
        return shift

    def shift_ranks(self, shift: int) -> Any:
        """Return the rank at a distance from each rank."""
        if shift not in self.peers:
            self.peers[shift] = (self.ranks + shift) % self.size
        return self.peers[shift]

    def find_links(self, shift: int) -> ShiftedLinks:
        """Return the links from every rank to the one at a distance.

        Args:
            shift: The distance.

        Raises:
            NotUniform: If ranks of one host share its link.
        """
        if shift not in self.links:
            receivers = self.shift_ranks(shift)
            hosts: Any = self.ranks // self.cluster.group
            receiver_hosts = receivers // self.cluster.group
            crossing = hosts != receiver_hosts
            if self.cluster.group > 1 and (
                np.bincount(hosts[crossing]).max(initial=0) > 1
                or np.bincount(receiver_hosts[crossing]).max(initial=0) > 1
            ):
                # Ranks of one host take turns on its link.
                raise NotUniform
            links = [
                self.cluster.find_link(int(source), int(target))
                for source, target in zip(self.ranks, receivers, strict=True)
            ]
            kinds = list(dict.fromkeys(links))
            sizes, of_part = np.unique(self.part_bytes, return_inverse=True)
            port_seconds = np.array(
                [[link.compute_port_seconds(int(size)) for size in sizes] for link in kinds]
            )[:, of_part]
            latency, overhead = (
                np.array([getattr(link, name) for link in links])
                for name in ("latency", "overhead")
            )
            senders = self.shift_ranks(-shift % self.size)
            self.links[shift] = ShiftedLinks(
                receivers,
                senders,
                port_seconds,
                np.array([kinds.index(link) for link in links]),
                latency,
                overhead,
                overhead[senders],
                np.maximum(self.slowdowns, self.slowdowns[receivers]),
            )
        return self.links[shift]


@dataclass(frozen=True)
class ShiftedLinks:
    """The links from every rank to another, as arrays over senders.

    Attributes:
        receivers: The receiver of each sender.

        senders: The sender of each receiver.

        port_seconds: The seconds for which a message occupies its ports, by kind of link and part.

        link_kinds: The kind of link of each sender.

        latency: The latency, in seconds.

        overhead: The overhead of the sender, in seconds.

        receive_overhead: The overhead of the message that each rank receives, in seconds.

        slowdown: How many times slower the slower of both ranks is.
    """

    receivers: Any
    senders: Any
    port_seconds: Any
    link_kinds: Any
    latency: Any
    overhead: Any
    receive_overhead: Any
    slowdown: Any
