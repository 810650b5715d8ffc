"""On a machine with a GPU, a training on the GPU equals the training on the CPU.

Run: PYTHONPATH=src python3 -m pytest -m gpu

One GPU is enough: its ranks share it and exchange through the host. NCCL is tested with one rank
per GPU, if there are two GPUs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.datasets.loading import separate_target
from paragrad.launch import Launcher
from paragrad.runtime.world import CPU, World
from paragrad.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
    ),
]

DIGITS = pg.job("digits").replace(epochs=2)


def make_normed_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 10)
    )


@pytest.mark.parametrize(
    "text",
    [
        "serial",
        "serial(micro=2)",
        "data(2, reduce=ring)",
        "data(2, reduce=native)",
        "data(3, reduce=tree, shares=[3, 1, 2], micro=2)",
        "server(2)",
        "server(3, servers=2)",
        "server(1, sync=asp)",
    ],
)
def test_digits_training_is_equal_on_gpu_and_cpu(text: str, tmp_path: Path) -> None:
    job = DIGITS.replace(dtype=torch.float64)
    backend = (
        "auto" if text != "data(2, reduce=native)" or torch.cuda.device_count() > 1 else "gloo"
    )
    here = pg.train(job, text, runs=tmp_path, device="cuda", backend=backend)
    there = pg.train(job, text, runs=tmp_path)
    assert here.header["device"] == "cuda"
    assert here.losses == pytest.approx(there.losses, rel=1e-9)
    assert here.sample_count.missed == here.sample_count.twice == 0


class Attending(nn.Module):
    """A model with attention heads, dropout of scores and values, and a norm of whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 12)
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x.view(-1, 8, 8))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.out(self.dropout(x).flatten(1))  # type: ignore[no-any-return]


def convolving() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(6, 4, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(36, 10),
    )


class Forking(nn.Module):
    """A model with two branches with dropout; each branch is on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.left(x), self.right(x)], 1))  # type: ignore[no-any-return]


def tall() -> nn.Module:
    """Return a model for images with so many rows that a halo is sent during the computation."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 64, 1)),
        nn.Conv2d(1, 6, (3, 1), padding=(1, 0)),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, (3, 1), (2, 1), (1, 0)),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


MODELS = {"normed": make_normed_mlp, "attending": Attending, "convolving": convolving}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "text",
    [
        "tensor(2)",
        "tensor(3)",
        "data(2) * tensor(2)",
        "place(2)",
        "pipeline(2, micro=2)",
        "pipeline(2, micro=2, schedule=zero_bubble)",
        "tensor(2) * pipeline(2, micro=2)",
    ],
)
def test_divided_model_is_equal_on_gpu_and_cpu(text: str, model: str, tmp_path: Path) -> None:
    """Dropout draws the same on both devices, by the element of the whole tensor."""
    job = DIGITS.replace(model=MODELS[model], name=model, epochs=1, dtype=torch.float64)
    here = pg.train(job, text, runs=tmp_path, device="cuda", verify=True)
    # with micro=2, batch norm uses the statistics of each micro-batch
    there = pg.train(job, "serial(micro=2)" if "micro=2" in text else "serial", runs=tmp_path)
    assert here.header["device"] == "cuda"
    assert here.losses == pytest.approx(there.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("branch(2)", Forking),
        ("data(2) * branch(2)", Forking),
        *(
            (text, model)
            for text in (
                "spatial(2)",
                "spatial(3)",
                "data(2) * spatial(2)",
                "spatial(2, dense=tensor)",
                "data(2, dense=tensor)",
            )
            for model in (convolving, tall)
        ),
    ],
)
def test_spatial_and_branch_are_equal_on_gpu_and_cpu(
    text: str, model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    job = DIGITS.replace(model=model, name=model.__name__, epochs=1, dtype=torch.float64)
    # the first module makes images of vectors; here the samples are images already
    if model is not Forking:
        first, *_ = model()
        shaped = [
            TensorDataset(first(each.tensors[0]), each.tensors[1])
            for each in (DIGITS.train, DIGITS.test)
        ]
        job = job.replace(model=lambda: model()[1:], train=shaped[0], test=shaped[1])
    here = pg.train(job, text, runs=tmp_path, device="cuda", verify=True)
    there = pg.train(job, "serial", runs=tmp_path)
    assert here.losses == pytest.approx(there.losses, rel=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "data(2, reduce=ring)",
        "data(2, reduce=butterfly)",
        "data(2)",
        "tensor(2)",
        "pipeline(2, micro=2)",
        "server(2)",
        "server(2, servers=2)",
    ],
)
def test_verify_on_the_gpu(text: str, tmp_path: Path) -> None:
    for job in (DIGITS, DIGITS.replace(model=make_normed_mlp, name="normed")):
        certificate = pg.verify(job, text, runs=tmp_path, device="cuda")
        assert certificate.same, certificate


def test_nccl_with_a_gpu_per_rank(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        with pytest.raises(
            pg.Refused, match="backend nccl needs a GPU per rank, and this host has 1 for 2 ranks"
        ):
            pg.train(DIGITS, "data(2)", runs=tmp_path, device="cuda", backend="nccl")
        pytest.skip("NCCL between ranks wants two GPUs, and this machine has one")
    run = pg.train(DIGITS, "data(2, reduce=native)", runs=tmp_path, device="cuda")
    assert run.header["backend"] == "nccl"
    assert pg.verify(DIGITS, "data(2, reduce=ring)", runs=tmp_path, device="cuda").same


def test_bfloat16_and_resume_on_the_gpu(tmp_path: Path) -> None:
    job = DIGITS.replace(dtype=torch.bfloat16)
    first = pg.train(job, "data(2, reduce=ring)", runs=tmp_path, device="cuda", save=30)
    assert first.test is not None
    assert first.test > 80
    resumed = pg.train(
        job.replace(epochs=3), "serial", runs=tmp_path, device="cuda", resume=first.folder
    )
    assert len(resumed.losses) == 23


@pytest.mark.parametrize("text", ["serial", "data(2)"])
def test_compiled_dropout_on_the_gpu(text: str, tmp_path: Path) -> None:
    """Compiled code draws the numbers that the same code draws without torch.compile."""
    job = DIGITS.replace(model=Forking, name="forking", epochs=1, dtype=torch.float64)
    compiled = job.replace(model=lambda: torch.compile(Forking()))
    here = pg.train(compiled, text, runs=tmp_path, device="cuda")
    plain = pg.train(job, text, runs=tmp_path, device="cuda")
    assert here.losses == pytest.approx(plain.losses, rel=1e-9)


def test_user_loop_on_the_gpu() -> None:
    assert "RANK" not in os.environ
    model = nn.Linear(64, 10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, device="cuda") as trainer:
        losses = [
            trainer.step(*batch).loss for batch in trainer.batches(DIGITS.train, batch=64, epoch=0)
        ]
    assert next(model.parameters()).is_cuda
    assert losses[-1] < losses[0]


def make_wide_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def train_on_gpu_and_cpu(world: World, job: pg.Job, chosen: str) -> tuple[list[float], list[int]]:
    """Train with rank 0 on the GPU and the others on the CPU.

    Return the losses of all steps, and the shares at the end.
    """
    here = replace(world, device=torch.device("cuda", 0) if world.rank == 0 else CPU)
    trainer = Trainer.build_for_job(here, job, pg.strategy(chosen))
    losses = []
    try:
        for epoch in range(job.epochs):
            for each in trainer.batches(job.train, job.batch, epoch):
                losses.append(trainer.step(*separate_target(each)).loss)
        return losses, list(trainer.training.state.division.shares)
    finally:
        trainer.close()


def test_shares_are_adapted_to_a_gpu_and_a_cpu(tmp_path: Path) -> None:
    """The rank on the GPU gets most of every batch from the second epoch on.

    The training equals serial's.
    """
    job = DIGITS.replace(model=make_wide_mlp, name="wide", dtype=torch.float64, epochs=3, batch=512)
    serial = pg.train(job, "serial", runs=tmp_path)
    with Launcher(2) as ranks:
        for losses, shares in ranks.run(
            train_on_gpu_and_cpu, job, "data(2, shares=auto, reduce=ring)"
        ):
            assert losses == pytest.approx(serial.losses, rel=1e-9)
            assert sum(shares) == 512
            assert shares[0] > 2 * shares[1]
            print(f"shares of a GPU and a CPU rank: {shares}")


def test_asynchronous_workers_on_a_gpu(tmp_path: Path) -> None:
    """Servers are on the CPU and send from there.

    The statistics of batch norm are copied to the CPU and back.
    """
    job = DIGITS.replace(model=make_normed_mlp, name="normed")
    run = pg.train(job, "server(2, sync=asp)", runs=tmp_path, device="cuda", save=20)
    assert (run.sample_count.twice, run.sample_count.missed) == (0, 0)
    assert (
        len(
            pg.train(
                job.replace(epochs=3), "server(2)", runs=tmp_path, device="cuda", resume=run.folder
            ).losses
        )
        == 23
    )


def average_on_gpu_and_cpu(world: World, job: pg.Job) -> list[float]:
    """Average the state of a replica on the GPU and one on the CPU; return the mean of this rank.

    Both replicas continue from the mean.
    """
    here = replace(world, device=torch.device("cuda", 0) if world.rank == 0 else CPU)
    trainer = Trainer.build_for_job(here, job, pg.strategy("local(2, every=3, reduce=ring)"))
    try:
        batches = trainer.batches(job.train, job.batch, 0)
        for _ in range(4):
            trainer.step(*separate_target(next(batches)))
        assert trainer.training.setup.exchange is not None
        trainer.training.setup.exchange.adopt_effective_weights()
        for parameter, state in trainer.optimizer.state.items():
            assert {each.device for each in state.values()} == {parameter.device}
        means = [float(state["exp_avg"].abs().sum()) for state in trainer.optimizer.state.values()]
        # the gradients come from this rank's own samples, so this update is its own too
        trainer.optimizer.step()
        return means
    finally:
        trainer.close()


def test_state_on_two_devices_is_averaged() -> None:
    """Earlier, the average of states on two devices failed.

    The states were returned to the devices that they were sent from, and could not be summed there.
    The step of a fused Adam is a tensor on the device of its parameter.
    """
    job = DIGITS.replace(
        dtype=torch.float64, optimizer=functools.partial(torch.optim.Adam, lr=1e-3, fused=True)
    )
    with Launcher(2) as ranks:
        one, other = ranks.run(average_on_gpu_and_cpu, job, size=2)
    assert one == pytest.approx(other, rel=1e-9)
