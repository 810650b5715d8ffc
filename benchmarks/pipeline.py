"""Steps of a pipeline of two stages on one host: paragrad, torch.distributed.pipelining's 1F1B over
gloo and over shm, and bounds.

    # both ranks on this machine, one thread each
    python benchmarks/pipeline.py --check
    # the same, written into docs/techniques/pipeline.md
    python benchmarks/pipeline.py --check --page

| figure | bar |
|---|---|
| speed over torch's 1F1B on gloo: h=512 batch=256 micro=4 | at least 1.4 |
| ... every setting | at least 1.0 |
| ... geometric mean of the four settings | at least 1.2 |
| speed over the bound's: every setting | at least 0.8 |
| ... geometric mean | at least 0.88 |
| the timeline's seconds of a step, off the measured ones: median of the four settings | at most 0.1 |
| its share of waiting, off the measured one: median of the four settings | at most 0.15 |

The model has eight Linear(h, h) in float32, four on each rank. Each rank has one thread. The
optimizer is SGD.

The bound comes from two processes that each make a step of their four layers, at the same time and
without messages. It is a sum: the time of one micro-batch in one process and then in the other, and
the time of the m - 1 other micro-batches in the slower process. (If each process takes T seconds,
this is T (m + p - 1)/m. The input of the first layer needs no gradient, so rank 0 has 11 products
and rank 1 has 12.)

For paragrad, a whole training is timed by its record from step to step. For torch, it is a loop
over batches that are slices of tensors in memory. There are figures without a bar: one worker with
all threads, and paragrad's other schedules.

The timeline measures the durations of tasks in five steps of a run, and predicts the steps after
them (`planner/step_timeline.py`, docs/how_to/timeline.md). A rank waits when it does no work.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Bench, compute_step_milliseconds, measure_in_turn, ratios
from pages import DOCS, FIGURES, fill_block, table
from torch import Tensor, nn
from trainings import Loop, make_loop_measure, make_training_measure, serve_loops, shuffle_batches
from workers import Workers

import paragrad as pg
from paragrad.executors.clock import Timeline
from paragrad.launch import Launcher
from paragrad.planner.step_timeline import PREDICTED_STEPS, predict_step, read_step_timelines
from paragrad.record.record import DETAILED_STEPS, Record

LAYERS = 8
STAGES = 2
BATCHES = 4


@dataclass(frozen=True)
class Setting:
    """A width, a global batch, and its micro-batches."""

    width: int
    batch: int
    micro: int

    def __str__(self) -> str:
        return f"h={self.width} batch={self.batch} micro={self.micro}"

    def layers(self, count: int = LAYERS) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(count)))

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        return tuple(
            torch.randn(BATCHES * self.batch, self.width, generator=draw) for _ in range(2)
        )  # type: ignore[return-value]

    def job(self) -> pg.Job:
        return pg.Job(
            name="benchmark",
            model=self.layers,
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            train=lambda folder: torch.utils.data.TensorDataset(*self.data()),
            batch=self.batch,
            epochs=1000,
        )

    @property
    def steps(self) -> int:
        """The number of steps that take about two seconds, or more."""
        return max(
            PREDICTED_STEPS.stop + 4,
            2 * DETAILED_STEPS.stop + 2,
            min(200, int(1.5e11 / (6 * LAYERS * self.batch * self.width**2))),
        )


SETTINGS = [
    Setting(512, 256, 4),
    Setting(512, 1024, 8),
    Setting(1024, 1024, 8),
    Setting(2048, 512, 8),
]
OURS = ("one_f_one_b", "gpipe", "zero_bubble")
PEERS = ("torch's 1F1B on gloo", "torch's 1F1B on shm", "the bound", "serial")
PAGE = DOCS / "techniques" / "pipeline.md"
RESULTS = FIGURES / "pipeline.json"


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        kind, address = bench.options.worker
        serve_loops(kind, address, partial(build_loop, kind))
        return
    if bench.options.page and (bench.quick or bench.options.rounds or bench.options.json):
        sys.exit("the page shows all parts, measured in full: with --page, give only --check")
    with tempfile.TemporaryDirectory() as folder, Launcher(STAGES) as ranks:
        peers = {
            kind: Workers(__file__, kind, STAGES)
            for kind in ("torch, gloo", "torch, shm", "halves")
        }
        times = {}
        foreseen = {}
        for setting in SETTINGS[:1] if bench.quick else SETTINGS:
            runs = Path(folder) / str(setting)
            measures = {
                f"pipeline(2, {schedule})": make_training_measure(
                    ranks,
                    f"pipeline(2, micro={setting.micro}, schedule={schedule}, cut=[4, 4])",
                    setting,
                    runs,
                )
                for schedule in OURS
            }
            measures["serial"] = make_training_measure(ranks, "serial", setting, runs)
            measures |= {
                kind: make_loop_measure(workers, setting)
                for kind, workers in peers.items()
                if kind != "halves"
            }
            measures["the bound"] = make_bound_measure(peers["halves"], setting)
            print(f"{setting} [ms]", flush=True)
            times[setting] = measure_in_turn(measures, bench.rounds(7, quick=2))
            foreseen[setting] = [read_steps(Record(each)) for each in runs.glob("*one_f_one_b*")]
        for workers in peers.values():
            workers.close()
    report(bench, times)
    compare_timelines(bench, foreseen)
    if bench.options.page:
        bench.keep(RESULTS)
        PAGE.write_text(fill_block(PAGE.read_text(), "measured", build_table(bench)))
    bench.finish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/techniques/pipeline.md, and its figures",
    )


def build_table(bench: Bench) -> str:
    """Return the table with the figures of every setting, and their means."""

    def format_figure(name: str, setting: Setting) -> str:
        return f"{bench.figures[f'{name}, {setting}']['value']:.2f}"

    rows = (
        [f"speed over {name}" for name in PEERS]
        + [f"one_f_one_b's time over {schedule}'s" for schedule in OURS[1:]]
        + [
            "the timeline's seconds of a step, over the measured",
            "the timeline's share of waiting",
            "the measured share of waiting",
        ]
    )
    means = ", ".join(
        f"over {name} {bench.figures[f'speed over {name}, geometric mean']['value']:.2f}"
        for name in PEERS
    )
    return (
        table(
            ["pipeline(2), one_f_one_b", *map(str, SETTINGS)],
            [[name, *(format_figure(name, setting) for setting in SETTINGS)] for name in rows],
        )
        + f"\n\nGeometric means of speed: {means}."
        + "".join(f"\n\nGoal missed: {line}." for line in bench.list_missed_bars())
    )


def make_bound_measure(halves: Workers, setting: Setting) -> Callable[[], float]:
    """Return a function that measures the bound, the milliseconds of a step without messages.

    It is the time of the slower rank for all micro-batches, plus that of the other rank for one.
    """

    def measure_step() -> float:
        first, second = map(compute_step_milliseconds, halves.ask(setting))
        return max(first, second) + min(first, second) / setting.micro

    return measure_step


@dataclass(frozen=True)
class Steps:
    """The predicted step of a run, and the medians of the measured steps after it.

    waits_foretold, waits: the fraction of the ranks' time in which they wait.
    """

    foretold: float
    low: float
    high: float
    waits_foretold: float
    seconds: float
    waits: float


def read_steps(record: Record) -> Steps:
    told = predict_step(record)
    found = list(read_step_timelines(record, PREDICTED_STEPS).values())
    assert told is not None
    return Steps(
        told.timeline.seconds,
        told.low,
        told.high,
        compute_waiting_share(told.timeline),
        median(each.seconds for each in found),
        median(map(compute_waiting_share, found)),
    )


def compute_waiting_share(timeline: Timeline) -> float:
    """Return the fraction of all ranks' time in which they do no work.

    A measured timeline contains the times at which a rank waits. A predicted timeline contains the
    times at which it works.
    """
    all_ranks = len(timeline.ends) * timeline.seconds
    waits = [span.seconds for span in timeline.spans if span.lane in ("receive", "wait")]
    if any(span.lane == "update" for span in timeline.spans):
        return (all_ranks - sum(timeline.ends) + sum(waits)) / all_ranks
    return 1 - sum(span.seconds for span in timeline.spans if span.lane == "compute") / all_ranks


def compare_timelines(bench: Bench, foreseen: dict[Setting, list[Steps]]) -> None:
    """Add the figures about the errors of the timeline."""
    bench.measured["timelines"] = {
        str(setting): [asdict(each) for each in steps] for setting, steps in foreseen.items()
    }
    off = {
        "seconds of a step": [
            [abs(each.foretold / each.seconds - 1) for each in steps] for steps in foreseen.values()
        ],
        "share of waiting": [
            [abs(each.waits_foretold / each.waits - 1) for each in steps]
            for steps in foreseen.values()
        ],
    }
    for setting, steps in foreseen.items():
        bench.figure(
            f"the timeline's seconds of a step, over the measured, {setting}",
            [each.foretold / each.seconds for each in steps],
        )
        bench.figure(
            f"its interval's ends, over the measured, {setting}",
            [end / each.seconds for each in steps for end in (each.low, each.high)],
        )
        bench.figure(
            f"the timeline's share of waiting, {setting}", [each.waits_foretold for each in steps]
        )
        bench.figure(f"the measured share of waiting, {setting}", [each.waits for each in steps])
    for (name, found), bar in zip(off.items(), (0.1, 0.15), strict=True):
        bench.figure(
            f"the timeline's {name}: median error of the settings",
            median(map(median, found)),
            at_most=bar,
        )


def report(bench: Bench, times: dict[Setting, dict[str, list[float]]]) -> None:
    bench.measured["ms per step"] = {str(setting): found for setting, found in times.items()}
    speeds: dict[str, list[list[float]]] = {}
    for number, (setting, found) in enumerate(times.items()):
        mine = found["pipeline(2, one_f_one_b)"]
        others = (found["torch, gloo"], found["torch, shm"], found["the bound"], found["serial"])
        for name, other, bar in zip(
            PEERS, others, (1.0 if number else 1.4, None, 0.8, None), strict=True
        ):
            speeds.setdefault(name, []).append(ratios(other, mine))
            bench.figure(f"speed over {name}, {setting}", speeds[name][-1], at_least=bar)
        for schedule in OURS[1:]:
            bench.figure(
                f"one_f_one_b's time over {schedule}'s, {setting}",
                ratios(mine, found[f"pipeline(2, {schedule})"]),
            )
    for name, bar in zip(PEERS, (1.2, None, 0.88, None), strict=True):
        bench.figure(
            f"speed over {name}, geometric mean",
            [math.prod(row) ** (1 / len(row)) for row in zip(*speeds[name], strict=True)],
            at_least=bar,
        )


# ---- in a rank -------------------------------------------------------------------------------
def build_loop(kind: str, setting: Setting) -> Loop:
    part = setting.layers(LAYERS // STAGES)
    return Loop(
        torch.optim.SGD(part.parameters(), lr=0.01),
        (make_half_step if kind == "halves" else make_torch_step)(setting, part),
        shuffle_batches(*setting.data(), setting.batch),
    )


def make_torch_step(setting: Setting, part: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    """Return a function that makes a step with torch.distributed.pipelining."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, setting.micro, loss_fn=nn.functional.mse_loss)
    return lambda inputs, target: (
        schedule.step(inputs) if rank == 0 else schedule.step(target=target)
    )


def make_half_step(setting: Setting, part: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs the forwards and backwards of one rank. The tensors that it would
    receive are already there.
    """
    import torch.distributed as dist

    rank = dist.get_rank()

    def step(inputs: Tensor, target: Tensor) -> None:
        for x, y in zip(inputs.chunk(setting.micro), target.chunk(setting.micro), strict=True):
            x = x.requires_grad_(rank > 0)
            out = part(x)
            out.backward(y) if rank == 0 else nn.functional.mse_loss(out, y).backward()

    return step


if __name__ == "__main__":
    main()
