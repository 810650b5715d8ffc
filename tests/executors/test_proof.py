"""Sabotage: each schedule with one wrong action is refused, with a message that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from forward_pipeline import THROUGH, Forwards

from paragrad.executors.interpreter import Deadlock
from paragrad.executors.proof import (
    ALL_REDUCE,
    FIRST_HALF,
    SECOND_HALF,
    Goal,
    SlotBits,
    prove_schedule,
)
from paragrad.schedules.actions import (
    Action,
    Collective,
    Compute,
    Program,
    Recv,
    ScheduleError,
    Send,
)
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAllGather, RingAsync, RingReduceScatter
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree, TreeBroadcast, TreeReduce
from paragrad.schedules.two_level import TwoLevel

pytestmark = pytest.mark.pure

SCHEDULES: list[Collective] = [
    Ring(),
    Ring(blocking=True),
    RingAsync(3),
    Tree(),
    Butterfly(),
    Star(),
    Direct(),
    DoubleTree(2),
    Halving(1),
    Halving(2),
    TwoLevel(group=2),
    TwoLevel(Butterfly(), Star(), 2),
]


@dataclass(frozen=True)
class Sabotaged:
    """A schedule in which the program of one rank is changed."""

    schedule: Collective
    change: Callable[[list[Action]], list[Action]]
    victim: int

    def parts(self, size: int) -> int:
        return self.schedule.parts(size)

    def program(self, rank: int, size: int) -> Program:
        program = list(self.schedule.program(rank, size))
        yield from self.change(program) if rank == self.victim else program


def read_refusal(
    schedule: Collective,
    change: Callable[[list[Action]], list[Action]],
    victim: int = 1,
    size: int = 4,
) -> str:
    with pytest.raises(ScheduleError) as caught:
        prove_schedule(Sabotaged(schedule, change, victim), size, 12)
    return str(caught.value)


def find_first(program: list[Action], wanted: Callable[[Action], bool]) -> int:
    return next(place for place, action in enumerate(program) if wanted(action))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_dropped_addition_is_refused(schedule: Collective) -> None:
    def drop(program: list[Action]) -> list[Action]:
        place = find_first(program, lambda action: isinstance(action, Recv) and action.add)
        return [*program[:place], replace(program[place], add=False), *program[place + 1 :]]

    victim = 0 if isinstance(schedule, Star) else 2  # in a star, no other rank adds
    message = read_refusal(schedule, drop, victim)
    assert f"rank {victim}" in message or "without the contribution" in message
    assert "without the contribution" in message or "to take slot" in message


@pytest.mark.parametrize("schedule", [Ring(), RingAsync(3)], ids=str)
def test_swapped_message_is_refused(schedule: Collective) -> None:
    def swap(program: list[Action]) -> list[Action]:
        one, two = [place for place, action in enumerate(program) if isinstance(action, Send)][:2]
        program[one], program[two] = program[two], program[one]
        return program

    message = read_refusal(schedule, swap)
    assert "rank 2 expects slot" in message
    assert "from rank 1, which sends slot" in message


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_skipped_chunk_is_refused(schedule: Collective) -> None:
    """Sender and receiver leave out the same message, so no rank waits for it.

    Only the missing contribution shows the fault.
    """
    skipped: set[tuple[int, int]] = set()

    @dataclass(frozen=True)
    class Skipping:
        def parts(self, size: int) -> int:
            return schedule.parts(size)

        def program(self, rank: int, size: int) -> Iterator[Action]:
            source = 3
            target = next(
                action.to for action in schedule.program(3, size) if isinstance(action, Send)
            )
            kind = Send if rank == source else Recv
            left_out = False
            for action in schedule.program(rank, size):
                peer = action.to if isinstance(action, Send) else action.frm
                if (
                    rank in (source, target)
                    and not left_out
                    and isinstance(action, kind)
                    and peer in (source, target)
                ):
                    left_out = True
                    skipped.add((source, target))
                    continue
                yield action

    with pytest.raises(
        ScheduleError, match=r"rank \d ends without the contribution of rank 3 in slot \d"
    ):
        prove_schedule(Skipping(), 4, 12)
    assert skipped


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_mean_inside_an_exchange_is_refused(schedule: Collective) -> None:
    message = read_refusal(schedule, lambda program: [*program, Compute("mean", 0)])
    assert "rank 1 computes 'mean' on slot 0" in message
    assert "the mean is taken once" in message


def test_duplicate_contribution_is_refused() -> None:
    """The exchange runs twice without the mean in between: this gives the sum of sums."""

    @dataclass(frozen=True)
    class Twice:
        def parts(self, size: int) -> int:
            return 1

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield from Butterfly().program(rank, size)
            yield from Butterfly().program(rank, size)

    with pytest.raises(ScheduleError, match=r"adds the contribution of rank \d to slot 0 twice"):
        prove_schedule(Twice(), 4, 12)


def test_overwriting_a_slot_being_sent_is_refused() -> None:
    """Two ranks exchange vectors, and write the received vector over their own.

    Each rank must first know that its own vector is sent.
    """

    @dataclass(frozen=True)
    class Exchange:
        def parts(self, size: int) -> int:
            return 1

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield Send(1 - rank, 0)
            yield Recv(1 - rank, 0)

    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to take slot 0"):
        prove_schedule(Exchange(), 2, 12)


def test_computing_on_a_slot_being_sent_is_refused() -> None:
    """A Compute may write its slot, so it waits for the slot's sends, as a receive does.

    The transport always did so; the interpreter did not.
    """

    @dataclass(frozen=True)
    class Exchange:
        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield Send(1 - rank, "x")
            yield Compute("F", "x")
            yield Recv(1 - rank, "x")

    anything = Goal(
        lambda schedule, size: [{}] * size,
        lambda schedule, size: [{}] * size,
        compute=lambda *_: None,
    )
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to take slot x"):
        prove_schedule(Exchange(), 2, {"x": 1}, anything)


def test_send_in_a_blocking_order_is_refused() -> None:
    """Rank 1 receives the first message of rank 0 only after a message of rank 2.

    Rank 2 makes that message from the second message of rank 0.
    """

    @dataclass(frozen=True)
    class Exchange:
        after: bool

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield from (
                (Send(1, "x"), Send(2, "y", after=self.after)),
                (Recv(2, "y"), Recv(0, "x")),
                (Recv(0, "y"), Send(1, "y")),
            )[rank]

    anything = Goal(lambda schedule, size: [{}] * size, lambda schedule, size: [{}] * size)
    prove_schedule(Exchange(after=False), 3, {"x": 1, "y": 1}, anything)
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to take slot x"):
        prove_schedule(Exchange(after=True), 3, {"x": 1, "y": 1}, anything)


def test_deadlock_shows_the_waiting_ranks() -> None:
    @dataclass(frozen=True)
    class Waiting:
        def parts(self, size: int) -> int:
            return size

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield Recv((rank + 1) % size, 0, add=True)
            yield Send((rank - 1) % size, 0)

    with pytest.raises(Deadlock) as caught:
        prove_schedule(Waiting(), 3, 12)
    assert "rank 0 waits for slot 0 from rank 1" in str(caught.value)
    assert "0 | [<1:0+]" in str(caught.value)


def test_unreceived_message_is_refused() -> None:
    message = read_refusal(Tree(), lambda program: [*program, Send(0, 0)])
    assert "rank 0 never receives slot 0 that rank 1 sends to it" in message


def test_missing_slot_is_refused() -> None:
    message = read_refusal(Tree(), lambda program: [Send(0, 7), *program])
    assert "rank 1 uses slot 7" in message


def test_reduce_and_broadcast_have_their_own_goals() -> None:
    """A reduce alone is no all-reduce, and a broadcast is no reduce.

    The message names a slot that no rank owns.
    """
    assert (
        prove_schedule(RingReduceScatter(), 4, 12, FIRST_HALF).sent
        == prove_schedule(RingAllGather(), 4, 12, SECOND_HALF).sent
        == 9
    )
    with pytest.raises(
        ScheduleError, match="rank 0 ends without the contribution of rank 1 in slot 0"
    ):
        prove_schedule(RingReduceScatter(), 4, 12)
    with pytest.raises(
        ScheduleError, match="rank 0 ends without the contribution of rank 1 in slot 0"
    ):
        prove_schedule(TreeBroadcast(), 4, 12, FIRST_HALF)
    with pytest.raises(
        ScheduleError, match="rank 1 ends without the contribution of rank 0 in slot 0"
    ):
        prove_schedule(TreeReduce(), 4, 12, SECOND_HALF)

    @dataclass(frozen=True)
    class Nobodys(TreeReduce):
        def owns(self, rank: int, size: int) -> range:
            return range(0)

    with pytest.raises(ScheduleError, match="no rank owns slot 0"):
        prove_schedule(Nobodys(), 4, 12, FIRST_HALF)


def test_user_defined_goal_is_proved() -> None:
    """The goal is an all-gather: a slot gets one contribution, and no other one."""

    def give_own_slots(schedule: Collective, size: int) -> list[SlotBits]:
        return [{rank: 1 << rank} for rank in range(size)]

    def give_all_slots(schedule: Collective, size: int) -> list[SlotBits]:
        return [{part: 1 << part for part in range(size)} for _ in range(size)]

    @dataclass(frozen=True)
    class Handing:
        add: bool = False

        def parts(self, size: int) -> int:
            return size

        def program(self, rank: int, size: int) -> Program:
            for hop in range(size - 1):
                yield Send((rank + 1) % size, (rank - hop) % size)
                yield Recv((rank - 1) % size, (rank - hop - 1) % size)
            if self.add:
                yield Send((rank + 1) % size, rank)
                yield Recv((rank - 1) % size, (rank - 1) % size, add=True)

    all_gather = Goal(give_own_slots, give_all_slots)
    assert prove_schedule(Handing(), 5, 20, all_gather).sent == 4 * 4
    with pytest.raises(
        ScheduleError, match="rank 0 adds the contribution of rank 4 to slot 4 twice"
    ):
        prove_schedule(Handing(add=True), 5, 20, all_gather)
    with pytest.raises(
        ScheduleError,
        match=r"rank 0 ends with the contribution of rank 1 in slot 0, where it does not belong",
    ):
        prove_schedule(
            Ring(),
            3,
            3,
            Goal(lambda schedule, size: ALL_REDUCE.initial_slots(schedule, size), give_all_slots),
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pipeline_is_proved_by_its_goal(size: int) -> None:
    schedule = Forwards(3)
    assert prove_schedule(schedule, size, schedule.slots(10), THROUGH).messages == 3 * (size - 1)

    @dataclass(frozen=True)
    class Early(Forwards):
        def program(self, rank: int, size: int) -> Program:
            first, *rest = super().program(rank, size)
            return iter([*rest, first])

    if size > 1:
        with pytest.raises(ScheduleError, match="stage 1 does not get x0 from the stage before it"):
            prove_schedule(Early(3), size, schedule.slots(10), THROUGH)
        with pytest.raises(
            ScheduleError, match=f"rank {size - 1} ends without the forward of stage 0 in slot x2"
        ):
            prove_schedule(
                Forwards(2),
                size,
                schedule.slots(10),
                replace(THROUGH, final_slots=lambda _, size: THROUGH.final_slots(schedule, size)),
            )
