"""The first-step check if one rank has no memory for the whole batch.

The step is then checked with fewer samples. If there is no memory for one sample per share, the
record says that the step was not checked. Another test has buffers that are no real numbers.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equality_table import VECTORS, make_job, make_mlp
from planted_faults import WRONGS, make_planted_job
from torch import Tensor, nn

import paragrad as pg
from paragrad.trainer.checks import reference_step

pytestmark = pytest.mark.processes


def limit_memory(model: nn.Module, samples: int) -> nn.Module:
    """Return the model; in ranks, pretend that there is memory for only so many samples.

    This is the memory of rank 0 beside the copies of the model.
    """
    if dist.is_initialized():

        def estimate_few_samples(
            trainer: object,
            batch: object,
            original: object = reference_step._estimate_sample_capacity,
        ) -> tuple[int, str]:
            return samples, "the samples want more than there is"

        mock.patch.object(reference_step, "_estimate_sample_capacity", estimate_few_samples).start()
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["data(2)", "data(2, reduce=ring)", "data(2, micro=2)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_first_step_is_checked_with_fewer_samples(
    strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    run = pg.train(
        make_job("cramped", lambda: limit_memory(make_mlp(), 4), VECTORS, dtype=dtype),
        strategy,
        runs=tmp_path,
    )
    event = run.select_lines("event")[0]
    assert (
        "of its first 4 samples, for which there is room on one rank, are one worker's"
        in event["message"]
    )
    assert len(run.losses) == len(
        pg.train(make_job("roomy", make_mlp, VECTORS, dtype=dtype), strategy, runs=tmp_path).losses
    )


def test_check_with_fewer_samples_finds_a_fault(tmp_path: Path) -> None:
    (wrong,) = (each for each in WRONGS if each.__name__ == "mean_of_means")
    made = make_planted_job(wrong)
    with pytest.raises(pg.RankFailed, match="not one worker's training: before the first update"):
        pg.train(
            made.replace(model=lambda: limit_memory(made.model(), 3)), "data(2)", runs=tmp_path
        )


def test_unchecked_first_step_is_recorded(tmp_path: Path) -> None:
    def exhaust_memory(model: nn.Module) -> nn.Module:
        if dist.is_initialized():
            mock.patch.object(reference_step, "read_available_memory", return_value=0).start()
            mock.patch.object(reference_step, "SMALL_BYTES", 0).start()
        return model

    run = pg.train(
        make_job("full", lambda: exhaust_memory(make_mlp()), VECTORS), "data(2)", runs=tmp_path
    )
    assert [
        line["because"] for line in run.select_lines("choice") if line["what"] == "first step"
    ] == ["12 samples need about 0 MiB on one rank, and 0 MiB are left"]
    assert not run.select_lines("event")


class Toggling(nn.Module):
    """A model whose buffers are a flag and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.register_buffer("odd", torch.tensor(False))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.odd.logical_not_()
        self.steps += 1
        return self.out(x)


def test_buffers_that_are_flags_and_counters(tmp_path: Path) -> None:
    run = pg.train(make_job("toggling", Toggling, VECTORS), "data(2)", runs=tmp_path)
    assert {event["name"] for event in run.select_lines("event")} == {"checked"}
