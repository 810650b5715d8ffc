"""Signals: how ranks of one host tell each other that something is there, and how a wait for a
peer ends.

Order of memory. What a rank wrote into a region must be seen by the rank that a signal lets
through. Python has no fence, and flags in plain memory would be right on some processors only.
POSIX (Base Definitions, 4.12 Memory Synchronization) names sem_post, sem_wait, sem_trywait and
sem_timedwait among the functions that synchronise memory, everywhere; so every hand-over here
is a process-shared semaphore in the region: written before the post, read after the wait.

Ends of a wait. A post; the time limit; the death of the rank waited for (its pidfd becomes
readable when the process ends, also as a zombie, and never means another process); or that some
rank gave the group up, which it tells all others through the region. A dead rank's last posts
count first: who did its part and left is no failure. Whoever sees a death gives the group up,
so that ranks which wait for somebody else end too. A blocked wait looks up every `SLICE`
seconds, and says so in the regions of all groups that its process is in: who has not for `AWAY`
seconds is not waiting, so it is the one that is waited for, if only by way of others.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

from paragrad.shm.region import CACHE_LINE_BYTES

WAIT_SLICE_SECONDS = 0.1  # seconds between two looks at the peers' lives
# seconds after its last look, from which on a rank counts as not waiting
AWAY_SECONDS = 1.0
# tries before a wait blocks, where every rank has a core to itself (about 0.2 ms)
SPIN_TRIES = 100
# ... where ranks share cores: each try gives the core to the next rank, which costs less than a
# sleep
CROWDED_SPIN_TRIES = 20
REASON_BYTES = 1024  # bytes for the words of who gave the group up

# gives up the interpreter lock while it is in a call
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None)  # keeps it: for calls that never wait
_sem_post = _libc_with_gil.sem_post
_sem_trywait = _libc_with_gil.sem_trywait
_sem_timedwait = _libc.sem_timedwait
for _function in (_sem_post, _sem_trywait):
    _function.argtypes = [ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
if (_sem_clockwait := getattr(_libc, "sem_clockwait", None)) is not None:  # glibc 2.30
    _sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]


class GroupError(RuntimeError):
    """A group of ranks cannot go on: one died, gave up, or does something else than the
    others.
    """


class Semaphores:
    """`count` process-shared semaphores from an address on, each on a cache line of its own."""

    def __init__(self, start: int, count: int) -> None:
        self.addresses = [
            ctypes.c_void_p(start + CACHE_LINE_BYTES * number) for number in range(count)
        ]

    def initialize(self, values: Callable[[int], int]) -> None:
        """By the region's maker, before others know of it."""
        for number, place in enumerate(self.addresses):
            if _libc.sem_init(place, 1, values(number)) != 0:
                raise OSError(ctypes.get_errno(), "sem_init")

    def post(self, number: int) -> None:
        _sem_post(self.addresses[number])

    def try_take(self, number: int) -> bool:
        """Take one post if there is one."""
        return not _sem_trywait(self.addresses[number])

    def wait(self, number: int, spins: int, seconds: float = WAIT_SLICE_SECONDS) -> bool:
        """Take one post; False if none came within some seconds (or a signal handler ran)."""
        place = self.addresses[number]
        for _ in range(spins):
            if _sem_trywait(place) == 0:
                return True
            # who is waited for may stand in line for this very core
            os.sched_yield()
        if _sem_clockwait is not None:
            return (
                _sem_clockwait(
                    place, time.CLOCK_MONOTONIC, _make_timespec(time.monotonic() + seconds)
                )
                == 0
            )
        # which reads the clock of the wall, that is set
        return _sem_timedwait(place, _make_timespec(time.time() + seconds)) == 0


def _make_timespec(moment: float) -> _Timespec:
    whole = int(moment)
    return _Timespec(whole, int((moment - whole) * 1e9))


class Peers:
    """The processes behind the ranks of a group: are they alive, and has one given the group
    up?

    everywhere: those of all groups that this process is in: in whichever it waits, it waits.
    """

    all_instances: ClassVar[list[weakref.ref[Peers]]] = []

    def __init__(
        self,
        rank: int,
        spins: int,
        flags: Semaphores,
        reason: memoryview,
        last_looks: memoryview[float],
    ) -> None:
        """flags: nobody gave up, somebody did;  words: why;  looks: when each rank, in a
        blocked wait, looked up last.
        """
        self.rank = rank
        self.spins = spins
        self.flags = flags
        self.reason = reason
        self.last_looks = last_looks
        self.pidfds: dict[int, int] = {}  # rank -> pidfd
        self.pids: dict[int, int] = {}
        self.abandon_reason: str | None = None  # why this process gave up
        self.abandoned_flag = flags.addresses[1]
        self.all_instances.append(weakref.ref(self, self.all_instances.remove))

    def register_processes(self, pids: Sequence[int]) -> None:
        """The processes of all ranks. Raises GroupError where one is gone already."""
        for rank, pid in enumerate(pids):
            if pid and rank != self.rank and rank not in self.pidfds:
                try:
                    self.pidfds[rank], self.pids[rank] = os.pidfd_open(pid), pid
                except ProcessLookupError:
                    raise self.abandon_group(f"rank {rank} (process {pid}) has ended") from None

    def wait_for_post(
        self,
        semaphores: Semaphores,
        number: int,
        source: int,
        deadline: float,
        describe_wait: Callable[[], str],
        is_background: bool = False,
    ) -> None:
        """Take a post of rank `frm`. late(): what this rank was doing, for the message;
        patient: do not spin.

        Raises GroupError.
        """
        if semaphores.wait(number, 0 if is_background else self.spins):
            return
        while not self.wait_one_slice(semaphores, number, source, deadline, describe_wait):
            pass

    def wait_one_slice(
        self,
        semaphores: Semaphores,
        number: int,
        source: int | None,
        deadline: float,
        describe_wait: Callable[[], str],
    ) -> bool:
        """One slice of a blocked wait; True if a post came. frm: whose, or None where any
        rank's would do.
        """
        now = time.monotonic()  # one clock for all processes of the host
        for found in tuple(self.all_instances):
            if (peers := found()) is not None:
                peers.last_looks[peers.rank] = now
        dead = [] if source is not None and self.is_alive(source) else self.list_dead_ranks()
        if semaphores.wait(number, 0):
            return True
        if source is None and len(dead) < len(self.pidfds):
            dead = []
        # it was dead before the last look for its post
        if dead:
            rank = source if source is not None else dead[0]
            raise self.abandon_for_death(rank, describe_wait)
        self.check_abandoned(describe_wait)
        if time.monotonic() > deadline:
            raise self.abandon_group(
                f"rank {self.rank} gave up waiting for {self.describe_away_ranks(source)} in "
                f"{describe_wait()}"
            )
        return False

    def describe_away_ranks(self, source: int | None) -> str:
        """Who is waited for, in words: those that do not wait here themselves, otherwise whom
        this rank waits for.
        """
        since = time.monotonic() - AWAY_SECONDS
        away = [
            f"rank {rank}"
            for rank, looked in enumerate(self.last_looks)
            if looked < since and rank != self.rank
        ]
        return ", ".join(away) or ("any rank" if source is None else f"rank {source}")

    def is_alive(self, rank: int) -> bool:
        return rank not in self.pidfds or not _find_ended([self.pidfds[rank]])

    def list_dead_ranks(self) -> list[int]:
        ended = _find_ended(list(self.pidfds.values()))
        return [rank for rank, life in self.pidfds.items() if life in ended]

    def check_abandoned(self, describe_wait: Callable[[], str]) -> None:
        """Raise GroupError if somebody gave the group up."""
        if self.abandon_reason is None and not _sem_trywait(self.abandoned_flag):
            self.flags.post(1)  # for the others
            text = bytes(self.reason).rstrip(b"\0").decode(errors="replace")
            self.abandon_reason = f"{text}; rank {self.rank} was in {describe_wait()}"
        if self.abandon_reason is not None:
            raise GroupError(self.abandon_reason)

    def abandon_for_death(self, rank: int, describe_wait: Callable[[], str]) -> GroupError:
        return self.abandon_group(
            f"rank {rank} (process {self.pids[rank]}) ended while rank {self.rank} waited for it "
            f"in {describe_wait()}"
        )

    def abandon_group(self, reason: str) -> GroupError:
        """Tell all ranks that this group cannot go on; the first reason stays."""
        if self.flags.try_take(0):
            text = reason.encode()[:REASON_BYTES]
            self.reason[: len(text)] = text
            self.flags.post(1)
        self.abandon_reason = self.abandon_reason or reason
        return GroupError(self.abandon_reason)

    def close_pidfds(self) -> None:
        for life in self.pidfds.values():
            os.close(life)
        self.pidfds = {}


class DisseminationBarrier:
    """A barrier of the ranks of a group: what each wrote before it, all may read after it.

    Dissemination (Hensgen, Finkel, Manber 1988): in round k a rank tells the one 2^k above it
    and waits for the one 2^k below. signals: semaphore `from * size + to`, one per ordered
    pair, so that posts of two barriers never mix.
    """

    def __init__(self, rank: int, size: int, semaphores: Semaphores, peers: Peers) -> None:
        self.semaphores = semaphores
        self.peers = peers
        self.size = size
        self.rank = rank
        hops = [1 << bit for bit in range((size - 1).bit_length())]
        self.rounds = [
            (
                semaphores.addresses[rank * size + (rank + hop) % size],
                semaphores.addresses[below * size + rank],
                below,
            )
            for hop in hops
            for below in [(rank - hop) % size]
        ]

    def wait(
        self, deadline: float, describe_wait: Callable[[], str], is_background: bool = False
    ) -> None:
        """Until every rank has come here. Raises GroupError; as `Peers.wait`."""
        for above, below, frm in self.rounds:
            _sem_post(above)
            if _sem_trywait(below):  # not yet
                self.peers.wait_for_post(
                    self.semaphores,
                    frm * self.size + self.rank,
                    frm,
                    deadline,
                    describe_wait,
                    is_background,
                )


def _find_ended(pidfds: list[int]) -> list[int]:
    """Those of some pidfds whose process has ended."""
    poll = select.poll()
    for life in pidfds:
        poll.register(life, select.POLLIN)
    return [life for life, _ in poll.poll(0)]
