"""The transport: schedules over real sockets, with different vectors on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forward_pipeline import Forwards

from paragrad.errors import RankFailed
from paragrad.executors.interpreter import Deadlock, interpret_schedule
from paragrad.executors.proof import prove_schedule
from paragrad.executors.transport import (
    LONG_MESSAGE_BYTES,
    SCRATCH_BYTES,
    ProgramRun,
    Traffic,
    run_all_reduce,
)
from paragrad.launch import Launcher
from paragrad.runtime.world import World
from paragrad.schedules.actions import (
    Collective,
    Compute,
    Program,
    Recv,
    Send,
    Slot,
    expand_slot,
    split_evenly,
)
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import TwoLevel

pytestmark = pytest.mark.processes

SCHEDULES: list[Collective] = [
    Ring(),
    Ring(blocking=True),
    RingAsync(),
    RingAsync(5),
    Tree(),
    Butterfly(),
    Star(),
    Direct(),
    Halving(1),
    Halving(3),
    DoubleTree(2),
    TwoLevel(Halving(), Direct(), 1),
]
LENGTHS = (0, 1, 2, 3, 4, 5, 1000, 100_003)
DTYPES = (torch.float32, torch.float64, torch.int64)


def make_vector(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector of whole numbers, different on every rank."""
    return ((torch.arange(length) * (rank + 3) + 17 * rank) % 1009 - 500).to(dtype)


def sum_at_every_length(world: World, schedule: Collective) -> list[tuple[torch.Tensor, int]]:
    results = []
    for length, dtype in itertools.product(LENGTHS, DTYPES):
        mine = make_vector(world.rank, length, dtype)
        results.append((mine, run_all_reduce(schedule, mine, world).bytes))
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_sums_are_exact_at_every_length(pool: Launcher, schedule: Collective, size: int) -> None:
    answers = pool.run(sum_at_every_length, schedule, size=size)
    for place, (length, dtype) in enumerate(itertools.product(LENGTHS, DTYPES)):
        expected = sum(make_vector(rank, length, dtype) for rank in range(size))
        for answer in answers:
            assert torch.equal(answer[place][0], expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedule",
    [TwoLevel(group=2), TwoLevel(Butterfly(), Star(), 2), TwoLevel(Tree(), Halving(2), 2)],
    ids=str,
)
def test_sums_of_two_levels_are_exact(pool: Launcher, schedule: Collective) -> None:
    test_sums_are_exact_at_every_length(pool, schedule, 4)


def test_sent_bytes_equal_the_proof(pool: Launcher) -> None:
    for schedule in SCHEDULES:
        answers = pool.run(sum_at_every_length, schedule, size=3)
        place = list(itertools.product(LENGTHS, DTYPES)).index((100_003, torch.float32))
        assert (
            max(answer[place][1] for answer in answers)
            == 4 * prove_schedule(schedule, 3, 100_003).sent
        )


def sum_many_rounds(world: World) -> torch.Tensor:
    """Sum the results of 30 exchanges by the butterfly.

    The butterfly writes the vector that it is sending. A transport that does not wait for its sends
    loses numbers.
    """
    total = torch.zeros(50_000, dtype=torch.float64)
    for turn in range(30):
        mine = make_vector(world.rank + turn, 50_000, torch.float64)
        run_all_reduce(Butterfly(), mine, world)
        total += mine
    return total


def sum_long_messages(world: World, schedule: Collective) -> torch.Tensor:
    # parts of 8 times LONG_MESSAGE_BYTES in four segments, more than scratch
    mine = make_vector(world.rank, 8 * LONG_MESSAGE_BYTES, torch.float32)
    run_all_reduce(schedule, mine, world)
    return mine


@pytest.mark.parametrize("size", [3, 4, 6])
@pytest.mark.parametrize("schedule", [DoubleTree(2), Halving(1), Tree(), Star()], ids=str)
def test_long_messages_in_sequence_do_not_hang(
    pool: Launcher, schedule: Collective, size: int
) -> None:
    """No order of a schedule may end in a hang.

    Over a link, a long send waits for the sends before it. A receive is posted when it is its
    sender's turn.
    """
    expected = sum(make_vector(rank, 8 * LONG_MESSAGE_BYTES, torch.float32) for rank in range(size))
    for sums in pool.run(sum_long_messages, schedule, size=size, backend="gloo"):
        assert torch.equal(sums, expected)  # type: ignore[arg-type]


def test_slot_is_not_written_while_it_is_sent(pool: Launcher) -> None:
    expected = sum(
        make_vector(rank + turn, 50_000, torch.float64) for rank in range(4) for turn in range(30)
    )
    for total in pool.run(sum_many_rounds, size=4):
        assert torch.equal(total, expected)  # type: ignore[arg-type]


def repeat_all_reduce(world: World) -> bool:
    for _ in range(50):
        mine = make_vector(world.rank, 60, torch.float64)
        run_all_reduce(Ring(blocking=True), mine, world)
    return True


def test_rendezvous_send_is_waited_for_once(pool: Launcher) -> None:
    """Earlier, a blocking ring hung now and then, because the transport waited twice for a send.

    It waited for a send with wait=True and kept its Work. It waited once more when the slot was
    written again. The second time, gloo waits for ever.
    """
    assert all(pool.run(repeat_all_reduce, size=2))


class RandomSchedule:
    """A random schedule: every rank sends to the right and receives from the left.

    Slots and order are random. It is no all-reduce. It has many receives that must not be posted
    before the actions that precede them.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.rounds = [
            [
                (chance.randrange(4), chance.randrange(3), chance.random() < 0.5)
                for _ in range(chance.randint(1, 3))
            ]
            for _ in range(6)
        ]

    def parts(self, size: int) -> int:
        return 8

    def program(self, rank: int, size: int) -> Program:
        left = (rank - 1) % size
        for messages in self.rounds:
            for pair, which, _ in messages:
                yield Send((rank + 1) % size, self.slot(pair + rank, which))
            for pair, which, add in messages:
                yield Recv(left, self.slot(pair + left, which), add)

    def slot(self, pair: int, which: int) -> Slot:
        """Return one of two neighbouring parts, or both; every rank begins with another pair."""
        first = 2 * (pair % 4)
        return (first, first + 1, range(first, first + 2))[which]


class Numbers:
    """The operations of the interpreter on real vectors."""

    def __init__(self, vectors: list[torch.Tensor]) -> None:
        self.vectors = vectors
        self.parts = split_evenly(len(vectors[0]), 8)

    def slot(self, rank: int, slot: Slot) -> torch.Tensor:
        parts: list[int] = list(expand_slot(slot))  # type: ignore[arg-type]
        return self.vectors[rank][self.parts[parts[0]].start : self.parts[parts[-1]].stop]

    def read(self, rank: int, send: Send) -> torch.Tensor:
        return self.slot(rank, send.slot).clone()

    def write(self, rank: int, recv: Recv, payload: torch.Tensor) -> None:
        self.slot(rank, recv.slot).mul_(recv.add).add_(payload)

    def compute(self, rank: int, action: Compute) -> None:
        raise AssertionError(action)


def interpret_random_schedule(seed: int, length: int) -> list[torch.Tensor] | None:
    """Return the vectors of all ranks at the end, or None if the order ends in a deadlock."""
    numbers = Numbers([make_vector(rank, length, torch.int64) for rank in range(3)])
    try:
        interpret_schedule(RandomSchedule(seed).program, 3, numbers)
    except Deadlock:
        return None
    return numbers.vectors


def run_random_schedules(world: World, cases: list[tuple[int, int]]) -> list[torch.Tensor]:
    vectors = [make_vector(world.rank, length, torch.int64) for _, length in cases]
    for (seed, _), mine in zip(cases, vectors, strict=True):
        run_all_reduce(RandomSchedule(seed), mine, world)
    return vectors


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.story), "shm"])
def test_early_receives_keep_the_program_order(pool: Launcher, backend: str) -> None:
    """If the interpreter finishes in one process, the transport finishes with the same numbers.

    This also holds if two parts are longer than scratch.
    """
    # SCRATCH_BYTES elements: parts longer than scratch
    cases = [
        (seed, length) for seed in range(60) for length in (3, 1000, *[SCRATCH_BYTES] * (seed < 12))
    ]
    expected = {
        case: vectors for case in cases if (vectors := interpret_random_schedule(*case)) is not None
    }
    assert len(expected) > 30
    for rank, answers in enumerate(
        pool.run(run_random_schedules, list(expected), size=3, backend=backend)
    ):
        for case, answer in zip(expected, answers, strict=True):
            assert torch.equal(answer, expected[case][rank]), case


class RecordingGroup:
    """A process group that notes the messages that are posted, in order.

    Args:
        group: The process group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.posted: list[str] = []

    def send(self, *arguments: Any) -> Any:
        self.posted.append("send")
        return self.group.send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        self.posted.append("receive")
        return self.group.recv(*arguments)


def record_posting_order(world: World, length: int) -> list[str]:
    """Return the messages of an exchange in the order of their posting; the sum must be right."""
    group = RecordingGroup(world.group or dist.group.WORLD)
    summed = torch.ones(length)
    run_all_reduce(TwoLevel(group=2), summed, dataclasses.replace(world, group=group))
    assert bool((summed == world.size).all())
    return group.posted


@pytest.mark.parametrize("length", [300_000, 300_001])
def test_receive_is_posted_before_the_preceding_send(pool: Launcher, length: int) -> None:
    """A receive is posted before a send, because gloo announces it behind the data being sent.

    Earlier, scratch was as long as the data that is added, and a receive of an all_gather may be an
    element longer. Such a receive was posted after the send. The two directions of a pair took
    turns, at two thirds of the speed.
    """
    for posted in pool.run(record_posting_order, length, size=4, backend="gloo"):
        assert posted[-1] == "send"


def run_forwards(world: World, micros: int) -> list[torch.Tensor]:
    """Run a pipeline in which stage r multiplies by r + 2 and adds 1; return the rank's buffers.

    Only the first stage knows the micro-batches.
    """
    schedule = Forwards(micros)
    buffers = {
        slot: torch.arange(5.0) + micro if world.rank == 0 else torch.zeros(5)
        for micro, slot in enumerate(schedule.slots(5))
    }

    def compute(action: Compute) -> None:
        buffers[action.at].mul_(world.rank + 2).add_(1)

    ProgramRun(
        list(schedule.program(world.rank, world.size)), buffers, world, compute
    ).play_program()
    return list(buffers.values())


def test_pipeline_runs_over_named_buffers(pool: Launcher) -> None:
    first, second, third = pool.run(run_forwards, 6, size=3)
    for micro in range(6):
        x = torch.arange(5.0) + micro
        assert torch.equal(first[micro], 2 * x + 1)
        assert torch.equal(second[micro], 3 * (2 * x + 1) + 1)
        assert torch.equal(third[micro], 4 * (3 * (2 * x + 1) + 1) + 1)


def compute_mean(world: World) -> None:
    ProgramRun([Compute("mean", 0)], {0: torch.zeros(4)}, world).play_program()


def test_unknown_compute_action_is_refused(pool: Launcher) -> None:
    """An exchange only adds, so the transport refuses to compute a mean.

    Earlier, it could take a mean, for a planted bug of the tests. So it would have done so for any
    schedule.
    """
    with pytest.raises(RankFailed, match="the wire cannot compute 'mean' on slot 0"):
        pool.run(compute_mean, size=2, timeout=1.0)


def time_late_exchange(world: World) -> tuple[Traffic, float]:
    """Run an exchange that rank 1 begins half a second late; return its traffic and seconds."""
    mine = make_vector(world.rank, 100_000, torch.float64)
    world.barrier()
    if world.rank == 1:
        threading.Event().wait(0.5)
    start = time.monotonic()
    return run_all_reduce(Ring(), mine, world), time.monotonic() - start


def test_exchange_time_is_split_into_three_parts(pool: Launcher) -> None:
    answers = pool.run(time_late_exchange, size=2)
    for traffic, seconds in answers:
        parts = traffic.waiting, traffic.transfer, traffic.processing
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(seconds, abs=0.1)  # the machine may be busy
        assert traffic.processing > 0
    (waited, _), (late, _) = answers
    assert waited.waiting > 0.4 > late.waiting
    assert waited.transfer < 0.4


def wait_for_each_other(world: World) -> None:
    ProgramRun([Recv(1 - world.rank, 0)], {0: torch.zeros(4)}, world).play_program()


def test_hang_ends_with_the_drawn_schedule(pool: Launcher) -> None:
    """Two ranks wait for each other until a timeout.

    The message shows the place of every rank in its program.
    """
    with pytest.raises(RankFailed) as caught:
        pool.run(wait_for_each_other, size=2, timeout=1.0)
    first, *lines = caught.value.message.splitlines()
    rank = caught.value.rank
    assert rank is not None
    assert first.startswith(
        f"rank {rank} waits for slot 0 from rank {1 - rank}, which waits for slot 0 from rank "
        f"{rank}: "
    )
    assert lines == ["   0 | [<1:0]", "   1 | [<0:0]"]


def skip_second_exchange(world: World) -> None:
    for _ in range(1 if world.rank == 2 else 2):
        run_all_reduce(Ring(), torch.ones(8), world)
    # rank 2 is busy with something else; the launcher ends it
    threading.Event().wait(20.0)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.table), "shm"])
@pytest.mark.story
def test_missing_rank_is_shown_as_silent(pool: Launcher, backend: str) -> None:
    """Rank 3 waits for rank 2, rank 0 for rank 3, and rank 1 for rank 0.

    Whichever rank times out first, the message shows the place of all waiting ranks.
    """
    with pytest.raises(RankFailed) as caught:
        pool.run(skip_second_exchange, size=4, timeout=1.0, backend=backend)
    first, *lines = caught.value.message.splitlines()
    assert "slot 2 from rank 2, which says nothing: " in first
    assert lines == [
        "   0 | >1:0 <3:3+ >1:3 [<3:2+] >1:2 <3:1+ >1:1 ...",
        "   1 | ... >2:0 <0:3+ >2:3 [<0:2+] >2:2 <0:1 >2:1 ...",
        "   2 | says nothing",
        "   3 | >0:3 [<2:2+] >0:2 <2:1+ >0:1 ...",
    ]


def fall_one_behind(world: World) -> None:
    """Let rank 0 send to rank 1 and go on to the next exchange.

    Rank 1 waits for a second message of the first exchange.
    """
    if world.rank == 0:
        ProgramRun([Send(1, 0)], {0: torch.zeros(4)}, world).play_program()
        ProgramRun([Recv(1, 0)], {0: torch.zeros(4)}, world).play_program()
    else:
        ProgramRun([Recv(0, 0), Recv(0, 0)], {0: torch.zeros(4)}, world).play_program()


def test_ranks_in_different_exchanges_are_distinguished(pool: Launcher) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(fall_one_behind, size=2, timeout=1.0)
    lines = caught.value.message.splitlines()[1:]
    apart = ["", " (1 exchange behind)"] if caught.value.rank == 0 else [" (1 exchange ahead)", ""]
    assert lines == ["   0 | [<1:0]" + apart[0], "   1 | <0:0 [<0:0]" + apart[1]]


DIES = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn

    import paragrad as pg

    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    model.register_comm_hook(*pg.hook("ring"))
    # in the second DDP has messages of its own, about its buckets
    for step in range(3):
        if (step, rank) == (2, 1):
            os._exit(0)
        model(torch.ones(3, 4)).sum().backward()
"""


@pytest.mark.table
def test_dead_rank_is_shown_as_silent_under_plain_ddp(tmp_path: Path) -> None:
    """The process group is the user's, over a file.

    No rank waits for the dead rank for 300 s, the limit.
    """
    script = tmp_path / "dies.py"
    script.write_text(textwrap.dedent(DIES))
    words = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), "3", f"file://{tmp_path}/meeting"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank in (0, 2):
        # torch begins each line with the rank
        lines = [line.removeprefix(f"[rank{rank}]: ") for line in said[rank].splitlines()]
        assert any(f"rank {rank} waits for " in line for line in lines), said[rank]
        assert "   1 | says nothing" in lines
        assert all(
            any(line.startswith(f"   {other} | ") and "[" in line for line in lines)
            for other in (0, 2)
        )
