"""The proof: is this schedule an all-reduce, at this size and length, and on what kind of wire?

Instead of numbers every slot holds *who contributed* (one bit per rank), so a lost or doubled contribution cannot hide
behind equal inputs (the idea of msccl-tools' chunk checks). Also found: messages that do not match, a mean taken inside
the exchange, a slot overwritten while a send of it may be open (by vector clocks: a send is over for a rank when it has
heard, through any chain of messages, of something its receiver did after taking it), and who deadlocks under which sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.players.walk import Deadlock, Sends, walk
from paragrad.schedules.actions import AllReduce, Compute, Recv, ScheduleError, Send, Slot, evenly


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved of an all-reduce of `length` elements over `size` ranks."""
    size: int
    length: int
    messages: int               # in all
    sent: int                   # elements, by the rank that sends most
    scratch: int                # elements a rank needs beside its vector, at most
    grouped: bool               # free of deadlock when neighbouring messages are posted together
    rendezvous: bool            # free of deadlock when every send blocks; under asynchronous sends it always is


def prove(schedule: AllReduce, size: int, length: int) -> Proof:
    """Every rank ends with exactly one contribution of every rank in every slot; ScheduleError names what is not so."""
    meaning = Contributions(size, [len(part) for part in evenly(length, schedule.parts(size))])
    walk(schedule.program, size, meaning)
    meaning.check_complete()
    return Proof(size, length, meaning.messages, max(meaning.sent), meaning.scratch,
                 grouped=_free_of_deadlock(schedule, size, "grouped"),
                 rendezvous=_free_of_deadlock(schedule, size, "rendezvous"))


def _free_of_deadlock(schedule: AllReduce, size: int, sends: Sends) -> bool:
    try:
        walk(schedule.program, size, Nothing(), sends)
    except Deadlock:
        return False
    return True


class Nothing:
    """Messages without content: only who waits for whom."""

    def read(self, rank: int, send: Send) -> None: ...

    def write(self, rank: int, recv: Recv, payload: None) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class Parcel:
    """A message of contributions: who is in it, what its sender knew, and when its receiver took it."""
    receiver: int
    contributions: int
    clock: tuple[int, ...]
    taken_at: int | None = None


class Contributions:
    """Every slot holds a set of ranks, as bits; every rank knows how far it has heard of the others (a vector clock)."""

    def __init__(self, size: int, lengths: list[int]) -> None:
        self.size, self.lengths = size, lengths
        self.held = [[1 << rank] * len(lengths) for rank in range(size)]
        self.clocks = [[0] * size for _ in range(size)]
        self.open: dict[tuple[int, int], list[Parcel]] = {}
        self.messages, self.sent, self.scratch = 0, [0] * size, 0

    def _part(self, rank: int, slot: Slot) -> int:
        if not isinstance(slot, int) or not 0 <= slot < len(self.lengths):
            raise ScheduleError(f"rank {rank} uses slot {slot}; the vector has slots 0 to {len(self.lengths) - 1}")
        return slot

    def read(self, rank: int, send: Send) -> Parcel:
        slot = self._part(rank, send.slot)
        self.clocks[rank][rank] += 1
        self.messages += 1
        self.sent[rank] += self.lengths[slot]
        parcel = Parcel(send.to, self.held[rank][slot], tuple(self.clocks[rank]))
        self.open.setdefault((rank, slot), []).append(parcel)
        return parcel

    def write(self, rank: int, recv: Recv, payload: Parcel) -> None:
        slot, clock = self._part(rank, recv.slot), self.clocks[rank]
        clock[rank] += 1
        payload.taken_at = clock[rank]
        self.clocks[rank] = clock = list(map(max, clock, payload.clock))
        if not recv.add:
            self._refuse_open(rank, slot, clock)
            self.held[rank][slot] = payload.contributions
            return
        if twice := self.held[rank][slot] & payload.contributions:
            raise ScheduleError(f"rank {rank} adds the contribution of rank {_first(twice)} to slot {slot} twice")
        self.held[rank][slot] |= payload.contributions
        self.scratch = max(self.scratch, self.lengths[slot])

    def _refuse_open(self, rank: int, slot: int, clock: list[int]) -> None:
        for parcel in self.open.pop((rank, slot), []):
            if parcel.taken_at is None or clock[parcel.receiver] < parcel.taken_at:
                raise ScheduleError(f"rank {rank} overwrites slot {slot} while its send to rank {parcel.receiver} "
                                    f"may still be open")

    def compute(self, rank: int, action: Compute) -> None:
        raise ScheduleError(f"rank {rank} computes {action.what!r} on slot {action.at}: an exchange only adds; the mean "
                            "is taken once, after it")

    def check_complete(self) -> None:
        everyone = (1 << self.size) - 1
        for rank, slots in enumerate(self.held):
            for slot, contributions in enumerate(slots):
                if lost := everyone & ~contributions:
                    raise ScheduleError(f"rank {rank} ends without the contribution of rank {_first(lost)} in slot {slot}")


def _first(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
