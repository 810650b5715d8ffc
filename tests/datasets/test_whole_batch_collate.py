"""Collates that draw random numbers, pad or sort, so that every rank collates the whole batch.

If such a collate gets only a share, its result differs from that part of the collated batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from equality_table import VECTORS, Lines, make_job
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

import paragrad as pg
from paragrad.datasets.loading import Samples, explain_whole_batch
from paragrad.errors import StepFailed
from paragrad.jobs.job import Job
from paragrad.validation.inspect_job import inspect_job
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]

OWN = "it changes the order of the samples"
STRATEGIES = ("data(2)", "data(3, reduce=ring, shares=[2, 1, 1], micro=2)", "serial(micro=3)")


def mix_samples(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mix every sample with another one of its batch, by a weight drawn per batch (mixup)."""
    x, target = default_collate(samples)
    share = numpy.random.beta(0.4, 0.4)
    other = torch.randperm(len(x))
    both = functional.one_hot(target, 4).to(x.dtype)
    return share * x + (1 - share) * x[other], share * both + (1 - share) * both[other]


def mask_inputs(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Set random entries to zero; draw from Python's generator and from torch's."""
    x, target = default_collate(samples)
    return x * (torch.rand_like(x) > 0.3) * random.choice([0.5, 1.0]), target


class Pooled(nn.Module):
    """A model that takes the mean over a padded line, including the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens).mean(1))


def pad_lines(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence(lines, batch_first=True), torch.tensor(
        [int(line[0]) % 4 for line in lines]
    )


DRAWING = {
    "mixup": make_job("mixup", lambda: nn.Linear(10, 4), VECTORS, collate=mix_samples),
    "masked": make_job("masked", lambda: nn.Linear(10, 4), VECTORS, collate=mask_inputs),
}
PADDED = make_job("padded", Pooled, Lines(), collate=pad_lines)


class Recurrent(nn.Module):
    """A recurrent model over packed lines; by default, torch requires the longest line first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.cell = nn.GRU(8, 6, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True
        )
        return self.out(self.cell(packed)[1][0])


def sort_longest_first(lines: list[Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    lines = sorted(lines, key=len, reverse=True)
    tokens, target = pad_lines(lines)
    return (tokens, torch.tensor(list(map(len, lines)))), target


SORTED = make_job("sorted", Recurrent, Lines(), collate=sort_longest_first)


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("made", [*DRAWING.values(), PADDED], ids=lambda made: made.name)
def test_whole_batch_collate_equals_serial(made: Job, strategy: str, tmp_path: Path) -> None:
    """Collates that draw or pad train as serial does.

    Earlier, the random numbers of collate depended on the first sample of a share. A mean over
    padding had an error of 7.5e-2.
    """
    certificate = pg.verify(made, strategy, runs=tmp_path)
    assert certificate.same
    assert certificate.difference is not None
    assert certificate.difference <= 1e-10


def test_reason_for_whole_batches_is_recorded(tmp_path: Path) -> None:
    assert inspect_job(DRAWING["mixup"]).whole_batch_reason == "it draws at random"
    assert inspect_job(PADDED).whole_batch_reason == "a share collated alone gives another loss"
    assert (
        inspect_job(
            make_job("plain", lambda: nn.Linear(10, 4), VECTORS, collate=default_collate)
        ).whole_batch_reason
        is None
    )
    run = pg.train(PADDED, "data(2)", runs=tmp_path)
    told = [line for line in run.choices if line["what"] == "collate"]
    assert [(line["picked"], line["because"]) for line in told] == [
        ("whole batches on every rank", "a share collated alone gives another loss")
    ]


def test_indivisible_batch_is_refused() -> None:
    """A batch whose first dimension is time is refused if ranks must collate the whole batch.

    A rank cannot take its part of such a batch.
    """

    def put_time_first(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, target = pad_lines(lines)
        return tokens.T, target

    class ColumnModel(Pooled):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens.T)

    with pytest.raises(pg.Refused, match="padded differently from the whole"):
        validate_run(make_job("columns", ColumnModel, Lines(), collate=put_time_first), "data(2)")


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["data(2, micro=3)", "serial(micro=3)"])
def test_collate_with_a_sample_order(strategy: str, tmp_path: Path) -> None:
    """A collate that sorts the samples trains as serial does.

    With micro=3, the last batch of 5 gives a rank an empty part, filled with a placeholder sample.
    Earlier, collate sorted the placeholder among the others, so it was taken for another sample.
    The error of the gradients was 2.2 times their size, without a message.
    """
    assert inspect_job(SORTED).whole_batch_reason == OWN
    certificate = pg.verify(SORTED, strategy, runs=tmp_path)
    assert certificate.same, (certificate.difference, certificate.tensor, certificate.failure)
    assert certificate.difference is not None
    assert certificate.difference <= 1e-10


def collate_numbers(samples: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(samples), torch.tensor(samples[0])  # one target for all samples


GENERATOR = torch.Generator()
COLLATES: dict[str, tuple[Callable[[list[Any]], Any], list[Any], str | None]] = {
    "sorted": (lambda samples: torch.tensor(sorted(samples)), [3.0, 1.0, 2.0], OWN),
    "neighbours alike": (lambda samples: torch.tensor(sorted(samples)), [1.0] * 8 + [2.0] * 8, OWN),
    "one sample": (lambda samples: torch.tensor(sorted(samples)), [3.0], None),
    "no tensors": (sorted, [(3, 1), (1, 1)], OWN),
    "in order": (collate_numbers, [0.0, 1.0, 1.0, float("nan"), 2.0, 5.0], None),
    "fails backwards": (
        lambda samples: torch.tensor(samples) / math.sqrt(samples[-1] - samples[0]),
        [1.0, 2.0],
        None,
    ),
    "drops samples": (lambda samples: torch.tensor(sorted(samples)[1:]), [3.0, 1.0, 2.0], None),
    "time first": (
        lambda samples: torch.stack(samples, 1),
        list(torch.arange(25.0).view(5, 5)),
        None,
    ),
    "draws": (lambda samples: torch.rand(len(samples)), [1.0, 2.0], "it draws at random"),
    "never the same": (
        lambda samples: torch.rand(len(samples), generator=GENERATOR),
        [1.0, 2.0],
        None,
    ),
}


@pytest.mark.parametrize("name", COLLATES)
def test_collates_that_sort_are_detected(name: str) -> None:
    """A collate that sorts is detected by calls with the same samples forwards and backwards.

    If these calls do not show what a collate does, it is used unchanged.
    """
    collate, data, because = COLLATES[name]
    assert explain_whole_batch(Samples(data, 0, collate), batch=12) == because
    assert explain_whole_batch(Samples(data, 0, pg.WholeBatch(collate)), batch=12) is None


def drop_twos(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, target = zip(*[sample for sample in samples if sample[1] != 2], strict=True)
    return torch.stack(x), torch.stack(target)


def test_collate_that_fails_on_a_share(tmp_path: Path) -> None:
    """If a collate fails on a share, the message says so and names the repair.

    This collate drops samples, and it drops all samples of one share. Earlier, the message was
    only "not enough values to unpack (expected 2, got 0)".
    """
    vectors = TensorDataset(VECTORS.tensors[0], torch.where(torch.arange(29) % 2 == 0, 1, 2))
    dropping = make_job("dropping", lambda: nn.Linear(10, 4), vectors, collate=drop_twos, batch=2)
    with pytest.raises(
        pg.Refused,
        match=r"collate raised ValueError: not enough values .*given 1 of the batch's 2 samples\); "
        r"if it drops samples, .* collate=paragrad.WholeBatch\(collate\)",
    ):
        inspect_job(dropping)
    with pytest.raises(
        pg.RankFailed,
        match=r"collate raised .*of the batch's 6 samples\); if it drops samples, let it keep",
    ):
        pg.train(dropping.replace(batch=6), "data(3, reduce=ring)", runs=tmp_path)
    with pytest.raises(StepFailed, match=r"given 1 of the batch's 1 samples\)$"):
        dropping.make_samples(vectors)[0, [1]]


def test_whole_batches_on_request() -> None:
    made = PADDED.replace(collate=pg.WholeBatch(pad_lines))
    assert inspect_job(made).whole_batch_reason is None
    samples = made.make_samples(Lines())
    everything = samples[0, [3, 4, 5, 6]]
    part = samples[0, [3, 4, 5, 6], [0, 2]]
    assert torch.equal(part[0], everything[0][[0, 2]])
