"""The plain PyTorch loop that `compare` times trains as serial does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import paragrad as pg
from paragrad.datasets.loading import separate_target
from paragrad.jobs.job import open_dataset
from paragrad.loops.plain_pytorch import time_plain_pytorch
from paragrad.record.record import Record
from paragrad.runtime.world import World
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import ValidatedRun, validate_run

pytestmark = pytest.mark.processes


def iterate_serial_losses(run: ValidatedRun) -> Iterator[float]:
    trainer = Trainer.build_for_job(World(), run.job, run.resolved)
    dataset = open_dataset(run.job.train, None)
    for epoch in range(run.job.epochs):
        for batch in trainer.batches(dataset, run.job.batch, epoch, sampler=run.job.sampler):
            yield trainer.step(*separate_target(batch)).loss


def record_plain_losses(run: ValidatedRun, folder: Path) -> list[float]:
    plain = replace(run, is_plain_pytorch=True)
    assert time_plain_pytorch(World(), plain, folder, time.monotonic()) == "finished"
    return Record(folder).losses


class NamedVectors(Dataset[dict[str, Tensor]]):
    """The vectors as dicts."""

    def __len__(self) -> int:
        return len(VECTORS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        vector, label = VECTORS[index]
        return {"vector": vector, "label": label}


class NamedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_mlp()

    def forward(self, vector: Tensor, label: Tensor) -> Tensor:
        output: Tensor = self.layers(vector)
        return output


def compute_named_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["label"])


def sum_losses(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, target, reduction="sum"), len(target)


def enlarge_loss(output: Tensor, target: Tensor) -> Tensor:
    return 100.0 * functional.cross_entropy(output, target)


halve_rate = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
MLP = make_job("mlp", make_mlp, VECTORS)
CASES = {
    "digits": pg.job("digits").replace(epochs=1),
    "clipped": MLP.replace(clip_norm=0.1),
    "scheduler of steps": MLP.replace(scheduler=halve_rate, scheduler_every="step"),
    "scheduler of epochs": MLP.replace(scheduler=halve_rate, scheduler_every="epoch"),
    "larger batch": MLP.replace(batch=24, scale_lr="linear", warm_up=1.0),
    "pair": MLP.replace(loss=sum_losses),
    "module": MLP.replace(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))),
    "dict samples": make_job("named", NamedModel, NamedVectors(), loss=compute_named_loss),
    "sampler": MLP.replace(sampler=lambda epoch, generator: [epoch, 3, 3, 5, 8, 13, 21, 2, 4]),
    "float64": MLP.replace(dtype=torch.float64),
    "bfloat16": MLP.replace(dtype=torch.bfloat16),
    "float16, clipped": MLP.replace(dtype=torch.float16, clip_norm=0.1),
    # the first updates are skipped
    "float16 with overflow": MLP.replace(
        dtype=torch.float16, loss=enlarge_loss, scheduler=halve_rate, scheduler_every="step"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_loop_has_the_losses_of_serial(name: str, tmp_path: Path) -> None:
    run = validate_run(CASES[name], "serial")
    expected = list(iterate_serial_losses(run))
    assert len(expected) == run.job.epochs * run.inspection.order.steps
    assert record_plain_losses(run, tmp_path) == pytest.approx(expected, rel=1e-5)


def test_plain_loop_ends_at_its_limit_and_reports(tmp_path: Path) -> None:
    run = validate_run(MLP, "serial", Settings(limit=4))
    reports: list[dict[str, Any]] = []
    time_plain_pytorch(World(), run, tmp_path, time.monotonic(), reports.append)
    lines = Record(tmp_path).select_lines("step")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert reports[-1] == {
        "epoch": lines[-1]["epoch"],
        "step": 4,
        "steps": 4,
        "loss": lines[-1]["loss"][0],
    }
    (load,) = Record(tmp_path).cpu
    assert load["own"] > 0


def test_plain_loop_stops_after_a_step(tmp_path: Path) -> None:
    world = World()
    world.stop.set()
    run = validate_run(MLP, "serial")
    assert time_plain_pytorch(world, run, tmp_path, time.monotonic()) == "stopped"
    assert len(Record(tmp_path).select_lines("step")) == 1
