"""Steps of layers that are split over two ranks of one host: paragrad, DTensor's parallelize_module
over gloo and over shm, and bounds.

    # both ranks on this machine, one thread each
    python benchmarks/tensor.py --check

| figure | bar |
|---|---|
| speed over serial with one thread: MLP, batch 64 | at least 1.5 |
| speed over DTensor on gloo: every setting | at least 1.3 |
| speed over DTensor on shm: every setting | at least 1.0 |
| speed over the bound's: MLP, batch 64 | at least 0.85 |

There are two models in float32 with SGD: an MLP 784-2048-2048-2048-10 with cross-entropy and
batches of 64 and 16; and a GPT block of width 512 with 8 heads, 128 tokens, batches of 4 and mean
squared error.

The bound is the time of two processes that run at the same time without an exchange. Each makes
steps of its half of every layer. For paragrad, a whole training is timed by its record from step to
step. For DTensor (whose columns and rows are named by hand), it is a loop over batches that are
slices of tensors in memory.

There are figures without a bar: the bound in step, and one worker with all threads. For the bound
in step, the two processes wait for each other after every step, so that each step takes as long as
the slower one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
BATCHES = 4
WIDTHS = (784, 2048, 2048, 2048, 10)
WIDE = 512
HEADS = 8
TOKENS = 128


class Block(nn.Module):
    """A transformer block of GPT. part: the number of ranks that divide its heads and neurons."""

    def __init__(self, part: int = 1) -> None:
        super().__init__()
        own = WIDE // part
        self.before = nn.LayerNorm(WIDE)
        self.after = nn.LayerNorm(WIDE)
        self.query, self.key, self.value = (nn.Linear(WIDE, own) for _ in range(3))
        self.out = nn.Linear(own, WIDE)
        self.up = nn.Linear(WIDE, 4 * own)
        self.down = nn.Linear(4 * own, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.before(x)
        heads = [
            each(normal).view(*x.shape[:2], -1, WIDE // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(*x.shape[:2], -1))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


def build_perceptron(part: int = 1) -> nn.Sequential:
    """Return an MLP, or one of `part` parts of it.

    A part has columns of the first layer, rows of the second, and so on. Each layer has the inputs
    and outputs that one rank has.
    """
    layers: list[nn.Module] = []
    for number, (into, out) in enumerate(itertools.pairwise(WIDTHS)):
        layers += [
            nn.Linear(into // (part if number % 2 else 1), out // (1 if number % 2 else part)),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Setting:
    """A model and its global batch."""

    name: str
    batch: int

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}"

    @property
    def is_mlp(self) -> bool:
        return self.name == "MLP"

    def model(self, part: int = 1) -> nn.Module:
        return build_perceptron(part) if self.is_mlp else Block(part)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.cross_entropy if self.is_mlp else nn.functional.mse_loss

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        count = BATCHES * self.batch
        if self.is_mlp:
            return torch.randn(count, WIDTHS[0], generator=draw), torch.randint(
                WIDTHS[-1], (count,), generator=draw
            )
        x, y = (torch.randn(count, TOKENS, WIDE, generator=draw) for _ in range(2))
        return x, y

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=self.model,
            loss=self.loss,
            epochs=1000,
            batch=self.batch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            train=lambda folder: torch.utils.data.TensorDataset(*self.data()),
        )

    @property
    def steps(self) -> int:
        """The number of steps that take about a second."""
        products = self.batch * (
            sum(map(math.prod, itertools.pairwise(WIDTHS)))
            if self.is_mlp
            else 12 * WIDE**2 * TOKENS
        )
        return max(8, min(200, int(3e10 / (6 * products))))


SETTINGS = [Setting("MLP", 64), Setting("MLP", 16), Setting("GPT block", 4)]
PEERS = {
    "torch, gloo": "DTensor on gloo",
    "torch, shm": "DTensor on shm",
    "halves": "the bound",
    "halves, in step": "the bound in step",
    "serial(threads=1)": "serial with one thread",
    "serial": "serial with all threads",
}


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        kind, address = bench.options.worker
        serve_loops(kind, address, partial(build_loop, kind))
        return
    with tempfile.TemporaryDirectory() as folder, Launcher(RANKS) as ranks:
        peers = {kind: Workers(__file__, kind, RANKS) for kind in PEERS if "serial" not in kind}
        times = {}
        for setting in SETTINGS[:1] if bench.quick else SETTINGS:
            measures = {
                strategy: make_training_measure(
                    ranks, strategy, setting, Path(folder) / str(setting)
                )
                for strategy in ("tensor(2)", "serial(threads=1)", "serial")
            }
            measures |= {
                kind: make_loop_measure(workers, setting) for kind, workers in peers.items()
            }
            print(f"{setting} [ms]", flush=True)
            times[setting] = measure_in_turn(measures, bench.rounds(9, quick=2))
        for workers in peers.values():
            workers.close()
    report(bench, times)
    bench.finish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)


def report(bench: Bench, times: dict[Setting, dict[str, list[float]]]) -> None:
    bench.measured["ms per step"] = {str(setting): found for setting, found in times.items()}
    for setting, found in times.items():
        first = setting == SETTINGS[0]
        bars = {
            "torch, gloo": 1.3,
            "torch, shm": 1.0,
            "halves": 0.85 if first else None,
            "halves, in step": None,
            "serial(threads=1)": 1.5 if first else None,
            "serial": None,
        }
        for kind, name in PEERS.items():
            bench.figure(
                f"speed over {name}, {setting}",
                ratios(found[kind], found["tensor(2)"]),
                at_least=bars[kind],
            )


# ---- in a rank -------------------------------------------------------------------------------
def build_loop(kind: str, setting: Setting) -> Loop:
    model = setting.model(RANKS) if "halves" in kind else parallelize_model(setting.model())
    return Loop(
        torch.optim.SGD(model.parameters(), lr=0.01),
        make_backward(model, setting.loss),
        shuffle_batches(*setting.data(), setting.batch),
    )


def parallelize_model(model: nn.Module) -> nn.Module:
    """Split a model by torch.distributed.tensor.parallel, with the plan of its tutorial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns: dict[str, Any]
    if isinstance(model, Block):
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        columns |= {name: RowwiseParallel() for name in ("out", "down")}
    else:
        columns = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
            "4": ColwiseParallel(),
            "6": RowwiseParallel(),
        }
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), columns)


if __name__ == "__main__":
    main()
