"""Local SGD, which averages weights every few steps: how much time it saves on slow links, and how
much accuracy it costs.

    # simulated hosts of this machine at 100 Mbit/s (needs root and iproute2)
    python benchmarks/local_sgd.py --check --data DIR
    # the same, written into docs/results/local_sgd.md
    python benchmarks/local_sgd.py --check --page --data DIR

| figure | bar |
|---|---|
| samples a second on 4 hosts at 100 Mbit/s, local(4, every=16) over DDP on gloo: mnist-mlp of width 1024 | at least 8 |
| bytes that a rank sends in a step, local(4, every=16) over data(4), tests apart | at most 0.0667: 1/15 |
| points of accuracy that local(4, every=16) is below data(4), means of the seeds | at most 0.5 |

There are figures without a bar: accuracy and bytes of plain local SGD with several intervals,
ParallelSGD (every=end), post-local SGD, DiLoCo and EASGD. They use mnist-mlp unchanged, with three
seeds each, on one host. Samples a second are measured in turn by a whole training, read from its
record, and by a loop over DDP.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from common import Bench, compute_step_milliseconds, measure_in_turn, ratios
from hosts import Cluster, hosts
from pages import DOCS, FIGURES, fill_block, table
from trainings import train_with_ddp

import paragrad as pg
from paragrad.commands.train import train
from paragrad.record.record import Record

RANKS = 4
WIDTH = 1024
BATCH = 128
LOCAL = "local(4, every=16)"
DATA = "data(4, state=replicated)"
STRATEGIES = [
    DATA,
    "local(4, every=1)",
    "local(4, every=4)",
    LOCAL,
    "local(4, every=64)",
    "local(4, every=end)",
    "local(4, every=64, after=469)",
    "local(4, every=64, outer=nesterov)",
    "local(4, every=16, outer=elastic)",
]
PAGE = DOCS / "results" / "local_sgd.md"
RESULTS = FIGURES / "local_sgd.json"


def make_wide_job() -> pg.Job:
    return pg.job("mnist-mlp", width=WIDTH).replace(test=None, metric=None)


# ---- on hosts --------------------------------------------------------------------------------
def measure_local_sgd(cluster: Cluster, folder: Path, steps: int) -> float:
    """Run a whole training, and return its samples per second."""
    place = tempfile.mkdtemp(dir=folder)
    cluster.run([str(Path(__file__).resolve()), "--worker", "ours", place, str(steps)], timeout=600)
    (run,) = Path(place).iterdir()
    # from the first average of weights to the last one
    starts = [line["start"] for line in Record(run).select_lines("step", 0)][16:]
    return BATCH * (len(starts) - 1) / (starts[-1] - starts[0])


def measure_ddp(cluster: Cluster, folder: Path, steps: int) -> float:
    """Run a loop over DDP, and return its samples per second."""
    said = cluster.run(
        [str(Path(__file__).resolve()), "--worker", "ddp", str(folder), str(steps)], timeout=600
    )
    return float(said[0].split()[-1])


def run_worker(kind: str, folder: str, steps: str) -> None:
    if kind == "ours":
        train(
            make_wide_job(), LOCAL, runs=folder, limit=int(steps), data=os.environ["PARAGRAD_DATA"]
        )
        return
    print(
        1000
        * BATCH
        / compute_step_milliseconds(
            train_with_ddp(make_wide_job(), BATCH, int(steps), Path(os.environ["PARAGRAD_DATA"]))
        )
    )


# ---- on one host -----------------------------------------------------------------------------
def compare_strategies(bench: Bench, data: str | None, seeds: int) -> None:
    """Measure accuracies and bytes of all strategies, from the records of whole trainings."""
    job = pg.job("mnist-mlp")
    found: dict[str, dict[str, list[float]]] = {
        text: {"accuracy": [], "bytes": [], "tests": []} for text in STRATEGIES
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for text in STRATEGIES:
                run = pg.train(job.replace(seed=seed), text, runs=folder, data=data)
                record = Record(run.folder)
                steps = record.select_lines("step", 0)
                found[text]["accuracy"].append(run.test)
                found[text]["bytes"].append(
                    sum(kind["bytes"] for line in steps for kind in line["sent"].values())
                    / len(steps)
                )
                found[text]["tests"].append(
                    sum(
                        kind["bytes"]
                        for line in record.select_lines("epoch", 0)
                        for kind in line.get("sent", {}).values()
                    )
                    / len(steps)
                )
                print(f"seed {seed}: {text} {run.test:.2f} %", flush=True)
    bench.measured["of mnist-mlp"] = found
    bench.figure(
        f"bytes in a step, {LOCAL} over {DATA}",
        mean(found[LOCAL]["bytes"]) / mean(found[DATA]["bytes"]),
        at_most=1 / 15,
    )
    bench.figure(
        f"points of accuracy, {DATA} over {LOCAL}",
        mean(found[DATA]["accuracy"]) - mean(found[LOCAL]["accuracy"]),
        at_most=0.5,
    )
    for text, each in found.items():
        bench.figure(f"accuracy [%], {text}", each["accuracy"])


def build_table(bench: Bench) -> str:
    """Return the table of the page."""
    found = bench.measured["of mnist-mlp"]
    rows = [
        [
            f"`{text}`",
            f"{mean(each['accuracy']):.2f}"
            + (f" ± {stdev(each['accuracy']):.2f}" if len(each["accuracy"]) > 1 else ""),
            f"{mean(each['bytes']):,.0f}",
            f"{mean(each['tests']):,.0f}",
        ]
        for text, each in found.items()
    ]
    return table(
        ["strategy", "accuracy [%]", "bytes a rank sends in a step", "for tests, over all steps"],
        rows,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder with MNIST")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/results/local_sgd.md, and its figures",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        run_worker(*bench.options.worker)
        return
    os.environ["PARAGRAD_DATA"] = str(Path(bench.options.data).resolve())
    with hosts(RANKS, megabits=100) as cluster, tempfile.TemporaryDirectory() as folder:
        found = measure_in_turn(
            {
                LOCAL: partial(measure_local_sgd, cluster, Path(folder), 16 * 6 + 1),
                "DDP": partial(measure_ddp, cluster, Path(folder), 15),
            },
            bench.rounds(3, quick=1),
        )
    bench.measured["samples a second"] = found
    bench.figure(
        "samples a second, local(4, every=16) over DDP",
        ratios(found[LOCAL], found["DDP"]),
        at_least=8,
    )
    compare_strategies(bench, bench.options.data, bench.rounds(3, quick=1))
    if bench.options.page:
        bench.keep(RESULTS)
        PAGE.write_text(fill_block(PAGE.read_text(), "accuracy", build_table(bench)))
    bench.finish()


if __name__ == "__main__":
    main()
