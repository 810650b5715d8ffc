"""Sub-worlds: every collective works among some of the ranks of a world.

Inputs differ by rank.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paragrad.errors import RankFailed
from paragrad.executors.transport import run_all_reduce
from paragrad.launch import Launcher
from paragrad.runtime.mesh import Axis
from paragrad.runtime.world import World
from paragrad.schedules.ring import Ring

pytestmark = pytest.mark.processes

NAMES = ("data", "tensor", "pipeline")
GRIDS = ((1, 1), (2, 2), (4, 1), (3, 2), (2, 2, 2))
BACKENDS = ("gloo", "shm")


@pytest.fixture(scope="module")
def eight() -> Iterator[Launcher]:
    with Launcher(8) as ranks:
        run = ranks.run
        ranks.run = lambda *args, **kwargs: run(
            *args, **{"timeout": 30.0, "deadline": 100.0, **kwargs}
        )  # type: ignore[method-assign]
        yield ranks


def make_numbers(rank: int) -> Tensor:
    return torch.arange(12.0, dtype=torch.float64) * (rank + 2) + 100 * rank


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found, wanted), (found, wanted)


def check_operations(world: World, mine: int, members: Sequence[int]) -> None:
    """Run every operation of a World whose ranks are `members` of the launched world."""
    assert (world.size, members[world.rank]) == (len(members), mine)
    everyone = torch.stack([make_numbers(member) for member in members])
    assert_same(world.all_reduce(make_numbers(mine)), everyone.sum(0))
    assert_same(world.all_reduce(make_numbers(mine), "MAX"), everyone.amax(0))
    assert_same(world.all_reduce(make_numbers(mine), "MIN"), everyone.amin(0))
    assert_same(torch.stack(world.all_gather(make_numbers(mine))), everyone)
    copied = make_numbers(mine)
    world.copy_from_first(copied)
    assert_same(copied, everyone[0])
    assert world.broadcast_object({"rank": mine, "long": "x" * mine}) == {
        "rank": members[0],
        "long": "x" * members[0],
    }
    for length in (0, 230, 1000):  # in one message, about its limit, and in two
        texts = ["x" * (length + member) for member in members]
        assert world.broadcast_object("x" * (length + mine)) == texts[0]
        assert world.gather_objects("x" * (length + mine)) == (texts if world.rank == 0 else [])
    world.barrier()
    world.check_collectives()
    played = make_numbers(mine)
    run_all_reduce(Ring(), played, world)
    assert_same(played, everyone.sum(0))


def list_ranks_along(sizes: Sequence[int], rank: int, along: Sequence[int]) -> list[int]:
    """Return the ranks that differ from a rank along these axes only, by the definition.

    Along the last axis, consecutive ranks differ by one.
    """

    def find_coordinates(rank: int) -> list[int]:
        at = []
        for size in reversed(sizes):
            rank, rest = divmod(rank, size)
            at.insert(0, rest)
        return at

    own = find_coordinates(rank)
    return [
        other
        for other in range(torch.Size(sizes).numel())
        if all(
            find_coordinates(other)[axis] == own[axis]
            for axis in range(len(sizes))
            if axis not in along
        )
    ]


# ---- along axes ------------------------------------------------------------------------------
def check_all_axes(world: World, sizes: Sequence[int]) -> None:
    axes = tuple(map(Axis, NAMES, sizes))
    whole = world.add_axes(*axes)
    assert whole.axes == axes
    next(whole.schedule_numbers)
    for along in chain.from_iterable(
        combinations(range(len(sizes)), count) for count in range(len(sizes) + 1)
    ):
        part = whole.select_axes([NAMES[axis] for axis in reversed(along)])
        members = list_ranks_along(sizes, world.rank, along)
        assert part.axes == tuple(axes[axis] for axis in along)
        assert (part.backend, part.timeout, part.device, part.stop) == (
            world.backend,
            world.timeout,
            world.device,
            world.stop,
        )
        assert (part.group is None) == (len(members) == 1)
        assert next(part.schedule_numbers) == 0
        check_operations(part, world.rank, members)
        twin = part.duplicate()
        assert (twin.axes, twin.size == 1) == (part.axes, twin.group is part.group)
        check_operations(twin, world.rank, members)
    check_operations(whole, world.rank, range(world.size))


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_every_collective_along_every_choice_of_axes(
    eight: Launcher, sizes: tuple[int, ...], backend: str
) -> None:
    eight.run(check_all_axes, sizes, size=torch.Size(sizes).numel(), backend=backend)


def check_nested_worlds(world: World) -> None:
    whole = world.add_axes(("data", 2), ("tensor", 2), ("pipeline", 2))
    plane = whole.select_axes(("pipeline", "data"))
    check_operations(
        plane.select_axes("data"), world.rank, list_ranks_along((2, 2, 2), world.rank, (0,))
    )
    check_operations(
        plane.select_axes("pipeline"), world.rank, list_ranks_along((2, 2, 2), world.rank, (2,))
    )
    check_operations(
        plane.duplicate().select_axes("data"),
        world.rank,
        list_ranks_along((2, 2, 2), world.rank, (0,)),
    )
    with pytest.raises(
        ValueError, match=r"no axis tensor; the world has data\(2\) \* pipeline\(2\)"
    ):
        plane.select_axes("tensor")
    workers = world.split_ranks([range(6)])  # the last two are servers
    if workers is not None:
        check_operations(
            workers.add_axes(("data", 3), ("tensor", 2)).select_axes("data"),
            world.rank,
            list_ranks_along((3, 2), world.rank, (0,)),
        )
    assert (workers is None) == (world.rank > 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sub_world_of_a_sub_world(eight: Launcher, backend: str) -> None:
    eight.run(check_nested_worlds, backend=backend)


# ---- among ranks -----------------------------------------------------------------------------
def check_roots(world: World) -> None:
    found = world.split_ranks([[3, 0], [1]])
    if world.rank == 2:
        assert found is None
    else:
        assert found is not None
        members = [1] if world.rank == 1 else [3, 0]
        check_operations(found, world.rank, members)
        check_operations(found.duplicate(), world.rank, members)
        hosted = found.duplicate(through_host=True)
        assert hosted.backend == world.backend  # but gloo instead of NCCL
        check_operations(hosted, world.rank, members)
    assert world.split_ranks([]) is None
    alone = world.split_ranks([[rank] for rank in range(world.size)])
    assert alone is not None
    assert (alone.rank, alone.size, alone.group) == (0, 1, None)
    check_operations(world, world.rank, range(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_root_rank_is_of_the_sub_world(pool: Launcher, backend: str) -> None:
    """The root of a collective is the first rank of the sub-world.

    Earlier, `agreed` broadcast from rank 0 of the launched world, which has the number 1 among
    ranks 3 and 0. If it was not a member, torch raised an error. A rank in no set continues
    without a sub-world. A rank that is alone in its set has a usual world of size 1.
    """
    pool.run(check_roots, size=4, backend=backend)


def check_stage_groups(world: World) -> None:
    """Create groups of ranks 0 and 1 only, then of ranks 2 and 3, then of all ranks."""
    first = world.split_ranks([[0, 1]])
    second = world.split_ranks([[2, 3], [0, 1]])
    assert second is not None
    if first is not None:
        for _ in range(2):
            first = first.duplicate()
            check_operations(first, world.rank, (0, 1))
    members = (0, 1) if world.rank < 2 else (2, 3)
    check_operations(second.duplicate(), world.rank, members)
    swapped = second.split_ranks([[1, 0]])
    assert swapped is not None
    check_operations(swapped, world.rank, members[::-1])
    check_operations(world.duplicate(), world.rank, range(4))
    group = dist.new_group([1, 2])  # the user's own
    if world.rank in (1, 2):
        mine = make_numbers(world.rank)
        dist.all_reduce(mine, group=group)
        assert_same(mine, make_numbers(1) + make_numbers(2))
    check_operations(world.duplicate(), world.rank, range(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_are_created_without_the_other_ranks(pool: Launcher, backend: str) -> None:
    """Some ranks can create a group without the others.

    Torch names a group by the number of groups that a rank has created. A stage with batch norm
    duplicates its group, and other stages do not. So it would wait for ever in the next group
    that it shares with them. Also, groups of the same name would use the same keys in the store.
    """
    pool.run(check_stage_groups, size=4, backend=backend)


def split_differently(world: World) -> None:
    world.split_ranks([[0, 1]] if world.rank != 2 else [[0, 1], [2, 3]])


def test_different_rank_sets_are_reported(pool: Launcher) -> None:
    with pytest.raises(
        RankFailed,
        match=r"rank 0 asks for worlds among \[\[0, 1\]\], rank 2 among \[\[0, 1\], \[2, 3\]\]",
    ):
        pool.run(split_differently, size=4)


LEAVES = """
    import sys
    from pathlib import Path

    from paragrad.runtime.rendezvous import join_world

    with join_world(int(sys.argv[1]), 2, Path(sys.argv[2]), timeout=30.0) as world:
        grid = world.add_axes(("data", 2), ("tensor", 1))
        kept = [world, grid, grid.select_axes("data"), grid.select_axes("tensor"), grid.duplicate(),
                grid.duplicate().split_ranks([[1, 0]])]
        assert [each.group is None for each in kept] == [False, False, False, True, False, False]
    print([each.group for each in kept] == [None] * len(kept))
"""


@pytest.mark.table
def test_leaving_a_world_leaves_its_sub_worlds(tmp_path: Path) -> None:
    """A process that leaves a world also releases all worlds made from it.

    Earlier, it released the world itself, but not its copies with axes. Their gloo threads still
    existed when the interpreter ended, and aborted it in two of ten runs.
    """
    script = tmp_path / "leaves.py"
    script.write_text(textwrap.dedent(LEAVES))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [(process.returncode, out) for process, (out, _) in zip(ranks, told, strict=True)] == [
        (0, "True\n")
    ] * 2, told


# ---- torch's engines -------------------------------------------------------------------------
def run_torch_engines(world: World) -> None:
    """Run one backward of DDP and one of FSDP2 along an axis of the grid.

    Each group along this axis has its own model.
    """
    whole = world.add_axes(("data", 2), ("tensor", 2))
    data = whole.select_axes("data")
    tensor = whole.select_axes("tensor")

    def make_model() -> nn.Linear:
        torch.manual_seed(tensor.rank)
        return nn.Linear(12, 4, dtype=torch.float64)

    wanted = make_model()
    for member in list_ranks_along((2, 2), world.rank, (0,)):
        (wanted(make_numbers(member)[None]).square().sum() / data.size).backward()
    ddp = DistributedDataParallel(make_model(), process_group=data.group)
    ddp(make_numbers(world.rank)[None]).square().sum().backward()
    torch.testing.assert_close(ddp.module.weight.grad, wanted.weight.grad, rtol=1e-12, atol=0)
    mesh = DeviceMesh.from_group(data.group, "cpu")
    sharded = fully_shard(make_model(), mesh=mesh)
    sharded(make_numbers(world.rank)[None]).square().sum().backward()
    torch.testing.assert_close(
        sharded.weight.grad.full_tensor(), wanted.weight.grad, rtol=1e-12, atol=0
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ddp_and_fsdp_run_over_a_sub_world(pool: Launcher, backend: str) -> None:
    pool.run(run_torch_engines, size=4, backend=backend)
