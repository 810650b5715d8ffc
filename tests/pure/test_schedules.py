"""Every all-reduce, at every size: proved, counted, drawn."""

from __future__ import annotations

import random
from itertools import chain
from math import ceil, log2
from textwrap import dedent

import pytest

from paragrad.players.draw import draw
from paragrad.players.proof import prove
from paragrad.players.walk import walk
from paragrad.schedules.actions import AllReduce, Compute, Recv, Send, evenly
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree

SIZES = range(1, 34)
SCHEDULES: list[AllReduce] = [Ring(), Ring(blocking=True), RingAsync(), RingAsync(3), Tree(), Butterfly(), Star()]


def lines(text: str) -> str:
    return dedent(text).strip("\n")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_proved_at_every_size_and_length(schedule: AllReduce, size: int) -> None:
    for length in (0, 1, size - 1, size, 1000):
        proof = prove(schedule, size, length)
        assert proof.grouped                        # posted in groups, as NCCL wants it, none hangs
        assert proof.messages == messages(schedule, size)
        assert proof.scratch == (scratch(schedule, size, length) if size > 1 else 0)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
def test_rendezvous_sends_hang_where_everybody_sends_first(size: int) -> None:
    """What blocking MPI sends of long messages do: only the orders made for them survive."""
    free = {schedule: prove(schedule, size, 100).rendezvous for schedule in SCHEDULES}
    assert free == {Ring(): False, Ring(blocking=True): True, RingAsync(): False, RingAsync(3): False, Tree(): True,
                    Butterfly(): False, Star(): True}


def messages(schedule: AllReduce, size: int) -> int:
    """How many messages there are in all, by the literature."""
    if isinstance(schedule, Ring):
        return 2 * size * (size - 1)
    if isinstance(schedule, RingAsync):
        return 2 * size * (size - 1) * schedule.count()
    if isinstance(schedule, Tree | Star):
        return 2 * (size - 1)
    inner = 2 ** int(log2(size))
    return inner * int(log2(inner)) + 2 * (size - inner)


def scratch(schedule: AllReduce, size: int, length: int) -> int:
    return ceil(length / schedule.parts(size))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_bytes_of_the_ring_are_optimal(size: int) -> None:
    assert prove(Ring(), size, 16 * size).sent == 2 * (size - 1) * 16       # 2 (p-1)/p n
    assert prove(RingAsync(4), size, 16 * size).sent == 2 * (size - 1) * 16


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_world_of_one_sends_nothing(schedule: AllReduce) -> None:
    assert list(schedule.program(0, 1)) == []


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_ring_is_a_ring(size: int) -> None:
    for rank in range(size):
        program = list(Ring().program(rank, size))
        assert {action.to for action in program if isinstance(action, Send)} == {(rank + 1) % size}
        assert {action.frm for action in program if isinstance(action, Recv)} == {(rank - 1) % size}


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_has_logarithmic_depth(size: int) -> None:
    parents = {rank: next((action.to for action in Tree().program(rank, size) if isinstance(action, Send)), None)
               for rank in range(1, size)}

    def depth(rank: int) -> int:
        return 0 if rank == 0 else 1 + depth(parents[rank])                 # type: ignore[arg-type]

    assert max(map(depth, range(size))) <= (size - 1).bit_length()


class Numbers:
    """The walk's plainest meaning: every slot holds a list of numbers."""

    def __init__(self, vectors: list[list[float]], parts: int) -> None:
        cuts = evenly(len(vectors[0]), parts)
        self.held = [[vector[cut.start:cut.stop] for cut in cuts] for vector in vectors]

    def read(self, rank: int, send: Send) -> list[float]:
        return list(self.held[rank][send.slot])     # type: ignore[index]

    def write(self, rank: int, recv: Recv, payload: list[float]) -> None:
        slots = self.held[rank]
        slots[recv.slot] = [a + b for a, b in zip(slots[recv.slot], payload, strict=True)] if recv.add else payload  # type: ignore[index]

    def compute(self, rank: int, action: Compute) -> None:
        raise AssertionError(action)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 6, 7, 16])
def test_numbers_add_up_and_replicas_are_bit_equal(schedule: AllReduce, size: int) -> None:
    draw_ = random.Random(size)
    whole = [[float(draw_.randrange(-10**6, 10**6)) for _ in range(37)] for _ in range(size)]
    real = [[draw_.gauss(0, 1) * 10.0 ** draw_.randrange(-8, 8) for _ in range(37)] for _ in range(size)]
    for vectors in (whole, real):
        numbers = Numbers(vectors, schedule.parts(size))
        walk(schedule.program, size, numbers)
        results = [list(chain(*slots)) for slots in numbers.held]
        assert all(result == results[0] for result in results)
        if vectors is whole:
            assert results[0] == [sum(column) for column in zip(*whole, strict=True)]


DRAWN = {
    (Ring(), 3): """
        0 | >1:0 <2:2+   >1:2 <2:1+   >1:1 <2:0   >1:0 <2:2
        1 | >2:1 <0:0+   >2:0 <0:2+   >2:2 <0:1   >2:1 <0:0
        2 | >0:2 <1:1+   >0:1 <1:0+   >0:0 <1:2   >0:2 <1:1""",
    (Ring(blocking=True), 2): """
        0 | >1:0!   <1:1+   >1:1!   <1:0
        1 | <0:0+   >0:1!   <0:1    >0:0!""",
    (RingAsync(2), 2): """
        0 | >1:0 <1:2+   >1:1 <1:3+   >1:2 <1:0   >1:3 <1:1
        1 | >0:2 <0:0+   >0:3 <0:1+   >0:0 <0:2   >0:1 <0:3""",
    (Tree(), 4): """
        0 | <1:0+   <2:0+   >2:0   >1:0
        1 | >0:0                   <0:0
        2 | <3:0+   >0:0    <0:0   >3:0
        3 | >2:0                   <2:0""",
    (Star(), 4): """
        0 | <1:0+   <2:0+   <3:0+   >1:0   >2:0   >3:0
        1 | >0:0                    <0:0
        2 | >0:0                           <0:0
        3 | >0:0                                  <0:0""",
    (Butterfly(), 5): """
        0 | <4:0+        >1:0 <1:0+   >2:0 <2:0+   >4:0
        1 | >0:0         <0:0+        >3:0 <3:0+
        2 | >3:0 <3:0+   >0:0         <0:0+
        3 | >2:0 <2:0+   >1:0         <1:0+
        4 | >0:0                                   <0:0""",
}


@pytest.mark.parametrize(("schedule", "size"), DRAWN, ids=str)
def test_drawn(schedule: AllReduce, size: int) -> None:
    print(draw(schedule, size))
    assert draw(schedule, size) == lines(DRAWN[schedule, size])
