"""Do the checks of a run find faults that begin late, without false alarms, and what do they cost?

| figure | bar |
|---|---|
| faults to the end of the run that are named, check=1% | all |
| faults of 100 steps that are named, check=5%: data and servers | at least 0.7 |
| faults of 100 steps that are named, check=5%: cut models | at least 0.4 |
| false alarms over right runs (float32, float64, bfloat16), check=20% | 0 |
| seconds in checks / seconds of the run, check=1%, 2,000 steps of about 3 and of about 30 ms: every strategy | at most 0.012 |

A fault begins at a step drawn between 3 and 400 of 500. A third of the faults change gradients, a
third buffers, a third the update alone, on one rank or on all. A third last 100 steps, the rest to
the end of the run. The job has batch norm, momentum, clipping and a scheduler. Everything is drawn
from a seed. `--quick` takes every fifth fault, 12 right runs and one strategy.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Bench
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.engine.exchange import Exchange
from paragrad.record.record import Record
from paragrad.trainer import training

DATA = ("data(2, reduce=ring)", "data(2, state=shared_memory)", "server(2)")
CUT = ("data(2, state=fully_sharded)", "pipeline(2, micro=2)", "tensor(2)")
KINDS = ("gradient", "buffer", "update")
STEPS = 500
LENGTH = 100  # steps of a short fault
WIDTH = 192
# (width, batch) of the jobs whose checks are timed: steps of about 3 and of about 30 ms
TIMED = {"short steps": (192, 128), "longer steps": (768, 512)}
PARTS = ("faults", "right", "costs")


@dataclass(frozen=True)
class Fault:
    """A fault of an exchange.

    kind: what it changes;  first, last: its steps;  rank: the rank that has it, or None for all.
    """

    kind: str
    first: int
    last: int
    rank: int | None


def make_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_samples(count: int) -> TensorDataset:
    """Return random samples with random labels. A model can memorize few of them, but not many."""
    drawn = torch.Generator().manual_seed(2)
    return TensorDataset(
        make_numbers(count, 64, seed=1), torch.randint(10, (count,), generator=drawn)
    )


FEW, MANY = make_samples(512), make_samples(16384)


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def plant(fault: Fault) -> None:
    """Plant a fault in this process: its passes or its updates are wrong in some steps."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if fault.rank not in (None, rank) or vars(training).get("planted"):
        return
    vars(training)["planted"] = True  # once in a process
    run_passes = training.run_passes
    make_step = training.Training.make_step
    present = {"step": -1}

    def count_step(self: Any, *arguments: Any) -> Any:
        present["step"] = self.state.steps
        return make_step(self, *arguments)

    def is_wrong() -> bool:
        return fault.first <= present["step"] <= fault.last

    def change_passes(passes: Any, *arguments: Any) -> Any:
        sums = run_passes(passes, *arguments)
        model = passes.host.module.model
        if is_wrong() and fault.kind == "gradient":
            for each in model.parameters():
                if each.grad is not None:
                    each.grad.mul_(1.05)
                    break
        if is_wrong() and fault.kind == "buffer":
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.add_(0.01)
                    break
        return sums

    def change_update(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def update(self: Any) -> None:
            original(self)
            if is_wrong() and type(self).update is update:
                with torch.no_grad():
                    next(iter(self.loss_module.model.parameters())).mul_(1.001)

        return update

    training.Training.make_step = count_step  # type: ignore[method-assign]
    training.run_passes = change_passes
    if fault.kind == "update":
        for kind in list_classes(Exchange):
            if "update" in vars(kind):
                kind.update = change_update(kind.update)  # type: ignore[method-assign]


def list_classes(kind: Any) -> list[Any]:
    return [kind, *(each for inner in kind.__subclasses__() for each in list_classes(inner))]


def make_job(
    dtype: torch.dtype,
    seed: int,
    fault: Fault | None = None,
    width: int = WIDTH,
    batch: int = 128,
    samples: TensorDataset = FEW,
) -> pg.Job:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        # planted here because every rank makes an optimizer; a cut model is built on one rank only
        if fault is not None and dist.is_initialized():
            from paragrad.parallel.data import fully_sharded, shared_memory  # noqa: F401
            from paragrad.parallel.server import worker_exchange  # noqa: F401

            plant(fault)
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)

    return pg.Job(
        name="late",
        model=functools.partial(build_model, width),
        loss=functional.cross_entropy,
        optimizer=make_optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        scheduler_every="step",
        train=samples,
        batch=batch,
        epochs=10_000,
        seed=seed,
        clip_norm=5.0,
        dtype=dtype,
    )


def draw_faults(count: int) -> list[tuple[str, Fault]]:
    drawn = random.Random(0)
    faults = []
    for number in range(count):
        first = drawn.randrange(3, 400)
        is_short = number % 3 == 2
        kind = KINDS[(number // 3) % 3]
        last = min(first + LENGTH, STEPS) - 1 if is_short else STEPS
        strategy = (*DATA, *CUT)[(number // 9 + number) % 6]
        faults.append((strategy, Fault(kind, first, last, drawn.choice((None, None, 0, 1)))))
    return faults


def train(job: pg.Job, strategy: str, folder: str, steps: int, check: str) -> tuple[Any, float]:
    """Train, and return (the run, or the error that ended it; seconds)."""
    start = time.monotonic()
    try:
        ended: Any = pg.train(job, strategy, runs=folder, limit=steps, check=check)
    except pg.RankFailed as error:
        ended = error
    return ended, time.monotonic() - start


def main() -> None:
    bench = Bench(
        __doc__,
        lambda parser: parser.add_argument(
            "--parts", nargs="+", choices=PARTS, default=PARTS, help="the parts to measure"
        ),
    )
    parts = bench.options.parts
    torch.set_num_threads(1)
    found: dict[str, Any] = {"faults": [], "right": [], "costs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number, (strategy, fault) in enumerate(draw_faults(60)):
            if "faults" not in parts or (bench.quick and number % 5):
                continue
            is_short = fault.last < STEPS
            job = make_job(torch.float32, number, fault)
            ended, seconds = train(job, strategy, folder, STEPS, "5%" if is_short else "1%")
            named = isinstance(ended, pg.RankFailed) and (ended.step or 0) >= fault.first
            print(
                f"{number}: {strategy}, {fault}: "
                f"{f'named at step {ended.step}' if named else f'NOT NAMED: {ended}'}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
            found["faults"].append(
                {"strategy": strategy, **vars(fault), "short": is_short, "named": named}
            )
        rights = (12 if bench.quick else 600) if "right" in parts else 0
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        for number in range(rights):
            strategy = (*DATA, *CUT)[number % 6]
            job = make_job(dtypes[number // 6 % 3], number)
            ended, _ = train(job, strategy, folder, 40, "20%")
            is_alarm = isinstance(ended, pg.RankFailed)
            if is_alarm:
                print(f"FALSE ALARM {number}: {strategy}, {job.dtype}: {ended}", file=sys.stderr)
            found["right"].append(is_alarm)
        timed = DATA[:1] if bench.quick else (*DATA[:2], *CUT)
        for strategy, (steps, sizes) in (
            itertools.product(timed, TIMED.items()) if "costs" in parts else ()
        ):
            job = make_job(torch.float32, 0, None, *sizes, MANY)
            ended, _ = train(job, strategy, folder, 2000, "1%")
            checks = sum(
                line["numbers"]["seconds"]
                for line in ended.select_lines("event")
                if line["name"] == "checked"
            )
            end = next(each for each in Record(ended.folder).run_lines if each["kind"] == "end")
            found["costs"][f"{strategy}, {steps}"] = checks / end["seconds"]
            print(
                f"{strategy}, {steps}: {1e3 * (end['seconds'] - checks) / 2000:.1f} ms a step, "
                f"checks {checks:.2f} of {end['seconds']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    if "faults" in parts:
        lasting = [each["named"] for each in found["faults"] if not each["short"]]
        bench.figure("faults to the end: named", sum(lasting) / len(lasting), at_least=1.0)
        for name, strategies, least in (("data", DATA, 0.7), ("cut", CUT, 0.4)):
            short = [
                each["named"]
                for each in found["faults"]
                if each["short"] and each["strategy"] in strategies
            ]
            share = sum(short) / len(short) if short else 0.0
            bench.figure(f"faults of {LENGTH} steps: named, {name}", share, at_least=least)
    if "right" in parts:
        bench.figure("false alarms", sum(found["right"]), at_most=0)
    for strategy, share in found["costs"].items():
        name = re.sub(r"[^\w,]+", " ", strategy).strip()
        bench.figure(f"share of checks: {name}", share, at_most=0.012)
    bench.measured.update(found)
    bench.finish()


if __name__ == "__main__":
    main()
