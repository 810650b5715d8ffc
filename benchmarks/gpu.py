"""What paragrad costs on one GPU: a step of `serial` and of a Job over a plain loop, the memory
account, keyed draws, and the check of the first step.

    # one GPU, within ten minutes (planned; it has not run on a GPU yet)
    python benchmarks/gpu.py --check --page

| figure | bar |
|---|---|
| step over the plain loop's, GPT-2 small: own loop and Job, compiled and not | at most 1.03 |
| ... tiny | none |
| memory account / allocated between two steps, GPT-2 small | 0.95 to 1.05 |
| memory account / most allocated in a step, GPT-2 small | 0.95 to 1.05 |
| step over the plain loop's with dropout 0.1 (keyed draws), GPT-2 small, compiled and not | none |
| the check of the first step under serial(micro=2), in steps | none |

The model has the shape of GPT-2 small (124 million parameters) and bfloat16 autocast; the tokens
are random. The tiny model is an MLP in float32, so that a step is all overhead. Both sides read the
loss of each step, as a person would for a log. Everything runs in one process, and the sides take
turns. The account is the sum of parameters, gradients, optimizer state and activations in the
record; torch's numbers come from `torch.cuda.memory_allocated` and `max_memory_allocated`. The
account does not know the temporary memory of an operation, and counts gradients that a step
allocates while it frees activations.

Dropout follows the residual layers and the embedding. Attention has none, because a fused kernel
draws its own numbers, and paragrad refuses such draws.

Without a GPU, or with --device cpu, everything runs with a tiny GPT of two layers. Such a dry run
shows that the program works. It measures nothing about GPUs, and judges no bar.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Bench, differences, measure_in_turn, ratios
from pages import DOCS, FIGURES, fill_block, table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from trainings import shuffle_batches

import paragrad as pg
from paragrad.loops.synchronous import log_memory
from paragrad.record.record import Recorder, read_lines
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.trainer.trainer import Trainer

PAGE = DOCS / "how_to" / "gpus.md"
BATCHES = 16  # batches of the dataset
WARM_UP = 3  # steps that compile, and that count the activations
MOST = 1.03  # the bar of a step
MEMORY_BOUNDS = (0.95, 1.05)
OWN_LOOP, JOB, PLAIN = "own loop", "Job", "plain loop"


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT, its batch, and the steps of a round."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    steps: int


SMALL = Shape(12, 768, 12, 50257, 1024, 8, 10)
DRY_SHAPE = Shape(2, 64, 2, 101, 16, 4, 2)


class Block(nn.Module):
    """A block of GPT-2: attention and an MLP, each after a norm, with a residual."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.queries_keys_values(self.norms[0](x))
        queries, keys, values = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected.chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Gpt(nn.Module):
    """A GPT whose output layer is its embedding of tokens."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def compute_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its data, and where and how it is trained.

    shape: the shape of a GPT; None: the tiny MLP.
    backend: the backend of torch.compile; None: the model is not compiled.
    """

    name: str
    device: torch.device
    steps: int
    shape: Shape | None = None
    dropout: float = 0.0
    backend: str | None = None

    @property
    def batch(self) -> int:
        return self.shape.batch if self.shape else 64

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.shape else None

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return compute_token_loss if self.shape else functional.cross_entropy

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = (
            Gpt(self.shape, self.dropout)
            if self.shape
            else nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        )
        return torch.compile(model, backend=self.backend) if self.backend else model

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4)

    @functools.cached_property
    def data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(0)
        count = BATCHES * self.batch
        if self.shape is None:
            return TensorDataset(
                torch.randn(count, 64, generator=draw),
                torch.randint(10, (count,), generator=draw),
            )
        size = (count, self.shape.context + 1)
        tokens = torch.randint(self.shape.vocabulary, size, generator=draw)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            train=self.data,
            batch=self.batch,
            epochs=1000,
            dtype=self.autocast or torch.float32,
        )


def main() -> None:
    bench = Bench(__doc__, add_options)
    is_dry = bench.options.device == "cpu" or not torch.cuda.is_available()
    if is_dry and (bench.options.page or bench.options.json):
        raise SystemExit("--page and --json write figures of a GPU, and a dry run has none")
    device = torch.device("cpu" if is_dry else "cuda")
    if is_dry:
        print(DRY_RUN, flush=True)
    else:
        bench.machine |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    rounds = bench.rounds(1, 1) if is_dry else bench.rounds(9, quick=3)
    shape = DRY_SHAPE if is_dry else SMALL
    # the default backend compiles for longer than a minute, and needs a C++ compiler on the CPU
    backend = "aot_eager" if is_dry else "inductor"
    gpt = Case("dry run, GPT" if is_dry else "GPT-2 small", device, shape.steps, shape)
    measure_memory(bench, gpt, is_dry)
    measure_memory(bench, replace(gpt, name=f"{gpt.name}, compiled", backend=backend), is_dry)
    tiny = Case("dry run, MLP" if is_dry else "tiny", device, 2 if is_dry else 200)
    for case, bar in ((tiny, None), (gpt, None if is_dry else MOST)):
        measure_steps(bench, case, rounds, bar)
        measure_steps(
            bench, replace(case, name=f"{case.name}, compiled", backend=backend), rounds, bar
        )
    dropped = replace(gpt, name=f"{gpt.name}, dropout 0.1", dropout=0.1)
    measure_steps(bench, dropped, rounds, None)
    measure_steps(
        bench, replace(dropped, name=f"{dropped.name}, compiled", backend=backend), rounds, None
    )
    measure_first_step(bench, gpt, 1 if is_dry else 3)
    if is_dry:
        print(DRY_RUN)
    elif bench.options.page:
        write_page(bench)
    bench.finish()


DRY_RUN = (
    "dry run on the CPU, with tiny models: it shows that the program works. Its numbers say nothing "
    "about a GPU, and no bar is judged."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with tiny models"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/how_to/gpus.md, and docs/figures/gpu.json",
    )


# ---- steps -----------------------------------------------------------------------------------
def measure_steps(bench: Bench, case: Case, rounds: int, at_most: float | None) -> None:
    """Measure a step of paragrad over a step of the plain loop."""
    with contextlib.ExitStack() as stack:
        loops = {
            PLAIN: make_plain_step(case),
            OWN_LOOP: make_own_loop_step(case, stack),
            JOB: make_job_step(case, stack),
        }
        for step in loops.values():
            time_steps(case, step, WARM_UP)
        print(f"{case.name} [ms]", flush=True)
        found = measure_in_turn(
            {
                name: functools.partial(time_steps, case, step, case.steps)
                for name, step in loops.items()
            },
            rounds,
        )
    del loops
    free_memory()
    bench.measured[f"ms per step, {case.name}"] = found
    for name in (OWN_LOOP, JOB):
        bench.figure(
            f"step over the plain loop's, {case.name}: {name}",
            ratios(found[name], found[PLAIN]),
            at_most=at_most,
        )
        bench.figure(
            f"microseconds beyond the plain loop, {case.name}: {name}",
            [1e3 * each for each in differences(found[name], found[PLAIN])],
        )


def time_steps(case: Case, step: Callable[[], object], count: int) -> float:
    """Return the milliseconds of a step, over so many steps in a row."""
    synchronize(case.device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(case.device)
    return 1e3 * (time.perf_counter() - start) / count


def make_plain_step(case: Case) -> Callable[[], object]:
    """Return a function that makes the next step of a loop with torch alone."""
    model = case.model().to(case.device)
    optimizer = case.optimizer(model.parameters())
    get_batch = shuffle_batches(*case.data.tensors, case.batch)
    numbers = itertools.count()

    def step() -> float:
        inputs, target = (each.to(case.device) for each in get_batch(next(numbers)))
        optimizer.zero_grad()
        with torch.autocast(case.device.type, case.autocast, enabled=case.autocast is not None):
            loss = case.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def make_own_loop_step(
    case: Case, stack: contextlib.ExitStack, strategy: str = "serial", **options: Any
) -> Callable[[], object]:
    """Return a function that makes the next step of a loop with `pg.parallelize`."""
    model = case.model()
    trainer = stack.enter_context(
        pg.parallelize(
            model,
            case.loss,
            case.optimizer(model.parameters()),
            strategy,
            autocast=case.autocast,
            device=case.device.type,
            **options,
        )
    )
    return make_trainer_step(case, trainer)


def make_job_step(case: Case, stack: contextlib.ExitStack) -> Callable[[], object]:
    """Return a function that makes the next step of a Job, with its record, in this process."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return make_trainer_step(case, build_job_trainer(case, Path(folder, "rank-0.jsonl"), stack))


def build_job_trainer(case: Case, record: Path, stack: contextlib.ExitStack) -> Trainer:
    recorder = stack.enter_context(Recorder(record, time.monotonic()))
    trainer = Trainer.build_for_job(
        World(device=case.device), case.job(), Serial(), record=recorder
    )
    stack.callback(trainer.close)
    return trainer


def make_trainer_step(case: Case, trainer: Trainer) -> Callable[[], object]:
    batches = itertools.chain.from_iterable(
        trainer.batches(case.data, case.batch, epoch) for epoch in itertools.count()
    )
    return lambda: trainer.step(*next(batches))


# ---- memory ----------------------------------------------------------------------------------
def measure_memory(bench: Bench, case: Case, is_dry: bool) -> None:
    """Compare the memory account of a Job with the memory that torch has allocated."""
    allocated_before = 0 if is_dry else torch.cuda.memory_allocated()
    between_steps = most_in_step = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        record = Path(folder, "rank-0.jsonl")
        trainer = build_job_trainer(case, record, stack)
        step = make_trainer_step(case, trainer)
        time_steps(case, step, WARM_UP)
        if not is_dry:
            between_steps = torch.cuda.memory_allocated() - allocated_before
            torch.cuda.reset_peak_memory_stats()
        time_steps(case, step, 2)
        if not is_dry:
            most_in_step = torch.cuda.max_memory_allocated() - allocated_before
        log_memory(trainer.training)
        stack.close()  # the record is complete once it is closed
        (line,) = (each for each in read_lines(record, spans=False) if each["kind"] == "memory")
        del trainer, step
    free_memory()
    kinds = {name: size for name, size in line.items() if name not in ("kind", "resident")}
    bench.measured[f"bytes, {case.name}"] = {
        "account": kinds,
        "allocated between two steps": between_steps,
        "most allocated in a step": most_in_step,
    }
    if is_dry:
        print(f"memory account, {case.name}: {kinds}; torch counts the memory of GPUs only")
        return
    lasting = sum(size for name, size in kinds.items() if name not in ("activations", "exchange"))
    for what, account, allocated in (
        ("allocated between two steps", lasting, between_steps),
        ("most allocated in a step", sum(kinds.values()), most_in_step),
    ):
        low, high = MEMORY_BOUNDS
        bench.figure(
            f"memory account / {what}, {case.name}",
            account / allocated,
            at_least=low,
            at_most=high,
        )


# ---- the first step --------------------------------------------------------------------------
def measure_first_step(bench: Bench, case: Case, rounds: int) -> None:
    """Measure what the check of the first step costs, in steps. One worker in one micro-batch has
    nothing to check, so there are two micro-batches.
    """

    def time_first_step(is_skipped: bool) -> float:
        with contextlib.ExitStack() as stack:
            step = make_own_loop_step(
                case, stack, "serial(micro=2)", skip_first_step_check=is_skipped
            )
            taken = time_steps(case, step, 1)
            if is_skipped:
                later.append(median(time_steps(case, step, 1) for _ in range(5)))
        del step
        free_memory()
        return taken

    later: list[float] = []
    print(f"first step, {case.name} [ms]", flush=True)
    found = measure_in_turn(
        {
            "checked": functools.partial(time_first_step, False),
            "not checked": functools.partial(time_first_step, True),
        },
        rounds,
    )
    bench.measured[f"ms of the first step, {case.name}"] = found | {"later step": later}
    bench.figure(
        f"the check of the first step under serial(micro=2), in steps, {case.name}",
        ratios(differences(found["checked"], found["not checked"]), later),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Free the models of a measurement, so that the next one begins with none."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_page(bench: Bench) -> None:
    bench.keep(FIGURES / "gpu.json")
    rows = [
        (name, f"{each['value']:.4g}", f"{each['lowest']:.4g} to {each['highest']:.4g}")
        for name, each in bench.figures.items()
    ]
    block = f"{bench.machine['gpu']}, torch {bench.machine['torch']}, {bench.machine['day']}:\n\n"
    block += table(["figure", "median", "of all rounds"], rows)
    PAGE.write_text(fill_block(PAGE.read_text(), "figures", block))


if __name__ == "__main__":
    main()
