"""The clock for thousands of ranks: where every rank does the same, all of them in one numpy
array.

A schedule that makes no choice by rank, as the ring, can be asked for the program of *all*
ranks at once: `rank` is an array, and so are the peers and slots of its actions. It is the same
program, read for all; the result is the clock's (tests/pure/test_clock.py compares them up to
64 ranks). Everything else goes to the clock.
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

MAX_EVENT_MESSAGES = (
    1 << 20
)  # messages up to which the clock plays them one by one: a minute or two
MAX_ARRAY_MESSAGES = 2 * 10**10  # where all ranks send at once
# actions after which it is one distance at which all send, or this clock gave up
WARMUP_ACTIONS = 8

ReportProgress = Callable[[int, int], None]  # (messages that were played, of how many)


def time_collective(
    schedule: Collective,
    size: int,
    length: int,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    report_progress: ReportProgress | None = None,
) -> Timeline:
    """`timed`, by whichever way is quicker; tell: called now and then. Raises TooLong where
    that would take too long.
    """
    if (
        found := time_uniform_collective(
            schedule, size, length, cluster, element_bytes, report_progress
        )
    ) is not None:
        return found
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
    """All ranks at once; None where the schedule makes a choice by rank, or where ranks meet on
    a link or a core.

    Raises TooLong.
    """
    if cluster.sharing > 1 or size < 2 or cluster.cores > 1:
        return None
    try:
        return UniformClock(schedule, size, length, cluster, element_bytes).play_program(
            report_progress
        )
    except TooManyMessages:
        raise
    # NotUniform; or what numpy, and anybody's program, answers to a choice by rank or a range
    # of parts
    except Exception:
        return None


class NotUniform(Exception):
    """Messages of different ranks meet."""


class UniformClock:
    """The state of all ranks, an array each."""

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
        self.shift: int | None = None  # to whom everybody sends
        # by shift: when messages are there, by their receiver
        self.in_flight: dict[int, deque[Any]] = {}
        self.links: dict[int, ShiftedLinks] = {}
        self.peers: dict[int, Any] = {}
        self.messages = 0

    def play_program(self, report_progress: ReportProgress | None = None) -> Timeline:
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
        """The messages of all ranks, who send as many each. Raises TooLong."""

        def by_each(size: int) -> int | None:
            return count_rank_sends(self.schedule, 0, size, MAX_ARRAY_MESSAGES // size)

        found = by_each(self.size)
        if found is None:
            raise TooManyMessages(self.schedule, self.size, MAX_ARRAY_MESSAGES, "timed", by_each)
        return self.size * found

    def play_send(self, action: Send) -> None:
        shift = self.find_shift(action.to)
        if shift != self.shift:
            if self.shift is not None and not self.has_equal_ranks:
                # two ranks may want one receiver, in any order
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
        )  # type: ignore[index]
        self.messages += self.size

    def play_recv(self, action: Recv) -> None:
        shift = -self.find_shift(action.frm) % self.size
        arrival, size = self.in_flight[shift].popleft()
        self.now = self.occupy_cores(
            np.maximum(self.now, arrival), self.find_links(shift).receive_overhead
        )
        # sends of the slot are over: its sum went on from them
        if action.add:
            self.now = self.occupy_cores(self.now, self.cluster.gamma * size)

    def occupy_cores(self, since: Any, seconds: Any) -> Any:
        """Hold the core of each rank; when it is done. The core is a rank's own: it is free
        when the rank is.
        """
        return since + seconds * self.slowdowns if np.any(seconds) else since

    def find_shift(self, peers: Any) -> int:
        """The one distance, around the ring of ranks, at which all peers are."""
        shift = int(peers[0]) % self.size
        if not np.array_equal(peers, self.shift_ranks(shift)):
            raise NotUniform
        return shift

    def shift_ranks(self, shift: int) -> Any:
        """The rank at a distance from each."""
        if shift not in self.peers:
            self.peers[shift] = (self.ranks + shift) % self.size
        return self.peers[shift]

    def find_links(self, shift: int) -> ShiftedLinks:
        """The links from every rank to the one at a distance."""
        if shift not in self.links:
            to = self.shift_ranks(shift)
            hosts: Any = self.ranks // self.cluster.group
            others = to // self.cluster.group
            crossing = hosts != others
            if self.cluster.group > 1 and (
                np.bincount(hosts[crossing]).max(initial=0) > 1
                or np.bincount(others[crossing]).max(initial=0) > 1
            ):
                # ranks of one host take turns on its link
                raise NotUniform
            links = [
                self.cluster.find_link(int(one), int(other))
                for one, other in zip(self.ranks, to, strict=True)
            ]
            kinds = list(dict.fromkeys(links))
            sizes, of_part = np.unique(self.part_bytes, return_inverse=True)
            held = np.array(
                [[link.compute_port_seconds(int(size)) for size in sizes] for link in kinds]
            )[:, of_part]
            latency, overhead = (
                np.array([getattr(link, name) for link in links])
                for name in ("latency", "overhead")
            )
            frm = self.shift_ranks(-shift % self.size)
            self.links[shift] = ShiftedLinks(
                to,
                frm,
                held,
                np.array([kinds.index(link) for link in links]),
                latency,
                overhead,
                overhead[frm],
                np.maximum(self.slowdowns, self.slowdowns[to]),
            )
        return self.links[shift]


@dataclass(frozen=True)
class ShiftedLinks:
    """From every rank to another, as arrays over senders."""

    receivers: Any  # receivers
    senders: Any  # senders, by receiver
    port_seconds: Any  # seconds, by kind of link and part
    link_kinds: Any
    latency: Any
    overhead: Any
    receive_overhead: Any  # by receiver
    slowdown: Any  # how slow the slower of both is
