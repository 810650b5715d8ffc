"""The proof: does this schedule reach its goal, at this size and length, and on what kind of wire?

Instead of numbers every slot holds *who contributed* (one bit per rank), so a lost or doubled contribution cannot hide
behind equal inputs (the idea of msccl-tools' chunk checks). Also found: messages that do not match, a mean taken inside
the exchange, and who deadlocks under which sends. The goal is an argument: what the slots hold before, and what after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paragrad.players.walk import Deadlock, Sends, walk
from paragrad.schedules.actions import Compute, Recv, Schedule, ScheduleError, Send, Slot, lengths_of, parts_in, shown

Held = dict[Slot, int]          # what a rank's slots hold: the bits of who contributed


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be proved. before(schedule, size) and after(schedule, size): what the slots of every rank hold.

    A slot that is not in `before` begins empty, one that is not in `after` may end with anything. compute(rank, action, held)
    does to a rank's slots what an action does; without it nothing may be computed.
    """
    before: Callable[[Any, int], list[Held]]
    after: Callable[[Any, int], list[Held]]
    compute: Callable[[int, Compute, Held], None] | None = None
    named: Callable[[int], str] = "the contribution of rank {}".format          # what a bit stands for


def _own(schedule: Any, size: int) -> list[Held]:
    return [dict.fromkeys(range(schedule.parts(size)), 1 << rank) for rank in range(size)]


def _sums(schedule: Any, size: int) -> list[Held]:
    return [dict.fromkeys(range(schedule.parts(size)), (1 << size) - 1)] * size


def _owned_sums(schedule: Any, size: int) -> list[Held]:
    owned = [schedule.owns(rank, size) for rank in range(size)]
    if nobodys := set(range(schedule.parts(size))).difference(*owned):
        raise ScheduleError(f"nobody owns slot {min(nobodys)}")
    return [dict.fromkeys(parts, (1 << size) - 1) for parts in owned]


ALL_REDUCE = Goal(_own, _sums)              # exactly one contribution of everyone in every slot of every rank
FIRST_HALF = Goal(_own, _owned_sums)        # reduce, reduce_scatter: in what each rank owns, and every slot has an owner
SECOND_HALF = Goal(_owned_sums, _sums)      # broadcast, all_gather: from there to everywhere


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved of a schedule for `length` elements over `size` ranks."""
    size: int
    length: int
    messages: int               # in all
    sent: int                   # elements, by the rank that sends most
    scratch: int                # elements a rank needs beside its slots, at most
    grouped: bool               # free of deadlock when neighbouring messages are posted together
    rendezvous: bool            # free of deadlock when every send blocks; under asynchronous sends it always is


def prove(schedule: Schedule, size: int, length: int | Mapping[Slot, int], goal: Goal = ALL_REDUCE) -> Proof:
    """That a schedule reaches its goal. length: elements of the vector, or of every slot by name. Raises ScheduleError."""
    found = Contributions.start(schedule, size, length, goal)
    walk(schedule.program, size, found)
    found.check(goal.after(schedule, size))
    return Proof(size, sum(found.lengths.values()), found.messages, max(found.sent), found.scratch,
                 grouped=_free_of_deadlock(schedule, size, "grouped"),
                 rendezvous=_free_of_deadlock(schedule, size, "rendezvous"))


def _free_of_deadlock(schedule: Schedule, size: int, sends: Sends) -> bool:
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
    """Every slot holds a set of ranks, as bits."""
    goal: Goal
    lengths: dict[Slot, int]
    held: list[Held]                                    # by rank
    sent: list[int]                                     # elements, by rank
    messages: int = 0
    scratch: int = 0

    @classmethod
    def start(cls, schedule: Schedule, size: int, length: int | Mapping[Slot, int], goal: Goal) -> Contributions:
        lengths = lengths_of(schedule, size, length)
        return cls(goal, lengths, [dict.fromkeys(lengths, 0) | held for held in goal.before(schedule, size)], [0] * size)

    def _parts(self, rank: int, slot: Slot) -> list[Slot]:
        parts = list(parts_in(slot))
        if not parts or any(part not in self.lengths for part in parts):
            known = list(self.lengths)
            raise ScheduleError(f"rank {rank} uses slot {shown(slot)}; the vector has slots {known[0]} to {known[-1]}")
        return parts

    def read(self, rank: int, send: Send) -> list[int]:
        parts = self._parts(rank, send.slot)
        self.messages += 1
        self.sent[rank] += sum(self.lengths[part] for part in parts)
        return [self.held[rank][part] for part in parts]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        parts, held = self._parts(rank, recv.slot), self.held[rank]
        for part, contributions in zip(parts, payload, strict=True):
            if recv.add and (twice := held[part] & contributions):
                raise ScheduleError(f"rank {rank} adds {self._first(twice)} to slot {part} twice")
            held[part] = contributions | held[part] if recv.add else contributions
        if recv.add:
            self.scratch = max(self.scratch, sum(self.lengths[part] for part in parts))

    def compute(self, rank: int, action: Compute) -> None:
        if self.goal.compute is None:
            raise ScheduleError(f"rank {rank} computes {action.what!r} on slot {shown(action.at)}: an exchange only adds; the "
                                "mean is taken once, after it")
        self.goal.compute(rank, action, self.held[rank])

    def check(self, after: list[Held]) -> None:
        """That every rank ends with what it should, and no more."""
        for rank, wanted in enumerate(after):
            for slot, contributions in wanted.items():
                held = self.held[rank][slot]
                if lost := contributions & ~held:
                    raise ScheduleError(f"rank {rank} ends without {self._first(lost)} in slot {slot}")
                if beside := held & ~contributions:
                    raise ScheduleError(f"rank {rank} ends with {self._first(beside)} in slot {slot}, where it does not belong")

    def _first(self, bits: int) -> str:
        """What the lowest of some bits stands for."""
        return self.goal.named((bits & -bits).bit_length() - 1)
