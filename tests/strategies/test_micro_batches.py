"""Micro-batches of several ranks have the same samples and batch norm statistics as serial's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality_table import VECTORS, make_job, resolve_text
from torch import Tensor, nn

from paragrad.commands.train import train
from paragrad.datasets.loading import separate_target
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.runtime.world import World
from paragrad.trainer.trainer import Trainer

pytestmark = pytest.mark.processes


def make_normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 8), nn.Linear(8, 4)
    )


# 20 samples in batches of 12: no micro-batch of the last batch has one sample alone
NORMED = make_job(
    "batch norm of vectors",
    make_normed,
    torch.utils.data.TensorDataset(*(tensor[:20] for tensor in VECTORS.tensors)),
    dtype=torch.float64,
)


def train_two_epochs(world: World, job: Job, text: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train all epochs, and return the loss of every step and the final state."""
    trainer = Trainer.build_for_job(world, job, resolve_text(text))
    losses = []
    try:
        for epoch in range(job.epochs):
            for fetched in trainer.batches(job.train, job.batch, epoch):
                losses.append(trainer.step(*separate_target(fetched)).loss)
        return losses, {name: tensor.clone() for name, tensor in trainer.state().items()}
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("text", "micro"),
    [
        ("data(2, micro=3)", 3),
        ("data(3, micro=2)", 2),
        ("data(2, shares=[3, 1], micro=2)", 2),
        # rank 0 has no samples in the first micro-batch
        ("data(2, shares=[1, 9], micro=3)", 3),
        ("data(2) * pipeline(2, micro=2)", 2),
        pytest.param("data(2, shares=[1, 9]) * pipeline(2, micro=3)", 3, marks=pytest.mark.table),
        ("data(2, state=fully_sharded, micro=2)", 2),
    ],
)
def test_batch_norm_of_micro_batches_equals_serial(pool: Launcher, text: str, micro: int) -> None:
    """Earlier, each share was divided into micro-batches, instead of the global batch.

    Micro-batch 0 of `data(2, micro=3)` had samples 0, 1, 6, 7 of twelve. Micro-batch 0 of
    `serial(micro=3)` has samples 0 to 3. So the training equalled neither serial nor
    serial(micro=3), and it depended on the number of workers.
    """
    losses, state = train_two_epochs(World(), NORMED, f"serial(micro={micro})")
    found = pool.run(train_two_epochs, NORMED, text, size=resolve_text(text).size)[0]
    assert found[0] == pytest.approx(losses, rel=1e-10)
    for name, expected in state.items():
        assert torch.allclose(found[1][name].double(), expected.double(), rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("warm_ranks")
def test_order_of_a_step_has_a_range_for_each_micro_batch(tmp_path: Path) -> None:
    """The record has one range of positions for each micro-batch of a rank.

    Adjacent ranges are joined, so serial has one range for the whole batch.
    """
    run = train(NORMED.replace(epochs=1), "data(2, micro=3)", runs=tmp_path)
    orders = [[line["order"] for line in run.select_lines("step", rank)] for rank in (0, 1)]
    assert orders[0][0] == [[0, 2], [4, 6], [8, 10]]
    assert orders[1][0] == [[2, 4], [6, 8], [10, 12]]
    assert (run.sample_count.seen, run.sample_count.twice, run.sample_count.missed) == (20, 0, 0)
    serial = train(NORMED.replace(epochs=1), "serial(micro=3)", runs=tmp_path)
    assert [line["order"] for line in serial.select_lines("step")] == [
        [[0, 12]],
        [[12, 20]],
    ]
