"""Loading of samples: batches of any structure, random transforms, and loader processes.

The random numbers of a sample depend on (seed, epoch, index) only. The order of the samples is
exact for any number of loaders.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from equality_table import JOBS, VECTORS, make_mlp
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.datasets.loader_processes import SharedBatch, load_batches
from paragrad.datasets.loading import (
    Samples,
    convert_batch,
    map_leaves,
    separate_target,
    slice_batch,
)
from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import StepFailed
from paragrad.jobs.job import CPU
from paragrad.jobs.loss import call_model
from paragrad.launch import Launcher
from paragrad.record.step_log import StepLog
from paragrad.strategies.shares import Division
from paragrad.trainer.batch import Batch, BatchFeed, make_rank_batch
from paragrad.trainer.settings import Settings
from paragrad.validation.inspect_job import inspect_job
from paragrad.validation.validate import validate_run

# some of these tests start more loaders than this machine has cores
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

Point = namedtuple("Point", "x y")


class Augmented(Dataset):
    """A dataset that draws from torch, numpy and random for every sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = (
            torch.rand(10)
            + random.random()
            + torch.tensor(numpy.random.rand(10), dtype=torch.float32)
        )
        return noise + index, index % 4


def load_augmented(
    seed: int = 0,
    epoch: int = 0,
    batches: tuple[tuple[int, ...], ...] = ((3, 1), (2,)),
    loaders: int = 0,
) -> list[Tensor]:
    return [
        batch[0]
        for batch in load_batches(
            Samples(Augmented(), seed), [(epoch, list(batch)) for batch in batches], loaders
        )
    ]


def test_sample_draws_by_seed_epoch_and_index() -> None:
    first = torch.cat(load_augmented())
    assert torch.equal(first, torch.cat(load_augmented(batches=((3,), (1, 2)))))
    assert torch.equal(first[1:], torch.cat(load_augmented(batches=((1,), (2,)))))
    assert not torch.equal(first, torch.cat(load_augmented(seed=1)))
    assert not torch.equal(first, torch.cat(load_augmented(epoch=1)))


@pytest.mark.parametrize(("loaders", "most"), [(0, 1), (1, 3)])
def test_batch_order_is_computed_lazily(loaders: int, most: int) -> None:
    """Batches are computed when they are needed.

    Earlier, all batches of an epoch were computed before the first one. This took about a hundred
    bytes per sample in every rank.
    """
    made: list[int] = []

    def make_batches() -> Iterator[Batch]:
        for step in range(20):
            made.append(step)
            yield make_rank_batch(
                SampleOrder(40, 2, 0), 0, range(2 * step, 2 * step + 2), Division(), (0,)
            )

    given = BatchFeed(StepLog(None), CPU, None).iterate_batches(
        Samples(Augmented()), make_batches(), loaders
    )
    next(given)
    assert len(made) <= most  # each loader fetches two batches ahead
    assert len(list(given)) == 19
    assert made == list(range(20))


@pytest.mark.parametrize("loaders", [1, 2, 3])
def test_loaders_give_the_same_numbers_in_the_same_order(loaders: int) -> None:
    batches = tuple((start, start + 1) for start in range(0, 40, 2))
    for ours, theirs in zip(
        load_augmented(batches=batches),
        load_augmented(batches=batches, loaders=loaders),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loaders", [0, 2])
def test_global_generators_stay_unchanged(loaders: int) -> None:
    before = torch.get_rng_state(), numpy.random.get_state()[1].copy(), random.getstate()
    load_augmented(loaders=loaders)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == numpy.random.get_state()[1]).all()  # type: ignore[index]
    assert before[2] == random.getstate()


def test_training_with_loaders_equals_serial(pool: Launcher, tmp_path: Path) -> None:
    """Random transforms in loader processes give the losses and parameters of serial.

    One row is data(2) with two loaders in each rank.
    """
    job = pg.Job(
        name="augmented",
        model=lambda: nn.Linear(10, 4),
        loss=nn.functional.cross_entropy,
        train=Augmented(),
        test=Augmented(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=7,
        epochs=2,
        dtype=torch.float64,
        metric=pg.accuracy,
    )
    runs = []
    for text, loaders in (
        ("serial", 0),
        ("serial", 1),
        ("data(2, reduce=ring)", 2),
        ("data(3, micro=2)", 1),
    ):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(
            train_on_ranks(pool, validate_run(job, text, Settings(loaders=loaders)), folder)
        )
    for finished in runs[1:]:
        assert finished.losses == pytest.approx(runs[0].losses, rel=1e-10)
        assert finished.test == runs[0].test
        for name, tensor in finished.model().state_dict().items():
            assert torch.allclose(
                tensor, runs[0].model().state_dict()[name], rtol=1e-10, atol=1e-12
            )


def test_failing_loader_names_rank_and_error(pool: Launcher, tmp_path: Path) -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index == 39:
                raise OSError("picture 39 is broken")
            return super().__getitem__(index)

    job = JOBS["mlp"].replace(train=Broken())
    with pytest.raises(pg.RankFailed, match="picture 39 is broken"):
        train_on_ranks(pool, validate_run(job, "data(2)", Settings(loaders=1)), tmp_path)


def test_whole_batches_use_the_batch_method_of_a_dataset() -> None:
    assert torch.equal(Samples(VECTORS)[0, [3, 5]][0], VECTORS.tensors[0][[3, 5]])
    assert torch.equal(Samples(Subset(VECTORS, [3, 5]))[0, [1, 0]][0], VECTORS.tensors[0][[5, 3]])

    class Shifted(TensorDataset):
        """A subclass with its own transform, which must be called for each sample."""

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:  # type: ignore[override]
            assert isinstance(index, int)
            x, y = super().__getitem__(index)
            return x + 1, y

    assert torch.equal(Samples(Shifted(*VECTORS.tensors))[0, [3]][0], VECTORS.tensors[0][[3]] + 1)


def load_rows(tensors: tuple[Tensor, ...], batch: int = 16) -> Iterator[Any]:
    """Load the batches of an epoch from a TensorDataset."""
    samples = Samples(TensorDataset(*tensors))
    order = SampleOrder(len(samples), batch, 0)
    return load_batches(
        samples,
        (
            (0, order.select_indices(0, positions), range(len(positions)))
            for positions in order.list_batches()
        ),
    )


@pytest.mark.parametrize("columns", [4, 3])
@pytest.mark.parametrize("rows", [1000, 2])
def test_small_batches_of_tensors_are_selected_together(rows: int, columns: int) -> None:
    """They are what selecting each by itself gives; each begins as memory of its own does."""
    inputs, targets = torch.randn(rows, columns), torch.arange(rows)
    order = SampleOrder(rows, 16, 0)
    batches = list(load_rows((inputs, targets)))
    assert len(batches) == order.steps
    for (found_inputs, found_targets), positions in zip(batches, order.list_batches(), strict=True):
        indices = order.get_indices(0, positions)
        assert torch.equal(found_inputs, inputs[indices])
        assert torch.equal(found_targets, targets[indices])
        assert found_inputs.data_ptr() % 64 == found_targets.data_ptr() % 64 == 0


@pytest.mark.parametrize("is_in_numpy", [False, True])
def test_batches_show_a_change_of_the_dataset(is_in_numpy: bool) -> None:
    """A loop may correct labels between two steps; the next batch has the new ones."""
    labels = numpy.zeros(64, dtype=numpy.int64)
    targets = torch.from_numpy(labels) if is_in_numpy else torch.zeros(64, dtype=torch.int64)
    batches = load_rows((torch.randn(64, 4), targets))
    assert not next(batches)[1].any()
    if is_in_numpy:
        labels += 1
    else:
        targets.add_(1)
    assert next(batches)[1].all()


def test_batches_show_other_tensors_of_the_dataset() -> None:
    """New tensors had the same version as those before, and were not seen for many batches."""
    dataset = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))
    order = SampleOrder(64, 16, 0)
    batches = load_batches(
        Samples(dataset), ((0, order.get_indices(0, each)) for each in order.list_batches())
    )
    assert not next(batches)[1].any()
    dataset.tensors = (dataset.tensors[0], torch.ones(64, dtype=torch.int64))
    assert next(batches)[1].all()


def change_by_data(inputs: Tensor) -> None:
    inputs.data.add_(1)


def change_by_numpy(inputs: Tensor) -> None:
    inputs.numpy()[:] += 1


def change_by_storage(inputs: Tensor) -> None:
    inputs.untyped_storage().copy_(torch.full((64, 4), 7.0).untyped_storage())


def change_by_fused_optimizer(inputs: Tensor) -> None:
    weight = nn.Parameter(inputs)
    weight.grad = torch.ones_like(inputs)
    torch.optim.Adam([weight], fused=True).step()


@pytest.mark.parametrize(
    "change",
    [change_by_data, change_by_numpy, change_by_storage, change_by_fused_optimizer],
    ids=lambda each: each.__name__,
)
def test_changes_that_torch_does_not_count_are_refused(change: Callable[[Tensor], None]) -> None:
    """They were seen up to 15 batches later, without a message."""
    inputs = torch.randn(64, 4)
    batches = load_rows((inputs, torch.arange(64)))
    next(batches)
    change(inputs)
    with pytest.raises(StepFailed, match=r"changed in the middle of an epoch.* last 4 batches"):
        list(batches)
    # in the next epoch, the batches are new
    first, *_ = load_rows((inputs, torch.arange(64)))
    assert torch.equal(first[0], inputs[first[1]])


@pytest.mark.parametrize("kind", ["inference", "gradient", "numpy", "shorter"])
def test_tensors_of_another_kind_are_selected_one_by_one(kind: str) -> None:
    """The dataset gets tensors that cannot be selected together, in the middle of an epoch."""
    dataset = TensorDataset(torch.randn(64, 4))
    keys = [(0, list(range(start, start + 8))) for start in range(0, 64, 8)]
    batches = load_batches(Samples(dataset), keys)
    next(batches)
    changed = torch.randn(64, 4)
    if kind == "inference":
        with torch.inference_mode():
            changed = changed * 2
    elif kind == "gradient":
        changed.requires_grad_()
    elif kind == "numpy":
        changed = torch.from_numpy(changed.numpy().copy())
    dataset.tensors = (changed[:16],) if kind == "shorter" else (changed,)
    second = next(batches)[0]
    assert torch.equal(second, changed[8:16])
    assert second.requires_grad == (kind == "gradient")
    dataset.tensors = (changed,)
    if kind == "numpy":
        changed.numpy()[:] += 1
    for start, (found,) in zip(range(16, 64, 8), batches, strict=True):
        assert torch.equal(found, changed[start : start + 8])


def test_shared_memory_is_selected_one_by_one() -> None:
    """Another process may change it, which torch does not count here."""
    inputs = torch.randn(64, 4).share_memory_()
    batches = load_rows((inputs, torch.arange(64)))
    next(batches)
    inputs.numpy()[:] = 3.0
    assert all((found == 3).all() for found, _ in batches)


def test_a_batch_that_is_enlarged_in_place_changes_no_later_one() -> None:
    inputs = torch.randn(64, 4)
    for found, targets in load_rows((inputs, torch.arange(64))):
        assert torch.equal(found, inputs[targets])
        found.resize_(17, 4)
        found[16] = 9.0


def test_a_batch_that_is_taken_in_inference_mode() -> None:
    batches = load_rows((torch.randn(64, 4), torch.arange(64)))
    with torch.inference_mode():
        next(batches)
    weight = torch.ones(4, requires_grad=True)
    for inputs, _ in batches:
        (inputs * weight).sum().backward()


def test_batches_of_inference_tensors() -> None:
    """They have no version that shows a change, so each batch is selected by itself."""
    with torch.inference_mode():
        inputs = torch.randn(64, 4)
    assert len(list(load_rows((inputs, torch.arange(64))))) == 4


def test_joint_batches_are_aligned_after_a_short_one() -> None:
    """A client's batches of two epochs were selected together, after a last batch of 9 samples."""
    inputs = torch.randn(25, 4)
    keys = [(0, list(range(16))), (0, list(range(16, 25))), (1, list(range(16)))]
    for found, (_, indices) in zip(
        load_batches(Samples(TensorDataset(inputs)), keys), keys, strict=True
    ):
        assert torch.equal(found[0], inputs[indices])
        assert found[0].data_ptr() % 64 == 0


def test_a_batch_that_is_changed_in_place_changes_no_other() -> None:
    scale = torch.ones((), requires_grad=True)
    first, second = (inputs for inputs, _ in itertools.islice(load_rows(VECTORS.tensors), 2))
    kept = second.clone()
    first.mul_(scale)
    assert first.requires_grad
    assert not second.requires_grad
    assert torch.equal(second, kept)


def test_nested_batches() -> None:
    batch = {
        "x": torch.arange(6.0).view(3, 2),
        "many": [torch.arange(3), {"deep": torch.arange(3.0)}],
        "texts": ["a", "b", "c"],
        "point": Point(torch.arange(3.0), torch.tensor(5)),
        "n": 7,
    }
    part = slice_batch(batch, slice(1, 3), 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["many"][0].tolist() == [1, 2]
    assert part["many"][1]["deep"].tolist() == [1, 2]
    assert part["texts"] == ["b", "c"]
    # texts in a tuple, as torch's collate returns them
    assert slice_batch(("a", "b", "c"), slice(1, 3), 3) == ("b", "c")
    with pytest.raises(ValueError, match=r"shape \(7, 3\), which cannot be cut into micro-batches"):
        slice_batch(torch.zeros(7, 3), slice(1, 3), 3)  # time first
    assert isinstance(part["point"], Point)
    assert part["point"].x.tolist() == [1, 2]
    # a tensor without a first dimension belongs to all samples
    assert part["point"].y == 5
    assert part["n"] == 7
    moved = convert_batch(batch, CPU, torch.float64)
    assert moved["x"].dtype == moved["many"][1]["deep"].dtype == torch.float64
    assert moved["many"][0].dtype == torch.int64
    assert map_leaves(lambda leaf: leaf, batch)["texts"] is batch["texts"]


def test_model_call_by_batch_type() -> None:
    def model(x: int, y: int = 0) -> tuple[int, int]:
        return x, y

    assert call_model(model, 1) == (1, 0)
    assert call_model(model, (1, 2)) == (1, 2)
    assert call_model(model, {"y": 2, "x": 1}) == (1, 2)
    assert separate_target((1, 2)) == (1, 2)
    assert separate_target({"x": 1}) == ({"x": 1}, {"x": 1})
    with pytest.raises(pg.Refused, match=r"must be a pair .input, target. or a dict, got Tensor"):
        separate_target(torch.ones(3))


def test_random_collate_with_a_batched_dataset() -> None:
    def mix_samples(samples: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([x for x, _ in samples]) + torch.rand(1)

    samples = Samples(VECTORS, 3, mix_samples)
    assert torch.equal(samples[0, [4, 5]] - samples[0, [4]], samples[0, [4, 5]] - samples[0, [4]])
    assert torch.equal(samples[0, [4, 5]][:1], samples[0, [4]])
    assert not torch.equal(samples[1, [4]], samples[0, [4]])


def test_complex_buffers_keep_their_imaginary_part() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 2)
            self.register_buffer("turns", torch.polar(torch.ones(2), torch.arange(2.0)))

    for dtype, expected in ((torch.float32, torch.complex64), (torch.float64, torch.complex128)):
        model = JOBS["mlp"].replace(model=Rotary, dtype=dtype).build_model()
        assert model.turns.dtype == expected  # type: ignore[union-attr]
        assert float(model.turns.imag[1]) == pytest.approx(0.8414710)


def test_data_loader_as_dataset_is_refused() -> None:
    """A DataLoader as the dataset is refused, with the repair.

    Earlier, the Job said "'DataLoader' object is not callable", and a user's own loop said "not
    subscriptable". Neither message named the repair.
    """
    wanted = (
        "is a DataLoader, which makes batches of its own; give the dataset itself, the global "
        "batch size as batch=7"
    )
    loader = DataLoader(VECTORS, batch_size=7)
    for train in (loader, lambda folder: loader):
        with pytest.raises(pg.Refused, match=f"job mlp: train {wanted}"):
            inspect_job(JOBS["mlp"].replace(train=train))
    model = make_mlp()
    with (
        pg.parallelize(
            model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
        ) as trainer,
        pytest.raises(pg.Refused, match=f"the dataset {wanted}"),
    ):
        next(trainer.batches(loader, batch=12, epoch=0))


def test_refused_data_loader_is_told_where_its_sampler_goes() -> None:
    """Whoever followed the repair lost the weights of the sampler without a word."""
    weighted = WeightedRandomSampler([1.0] * len(VECTORS), 20)
    repeated = RandomSampler(VECTORS, replacement=True)
    for options in (
        {"batch_size": 7, "sampler": weighted},
        {"batch_size": 7, "sampler": repeated},
        {"batch_sampler": BatchSampler(weighted, 7, drop_last=False)},
    ):
        loader: DataLoader[Any] = DataLoader(VECTORS, **options)
        with pytest.raises(pg.Refused, match="its sampler as sampler=, and its collate_fn"):
            inspect_job(JOBS["mlp"].replace(train=loader))


def test_refused_data_loader_without_a_sampler_of_its_own() -> None:
    for options in ({"shuffle": True}, {"sampler": DistributedSampler(VECTORS, 2, 0)}):
        loader: DataLoader[Any] = DataLoader(VECTORS, batch_size=7, **options)
        with pytest.raises(pg.Refused, match="batch=7, and its collate_fn as collate="):
            inspect_job(JOBS["mlp"].replace(train=loader))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (0.75, "float"),
        (torch.ones(8), "tensor of shape (8,)"),
        ((1.0, 2.0, 3.0), "float, float, float"),
        (("much", 8), "str, int"),
        ((torch.ones(8), 8), "tensor of shape (8,), int"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_metric_is_called_at_start(found: object, told: str) -> None:
    """A metric is called, and its result is checked, before the training starts.

    Earlier, it was first called after a whole epoch. Then every rank tried to unpack its wrong
    result.
    """
    job = JOBS["mlp"].replace(test=VECTORS, metric=lambda output, target: found)
    wanted = f"returned ({told}) for a batch of 8; return a pair of numbers (sum, weight)"
    with pytest.raises(pg.Refused, match=re.escape(wanted)):
        inspect_job(job)
    assert (
        inspect_job(
            job.replace(metric=lambda output, target: [output.sum(), numpy.int64(len(target))])
        ).test_samples
        == 29
    )


def compute_mean_accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    return float((output.argmax(1) == target).float().mean()), 1


@pytest.mark.parametrize("weight", [1, 8])
def test_a_metric_that_does_not_add_up_is_refused(weight: int) -> None:
    """A metric whose results cannot be added over batches is refused.

    Earlier, with a mean and the weight 1, the test value of three workers differed from that of
    one worker.
    """
    job = JOBS["mlp"].replace(
        test=VECTORS,
        metric=lambda output, target: (compute_mean_accuracy(output, target)[0] + 1, weight),
    )
    with pytest.raises(pg.Refused, match="does not add up: it returned"):
        inspect_job(job)


def test_test_set_is_read_at_start() -> None:
    other = TensorDataset(torch.randn(5, 3), torch.zeros(5).long())
    with pytest.raises(
        pg.Refused, match="job mlp: one batch of test through the model raised RuntimeError"
    ):
        inspect_job(JOBS["mlp"].replace(test=other))


class Views(torch.utils.data.Dataset[Any]):
    """A dataset with samples of all kinds; some are views of one large tensor."""

    def __init__(self) -> None:
        self.large = torch.arange(1 << 20, dtype=torch.float64).view(1024, 1024)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {
            "part": self.large[index],
            "column": self.large[:, index],
            "one": torch.tensor(index).expand(3),
            "none": torch.zeros(0, 2),
            "text": str(index),
            "array": torch.ones(2).numpy() * index,
        }


def collate_samples(drawn: list[Any]) -> Any:
    return drawn[0] if len(drawn) == 1 else torch.utils.data.default_collate(drawn)


def test_loader_batches_use_anonymous_shared_memory() -> None:
    """Loaders pass batches through shared memory without a name.

    torch's own loaders use files in /dev/shm. These files stay if a loader is killed at the wrong
    moment (1 of 300 kills).
    """
    keys = [(0, [3]), (0, [0, 1, 5])]
    samples = Samples(Views(), collate=collate_samples)
    assert SharedBatch(samples[keys[0]]).region.size < 3 * 8 * 1024, (
        "of a large tensor the parts alone"
    )
    before = count_memory_files()
    for ours, theirs in zip(
        load_batches(samples, keys), load_batches(samples, keys, 1), strict=True
    ):
        assert ours.keys() == theirs.keys()
        assert ours["text"] == theirs["text"]
        for name in ("part", "column", "one", "none", "array"):
            torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=0)
            assert not torch.as_tensor(theirs[name]).is_shared()
        theirs["part"].add_(1.0)  # the receiver of a batch may change it
    del theirs
    assert count_memory_files() == before


def count_memory_files() -> int:
    """Count the descriptors of this process for shared memory without a name."""
    places = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum(
        os.readlink(place).startswith("/memfd:paragrad")
        for place in places
        if os.path.lexists(place)
    )
