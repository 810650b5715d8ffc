"""Steps of data parallelism on one host: paragrad, DistributedDataParallel over gloo and over shm,
and one process.

| figure | bar |
|---|---|
| data(2)'s speed / DDP's over gloo, MLP: every setting (5 % tolerance) | at least 0.95 |
| ... h <= 512 and batch 64 | at least 1.8 |
| ... geometric mean of the nine settings | at least 1.6 |
| data(2)'s speed / the bound's, geometric mean of the nine settings | at least 0.8 |
| data(auto)'s time / the best row's, every setting | at most 1.05 |
| DDP over shm, its time / that over gloo, every setting | at most 1 |
| memory above idle ranks, h=2048, Adam, 4 ranks: data(4) / DDP | at most 0.55 |
| memory of everything, likewise | at most 0.75 |

The MLP is 784-h-h-h-10 in float32, with SGD and momentum.

The bound is one process with one thread and half the batch, on an otherwise idle machine. Two ranks
that exchange nothing cannot be faster. There is a figure without a bar: two such processes that
wait for each other after every step. It shows the speed of the cores when both are busy.

For paragrad, whole trainings are timed by their records from step to step. DDP and the bound are
plain loops over the same number of batches, which are slices of tensors in memory. Memory is the
proportional set size of all ranks (and of paragrad's fork server), sampled while they train.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import Bench, measure_in_turn, ratios
from torch import Tensor, nn
from trainings import Loop, make_backward, make_loop_measure, make_training_measure, serve_loops
from workers import Workers

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.launch.processes import get_fork_server

SAMPLES = 8192


@dataclass(frozen=True)
class Setting:
    """A model, a global batch and an optimizer."""

    width: int  # 0: the convolutional net of mnist-cnn
    batch: int
    adam: bool = False

    def __str__(self) -> str:
        return f"h={self.width} batch={self.batch}" if self.width else f"cnn batch={self.batch}"

    def model(self) -> nn.Module:
        if not self.width:
            return pg.job("mnist-cnn").build_model()
        width = self.width
        return nn.Sequential(
            nn.Linear(784, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return (
            torch.optim.Adam(parameters)
            if self.adam
            else torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        )

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        shape = (784,) if self.width else (1, 28, 28)
        return torch.randn(SAMPLES, *shape, generator=draw), torch.randint(
            10, (SAMPLES,), generator=draw
        )

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=self.model,
            loss=nn.functional.cross_entropy,
            optimizer=self.optimizer,
            train=lambda folder: torch.utils.data.TensorDataset(*self.data()),
            batch=self.batch,
            epochs=1000,
        )

    @property
    def steps(self) -> int:
        """The number of steps that take about half a second."""
        work = self.batch * (2 * (784 + 10) * self.width + 4 * self.width**2 if self.width else 6e6)
        return max(12, min(400, int(3e10 / work)))


MLPS = [Setting(width, batch) for width in (128, 512, 2048) for batch in (64, 256, 1024)]
QUICK = [MLPS[0], MLPS[4]]
ROWS = ("serial", "serial(threads=1)", "data(2)", "data(auto)")


def main() -> None:
    bench = Bench(__doc__, lambda parser: parser.add_argument("--worker", nargs=2))
    if bench.options.worker:
        kind, address = bench.options.worker
        serve_loops(kind, address, partial(build_loop, kind))
        return
    settings = QUICK if bench.quick else [*MLPS, Setting(0, 64)]
    with tempfile.TemporaryDirectory() as folder, Launcher(2) as ranks:
        peers = {
            "DDP, gloo": Workers(__file__, "gloo", 2),
            "DDP, shm": Workers(__file__, "shm", 2),
            "bound": Workers(__file__, "bound, in step", 1),
            "bound, both cores": Workers(__file__, "bound, in step", 2),
        }
        times = {
            setting: measure_in_turn(
                {
                    **{
                        f"{row}, {setting} [ms]": make_training_measure(
                            ranks, row, setting, Path(folder)
                        )
                        for row in ROWS
                    },
                    **{
                        f"{name}, {setting} [ms]": make_loop_measure(workers, setting)
                        for name, workers in peers.items()
                    },
                },
                bench.rounds(5, quick=2),
            )
            for setting in settings
        }
        for workers in peers.values():
            workers.close()
    names = (*ROWS, *peers)
    report(
        bench,
        {
            setting: dict(zip(names, found.values(), strict=True))
            for setting, found in times.items()
        },
    )
    measure_memory(bench)
    bench.finish()


def report(bench: Bench, times: dict[Setting, dict[str, list[float]]]) -> None:
    bench.measured["ms per step"] = {str(setting): found for setting, found in times.items()}
    for setting, found in times.items():
        least = (
            None
            if not setting.width
            else 1.8
            if setting.width <= 512 and setting.batch == 64
            else 0.95
        )
        bench.figure(
            f"data(2) / DDP over gloo, {setting}",
            ratios(found["DDP, gloo"], found["data(2)"]),
            at_least=least,
        )
    mlps = [found for setting, found in times.items() if setting.width]
    for name, bar in (
        ("DDP, gloo", 1.6),
        ("bound", 0.8),
        ("bound, both cores", None),
        ("serial", None),
    ):
        each = [ratios(found[name], found["data(2)"]) for found in mlps]
        bench.figure(
            f"data(2) / {name}, geometric mean over MLPs",
            [math.prod(row) ** (1 / len(row)) for row in zip(*each, strict=True)],
            at_least=bar,
        )
    for setting, found in times.items():
        others = {
            name: statistics.median(found[name])
            for name in found
            if name != "data(auto)" and "bound" not in name
        }
        best = min(others, key=lambda name: others[name])
        bench.figure(
            f"data(auto)'s time / the best's ({best}), {setting}",
            ratios(found["data(auto)"], found[best]),
            at_most=1.05,
        )
        bench.figure(
            f"DDP over shm's time / over gloo's, {setting}",
            ratios(found["DDP, shm"], found["DDP, gloo"]),
            at_most=1.0,
        )


# ---- memory ----------------------------------------------------------------------------------
def measure_memory(bench: Bench) -> None:
    setting = Setting(2048, 256, adam=True)
    ddp = Workers(__file__, "gloo", 4)
    with tempfile.TemporaryDirectory() as folder, Launcher(4) as ranks:
        ranks.run(idle, size=4)
        pids = list_processes(ranks)
        found = {
            "DDP": measure_peak(ddp.pids, lambda: ddp.ask(setting)),
            "data(4)": measure_peak(
                pids, make_training_measure(ranks, "data(4)", setting, Path(folder))
            ),
        }
    ddp.close()
    bench.measured["memory [MB]"] = {
        name: {"idle": low / 1e6, "peak": high / 1e6} for name, (low, high) in found.items()
    }
    above, everything = (
        {name: high - (low if less else 0) for name, (low, high) in found.items()}
        for less in (True, False)
    )
    bench.figure(
        "memory above idle ranks, data(4) / DDP", above["data(4)"] / above["DDP"], at_most=0.55
    )
    bench.figure(
        "memory of everything, data(4) / DDP",
        everything["data(4)"] / everything["DDP"],
        at_most=0.75,
    )


def idle(world: object) -> None:
    """Do nothing, so that the memory of an idle rank can be measured."""


def list_processes(ranks: Launcher) -> list[int]:
    """Return the pids of paragrad's ranks and of the fork server."""
    return [*(process.pid for process in ranks.processes), get_fork_server().popen.pid]


def measure_peak(pids: list[int], train: Callable[[], object]) -> tuple[int, int]:
    """Train, and return the proportional set size of some processes in bytes: before the training,
    and the largest value during it.
    """
    before = read_proportional_size(pids)
    most = before
    running = threading.Thread(target=train)
    running.start()
    while running.is_alive():
        most = max(most, read_proportional_size(pids))
        running.join(0.02)
    return before, most


def read_proportional_size(pids: list[int]) -> int:
    return sum(
        1024 * int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )


# ---- in a rank -------------------------------------------------------------------------------
def build_loop(kind: str, setting: Setting) -> Loop:
    model = setting.model()
    rank = dist.get_rank()
    parts = 2 if "bound" in kind else dist.get_world_size()
    net = model if "bound" in kind else nn.parallel.DistributedDataParallel(model)
    inputs, targets = setting.data()
    part = setting.batch // parts
    order = torch.randperm(SAMPLES)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        place = step * setting.batch % (SAMPLES - setting.batch + 1) + rank * part
        mine = order[place : place + part]
        return inputs[mine], targets[mine]

    return Loop(
        setting.optimizer(model.parameters()),
        make_backward(net, nn.functional.cross_entropy),
        batch,
    )


if __name__ == "__main__":
    main()
