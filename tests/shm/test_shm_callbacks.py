"""Callbacks of futures call collectives and wait for them, as torch's communication hooks do.

Inputs differ by rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from shm_values import assert_same, make_values
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from paragrad.launch import Launcher
from paragrad.runtime.world import World

pytestmark = pytest.mark.processes


# ---- torch's PowerSGD under DistributedDataParallel ------------------------------------------
def train_with_power_sgd(world: World, bucket_megabytes: float, in_half: bool) -> list[Tensor]:
    """Train ten steps; the hook of a bucket waits for two all-reduces in callbacks of a third."""
    compress = fp16_compress_wrapper(powerSGD_hook) if in_half else powerSGD_hook

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations as text
        future = compress(state, bucket)
        if world.backend == "gloo":
            # gloo runs the callbacks of two buckets in two threads, which mix up their all-reduces
            future.wait()
        return future

    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 16)
    )
    net = DistributedDataParallel(model, bucket_cap_mb=bucket_megabytes)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    net.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        draw = torch.Generator().manual_seed(100 * step + world.rank)
        inputs, target = (torch.randn(8, width, generator=draw) for width in (32, 16))
        optimizer.zero_grad()
        mse_loss(net(inputs), target).backward()
        optimizer.step()
    assert 0 < state.total_numel_after_compression < state.total_numel_before_compression
    assert (len(state.error_dict) == 1) == (bucket_megabytes > 1)  # one tensor for each bucket
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("bucket_megabytes", "in_half"),
    [
        pytest.param(25, False, id="one bucket"),
        pytest.param(0.005, False, id="several buckets", marks=pytest.mark.table),
        pytest.param(0.005, True, id="several buckets in half", marks=pytest.mark.table),
    ],
)
def test_torch_power_sgd_equals_gloo(
    pool: Launcher, bucket_megabytes: float, in_half: bool
) -> None:
    """Earlier, this training never ended.

    The daemon thread ran the callback, which waited for collectives that only the daemon runs.
    """
    found, wanted = (
        pool.run(train_with_power_sgd, bucket_megabytes, in_half, size=2, backend=backend)
        for backend in ("shm", "gloo")
    )
    for rank in range(2):
        for one, other in zip(found[rank], wanted[0], strict=True):
            assert torch.equal(one, other)


# ---- programs --------------------------------------------------------------------------------
def chains_of_all_reduces(world: World) -> None:
    """After each collective, a callback makes three more, while further ones are queued.

    Each rank waits in another order, so callbacks run in its own thread or in the daemon's.
    """
    wanted = sum(make_values(rank, 3_000) for rank in range(world.size))

    def reduce_again(done: Future[list[Tensor]]) -> Tensor:
        mine = done.value()[0]
        dist.all_reduce(mine, async_op=True).get_future().wait()
        dist.all_reduce(mine)
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        return mine

    works = []
    futures = []
    for turn in range(12):
        # The types alternate, so a collective fails if it meets another turn's collective.
        mine = make_values(world.rank, 3_000).to(torch.float64 if turn % 2 else torch.int64)
        work = dist.all_reduce(mine, async_op=True)
        futures.append(work.get_future().then(reduce_again))
        works.append(work)
    random.Random(world.rank).shuffle(works)
    for work in works:
        work.wait()
    for turn, future in enumerate(futures):
        dtype = torch.float64 if turn % 2 else torch.int64
        assert_same(future.wait(), world.size**3 * wanted.to(dtype))


def waits_for_a_later_one(world: World) -> None:
    """A callback waits for a collective that was queued before the callback began."""
    first, second = (make_values(world.rank, 50_000) + turn for turn in range(2))
    later: list[dist.Work] = []

    def wait_for_second(_: object) -> Tensor:
        later[0].wait()
        return second

    with dist.group.WORLD.collective_queue.lock:  # the daemon waits for this lock
        work = dist.all_reduce(first, async_op=True)
        future = work.get_future().then(wait_for_second)
        later.append(dist.all_reduce(second, async_op=True))
    assert_same(
        future.wait(),
        sum(make_values(rank, 50_000) for rank in range(world.size)) + float(world.size),
    )


def error_in_a_callback(world: World) -> None:
    """An error in a callback is raised by its future, and the queue continues."""

    def reduce_and_fail(_: object) -> None:
        dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        raise ValueError("on purpose")

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(reduce_and_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        future.wait()
    mine = make_values(world.rank, 7)
    dist.all_reduce(mine)
    assert_same(mine, sum(make_values(rank, 7) for rank in range(world.size)))


def answers_to_messages(world: World) -> None:
    """The callback of a message waits for further messages."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    taken, answer = torch.empty(5), torch.empty(60_000)

    def exchange(_: object) -> Tensor:
        sent = dist.isend(make_values(world.rank, 60_000), left, tag=1)
        dist.recv(answer, right, tag=1)
        sent.wait()
        return answer

    future = dist.irecv(taken, left).get_future().then(exchange)
    dist.barrier()  # no message is sent before all ranks have registered their callbacks
    dist.send(make_values(world.rank, 5), right)
    assert_same(future.wait(), make_values(right, 60_000))
    assert_same(taken, make_values(left, 5))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.table)])
@pytest.mark.parametrize(
    "function",
    [chains_of_all_reduces, waits_for_a_later_one, error_in_a_callback, answers_to_messages],
    ids=lambda each: each.__name__,
)
def test_callbacks_call_operations(
    pool: Launcher, function: Callable[[World], None], size: int
) -> None:
    pool.run(function, size=size, backend="shm")
