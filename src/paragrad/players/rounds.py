"""The clock for thousands of ranks: where every rank does the same, all of them in one numpy array.

A schedule that makes no choice by rank, as the ring, can be asked for the program of *all* ranks at once: `rank` is an array,
and so are the peers and slots of its actions. It is the same program, read for all; the result is the clock's
(tests/pure/test_clock.py compares them up to 64 ranks). Everything else goes to the clock.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paragrad.planner.machine import Cluster
from paragrad.players.clock import Timeline, timed
from paragrad.schedules.actions import Collective, Recv, Send, evenly


def simulated(schedule: Collective, size: int, length: int, cluster: Cluster, *, element: int = 4) -> Timeline:
    """`timed`, by whichever way is quicker."""
    return timed_rounds(schedule, size, length, cluster, element) or timed(schedule, size, length, cluster, element=element)


def timed_rounds(schedule: Collective, size: int, length: int, cluster: Cluster, element: int = 4) -> Timeline | None:
    """All ranks at once; None where the schedule makes a choice by rank, or where ranks meet on a link or a core."""
    if cluster.sharing > 1 or size < 2 or cluster.cores > 1:
        return None
    try:
        return Rounds(schedule, size, length, cluster, element).run()
    except (TypeError, ValueError, NotUniform):         # numpy's answer to a choice by rank, or to a range of parts
        return None


class NotUniform(Exception):
    """Messages of different ranks meet."""


class Rounds:
    """The state of all ranks, an array each."""

    def __init__(self, schedule: Collective, size: int, length: int, cluster: Cluster, element: int) -> None:
        self.ranks = np.arange(size)
        self.cluster, self.size = cluster, size
        self.program = schedule.program(self.ranks, size)                               # type: ignore[arg-type]
        self.bytes = np.array([len(part) * element for part in evenly(length, schedule.parts(size))])
        self.slow = np.array([cluster.factor(rank) for rank in range(size)])
        self.alike = bool((self.slow == 1).all()) and cluster.group == 1 and len(set(self.bytes.tolist())) == 1
        self.now, self.out, self.into, self.core = (np.zeros(size) for _ in range(4))
        self.shift: int | None = None                   # to whom everybody sends
        self.sent: dict[int, deque[Any]] = {}           # by shift: when messages are there, by their receiver
        self.links: dict[int, Any] = {}
        self.messages = 0

    def run(self) -> Timeline:
        for action in self.program:
            if isinstance(action, Send) and not action.wait:
                self.send(action)
            elif isinstance(action, Recv):
                self.recv(action)
            else:
                raise NotUniform
        return Timeline(float(self.now.max()), tuple(self.now.tolist()), self.messages)

    def send(self, action: Send) -> None:
        shift = self.shift_of(action.to)
        if shift != self.shift:
            if self.shift is not None and not self.alike:
                raise NotUniform                        # two ranks may want one receiver, in any order
            self.shift = shift
        alpha, beta, latency, overhead, slow = self.link(shift)
        size = self.bytes[action.slot]                                                  # type: ignore[index]
        posted = self.now = self.busy(self.ranks, self.now, overhead)
        to = (self.ranks + shift) % self.size
        start = np.maximum(np.maximum(posted, self.out), self.into[to])
        self.out = start + (alpha + beta * size) * slow
        self.into[to] = self.out
        arrival = np.empty(self.size)
        arrival[to] = self.out + latency
        self.sent.setdefault(shift, deque()).append((arrival, size[(self.ranks - shift) % self.size]))
        self.messages += self.size

    def recv(self, action: Recv) -> None:
        shift = -self.shift_of(action.frm) % self.size
        arrival, size = self.sent[shift].popleft()
        overhead = self.link(shift)[3][(self.ranks - shift) % self.size]
        self.now = self.busy(self.ranks, np.maximum(self.now, arrival), overhead)
        if action.add:                                  # sends of the slot are over: its sum went on from them
            self.now = self.busy(self.ranks, self.now, self.cluster.gamma * size)

    def busy(self, ranks: Any, since: Any, seconds: Any) -> Any:
        """Hold the core of each of `ranks`; when it is done."""
        if not np.any(seconds):
            return since
        end = np.where(seconds > 0, np.maximum(since, self.core[ranks]) + seconds * self.slow[ranks], since)
        self.core[ranks] = np.where(seconds > 0, end, self.core[ranks])
        return end

    def shift_of(self, peers: Any) -> int:
        """The one distance, around the ring of ranks, at which all peers are."""
        distances = (np.asarray(peers) - self.ranks) % self.size
        if (distances != distances[0]).any():
            raise NotUniform
        return int(distances[0])

    def link(self, shift: int) -> Any:
        """Arrays over senders: alpha, beta, latency, overhead, and how slow the slower of both is."""
        if shift not in self.links:
            to = (self.ranks + shift) % self.size
            hosts, others = self.ranks // self.cluster.group, to // self.cluster.group
            crossing = hosts != others
            if self.cluster.group > 1 and (np.bincount(hosts[crossing]).max(initial=0) > 1
                                           or np.bincount(others[crossing]).max(initial=0) > 1):
                raise NotUniform                        # ranks of one host take turns on its link
            links = [self.cluster.between(int(one), int(other)) for one, other in zip(self.ranks, to, strict=True)]
            names = "alpha", "beta", "latency", "overhead"
            self.links[shift] = [np.array([getattr(link, name) for link in links]) for name in names]
            self.links[shift].append(np.maximum(self.slow, self.slow[to]))
        return self.links[shift]


