"""What a step costs beyond its arithmetic: every strategy beside the loop that a person would write
with torch alone; and the time of a whole command beside that of a plain script.

    # all ranks on this machine, one thread each
    python benchmarks/step.py --check

| figure | bar |
|---|---|
| microseconds beyond the plain loop, tiny: serial(threads=1), as a Job and in an own loop | at most 40 |
| speed over DDP on shm, tiny: data(2) | at least 1.0 |
| speed over DDP on gloo, tiny: data(2, reduce=ring) | at least 1.0 |
| speed over FSDP2 on shm, every size: data(2, state=fully_sharded) | at least 0.95 |
| speed over torch's 1F1B on shm, tiny: pipeline(2) | at least 1.0 |
| speed over DTensor on shm, every size: tensor(2) | at least 1.05 |
| memory above idle ranks, data(4) / DDP: by `data_parallel.py` | at most 0.55 |
| memory of everything, data(4) / DDP: likewise | at most 0.75 |
| paragrad train digits, to the shell / a plain script | at most 1.3 |
| torch.compile, middle: speed over the same without it: serial(threads=1), data(2) | at least 1.0 if it is above 1.05 in the plain loop |

The model is an MLP in float32 with SGD; for `pipeline` it is eight equal linear layers in eight
micro-batches. In the tiny size the arithmetic takes so little time that a step is all overhead.
Larger sizes of `data`, `pipeline`, `tensor` and `branch` have benchmarks of their own.

A Job is timed by its record from step to step, and loops by their clock. Every loop takes its
batches from tensors in memory, in a shuffled order, and reads the loss of each step. There are
figures without a bar: the other strategies beyond the plain loop (two ranks do more than one), and
the seconds from the last step to the shell.

The row of torch.compile times the same model with and without it, in one round: in the plain loop,
and under the strategies that train a compiled model as a whole. The first steps compile and are not
timed. `place` and `pipeline` take layers that are compiled each by itself, which gains nothing for
single linear layers; the other strategies that divide the model refuse it. The row needs g++.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Bench, differences, measure_in_turn, ratios
from data_parallel import measure_memory
from torch import Tensor, nn
from trainings import Loop, make_loop_measure, make_training_measure, serve_loops, shuffle_batches
from workers import Workers, serve

import paragrad as pg
from paragrad.launch import Launcher

RANKS = 2
LAYERS = 8
MICRO = 8
LEARNING_RATE = 0.01
HIDDEN = argparse.SUPPRESS
ALONE = ("plain loop", "own loop")  # kinds of workers that are one process without a group


@dataclass(frozen=True)
class Setting:
    """A model by the widths of its layers, and its global batch.

    stack: the model of a pipeline, with as many outputs as inputs and a squared error.
    compiles: whether torch.compile compiles the model.
    """

    name: str
    widths: tuple[int, ...]
    batch: int
    steps: int
    stack: bool = False
    compiles: bool = False

    def __str__(self) -> str:
        return self.name + " stack" * self.stack + " compiled" * self.compiles

    def model(self) -> nn.Module:
        layers = self.make_layers()
        return torch.compile(layers) if self.compiles else layers

    def make_layers(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs)] + ([] if self.stack else [nn.ReLU()])
        return nn.Sequential(*(layers if self.stack else layers[:-1]))

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.mse_loss if self.stack else nn.functional.cross_entropy

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        count = max(4, 4096 // self.batch) * self.batch
        inputs = torch.randn(count, self.widths[0], generator=draw)
        if self.stack:
            return inputs, torch.randn(count, self.widths[-1], generator=draw)
        return inputs, torch.randint(self.widths[-1], (count,), generator=draw)

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=self.model,
            loss=self.loss,
            optimizer=make_optimizer,
            train=lambda folder: torch.utils.data.TensorDataset(*self.data()),
            batch=self.batch,
            epochs=1000,
        )


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


TINY = Setting("tiny", (64, 32, 10), 64, 600)
MIDDLE = Setting("middle", (784, 512, 512, 10), 256, 120)
COMPILED = replace(MIDDLE, compiles=True)
MLPS = [
    TINY,
    MIDDLE,
    Setting("full", (784, 2048, 2048, 2048, 10), 256, 30),
]
STACKS = [Setting("tiny", (64,) * (LAYERS + 1), 64, 300, stack=True)]
# for each peer: the strategies that are compared with it, and the least speed over it
PEERS: dict[str, dict[str, float | None]] = {
    "DDP on shm": {"data(2)": 1.0, "data(2, reduce=ring)": None},
    "DDP on gloo": {"data(2)": None, "data(2, reduce=ring)": 1.0},
    "FSDP2 on shm": {"data(2, state=fully_sharded)": 0.95},
    "FSDP2 on gloo": {"data(2, state=fully_sharded)": None},
    "DTensor on shm": {"tensor(2)": 1.05},
    "DTensor on gloo": {"tensor(2)": None},
    "1F1B on shm": {f"pipeline(2, micro={MICRO}, cut=[4, 4])": 1.0},
    "1F1B on gloo": {f"pipeline(2, micro={MICRO}, cut=[4, 4])": None},
}
WHOLE_MODEL = ("serial(threads=1)", "data(2)")  # they train a compiled model
# strategies without a peer: only the time beyond the plain loop is printed
OTHERS = ("local(2)", "server(2)", "place(2)", "data(2, state=replicated)")
PLAIN_SCRIPT = textwrap.dedent("""
    from pathlib import Path
    import numpy, torch
    from importlib.util import find_spec
    from torch import nn
    torch.manual_seed(0)
    place = Path(find_spec("sklearn").submodule_search_locations[0], "datasets", "data")
    table = numpy.loadtxt(place / "digits.csv.gz", delimiter=",")
    images = torch.tensor(table[:, :-1] / 16, dtype=torch.float32)
    labels = torch.tensor(table[:, -1].astype(int))
    testing = torch.arange(len(labels)) % 5 == 4
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = images[~testing], labels[~testing]
    for epoch in range(20):
        for batch in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            loss.item()
        with torch.no_grad():
            found = model(images[testing]).argmax(1) == labels[testing]
        print(epoch, loss.item(), 100 * found.float().mean().item())
""")


def main() -> None:
    bench = Bench(__doc__, lambda parser: parser.add_argument("--worker", nargs=2, help=HIDDEN))
    if bench.options.worker:
        kind, address = bench.options.worker
        if kind in ALONE:
            serve(address, partial(time_steps_alone, kind))
        else:
            serve_loops(kind, address, partial(build_loop, kind))
        return
    settings = [TINY, *STACKS] if bench.quick else [*MLPS, *STACKS]
    with tempfile.TemporaryDirectory() as folder, Launcher(RANKS) as ranks:
        peers = {kind: Workers(__file__, kind, 1, start_alone) for kind in ALONE}
        peers |= {kind: Workers(__file__, kind, RANKS) for kind in PEERS}
        times = {}
        for setting in settings:
            strategies = ["serial(threads=1)", *list_strategies(setting)]
            measures = {
                each: make_training_measure(ranks, each, setting, Path(folder, str(setting)))
                for each in strategies
            }
            measures |= {
                kind: make_loop_measure(workers, setting)
                for kind, workers in peers.items()
                if kind in ALONE or ("1F1B" in kind) == setting.stack
            }
            print(f"{setting} [ms]", flush=True)
            times[setting] = measure_in_turn(measures, bench.rounds(9, quick=3))
        if shutil.which("g++") is None:
            print("torch.compile is not measured: it needs g++", flush=True)
        else:
            measure_compiled(bench, ranks, peers["plain loop"], Path(folder))
        for workers in peers.values():
            workers.close()
    report_steps(bench, times)
    if not bench.quick:
        measure_memory(bench)
    measure_commands(bench)
    bench.finish()


def list_strategies(setting: Setting) -> list[str]:
    """Return the strategies that are measured in a setting."""
    compared = dict.fromkeys(
        each for kind, found in PEERS.items() if ("1F1B" in kind) == setting.stack for each in found
    )
    return [*compared, *(OTHERS if setting == TINY else ())]


def report_steps(bench: Bench, times: dict[Setting, dict[str, list[float]]]) -> None:
    bench.measured["ms per step"] = {str(setting): found for setting, found in times.items()}
    for setting, found in times.items():
        for name in [*list_strategies(setting), "serial(threads=1)", "own loop"]:
            is_alone = name in ("serial(threads=1)", "own loop")
            beyond = differences(found[name], found["plain loop"])
            bench.figure(
                f"microseconds beyond the plain loop, {setting}: {name}",
                [1e3 * each for each in beyond],
                at_most=40 if is_alone and setting == TINY else None,
            )
        for kind, strategies in PEERS.items():
            for strategy, bar in strategies.items():
                # larger sizes of data and pipelines are in other benchmarks
                is_bound = setting.name == "tiny" or kind.startswith(("FSDP2", "DTensor"))
                if kind in found:
                    bench.figure(
                        f"speed over {kind}, {setting}: {strategy}",
                        ratios(found[kind], found[strategy]),
                        at_least=bar if is_bound else None,
                    )


# ---- torch.compile ---------------------------------------------------------------------------
def measure_compiled(bench: Bench, ranks: Launcher, plain: Workers, folder: Path) -> None:
    """Measure steps of one model with and without torch.compile: in the plain loop, and under the
    strategies that train a compiled model.
    """
    measures = {}
    for setting in (MIDDLE, COMPILED):
        measures["plain loop", setting] = make_loop_measure(plain, setting)
        for each in WHOLE_MODEL:
            place = folder / f"compile-{setting}"
            measures[each, setting] = make_training_measure(ranks, each, setting, place)
    print("torch.compile, middle [ms]", flush=True)
    found = measure_in_turn(
        {f"{name}, {setting}": measure for (name, setting), measure in measures.items()},
        bench.rounds(9, quick=3),
    )
    bench.measured["ms per step, torch.compile"] = found
    speeds = {
        name: ratios(found[f"{name}, {MIDDLE}"], found[f"{name}, {COMPILED}"])
        for name in ("plain loop", *WHOLE_MODEL)
    }
    is_faster = median(speeds["plain loop"]) > 1.05
    for name, speed in speeds.items():
        bench.figure(
            f"torch.compile, middle: speed over the same without it: {name}",
            speed,
            at_least=1.0 if is_faster and name in WHOLE_MODEL else None,
        )
    for name in WHOLE_MODEL:
        beyond = differences(found[f"{name}, {COMPILED}"], found[f"plain loop, {COMPILED}"])
        bench.figure(
            f"torch.compile, middle: microseconds beyond the plain loop: {name}",
            [1e3 * each for each in beyond],
        )


# ---- whole commands --------------------------------------------------------------------------
def measure_commands(bench: Bench) -> None:
    """Measure `paragrad train digits` and a plain script with the same training, to the shell."""
    after_last_step: list[float] = []

    def time_command() -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "paragrad", "train", "digits", "--runs", folder]
            seconds = time_process(words)
            ended = time.time()
            (record,) = Path(folder).glob("*/rank-0.jsonl")
            steps = [
                line
                for line in map(json.loads, record.read_text().splitlines())
                if line["kind"] == "step"
            ]
            after_last_step.append(ended - record.stat().st_mtime)
            assert len(steps) > 400
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "plain.py")
        script.write_text(PLAIN_SCRIPT)
        found = measure_in_turn(
            {
                "paragrad train digits [s]": time_command,
                "a plain script [s]": lambda: time_process([str(script)]),
            },
            bench.rounds(9, quick=3),
        )
    bench.measured["seconds of commands"] = found
    bench.figure(
        "paragrad train digits, to the shell / a plain script", ratios(*found.values()), at_most=1.3
    )
    bench.figure("seconds from the last line of the record to the shell", after_last_step)


def time_process(words: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - started


# ---- in a worker -----------------------------------------------------------------------------
def start_alone(words: list[str]) -> Callable[[], object]:
    """Start one worker without a launcher, and return a function that waits for its end."""
    process = subprocess.Popen([sys.executable, *words])
    return lambda: process.wait(timeout=60)


def time_steps_alone(kind: str, setting: Setting) -> list[float]:
    """Return the start times of steps of one process: a plain loop, or `pg.parallelize`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = setting.model()
    optimizer = make_optimizer(model.parameters())
    starts = []
    with contextlib.ExitStack() as stack:
        if kind == "own loop":
            trainer = stack.enter_context(
                pg.parallelize(model, setting.loss, optimizer, "serial(threads=1)")
            )
            data = torch.utils.data.TensorDataset(*setting.data())
            batches = itertools.chain.from_iterable(
                trainer.batches(data, setting.batch, epoch) for epoch in itertools.count()
            )
            for inputs, targets in itertools.islice(batches, setting.steps):
                trainer.step(inputs, targets)
                starts.append(time.perf_counter())
        else:
            batch = shuffle_batches(*setting.data(), setting.batch)
            for number in range(setting.steps):
                inputs, targets = batch(number)
                optimizer.zero_grad()
                loss = setting.loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                loss.item()
                starts.append(time.perf_counter())
    return starts


def build_loop(kind: str, setting: Setting) -> Loop:
    model = setting.make_layers()
    rank = dist.get_rank()
    inputs, targets = setting.data()
    if "1F1B" in kind:
        part = model[: LAYERS // 2] if rank == 0 else model[LAYERS // 2 :]
        return Loop(
            make_optimizer(part.parameters()),
            make_pipeline_step(setting, part),
            shuffle_batches(inputs, targets, setting.batch),
        )
    if "DTensor" in kind:
        net = divide_layers(model)
        batch = shuffle_batches(inputs, targets, setting.batch)
    else:
        net = shard_model(model) if "FSDP2" in kind else nn.parallel.DistributedDataParallel(model)
        own = slice(rank, None, RANKS)
        batch = shuffle_batches(inputs[own], targets[own], setting.batch // RANKS)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = setting.loss(net(inputs), targets)
        loss.backward()
        return loss.item()

    return Loop(make_optimizer(net.parameters()), step, batch)


def make_pipeline_step(setting: Setting, part: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    """Return a function that makes a step with torch.distributed.pipelining, and reads the loss."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=setting.loss)

    def step(inputs: Tensor, target: Tensor) -> float:
        if rank == 0:
            schedule.step(inputs)
            return 0.0
        losses: list[Tensor] = []
        schedule.step(target=target, losses=losses)
        return sum(each.item() for each in losses) / len(losses)

    return step


def shard_model(model: nn.Sequential) -> nn.Module:
    """Shard each layer, and then the rest, as the tutorial of FSDP2 does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def divide_layers(model: nn.Sequential) -> nn.Module:
    """Divide the layers by columns and rows in turn, as the tutorial of DTensor does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    layers = [name for name, each in model.named_children() if isinstance(each, nn.Linear)]
    plan: dict[str, Any] = {
        name: RowwiseParallel() if number % 2 else ColwiseParallel()
        for number, name in enumerate(layers[: len(layers) // 2 * 2])
    }
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


if __name__ == "__main__":
    main()
