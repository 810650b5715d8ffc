"""Dropout that does not depend on the layout."""

from __future__ import annotations

import equality
import pytest
import torch
from equality import JOBS
from torch import nn
from torch.nn import functional

from paragrad.dropout import Keyed, Watch, keep
from paragrad.errors import StepFailed
from paragrad.strategy import Serial
from paragrad.trainer import Trainer
from paragrad.world import World


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_is_random_with_the_right_share(p: float) -> None:
    kept = keep(12345, list(range(200)), 5000, p).double()
    noise = (p * (1 - p)) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < 5 * noise / 1000                 # 10^6 draws
    centred = (kept - (1 - p)) / noise
    between = (centred @ centred.T / 5000).fill_diagonal_(0)                    # samples are not alike
    assert float(between.abs().max()) < 6 / 5000**0.5
    assert float((centred[:, 1:] * centred[:, :-1]).mean().abs()) < 5 / 1000    # nor are neighbours


def test_the_ends() -> None:
    assert keep(1, [0, 1], 100, 0.0).all()
    assert not keep(1, [0, 1], 100, 1.0).any()


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Dropout(0.4), (6, 3, 5)), (nn.Dropout1d(0.4), (6, 30, 5)), (nn.Dropout2d(0.4), (6, 30, 2, 2)),
    (nn.Dropout3d(0.4), (6, 30, 2, 2, 2))])
def test_a_part_of_the_batch_draws_its_part_of_the_mask(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    with Keyed(0, 3, list(range(6))):
        whole, second = layer(x), layer(x)
    with Keyed(0, 3, [4, 5]):
        part = layer(x[:2])
    assert torch.equal(part, whole[4:])
    assert not torch.equal(whole, second)               # another call, another mask
    assert torch.allclose(whole.unique(), torch.tensor([0.0, 1 / 0.6]))
    with Keyed(0, 4, list(range(6))):
        assert not torch.equal(layer(x), whole)         # another step
    with Keyed(1, 3, list(range(6))):
        assert not torch.equal(layer(x), whole)         # another seed


def test_whole_channels_are_dropped_together() -> None:
    with Keyed(0, 0, [0, 1]):
        out = functional.dropout2d(torch.ones(2, 50, 3, 3), 0.5)
    assert ((out == 0).all((2, 3)) | (out != 0).all((2, 3))).all()


def test_evaluation_and_in_place() -> None:
    x = torch.ones(4, 4)
    with Keyed(0, 0, [0, 1, 2, 3]):
        assert functional.dropout(x, 0.5, training=False) is x
        functional.dropout(x, 0.5, inplace=True)
    assert not torch.equal(x, torch.ones(4, 4))


def test_a_batch_that_is_not_the_first_dimension_is_refused() -> None:
    with Keyed(0, 0, [0, 1, 2, 3]), pytest.raises(StepFailed, match="must be its first dimension"):
        functional.dropout(torch.ones(7, 4), 0.5)


def test_watch_tells_dropout_from_draws_it_cannot_key() -> None:
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    for draw, dropout, others in (
            (lambda: functional.dropout(torch.ones(3)), True, set()),
            (lambda: torch.bernoulli(torch.ones(3)), False, {"bernoulli"}),
            (lambda: lstm(torch.ones(3, 2, 4)), False, {"lstm"}),
            (lambda: nn.Linear(3, 3)(torch.ones(3)), False, set())):
        with Watch() as watch:
            draw()
        assert (watch.dropout, watch.others) == (dropout, others)


def test_checkpointing_draws_the_same_mask_again() -> None:
    """Recomputation ran outside the keyed forward and drew another mask: a wrong gradient, in serial too."""
    job = JOBS["dropout, recomputed"].replace(dtype=torch.float64)

    def gradient(use: bool) -> torch.Tensor:
        trainer = Trainer.of_job(World(), job, Serial(threads=1))
        original = torch.utils.checkpoint.checkpoint
        if not use:
            equality.checkpoint = lambda function, *arguments, **_: function(*arguments)
        try:
            trainer.step(*next(trainer.batches(job.train, batch=12, epoch=0)))
        finally:
            equality.checkpoint = original
        return trainer.gradients()["first.weight"]              # type: ignore[return-value]

    assert torch.equal(gradient(True), gradient(False))


def test_time_first_is_refused_also_where_its_length_is_a_multiple_of_the_batch() -> None:
    with Keyed(0, 0, [0, 1]), pytest.raises(StepFailed, match="must be its first dimension"):
        functional.dropout(torch.ones(4, 2, 3))
    with Keyed(0, 0, [0, 1]):
        functional.dropout(torch.ones(4, 3))                    # two rows a sample: flattened tokens
