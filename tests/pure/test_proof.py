"""Sabotage: schedules that are wrong in one action, each refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from paragrad.players.proof import prove, prove_half
from paragrad.players.walk import Deadlock
from paragrad.schedules.actions import Action, AllReduce, Compute, Program, Recv, ScheduleError, Send
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAllGather, RingAsync, RingReduceScatter
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree, TreeBroadcast, TreeReduce
from paragrad.schedules.two_level import TwoLevel

SCHEDULES: list[AllReduce] = [Ring(), Ring(blocking=True), RingAsync(3), Tree(), Butterfly(), Star(), Direct(), DoubleTree(2),
                              Halving(1), Halving(2), TwoLevel(group=2), TwoLevel(Butterfly(), Star(), 2)]


@dataclass(frozen=True)
class Sabotaged:
    """A schedule in which the program of one rank was changed."""
    schedule: AllReduce
    change: Callable[[list[Action]], list[Action]]
    victim: int

    def parts(self, size: int) -> int:
        return self.schedule.parts(size)

    def program(self, rank: int, size: int) -> Program:
        program = list(self.schedule.program(rank, size))
        yield from self.change(program) if rank == self.victim else program


def refused(schedule: AllReduce, change: Callable[[list[Action]], list[Action]], victim: int = 1, size: int = 4) -> str:
    with pytest.raises(ScheduleError) as caught:
        prove(Sabotaged(schedule, change, victim), size, 12)
    return str(caught.value)


def first(program: list[Action], wanted: Callable[[Action], bool]) -> int:
    return next(place for place, action in enumerate(program) if wanted(action))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_an_add_dropped(schedule: AllReduce) -> None:
    def drop(program: list[Action]) -> list[Action]:
        place = first(program, lambda action: isinstance(action, Recv) and action.add)
        return [*program[:place], replace(program[place], add=False), *program[place + 1:]]      # type: ignore[call-arg]
    victim = 0 if isinstance(schedule, Star) else 2                 # in a star nobody else adds
    message = refused(schedule, drop, victim)
    assert f"rank {victim}" in message or "without the contribution" in message
    assert "without the contribution" in message or "to take slot" in message


@pytest.mark.parametrize("schedule", [Ring(), RingAsync(3)], ids=str)
def test_a_message_swapped(schedule: AllReduce) -> None:
    def swap(program: list[Action]) -> list[Action]:
        one, two = [place for place, action in enumerate(program) if isinstance(action, Send)][:2]
        program[one], program[two] = program[two], program[one]
        return program
    message = refused(schedule, swap)
    assert "rank 2 expects slot" in message
    assert "from rank 1, which sends slot" in message


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_chunk_skipped(schedule: AllReduce) -> None:
    """Both ends agree to leave a message out, so nothing hangs: only the contributions tell."""
    skipped: set[tuple[int, int]] = set()

    @dataclass(frozen=True)
    class Skipping:
        def parts(self, size: int) -> int:
            return schedule.parts(size)

        def program(self, rank: int, size: int) -> Iterator[Action]:
            source, target = 3, next(action.to for action in schedule.program(3, size) if isinstance(action, Send))
            kind = Send if rank == source else Recv
            left_out = False
            for action in schedule.program(rank, size):
                peer = action.to if isinstance(action, Send) else action.frm        # type: ignore[union-attr]
                if rank in (source, target) and not left_out and isinstance(action, kind) and peer in (source, target):
                    left_out = True
                    skipped.add((source, target))
                    continue
                yield action

    with pytest.raises(ScheduleError, match=r"rank \d ends without the contribution of rank 3 in slot \d"):
        prove(Skipping(), 4, 12)
    assert skipped


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_mean_taken_inside(schedule: AllReduce) -> None:
    message = refused(schedule, lambda program: [*program, Compute("mean", 0)])
    assert "rank 1 computes 'mean' on slot 0" in message
    assert "the mean is taken once" in message


def test_a_contribution_added_twice() -> None:
    """The exchange done a second time without the mean between: the sum of sums."""
    @dataclass(frozen=True)
    class Twice:
        def parts(self, size: int) -> int:
            return 1

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield from Butterfly().program(rank, size)
            yield from Butterfly().program(rank, size)

    with pytest.raises(ScheduleError, match=r"adds the contribution of rank \d to slot 0 twice"):
        prove(Twice(), 4, 12)


def test_a_slot_overwritten_while_open() -> None:
    """Two ranks give each other their vector and write the other's over their own: each must first know its own sent."""
    @dataclass(frozen=True)
    class Exchange:
        def parts(self, size: int) -> int:
            return 1

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield Send(1 - rank, 0)
            yield Recv(1 - rank, 0)

    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to take slot 0"):
        prove(Exchange(), 2, 12)


def test_a_deadlock_shows_who_waits_for_whom() -> None:
    @dataclass(frozen=True)
    class Waiting:
        def parts(self, size: int) -> int:
            return size

        def program(self, rank: int, size: int) -> Iterator[Action]:
            yield Recv((rank + 1) % size, 0, add=True)
            yield Send((rank - 1) % size, 0)

    with pytest.raises(Deadlock) as caught:
        prove(Waiting(), 3, 12)
    assert "rank 0 waits for slot 0 from rank 1" in str(caught.value)
    assert "0 | [<1:0+]" in str(caught.value)


def test_a_message_nobody_takes() -> None:
    message = refused(Tree(), lambda program: [*program, Send(0, 0)])
    assert "rank 0 never receives slot 0 that rank 1 sends to it" in message


def test_a_slot_that_is_not_there() -> None:
    message = refused(Tree(), lambda program: [Send(0, 7), *program])
    assert "rank 1 uses slot 7" in message


def test_halves_are_proved_for_what_they_are() -> None:
    """A reduce alone is no all-reduce, a broadcast is no reduce, and what nobody owns is named."""
    assert prove_half(RingReduceScatter(), 4, 12, "reduce").sent == prove_half(RingAllGather(), 4, 12, "broadcast").sent == 9
    with pytest.raises(ScheduleError, match="rank 0 ends without the contribution of rank 1 in slot 0"):
        prove(RingReduceScatter(), 4, 12)
    with pytest.raises(ScheduleError, match="rank 0 ends without the contribution of rank 1 in slot 0"):
        prove_half(TreeBroadcast(), 4, 12, "reduce")
    with pytest.raises(ScheduleError, match="rank 1 ends without the contribution of rank 0 in slot 0"):
        prove_half(TreeReduce(), 4, 12, "broadcast")

    @dataclass(frozen=True)
    class Nobodys(TreeReduce):
        def owns(self, rank: int, size: int) -> range:
            return range(0)

    with pytest.raises(ScheduleError, match="nobody owns slot 0"):
        prove_half(Nobodys(), 4, 12, "reduce")
