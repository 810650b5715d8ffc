"""The proof: is this schedule an all-reduce (or a half of one), at this size and length, and on what kind of wire?

Instead of numbers every slot holds *who contributed* (one bit per rank), so a lost or doubled contribution cannot hide
behind equal inputs (the idea of msccl-tools' chunk checks). Also found: messages that do not match, a mean taken inside
the exchange, and who deadlocks under which sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paragrad.players.walk import Deadlock, Sends, walk
from paragrad.schedules.actions import Collective, Compute, Half, Recv, ScheduleError, Send, Slot, evenly, parts_in, shown


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved of a schedule for `length` elements over `size` ranks."""
    size: int
    length: int
    messages: int               # in all
    sent: int                   # elements, by the rank that sends most
    scratch: int                # elements a rank needs beside its vector, at most
    grouped: bool               # free of deadlock when neighbouring messages are posted together
    rendezvous: bool            # free of deadlock when every send blocks; under asynchronous sends it always is


def prove(schedule: Collective, size: int, length: int) -> Proof:
    """An all-reduce: every rank ends with exactly one contribution of every rank in every slot. Raises ScheduleError."""
    return _proved(schedule, Contributions.start(schedule, size, length), [range(schedule.parts(size))] * size)


def prove_half(half: Half, size: int, length: int, kind: Literal["reduce", "broadcast"]) -> Proof:
    """A first half (reduce or reduce_scatter) ends with every contribution in what each rank owns, and every part has an owner;
    a second half (broadcast or all_gather) begins so, and ends with every contribution everywhere.
    """
    everything = range(half.parts(size))
    owned = [half.owns(rank, size) for rank in range(size)]
    if nobodys := set(everything).difference(*owned):
        raise ScheduleError(f"nobody owns slot {min(nobodys)}")
    meaning = Contributions.start(half, size, length)
    if kind == "broadcast":
        for rank, held in enumerate(meaning.held):
            held[:] = [(1 << size) - 1 if part in owned[rank] else 0 for part in everything]
    return _proved(half, meaning, owned if kind == "reduce" else [everything] * size)


def _proved(schedule: Collective, meaning: Contributions, complete: list[range]) -> Proof:
    size = meaning.size
    walk(schedule.program, size, meaning)
    meaning.check_complete(complete)
    return Proof(size, sum(meaning.lengths), meaning.messages, max(meaning.sent), meaning.scratch,
                 grouped=_free_of_deadlock(schedule, size, "grouped"),
                 rendezvous=_free_of_deadlock(schedule, size, "rendezvous"))


def _free_of_deadlock(schedule: Collective, size: int, sends: Sends) -> bool:
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
class Contributions:
    """Every part holds a set of ranks, as bits."""
    size: int
    lengths: list[int]                                  # of the parts
    held: list[list[int]]                               # by rank and part
    sent: list[int]                                     # elements, by rank
    messages: int = 0
    scratch: int = 0

    @classmethod
    def start(cls, schedule: Collective, size: int, length: int) -> Contributions:
        lengths = [len(part) for part in evenly(length, schedule.parts(size))]
        return cls(size, lengths, [[1 << rank] * len(lengths) for rank in range(size)], [0] * size)

    def _parts(self, rank: int, slot: Slot) -> list[int]:
        found = [part for part in parts_in(slot) if isinstance(part, int) and 0 <= part < len(self.lengths)]
        if not found or len(found) < len(parts_in(slot)):
            raise ScheduleError(f"rank {rank} uses slot {shown(slot)}; the vector has slots 0 to {len(self.lengths) - 1}")
        return found

    def read(self, rank: int, send: Send) -> list[int]:
        parts = self._parts(rank, send.slot)
        self.messages += 1
        self.sent[rank] += sum(self.lengths[part] for part in parts)
        return [self.held[rank][part] for part in parts]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        parts, held = self._parts(rank, recv.slot), self.held[rank]
        for part, contributions in zip(parts, payload, strict=True):
            if recv.add and (twice := held[part] & contributions):
                raise ScheduleError(f"rank {rank} adds the contribution of rank {_first(twice)} to slot {part} twice")
            held[part] = contributions | held[part] if recv.add else contributions
        if recv.add:
            self.scratch = max(self.scratch, sum(self.lengths[part] for part in parts))

    def compute(self, rank: int, action: Compute) -> None:
        raise ScheduleError(f"rank {rank} computes {action.what!r} on slot {shown(action.at)}: an exchange only adds; the mean "
                            "is taken once, after it")

    def check_complete(self, complete: list[range]) -> None:
        """complete: the parts of each rank that must hold everybody's contribution."""
        everyone = (1 << self.size) - 1
        for rank, parts in enumerate(complete):
            for part in parts:
                if lost := everyone & ~self.held[rank][part]:
                    raise ScheduleError(f"rank {rank} ends without the contribution of rank {_first(lost)} in slot {part}")


def _first(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
