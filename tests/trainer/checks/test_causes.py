"""A message names a cause only if it was tested: one worker runs the batch in the same parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality_table import VECTORS, make_job, make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

import paragrad as pg
from paragrad.errors import StepFailed
from paragrad.launch import Launcher
from paragrad.runtime.world import World
from paragrad.trainer.checks.step_check import Mismatch, _judge_division
from paragrad.trainer.checks.step_result import Gap

pytestmark = pytest.mark.processes


class CentredGradient(torch.autograd.Function):
    """An identity whose backward subtracts the mean over the batch from the gradient."""

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
    """A model that scales its output by the number of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.mlp(x) * (1.0 + 0.01 * rank)


class Quantized(nn.Module):
    """A model that takes its codes from the first batch, as vector quantization does."""

    codes: Tensor
    is_new: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()
        self.register_buffer("codes", torch.zeros(10))
        self.register_buffer("is_new", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_new:
            self.codes.copy_(x.detach().amax(0))
            self.is_new.zero_()
        return self.mlp(x - self.codes)


class ActNorm(nn.Module):
    """A model that takes its scale, a parameter, from the first batch (Glow)."""

    is_new: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()
        self.scale = nn.Parameter(torch.ones(10))
        self.register_buffer("is_new", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_new:
            self.scale.data.copy_(1.0 / x.detach().std(0))
            self.is_new.zero_()
        return self.mlp(x * self.scale)


class Averaged(nn.Module):
    """A model that subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()

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
    """Earlier, two causes were named wrongly.

    A model that uses the number of its rank was said to mix samples. For a model with codes, the
    message demanded a pair from the loss.
    """
    with pytest.raises(pg.RankFailed, match=message):
        pg.train(make_job("cause", build, VECTORS), strategy, runs=tmp_path)


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
        (
            PackedDropout,
            "; what bernoulli draws is not each sample's own: if every draw gives the same number",
        ),
        (Quantized, r"; the forward fills codes, is_new from the first batch that it sees"),
        (ActNorm, r"; the forward fills scale, is_new from the first batch that it sees"),
        (Averaged, "; the model mixes samples: "),
    ],
)
def test_models_that_mix_samples_get_their_own_repair(
    build: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    """Earlier, the message advised to return the pair (sum, weight), which changes nothing."""
    with pytest.raises(pg.Refused, match=message) as caught:
        pg.train(make_job("mixes", build, VECTORS), "data(2)", runs=tmp_path)
    assert "return the pair" not in str(caught.value)


def build_filled() -> nn.Module:
    """Return a Quantized model whose codes are filled before the training."""
    model = Quantized()
    model(VECTORS.tensors[0])
    return model


def test_model_filled_before_the_training_trains(tmp_path: Path) -> None:
    filled = make_job("filled", build_filled, VECTORS)
    losses = [pg.train(filled, each, runs=tmp_path).losses for each in ("serial", "data(2)")]
    torch.testing.assert_close(*map(torch.tensor, losses))


def step_with_changed_inputs(world: World) -> str:
    """Make a step of a user's loop with changed inputs; return the message of its failure."""
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


def judge(value: float, rounding: float, miss: float) -> bool | None:
    """Return whether the division is the cause of a mismatch; None if that is unknown."""
    gaps = {("gradient", "a"): Gap(value, "a.weight", 1.0)}
    baseline = {("gradient", "a"): Gap(rounding, "a.weight", 1.0, 1e-7)}
    result = _judge_division(
        gaps, baseline, [Mismatch("gradient", 0, Gap(miss, "a.weight", 1.0), 0.0)]
    )
    return None if result is None else result.is_cause


def test_rounding_is_no_cause_and_excludes_none() -> None:
    """Earlier, rounding of 1.2e-7 was named as the cause of a mismatch of 1e-7.

    NaN was called equal.
    """
    assert judge(0.2, 1e-7, 0.25) is True
    assert judge(1e-7, 1e-7, 0.25) is False
    assert judge(1.2e-7, 1e-7, 1e-7) is None
    assert judge(0.02, 1e-7, 0.25) is None
    assert judge(math.nan, 1e-7, 0.25) is None


class OtherInEval(nn.Module):
    """A model with a batch norm written by hand, and with dropout, whose draws are right."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.mlp(x - x.mean(0) if self.training else x))


def test_draws_are_no_cause_where_eval_mode_is_another_path(tmp_path: Path) -> None:
    with pytest.raises(pg.Refused, match="; the model mixes samples: "):
        pg.train(make_job("other", OtherInEval, VECTORS), "data(2)", runs=tmp_path)


class MixesByDraws(nn.Module):
    """A model that mixes each sample with another one, by a random weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.rand(len(x), 1, dtype=x.dtype)
        return self.mlp(weight * x + (1 - weight) * x.flip(0))


def test_draws_of_samples_are_no_cause_of_mixing(tmp_path: Path) -> None:
    """Earlier, the random weights were named as the cause, because weights of 1 mix nothing."""
    with pytest.raises(pg.Refused, match="; the model mixes samples: "):
        pg.train(make_job("mixup", MixesByDraws, VECTORS), "data(2)", runs=tmp_path)


def contrast(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def test_loss_that_compares_samples_gets_a_true_repair(tmp_path: Path) -> None:
    with pytest.raises(pg.Refused, match="its divisor adds up over parts, but its sum does not"):
        pg.train(make_job("contrast", make_mlp, VECTORS, loss=contrast), "data(2)", runs=tmp_path)


class WithAuxiliary(nn.Module):
    """A model that averages over time, padding included, with a second output in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        output = self.out(self.drop(self.embed(x)).mean(1))
        return (output, output.sum(1)) if self.training else output


def compute_auxiliary_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    output, auxiliary = outputs
    return functional.cross_entropy(output, target) + 0.01 * auxiliary.pow(2).mean()


def pad_texts(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    texts = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
    return texts, torch.stack([target for _, target in samples])


TEXTS = [(torch.arange(1, 2 + place % 5), torch.tensor(place % 4)) for place in range(24)]


def test_explanations_refuse_no_job(tmp_path: Path) -> None:
    """Earlier, a model with another output in eval mode was refused, also under serial."""
    texts: Any = TEXTS
    padded = make_job(
        "padded", WithAuxiliary, texts, loss=compute_auxiliary_loss, collate=pad_texts, batch=8
    )
    losses = [pg.train(padded, each, runs=tmp_path).losses for each in ("serial", "data(2)")]
    torch.testing.assert_close(*map(torch.tensor, losses))
