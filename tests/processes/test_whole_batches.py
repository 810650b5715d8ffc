"""Collates that draw or pad: what they make of a share is not its part of the batch, so every rank collates all of it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch
from equality import VECTORS, Lines, job
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

import paragrad as pg
from paragrad.door import examined
from paragrad.job import Job

STRATEGIES = ("data(2)", "data(3, reduce=ring, shares=[2, 1, 1], micro=2)", "serial(micro=3)")


def mixed_up(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mixup: every sample with another of its batch, by a share drawn for the batch."""
    x, target = default_collate(samples)
    share, other = numpy.random.beta(0.4, 0.4), torch.randperm(len(x))
    both = functional.one_hot(target, 4).to(x.dtype)
    return share * x + (1 - share) * x[other], share * both + (1 - share) * both[other]


def masked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Some entries hidden, by Python's generator and by torch's."""
    x, target = default_collate(samples)
    return x * (torch.rand_like(x) > 0.3) * random.choice([0.5, 1.0]), target


class Pooled(nn.Module):
    """The mean over a padded line, padding and all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens).mean(1))


def padded(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence(lines, batch_first=True), torch.tensor([int(line[0]) % 4 for line in lines])


DRAWING = {"mixup": job("mixup", lambda: nn.Linear(10, 4), VECTORS, collate=mixed_up),
           "masked": job("masked", lambda: nn.Linear(10, 4), VECTORS, collate=masked)}
PADDED = job("padded", Pooled, Lines(), collate=padded)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("made", [*DRAWING.values(), PADDED], ids=lambda made: made.name)
def test_the_same_training(made: Job, strategy: str, tmp_path: Path) -> None:
    """What collate drew followed a share's first sample; a mean over padding was 7.5e-2 off."""
    certificate = pg.verify(made, strategy, runs=tmp_path)
    assert certificate.same
    assert certificate.difference is not None
    assert certificate.difference <= 1e-10


def test_why_is_recorded(tmp_path: Path) -> None:
    assert examined(DRAWING["mixup"]).whole_batch == "it draws at random"
    assert examined(PADDED).whole_batch == "what it makes of a share counts otherwise"
    assert examined(job("plain", lambda: nn.Linear(10, 4), VECTORS, collate=default_collate)).whole_batch is None
    run = pg.train(PADDED, "data(2)", runs=tmp_path)
    told = [line for line in run.choices if line["what"] == "collate"]
    assert [(line["picked"], line["because"]) for line in told] == [
        ("whole batches on every rank", "what it makes of a share counts otherwise")]


def test_what_cannot_be_cut_is_refused() -> None:
    """Time first: the batch's first dimension is not the samples, so no rank could take its part of a whole batch."""
    def time_first(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, target = padded(lines)
        return tokens.T, target

    class OfColumns(Pooled):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens.T)

    with pytest.raises(pg.Refused, match="padded otherwise than the whole"):
        examined(job("columns", OfColumns, Lines(), collate=time_first))


def test_asked_for() -> None:
    made = PADDED.replace(collate=pg.WholeBatch(padded))
    assert examined(made).whole_batch is None
    samples = made.samples(Lines())
    everything, part = samples[0, [3, 4, 5, 6]], samples[0, [3, 4, 5, 6], [0, 2]]
    assert torch.equal(part[0], everything[0][[0, 2]])
