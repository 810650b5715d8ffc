"""Steps of a model with two equal branches on two ranks of one host, compared with bounds.

    # both ranks on this machine, one thread each
    python benchmarks/branch.py --check

| figure | bar |
|---|---|
| speed over the bound's | at least 0.9 |

The model has two branches. Each has four 3x3 convolutions of 32 channels, with ReLUs, on the same
images of 64 x 64. The means of all channels of both branches are concatenated before one linear
layer. Training uses batches of 8, cross-entropy, float32 and SGD.

The bound is the time of two processes that run at the same time without an exchange. Each makes
steps of one branch with the linear layer, in a loop over images in memory. The strategy is measured
by a whole training, timed by its record from step to step.

There are figures without a bar: the bound in step, one worker with one thread, and one worker with
all threads. For the bound in step, the two processes wait for each other after every step, so that
each step takes as long as the slower one.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Bench, measure_in_turn, ratios
from torch import Tensor, nn
from trainings import (
    Loop,
    make_backward,
    make_loop_measure,
    make_training_measure,
    serve_loops,
    shuffle_batches,
)
from workers import Workers

import paragrad as pg
from paragrad.launch import Launcher

RANKS = 2
CHANNELS = 32
LAYERS = 4
SIZE = 64
BATCH = 8
BATCHES = 4
PEERS = {
    "one branch": "the bound",
    "one branch, in step": "the bound in step",
    "serial(threads=1)": "serial with one thread",
    "serial": "serial with all threads",
}


class ChannelMeans(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class BranchModel(nn.Module):
    """A model with branches before one linear layer. branches: the number of branches."""

    def __init__(self, branches: int = RANKS) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                nn.Sequential(
                    *(
                        each
                        for _ in range(LAYERS)
                        for each in (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())
                    ),
                    ChannelMeans(),
                )
                for _ in range(branches)
            ]
        )
        self.out = nn.Linear(branches * CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([branch(x) for branch in self.branches], 1))


@dataclass(frozen=True)
class Setting:
    steps: int = 30

    def __str__(self) -> str:
        return "two branches"

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        return (
            torch.randn(BATCHES * BATCH, CHANNELS, SIZE, SIZE, generator=draw),
            torch.randint(10, (BATCHES * BATCH,), generator=draw),
        )

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=BranchModel,
            loss=nn.functional.cross_entropy,
            epochs=1000,
            batch=BATCH,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            train=lambda folder: torch.utils.data.TensorDataset(*self.data()),
        )


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        serve_loops(*bench.options.worker, build_loop)
        return
    setting = Setting()
    with tempfile.TemporaryDirectory() as folder, Launcher(RANKS) as ranks:
        peers = {
            kind: Workers(__file__, kind, RANKS) for kind in ("one branch", "one branch, in step")
        }
        measures = {
            strategy: make_training_measure(ranks, strategy, setting, Path(folder))
            for strategy in ("branch(2)", "serial(threads=1)", "serial")
        }
        print(f"{setting} [ms]", flush=True)
        measures |= {kind: make_loop_measure(workers, setting) for kind, workers in peers.items()}
        found = measure_in_turn(measures, bench.rounds(9, quick=2))
        for workers in peers.values():
            workers.close()
    bench.measured["ms per step"] = {str(setting): found}
    for kind, name in PEERS.items():
        bench.figure(
            f"speed over {name}",
            ratios(found[kind], found["branch(2)"]),
            at_least=0.9 if kind == "one branch" else None,
        )
    bench.finish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)


# ---- in a rank -------------------------------------------------------------------------------
def build_loop(setting: Setting) -> Loop:
    model = BranchModel(1)
    return Loop(
        torch.optim.SGD(model.parameters(), lr=0.01),
        make_backward(model, nn.functional.cross_entropy),
        shuffle_batches(*setting.data(), BATCH),
    )


if __name__ == "__main__":
    main()
