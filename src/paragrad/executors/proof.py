"""The proof that a schedule reaches its goal, at a given size and length.

Instead of numbers, every slot holds which ranks contributed (one bit per rank). So a lost or
doubled contribution cannot hide behind equal inputs (the idea of the chunk checks of msccl-tools).
The proof also finds messages that do not match, a mean taken inside the exchange, and deadlocks
under each kind of sends. The goal is an argument: what the slots hold before, and what after.

The schedule may be a user's own: every error in it is a ScheduleError. There are two exceptions. A
program that runs for ever without a yield is waited for. A difference between processes is not
detected.
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
# Messages that a rank may send for every other rank, besides two of every slot. A program that
# sends more is taken to be endless.
MAX_SENDS_PER_PEER = 1000
SlotBits = dict[Slot, int]  # what the slots of a rank hold: the bits of the contributing ranks


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be proved.

    Attributes:
        initial_slots: A function of (schedule, size): what the slots of every rank hold at first. A
            slot that is missing there is empty.
        final_slots: A function of (schedule, size): what they hold at the end. A slot that is
            missing there may hold anything.
        compute: A function of (rank, action, slots) that applies a Compute to the slots of a rank.
            Without it no Compute is allowed.
        describe_bit: A function that describes a bit.
    """

    initial_slots: Callable[[Any, int], list[SlotBits]]
    final_slots: Callable[[Any, int], list[SlotBits]]
    compute: Callable[[int, Compute, SlotBits], None] | None = None
    describe_bit: Callable[[int], str] = "the contribution of rank {}".format


def _build_own_bits(schedule: Any, size: int) -> list[SlotBits]:
    return [dict.fromkeys(range(count_parts(schedule, size)), 1 << rank) for rank in range(size)]


def _build_all_sums(schedule: Any, size: int) -> list[SlotBits]:
    return [dict.fromkeys(range(count_parts(schedule, size)), (1 << size) - 1)] * size


def _build_owned_sums(schedule: Any, size: int) -> list[SlotBits]:
    owned = [schedule.owns(rank, size) for rank in range(size)]
    if unowned := set(range(count_parts(schedule, size))).difference(*owned):
        raise ScheduleError(f"no rank owns slot {min(unowned)}")
    return [dict.fromkeys(parts, (1 << size) - 1) for parts in owned]


# Exactly one contribution of each rank in every slot of every rank.
ALL_REDUCE = Goal(_build_own_bits, _build_all_sums)
# reduce, reduce_scatter: the sums in the parts that each rank owns; every slot has an owner.
FIRST_HALF = Goal(_build_own_bits, _build_owned_sums)
# broadcast, all_gather: from the owners to all ranks.
SECOND_HALF = Goal(_build_owned_sums, _build_all_sums)


def _build_task_marks(schedule: Any, size: int, done: bool) -> list[SlotBits]:
    """Return a mark for each forward, and for each backward (or its halves), of a rank's stages."""
    marks: list[SlotBits] = []
    for rank in range(size):
        halves = {what for what, *_ in schedule.list_tasks(rank, size)} & {"I", "W"}
        stages = range(rank, schedule.count_stages(size), size)
        marks.append(
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
    return marks


def _mark_pass(rank: int, action: Compute, held: SlotBits) -> None:
    """Mark a forward or a backward: everything that it needs is there, and it runs once."""
    stage, micro = parse_task_slot(rank, action.at)
    mark = f"{action.what}{stage}.{micro}"
    below = (1 << stage) - 1
    needed = {"F": (), "B": ("F",), "I": ("F",), "W": ("I",)}.get(action.what)
    if needed is None or mark not in held:
        raise ScheduleError(
            f"rank {rank} computes {action.what!r}, which is no part of a pipeline; it has F, and "
            "B or I and W"
        )
    if held[mark]:
        raise ScheduleError(f"rank {rank} makes {action} twice")
    if missing := next((what for what in needed if not held[f"{what}{stage}.{micro}"]), None):
        raise ScheduleError(
            f"rank {rank} makes {action} and has not made {missing}{format_slot(action.at)}"
        )
    held[mark] = 1 << stage
    input_slot = f"x{stage}.{micro}"
    gradient_slot = f"g{stage + 1}.{micro}"
    if action.what == "F":
        if held.get(input_slot, below) != below:
            raise ScheduleError(f"rank {rank} makes {action} without the activations {input_slot}")
        _set_if_present(held, f"x{stage + 1}.{micro}", below | 1 << stage)
    elif action.what in "BI":
        if gradient_slot in held and not held[gradient_slot] >> (stage + 1) & 1:
            raise ScheduleError(f"rank {rank} makes {action} without the gradient {gradient_slot}")
        _set_if_present(held, f"g{stage}.{micro}", held.get(gradient_slot, 0) | 1 << stage)


def _set_if_present(held: SlotBits, slot: Slot, bits: int) -> None:
    if slot in held:
        held[slot] = bits


# Every micro-batch runs forward and backward once on every stage, after everything that it needs.
PIPELINE = Goal(
    functools.partial(_build_task_marks, done=False),
    functools.partial(_build_task_marks, done=True),
    _mark_pass,
    "the pass of stage {}".format,
)
GOALS = {"all-reduce": ALL_REDUCE, "pipeline": PIPELINE}  # the goals of `ScheduleUse`


@dataclass(frozen=True, slots=True)
class ProofResult:
    """What was proved of a schedule.

    Attributes:
        size: The number of ranks.

        length: The number of elements.

        messages: The number of messages of all ranks.

        sent: The elements that are sent by the rank that sends most.

        scratch: The elements that a rank needs besides its slots, at most.

        grouped: Whether there is no deadlock when neighbouring messages are posted together.

        rendezvous: Whether there is no deadlock when every send blocks. Under asynchronous sends
            there never is.
    """

    size: int
    length: int
    messages: int
    sent: int
    scratch: int
    grouped: bool
    rendezvous: bool


def prove_schedule(
    schedule: Schedule,
    size: int,
    length: int | Mapping[Slot, int] | None = None,
    goal: Goal = ALL_REDUCE,
) -> ProofResult:
    """Prove that a schedule reaches its goal.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        length: The elements of the vector, or of every slot by name. By default there is one
            element per part.
        goal: The goal.

    Raises:
        ScheduleError: If it does not reach the goal; names rank, slot and round.
    """
    if not callable(getattr(schedule, "program", None)):
        raise ScheduleError(
            f"{type(schedule).__name__} has no program; give it a method program(rank, size) of "
            "actions"
        )
    if length is None and (list_slots := getattr(schedule, "slots", None)):
        length = dict.fromkeys(list_slots(size), 1)
    if not isinstance(length, Mapping):
        parts = count_parts(schedule, size)
        if (again := count_parts(schedule, size)) != parts:
            raise ScheduleError(
                f"parts({size}) is {parts}, and {again} at the second call; let it depend on "
                "the size alone"
            )
        length = parts if length is None else length
    contributions = Contributions.build(schedule, size, length, goal)
    actions = interpret_schedule(schedule.program, size, contributions, rounds=contributions.rounds)
    contributions.check_final_slots(goal.final_slots(schedule, size))
    _check_program_repeats(schedule, size, actions)
    return ProofResult(
        size,
        sum(contributions.lengths.values()),
        contributions.messages,
        max(contributions.sent_elements),
        contributions.scratch,
        grouped=_is_deadlock_free(schedule, size, "grouped"),
        rendezvous=_is_deadlock_free(schedule, size, "rendezvous"),
    )


def _check_program_repeats(schedule: Schedule, size: int, actions: list[list[Action]]) -> None:
    """Check that a program is the same each time: every rank generates it in its own process."""
    for rank, first in enumerate(actions):
        again = islice(read_program(schedule.program, rank, size), len(first) + 1)
        for number, (one, other) in enumerate(zip_longest(first, again), 1):
            if one != other:
                raise ScheduleError(
                    f"rank {rank}, action {number} of its program: {one or 'its end'}, and at the "
                    f"second call {other or 'its end'}; let it depend on rank and size alone"
                )


def check_schedule(schedule: Schedule, size: int, goal_name: str = "all-reduce") -> None:
    """Refuse a schedule that does not reach a goal.

    Above MAX_PROVED_RANKS ranks the proof would take too long, and is left out.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        goal_name: The name of the goal in GOALS.

    Raises:
        Refused: If the schedule does not reach the goal.
    """
    if size <= MAX_PROVED_RANKS:
        try:
            prove_schedule(schedule, size, goal=GOALS[goal_name])
        except ScheduleError as error:
            raise Refused(
                f"{schedule} is no {goal_name} of {size} ranks: {error}; correct the schedule"
            ) from None


def _is_deadlock_free(schedule: Schedule, size: int, send_mode: SendMode) -> bool:
    try:
        interpret_schedule(schedule.program, size, NoContent(), send_mode)
    except Deadlock:
        return False
    return True


class NoContent:
    """Messages without content, for a check of deadlocks only."""

    def read(self, rank: int, send: Send) -> None: ...

    def write(self, rank: int, recv: Recv, payload: None) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class Contributions:
    """An interpretation in which every slot holds a set of ranks, as bits.

    Attributes:
        goal: The goal.

        lengths: The elements of each slot.

        slots: The slots of each rank.

        sent_elements: The elements that each rank has sent.

        action_counts: The sends and Computes of each rank.

        rounds: The counter of rounds.

        messages: The number of messages.

        scratch: The elements of scratch of a rank, at most.

        last_received: For each (rank, slot), the round of the last Recv, and the Recv.

        overwritten: The (bits, slot, rank, round, Recv) of each loss of bits.
    """

    goal: Goal
    lengths: dict[Slot, int]
    slots: list[SlotBits]
    sent_elements: list[int]
    action_counts: list[int]
    rounds: RoundCounter
    messages: int = 0
    scratch: int = 0
    last_received: dict[tuple[int, Slot], tuple[int, Recv]] = field(default_factory=dict)
    overwritten: list[tuple[int, Slot, int, int, Recv]] = field(default_factory=list)

    @classmethod
    def build(
        cls, schedule: Schedule, size: int, length: int | Mapping[Slot, int], goal: Goal
    ) -> Contributions:
        """Return the contributions before the first action.

        Args:
            schedule: The schedule.
            size: The number of ranks.
            length: The elements of the vector, or of every slot by name.
            goal: The goal.
        """
        lengths = compute_slot_lengths(schedule, size, length)
        slots = [dict.fromkeys(lengths, 0) | each for each in goal.initial_slots(schedule, size)]
        return cls(goal, lengths, slots, [0] * size, [0] * size, RoundCounter(size))

    def _list_known_parts(self, rank: int, slot: Slot) -> list[Slot]:
        parts = list(expand_slot(slot))
        if any(part not in self.lengths for part in parts):
            known = list(self.lengths)
            raise ScheduleError(
                f"rank {rank} uses slot {format_slot(slot)}; the vector has slots {known[0]} to "
                f"{known[-1]} (round {self.rounds.current[rank]})"
            )
        return parts

    def _count_action(self, rank: int) -> None:
        """Count a send or a Compute; raise if a rank never ends. Each receive needs a send."""
        self.action_counts[rank] += 1
        size = len(self.slots)
        if self.action_counts[rank] > MAX_SENDS_PER_PEER * size + 2 * size * len(self.lengths):
            raise ScheduleError(
                f"rank {rank}'s program does not end: it has sent {self.action_counts[rank]} "
                f"messages, and continues (round {self.rounds.current[rank]})"
            )

    def read(self, rank: int, send: Send) -> list[int]:
        """Return the bits of the parts that a message carries."""
        self._count_action(rank)
        parts = self._list_known_parts(rank, send.slot)
        self.messages += 1
        self.sent_elements[rank] += sum(self.lengths[part] for part in parts)
        return [self.slots[rank][part] for part in parts]

    def write(self, rank: int, recv: Recv, payload: list[int]) -> None:
        """Add or overwrite the bits of a message; refuse a contribution that is added twice."""
        parts = self._list_known_parts(rank, recv.slot)
        own_slots = self.slots[rank]
        now = self.rounds.current[rank]
        for part, contributions in zip(parts, payload, strict=True):
            if recv.add and (twice := own_slots[part] & contributions):
                raise ScheduleError(
                    f"rank {rank} adds {self._describe_lowest_bit(twice)} to slot {part} twice, in "
                    f"round {now} ({recv})"
                )
            if not recv.add and (lost := own_slots[part] & ~contributions):
                self.overwritten.append((lost, part, rank, now, recv))
            own_slots[part] = contributions | own_slots[part] if recv.add else contributions
            self.last_received[rank, part] = now, recv
        if recv.add:
            self.scratch = max(self.scratch, sum(self.lengths[part] for part in parts))

    def compute(self, rank: int, action: Compute) -> None:
        """Apply a Compute to the slots of a rank, if the goal allows that."""
        self._count_action(rank)
        if self.goal.compute is None:
            raise ScheduleError(
                f"rank {rank} computes {action.what!r} on slot {format_slot(action.at)}: an "
                "exchange only adds; the mean is taken once, after it (round "
                f"{self.rounds.current[rank]})"
            )
        self.goal.compute(rank, action, self.slots[rank])

    def check_final_slots(self, final_slots: list[SlotBits]) -> None:
        """Check that every rank ends with what it should, and no more.

        Args:
            final_slots: What the slots of each rank should hold.

        Raises:
            ScheduleError: If a contribution is missing, or does not belong in a slot.
        """
        for rank, expected in enumerate(final_slots):
            for slot, contributions in expected.items():
                held = self.slots[rank][slot]
                if lost := contributions & ~held:
                    raise ScheduleError(
                        f"rank {rank} ends without {self._describe_lowest_bit(lost)} in slot "
                        f"{slot}: {self._explain_slot(rank, slot, lost & -lost)}"
                    )
                if surplus := held & ~contributions:
                    raise ScheduleError(
                        f"rank {rank} ends with {self._describe_lowest_bit(surplus)} in slot "
                        f"{slot}, where it does not belong: {self._explain_slot(rank, slot)}"
                    )

    def _explain_slot(self, rank: int, slot: Slot, lost: int = 0) -> str:
        """Return what came into a slot last, and which rank first overwrote the missing bits."""
        explanation = "it never takes that slot"
        if (rank, slot) in self.last_received:
            explanation = "it takes that slot for the last time in round {} ({})".format(
                *self.last_received[rank, slot]
            )
        for bits, part, victim, now, recv in self.overwritten:
            if part == slot and bits & lost:
                return (
                    f"{explanation}; rank {victim} wrote over it in round {now} ({recv}), where "
                    "add=True would have added"
                )
        return explanation

    def _describe_lowest_bit(self, bits: int) -> str:
        """Return what the lowest of some bits stands for."""
        return self.goal.describe_bit((bits & -bits).bit_length() - 1)
