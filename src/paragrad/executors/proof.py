"""The proof: does this schedule reach its goal, at this size and length, and on what kind of
wire?

Instead of numbers every slot holds *who contributed* (one bit per rank), so a lost or doubled
contribution cannot hide behind equal inputs (the idea of msccl-tools' chunk checks). Also
found: messages that do not match, a mean taken inside the exchange, and who deadlocks under
which sends. The goal is an argument: what the slots hold before, and what after.

The schedule may be anybody's: whatever is wrong with it is a ScheduleError. Only a program that
goes on for ever without a yield is waited for, and only what differs from process to process is
not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

from paragrad.errors import Refused
from paragrad.executors.interpreter import Deadlock, Rounds, Sends, walk
from paragrad.executors.program_reader import read
from paragrad.schedules.actions import (
    Action,
    Compute,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Slot,
    lengths_of,
    parts_for,
    parts_in,
    shown,
)
from paragrad.schedules.pipeline import stage_of

PROVED = 64  # ranks up to which a schedule is proved before it is played
# messages that a rank may send for every other, beside two of every slot: more have no end
ENDLESS = 1000
Held = dict[Slot, int]  # what a rank's slots hold: the bits of who contributed


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be proved. before(schedule, size) and after(schedule, size): what the slots of
    every rank hold.

    A slot that is not in `before` begins empty, one that is not in `after` may end with
    anything. compute(rank, action, held) does to a rank's slots what an action does; without it
    nothing may be computed.
    """

    before: Callable[[Any, int], list[Held]]
    after: Callable[[Any, int], list[Held]]
    compute: Callable[[int, Compute, Held], None] | None = None
    # what a bit stands for
    named: Callable[[int], str] = "the contribution of rank {}".format


def _own(schedule: Any, size: int) -> list[Held]:
    return [dict.fromkeys(range(parts_for(schedule, size)), 1 << rank) for rank in range(size)]


def _sums(schedule: Any, size: int) -> list[Held]:
    return [dict.fromkeys(range(parts_for(schedule, size)), (1 << size) - 1)] * size


def _owned_sums(schedule: Any, size: int) -> list[Held]:
    owned = [schedule.owns(rank, size) for rank in range(size)]
    if nobodys := set(range(parts_for(schedule, size))).difference(*owned):
        raise ScheduleError(f"nobody owns slot {min(nobodys)}")
    return [dict.fromkeys(parts, (1 << size) - 1) for parts in owned]


# exactly one contribution of everyone in every slot of every rank
ALL_REDUCE = Goal(_own, _sums)
# reduce, reduce_scatter: in what each rank owns, and every slot has an owner
FIRST_HALF = Goal(_own, _owned_sums)
SECOND_HALF = Goal(_owned_sums, _sums)  # broadcast, all_gather: from there to everywhere


def _own_tasks(schedule: Any, size: int, done: bool) -> list[Held]:
    """A mark for each task of a rank's stages: forward, and backward, whole or in halves, as
    its order has it.
    """
    every: list[Held] = []
    for rank in range(size):
        halves = {what for what, *_ in schedule.tasks(rank, size)} & {"I", "W"}
        stages = range(rank, schedule.stages(size), size)
        every.append(
            {
                f"{what}{stage}.{micro}": done << stage
                for stage in stages
                for micro in range(schedule.micro)
                for what in ("F", *(("I", "W") if halves else ("B",)) * (stage >= schedule.trained))
            }
        )
    return every


def _pass(rank: int, action: Compute, held: Held) -> None:
    """A forward or a backward: what it needs is there, and it is made once."""
    stage, micro = stage_of(rank, action.at)
    mark = f"{action.what}{stage}.{micro}"
    below = (1 << stage) - 1
    needed = {"F": (), "B": ("F",), "I": ("F",), "W": ("I",)}.get(action.what)
    if needed is None or mark not in held:
        raise ScheduleError(
            f"rank {rank} computes {action.what!r}, which is no part of a pipeline: F, and B or I "
            f"and W"
        )
    if held[mark]:
        raise ScheduleError(f"rank {rank} makes {action} twice")
    if lacks := next((what for what in needed if not held[f"{what}{stage}.{micro}"]), None):
        raise ScheduleError(
            f"rank {rank} makes {action} and has not made {lacks}{shown(action.at)}"
        )
    held[mark] = 1 << stage
    came = f"x{stage}.{micro}"
    back = f"g{stage + 1}.{micro}"
    if action.what == "F":
        if held.get(came, below) != below:
            raise ScheduleError(f"rank {rank} makes {action} without the activations {came}")
        _given(held, f"x{stage + 1}.{micro}", below | 1 << stage)
    elif action.what in "BI":
        if back in held and not held[back] >> (stage + 1) & 1:
            raise ScheduleError(f"rank {rank} makes {action} without the gradient {back}")
        _given(held, f"g{stage}.{micro}", held.get(back, 0) | 1 << stage)


def _given(held: Held, slot: Slot, bits: int) -> None:
    if slot in held:
        held[slot] = bits


# every micro-batch forward and backward once on every stage, when what that needs is there
PIPELINE = Goal(
    functools.partial(_own_tasks, done=False),
    functools.partial(_own_tasks, done=True),
    _pass,
    "the pass of stage {}".format,
)
GOALS = {"all-reduce": ALL_REDUCE, "pipeline": PIPELINE}  # of strategies' plans


@dataclass(frozen=True, slots=True)
class Proven:
    """What was proved of a schedule for `length` elements over `size` ranks."""

    size: int
    length: int
    messages: int  # in all
    sent: int  # elements, by the rank that sends most
    scratch: int  # elements a rank needs beside its slots, at most
    # free of deadlock when neighbouring messages are posted together
    grouped: bool
    # free of deadlock when every send blocks; under asynchronous sends it always is
    rendezvous: bool


def prove(
    schedule: Schedule,
    size: int,
    length: int | Mapping[Slot, int] | None = None,
    goal: Goal = ALL_REDUCE,
) -> Proven:
    """That a schedule reaches its goal. Raises ScheduleError by rank, slot and round.

    length: elements of the vector (otherwise as many as it has parts), or of every slot by
    name.
    """
    if not callable(getattr(schedule, "program", None)):
        raise ScheduleError(
            f"{type(schedule).__name__} has no program; give it a method program(rank, size) of "
            f"actions"
        )
    if length is None and (named := getattr(schedule, "slots", None)):
        length = dict.fromkeys(named(size), 1)
    if not isinstance(length, Mapping):
        parts = parts_for(schedule, size)
        if (again := parts_for(schedule, size)) != parts:
            raise ScheduleError(
                f"parts({size}) is {parts}, and {again} when asked again; let it depend on the "
                f"size alone"
            )
        length = parts if length is None else length
    found = Contributions.start(schedule, size, length, goal)
    actions = walk(schedule.program, size, found, rounds=found.rounds)
    found.check(goal.after(schedule, size))
    _the_same_again(schedule, size, actions)
    return Proven(
        size,
        sum(found.lengths.values()),
        found.messages,
        max(found.sent),
        found.scratch,
        grouped=_free_of_deadlock(schedule, size, "grouped"),
        rendezvous=_free_of_deadlock(schedule, size, "rendezvous"),
    )


def _the_same_again(schedule: Schedule, size: int, actions: list[list[Action]]) -> None:
    """Every rank asks for its program in a process of its own, so it must be the same whenever
    it is asked for.
    """
    for rank, first in enumerate(actions):
        again = islice(read(schedule.program, rank, size), len(first) + 1)
        for number, (one, other) in enumerate(zip_longest(first, again), 1):
            if one != other:
                raise ScheduleError(
                    f"rank {rank}, action {number} of its program: {one or 'its end'}, and when "
                    f"asked again "
                    f"{other or 'its end'}; let it depend on rank and size alone"
                )


def check(schedule: Schedule, size: int, what: str = "all-reduce") -> None:
    """Refuse what does not come to the goal of that name; of more than PROVED ranks that takes
    too long to see.
    """
    if size <= PROVED:
        try:
            prove(schedule, size, goal=GOALS[what])
        except ScheduleError as error:
            raise Refused(
                f"{schedule} is no {what} of {size} ranks: {error}; mend the schedule"
            ) from None


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
    held: list[Held]  # by rank
    sent: list[int]  # elements, by rank
    done: list[int]  # sends and Computes, by rank
    rounds: Rounds
    messages: int = 0
    scratch: int = 0
    # by rank and slot: the last, and its round
    took: dict[tuple[int, Slot], tuple[int, Recv]] = field(default_factory=dict)
    # bits, slot, rank, round, by what
    overwritten: list[tuple[int, Slot, int, int, Recv]] = field(default_factory=list)

    @classmethod
    def start(
        cls, schedule: Schedule, size: int, length: int | Mapping[Slot, int], goal: Goal
    ) -> Contributions:
        lengths = lengths_of(schedule, size, length)
        held = [dict.fromkeys(lengths, 0) | each for each in goal.before(schedule, size)]
        return cls(goal, lengths, held, [0] * size, [0] * size, Rounds(size))

    def _parts(self, rank: int, slot: Slot) -> list[Slot]:
        parts = list(parts_in(slot))
        if any(part not in self.lengths for part in parts):
            known = list(self.lengths)
            raise ScheduleError(
                f"rank {rank} uses slot {shown(slot)}; the vector has slots {known[0]} to "
                f"{known[-1]} (round "
                f"{self.rounds.of[rank]})"
            )
        return parts

    def _go_on(self, rank: int) -> None:
        """Raises where a rank never comes to an end. Receives need not be counted: each needs a
        send.
        """
        self.done[rank] += 1
        size = len(self.held)
        if self.done[rank] > ENDLESS * size + 2 * size * len(self.lengths):
            raise ScheduleError(
                f"rank {rank}'s program does not end: it has sent {self.done[rank]} messages, and "
                f"goes on "
                f"(round {self.rounds.of[rank]})"
            )

    def read(self, rank: int, send: Send) -> list[int]:
        self._go_on(rank)
        parts = self._parts(rank, send.slot)
        self.messages += 1
        self.sent[rank] += sum(self.lengths[part] for part in parts)
        return [self.held[rank][part] for part in parts]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        parts = self._parts(rank, recv.slot)
        held = self.held[rank]
        now = self.rounds.of[rank]
        for part, contributions in zip(parts, payload, strict=True):
            if recv.add and (twice := held[part] & contributions):
                raise ScheduleError(
                    f"rank {rank} adds {self._first(twice)} to slot {part} twice, in round {now} "
                    f"({recv})"
                )
            if not recv.add and (gone := held[part] & ~contributions):
                self.overwritten.append((gone, part, rank, now, recv))
            held[part] = contributions | held[part] if recv.add else contributions
            self.took[rank, part] = now, recv
        if recv.add:
            self.scratch = max(self.scratch, sum(self.lengths[part] for part in parts))

    def compute(self, rank: int, action: Compute) -> None:
        self._go_on(rank)
        if self.goal.compute is None:
            raise ScheduleError(
                f"rank {rank} computes {action.what!r} on slot {shown(action.at)}: an exchange "
                f"only adds; the "
                f"mean is taken once, after it (round {self.rounds.of[rank]})"
            )
        self.goal.compute(rank, action, self.held[rank])

    def check(self, after: list[Held]) -> None:
        """That every rank ends with what it should, and no more."""
        for rank, wanted in enumerate(after):
            for slot, contributions in wanted.items():
                held = self.held[rank][slot]
                if lost := contributions & ~held:
                    raise ScheduleError(
                        f"rank {rank} ends without {self._first(lost)} in slot {slot}: "
                        f"{self._story(rank, slot, lost & -lost)}"
                    )
                if beside := held & ~contributions:
                    raise ScheduleError(
                        f"rank {rank} ends with {self._first(beside)} in slot {slot}, where it "
                        f"does not "
                        f"belong: {self._story(rank, slot)}"
                    )

    def _story(self, rank: int, slot: Slot, lost: int = 0) -> str:
        """What came into a slot last, and who first wrote over what is missing there."""
        told = "it never takes that slot"
        if (rank, slot) in self.took:
            told = "the last it takes of that slot comes in round {} ({})".format(
                *self.took[rank, slot]
            )
        for gone, part, victim, now, recv in self.overwritten:
            if part == slot and gone & lost:
                return (
                    f"{told}; rank {victim} wrote over it in round {now} ({recv}), where "
                    f"add=True would have added"
                )
        return told

    def _first(self, bits: int) -> str:
        """What the lowest of some bits stands for."""
        return self.goal.named((bits & -bits).bit_length() - 1)
