"""Synchronization of the ranks of one host: signals, waits, and how a wait ends.

Memory order. What a rank writes into a region must be visible to the rank that a signal releases.
Python has no memory fence, and flags in plain memory would be correct only on some processors.
POSIX (Base Definitions, 4.12 Memory Synchronization) lists sem_post, sem_wait, sem_trywait and
sem_timedwait among the functions that synchronize memory. Every hand-over here is therefore a
process-shared semaphore in the region: written before the post, read after the wait.

Ends of a wait. A wait ends in one of four ways:

* A post comes.
* The time limit passes.
* The awaited rank dies. Its pidfd becomes readable when the process ends, also as a zombie, and
  never refers to another process. The last posts of a dead rank count first: a rank that did its
  part and left is no failure. A rank that sees a death abandons the group, so that waits for other
  ranks end too.
* A rank abandons the group, and tells all others through the region.

A blocked wait looks at the peers every `WAIT_SLICE_SECONDS`. It records this in the regions of all
groups of its process. A rank without such a record for `AWAY_SECONDS` is not waiting. So it is the
rank that the others wait for, directly or through other ranks.
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

WAIT_SLICE_SECONDS = 0.1  # the time between two looks at the peers
AWAY_SECONDS = 1.0  # a rank that has not looked for so long is not waiting
# Tries before a wait blocks, if every rank has a core of its own (about 0.8 ms). To wake a blocked
# rank takes longer than to send it a short message.
SPIN_TRIES = 400
# the same if ranks share cores: each try gives the core to the next rank, which costs less than a
# sleep
CROWDED_SPIN_TRIES = 20
REASON_BYTES = 1024  # the longest reason for which a group is abandoned

# releases the interpreter lock (GIL) during a call
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None)  # keeps the GIL: for calls that never wait
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
    """A group of ranks cannot go on: a rank died, abandoned it, or does something different."""


class Semaphores:
    """Process-shared semaphores, each on a cache line of its own.

    Attributes:
        addresses: The address of each semaphore.
    """

    def __init__(self, start: int, count: int) -> None:
        """Take semaphores at an address.

        Args:
            start: The address of the first semaphore.
            count: The number of semaphores.
        """
        self.addresses = [
            ctypes.c_void_p(start + CACHE_LINE_BYTES * number) for number in range(count)
        ]

    def initialize(self, values: Callable[[int], int]) -> None:
        """Initialize the semaphores. The region's creator does it before others know of the region.

        Args:
            values: Gives the initial value of a semaphore by its number.

        Raises:
            OSError: The system refused it.
        """
        for number, address in enumerate(self.addresses):
            if _libc.sem_init(address, 1, values(number)) != 0:
                raise OSError(ctypes.get_errno(), "sem_init")

    def post(self, number: int) -> None:
        """Post a semaphore.

        Args:
            number: The number of the semaphore.
        """
        _sem_post(self.addresses[number])

    def try_take(self, number: int) -> bool:
        """Take one post if there is one.

        Args:
            number: The number of the semaphore.

        Returns:
            Whether there was a post.
        """
        return not _sem_trywait(self.addresses[number])

    def wait(self, number: int, spins: int, seconds: float = WAIT_SLICE_SECONDS) -> bool:
        """Wait for a post and take it.

        Args:
            number: The number of the semaphore.
            spins: How often to try before the wait blocks.
            seconds: The time limit of the blocked wait.

        Returns:
            False if no post came in time, or a signal handler ran.
        """
        address = self.addresses[number]
        for _ in range(spins):
            if _sem_trywait(address) == 0:
                return True
            # the awaited rank may need this core
            os.sched_yield()
        if _sem_clockwait is not None:
            return (
                _sem_clockwait(
                    address, time.CLOCK_MONOTONIC, _make_timespec(time.monotonic() + seconds)
                )
                == 0
            )
        # sem_timedwait uses the wall clock, which can be set
        return _sem_timedwait(address, _make_timespec(time.time() + seconds)) == 0


def _make_timespec(moment: float) -> _Timespec:
    whole = int(moment)
    return _Timespec(whole, int((moment - whole) * 1e9))


class Peers:
    """The processes behind the ranks of a group: are they alive, and has one abandoned the group?

    Attributes:
        all_instances: The peers of all groups of this process. A wait in one group is recorded in
            all of them.

        rank: The number of this rank.

        spins: How often a wait tries before it blocks.

        flags: Two semaphores: the group is not abandoned; it is abandoned.

        reason: Why the group was abandoned.

        last_looks: When each rank last looked at its peers in a blocked wait, on the monotonic
            clock.

        pidfds: The pidfd of each other rank.

        pids: The process id of each other rank.

        abandon_reason: Why this process abandoned the group; None if it has not.

        abandoned_flag: The address of the second flag.
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
        """Take the sections of the group's region.

        Args:
            rank: The number of this rank.

            spins: How often a wait tries before it blocks.

            flags: Two semaphores: the group is not abandoned; it is abandoned.

            reason: The section for the reason.

            last_looks: The section for the times of the last looks.
        """
        self.rank = rank
        self.spins = spins
        self.flags = flags
        self.reason = reason
        self.last_looks = last_looks
        self.pidfds: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.abandon_reason: str | None = None
        self.abandoned_flag = flags.addresses[1]
        self.all_instances.append(weakref.ref(self, self.all_instances.remove))

    def register_processes(self, pids: Sequence[int]) -> None:
        """Open the processes of all ranks.

        Args:
            pids: The process ids in rank order; 0 for an unknown one.

        Raises:
            GroupError: A process has ended already.
        """
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
        """Wait for a rank's post and take it.

        Args:
            semaphores: The semaphores.

            number: The number of the semaphore.

            source: The rank that posts.

            deadline: The time limit, on the monotonic clock.

            describe_wait: Describes what this rank does, for the message.

            is_background: No caller waits, so do not spin.

        Raises:
            GroupError: The group cannot go on.
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
        """Wait for a post during one slice of a blocked wait.

        Args:
            semaphores: The semaphores.

            number: The number of the semaphore.

            source: The rank that posts; None if any rank may post.

            deadline: The time limit, on the monotonic clock.

            describe_wait: Describes what this rank does, for the message.

        Returns:
            Whether a post came.

        Raises:
            GroupError: The group cannot go on.
        """
        now = time.monotonic()  # one clock for all processes of the host
        for reference in tuple(self.all_instances):
            if (peers := reference()) is not None:
                peers.last_looks[peers.rank] = now
        dead = [] if source is not None and self.is_alive(source) else self.list_dead_ranks()
        if semaphores.wait(number, 0):
            return True
        if source is None and len(dead) < len(self.pidfds):
            dead = []
        # the rank died before the last look for its post, so no post comes any more
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
        """Name the ranks that the others wait for: those that do not wait themselves.

        Args:
            source: The rank that this rank waits for; it is named if all ranks wait. None for any
                rank.
        """
        latest = time.monotonic() - AWAY_SECONDS
        away = [
            f"rank {rank}"
            for rank, last_look in enumerate(self.last_looks)
            if last_look < latest and rank != self.rank
        ]
        return ", ".join(away) or ("any rank" if source is None else f"rank {source}")

    def is_alive(self, rank: int) -> bool:
        """Tell whether the process of a rank is alive.

        Args:
            rank: The rank.
        """
        return rank not in self.pidfds or not _find_ended([self.pidfds[rank]])

    def list_dead_ranks(self) -> list[int]:
        """List the ranks with an ended process."""
        ended = _find_ended(list(self.pidfds.values()))
        return [rank for rank, pidfd in self.pidfds.items() if pidfd in ended]

    def check_abandoned(self, describe_wait: Callable[[], str]) -> None:
        """Check that no rank has abandoned the group.

        Args:
            describe_wait: Describes what this rank does, for the message.

        Raises:
            GroupError: A rank has abandoned the group.
        """
        if self.abandon_reason is None and not _sem_trywait(self.abandoned_flag):
            self.flags.post(1)  # for the other ranks
            text = bytes(self.reason).rstrip(b"\0").decode(errors="replace")
            self.abandon_reason = f"{text}; rank {self.rank} was in {describe_wait()}"
        if self.abandon_reason is not None:
            raise GroupError(self.abandon_reason)

    def abandon_for_death(self, rank: int, describe_wait: Callable[[], str]) -> GroupError:
        """Abandon the group because a rank died.

        Args:
            rank: The rank that died.
            describe_wait: Describes what this rank does, for the message.

        Returns:
            The error to raise.
        """
        return self.abandon_group(
            f"rank {rank} (process {self.pids[rank]}) ended while rank {self.rank} waited for it "
            f"in {describe_wait()}"
        )

    def abandon_group(self, reason: str) -> GroupError:
        """Tell all ranks that this group cannot go on. The first reason stays.

        Args:
            reason: The reason.

        Returns:
            The error to raise.
        """
        if self.flags.try_take(0):
            text = reason.encode()[:REASON_BYTES]
            self.reason[: len(text)] = text
            self.flags.post(1)
        self.abandon_reason = self.abandon_reason or reason
        return GroupError(self.abandon_reason)

    def close_pidfds(self) -> None:
        """Close the descriptors of the processes."""
        for pidfd in self.pidfds.values():
            os.close(pidfd)
        self.pidfds = {}


class DisseminationBarrier:
    """A barrier of a group: what a rank wrote before it can be read by all ranks after it.

    The dissemination algorithm (Hensgen, Finkel, Manber 1988). In round k a rank signals the rank
    2^k above it, and waits for the rank 2^k below it. There is one semaphore for each ordered pair,
    number `from * size + to`, so that the posts of two barriers never mix.

    Attributes:
        semaphores: The semaphores of all pairs.

        peers: The processes of the other ranks.

        size: The number of ranks.

        rank: The number of this rank.

        rounds: For each round the semaphore to post, the one to wait for, and the rank that posts
            it.
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
        """Wait until every rank is here.

        Args:
            deadline: The time limit, on the monotonic clock.
            describe_wait: Describes what this rank does, for the message.
            is_background: No caller waits, so do not spin.

        Raises:
            GroupError: The group cannot go on.
        """
        for post_address, wait_address, source in self.rounds:
            _sem_post(post_address)
            if _sem_trywait(wait_address):  # not yet
                self.peers.wait_for_post(
                    self.semaphores,
                    source * self.size + self.rank,
                    source,
                    deadline,
                    describe_wait,
                    is_background,
                )


def _find_ended(pidfds: list[int]) -> list[int]:
    """List the pidfds of processes that have ended."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return [pidfd for pidfd, _ in poll.poll(0)]
