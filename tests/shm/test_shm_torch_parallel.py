"""Torch's libraries for parallel training run unmodified on the backend shm.

Their training equals serial training in float64.

Inputs differ by rank: rank r has the r-th part of the global batch.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from paragrad.launch import Launcher
from paragrad.runtime.world import World

pytestmark = pytest.mark.processes

STEPS = 4
BATCH = 16


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)
    ).double()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return tuple(
        torch.randn(BATCH, width, generator=draw, dtype=torch.float64) for width in (12, 4)
    )  # type: ignore[return-value]


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]


def train_serially() -> dict[str, Tensor]:
    net = make_model()
    update = make_optimizer(net.parameters())
    for step in range(STEPS):
        inputs, target = make_batch(step)
        update.zero_grad()
        mse_loss(net(inputs), target).backward()
        update.step()
    return net.state_dict()


def train_on_part(net: nn.Module, part: slice) -> None:
    """Train on one part of every batch; the model itself averages over the parts."""
    update = make_optimizer(net.parameters())
    for step in range(STEPS):
        inputs, target = make_batch(step)
        update.zero_grad()
        mse_loss(net(inputs[part]), target[part]).backward()
        update.step()


def assert_serial_training(found: dict[str, Tensor]) -> None:
    for name, wanted in train_serially().items():
        torch.testing.assert_close(found[name].detach(), wanted, rtol=1e-10, atol=1e-12)


def get_own_part(index: int, parts: int) -> slice:
    size = BATCH // parts
    return slice(index * size, (index + 1) * size)


def gather_state(net: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(
        net, options=StateDictOptions(full_state_dict=True, cpu_offload=False)
    )


def data_parallel(world: World) -> None:
    net = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)  # several buckets
    train_on_part(net, get_own_part(world.rank, world.size))
    assert_serial_training(net.module.state_dict())


def fully_sharded(world: World) -> None:
    net = make_model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    train_on_part(net, get_own_part(world.rank, world.size))
    found = gather_state(net)
    if world.rank == 0:
        assert_serial_training(found)


def tensor_parallel(world: World) -> None:
    net = parallelize_module(
        make_model(),
        init_device_mesh("cpu", (world.size,)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    train_on_part(net, slice(None))
    assert_serial_training(gather_state(net))


def on_a_mesh(world: World) -> None:
    """Train fully sharded along one axis of a 2x2 mesh, and tensor-parallel along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(
        make_model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(net, mesh=mesh["data"])
    train_on_part(net, get_own_part(mesh["data"].get_local_rank(), 2))
    assert_serial_training(gather_state(net))


def pipelined(world: World) -> None:
    """Train a pipeline in three schedules; in the interleaved one, every rank has two stages."""
    layers = [*make_model(), nn.Identity(), nn.Identity(), nn.Identity()]
    for schedule_class in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        count = world.size * (2 if schedule_class is ScheduleInterleaved1F1B else 1)
        cuts = [
            nn.Sequential(*layers[number * 8 // count : (number + 1) * 8 // count])
            for number in range(count)
        ]
        mine = range(world.rank, count, world.size)
        modules = {number: copy.deepcopy(cuts[number]) for number in mine}
        stages = [
            PipelineStage(module, number, count, torch.device("cpu"))
            for number, module in modules.items()
        ]
        schedule = schedule_class(stages if len(stages) > 1 else stages[0], 4, loss_fn=mse_loss)
        parameters = list(itertools.chain(*(module.parameters() for module in modules.values())))
        update = make_optimizer(parameters) if parameters else None
        for step in range(STEPS):
            inputs, target = make_batch(step)
            for parameter in parameters:
                parameter.grad = None
            first = 0 in modules
            last = count - 1 in modules
            schedule.step(*([inputs] if first else []), **({"target": target} if last else {}))
            if update:
                update.step()
        wanted = list(train_serially().values())
        before = [sum(len(list(cut.parameters())) for cut in cuts[:number]) for number in mine]
        for start, module in zip(before, modules.values(), strict=True):
            for place, parameter in enumerate(module.parameters()):
                torch.testing.assert_close(
                    parameter.detach(), wanted[start + place], rtol=1e-10, atol=1e-12
                )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("function", "size"),
    [
        (data_parallel, 2),
        (data_parallel, 4),
        (fully_sharded, 2),
        (fully_sharded, 4),
        (tensor_parallel, 2),
        (tensor_parallel, 4),
        (on_a_mesh, 4),
        (pipelined, 2),
        (pipelined, 4),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_torch_parallel_libraries_equal_serial(pool: Launcher, function: object, size: int) -> None:
    pool.run(function, size=size, backend="shm")
