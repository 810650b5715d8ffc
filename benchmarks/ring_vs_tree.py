"""The ring-versus-tree experiment: run time and accuracy of mnist-mlp, for several message sizes
and numbers of ranks.

    # everything, an hour and a half; writes docs/results/ring_vs_tree.md and its plots
    python benchmarks/ring_vs_tree.py
    # one part; the page keeps the figures of the other parts
    python benchmarks/ring_vs_tree.py --only links

| part     | what                                                                                                        |
|----------|-------------------------------------------------------------------------------------------------------------|
| host     | 2 to 16 ranks on this host over gloo, which are 1 to 8 per core (of two); exchanges and whole steps         |
| links    | 2 to 16 hosts whose links carry 100 Mbit/s; 8 ranks, with 1, 2 and 4 of them per link (root, iproute2)      |
| slow     | 16 hosts again, at 40 Mbit/s: do the links limit the time, or the cores that all hosts share?               |
| clock    | the same exchanges on 32 to 1,024 hosts, predicted by the clock                                             |
| accuracy | trainings with 2, 4 and 8 ranks over gloo and with serial, three seeds; for several widths                  |
| weights  | as the original did: 80 replicas, sigmoid, 20 epochs, weights averaged after every batch or every epoch     |
| bugs     | planted bugs: what they cost, and which check finds them                                                    |
| rounding | errors of the mean gradients of each algorithm, in units in the last place                                  |

| figure                                                                  | bar           |
|-------------------------------------------------------------------------|---------------|
| different final parameters at 2 ranks, over algorithms, per seed         | at most 1     |
| accuracy at 4 and 8 ranks less serial's mean, the farthest, in points    | at most 0.25  |
| packets that the limited links dropped; that came out of order          | at most 0     |
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ring_vs_tree_page as page
from common import Bench, describe_machine
from pages import FIGURES
from replicas import BUGS, Training, measure_rounding, run_checks, train_replicas
from ring_vs_tree_times import (
    WIDTH,
    find_algorithm,
    measure_host,
    measure_links,
    measure_slow_links,
    predict_times,
)

import paragrad as pg

Found = dict[str, Any]
RESULTS = FIGURES / "ring_vs_tree.json"


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--only",
            choices=PARTS,
            nargs="*",
            help="measure only these parts; without a part, only write the page again",
        )
        parser.add_argument(
            "--data",
            type=Path,
            default=os.environ.get("PARAGRAD_DATA"),
            help="folder with MNIST (default: $PARAGRAD_DATA, otherwise it is downloaded)",
        )

    bench = Bench(__doc__, add_options)
    some = bench.options.only is not None
    kept = not (bench.quick or bench.options.rounds)  # a smaller sample is printed, not kept
    found = json.loads(RESULTS.read_text()) if some and RESULTS.exists() else {}
    for name in bench.options.only if some else PARTS:
        print(f"--- {name}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        on = describe_machine()
        found[name] = {
            **PARTS[name](bench, found),
            "machine": on,
            "minutes": (time.monotonic() - begun) / 60,
        }
        if kept:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if "accuracy" in found:
        page.add_accuracy_figures(bench, found["accuracy"])
    if kept:
        page.write_page(found)
    bench.measured = found
    bench.finish()


# ---- training --------------------------------------------------------------------------------
ALGORITHMS = ("tree", "butterfly", "halving", "ring", "ring_async")


def measure_accuracy(bench: Bench, _: Found) -> dict[str, Any]:
    """Train over gloo and with serial, with three seeds."""
    epochs, seeds = (1, 1) if bench.quick else (2, 3)

    def compare_strategies(width: int, listed: list[str]) -> list[dict[str, Any]]:
        job = pg.job("mnist-mlp", width=width).replace(epochs=epochs)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            table = pg.compare(
                job,
                listed,
                runs=folder,
                seeds=seeds,
                rounding_baseline=width == WIDTH,
                data=bench.options.data,
                backend="gloo",
            )
            print(table, file=sys.stderr, flush=True)
            return [
                {
                    "strategy": row.strategy,
                    "width": width,
                    "mean": row.test,
                    "spread": row.spread,
                    "digests": row.digests,
                    "tests": [table.records[name].test for name in row.runs],
                    "difference": row.difference,
                    "seconds_per_step": row.seconds_per_step,
                }
                for row in table.rows
            ]

    ranks = (
        {2: ALGORITHMS}
        if bench.quick
        else {2: ALGORITHMS, 4: ALGORITHMS, 8: ("tree", "halving", "ring")}
    )
    rows = compare_strategies(
        WIDTH,
        [
            "serial",
            *(f"data({count}, reduce={name})" for count, names in ranks.items() for name in names),
        ],
    )
    for width in () if bench.quick else (16, 1024):
        rows += compare_strategies(
            width, ["serial", "data(4, reduce=tree)", "data(4, reduce=ring)"]
        )
    return {"rows": rows, "epochs": epochs, "seeds": seeds}


def measure_weights(bench: Bench, _: Found) -> dict[str, Any]:
    """Train 80 replicas in one process, and average their weights."""
    job = pg.job("mnist-mlp", width=64, activation="sigmoid")
    count, epochs, batch = (8, 1, 500) if bench.quick else (80, 20, 50)
    found = {}
    for every in ("batch", "epoch"):
        for name in ("tree", "ring"):
            how = Training(job, count, find_algorithm(name), "weights", every, batch)
            found[f"{name}, every {every}"] = train_replicas(
                how, *open_data(bench, job), epochs, make_progress_printer(f"{name}, every {every}")
            )
    for name, size in (
        ("serial, the same batches", count * batch),
        (f"serial, batches of {batch}", batch),
    ):
        found[name] = train_replicas(
            Training(job, 1, find_algorithm("ring"), batch=size),
            *open_data(bench, job),
            epochs,
            make_progress_printer(name),
        )
    return {"found": found, "replicas": count, "epochs": epochs, "batch": batch}


def measure_bugs(bench: Bench, _: Found) -> dict[str, Any]:
    """Train with every planted bug and without a bug, for both kinds of averaging."""
    rows = []
    for averaged, count, epochs, batch, activation in (
        ("gradients", 8, 3, 16, "relu"),
        ("weights", 80, 20, 50, "sigmoid"),
    ):
        job = pg.job("mnist-mlp", width=64, activation=activation)
        for bug in (None, *BUGS):
            how = Training(
                job,
                count,
                find_algorithm("ring"),
                averaged,
                "batch" if averaged == "gradients" else "epoch",
                batch,
                bug,
            )  # type: ignore[arg-type]
            data = open_data(bench, job)
            found = train_replicas(
                how,
                *data,
                1 if bench.quick else epochs,
                make_progress_printer(f"{averaged}, {bug}"),
            )
            rows.append(
                {
                    "averaged": averaged,
                    "replicas": count,
                    "bug": bug,
                    **found,
                    "checks": run_checks(how, data[0]),
                }
            )
    return {"rows": rows}


def measure_roundings(bench: Bench, _: Found) -> dict[str, Any]:
    """Measure the rounding errors of one batch of 960 samples, for every algorithm."""
    job = pg.job("mnist-mlp")
    names = ("star", "tree", "butterfly", "halving", "ring")
    schedules = {name: find_algorithm(name) for name in names}
    train = open_data(bench, job)[0]
    return {
        "of": {
            str(count): measure_rounding(job, train, count, schedules, 960 // count)
            for count in (2, 8, 80)
        }
    }


def open_data(bench: Bench, job: Any) -> tuple[Any, Any]:
    return job.train(bench.options.data), job.test(bench.options.data)


def make_progress_printer(name: str) -> Callable[[int, float], None]:
    return lambda epoch, accuracy: print(
        f"{name}: epoch {epoch + 1}, {accuracy:.2f} %", file=sys.stderr, flush=True
    )


# each part gets the results of the parts before it
PARTS: dict[str, Callable[[Bench, Found], Found]] = {
    "host": measure_host,
    "links": measure_links,
    "slow": measure_slow_links,
    "clock": predict_times,
    "accuracy": measure_accuracy,
    "weights": measure_weights,
    "bugs": measure_bugs,
    "rounding": measure_roundings,
}


if __name__ == "__main__":
    main()
