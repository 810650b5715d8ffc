"""Every all-reduce is proved at every size; its messages are counted, and it is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import chain, product, zip_longest
from textwrap import dedent

import pytest
from forward_pipeline import Forwards

from paragrad.errors import Refused
from paragrad.executors.interpreter import interpret_schedule
from paragrad.executors.proof import FIRST_HALF, SECOND_HALF, prove_schedule
from paragrad.executors.text_drawing import draw_text
from paragrad.planner.cost_formulas import compute_exchange_cost
from paragrad.schedules.actions import (
    Collective,
    Compute,
    Program,
    Recv,
    Send,
    expand_slot,
    split_evenly,
)
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.compose import ComposedAllReduce
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree, find_double_tree_relatives
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import LEVEL_ALGORITHMS, TwoLevel

pytestmark = pytest.mark.pure

SMALL = [*range(1, 18), 24]
SIZES = [
    *SMALL,
    *(pytest.param(size, marks=pytest.mark.table) for size in (*range(18, 24), *range(25, 34), 64)),
]
SCHEDULES: list[ComposedAllReduce] = [
    Ring(),
    Ring(blocking=True),
    RingAsync(),
    RingAsync(3),
    Tree(),
    Butterfly(),
    Star(),
    Direct(),
    Halving(1),
    Halving(),
    DoubleTree(),
    DoubleTree(3),
]
TWO_LEVELS = [
    TwoLevel(inside(), across(), group=3)
    for inside, across in product(LEVEL_ALGORITHMS, LEVEL_ALGORITHMS)
]


def dedent_lines(text: str) -> str:
    return dedent(text).strip("\n")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_schedule_is_proved_at_every_size_and_length(
    schedule: ComposedAllReduce, size: int
) -> None:
    for length in (0, 1, size - 1, size, 1000) if size < 9 else (1, 1000):
        proof = prove_schedule(schedule, size, length)
        # Each edge of both trees is used up and down; a rank adds one part at a time.
        if isinstance(schedule, DoubleTree):
            assert proof.messages == 4 * (size - 1) * schedule.count_segments()
            assert proof.scratch == (-(-length // schedule.parts(size)) if size > 1 else 0)
        else:
            # If messages are posted in groups, as NCCL requires, the other schedules do not hang.
            assert proof.grouped
            form = compute_exchange_cost(schedule, size, length)
            assert proof.messages == form.messages
            assert (
                proof.scratch == form.scratch
                if length % schedule.parts(size) == 0
                else proof.scratch <= form.scratch
            )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 16])
def test_both_halves_are_proved_and_form_the_exchange(
    schedule: ComposedAllReduce, size: int
) -> None:
    first, second = schedule.build_halves()
    one = prove_schedule(first, size, 960, FIRST_HALF)
    other = prove_schedule(second, size, 960, SECOND_HALF)
    assert one.messages + other.messages == prove_schedule(schedule, size, 960).messages


@dataclass(frozen=True)
class InTurn:
    """A schedule in which a send ends before the next one to another rank begins.

    This is the worst case for long messages in the transport.
    """

    schedule: Collective

    def parts(self, size: int) -> int:
        return self.schedule.parts(size)

    def program(self, rank: int, size: int) -> Program:
        actions = list(self.schedule.program(rank, size))
        for action, following in zip_longest(actions, actions[1:]):
            waits = (
                isinstance(action, Send)
                and isinstance(following, Send)
                and action.to != following.to
            )
            yield replace(action, wait=True) if waits else action  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedule",
    [
        *SCHEDULES,
        *(
            pytest.param(each, marks=pytest.mark.table if place % 3 else ())
            for place, each in enumerate(TWO_LEVELS)
        ),
    ],
    ids=str,
)
def test_serialized_sends_do_not_deadlock(schedule: Collective) -> None:
    """The transport sends long messages one after the other.

    A schedule that was proved without this could hang, so all are proved with it too.
    """
    for size in (3, 6, 9, 12) if isinstance(schedule, TwoLevel) else SMALL:
        assert (
            prove_schedule(InTurn(schedule), size, size).messages
            == prove_schedule(schedule, size, size).messages
        )


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", TWO_LEVELS, ids=str)
def test_two_levels_of_any_two_algorithms(schedule: TwoLevel) -> None:
    for size in (3, 6, 15):
        for length in (0, 1, 100):
            proof = prove_schedule(schedule, size, length)
            assert proof.grouped or DoubleTree in (type(schedule.inside), type(schedule.across))


@pytest.mark.parametrize(("group", "size"), [(1, 5), (2, 8), (4, 8), (8, 8), (4, 32), (5, 20)])
def test_two_levels_of_any_group_size(group: int, size: int) -> None:
    for inside, across in ((Ring(), Ring()), (Halving(), Butterfly()), (Tree(), Direct())):
        prove_schedule(TwoLevel(inside, across, group=group), size, 1000)


def test_groups_must_cover_all_ranks() -> None:
    with pytest.raises(
        Refused, match="groups of 3 do not make up 8 ranks; give a group that divides 8"
    ):
        TwoLevel(group=3).parts(8)
    with pytest.raises(Refused, match="say how many ranks a group has"):
        TwoLevel().parts(8)
    with pytest.raises(Refused, match="reproducible belongs to the whole exchange"):
        TwoLevel(Ring(reproducible=True))


@pytest.mark.parametrize("size", SMALL[2:])
def test_rendezvous_sends_deadlock_in_send_first_orders(size: int) -> None:
    """Long blocking sends of MPI wait for their receiver.

    Most schedules deadlock then; only those with a suitable order of messages do not.
    """
    free = {
        schedule: prove_schedule(schedule, size, 100).rendezvous
        for schedule in SCHEDULES
        if not isinstance(schedule, DoubleTree)
    }
    assert {schedule for schedule, survives in free.items() if survives} == {
        Ring(blocking=True),
        Tree(),
        Star(),
    }


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_ring_sends_the_optimal_number_of_bytes(size: int) -> None:
    assert prove_schedule(Ring(), size, 16 * size).sent == 2 * (size - 1) * 16  # 2 (p-1)/p n
    assert prove_schedule(RingAsync(4), size, 16 * size).sent == 2 * (size - 1) * 16


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_world_of_one_sends_nothing(schedule: Collective) -> None:
    assert list(schedule.program(0, 1)) == []


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ring_sends_to_neighbours_only(size: int) -> None:
    for rank in range(size):
        program = list(Ring().program(rank, size))
        assert {action.to for action in program if isinstance(action, Send)} == {(rank + 1) % size}
        assert {action.frm for action in program if isinstance(action, Recv)} == {(rank - 1) % size}


@pytest.mark.parametrize("size", SIZES)
def test_double_trees_share_the_work(size: int) -> None:
    """The two spanning trees have logarithmic depth, and no rank has more than two children.

    A rank that has children in one tree is a leaf in the other. Only rank 0 of an odd number of
    ranks is an exception.
    """
    families = [
        [find_double_tree_relatives(rank, size, tree) for rank in range(size)] for tree in (0, 1)
    ]
    for tree in families:
        assert sorted(child for _, children in tree for child in children) == [
            rank for rank, (parent, _) in enumerate(tree) if parent is not None
        ]
        assert all(
            tree[child][0] == rank for rank, (_, children) in enumerate(tree) for child in children
        )

        def compute_depth(rank: int, tree: list[tuple[int | None, list[int]]] = tree) -> int:
            parent = tree[rank][0]
            return 0 if parent is None else 1 + compute_depth(parent)

        assert max(map(compute_depth, range(size))) <= (size - 1).bit_length()
    inner = [[rank for rank in range(size) if tree[rank][1]] for tree in families]
    assert not set(inner[0]) & set(inner[1]) - ({0} if size % 2 else set())
    assert all(len(families[0][rank][1]) + len(families[1][rank][1]) <= 2 for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_tree_has_logarithmic_depth(size: int) -> None:
    parents = {
        rank: next(
            (action.to for action in Tree().program(rank, size) if isinstance(action, Send)), None
        )
        for rank in range(1, size)
    }

    def compute_depth(rank: int) -> int:
        return 0 if rank == 0 else 1 + compute_depth(parents[rank])  # type: ignore[arg-type]

    assert max(map(compute_depth, range(size))) <= (size - 1).bit_length()


class Numbers:
    """The simplest values for the interpreter: every slot holds a list of numbers."""

    def __init__(self, vectors: list[list[float]], parts: int) -> None:
        cuts = split_evenly(len(vectors[0]), parts)
        self.held = [[vector[cut.start : cut.stop] for cut in cuts] for vector in vectors]

    def read(self, rank: int, send: Send) -> list[list[float]]:
        return [self.held[rank][part] for part in expand_slot(send.slot)]  # type: ignore[index]

    def write(self, rank: int, recv: Recv, payload: list[list[float]]) -> None:
        slots = self.held[rank]
        for part, new in zip(expand_slot(recv.slot), payload, strict=True):
            slots[part] = (
                [a + b for a, b in zip(slots[part], new, strict=True)] if recv.add else new
            )  # type: ignore[index]

    def compute(self, rank: int, action: Compute) -> None:
        raise AssertionError(action)


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES, TwoLevel(group=1), TwoLevel(Halving(), Direct(), 1)], ids=str
)
@pytest.mark.parametrize("size", [2, 3, 6, 7, 16])
def test_sums_are_exact_and_replicas_bit_equal(schedule: Collective, size: int) -> None:
    draw_ = random.Random(size)
    whole = [[float(draw_.randrange(-(10**6), 10**6)) for _ in range(37)] for _ in range(size)]
    real = [
        [draw_.gauss(0, 1) * 10.0 ** draw_.randrange(-8, 8) for _ in range(37)] for _ in range(size)
    ]
    for vectors in (whole, real):
        numbers = Numbers(vectors, schedule.parts(size))
        interpret_schedule(schedule.program, size, numbers)
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
    (Direct(), 3): """
        0 | >1:1 <2:0+   >2:2 <1:0+   >1:0 <2:2   >2:0 <1:1
        1 | >2:2 <0:1+   >0:0 <2:1+   >2:1 <0:0   >0:1 <2:2
        2 | >0:0 <1:2+   >1:1 <0:2+   >0:2 <1:1   >1:2 <0:0""",
    (Halving(1), 4): """
        0 | >1:2-3 <1:0-1+   >2:1 <2:0+   >2:0 <2:1   >1:0-1 <1:2-3
        1 | >0:0-1 <0:2-3+   >3:3 <3:2+   >3:2 <3:3   >0:2-3 <0:0-1
        2 | >3:2-3 <3:0-1+   >0:0 <0:1+   >0:1 <0:0   >3:0-1 <3:2-3
        3 | >2:0-1 <2:2-3+   >1:2 <1:3+   >1:3 <1:2   >2:2-3 <2:0-1""",
    (Halving(2), 2): """
        0 | >1:2 <1:0+   >1:3 <1:1+   >1:0 <1:2   >1:1 <1:3
        1 | >0:0 <0:2+   >0:1 <0:3+   >0:2 <0:0   >0:3 <0:1""",
    (TwoLevel(across=Butterfly(), group=2), 4): """
        0 | >1:0 <1:1+   >2:1 <2:1+   >1:1 <1:0
        1 | >0:1 <0:0+   >3:0 <3:0+   >0:0 <0:1
        2 | >3:0 <3:1+   >0:1 <0:1+   >3:1 <3:0
        3 | >2:1 <2:0+   >1:0 <1:0+   >2:0 <2:1""",
    (Butterfly(), 5): """
        0 | <4:0+        >1:0 <1:0+   >2:0 <2:0+   >4:0
        1 | >0:0         <0:0+        >3:0 <3:0+
        2 | >3:0 <3:0+   >0:0         <0:0+
        3 | >2:0 <2:0+   >1:0         <1:0+
        4 | >0:0                                   <0:0""",
}


@pytest.mark.parametrize(("schedule", "size"), DRAWN, ids=str)
def test_schedule_drawing(schedule: Collective, size: int) -> None:
    print(draw_text(schedule, size))
    assert draw_text(schedule, size) == dedent_lines(DRAWN[schedule, size])


def test_pipeline_drawing() -> None:
    """The same drawing works for schedules whose slots have names instead of numbers."""
    assert draw_text(Forwards(2), 3) == dedent_lines("""
        0 | Fx0   >1:x0   Fx1   >1:x1
        1 |       <0:x0   Fx0   >2:x0 <0:x1   Fx1   >2:x1
        2 |                     <1:x0         Fx0   <1:x1   Fx1""")
