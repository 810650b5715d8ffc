"""The whole model exists once on a host, until it is divided.

These tests compare the model of ranks that did not build it, and measure memory.
"""

from __future__ import annotations

import ctypes
import gc
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from equality_table import VECTORS, make_job, resolve_text
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import paragrad as pg
from paragrad.datasets.loading import separate_target
from paragrad.engine.state import shared_initialization
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.runtime import allocator
from paragrad.runtime.generators import fingerprint_generators
from paragrad.runtime.world import World
from paragrad.trainer import exchange_setup
from paragrad.trainer.trainer import Trainer

pytestmark = pytest.mark.processes


class Everything(nn.Module):
    """A model with all that a model may hold.

    It has a tied weight, views of one storage, buffers of all kinds, and tensors and functions in
    Python attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.last = nn.Linear(10, 10)
        self.last.weight = self.first.weight
        flat = torch.randn(30)
        self.views = nn.ParameterList([nn.Parameter(flat[:10]), nn.Parameter(flat[10:])])
        self.frozen = nn.Parameter(torch.randn(3, 4).t(), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("counts", torch.arange(3))
        self.table = torch.randn(5)
        self.array = numpy.random.rand(3)
        self.drawn = random.random()
        self.layer_of = {"first": self.first}
        self.end = lambda x: x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(torch.tanh(self.first(x))))


class Normed(nn.Module):
    """A model with parametrized modules, which torch refuses to pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            parametrizations.weight_norm(nn.Linear(10, 10)) for _ in range(2)
        )


def collect_state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def compare_shared_model(world: World, job: Job) -> tuple[str, str]:
    """Compare the shared model with one that this rank builds; return the choice and its reason."""
    begun = shared_initialization.build_shared_model(world, job.build_model)
    after = fingerprint_generators()
    wanted = job.build_model()
    model = begun.model
    assert after == fingerprint_generators()
    assert list(collect_state(model)) == list(collect_state(wanted))
    for name, tensor in collect_state(wanted).items():
        ours = collect_state(model)[name]
        assert torch.equal(ours, tensor), name
        assert (ours.stride(), ours.requires_grad, ours.dtype) == (
            tensor.stride(),
            tensor.requires_grad,
            tensor.dtype,
        )
    for tensor in model.parameters():  # no other rank has these parameters
        tensor.data.fill_(world.rank)
    world.barrier()
    assert all(bool((tensor == world.rank).all()) for tensor in model.parameters())
    if isinstance(model, Everything):
        check_everything(model, wanted)  # type: ignore[arg-type]
    return begun.choice, begun.reason


def check_everything(model: Everything, wanted: Everything) -> None:
    assert model.last.weight is model.first.weight
    one, other = (view.untyped_storage() for view in model.views)
    assert one.data_ptr() == other.data_ptr()
    assert torch.equal(model.table, wanted.table)
    assert (model.drawn, model.array.tolist()) == (wanted.drawn, wanted.array.tolist())
    assert model.layer_of["first"] is model.first
    assert model(torch.zeros(2, 10)).shape == (2, 10)


def test_whole_model_is_received(pool: Launcher) -> None:
    for picked, _ in pool.run(
        compare_shared_model, make_job("everything", Everything, VECTORS), size=3
    ):
        assert picked == "built once on each host"


def test_unpicklable_model_is_built_on_every_rank(pool: Launcher) -> None:
    for picked, because in pool.run(
        compare_shared_model, make_job("normed", Normed, VECTORS), size=3
    ):
        assert picked == "built by every rank"
        assert "parametrized modules is only supported through state_dict()" in because


def build_without_shared_memory(world: World) -> tuple[str, str, list[bool]]:
    """Build a model and load a checkpoint, if no process may open the memory of another.

    Return the choice, its reason, and for each load whether this rank read the values.
    """
    loads: list[bool] = []
    with mock.patch.object(
        shared_initialization, "open_region", side_effect=RuntimeError("not from here")
    ):
        begun = shared_initialization.build_shared_model(world, lambda: nn.Linear(2, 2))
        shared_initialization.load_shared_model(world, begun.hosts, begun.model, loads.append)
    return begun.choice, begun.reason, loads


def test_every_rank_has_a_copy_without_shared_memory(pool: Launcher) -> None:
    first, *others = pool.run(build_without_shared_memory, size=3)
    assert first[2] == [True]
    for picked, because, loads in others:
        assert picked == "built by every rank"
        assert "not from here" in because
        assert loads == [False, True]


def fail_to_build() -> nn.Module:
    raise ValueError("no such model")


def test_failing_model_construction_is_reported(pool: Launcher) -> None:
    with pytest.raises(pg.RankFailed, match="no such model"):
        pool.run(compare_shared_model, make_job("raises", fail_to_build, VECTORS), size=3)


def has_private_values(world: World) -> bool:
    """Make the values of a copy of the modules private to it, and change them.

    Return whether the whole model keeps its values, and the copy its tied weight.
    """
    whole = Everything()
    model = shared_initialization.copy_modules(whole)
    values = whole.frozen.clone()
    assert model.first.weight.data_ptr() == whole.first.weight.data_ptr()
    shared_initialization.make_values_private(model)
    model.frozen.data.zero_()
    model.views[0].data.zero_()
    return (
        torch.equal(whole.frozen, values)
        and bool(whole.views[0].all())
        and model.last.weight is model.first.weight
    )


def test_shard_has_its_own_storage() -> None:
    assert has_private_values(World())


# ---- memory ----------------------------------------------------------------------------------
LAYERS = 16
SIZE = 1024
WHOLE = LAYERS * SIZE * (SIZE + 1) * 4
# bytes that MKL may keep in a process for products of such matrices (none with
# MKL_DISABLE_FAST_MM=1)
OF_MKL = 5 << 20


def make_large_model(size: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(LAYERS)))


def read_proportional_memory() -> int:
    """Return the bytes of memory of this process, with its part of shared memory.

    Files do not count. If other processes that use torch end, its libraries count for more in the
    remaining processes.
    """
    lines = dict(
        line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(1024 * int(lines[each].split()[0]) for each in ("Pss_Anon", "Pss_Shmem"))


def measure_added_memory(world: World, job: Job, text: str, unchecked: bool) -> list[int]:
    """Return the additional bytes of a rank before the model is cut, and after the first step."""

    def measure_memory() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # free memory of the heap belongs to no model
        world.barrier()
        found = read_proportional_memory()
        world.barrier()
        return found

    def measure_and_cut(*arguments: Any, **more: Any) -> Any:
        seen.append(measure_memory())
        return divided(*arguments, **more)

    allocator.return_freed_memory()  # of earlier trainings
    seen = [measure_memory()]
    divided = exchange_setup.build_model_partition
    trainer = Trainer.build_for_job(world, job, resolve_text(text), skip_first_step_check=unchecked)
    with mock.patch.object(exchange_setup, "build_model_partition", measure_and_cut):
        trainer.step(*separate_target(next(trainer.batches(job.train, job.batch, 0))))
    seen.append(measure_memory())
    trainer.close()
    return [each - seen[0] for each in seen[1:]]


@pytest.mark.parametrize("unchecked", [True, pytest.param(False, marks=pytest.mark.story)])
def test_whole_model_is_on_a_host_once(pool: Launcher, unchecked: bool) -> None:
    """Earlier, every rank had the whole model until it was cut.

    So there were four models on four ranks, and more for the comparison with one worker's step.
    """

    def measure_ranks(size: int) -> Any:
        points = torch.utils.data.TensorDataset(torch.randn(8, size), torch.randint(4, (8,)))
        job = make_job(
            "large",
            lambda: make_large_model(size),
            points,
            batch=8,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        return zip(
            *pool.run(measure_added_memory, job, "place(4, cut=[4, 4, 4, 4])", unchecked, size=4),
            strict=True,
        )

    # the memory that a rank needs for its first training belongs to no model
    measure_ranks(8)
    before, after = measure_ranks(SIZE)
    # on rank 0: the outcome of one worker's step, and of its rounding baseline
    assert sum(before) <= 1.15 * WHOLE + (0 if unchecked else 2 * WHOLE)
    assert max(before[1:]) <= 0.1 * WHOLE
    # each rank has its part, and the gradients
    assert sum(after) <= 2.2 * WHOLE + 4 * OF_MKL
    assert max(after) <= 0.6 * WHOLE + OF_MKL


class Observed(nn.Module):
    """A model whose first forward resizes a buffer, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.largest.resize_(8).copy_(x.detach().amax(0))
        return self.last(x)  # type: ignore[no-any-return]


def test_buffer_that_is_resized_is_named(tmp_path: Path) -> None:
    """Earlier, the message was torch's: Trying to resize storage that is not resizable."""
    with pytest.raises(pg.RankFailed, match=r"largest.*had another one when the model was divided"):
        pg.train(make_job("observed", Observed, VECTORS), "place(2)", runs=tmp_path)
