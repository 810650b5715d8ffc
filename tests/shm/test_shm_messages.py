"""The backend shm: messages, operations that a rank waits for later, and failures."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shm_values import LONG, assert_same, make_values

from paragrad.launch import Launcher
from paragrad.runtime.world import World
from paragrad.shm.attach import RegionLayout
from paragrad.shm.region import CACHE_LINE_BYTES
from paragrad.shm.work import OperationQueue, ShmWork

pytestmark = pytest.mark.processes


# ---- messages --------------------------------------------------------------------------------
def passed_around(world: World) -> None:
    right = (world.rank + 1) % world.size
    left = (world.rank - 1) % world.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for count in (0, 1, 1000, LONG):
            taken = torch.empty(count, dtype=dtype)
            work = dist.isend(make_values(world.rank, count).to(dtype), right)
            dist.recv(taken, left)
            work.wait()
            assert_same(taken, make_values(left, count).to(dtype))


def batches(world: World) -> None:
    right = (world.rank + 1) % world.size
    left = (world.rank - 1) % world.size
    mine = [make_values(world.rank, 3) + turn for turn in range(4)]
    taken = [torch.empty(3) for _ in range(4)]
    operations = [dist.P2POp(dist.irecv, each, left) for each in taken] + [
        dist.P2POp(dist.isend, each, right) for each in mine
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same(torch.stack(taken), torch.stack([make_values(left, 3) + turn for turn in range(4)]))


def tags(world: World) -> None:
    """A message waits for a receive of its tag; messages of one tag keep their order."""
    if world.rank == 0:
        for tag, number in ((1, 10), (2, 20), (1, 11), (3, 30)):
            dist.send(torch.full((LONG if tag == 2 else 3,), float(number)), 1, tag=tag)
    elif world.rank == 1:
        for tag, number in ((3, 30), (1, 10), (2, 20), (1, 11)):
            taken = torch.empty(LONG if tag == 2 else 3)
            dist.recv(taken, 0, tag=tag)
            assert (taken == number).all()


def from_any(world: World) -> None:
    if world.rank == 0:
        seen = set()
        for _ in range(2 * (world.size - 1)):
            taken = torch.empty(2)
            source = dist.recv(taken)
            assert taken[0] == source
            seen.add((source, float(taken[1])))
        assert seen == {(rank, turn) for rank in range(1, world.size) for turn in (0.0, 1.0)}
    else:
        for turn in range(2):
            dist.send(torch.tensor([float(world.rank), turn]), 0)


def both_send_first(world: World) -> None:
    """Ranks 0 and 1 send each other at once more than the shared memory region holds."""
    if world.rank < 2:
        count = 3_000_000
        work = dist.isend(make_values(world.rank, count), 1 - world.rank)
        taken = torch.empty(count)
        dist.recv(taken, 1 - world.rank)
        work.wait()
        assert_same(taken, make_values(1 - world.rank, count))


def sends_while_others_wait(world: World) -> None:
    """A long send continues while its rank waits in a collective instead."""
    count = 3_000_000
    if world.rank == 0:
        work = dist.isend(make_values(0, count), 1)
        dist.barrier()
        work.wait()
    elif world.rank == 1:
        taken = torch.empty(count)
        dist.recv(taken, 0)
        assert_same(taken, make_values(0, count))
        dist.barrier()
    else:
        dist.barrier()


def crosswise(world: World) -> None:
    """Rank 0 starts an all-reduce, sends, then waits; rank 1 receives before its all-reduce."""
    mine = make_values(world.rank, 40_000)
    message = torch.zeros(4)
    if world.rank == 0:
        work = dist.all_reduce(mine, async_op=True)
        dist.send(torch.ones(4), 1)
        work.wait()
    else:
        if world.rank == 1:
            dist.recv(message, 0)
            assert_same(message, torch.ones(4))
        dist.all_reduce(mine)
    assert_same(mine, sum(make_values(rank, 40_000) for rank in range(world.size)))


def later(world: World) -> None:
    """Ranks wait for works in any order; the daemon runs works that no thread waits for.

    Futures of works give the right results.
    """
    tensors = [make_values(world.rank, 30_000) + turn for turn in range(6)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    random.Random(world.rank).shuffle(works)
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for turn, each in enumerate(tensors):
        assert_same(
            each, sum(make_values(rank, 30_000) for rank in range(world.size)) + turn * world.size
        )
    mine = make_values(world.rank, 10)
    future = (
        dist.all_reduce(mine, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    )
    assert_same(future.wait(), 2 * sum(make_values(rank, 10) for rank in range(world.size)))
    mine = make_values(world.rank, 10)
    work = dist.all_reduce(mine, async_op=True)
    end = time.monotonic() + 20
    # no thread waits for the work, so the daemon runs it
    while not work.is_completed() and time.monotonic() < end:
        pass
    assert_same(mine, sum(make_values(rank, 10) for rank in range(world.size)))
    taken = torch.empty(5)
    receive = dist.irecv(taken, (world.rank - 1) % world.size)
    told = receive.get_future()
    dist.send(make_values(world.rank, 5), (world.rank + 1) % world.size)
    told.wait()
    assert_same(taken, make_values((world.rank - 1) % world.size, 5))


PROGRAMS = (
    passed_around,
    batches,
    tags,
    from_any,
    both_send_first,
    sends_while_others_wait,
    crosswise,
    later,
)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda each: each.__name__)
def test_message_programs(pool: Launcher, function: object, size: int) -> None:
    pool.run(function, size=size, backend="shm")


def run_random_program(world: World, seed: int) -> list[float]:
    """Run a random program, the same on all ranks, of collectives and messages.

    Each rank waits for them in its own random order.
    """
    draw = random.Random(seed)
    total = []
    pending = []
    size = world.size
    for turn in range(120):
        kind = draw.choice(("reduce", "gather", "message", "wait"))
        count = draw.choice((1, 100, 9_000, 70_000))
        sender, taker = draw.sample(range(size), 2)
        if kind == "reduce":
            mine = make_values(world.rank, count) + turn
            wanted = sum(make_values(rank, count) for rank in range(size)) + turn * size
            pending.append((dist.all_reduce(mine, async_op=True), mine, wanted))
        elif kind == "gather":
            out = torch.empty(size * count)
            wanted = torch.cat([make_values(rank, count) for rank in range(size)])
            pending.append(
                (
                    dist.all_gather_into_tensor(out, make_values(world.rank, count), async_op=True),
                    out,
                    wanted,
                )
            )
        elif kind == "message" and world.rank == sender:
            mine = make_values(sender, count) + turn
            pending.append((dist.isend(mine, taker), mine, mine.clone()))
        elif kind == "message" and world.rank == taker:
            mine = torch.empty(count)
            pending.append((dist.irecv(mine, sender), mine, make_values(sender, count) + turn))
        elif kind == "wait":
            own = random.Random(1000 * seed + 10 * turn + world.rank)
            own.shuffle(pending)
            for work, found, wanted in pending[:2]:
                work.wait()
                assert_same(found, wanted)
            pending = pending[2:]
    for work, found, wanted in pending:
        work.wait()
        assert_same(found, wanted)
        total.append(float(found.sum()))
    return total


@pytest.mark.parametrize("size", [2, 4])
def test_many_random_messages(pool: Launcher, size: int) -> None:
    for seed in range(5):
        pool.run(run_random_program, seed, size=size, backend="shm")


# ---- the ring buffer -------------------------------------------------------------------------
def ends_of_the_ring(world: World) -> None:
    """Messages end at, before and beyond the end of the ring buffer.

    Several are in the buffer at once, and the sender does not wait for any of them.
    """
    ring = RegionLayout(world.size).ring_bytes
    draw = random.Random(0)
    for turn in range(40):
        counts = []
        left = ring
        while (
            count := draw.choice((0, 1, CACHE_LINE_BYTES, 5000, ring // 5, ring // 2))
        ) + count // 16 + 20 * CACHE_LINE_BYTES < left:
            counts.append(count)
            left -= count + count // 16 + 20 * CACHE_LINE_BYTES
        if world.rank == 0:
            for place, count in enumerate(counts):
                dist.send(make_values(place + turn, count).to(torch.uint8), 1)
        elif world.rank == 1:
            dist.recv(torch.empty(1), 0, tag=2)
            for place, count in enumerate(counts):
                taken = torch.empty(count, dtype=torch.uint8)
                dist.recv(taken, 0)
                assert_same(taken, make_values(place + turn, count).to(torch.uint8))
        if world.rank == 0:
            dist.send(torch.ones(1), 1, tag=2)
        dist.barrier()


def many_at_once(world: World) -> None:
    """The sender of a thousand short messages does not wait until they are received."""
    if world.rank == 0:
        for number in range(1000):
            dist.send(torch.tensor([number]), 1)
        dist.barrier()
    else:
        dist.barrier()
        if world.rank == 1:
            for number in range(1000):
                taken = torch.empty(1, dtype=torch.int64)
                dist.recv(taken, 0)
                assert taken.item() == number


def unusual(world: World) -> None:
    """Send tensors whose memory is not contiguous, or has other values than the tensor.

    These are columns, slices with a step, and tensors that torch only marks as negative.
    """
    plain = make_values(1, 600).view(20, 30)
    views = (
        lambda each: each[:15, :10],
        lambda each: each.t()[:15, :10],
        lambda each: each[5:, ::3],
        lambda each: torch.complex(each, each).conj().imag[:15, :10],
    )
    for given, taken in ((one, other) for one in views for other in views):
        sent = given(plain)
        place = taken(torch.zeros_like(plain))
        if world.rank == 0:
            dist.send(sent, 1)
        elif world.rank == 1:
            dist.recv(place, 0)
            assert_same(place, sent)
    assert sent.is_neg()


@pytest.mark.parametrize(
    "function", [ends_of_the_ring, many_at_once, unusual], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("size", [2, 4])
def test_ring_buffer_limits(pool: Launcher, function: object, size: int) -> None:
    pool.run(function, size=size, backend="shm")


def send_and_be_killed(rank: int, store: str) -> None:
    """Rank 1 is killed after it has sent a part of a message, while rank 0 receives it."""
    dist.init_process_group(
        "shm",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    dist.barrier()  # both ranks have joined the group
    if rank == 1:
        dist.isend(torch.ones(LONG), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(torch.empty(LONG), 1)
    except RuntimeError as error:
        print(error)


@pytest.mark.story
def test_death_during_a_message_ends_the_wait(tmp_path: Path) -> None:
    """If the sender dies during a message, the receiver gets an error.

    Earlier, a receive that had begun was in no list of the operations that fail with the group.
    So its rank waited for ever.
    """
    call = (
        "import sys, paragrad.backends, test_shm_messages as t; "
        "t.send_and_be_killed(int(sys.argv[1]), sys.argv[2])"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", call, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert (
        f"rank 1 (process {ranks[1].pid}) ended while rank 0 waited for it in receive from rank 1"
        in told[0][0]
    ), told[0]


class Patient(OperationQueue):
    """A queue whose daemon runs a work until another thread asks it to yield."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.way = threading.Event()

    def request_yield(self) -> None:
        self.way.set()

    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        self.begun.set()
        if is_background and not self.way.is_set():
            self.way.wait()
        else:
            work.finish()


def test_waiting_thread_takes_over_the_channel() -> None:
    """A thread that waits takes the queue over from the daemon.

    Earlier, the daemon kept the queue while it ran a receive that was posted early. A waiting
    thread then only looked once a millisecond whether its own work was done.
    """
    lane = Patient()
    first = ShmWork(lane, [], seconds=60)
    second = ShmWork(lane, [], seconds=60)
    lane.leave_to_daemon(first)
    lane.begun.wait()
    second.wait()
    assert lane.close(60)
    assert first.done


# ---- disagreement, deaths, limits ------------------------------------------------------------
def call_mismatched_operations(world: World) -> list[str]:
    """Call operations that do not match, and return the errors of this rank.

    Afterwards the group still works.
    """
    told = []
    for calls in (
        (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.all_reduce(torch.ones(4))),
        (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32)),
        ),
        (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX),
        ),
        (
            lambda: dist.all_reduce(torch.ones(2, 3)),
            lambda: dist.broadcast(torch.ones(2, 3), src=0),
        ),
        (
            lambda: dist.all_gather([torch.ones(2)] * world.size, torch.ones(2)),
            lambda: dist.all_gather([torch.ones(2)] * world.size, torch.ones(3)),
        ),
    ):
        with pytest.raises(RuntimeError) as caught:
            calls[min(world.rank, 1)]()
        told.append(str(caught.value))
    mine = make_values(world.rank, 3)
    dist.all_reduce(mine)
    assert_same(mine, sum(make_values(rank, 3) for rank in range(world.size)))
    return told


def test_disagreement_is_reported_to_all_ranks(pool: Launcher) -> None:
    for rank, told in enumerate(pool.run(call_mismatched_operations, size=3, backend="shm")):
        for message, words in zip(
            told,
            (
                ("float32 [3], 12 bytes", "float32 [4]"),
                ("float32", "int32"),
                ("SUM", "MAX"),
                ("all_reduce", "broadcast from 0"),
                ("all_gather", "gives"),
            ),
            strict=True,
        ):
            assert "ranks disagree in collective" in message
            assert f"rank {rank} does" in message
            for word in words:
                assert word in message


def exchange_unequal_lengths(world: World) -> str:
    group = dist.new_group()
    # longer than the ring buffer, so without the check the send would never end
    long = lambda: dist.send(torch.ones(2_000_000), 1, group=group)  # noqa: E731
    short = lambda: dist.recv(torch.ones(3), 0, group=group)  # noqa: E731
    with pytest.raises(RuntimeError) as caught:
        (long if world.rank == 0 else short)()
    return str(caught.value)


def test_message_of_another_length_ends_both_ranks(pool: Launcher) -> None:
    for message in pool.run(exchange_unequal_lengths, size=2, backend="shm"):
        assert "rank 0 sends float32, 8000000 bytes" in message
        assert "receive from rank 0 of float32 [3], 12 bytes" in message


def give_up_waiting(world: World, by_daemon: bool) -> str:
    """Rank 1 comes late to an all-reduce, and rank 0 gives up after 0.3 s.

    Rank 2 has a longer limit, but gets the error at once; rank 1 gets it later. If by_daemon is
    true, the daemon of rank 0 runs the work before rank 0 waits. The daemon has the limit of the
    group.
    """
    group = dist.new_group()
    if world.rank == 1:
        dist.recv(torch.empty(1), 0)
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    if by_daemon and world.rank == 0:
        work.get_future()  # now the daemon begins to run the work
        while not work.queue.lock.locked():
            os.sched_yield()
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(seconds=0.3 if world.rank == 0 else 20))
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    return str(caught.value)


@pytest.mark.parametrize("by_daemon", [False, True])
def test_timeout_on_one_rank_ends_the_others(pool: Launcher, by_daemon: bool) -> None:
    """If one rank gives up waiting, all ranks of the collective end.

    Earlier, if the daemon ran the work, rank 0 waited as long as the daemon: 20 s, not 0.3 s.
    """
    for message in pool.run(give_up_waiting, by_daemon, size=3, backend="shm"):
        assert "rank 0 gave up waiting" in message
        assert "to which rank 1 has not come" in message
        assert "all_reduce SUM of float32 [5], 20 bytes, collective 2 of its group of 3" in message


def post_receive_early(world: World, asked: bool) -> str:
    """Rank 1 sends later than the time limit of the group after rank 0 posted its receive.

    If asked is true, rank 0 waits for the future of the receive.
    """
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if world.rank == 1:
        world.store.wait(["asked"])
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not world.store.check(["given up"]):
            os.sched_yield()
        if not asked:
            dist.send(torch.ones(3), 0, group)
        return ""
    given = torch.zeros(3)
    work = dist.irecv(given, 1, group)
    world.store.set("asked", "")
    if asked:
        with pytest.raises(RuntimeError) as caught:
            work.get_future().wait()
        world.store.set("given up", "")
        return str(caught.value)
    work.wait(timedelta(seconds=20))
    return str(given.tolist())


def test_receive_posted_early_has_no_time_limit(pool: Launcher) -> None:
    """A receive has no time limit before a thread waits for it.

    A pipeline posts three receives at a time, and computes meanwhile. Earlier, the daemon gave
    up the group after its limit. A future that a thread waits for does end at the limit.
    """
    assert pool.run(post_receive_early, False, size=2, backend="shm")[0] == "[1.0, 1.0, 1.0]"
    assert (
        "rank 0 gave up waiting for rank 1 in receive"
        in pool.run(post_receive_early, True, size=2, backend="shm")[0]
    )


def await_one_of_two(world: World) -> str:
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if world.rank:
        world.store.wait(["given up"])
        return ""
    posted = dist.irecv(torch.zeros(3), 1, group)
    with pytest.raises(RuntimeError) as caught:
        dist.irecv(torch.zeros(5), 2, group).get_future().wait()
    world.store.set("given up", "")
    with pytest.raises(RuntimeError):  # this receive ends too, perhaps a moment later
        posted.wait()
    return str(caught.value)


def test_awaited_message_is_named_and_not_an_earlier_one(pool: Launcher) -> None:
    told, *_ = pool.run(await_one_of_two, size=3, backend="shm")
    assert "in receive from rank 2 of float32 [5]" in told


def wait_in_two_groups(world: World) -> str:
    """Rank 1 calls no collective; rank 0 waits for it in another group than ranks 2 and 3."""
    both = world.duplicate(), world.duplicate()
    if world.rank == 1:
        world.store.wait(["told"])
        return ""
    group = both[world.rank == 0].group
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(5), group=group, async_op=True).wait(
            timedelta(seconds=1.5 if world.rank == 3 else 3)
        )
    if world.rank == 3:
        world.store.set("told", "")
    return str(caught.value)


def test_rank_waiting_in_another_group_is_not_blamed(pool: Launcher) -> None:
    """The error names only the rank that is missing, not a rank that waits in another group.

    Earlier, a rank that stopped in a barrier had already released some of the others. They waited
    for it in the next exchange, in a shared memory region of their own. The rank that was left
    in the barrier then named all of them as missing.
    """
    *_, message = pool.run(wait_in_two_groups, size=4, backend="shm")
    assert "rank 3 gave up waiting for rank 1 in all_reduce" in message


def wait_for_killed_rank(rank: int, store: str) -> None:
    """Rank 1 is killed while the others wait for it.

    Rank 0 waits in a collective, rank 2 for a message, and rank 3 for a future.
    """
    dist.init_process_group(
        "shm",
        store=dist.FileStore(store, 4),
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=300),
    )
    mine = torch.ones(100)
    dist.all_reduce(mine)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank == 0:
            dist.all_reduce(mine)
        elif rank == 2:
            dist.recv(mine, 1)
        else:
            dist.all_reduce(mine, async_op=True).get_future().wait()
    except RuntimeError as error:
        print(error)


@pytest.mark.story
def test_death_of_a_rank_ends_every_wait(tmp_path: Path) -> None:
    """If a rank dies, the waits of all others end long before their time limit of 300 s.

    The test itself waits at most 60 s.
    """
    call = (
        "import sys, paragrad.backends, test_shm_messages as t; "
        "t.wait_for_killed_rank(int(sys.argv[1]), sys.argv[2])"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", call, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    told = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    for rank, words in (
        (0, "all_reduce SUM of float32 [100], 400 bytes, collective 3"),
        (2, "receive from rank 1 of float32 [100], 400 bytes"),
        (3, "collective 3 of its group of 4"),
    ):
        assert f"rank 1 (process {ranks[1].pid}) ended" in told[rank][0], told[rank]
        assert words in told[rank][0]


def miss_a_barrier(world: World) -> str:
    group = dist.new_group()
    if world.rank in (1, 3):
        dist.recv(torch.empty(1), 0)
        return ""
    with pytest.raises(RuntimeError) as caught:
        group.monitored_barrier(timedelta(seconds=0.3))
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
        dist.send(torch.ones(1), 3)
    return str(caught.value)


def test_barrier_names_the_missing_rank(pool: Launcher) -> None:
    for message in pool.run(miss_a_barrier, size=4, backend="shm")[::2]:
        assert "rank 1, rank 3 have not come" in message


# ---- leaving a group -------------------------------------------------------------------------
class Held(OperationQueue):
    """A queue whose daemon runs a work until the queue closes."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        self.begun.set()
        self.backlog.wakeup.wait()
        work.finish()


def test_closed_channel_leaves_no_thread() -> None:
    """Earlier, about one in ten runs of a short loop under torchrun ended with SIGABRT:
    "terminate called without an active exception".

    In the last step, DDP requests a sum (which parameters were used) that it does not wait for.
    The daemon held the queue for a millisecond. If the group was left meanwhile, the daemon was
    the last owner of the queue, and freed the tensors of the region. When torch frees a tensor,
    it releases the interpreter lock and takes it again. If the interpreter was already ending,
    Python ended the thread there, inside torch's C++ code, which does not allow this.
    """
    lane = Held()
    turns = sys.getswitchinterval()
    lane.leave_to_daemon(ShmWork(lane, [], seconds=60))
    lane.begun.wait()
    assert lane.daemon is not None
    # The daemon thread runs only while another thread waits for it.
    sys.setswitchinterval(60)
    try:
        lane.close(60)
        assert not lane.daemon.is_alive()
    finally:
        sys.setswitchinterval(turns)


def leave_group(world: World) -> str:
    """Rank 0 leaves a group with an unfinished receive; rank 1 waits in a collective there."""
    group = dist.new_group()
    if world.rank == 0:
        work = dist.irecv(torch.empty(1), 1, group=group)
        assert work is not None
        group.shutdown()
        error = work.exception()  # the work is done, though no thread waits for it
    else:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(5), group=group)
        error = caught.value
    return str(error)


def test_leaving_rank_ends_the_waits_of_others(pool: Launcher) -> None:
    """If a rank leaves a group, operations that no thread waits for have one more second.

    Then the daemon ends, and the other ranks get an error.
    """
    for message in pool.run(leave_group, size=2, backend="shm"):
        assert "rank 0 left the group before its operations ended" in message
