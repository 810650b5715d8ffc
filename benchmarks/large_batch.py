"""Larger batches with the same number of epochs: with the job's own learning rate, with rules that
scale the rate, and compared with the gradient noise scale.

    python benchmarks/large_batch.py --check --data DIR
    # the same, written into docs/results/large_batch.md
    python benchmarks/large_batch.py --check --page --data DIR
    # a part: arms, batches, sizes
    python benchmarks/large_batch.py --only sizes --data DIR

| figure | bar |
|---|---|
| points of accuracy that batch 512 with linear scaling and warm-up is below batch 64 at the own rate, 5 seeds | at most 0.3 |

The job is mnist-mlp, five epochs, serial. Its rate of 0.05 with momentum 0.9 is for its own batch
of 128. --quick uses one seed and one epoch.

arms: width 1024. Batch 64 has this rate, and half of it. Batch 512 has this rate, linear scaling
without warm-up, linear scaling with a warm-up of two epochs, and square root scaling.

batches: the job's own width and the same rules, for batches from 64 to 8,192, with three seeds. The
noise scale is measured over the epochs of batch 128, from two micro-batches.

sizes: steps, accuracy and time with batches of one sample, 64, 4,096, and the whole set (gradient
descent), with one seed.

Accuracies do not depend on other work on the machine. The times of the third table do.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from arms import (
    SPREAD,
    Arm,
    compute_mean_difference,
    format_mean,
    format_mean_difference,
    select_values,
    train_arms,
)
from common import Bench
from pages import DOCS, FIGURES, fill_block, find_results_file, format_plot, table
from plots import draw_panels

import paragrad as pg
from paragrad.record.noise_scale import track_noise_scale

# the job's own batch, and the batch with which others are compared
OWN = 128
BASE = 64
OWN_RATE = "own rate"
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
RULES: dict[str, dict[str, Any]] = {
    OWN_RATE: {},
    "linear": {"scale_lr": "linear"},
    "linear, warm-up": {"scale_lr": "linear", "warm_up": 2},
    "square root": {"scale_lr": "sqrt"},
}
FIRST = f"{BASE}, {OWN_RATE}"
BEST = "linear, warm-up"
NEAR = 0.5  # a rule holds if it is at most so many points of accuracy below the job's own batch
PARTS = ("arms", "batches", "sizes")
PAGE = DOCS / "results" / "large_batch.md"
PLOT = FIGURES / "large_batch.svg"


def make_arm(batch: int, rule: str, epochs: int, text: str = "serial", **shape: int) -> Arm:
    def make_job(seed: int) -> tuple[pg.Job, str]:
        return pg.job("mnist-mlp", **shape).replace(batch=batch, epochs=epochs, **RULES[rule]), text

    return make_job


def read(run: pg.Run) -> dict[str, Any]:
    return {
        "accuracy": run.test,
        "steps": float(len(run.losses)),
        "seconds": run.end["seconds"],
        "noise": [
            (each.step, each.scale)
            for each in track_noise_scale(run.group_step_lines())
            if each.scale
        ][::-50][::-1],
    }


# ---- what is measured ------------------------------------------------------------------------
def measure_arms(bench: Bench, run: Callable[..., Any], epochs: int) -> None:
    every = [(BASE, OWN_RATE), (BASE, "linear"), *((512, rule) for rule in RULES)]
    found = run(
        {f"{batch}, {rule}": make_arm(batch, rule, epochs, width=1024) for batch, rule in every},
        bench.rounds(5, quick=1),
    )
    bench.measured["arms"] = found
    lost, error = compute_mean_difference(
        select_values(found, FIRST, "accuracy"), select_values(found, f"512, {BEST}", "accuracy")
    )
    bench.figure(
        "points of accuracy, batch 64 over 512 with linear scaling and warm-up", lost, at_most=0.3
    )
    bench.figure("standard error of that", error)
    for rule in RULES:
        bench.figure(
            f"accuracy [%] at 512, {rule}", select_values(found, f"512, {rule}", "accuracy")
        )


def measure_batches(bench: Bench, run: Callable[..., Any], epochs: int) -> None:
    found = run(
        {
            (rule, batch): make_arm(batch, rule, epochs)
            for batch in BATCHES
            for rule in RULES
            if batch != OWN or rule == OWN_RATE
        },
        bench.rounds(3, quick=1),
    )
    # for the job's own batch all rules are the same
    found = {(rule, OWN): found[OWN_RATE, OWN] for rule in RULES} | found
    noisy = run({"": make_arm(OWN, OWN_RATE, epochs, "serial(micro=2)")}, 1, noise_scale=1)[""][0][
        "noise"
    ]
    bench.measured |= {"batches": [[*name, each] for name, each in found.items()], "noise": noisy}
    bench.figure("noise scale in the end", noisy[-1][1])
    for rule in RULES:
        bench.figure(
            f"largest batch within {NEAR} points of {OWN}, {rule}", find_largest_batch(found, rule)
        )


def find_largest_batch(found: dict[Any, Any], rule: str) -> int:
    """Return the largest batch up to which a rule holds: all mean accuracies are near that of the
    job's own batch.
    """
    own = mean(select_values(found, (rule, OWN), "accuracy"))
    near = itertools.takewhile(
        lambda batch: mean(select_values(found, (rule, batch), "accuracy")) >= own - NEAR,
        BATCHES[1:],
    )
    return max(near)


def measure_sizes(bench: Bench, run: Callable[..., Any], epochs: int) -> None:
    found = run(
        {
            (rule, batch): make_arm(batch, rule, epochs)
            for batch in (1, BASE, 4096, 60_000)
            for rule in (OWN_RATE, "linear")
        },
        1,
    )
    bench.measured["sizes"] = [[*name, each] for name, each in found.items()]


# ---- the page --------------------------------------------------------------------------------
def write_page(bench: Bench) -> None:
    bench.keep(find_results_file("large_batch", bench.options.only))
    text = PAGE.read_text()
    measured = bench.measured
    if found := measured.get("arms"):
        text = fill_block(
            text,
            "arms",
            table(
                ["batch", "accuracy [%]", f"points beside `{FIRST}`"],
                [
                    [
                        name,
                        format_mean(select_values(found, name, "accuracy")),
                        ""
                        if name == FIRST
                        else format_mean_difference(
                            select_values(found, name, "accuracy"),
                            select_values(found, FIRST, "accuracy"),
                        ),
                    ]
                    for name in found
                ],
            )
            + SPREAD,
        )
    if "batches" in measured:
        text = fill_block(
            text,
            "batches",
            format_batches(
                {(rule, batch): each for rule, batch, each in measured["batches"]},
                measured["noise"],
            ),
        )
    if "sizes" in measured:
        text = fill_block(
            text,
            "sizes",
            table(
                ["batch", "rate", "steps", "accuracy [%]", "seconds"],
                [
                    [
                        f"{batch:,}",
                        rule,
                        *(
                            ("", "failed: " + each["failed"].partition(": ")[2], "")
                            if "failed" in each
                            else (
                                f"{each['steps']:,.0f}",
                                f"{each['accuracy']:.2f}",
                                f"{each['seconds']:.1f}",
                            )
                        ),
                    ]
                    for rule, batch, (each,) in measured["sizes"]
                ],
            ),
        )
    PAGE.write_text(text)


def format_batches(found: dict[Any, Any], noisy: list[tuple[int, float]]) -> str:
    """Return the table, the plot, and a sentence about the largest batch of each rule."""
    rows = [
        [
            f"{batch:,}",
            *(format_mean(select_values(found, (rule, batch), "accuracy")) for rule in RULES),
        ]
        for batch in BATCHES
    ]

    def draw(axes: Any) -> None:
        for rule in RULES:
            axes[0].plot(
                BATCHES,
                [mean(select_values(found, (rule, batch), "accuracy")) for batch in BATCHES],
                marker="o",
                markersize=3,
                label=rule,
            )
        axes[0].set(xscale="log", xlabel="batch", ylabel="accuracy [%]", ylim=(90, 99))
        axes[0].axvline(noisy[-1][1], linestyle=":", color="gray", label="noise scale in the end")
        axes[1].plot(*zip(*noisy, strict=True), color="gray")
        axes[1].set(xlabel=f"steps of batch {OWN}", ylabel="noise scale", yscale="log")

    draw_panels(PLOT, 2, 300, draw)
    ends = ", ".join(f"{rule} {find_largest_batch(found, rule):,}" for rule in RULES)
    quarter = noisy[len(noisy) // 4][1]
    told = format_plot(PLOT.stem, "accuracy over batches by rule, and the noise scale over steps")
    return (
        f"{table(['batch', *RULES], rows)}{told} Within {NEAR} points of batch {OWN} is, up to a "
        f"batch of: {ends}. The noise scale, from two micro-batches of batch {OWN}, was "
        f"{quarter:,.0f} after a quarter of the steps, and {noisy[-1][1]:,.0f} in the end."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder with MNIST")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write docs/results/large_batch.md, its figures and its plot",
    )
    parser.add_argument(
        "--so-far",
        type=Path,
        metavar="FILE",
        help="use the results of earlier trainings in FILE, and add the new ones",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    run = partial(train_arms, read=read, so_far=bench.options.so_far, data=bench.options.data)
    for name, part in zip(PARTS, (measure_arms, measure_batches, measure_sizes), strict=True):
        if name in (bench.options.only or PARTS):
            part(bench, run, 1 if bench.quick else 5)
    if bench.options.page:
        write_page(bench)
    bench.finish()


if __name__ == "__main__":
    main()
