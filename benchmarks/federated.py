"""Federated averaging on label-skewed digits: the number of rounds to 95 % accuracy. It depends on
how skewed the data of clients are, and on how many clients take part in a round.

    python benchmarks/federated.py --check --data DIR
    # the same, written into docs/results/federated.md
    python benchmarks/federated.py --check --page --data DIR

| figure | bar |
|---|---|
| bytes that crossed beside weights, counts and what tests add up | at most 0 |
| samples of the clients of a round that were missed, or used twice | at most 0 |
| rounds to 95 % with half of the clients over rounds with a tenth of them, evenly divided | at most 1.05 |

mnist-mlp is trained with plain SGD at a rate of 0.1 in batches of 20. There are 100 clients of 600
samples, and three seeds. In a round, each client trains for one epoch. If a run does not reach 95 %
within 200 rounds, the table says so. --quick uses one seed and 30 rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from common import Bench
from pages import DOCS, FIGURES, fill_block, table

import paragrad as pg
from paragrad.record.record import Record

GOAL = 95.0
MOST = 200
SPLITS = ("even", "dirichlet(1.0)", "dirichlet(0.1)")
FRACTIONS = (0.1, 0.5)
KINDS = {"counts", "weights", "tests"}
PAGE = DOCS / "results" / "federated.md"
RESULTS = FIGURES / "federated.json"


def make_job(seed: int) -> pg.Job:
    return pg.job("mnist-mlp").replace(
        batch=20, seed=seed, scheduler=None, optimizer=partial(torch.optim.SGD, lr=0.1)
    )


def train_once(
    split: str, fraction: float, seed: int, rounds: int, workers: int, data: str | None, folder: str
) -> dict[str, Any]:
    """Train once, and return numbers from the record of the run."""
    text = f"federated({workers}, clients=100, fraction={fraction}, rounds={rounds}, split={split})"
    run = pg.train(make_job(seed), text, runs=folder, data=data, until=f"accuracy={GOAL:g}")
    record = Record(run.folder, spans=False)
    every = [
        line for rank in range(len(record.ranks)) for line in record.select_lines("epoch", rank)
    ]
    sent = [(kind, each["bytes"]) for line in every for kind, each in line["sent"].items()]
    tests = [line["test"]["value"] for line in record.select_lines("epoch")]
    return {
        "rounds": len(tests) if tests[-1] >= GOAL else None,
        "tests": tests,
        "bytes a round": sum(size for kind, size in sent) / len(tests),
        "other bytes": sum(size for kind, size in sent if kind not in KINDS)
        + sum(
            each["bytes"]
            for rank in range(len(record.ranks))
            for line in record.select_lines("step", rank)
            for each in line["sent"].values()
        ),
        "off": record.sample_count.missed + record.sample_count.twice,
    }


def build_table(bench: Bench) -> str:
    """Return the table of the page."""
    found = bench.measured["runs"]

    def format_cell(split: str, fraction: float) -> str:
        ones = found[f"{split}, {fraction}"]
        reached = [one["rounds"] for one in ones if one["rounds"] is not None]
        best = f"best {mean(max(one['tests']) for one in ones):.1f} %"
        if not reached:
            return f"never ({best})"
        within = f"{median(reached):g} ({min(reached)} to {max(reached)})"
        return (
            within
            if len(reached) == len(ones)
            else f"{within}, {len(ones) - len(reached)} of {len(ones)} never"
        )

    return table(
        ["split", *(f"`fraction={fraction}`" for fraction in FRACTIONS)],
        [
            [f"`{split}`", *(format_cell(split, fraction) for fraction in FRACTIONS)]
            for split in SPLITS
        ],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder with MNIST")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/results/federated.md, and its figures",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    found = dict[str, list[dict[str, Any]]]()
    seeds = bench.rounds(3, quick=1)
    most = 30 if bench.options.quick else MOST
    with tempfile.TemporaryDirectory() as folder:
        for split in SPLITS:
            for fraction in FRACTIONS:
                for seed in range(seeds):
                    one = train_once(
                        split,
                        fraction,
                        seed,
                        most,
                        bench.options.workers,
                        bench.options.data,
                        folder,
                    )
                    found.setdefault(f"{split}, {fraction}", []).append(one)
                    print(
                        f"seed {seed}: {split}, fraction {fraction}: {one['rounds']} rounds, "
                        f"{max(one['tests']):.2f} %",
                        flush=True,
                    )
    bench.measured["runs"] = found
    every = [one for ones in found.values() for one in ones]
    bench.figure("bytes of other kinds", sum(one["other bytes"] for one in every), at_most=0)
    bench.figure("samples missed, or used twice", sum(one["off"] for one in every), at_most=0)
    few, many = (
        [one["rounds"] or most for one in found[f"even, {fraction}"]] for fraction in FRACTIONS
    )
    bench.figure(
        "rounds, half of the clients over a tenth, even", mean(many) / mean(few), at_most=1.05
    )
    if bench.options.page:
        bench.keep(RESULTS)
        PAGE.write_text(fill_block(PAGE.read_text(), "rounds", build_table(bench)))
    bench.finish()


if __name__ == "__main__":
    main()
