"""The wire: schedules over real sockets, with different vectors on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from paragrad.errors import RankFailed
from paragrad.launching import Ranks
from paragrad.players.proof import prove
from paragrad.players.wire import Play, all_reduce
from paragrad.schedules.actions import AllReduce, Recv, Send
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import TwoLevel
from paragrad.world import World

SCHEDULES: list[AllReduce] = [Ring(), Ring(blocking=True), RingAsync(), RingAsync(5), Tree(), Butterfly(), Star(), Direct(),
                              Halving(1), Halving(3), DoubleTree(2), TwoLevel(Halving(), Direct(), 1)]
LENGTHS = (0, 1, 2, 3, 4, 5, 1000, 100_003)
DTYPES = (torch.float32, torch.float64, torch.int64)


def vector(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, no two ranks alike."""
    return ((torch.arange(length) * (rank + 3) + 17 * rank) % 1009 - 500).to(dtype)


def summed(world: World, schedule: AllReduce) -> list[tuple[torch.Tensor, int]]:
    results = []
    for length, dtype in itertools.product(LENGTHS, DTYPES):
        mine = vector(world.rank, length, dtype)
        sent = all_reduce(schedule, mine, world)
        results.append((mine, sent))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_sums_are_exact_at_every_length(pool: Ranks, schedule: AllReduce, size: int) -> None:
    answers = pool.run(summed, schedule, size=size)
    for place, (length, dtype) in enumerate(itertools.product(LENGTHS, DTYPES)):
        expected = sum(vector(rank, length, dtype) for rank in range(size))
        for answer in answers:
            assert torch.equal(answer[place][0], expected)          # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [TwoLevel(group=2), TwoLevel(Butterfly(), Star(), 2), TwoLevel(Tree(), Halving(2), 2)],
                         ids=str)
def test_sums_of_two_levels_are_exact(pool: Ranks, schedule: AllReduce) -> None:
    test_sums_are_exact_at_every_length(pool, schedule, 4)


def test_the_bytes_sent_are_what_the_proof_counts(pool: Ranks) -> None:
    for schedule in SCHEDULES:
        answers = pool.run(summed, schedule, size=3)
        place = list(itertools.product(LENGTHS, DTYPES)).index((100_003, torch.float32))
        assert max(answer[place][1] for answer in answers) == 4 * prove(schedule, 3, 100_003).sent


def many_rounds(world: World) -> torch.Tensor:
    """The butterfly writes the vector it is sending: a wire that does not wait for its sends loses numbers."""
    total = torch.zeros(50_000, dtype=torch.float64)
    for turn in range(30):
        mine = vector(world.rank + turn, 50_000, torch.float64)
        all_reduce(Butterfly(), mine, world)
        total += mine
    return total


def test_a_slot_is_not_written_while_it_is_sent(pool: Ranks) -> None:
    expected = sum(vector(rank + turn, 50_000, torch.float64) for rank in range(4) for turn in range(30))
    for total in pool.run(many_rounds, size=4):
        assert torch.equal(total, expected)                 # type: ignore[arg-type]


def again_and_again(world: World) -> bool:
    for _ in range(50):
        mine = vector(world.rank, 60, torch.float64)
        all_reduce(Ring(blocking=True), mine, world)
    return True


def test_a_rendezvous_send_is_waited_for_once(pool: Ranks) -> None:
    """A blocking ring hung now and then: the wire waited for a send with wait=True, kept its Work, and waited once more
    when the slot was written again; gloo waits for ever on a send that was waited for before."""
    assert all(pool.run(again_and_again, size=2))


def lonely(world: World) -> None:
    actions = [Recv(1, 0)] if world.rank == 0 else [Send(0, 0)] if world.rank > 1 else []
    Play(actions, torch.zeros(4), 1, world).run()
    if world.rank == 1:
        Play([Recv(0, 0)], torch.zeros(4), 1, world).run()


def test_a_hang_ends_with_the_schedule_around_it(pool: Ranks) -> None:
    """Both wait for the other: the timeout ends it, and shows where in the program the rank stood."""
    with pytest.raises(RankFailed) as caught:
        pool.run(lonely, size=2, timeout=1.0)
    assert "[<" in caught.value.message
    assert f"{caught.value.rank} | " in caught.value.message
