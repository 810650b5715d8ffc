"""Before the first step of a divided model, a test is compared with one worker's test.

These tests show what the comparison finds, and what it leaves unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equality_table import IMAGES, VECTORS, make_job, make_mlp
from state_models import ByState
from torch import Tensor, nn
from torch.nn import functional

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.errors import StepFailed
from paragrad.launch import Launcher
from paragrad.report.run import Run
from paragrad.runtime.world import World
from paragrad.trainer.checks import step_checker
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]
COMPARED = "one worker's, and so is the loss of"


def train_row(pool: Launcher, folder: Path, row: str, made: pg.Job) -> Run:
    folder.mkdir()
    return train_on_ranks(pool, validate_run(made, row, Settings()), folder)


def list_skip_reasons(found: Run) -> list[str]:
    return [
        choice["because"] for choice in found.select_lines("choice") if choice["what"] == "test"
    ]


def small(*last: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Linear(16, 12),
        nn.Tanh(),
        nn.Linear(12, 4),
        *last,
    )


def make_normed_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Dropout(0.3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 4),
    )


@pytest.mark.parametrize("row", ["spatial(2)", "tensor(2)", "pipeline(2, micro=4)", "data(2)"])
def test_evaluation_of_a_divided_model_is_compared(
    pool: Launcher, tmp_path: Path, row: str
) -> None:
    """If each rank has the whole model, it tests the model as serial does, without a comparison."""
    for test in (IMAGES, None):
        found = train_row(
            pool,
            tmp_path / str(test is None),
            row,
            make_job("tested", make_normed_cnn, IMAGES, test=test),
        )
        assert (COMPARED in (found.first_step or "")) == (test is not None and row != "data(2)")
        assert not list_skip_reasons(found)


class Peeking(ByState):
    """A model that reads its parameters through `state_dict` in eval mode only."""

    def __init__(self, constant: bool) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return nn.Sequential.forward(self, x)  # type: ignore[no-any-return]
        out = super().forward(x)
        return out @ torch.ones(1, 1) if self.constant else out  # torch.ones is in float32


def compute_linear_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] * target).mean()


@pytest.mark.parametrize(
    ("row", "constant"),
    [
        ("tensor(2)", False),
        ("tensor(2)", True),
        pytest.param("data(2) * tensor(2)", False, marks=pytest.mark.table),
    ],
)
def test_different_evaluation_is_reported(
    pool: Launcher, tmp_path: Path, row: str, constant: bool
) -> None:
    """A test that differs from one worker's test ends the run.

    Earlier, only steps were compared, so a test could give another number without a message. If a
    test cannot run in float64, there is no precise reference, and rounding baselines decide.
    """
    made = make_job(
        "peeking", lambda: Peeking(constant), VECTORS, test=VECTORS, loss=compute_linear_loss
    )
    with pytest.raises(
        pg.RankFailed,
        match=r"the loss of a test \(eval mode\) is off by .*goes another way than in training",
    ):
        train_row(pool, tmp_path / "run", row, made)


class Moving(nn.Module):
    """A loss that keeps state in a buffer (its calls), as losses of self-distillation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output, target) * (1 + 0.1 * self.calls)


class Clamping(nn.Sequential):
    """A model whose forward changes a parameter in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self[0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("row", ["tensor(2)", pytest.param("place(2)", marks=pytest.mark.table)])
def test_comparison_leaves_parameters_unchanged(pool: Launcher, tmp_path: Path, row: str) -> None:
    made = make_job(
        "clamping", lambda: Clamping(*small()), VECTORS, test=VECTORS, dtype=torch.float64, epochs=1
    )
    serial, ours = (train_row(pool, tmp_path / each, each, made) for each in ("serial", row))
    assert ours.losses == pytest.approx(serial.losses, rel=1e-10)


class Coarse(nn.Sequential):
    """A float64 model whose linear layers compute in float32 in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)  # type: ignore[no-any-return]
        for each in self:
            x = (
                functional.linear(x.float(), each.weight.float()).double()
                if isinstance(each, nn.Linear)
                else each(x)
            )
        return x


def sum_cross_entropy(output: Tensor, target: Tensor) -> tuple[float, int]:
    return float(functional.cross_entropy(output, target, reduction="sum")), len(target)


def test_rounding_bound_of_an_evaluation(pool: Launcher, tmp_path: Path) -> None:
    """An evaluation in float32 may differ by the rounding of float32.

    The test uses a metric, not the loss. Validation requires that the loss of a float64 job adds up
    as in float64. Some processors round a part of a batch differently from the whole batch.
    """
    made = make_job(
        "coarse",
        lambda: Coarse(*small()),
        VECTORS,
        test=VECTORS,
        metric=sum_cross_entropy,
        dtype=torch.float64,
    )
    assert COMPARED in (train_row(pool, tmp_path / "run", "tensor(2)", made).first_step or "")


@pytest.mark.parametrize("row", ["tensor(2)", pytest.param("place(2)", marks=pytest.mark.table)])
def test_comparison_leaves_no_state_in_the_loss(pool: Launcher, tmp_path: Path, row: str) -> None:
    """Earlier, the state of the loss included the compared test, which serial does not run."""
    made = make_job("moving", small, VECTORS, test=VECTORS, loss=Moving(), dtype=torch.float64)
    serial, ours = (train_row(pool, tmp_path / each, each, made) for each in ("serial", row))
    assert ours.losses == pytest.approx(serial.losses, rel=1e-10)


class Undoubted(nn.Sequential):
    """A model for which, in a rank, a step in float64 fails: the check must not request one."""

    def __init__(self) -> None:
        super().__init__(*small())
        if dist.is_initialized():
            # the patch remains until the process ends
            mock.patch.object(
                step_checker, "refuse_float64_copies", refuse_undoubted_copies
            ).start()


refuse_copies = step_checker.refuse_float64_copies


def refuse_undoubted_copies(world: World, module: Any) -> None:
    if isinstance(module.model, Undoubted):
        raise StepFailed("doubtful")
    refuse_copies(world, module)


def test_evaluation_is_compared_without_autocast(tmp_path: Path) -> None:
    """A test in bfloat16 is compared with one in bfloat16.

    Earlier, it was compared with a test in float32, and then repeated in float64. The reason was
    that the passes of a divided model apply autocast themselves.
    """
    made = make_job("cast", Undoubted, VECTORS, test=VECTORS, dtype=torch.bfloat16)
    # in new ranks, because the patch would remain in the ranks of the pool
    assert COMPARED in (pg.train(made, "place(2)", runs=tmp_path).first_step or "")


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output + 0.1 * torch.randn_like(output), target)


@pytest.mark.parametrize(
    ("row", "model", "loss"),
    [("tensor(2)", small, noisy), ("place(2)", lambda: small(Noise()), functional.cross_entropy)],
)
def test_random_evaluation_is_not_compared(
    pool: Launcher, tmp_path: Path, row: str, model: Callable[[], nn.Module], loss: Any
) -> None:
    """A test with random draws is not compared.

    In a test, the draws of a part of the model are numbered as in training, where dropout draws
    too. The loss may draw in any way.
    """
    found = train_row(
        pool, tmp_path / "run", row, make_job("drawing", model, VECTORS, test=VECTORS, loss=loss)
    )
    assert "are one worker's" in (found.first_step or "")
    assert COMPARED not in (found.first_step or "")
    assert list_skip_reasons(found) == ["it differs each time it is computed"]


def compute_loss_of_dict(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"], target)


class Other(nn.Sequential):
    """A model that returns a tensor instead of a dict in eval mode."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"logits": out} if self.training else out


def test_loss_that_rejects_eval_mode_output(pool: Launcher, tmp_path: Path) -> None:
    made = make_job(
        "other",
        lambda: Other(*small()),
        VECTORS,
        test=VECTORS,
        loss=compute_loss_of_dict,
        metric=lambda output, target: ((output.argmax(1) == target).sum(), len(target)),
    )
    (because,) = list_skip_reasons(train_row(pool, tmp_path / "run", "tensor(2)", made))
    assert because.startswith("one worker's raised IndexError")


def train_without_first_samples(world: World, row: str) -> list[float]:
    """Run a user's loop that drops the first sample of each batch; no rank loaded such a batch."""
    torch.manual_seed(3)
    model = make_mlp().double()
    with (
        warnings.catch_warnings(),
        pg.parallelize(
            model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), row
        ) as trainer,
    ):
        warnings.filterwarnings("error", message=".*is not compared with one worker's")
        return [
            trainer.step(inputs[1:], target[1:]).loss
            for inputs, target in trainer.batches(VECTORS, batch=8, epoch=0)
        ]


@pytest.mark.parametrize("row", ["tensor(2)", pytest.param("place(2)", marks=pytest.mark.table)])
def test_batch_shortened_by_the_user_loop(pool: Launcher, row: str) -> None:
    expected = train_without_first_samples(World(), "serial")
    for losses in pool.run(train_without_first_samples, row, size=2):
        assert losses == pytest.approx(expected, rel=1e-9)
