"""A cause is called one only if it was tested: one worker takes the batch in the same parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality_table import VECTORS, job, mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

import paragrad as pg
from paragrad.errors import StepFailed
from paragrad.launch import Launcher
from paragrad.runtime.world import World

pytestmark = pytest.mark.processes


class CentredGradient(torch.autograd.Function):
    """Subtracts the mean over the batch from a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(CentredGradient.apply(torch.tanh(self.hidden(x))))


class ByRank(nn.Module):
    """Scales the output by the number of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.mlp(x) * (1.0 + 0.01 * rank)


class Quantized(nn.Module):
    """Takes its codes from the first batch, as vector quantization does."""

    codes: Tensor
    is_new: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()
        self.register_buffer("codes", torch.zeros(10))
        self.register_buffer("is_new", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_new:
            self.codes.copy_(x.detach().amax(0))
            self.is_new.zero_()
        return self.mlp(x - self.codes)


class ActNorm(nn.Module):
    """Takes its scale, a parameter, from the first batch (Glow)."""

    is_new: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()
        self.scale = nn.Parameter(torch.ones(10))
        self.register_buffer("is_new", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_new:
            self.scale.data.copy_(1.0 / x.detach().std(0))
            self.is_new.zero_()
        return self.mlp(x * self.scale)


class Averaged(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x - x.mean(0))


DIVISION = (
    r"Cause: the division of the batch\. On one worker too, the batch in the same parts gives"
)


@pytest.mark.parametrize(
    ("build", "strategy", "message"),
    [
        (Centred, "data(2)", f"{DIVISION} another .* mixes samples"),
        (Centred, "pipeline(2, micro=2)", f"{DIVISION} another .* mixes samples"),
        (Centred, "serial(micro=2)", f"{DIVISION} another .* mixes samples"),
        (ByRank, "data(2)", "not the same on every rank.* It is not the division of the batch"),
    ],
)
def test_cause_is_tested_on_one_worker(
    build: Callable[[], nn.Module], strategy: str, message: str, tmp_path: Path
) -> None:
    """A number of a rank was said to mix samples, and codes to need a pair from the loss."""
    with pytest.raises(pg.RankFailed, match=message):
        pg.train(job("cause", build, VECTORS), strategy, runs=tmp_path)


class PackedDropout(nn.Module):
    """Dropout on a packed sequence, whose values are ordered by time and not by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.rnn = nn.GRU(1, 6, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x[:, :, None], lengths, True, enforce_sorted=False)
        packed = packed._replace(data=self.drop(packed.data))
        return self.out(self.rnn(packed)[1][0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (PackedDropout, "; what bernoulli draws is not each sample's own: in eval mode"),
        (Quantized, r"; the forward fills codes, is_new from the first batch that it sees"),
        (ActNorm, r"; the forward fills scale, is_new from the first batch that it sees"),
        (Averaged, "; the model mixes samples: "),
    ],
)
def test_models_that_mix_samples_get_their_own_repair(
    build: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    """They were told to return the pair (sum, weight), which changes nothing."""
    with pytest.raises(pg.Refused, match=message) as caught:
        pg.train(job("mixes", build, VECTORS), "data(2)", runs=tmp_path)
    assert "return the pair" not in str(caught.value)


def build_filled() -> nn.Module:
    """Quantized, whose codes are filled before the training."""
    model = Quantized()
    model(VECTORS.tensors[0])
    return model


def test_model_filled_before_the_training_trains(tmp_path: Path) -> None:
    filled = job("filled", build_filled, VECTORS)
    losses = [pg.train(filled, each, runs=tmp_path).losses for each in ("serial", "data(2)")]
    torch.testing.assert_close(*map(torch.tensor, losses))


def step_with_changed_inputs(world: World) -> str:
    """On a rank: a step of a user's loop, whose inputs are not those that the dataset gave."""
    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pg.parallelize(model, functional.cross_entropy, optimizer, "data(2)") as trainer:
        inputs, target = next(trainer.batches(VECTORS, batch=8, epoch=0))
        with pytest.raises(StepFailed) as caught:
            trainer.step(2.0 * inputs, target)
    return caught.value.message


def test_cause_is_tested_in_a_loop_of_the_user() -> None:
    with Launcher(2) as ranks:
        messages = ranks.run(step_with_changed_inputs)
    assert all(re.search(f"{DIVISION} another .* mixes samples", each) for each in messages)
