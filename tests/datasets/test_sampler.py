"""Samplers of the user: the same order under every strategy, also of a resumed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paragrad as pg
from paragrad.datasets.loading import Samples
from paragrad.datasets.sample_order import SampleOrder
from paragrad.datasets.sampler import check_sampler, draw_sampler
from paragrad.errors import StepFailed
from paragrad.record.record import Record
from paragrad.runtime.generators import fingerprint_generators, seed_generators
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

SIZE = len(VECTORS)
WEIGHTS = [1.0 + (index % 5) for index in range(SIZE)]


def balance(epoch: int, generator: torch.Generator) -> Tensor:
    """Draw the same number of samples of each class, anew in each epoch."""
    labels = VECTORS.tensors[1]
    drawn = []
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        drawn.append(members[torch.randint(len(members), (9,), generator=generator)])
    joined = torch.cat(drawn)
    return joined[torch.randperm(len(joined), generator=generator)]


def teach_easy_first(epoch: int, generator: torch.Generator) -> list[int]:
    """Return a curriculum: each epoch begins at a later sample of the dataset."""
    return [(index + 3 * epoch) % SIZE for index in range(SIZE - 7)]


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1, -1, -1))


SAMPLERS: dict[str, Any] = {
    "weighted": WeightedRandomSampler(WEIGHTS, 29),
    "weighted, of a generator": WeightedRandomSampler(
        WEIGHTS, 29, generator=torch.Generator().manual_seed(3)
    ),
    "balanced": balance,
    "subset": SubsetRandomSampler(range(0, SIZE, 2)),
    "curriculum": teach_easy_first,
    "in order": SequentialSampler(VECTORS),
    "shuffled": RandomSampler(VECTORS),
    "backwards": Backwards(),
}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that adds noise to each sample, as an augmentation does."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = VECTORS[index]
        return inputs + torch.randn(inputs.shape, dtype=inputs.dtype), target


def make_sampler_job(name: str, **changes: object) -> pg.Job:
    return make_job("vectors", make_mlp, Augmented()).replace(
        dtype=torch.float64, batch=8, epochs=3, sampler=SAMPLERS[name], **changes
    )


def train_plainly(name: str, made: pg.Job) -> list[float]:
    """Train in a plain loop over the indices of the sampler; return the losses."""
    model = made.build_model()
    optimizer = made.optimizer(model.parameters())
    losses = []
    for epoch in range(made.epochs):
        drawn = draw_sampler(SAMPLERS[name], made.seed, epoch).tolist()
        seen: dict[int, int] = {}
        for start in range(0, len(drawn), made.batch):
            batch = drawn[start : start + made.batch]
            inputs = []
            for index in batch:
                again = seen.get(index, 0)
                seen[index] = again + 1
                seed_generators(f"sample {made.seed} {epoch} {index}{f' {again}' * bool(again)}")
                inputs.append(Augmented()[index][0])
            target = VECTORS.tensors[1][batch]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.stack(inputs).double()), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", SAMPLERS)
def test_serial_takes_the_samples_of_the_sampler(name: str, tmp_path: Path) -> None:
    made = make_sampler_job(name)
    run = pg.train(made, "serial", runs=tmp_path)
    assert run.losses == pytest.approx(train_plainly(name, made), rel=1e-12)
    drawn = len(draw_sampler(SAMPLERS[name], 0, 0))
    assert Record(run.folder).header["job"]["samples"] == drawn
    assert str(run.sample_count) == (
        f"{drawn} of the {drawn} samples that the sampler drew for each of 3 epoch(s), "
        "0 used twice, 0 missed"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "strategy",
    [
        "data(3, shares=[2, 1, 1])",
        *(
            pytest.param(each, marks=pytest.mark.table)
            for each in ("data(2)", "pipeline(2, micro=2)", "server(2)", "server(2, sync=asp)")
        ),
    ],
)
@pytest.mark.parametrize("name", ["weighted", "balanced", "subset", "curriculum"])
def test_strategies_train_as_serial_does(name: str, strategy: str, tmp_path: Path) -> None:
    """Every strategy trains as serial does, also if serial resumes it within an epoch."""
    made = make_sampler_job(name)
    serial = pg.train(made, "serial", runs=tmp_path)
    if "asp" in strategy:
        run = pg.train(made, strategy, runs=tmp_path)
        assert str(run.sample_count) == str(serial.sample_count)
        return
    half = pg.train(made, strategy, runs=tmp_path, limit=5, save=5)
    rest = pg.train(made, "serial", runs=tmp_path, resume=half.folder)
    assert half.losses + rest.losses == pytest.approx(serial.losses, rel=1e-9)
    assert "0 used twice, 0 missed" in str(rest.sample_count)


def test_repeated_sample_has_transforms_of_its_own() -> None:
    """If a sample is drawn several times in an epoch, each time has its own random transforms.

    Earlier, a sample of a rare class that was drawn ten times was the same image ten times.
    """
    order = SampleOrder.build(range(SIZE), 8, 0, lambda epoch, generator: [4, 5, 4, 4])
    indices = order.get_indices(0, range(4))
    assert indices == [4, 5, 4, 4]
    inputs, _ = Samples(Augmented())[0, indices]
    assert not torch.equal(inputs[0], inputs[2])
    assert not torch.equal(inputs[2], inputs[3])
    # the transforms do not depend on where a batch begins
    assert torch.equal(Samples(Augmented())[0, order.get_indices(0, range(2, 4))][0], inputs[2:])


def test_order_is_a_function_of_seed_and_epoch() -> None:
    for name, sampler in SAMPLERS.items():
        first = SampleOrder.build(range(SIZE), 8, 0, sampler)
        again = SampleOrder.build(range(SIZE), 8, 0, sampler)
        other = SampleOrder.build(range(SIZE), 8, 1, sampler)
        whole = range(first.samples)
        late = first.get_indices(5, whole)
        assert late == again.get_indices(5, whole)
        if name not in ("in order", "backwards", "curriculum"):
            assert late != first.get_indices(6, whole)
            assert late != other.get_indices(5, whole)


def test_own_loop_takes_a_sampler() -> None:
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(
        model, nn.functional.cross_entropy, optimizer, strategy="serial"
    ) as trainer:
        batches = trainer.batches(VECTORS, 8, epoch=1, sampler=teach_easy_first)
        targets = torch.cat([target for _, target in batches])
    assert torch.equal(targets, VECTORS.tensors[1][teach_easy_first(1, torch.Generator())])


# ---- refused ----------------------------------------------------------------------------------
class Counting(Sampler[int]):
    """A sampler that returns other indices each time it is called."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(range(self.asked, self.asked + 10))


def grow(epoch: int, generator: torch.Generator) -> range:
    return range(10 + epoch)


REFUSED: dict[str, tuple[Any, str]] = {
    "batches": (BatchSampler(SequentialSampler(VECTORS), 4, False), "which makes batches"),
    "shares": (DistributedSampler(VECTORS, 2, 0), "which makes shares of ranks"),
    "a list": ([1, 2, 3], "is a list; give a function f"),
    "pairs": (lambda epoch, generator: [(1, 2), (3, 4)], "one index for each sample"),
    "ragged": (lambda epoch, generator: [(1, 2), (3,)], "one index for each sample"),
    "fractions": (lambda epoch, generator: [0.5, 1.5], "as whole numbers; it gave 0.5, 1.5"),
    "nothing": (lambda epoch, generator: [], "gives no samples"),
    "a negative index": (lambda epoch, generator: [0, -1], "gives index -1; give indices from 0"),
    "a large index": (lambda epoch, generator: [0, 5000], "gives index 5000, and the dataset has"),
    "more each epoch": (grow, "10 samples in the first epoch and 11 in the second"),
    "a count of its own": (Counting(), "gives another order for an epoch when it is asked again"),
    "an error": (lambda epoch: [1], "the sampler raised TypeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_sampler_is_refused(name: str) -> None:
    sampler, message = REFUSED[name]
    with pytest.raises(pg.Refused, match=message):
        validate_run(
            make_job("vectors", make_mlp, VECTORS).replace(sampler=sampler, epochs=2), "serial"
        )


def test_federated_clients_have_no_sampler() -> None:
    with pytest.raises(pg.Refused, match="the job's sampler is not used; leave it out"):
        validate_run(make_sampler_job("subset"), "federated(2, clients=4)")


def test_later_epoch_of_another_length_is_named() -> None:
    def shrink(epoch: int, generator: torch.Generator) -> range:
        return range(10 if epoch < 5 else 9)

    check_sampler(shrink, 0, SIZE, 9)
    order = SampleOrder.build(range(SIZE), 4, 0, shrink)
    with pytest.raises(StepFailed, match="gives 9 samples in epoch 5 and 10 in the first"):
        order.get_indices(5, range(4))


def test_another_sampler_is_refused_on_resume(tmp_path: Path) -> None:
    made = make_sampler_job("subset")
    half = pg.train(made, "serial", runs=tmp_path, limit=2, save=2)
    with pytest.raises(pg.Refused, match="sampler"):
        pg.train(
            made.replace(sampler=SubsetRandomSampler(range(1, SIZE, 2))),
            "serial",
            runs=tmp_path,
            resume=half.folder,
        )


def test_generators_of_the_process_stay_as_they_are() -> None:
    before = fingerprint_generators()
    check_sampler(SAMPLERS["weighted"], 0, SIZE, 3)
    assert fingerprint_generators() == before
