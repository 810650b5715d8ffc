"""The backend shm: every operation of torch.distributed's Python functions gives the right result.

The operations run in real rank processes.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from shm_values import LONG, assert_same, make_values
from torch import Tensor

from paragrad.launch import Launcher
from paragrad.runtime.world import World
from paragrad.shm.region import format_no_address, open_region

pytestmark = pytest.mark.processes

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


# ---- all_reduce ------------------------------------------------------------------------------
def all_reduces(world: World) -> None:
    for dtype in DTYPES:
        for shape in (
            (),
            (0,),
            (1,),
            (3, 5),
            (20_000,),
            (LONG if dtype == torch.float32 else 9_001,),
        ):
            mine = make_values(world.rank, *shape, dtype=dtype)
            dist.all_reduce(mine)
            assert_same(
                mine,
                sum(
                    (make_values(rank, *shape, dtype=dtype) for rank in range(world.size)),
                    torch.zeros((), dtype=dtype),
                ),
            )


def in_inference_mode(world: World) -> None:
    """A collective in inference mode may come before one outside of it.

    Earlier, if the first collective ran in inference mode (in a test of a model), the cached views
    were inference tensors. So a later collective in a training step could not write to them.
    """
    for size in (17, 20_017):
        for inside in (True, False):
            with torch.inference_mode(inside):
                mine = make_values(world.rank, size)
                dist.all_reduce(mine)
                assert_same(
                    mine,
                    sum((make_values(rank, size) for rank in range(world.size)), torch.zeros(())),
                )


def operations(world: World) -> None:
    everyone = torch.stack([make_values(rank, 5, 7) + 1 for rank in range(world.size)])
    wholes = everyone.long()
    for operation, wanted, given in (
        (dist.ReduceOp.SUM, everyone.sum(0), everyone),
        (dist.ReduceOp.AVG, everyone.mean(0), everyone),
        (dist.ReduceOp.PRODUCT, everyone.prod(0), everyone),
        (dist.ReduceOp.MIN, everyone.amin(0), everyone),
        (dist.ReduceOp.MAX, everyone.amax(0), everyone),
        (dist.ReduceOp.AVG, wholes.sum(0) // world.size, wholes),
        (dist.ReduceOp.BAND, fold(torch.bitwise_and, wholes), wholes),
        (dist.ReduceOp.BOR, fold(torch.bitwise_or, wholes), wholes),
        (dist.ReduceOp.BXOR, fold(torch.bitwise_xor, wholes), wholes),
        (dist._make_nccl_premul_sum(0.5), everyone.sum(0) * 0.5, everyone),
    ):
        mine = given[world.rank].clone()
        dist.all_reduce(mine, op=operation)
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)
    flags = torch.tensor([world.rank == 0, True, False])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    assert_same(flags, torch.tensor([True, True, False]))
    pair = torch.complex(make_values(world.rank, 4), make_values(world.rank, 4) + 1)
    dist.all_reduce(pair)
    assert_same(pair.real, sum(make_values(rank, 4) for rank in range(world.size)))
    with pytest.raises(ValueError, match="BAND needs whole numbers"):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)


def fold(function: object, stacked: Tensor) -> Tensor:
    result = stacked[0]
    for each in stacked[1:]:
        result = function(result, each)  # type: ignore[operator]
    return result


def not_contiguous(world: World) -> None:
    whole = make_values(world.rank, 6, 8)
    dist.all_reduce(whole[:, ::2].t())
    wanted = make_values(world.rank, 6, 8)
    wanted[:, ::2] = sum(make_values(rank, 6, 8) for rank in range(world.size))[:, ::2]
    assert_same(whole, wanted)
    # rows of the output are not contiguous
    wide = torch.zeros(4, 2 * world.size)[:, ::2]
    dist.all_gather_into_tensor(wide.t(), make_values(world.rank, 1, 4))
    assert_same(
        wide.t().contiguous(), torch.cat([make_values(rank, 1, 4) for rank in range(world.size)])
    )
    column = make_values(world.rank, 9, 2)[:, 1]
    if world.rank == 0:
        dist.send(column, dst=1)
    elif world.rank == 1:
        taken = torch.zeros(9, 3)
        dist.recv(taken[:, 2], src=0)
        assert_same(taken[:, 2].contiguous(), make_values(0, 9, 2)[:, 1].contiguous())


def same_bits(world: World) -> None:
    """Sums of short and of long tensors use different code, but both add in rank order."""
    small = dist.group.WORLD.attached.areas.small_bytes // 4
    for count in (7, small, small + 1, 300_000, 1_200_001):
        everyone = [
            torch.randn(count, generator=torch.Generator().manual_seed(rank))
            for rank in range(world.size)
        ]
        mine = everyone[world.rank].clone()
        dist.all_reduce(mine)
        assert_same(mine, sum(everyone[1:], everyone[0]))


# ---- the other collectives -------------------------------------------------------------------
def gathers(world: World) -> None:
    ranks = range(world.size)
    for shape in ((0,), (3, 2), (LONG,)):
        everyone = [make_values(rank, *shape) for rank in ranks]
        mine = everyone[world.rank]
        taken = [torch.empty(shape) for _ in ranks]
        dist.all_gather(taken, mine)
        for found, wanted in zip(taken, everyone, strict=True):
            assert_same(found, wanted)
        flat = torch.empty(world.size * shape[0], *shape[1:])
        stacked = torch.empty(world.size, *shape)
        dist.all_gather_into_tensor(flat, mine)
        dist.all_gather_into_tensor(stacked, mine)
        assert_same(flat, torch.cat(everyone))
        assert_same(stacked, torch.stack(everyone))
        taken = [torch.empty(shape) for _ in ranks]
        dist.gather(mine, taken if world.rank == 1 else None, dst=1)
        if world.rank == 1:
            assert_same(torch.stack(taken), torch.stack(everyone))
        part = torch.empty(shape)
        dist.scatter(part, [each + 1 for each in everyone] if world.rank == 1 else None, src=1)
        assert_same(part, mine + 1)
        dist.broadcast(part, src=world.size - 1)
        assert_same(part, everyone[-1] + 1)
        dist.reduce(part, dst=0)
        if world.rank == 0:
            assert_same(part, (everyone[-1] + 1) * world.size)
    uneven = [torch.empty(rank + 1) for rank in ranks]
    dist.all_gather(uneven, make_values(world.rank, world.rank + 1))
    assert_same(torch.cat(uneven), torch.cat([make_values(rank, rank + 1) for rank in ranks]))
    first = torch.empty(world.size * 2)
    second = torch.empty(world.size * 3)
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_gather_into_tensor(first, make_values(world.rank, 2))
        dist.all_gather_into_tensor(second, make_values(world.rank, 3))
    both.wait()
    assert_same(first, torch.cat([make_values(rank, 2) for rank in ranks]))
    assert_same(second, torch.cat([make_values(rank, 3) for rank in ranks]))


def gather_numbers(world: World) -> None:
    """Numbers are gathered behind an open collective, alone, and in pieces."""
    for count in (0, 1, 5, LONG):
        everyone = [make_values(rank, count, dtype=torch.float64) for rank in range(world.size)]
        mine = everyone[world.rank].tolist()
        total = torch.ones(LONG)
        pending = dist.all_reduce(total, async_op=True)
        gathered = world.gather_numbers(mine)
        assert gathered == [each.tolist() for each in everyone]
        pending.wait()
        assert_same(total, torch.full((LONG,), float(world.size)))
        assert world.gather_numbers(mine) == gathered


def call_the_group(world: World) -> None:
    """The methods of World call the group directly, also behind an open collective."""
    ranks = range(world.size)
    everyone = [make_values(rank, 2 * world.size) for rank in ranks]
    mine = everyone[world.rank]
    total = torch.ones(LONG)
    pending = dist.all_reduce(total, async_op=True)
    gathered = torch.empty(2 * world.size**2)
    world.all_gather_into(gathered, mine)
    assert_same(gathered, torch.cat(everyone))
    part = torch.empty(2)
    for operation, wanted in (
        (dist.ReduceOp.SUM, torch.stack(everyone).sum(0)),
        (dist.ReduceOp.MAX, torch.stack(everyone).amax(0)),
    ):
        world.reduce_scatter_into(part, mine, operation)
        assert_same(part, wanted[2 * world.rank : 2 * world.rank + 2])
    assert_same(world.all_reduce(mine, "MAX"), torch.stack(everyone).amax(0))
    assert_same(world.all_reduce(mine + 1j), torch.stack(everyone).sum(0) + world.size * 1j)
    pending.wait()
    assert_same(total, torch.full((LONG,), float(world.size)))
    alone = World(backend="shm")
    alone.all_gather_into(part, mine[:2])
    assert_same(part, mine[:2])
    alone.reduce_scatter_into(part, mine[2:4], dist.ReduceOp.SUM)
    assert_same(part, mine[2:4])


def leave_out_options(world: World) -> None:
    """Callers of the group itself may leave the options out."""
    taken = [torch.empty(3) for _ in range(world.size)]
    work = world.group.allgather([taken], [make_values(world.rank, 3)])
    work.wait()
    assert_same(
        torch.stack(taken), torch.stack([make_values(rank, 3) for rank in range(world.size)])
    )


def scatters(world: World) -> None:
    ranks = range(world.size)
    for shape in ((0,), (3, 2), (LONG,)):
        # indexed by the sending rank, then by the destination
        inputs = [[make_values(rank, *shape) + to for to in ranks] for rank in ranks]
        wanted = sum(inputs[rank][world.rank] for rank in ranks)
        out = torch.empty(shape)
        dist.reduce_scatter(out, inputs[world.rank])
        assert_same(out, wanted)
        dist.reduce_scatter_tensor(out, torch.cat(inputs[world.rank]), op=dist.ReduceOp.AVG)
        torch.testing.assert_close(out, wanted / world.size)
        dist.reduce_scatter_tensor(out, torch.stack(inputs[world.rank]))
        assert_same(out, wanted)
        stacked = torch.stack(inputs[world.rank])
        # in place, as FSDP may
        dist.reduce_scatter_tensor(stacked[world.rank], stacked)
        assert_same(stacked[world.rank], wanted)
        taken = [torch.empty(shape) for _ in ranks]
        dist.all_to_all(taken, inputs[world.rank])
        assert_same(torch.stack(taken), torch.stack([inputs[rank][world.rank] for rank in ranks]))
        flat = torch.empty(world.size * shape[0], *shape[1:])
        dist.all_to_all_single(flat, torch.cat(inputs[world.rank]))
        assert_same(flat, torch.cat([inputs[rank][world.rank] for rank in ranks]))
    out = torch.empty(world.rank + 1)
    uneven = [make_values(world.rank, to + 1) for to in ranks]
    dist.reduce_scatter(out, uneven)
    assert_same(out, sum(make_values(rank, world.rank + 1) for rank in ranks))
    sends = [world.rank + to for to in ranks]
    takes = [rank + world.rank for rank in ranks]
    rows = torch.empty(sum(takes), 2)
    dist.all_to_all_single(rows, make_values(world.rank, sum(sends), 2), takes, sends)
    assert_same(
        rows,
        torch.cat(
            [
                make_values(rank, sum(rank + to for to in ranks), 2).split(
                    [rank + to for to in ranks]
                )[world.rank]
                for rank in ranks
            ]
        ),
    )
    lists = [torch.empty(rank + world.rank) for rank in ranks]
    dist.all_to_all(lists, [make_values(world.rank, world.rank + to) for to in ranks])
    assert_same(
        torch.cat(lists), torch.cat([make_values(rank, rank + world.rank) for rank in ranks])
    )
    first = torch.empty(2)
    second = torch.empty(3)
    with dist._coalescing_manager() as _:
        dist.reduce_scatter_tensor(first, make_values(world.rank, world.size * 2))
        dist.reduce_scatter_tensor(second, make_values(world.rank, world.size * 3))
    assert_same(second, sum(make_values(rank, world.size, 3)[world.rank] for rank in ranks))


def objects_and_groups(world: World) -> None:
    ranks = range(world.size)
    found = [None] * world.size
    dist.all_gather_object(found, {"rank": world.rank, "name": "x" * world.rank})
    assert found == [{"rank": rank, "name": "x" * rank} for rank in ranks]
    lists = [world.rank, "only rank 1's" if world.rank == 1 else None]
    dist.broadcast_object_list(lists, src=1)
    assert lists == [1, "only rank 1's"]
    out = [None]
    dist.scatter_object_list(
        out, [f"to {rank}" for rank in ranks] if world.rank == 0 else None, src=0
    )
    assert out == [f"to {world.rank}"]
    groups = (
        [dist.new_group([rank, (rank + 1) % world.size]) for rank in ranks]
        if world.size > 2
        else [dist.new_group()]
    )
    for number, group in enumerate(groups):
        pair = sorted({number, (number + 1) % world.size})
        if world.rank in pair:
            mine = make_values(world.rank, 5)
            dist.all_reduce(mine, group=group)
            assert_same(mine, sum(make_values(rank, 5) for rank in pair))
            dist.broadcast(mine, src=pair[1], group=group)
    dist.barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


COLLECTIVES = (
    all_reduces,
    in_inference_mode,
    operations,
    not_contiguous,
    same_bits,
    gathers,
    gather_numbers,
    call_the_group,
    leave_out_options,
    scatters,
    objects_and_groups,
)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("function", COLLECTIVES, ids=lambda each: each.__name__)
def test_collectives(pool: Launcher, function: object, size: int) -> None:
    pool.run(function, size=size, backend="shm")


def test_failed_shared_memory_is_reported_to_all_ranks() -> None:
    with pytest.raises(
        RuntimeError, match="rank 0 could not make shared memory: no 9 MiB on this host"
    ):
        open_region(format_no_address(RuntimeError("no 9 MiB on this host")))
