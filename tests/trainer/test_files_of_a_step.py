"""How many files a reader opens to follow one step: those whose functions the step calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.runtime.world import World

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

PACKAGE = Path(pg.__file__).parent
TRACED_STEP = 5  # this step is not compared with one worker's


def trace_step(world: World, strategy: str) -> list[str]:
    """List the files of paragrad in which a step of a user's own loop calls a function."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    samples = TensorDataset(torch.randn(160, 64), torch.randint(0, 10, (160,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files: set[str] = set()

    def note_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    with pg.parallelize(model, functional.cross_entropy, optimizer, strategy) as trainer:
        for step, (inputs, targets) in enumerate(trainer.batches(samples, batch=16, epoch=0)):
            profiler = sys.getprofile()
            if step == TRACED_STEP:
                sys.setprofile(note_call)
            try:
                trainer.step(inputs, targets)
            finally:
                sys.setprofile(profiler)
    return sorted(
        str(Path(file).relative_to(PACKAGE)) for file in files if Path(file).is_relative_to(PACKAGE)
    )


@pytest.mark.parametrize(
    ("strategy", "most"), [("data(2, reduce=ring)", 14), ("pipeline(2)", 18), ("tensor(2)", 18)]
)
def test_a_step_calls_few_files(pool: Launcher, strategy: str, most: int) -> None:
    """Files of the `shm` backend do not count: a process group may have another backend."""
    for files in pool.run(trace_step, strategy, size=2):
        own = [each for each in files if not each.startswith(f"shm{os.sep}")]
        assert "trainer/training.py" in own
        assert len(own) <= most, own
