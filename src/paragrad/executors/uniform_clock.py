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

from paragrad.executors.clock import Timeline, timed
from paragrad.executors.machine import Cluster
from paragrad.executors.message_count import TooLong, refuse_long, sent_by
from paragrad.schedules.actions import Collective, Recv, Send, lengths_of

PLAYED = 1 << 20  # messages up to which the clock plays them one by one: a minute or two
TOGETHER = 2 * 10**10  # where all ranks send at once
# actions after which it is one distance at which all send, or this clock gave up
SETTLED = 8

Tell = Callable[[int, int], None]  # (messages that were played, of how many)


def simulated(
    schedule: Collective,
    size: int,
    length: int,
    cluster: Cluster,
    *,
    element: int = 4,
    tell: Tell | None = None,
) -> Timeline:
    """`timed`, by whichever way is quicker; tell: called now and then. Raises TooLong where
    that would take too long.
    """
    if (found := timed_uniform(schedule, size, length, cluster, element, tell)) is not None:
        return found
    total = refuse_long(schedule, size, PLAYED, "timed")
    return timed(
        schedule,
        size,
        length,
        cluster,
        element=element,
        tell=tell and (lambda done: tell(done, total)),
    )


def timed_uniform(
    schedule: Collective,
    size: int,
    length: int,
    cluster: Cluster,
    element: int = 4,
    tell: Tell | None = None,
) -> Timeline | None:
    """All ranks at once; None where the schedule makes a choice by rank, or where ranks meet on
    a link or a core.

    Raises TooLong.
    """
    if cluster.sharing > 1 or size < 2 or cluster.cores > 1:
        return None
    try:
        return UniformClock(schedule, size, length, cluster, element).run(tell)
    except TooLong:
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
        self, schedule: Collective, size: int, length: int, cluster: Cluster, element: int
    ) -> None:
        self.ranks = np.arange(size)
        self.cluster = cluster
        self.size = size
        self.schedule = schedule
        self.program = schedule.program(self.ranks, size)  # type: ignore[arg-type]
        self.bytes = element * np.array(list(lengths_of(schedule, size, length).values()))
        self.slow = np.array([cluster.factor(rank) for rank in range(size)])
        self.alike = (
            bool((self.slow == 1).all())
            and cluster.group == 1
            and len(set(self.bytes.tolist())) == 1
        )
        self.now, self.out, self.into = (np.zeros(size) for _ in range(3))
        self.shift: int | None = None  # to whom everybody sends
        # by shift: when messages are there, by their receiver
        self.sent: dict[int, deque[Any]] = {}
        self.links: dict[int, Links] = {}
        self.peers: dict[int, Any] = {}
        self.messages = 0

    def run(self, tell: Tell | None = None) -> Timeline:
        total = 0
        for number, action in enumerate(self.program):
            if number == SETTLED:
                total = self.total()
            elif tell and total and number % 100 == 0:
                tell(self.messages, total)
            if isinstance(action, Send) and not action.wait:
                self.send(action)
            elif isinstance(action, Recv):
                self.recv(action)
            else:
                raise NotUniform
        return Timeline(float(self.now.max()), tuple(self.now.tolist()), self.messages)

    def total(self) -> int:
        """The messages of all ranks, who send as many each. Raises TooLong."""

        def by_each(size: int) -> int | None:
            return sent_by(self.schedule, 0, size, TOGETHER // size)

        found = by_each(self.size)
        if found is None:
            raise TooLong(self.schedule, self.size, TOGETHER, "timed", by_each)
        return self.size * found

    def send(self, action: Send) -> None:
        shift = self.shift_of(action.to)
        if shift != self.shift:
            if self.shift is not None and not self.alike:
                # two ranks may want one receiver, in any order
                raise NotUniform
            self.shift = shift
        link = self.link(shift)
        posted = self.busy(self.now, link.overhead)
        self.now = posted
        start = np.maximum(np.maximum(posted, self.out), self.into[link.to])
        self.out = start + link.held[link.kind, action.slot] * link.slow
        self.into = self.out[link.frm]
        self.sent.setdefault(shift, deque()).append(
            ((self.out + link.latency)[link.frm], self.bytes[action.slot][link.frm])
        )  # type: ignore[index]
        self.messages += self.size

    def recv(self, action: Recv) -> None:
        shift = -self.shift_of(action.frm) % self.size
        arrival, size = self.sent[shift].popleft()
        self.now = self.busy(np.maximum(self.now, arrival), self.link(shift).overhead_in)
        # sends of the slot are over: its sum went on from them
        if action.add:
            self.now = self.busy(self.now, self.cluster.gamma * size)

    def busy(self, since: Any, seconds: Any) -> Any:
        """Hold the core of each rank; when it is done. The core is a rank's own: it is free
        when the rank is.
        """
        return since + seconds * self.slow if np.any(seconds) else since

    def shift_of(self, peers: Any) -> int:
        """The one distance, around the ring of ranks, at which all peers are."""
        shift = int(peers[0]) % self.size
        if not np.array_equal(peers, self.to(shift)):
            raise NotUniform
        return shift

    def to(self, shift: int) -> Any:
        """The rank at a distance from each."""
        if shift not in self.peers:
            self.peers[shift] = (self.ranks + shift) % self.size
        return self.peers[shift]

    def link(self, shift: int) -> Links:
        """The links from every rank to the one at a distance."""
        if shift not in self.links:
            to = self.to(shift)
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
                self.cluster.between(int(one), int(other))
                for one, other in zip(self.ranks, to, strict=True)
            ]
            kinds = list(dict.fromkeys(links))
            sizes, of_part = np.unique(self.bytes, return_inverse=True)
            held = np.array([[link.held(int(size)) for size in sizes] for link in kinds])[
                :, of_part
            ]
            latency, overhead = (
                np.array([getattr(link, name) for link in links])
                for name in ("latency", "overhead")
            )
            frm = self.to(-shift % self.size)
            self.links[shift] = Links(
                to,
                frm,
                held,
                np.array([kinds.index(link) for link in links]),
                latency,
                overhead,
                overhead[frm],
                np.maximum(self.slow, self.slow[to]),
            )
        return self.links[shift]


@dataclass(frozen=True)
class Links:
    """From every rank to another, as arrays over senders."""

    to: Any  # receivers
    frm: Any  # senders, by receiver
    held: Any  # seconds, by kind of link and part
    kind: Any
    latency: Any
    overhead: Any
    overhead_in: Any  # by receiver
    slow: Any  # how slow the slower of both is
