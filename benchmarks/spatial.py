"""Steps on one image that is divided over two ranks of one host, compared with bounds; the bytes
that ranks send, and the activations that they keep.

    # both ranks on this machine, one thread each
    python benchmarks/spatial.py --check

| figure | bar |
|---|---|
| speed over the bound's: every size | at least 0.9 |
| bytes that a rank sends in a step, off those of the plan | 0 |
| bytes that a rank fetches for a layer, off the closed form's (samples x channels x columns x half a kernel) | 0 |
| activations of the fullest rank, over serial's | at most 0.56 |

The model has six 3x3 convolutions of 32 channels, each with a ReLU, and returns the mean of each
channel. It runs on one image of 256 x 256 and of 1024 x 1024. Training uses cross-entropy, float32
and SGD.

The bound is the time of two processes that run at the same time without an exchange. Each makes
steps of its half of the image, in a loop over images in memory. The strategy is measured by a whole
training, timed by its record from step to step.

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
from paragrad.commands.train import train
from paragrad.launch import Launcher
from paragrad.parallel.spatial.spatial import inspect_model
from paragrad.record.record import Record
from paragrad.strategies.registry import strategy

RANKS = 2
CHANNELS = 32
LAYERS = 6
KERNEL = 3
IMAGES = 2


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                each
                for _ in range(LAYERS)
                for each in (nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=KERNEL // 2), nn.ReLU())
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Setting:
    """The size of the image: its number of rows, which equals its number of columns."""

    size: int

    def __str__(self) -> str:
        return f"{self.size} x {self.size}"

    def data(self, part: int = 1) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        return (
            torch.randn(IMAGES, CHANNELS, self.size // part, self.size, generator=draw),
            torch.randint(CHANNELS, (IMAGES,), generator=draw),
        )

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=Convolutions,
            loss=nn.functional.cross_entropy,
            epochs=1000,
            batch=1,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            train=lambda folder: torch.utils.data.TensorDataset(*self.data()),
        )

    @property
    def steps(self) -> int:
        """The number of steps that take a few seconds."""
        return max(6, min(40, int(20 * (256 / self.size) ** 2)))


SETTINGS = [Setting(256), Setting(1024)]
PEERS = {
    "halves": "the bound",
    "halves, in step": "the bound in step",
    "serial(threads=1)": "serial with one thread",
    "serial": "serial with all threads",
}


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        serve_loops(*bench.options.worker, build_loop)
        return
    with tempfile.TemporaryDirectory() as folder, Launcher(RANKS) as ranks:
        peers = {kind: Workers(__file__, kind, RANKS) for kind in ("halves", "halves, in step")}
        for setting in SETTINGS[:1] if bench.quick else SETTINGS:
            measures = {
                strategy: make_training_measure(
                    ranks, strategy, setting, Path(folder) / str(setting)
                )
                for strategy in ("spatial(2)", "serial(threads=1)", "serial")
            }
            print(f"{setting} [ms]", flush=True)
            measures |= {
                kind: make_loop_measure(workers, setting) for kind, workers in peers.items()
            }
            found = measure_in_turn(
                measures, bench.rounds(5 if setting == SETTINGS[0] else 3, quick=2)
            )
            bench.measured.setdefault("ms per step", {})[str(setting)] = found
            for kind, name in PEERS.items():
                bench.figure(
                    f"speed over {name}, {setting}",
                    ratios(found[kind], found["spatial(2)"]),
                    at_least=0.9 if kind == "halves" else None,
                )
        for workers in peers.values():
            workers.close()
    compare_bytes_and_memory(bench)
    bench.finish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)


def compare_bytes_and_memory(bench: Bench) -> None:
    """Add the figures about bytes and memory."""
    setting = SETTINGS[0]
    plan = inspect_model(strategy("spatial(2)"), Convolutions(), setting.data()[0][:1])
    closed = CHANNELS * setting.size * (KERNEL // 2) * 4
    fetched = [note.bytes for note in plan.transfers if note.kind == "fetched"]
    assert len(fetched) == LAYERS
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            each: train(setting.job(), each, runs=folder, limit=2)
            for each in ("serial", "spatial(2)")
        }
        records = {each: Record(run.folder) for each, run in runs.items()}
    sent = [
        line["sent"]["spatial"]["bytes"] for line in records["spatial(2)"].select_lines("step", 0)
    ]
    bench.figure(
        "bytes that a rank sends in a step, off the plan's",
        max(abs(each - plan.total_bytes) for each in sent),
        at_most=0,
    )
    bench.figure(
        "bytes that a rank fetches for a layer, off the closed form's",
        max(abs(each - closed) for each in fetched),
        at_most=0,
    )
    held = {each: record.fullest["activations"] for each, record in records.items()}
    bench.figure(
        "activations of the fullest rank, over serial's",
        [held["spatial(2)"] / held["serial"]],
        at_most=0.56,
    )


# ---- in a rank -------------------------------------------------------------------------------
def build_loop(setting: Setting) -> Loop:
    model = Convolutions()
    inputs, targets = setting.data(RANKS)
    return Loop(
        torch.optim.SGD(model.parameters(), lr=0.01),
        make_backward(model, nn.functional.cross_entropy),
        shuffle_batches(inputs, targets, 1),
    )


if __name__ == "__main__":
    main()
