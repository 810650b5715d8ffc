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
from paragrad.executors.interpreter import Deadlock, RoundCounter, SendMode, interpret_schedule
from paragrad.executors.program_reader import read_program
from paragrad.schedules.actions import (
    Action,
    Compute,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Slot,
    compute_slot_lengths,
    count_parts,
    expand_slot,
    format_slot,
)
from paragrad.schedules.pipeline import parse_task_slot

MAX_PROVED_RANKS = 64  # ranks up to which a schedule is proved before it is played
# messages that a rank may send for every other, beside two of every slot: more have no end
MAX_SENDS_PER_PEER = 1000
SlotBits = dict[Slot, int]  # what a rank's slots hold: the bits of who contributed


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be proved. before(schedule, size) and after(schedule, size): what the slots of
    every rank hold.

    A slot that is not in `before` begins empty, one that is not in `after` may end with
    anything. compute(rank, action, held) does to a rank's slots what an action does; without it
    nothing may be computed.
    """

    initial_slots: Callable[[Any, int], list[SlotBits]]
    final_slots: Callable[[Any, int], list[SlotBits]]
    compute: Callable[[int, Compute, SlotBits], None] | None = None
    # what a bit stands for
    describe_bit: Callable[[int], str] = "the contribution of rank {}".format


def _build_own_bits(schedule: Any, size: int) -> list[SlotBits]:
    return [dict.fromkeys(range(count_parts(schedule, size)), 1 << rank) for rank in range(size)]


def _build_all_sums(schedule: Any, size: int) -> list[SlotBits]:
    return [dict.fromkeys(range(count_parts(schedule, size)), (1 << size) - 1)] * size


def _build_owned_sums(schedule: Any, size: int) -> list[SlotBits]:
    owned = [schedule.owns(rank, size) for rank in range(size)]
    if nobodys := set(range(count_parts(schedule, size))).difference(*owned):
        raise ScheduleError(f"nobody owns slot {min(nobodys)}")
    return [dict.fromkeys(parts, (1 << size) - 1) for parts in owned]


# exactly one contribution of everyone in every slot of every rank
ALL_REDUCE = Goal(_build_own_bits, _build_all_sums)
# reduce, reduce_scatter: in what each rank owns, and every slot has an owner
FIRST_HALF = Goal(_build_own_bits, _build_owned_sums)
SECOND_HALF = Goal(
    _build_owned_sums, _build_all_sums
)  # broadcast, all_gather: from there to everywhere


def _build_task_marks(schedule: Any, size: int, done: bool) -> list[SlotBits]:
    """A mark for each task of a rank's stages: forward, and backward, whole or in halves, as
    its order has it.
    """
    every: list[SlotBits] = []
    for rank in range(size):
        halves = {what for what, *_ in schedule.list_tasks(rank, size)} & {"I", "W"}
        stages = range(rank, schedule.count_stages(size), size)
        every.append(
            {
                f"{what}{stage}.{micro}": done << stage
                for stage in stages
                for micro in range(schedule.micro)
                for what in (
                    "F",
                    *(("I", "W") if halves else ("B",)) * (stage >= schedule.first_trained_stage),
                )
            }
        )
    return every


def _mark_pass(rank: int, action: Compute, held: SlotBits) -> None:
    """A forward or a backward: what it needs is there, and it is made once."""
    stage, micro = parse_task_slot(rank, action.at)
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
            f"rank {rank} makes {action} and has not made {lacks}{format_slot(action.at)}"
        )
    held[mark] = 1 << stage
    came = f"x{stage}.{micro}"
    back = f"g{stage + 1}.{micro}"
    if action.what == "F":
        if held.get(came, below) != below:
            raise ScheduleError(f"rank {rank} makes {action} without the activations {came}")
        _set_if_present(held, f"x{stage + 1}.{micro}", below | 1 << stage)
    elif action.what in "BI":
        if back in held and not held[back] >> (stage + 1) & 1:
            raise ScheduleError(f"rank {rank} makes {action} without the gradient {back}")
        _set_if_present(held, f"g{stage}.{micro}", held.get(back, 0) | 1 << stage)


def _set_if_present(held: SlotBits, slot: Slot, bits: int) -> None:
    if slot in held:
        held[slot] = bits


# every micro-batch forward and backward once on every stage, when what that needs is there
PIPELINE = Goal(
    functools.partial(_build_task_marks, done=False),
    functools.partial(_build_task_marks, done=True),
    _mark_pass,
    "the pass of stage {}".format,
)
GOALS = {"all-reduce": ALL_REDUCE, "pipeline": PIPELINE}  # of strategies' plans


@dataclass(frozen=True, slots=True)
class ProofResult:
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


def prove_schedule(
    schedule: Schedule,
    size: int,
    length: int | Mapping[Slot, int] | None = None,
    goal: Goal = ALL_REDUCE,
) -> ProofResult:
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
        parts = count_parts(schedule, size)
        if (again := count_parts(schedule, size)) != parts:
            raise ScheduleError(
                f"parts({size}) is {parts}, and {again} when asked again; let it depend on the "
                f"size alone"
            )
        length = parts if length is None else length
    found = Contributions.build(schedule, size, length, goal)
    actions = interpret_schedule(schedule.program, size, found, rounds=found.rounds)
    found.check_final_slots(goal.final_slots(schedule, size))
    _check_program_repeats(schedule, size, actions)
    return ProofResult(
        size,
        sum(found.lengths.values()),
        found.messages,
        max(found.sent_elements),
        found.scratch,
        grouped=_is_deadlock_free(schedule, size, "grouped"),
        rendezvous=_is_deadlock_free(schedule, size, "rendezvous"),
    )


def _check_program_repeats(schedule: Schedule, size: int, actions: list[list[Action]]) -> None:
    """Every rank asks for its program in a process of its own, so it must be the same whenever
    it is asked for.
    """
    for rank, first in enumerate(actions):
        again = islice(read_program(schedule.program, rank, size), len(first) + 1)
        for number, (one, other) in enumerate(zip_longest(first, again), 1):
            if one != other:
                raise ScheduleError(
                    f"rank {rank}, action {number} of its program: {one or 'its end'}, and when "
                    f"asked again "
                    f"{other or 'its end'}; let it depend on rank and size alone"
                )


def check_schedule(schedule: Schedule, size: int, goal_name: str = "all-reduce") -> None:
    """Refuse what does not come to the goal of that name; of more than PROVED ranks that takes
    too long to see.
    """
    if size <= MAX_PROVED_RANKS:
        try:
            prove_schedule(schedule, size, goal=GOALS[goal_name])
        except ScheduleError as error:
            raise Refused(
                f"{schedule} is no {goal_name} of {size} ranks: {error}; mend the schedule"
            ) from None


def _is_deadlock_free(schedule: Schedule, size: int, send_mode: SendMode) -> bool:
    try:
        interpret_schedule(schedule.program, size, NoContent(), send_mode)
    except Deadlock:
        return False
    return True


class NoContent:
    """Messages without content: only who waits for whom."""

    def read(self, rank: int, send: Send) -> None: ...

    def write(self, rank: int, recv: Recv, payload: None) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class Contributions:
    """Every slot holds a set of ranks, as bits."""

    goal: Goal
    lengths: dict[Slot, int]
    slots: list[SlotBits]  # by rank
    sent_elements: list[int]  # elements, by rank
    action_counts: list[int]  # sends and Computes, by rank
    rounds: RoundCounter
    messages: int = 0
    scratch: int = 0
    # by rank and slot: the last, and its round
    last_received: dict[tuple[int, Slot], tuple[int, Recv]] = field(default_factory=dict)
    # bits, slot, rank, round, by what
    overwritten: list[tuple[int, Slot, int, int, Recv]] = field(default_factory=list)

    @classmethod
    def build(
        cls, schedule: Schedule, size: int, length: int | Mapping[Slot, int], goal: Goal
    ) -> Contributions:
        lengths = compute_slot_lengths(schedule, size, length)
        held = [dict.fromkeys(lengths, 0) | each for each in goal.initial_slots(schedule, size)]
        return cls(goal, lengths, held, [0] * size, [0] * size, RoundCounter(size))

    def _list_known_parts(self, rank: int, slot: Slot) -> list[Slot]:
        parts = list(expand_slot(slot))
        if any(part not in self.lengths for part in parts):
            known = list(self.lengths)
            raise ScheduleError(
                f"rank {rank} uses slot {format_slot(slot)}; the vector has slots {known[0]} to "
                f"{known[-1]} (round "
                f"{self.rounds.current[rank]})"
            )
        return parts

    def _count_action(self, rank: int) -> None:
        """Raises where a rank never comes to an end. Receives need not be counted: each needs a
        send.
        """
        self.action_counts[rank] += 1
        size = len(self.slots)
        if self.action_counts[rank] > MAX_SENDS_PER_PEER * size + 2 * size * len(self.lengths):
            raise ScheduleError(
                f"rank {rank}'s program does not end: it has sent {self.action_counts[rank]} "
                f"messages, and "
                f"goes on "
                f"(round {self.rounds.current[rank]})"
            )

    def read(self, rank: int, send: Send) -> list[int]:
        self._count_action(rank)
        parts = self._list_known_parts(rank, send.slot)
        self.messages += 1
        self.sent_elements[rank] += sum(self.lengths[part] for part in parts)
        return [self.slots[rank][part] for part in parts]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        parts = self._list_known_parts(rank, recv.slot)
        held = self.slots[rank]
        now = self.rounds.current[rank]
        for part, contributions in zip(parts, payload, strict=True):
            if recv.add and (twice := held[part] & contributions):
                raise ScheduleError(
                    f"rank {rank} adds {self._describe_lowest_bit(twice)} to slot {part} twice, in "
                    f"round {now} "
                    f"({recv})"
                )
            if not recv.add and (gone := held[part] & ~contributions):
                self.overwritten.append((gone, part, rank, now, recv))
            held[part] = contributions | held[part] if recv.add else contributions
            self.last_received[rank, part] = now, recv
        if recv.add:
            self.scratch = max(self.scratch, sum(self.lengths[part] for part in parts))

    def compute(self, rank: int, action: Compute) -> None:
        self._count_action(rank)
        if self.goal.compute is None:
            raise ScheduleError(
                f"rank {rank} computes {action.what!r} on slot {format_slot(action.at)}: an "
                f"exchange "
                f"only adds; the "
                f"mean is taken once, after it (round {self.rounds.current[rank]})"
            )
        self.goal.compute(rank, action, self.slots[rank])

    def check_final_slots(self, final_slots: list[SlotBits]) -> None:
        """That every rank ends with what it should, and no more."""
        for rank, wanted in enumerate(final_slots):
            for slot, contributions in wanted.items():
                held = self.slots[rank][slot]
                if lost := contributions & ~held:
                    raise ScheduleError(
                        f"rank {rank} ends without {self._describe_lowest_bit(lost)} in slot "
                        f"{slot}: "
                        f"{self._explain_slot(rank, slot, lost & -lost)}"
                    )
                if beside := held & ~contributions:
                    raise ScheduleError(
                        f"rank {rank} ends with {self._describe_lowest_bit(beside)} in slot "
                        f"{slot}, where it "
                        f"does not "
                        f"belong: {self._explain_slot(rank, slot)}"
                    )

    def _explain_slot(self, rank: int, slot: Slot, lost: int = 0) -> str:
        """What came into a slot last, and who first wrote over what is missing there."""
        told = "it never takes that slot"
        if (rank, slot) in self.last_received:
            told = "the last it takes of that slot comes in round {} ({})".format(
                *self.last_received[rank, slot]
            )
        for gone, part, victim, now, recv in self.overwritten:
            if part == slot and gone & lost:
                return (
                    f"{told}; rank {victim} wrote over it in round {now} ({recv}), where "
                    f"add=True would have added"
                )
        return told

    def _describe_lowest_bit(self, bits: int) -> str:
        """What the lowest of some bits stands for."""
        return self.goal.describe_bit((bits & -bits).bit_length() - 1)
