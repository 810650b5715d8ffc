"""`verify` on models and jobs for which it once gave a wrong certificate.

Some trainings were certified although they differ from serial, and some were rejected although
they equal serial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality_table import (
    IMAGES,
    VECTORS,
    compute_untraced_loss,
    draw_integers,
    draw_numbers,
    make_adam,
    make_batch_norm_cnn,
    make_job,
    make_mlp,
    make_momentum_sgd,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import paragrad as pg
from paragrad.commands.cli import app
from paragrad.datasets.loading import Samples
from paragrad.datasets.sample_order import SampleOrder
from paragrad.jobs.job import Job
from paragrad.report.certificate import Certificate
from paragrad.report.equivalence.batch_selection import select_compared_batches
from paragrad.report.equivalence.deviation import (
    list_tensor_deviations,
    measure_buffer_deviations,
    measure_deviations,
)
from paragrad.strategies.shares import Division

pytestmark = [pytest.mark.processes, pytest.mark.story]

# 24 samples in batches of 12: no share is shorter than the others
PLAIN = TensorDataset(draw_numbers(24, 10, seed=1), draw_integers(4, 24, seed=2))


def verify_job(job: Job, strategy: str, folder: Path, **more: str) -> Certificate:
    return pg.verify(job, strategy, runs=folder, **more)  # type: ignore[arg-type]


def ignore_targets(data: TensorDataset, *ignored: int) -> TensorDataset:
    inputs = data.tensors[0]
    targets = data.tensors[1].clone()
    targets[list(ignored)] = -100
    return TensorDataset(inputs, targets)


@pytest.mark.parametrize("strategy", ["serial(micro=3)", "data(2, micro=2)"])
def test_mean_of_means_with_micro_batches_is_found(strategy: str, tmp_path: Path) -> None:
    """If micro-batches get wrong weights, verify finds it.

    Earlier, the reference ran the same micro-batches, so it had the same wrong weights.
    serial(micro=3) was its own reference, and was certified.
    """
    found = verify_job(
        make_job("hidden", make_mlp, ignore_targets(PLAIN, 13, 14), loss=compute_untraced_loss),
        strategy,
        tmp_path,
    )
    assert not found.same
    assert found.reference == "serial"
    assert found.first is not None
    assert found.first[0].startswith("gradient of")
    assert verify_job(
        make_job("shown", make_mlp, ignore_targets(PLAIN, 13, 14)), strategy, tmp_path
    ).same


def test_reference_of_batch_norm_has_checked_weights(tmp_path: Path) -> None:
    """The reference of a model with batch norm has the right weights.

    Batch norm requires that the reference runs the same micro-batches. Earlier, it also had their
    wrong weights.
    """
    found = verify_job(
        make_job(
            "hidden",
            make_batch_norm_cnn,
            ignore_targets(IMAGES, 13, 14),
            loss=compute_untraced_loss,
        ),
        "data(2, micro=2)",
        tmp_path,
    )
    assert found.reference == "serial(micro=2)"
    assert not found.same
    found = verify_job(
        make_job(
            "hidden",
            make_batch_norm_cnn,
            ignore_targets(IMAGES, 13, 14),
            loss=compute_untraced_loss,
        ),
        "serial(micro=2)",
        tmp_path,
    )
    assert not found.same
    assert found.first is not None
    assert found.first[0] == "gradient of 0.weight"
    assert verify_job(
        make_job("shown", make_batch_norm_cnn, IMAGES), "data(2, micro=2)", tmp_path
    ).same


def test_ignored_targets_in_one_batch_of_forty_are_found(tmp_path: Path) -> None:
    """Rare ignored targets (-100) are found; the loss is a function that hides cross-entropy.

    Earlier, the first 19 batches had no such target, so the training was certified.
    """
    vectors = TensorDataset(draw_numbers(480, 10, seed=1), draw_integers(4, 480, seed=2))
    plain = make_job("rare", make_mlp, vectors, loss=compute_untraced_loss)
    late = plain.make_order(range(480)).get_indices(0, range(360, 363))
    found = verify_job(plain.replace(train=ignore_targets(vectors, *late)), "data(2)", tmp_path)
    assert not found.same
    assert verify_job(plain, "data(2)", tmp_path).same


class Counting(nn.Module):
    """A model that counts the samples that it gets: on a rank, only those of its share."""

    def __init__(self, model: Callable[[], nn.Module], mask: float | None = None) -> None:
        super().__init__()
        self.model = model()
        self.register_buffer("seen", torch.zeros(()))
        if mask is not None:
            self.register_buffer("mask", torch.full((4, 4), mask).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.model(x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mask", [None, -math.inf, -1e30], ids=str)
def test_share_counter_with_a_causal_mask_is_found(mask: float | None, tmp_path: Path) -> None:
    """A buffer that counts the samples of a share is found, also if the model has a mask.

    Earlier, every difference was divided by at least the largest number of its kind. So with a
    mask of -inf or -1e30, everything counted as equal.
    """
    counting = make_job("counting", lambda: Counting(make_mlp, mask), PLAIN)
    found = verify_job(counting, "data(2)", tmp_path)
    assert found.first == ("seen", 0)
    assert "the buffer counts what a share has" in (found.cause or "")
    assert verify_job(counting, "serial", tmp_path).same


def test_share_counter_with_batch_norm_and_adam_is_found(tmp_path: Path) -> None:
    """A buffer that counts the samples of a share is found in a model with batch norm and Adam.

    Earlier, no buffer of such a model was compared, because of the running mean.
    """
    data = TensorDataset(draw_numbers(24, 2, 8, 8, seed=3), draw_integers(4, 24, seed=4))
    found = verify_job(
        make_job("counting", lambda: Counting(make_batch_norm_cnn), data, optimizer=make_adam),
        "data(2)",
        tmp_path,
    )
    assert found.first == ("seen", 0)
    assert "model.1.running_mean" not in found.tensors
    assert "model.1.num_batches_tracked" in found.tensors


class Block(nn.Module):
    def __init__(self, channels: int, more: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, more, 3, stride, 1, bias=False),
            nn.BatchNorm2d(more),
            nn.ReLU(),
            nn.Conv2d(more, more, 3, 1, 1, bias=False),
            nn.BatchNorm2d(more),
        )
        self.past = nn.Sequential(
            nn.Conv2d(channels, more, 1, stride, bias=False), nn.BatchNorm2d(more)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.past(x))


def make_resnet() -> nn.Module:
    """Return a small ResNet-18: a chain of batch norms, in which images shrink to one pixel."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        Block(4, 4, 1),
        Block(4, 8, 2),
        Block(8, 8, 1),
        Block(8, 16, 2),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


PICTURES = TensorDataset(draw_numbers(26, 3, 16, 16, seed=1), draw_integers(10, 26, seed=2))
CHAOTIC = make_job("chaotic", make_resnet, PICTURES, batch=8, optimizer=make_momentum_sgd)


@pytest.mark.table
def test_chaotic_model_is_distinguished_from_a_wrong_one(tmp_path: Path) -> None:
    """A model in which rounding decides the result is not called another training.

    Batch norm over a last batch of two samples turns rounding into large differences. In
    ResNet-18 the difference is 22. Plain torch with reversed samples differs from itself by 2.6.
    Earlier, verify called it another training.
    """
    found = verify_job(CHAOTIC, "data(2)", tmp_path)
    assert found.same
    assert found.difference is not None
    assert found.difference > 1e-10
    assert found.twin > 1e-10
    words = f"{__file__}:CHAOTIC", "--strategy", "data(2)", "--batch", "2", "--runs", str(tmp_path)
    text = CliRunner().invoke(app, ["verify", *words]).stdout
    assert "on, rounding decides the result, so steps are not compared" in text
    assert (
        "same training as serial: yes (beyond 1e-10, but no more than rounding causes, float64)"
        in text
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("strategy", "planted"),
    [
        ("data(2, reduce=ring)", "mean_twice"),
        ("data(3, reduce=tree)", "skip_chunk"),
        ("data(2, batch_norm=share)", None),
    ],
)
def test_first_steps_of_a_chaotic_model_name_the_error(
    strategy: str, planted: str | None, tmp_path: Path
) -> None:
    """A wrong strategy is found in the first steps, where rounding errors are still small.

    The chaos of later steps does not hide it.
    """
    # the last batch has 4 samples
    pictures = TensorDataset(draw_numbers(28, 3, 16, 16, seed=1), draw_integers(10, 28, seed=2))
    found = verify_job(
        CHAOTIC.replace(train=pictures),
        strategy,
        tmp_path,
        **({"inject_fault": planted} if planted else {}),
    )
    assert not found.same
    assert "step 0" in (found.failure or f"step {found.first and found.first[1]}")


class Mixing(nn.Module):
    """A model that adds its neighbour to each sample, only in a whole batch of 12 samples.

    Validation runs the model with fewer samples, so it does not see this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + 0.5 * x.roll(1, 0) if self.training and len(x) == 12 else x)


def test_dependence_on_sample_order_is_not_chaos(tmp_path: Path) -> None:
    """A model that mixes samples is found, because the rounding baseline keeps their order.

    In such a model, a baseline with reversed samples differs from serial as much as a wrong
    strategy. So the wrong strategy would pass.
    """
    found = verify_job(make_job("mixing", Mixing, VECTORS), "data(2)", tmp_path)
    assert not found.same
    assert found.twin < 1e-10


class Cell(nn.Module):
    """A model that creates its first state in float32, for every type of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(10, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x, torch.zeros(len(x), 8)))


WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 0.5])


def compute_weighted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(output, target, weight=WEIGHTS, reduction="sum"), WEIGHTS[
        target
    ].sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "strategy", ["data(2)", "data(3, reduce=ring, shares=[2, 1, 1], micro=2)", "serial(micro=3)"]
)
@pytest.mark.parametrize(
    "changes",
    [{"model": Cell}, {"model": make_mlp, "loss": compute_weighted_loss}],
    ids=("model", "loss"),
)
def test_float32_constants_are_compared_in_float32(
    changes: dict, strategy: str, tmp_path: Path
) -> None:
    """A model or a loss with float32 constants is compared in float32.

    Earlier, verify ended with a traceback: "expected m1 and m2 to have the same dtype".
    """
    found = verify_job(make_job("constants", data=VECTORS, **changes), strategy, tmp_path)
    assert found.same, found
    assert found.dtype == "float32"
    assert found.why is not None
    assert "RuntimeError" in found.why
    assert found.to_json()["dtype"] == "float32"


def test_wrong_weight_is_found_in_float32(tmp_path: Path) -> None:
    found = verify_job(
        make_job("constants", Cell, ignore_targets(PLAIN, 13, 14), loss=compute_untraced_loss),
        "data(2)",
        tmp_path,
    )
    assert found.dtype == "float32"
    assert not found.same


def test_informative_batches_come_first_and_once() -> None:
    """The most informative of 40 batches of 4 are selected first, and each once.

    One batch has the longest line, one has the shortest lines, and one has only ignored targets.
    """
    lengths = [5] * 160
    order = SampleOrder(160, 4, seed=3)
    batches = list(order.list_batches())
    long = batches[25]
    short = batches[31]
    bare = batches[12]
    lengths[order.get_indices(0, long)[1]] = 9
    for index in order.get_indices(0, short):
        lengths[index] = 3
    ignored = set(order.get_indices(0, bare))
    lines = [
        (torch.ones(length), torch.tensor(-100 if index in ignored else 1))
        for index, length in enumerate(lengths)
    ]

    def pad_samples(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.stack(
            [y for _, y in samples]
        )

    places = select_compared_batches(Samples(lines, 3, pad_samples), order, 20, Division((1, 1)))
    assert len(places) == len(set(places)) == 20
    assert places[0] == (0, batches[0])
    assert {(0, batch) for batch in (long, short, bare, batches[-1])} < set(places[:7])
    assert select_compared_batches(Samples(lines, 3, pad_samples), order, 43, Division((1, 1)))[
        38:42
    ] == [
        (0, batches[38]),
        (0, batches[39]),
        (1, batches[0]),
        (1, batches[1]),
    ]
    assert (
        len(select_compared_batches(Samples(lines, 3, pad_samples), order, 1, Division((1, 1))))
        == 1
    )


def test_non_finite_values_must_match_and_set_no_scale() -> None:
    mask = torch.tensor([0.5, -math.inf, math.nan])
    assert list_tensor_deviations({"mask": mask.clone()}, {"mask": mask}) == {"mask": 0.0}
    assert list_tensor_deviations({"mask": mask + 0.25}, {"mask": mask}) == {"mask": 0.5}
    assert list_tensor_deviations({"mask": -mask}, {"mask": mask}) == {"mask": math.inf}
    huge = {"mask": torch.tensor([1.0, -1e30]), "small": torch.tensor([2.0])}
    assert list_tensor_deviations(
        {"mask": torch.tensor([1.5, -1e30]), "small": torch.tensor([3.0])}, huge
    ) == {"mask": 0.5, "small": 0.5}
    assert (
        list_tensor_deviations(
            {"mask": torch.tensor([1.0, -2e30]), "small": torch.tensor([2.0])}, huge
        )["mask"]
        > 1.0
    )
    flags = {"flags": torch.tensor([True, False])}
    assert list_tensor_deviations({"flags": torch.tensor([True, True])}, flags) == {"flags": 1.0}
    assert (
        measure_deviations(
            {"a": torch.tensor([1.5]), "b": torch.tensor([10.0])},
            {"a": torch.tensor([1.0]), "b": torch.tensor([10.0])},
        )["a"].per_kind
        == 0.05
    )
    assert (
        measure_buffer_deviations(
            {"seen": torch.tensor(12.0)}, {"seen": torch.tensor(24.0)}, floor=1e-6
        )["seen"].per_kind
        == 0.5
    )


class Coarser(nn.Module):
    """A model that always computes in float32 inside, as state space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(x))
        return functional.linear(hidden.float(), self.out.weight.float(), self.out.bias.float()).to(
            x.dtype
        )


def test_float32_computation_is_compared_in_float32(tmp_path: Path) -> None:
    """A float64 model that computes in float32 inside is compared in float32.

    Earlier, Mamba was "not the same", with a difference of 1.2e-7: it sums over a batch in
    float32. A change of one unit in the last place of float64 does not show this rounding.
    """
    certificate = pg.verify(
        make_job("coarser", Coarser, VECTORS), "data(2, reduce=ring)", runs=tmp_path
    )
    assert certificate.same
    assert certificate.dtype == "float32"
    trained = [
        pg.train(
            make_job("coarser", Coarser, VECTORS, dtype=torch.float64, seed=seed),
            "data(2)",
            runs=tmp_path,
        )
        for seed in range(3)
    ]
    assert all(run.losses for run in trained)
