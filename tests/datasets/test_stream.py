"""Streams of samples: the order of one worker under every strategy, also of a resumed run."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import paragrad as pg
from paragrad.datasets.loading import Samples
from paragrad.runtime.generators import fingerprint_generators, keep_generators, seed_generators
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

SIZE = len(VECTORS)
LENGTH = 21  # samples of an epoch: two batches of 8, and one of 5


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that draws samples without an end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            inputs, target = VECTORS[int(torch.randint(SIZE, ()))]
            yield inputs + random.random() / 8, target


class Shuffled(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that is shuffled by a buffer, and that has `set_epoch`.

    Each loader process reads a part of it, as is usual for an IterableDataset.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        buffer: list[int] = []
        for index in range(self.epoch, SIZE, 1 if info is None else info.num_workers):
            buffer.append(index)
            if len(buffer) > 4:
                yield VECTORS[buffer.pop(random.randrange(5))]
        yield from (VECTORS[index] for index in buffer)


def read_shards(epoch: int) -> Iterator[int]:
    """Return the indices of the samples, which are cheap to read."""
    return iter([(index + epoch) % SIZE for index in range(SIZE)])


def decode(index: int) -> tuple[Tensor, Tensor]:
    inputs, target = VECTORS[index]
    return inputs + torch.randn(inputs.shape, dtype=inputs.dtype), target


STREAMS: dict[str, Any] = {
    "endless": lambda: pg.Stream(Endless(), length=LENGTH),
    "shuffled": lambda: pg.Stream(Shuffled()),
    "decoded": lambda: pg.Stream(read_shards, length=LENGTH, transform=decode),
}


# the rest of the table runs in `make table`
SAMPLE = ("decoded", "data(3, shares=[2, 1, 1])")


def make_stream_job(name: str, **changes: object) -> pg.Job:
    return make_job("vectors", make_mlp, VECTORS).replace(
        dtype=torch.float64, batch=8, epochs=3, train=STREAMS[name](), **changes
    )


def read_plainly(name: str, seed: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Read the samples of an epoch in plain Python; only the seeds are paragrad's."""
    seed_generators(f"stream {seed} {epoch}")
    if name == "decoded":
        samples = []
        for index, number in enumerate(itertools.islice(read_shards(epoch), LENGTH)):
            seed_generators(f"sample {seed} {epoch} {index}")
            samples.append(decode(number))
        return samples
    source: Any = Endless() if name == "endless" else Shuffled()
    if name == "shuffled":
        source.set_epoch(epoch)
    return list(itertools.islice(source, LENGTH))


def train_plainly(name: str, made: pg.Job) -> list[float]:
    """Train in a plain loop over the stream; return the losses."""
    model = made.build_model()
    optimizer = made.optimizer(model.parameters())
    losses = []
    for epoch in range(made.epochs):
        with keep_generators():
            samples = read_plainly(name, made.seed, epoch)
        for start in range(0, LENGTH, made.batch):
            inputs, targets = zip(*samples[start : start + made.batch], strict=True)
            optimizer.zero_grad()
            output = model(torch.stack(inputs).double())
            loss = nn.functional.cross_entropy(output, torch.stack(targets))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", STREAMS)
def test_serial_takes_the_samples_of_the_stream(name: str, tmp_path: Path) -> None:
    made = make_stream_job(name)
    run = pg.train(made, "serial", runs=tmp_path)
    assert run.losses == pytest.approx(train_plainly(name, made), rel=1e-12)
    assert str(run.sample_count).startswith(f"{LENGTH} of {LENGTH} samples seen in each of 3 epoch")


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name,
            strategy,
            marks=[] if (name, strategy) == SAMPLE else pytest.mark.table,
        )
        for name in STREAMS
        for strategy in (
            "data(3, shares=[2, 1, 1])",
            "data(2)",
            "data(2, micro=2)",
            "pipeline(2, micro=2)",
            "server(2)",
            "local(2, every=2)",
            "server(2, sync=asp)",
        )
    ],
)
def test_strategies_train_as_serial_does(name: str, strategy: str, tmp_path: Path) -> None:
    """Every strategy trains as serial does, also if serial resumes it within an epoch."""
    made = make_stream_job(name)
    serial = pg.train(made, "serial", runs=tmp_path)
    if "asp" in strategy or "local" in strategy:
        run = pg.train(made, strategy, runs=tmp_path)
        assert str(run.sample_count) == str(serial.sample_count)
        return
    half = pg.train(made, strategy, runs=tmp_path, limit=5, save=5)
    rest = pg.train(made, "serial", runs=tmp_path, resume=half.folder)
    assert half.losses + rest.losses == pytest.approx(serial.losses, rel=1e-9)
    assert "0 twice, 0 missed" in str(rest.sample_count)


@pytest.mark.table
@pytest.mark.parametrize("loaders", [1, 2])
def test_loaders_give_the_same_batches(loaders: int, tmp_path: Path) -> None:
    """Each loader reads the whole stream, although the stream asks torch for its part."""
    made = make_stream_job("shuffled")
    serial = pg.train(made, "serial", runs=tmp_path)
    run = pg.train(made, "data(2)", runs=tmp_path, loaders=loaders)
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)


@pytest.mark.table
def test_stream_is_a_test_set_too(tmp_path: Path) -> None:
    made = make_stream_job("decoded", metric=pg.accuracy, test=pg.Stream(read_shards, 17, decode))
    values = [
        pg.train(made, strategy, runs=tmp_path).test
        for strategy in ("serial", "data(2)", "pipeline(2, micro=2)")
    ]
    assert values[1:] == pytest.approx(values[:1] * 2)


@pytest.mark.table
def test_verify_reads_a_stream(tmp_path: Path) -> None:
    assert pg.verify(make_stream_job("endless"), "data(2)", runs=tmp_path).same


def test_own_loop_takes_a_stream() -> None:
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(
        model, nn.functional.cross_entropy, optimizer, strategy="serial"
    ) as trainer:
        batches = trainer.batches(STREAMS["decoded"](), 8, epoch=2)
        targets = torch.cat([target for _, target in batches])
    assert torch.equal(targets, VECTORS.tensors[1][list(read_shards(2))[:LENGTH]])


def test_batches_are_read_in_any_order() -> None:
    """Batches of a stream can be read again and in any order.

    A check loads a batch again. If a worker returns its share unfinished, it is read later.
    """
    samples = Samples(STREAMS["endless"](), seed=3)
    before = fingerprint_generators()
    batches = [samples[1, list(range(start, start + 7))][0] for start in (0, 7, 14)]
    again = [samples[1, list(range(start, start + 7))][0] for start in (14, 0, 7)]
    assert all(map(torch.equal, again, (batches[2], batches[0], batches[1])))
    # only the positions of one rank in the batch
    assert torch.equal(samples[1, list(range(7, 14)), [2, 5]][0], batches[1][[2, 5]])
    assert fingerprint_generators() == before


def test_stream_sees_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream does not see the rank variables of the launcher.

    Earlier, a stream that divides itself by these variables gave each rank other samples.
    """

    def divide(epoch: int) -> Iterator[int]:
        size = int(os.environ.get("WORLD_SIZE", 1))
        return iter(range(int(os.environ.get("RANK", 0)), SIZE, size))

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stream = pg.Stream(divide, SIZE)
    assert [stream[index] for index in range(3)] == [0, 1, 2]
    assert os.environ["RANK"] == "1"


def test_samples_without_a_number_are_equal() -> None:
    def give(epoch: int) -> Iterator[Any]:
        return iter([(numpy.array([1.0, numpy.nan]), torch.eye(2).to_sparse())] * 3)

    pg.Stream(give, 3).refuse_changing_samples(0, 3)


# ---- refused ----------------------------------------------------------------------------------
class Ongoing(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that continues where it stopped, as a stream from a queue does."""

    def __init__(self) -> None:
        self.samples = itertools.cycle(VECTORS)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.samples


def shuffle_numbers(epoch: int) -> Iterator[Any]:
    """Return numbers from a generator without a seed.

    Earlier, all numbers of numpy counted as equal, so this was not detected.
    """
    return iter(numpy.random.default_rng().permutation(SIZE))


def fail(epoch: int) -> Iterator[Any]:
    yield VECTORS[0]
    raise OSError("no route to the bucket")


REFUSED: dict[str, tuple[Any, str]] = {
    "no length": (lambda: pg.Stream(Endless()), "Endless has no length; give length="),
    "a length of 0": (lambda: pg.Stream(Endless(), 0), "a whole number from 1, got 0"),
    "an iterator": (lambda: pg.Stream(iter(VECTORS), 4), "which can be read once"),
    "a dataset": (lambda: pg.Stream(VECTORS, 4), "needs no Stream"),
    "a loader": (lambda: pg.Stream(DataLoader(VECTORS), 4), "give it the dataset of the loader"),
    "a number": (lambda: pg.Stream(7, 4), "got a int"),  # type: ignore[arg-type]
    "no epoch": (lambda: pg.Stream(lambda: VECTORS, 4), "must take the epoch"),  # type: ignore
    "going on": (lambda: pg.Stream(Ongoing(), LENGTH), "another sample 0 when it is read again"),
    "own generator": (
        lambda: pg.Stream(shuffle_numbers, LENGTH, decode),
        r"another sample \d when it is read again",  # the first ones may be equal by chance
    ),
    "an error": (lambda: pg.Stream(fail, 9), "raised OSError: no route .* at sample 1 of epoch 0"),
    "unwrapped": (Endless, r"one after the other only \(Endless\); give paragrad.Stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_stream_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(pg.Refused, match=message):
        validate_run(make_job("vectors", make_mlp, VECTORS).replace(train=make()), "serial")


def test_stream_that_ends_early_is_named(tmp_path: Path) -> None:
    made = make_stream_job("endless").replace(train=pg.Stream(read_shards, SIZE + 2, decode))
    with pytest.raises(
        pg.RankFailed, match=f"ended after {SIZE} samples of epoch 0, and its length is {SIZE + 2}"
    ):
        pg.train(made, "data(2)", runs=tmp_path)


def test_stream_has_no_sampler_and_no_clients(tmp_path: Path) -> None:
    made = make_stream_job("endless")
    with pytest.raises(pg.Refused, match="takes no sampler"):
        validate_run(made.replace(sampler=lambda epoch, generator: [0]), "serial")
    with pytest.raises(pg.Refused, match="each client has samples of its own"):
        validate_run(made, "federated(2, clients=4)")
    half = pg.train(made, "serial", runs=tmp_path, limit=2, save=2)
    with pytest.raises(pg.Refused, match="sampler"):
        pg.train(made.replace(train=VECTORS), "serial", runs=tmp_path, resume=half.folder)
