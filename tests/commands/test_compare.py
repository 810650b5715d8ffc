"""What the speed-ups of a comparison are over."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from equality_table import VECTORS, make_job, make_mlp
from torch import Tensor, nn

import paragrad as pg

pytestmark = pytest.mark.processes


class PickyModel(nn.Module):
    """A model that fails in the plain PyTorch loop only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        if any(frame.name == "train_plain_pytorch" for frame in traceback.extract_stack()):
            raise RuntimeError("no plain loop, please")
        output: Tensor = self.layers(x)
        return output


def test_comparison_goes_on_if_the_plain_loop_fails(tmp_path: Path) -> None:
    table = pg.compare(make_job("picky", PickyModel, VECTORS), "serial", runs=tmp_path)
    assert not table.failed
    assert table.ending["status"] == "finished"
    assert table.speed_baseline == "serial"
    (sentence,) = [line for line in str(table).splitlines() if line.startswith("speed-up: ")]
    assert "because the plain PyTorch loop failed: rank 0: " in sentence
    assert "no plain loop, please" in sentence
    # the runs after it are made
    assert table.serial_times[1][1] is not None


@pytest.mark.parametrize("settings", [{"slow": "0=2x"}, {"pace": 1e-4}], ids=str)
def test_slowed_rows_are_compared_with_serial(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A plain PyTorch loop does not wait on purpose, so it says nothing about slowed rows."""
    table = pg.compare(make_job("mlp", make_mlp, VECTORS), "serial", runs=tmp_path, **settings)
    assert table.speed_baseline == "serial"
    assert "because the ranks are slowed on purpose, and a plain PyTorch loop is not" in str(table)
    assert not [path for path in table.folder.iterdir() if "plain" in path.name]


def test_plain_loop_runs_once_in_a_comparison(tmp_path: Path) -> None:
    """It has the seed of the job, and no callbacks, and a resumed comparison keeps it."""
    job = make_job("mlp", make_mlp, VECTORS)
    table = pg.compare(job, "serial", runs=tmp_path, seeds=2)
    plain = table.folder / "baseline-plain-PyTorch-loop"
    assert table.plain_record is not None
    assert table.plain_record.folder == plain
    assert table.plain_record.header["seed"] == job.seed
    assert len(table.plain_record.select_lines("step")) == 6
    written = (plain / "run.jsonl").stat().st_mtime_ns
    pg.compare(job, "serial", runs=tmp_path, seeds=2, resume=table.folder)
    assert (plain / "run.jsonl").stat().st_mtime_ns == written
