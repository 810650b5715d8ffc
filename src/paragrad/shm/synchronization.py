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

from paragrad.shm.region import LINE

SLICE = 0.1  # seconds between two looks at the peers' lives
# seconds after its last look, from which on a rank counts as not waiting
AWAY = 1.0
# tries before a wait blocks, where every rank has a core to itself (about 0.2 ms)
SPIN = 100
# ... where ranks share cores: each try gives the core to the next rank, which costs less than a
# sleep
CROWDED_SPIN = 20
WORDS = 1024  # bytes for the words of who gave the group up

# gives up the interpreter lock while it is in a call
_library = ctypes.CDLL(None, use_errno=True)
_brief = ctypes.PyDLL(None)  # keeps it: for calls that never wait
_post = _brief.sem_post
_try = _brief.sem_trywait
_timed_wait = _library.sem_timedwait
for _function in (_post, _try):
    _function.argtypes = [ctypes.c_void_p]


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_timed_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]
if (_clock_wait := getattr(_library, "sem_clockwait", None)) is not None:  # glibc 2.30
    _clock_wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time)]


class GroupError(RuntimeError):
    """A group of ranks cannot go on: one died, gave up, or does something else than the
    others.
    """


class Semaphores:
    """`count` process-shared semaphores from an address on, each on a cache line of its own."""

    def __init__(self, start: int, count: int) -> None:
        self.places = [ctypes.c_void_p(start + LINE * number) for number in range(count)]

    def initialize(self, values: Callable[[int], int]) -> None:
        """By the region's maker, before others know of it."""
        for number, place in enumerate(self.places):
            if _library.sem_init(place, 1, values(number)) != 0:
                raise OSError(ctypes.get_errno(), "sem_init")

    def post(self, number: int) -> None:
        _post(self.places[number])

    def taken(self, number: int) -> bool:
        """Take one post if there is one."""
        return not _try(self.places[number])

    def wait(self, number: int, spins: int, seconds: float = SLICE) -> bool:
        """Take one post; False if none came within some seconds (or a signal handler ran)."""
        place = self.places[number]
        for _ in range(spins):
            if _try(place) == 0:
                return True
            # who is waited for may stand in line for this very core
            os.sched_yield()
        if _clock_wait is not None:
            return _clock_wait(place, time.CLOCK_MONOTONIC, _until(time.monotonic() + seconds)) == 0
        # which reads the clock of the wall, that is set
        return _timed_wait(place, _until(time.time() + seconds)) == 0


def _until(moment: float) -> _Time:
    whole = int(moment)
    return _Time(whole, int((moment - whole) * 1e9))


class Peers:
    """The processes behind the ranks of a group: are they alive, and has one given the group
    up?

    everywhere: those of all groups that this process is in: in whichever it waits, it waits.
    """

    everywhere: ClassVar[list[weakref.ref[Peers]]] = []

    def __init__(
        self, rank: int, spins: int, flags: Semaphores, words: memoryview, looks: memoryview[float]
    ) -> None:
        """flags: nobody gave up, somebody did;  words: why;  looks: when each rank, in a
        blocked wait, looked up last.
        """
        self.rank = rank
        self.spins = spins
        self.flags = flags
        self.words = words
        self.looks = looks
        self.lives: dict[int, int] = {}  # rank -> pidfd
        self.pids: dict[int, int] = {}
        self.broken: str | None = None  # why this process gave up
        self.flag = flags.places[1]
        self.everywhere.append(weakref.ref(self, self.everywhere.remove))

    def know(self, pids: Sequence[int]) -> None:
        """The processes of all ranks. Raises GroupError where one is gone already."""
        for rank, pid in enumerate(pids):
            if pid and rank != self.rank and rank not in self.lives:
                try:
                    self.lives[rank], self.pids[rank] = os.pidfd_open(pid), pid
                except ProcessLookupError:
                    raise self.give_up(f"rank {rank} (process {pid}) has ended") from None

    def wait(
        self,
        semaphores: Semaphores,
        number: int,
        frm: int,
        deadline: float,
        late: Callable[[], str],
        patient: bool = False,
    ) -> None:
        """Take a post of rank `frm`. late(): what this rank was doing, for the message;
        patient: do not spin.

        Raises GroupError.
        """
        if semaphores.wait(number, 0 if patient else self.spins):
            return
        while not self.look(semaphores, number, frm, deadline, late):
            pass

    def look(
        self,
        semaphores: Semaphores,
        number: int,
        frm: int | None,
        deadline: float,
        late: Callable[[], str],
    ) -> bool:
        """One slice of a blocked wait; True if a post came. frm: whose, or None where any
        rank's would do.
        """
        now = time.monotonic()  # one clock for all processes of the host
        for found in tuple(self.everywhere):
            if (peers := found()) is not None:
                peers.looks[peers.rank] = now
        dead = [] if frm is not None and self.alive(frm) else self.dead()
        if semaphores.wait(number, 0):
            return True
        if frm is None and len(dead) < len(self.lives):
            dead = []
        # it was dead before the last look for its post
        if dead:
            rank = frm if frm is not None else dead[0]
            raise self.ended(rank, late)
        self.check(late)
        if time.monotonic() > deadline:
            raise self.give_up(f"rank {self.rank} gave up waiting for {self.away(frm)} in {late()}")
        return False

    def away(self, frm: int | None) -> str:
        """Who is waited for, in words: those that do not wait here themselves, otherwise whom
        this rank waits for.
        """
        since = time.monotonic() - AWAY
        away = [
            f"rank {rank}"
            for rank, looked in enumerate(self.looks)
            if looked < since and rank != self.rank
        ]
        return ", ".join(away) or ("any rank" if frm is None else f"rank {frm}")

    def alive(self, rank: int) -> bool:
        return rank not in self.lives or not _ended([self.lives[rank]])

    def dead(self) -> list[int]:
        ended = _ended(list(self.lives.values()))
        return [rank for rank, life in self.lives.items() if life in ended]

    def check(self, late: Callable[[], str]) -> None:
        """Raise GroupError if somebody gave the group up."""
        if self.broken is None and not _try(self.flag):
            self.flags.post(1)  # for the others
            text = bytes(self.words).rstrip(b"\0").decode(errors="replace")
            self.broken = f"{text}; rank {self.rank} was in {late()}"
        if self.broken is not None:
            raise GroupError(self.broken)

    def ended(self, rank: int, late: Callable[[], str]) -> GroupError:
        return self.give_up(
            f"rank {rank} (process {self.pids[rank]}) ended while rank {self.rank} waited for it "
            f"in {late()}"
        )

    def give_up(self, why: str) -> GroupError:
        """Tell all ranks that this group cannot go on; the first reason stays."""
        if self.flags.taken(0):
            text = why.encode()[:WORDS]
            self.words[: len(text)] = text
            self.flags.post(1)
        self.broken = self.broken or why
        return GroupError(self.broken)

    def forget(self) -> None:
        for life in self.lives.values():
            os.close(life)
        self.lives = {}


class Barrier:
    """A barrier of the ranks of a group: what each wrote before it, all may read after it.

    Dissemination (Hensgen, Finkel, Manber 1988): in round k a rank tells the one 2^k above it
    and waits for the one 2^k below. signals: semaphore `from * size + to`, one per ordered
    pair, so that posts of two barriers never mix.
    """

    def __init__(self, rank: int, size: int, signals: Semaphores, peers: Peers) -> None:
        self.signals = signals
        self.peers = peers
        self.size = size
        self.rank = rank
        hops = [1 << bit for bit in range((size - 1).bit_length())]
        self.rounds = [
            (
                signals.places[rank * size + (rank + hop) % size],
                signals.places[below * size + rank],
                below,
            )
            for hop in hops
            for below in [(rank - hop) % size]
        ]

    def wait(self, deadline: float, late: Callable[[], str], patient: bool = False) -> None:
        """Until every rank has come here. Raises GroupError; as `Peers.wait`."""
        for above, below, frm in self.rounds:
            _post(above)
            if _try(below):  # not yet
                self.peers.wait(
                    self.signals, frm * self.size + self.rank, frm, deadline, late, patient
                )


def _ended(lives: list[int]) -> list[int]:
    """Those of some pidfds whose process has ended."""
    poll = select.poll()
    for life in lives:
        poll.register(life, select.POLLIN)
    return [life for life, _ in poll.poll(0)]
