"""Larger batches at equal epochs: with the job's own rate, and by rules for another one; and what the noise scale says of them.

    python benchmarks/large_batch.py --check --data DIR
    python benchmarks/large_batch.py --check --page --data DIR      # the same, written into docs/large_batch.md
    python benchmarks/large_batch.py --only sizes --data DIR        # a part: arms, batches, sizes

| figure | bar |
|---|---|
| points of accuracy that batch 512 with linear scaling and warm-up is below batch 64, means of five seeds | at most 0.3 |

mnist-mlp of width 1024, five epochs, serial, its rate of 0.05 with momentum 0.9 taken as chosen for batch 64. Arms at batch
512: the own rate, linear scaling without warm-up and with one of two epochs, square root. The same rules over batches from 64
to 8,192, three seeds. One sample at a time, 64, 4,096 and the whole set (gradient descent), one seed: steps, accuracy, time.
The noise scale is measured over the epochs of batch 64, from two micro-batches. Accuracies do not hang on what else the
machine does; the times of the third table do. --quick: one seed, one epoch.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

from arms import SPREAD, Arm, apart, beside, of, spread, trained
from common import Bench
from pages import DOCS, FIGURES, filled, table
from plots import panels

import paragrad as pg
from paragrad.record.noise_scale import noise_of

OWN, OWN_RATE = 64, "own rate"
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
RULES: dict[str, dict[str, Any]] = {
    OWN_RATE: {}, "linear": {"scale_lr": "linear"}, "linear, warm-up": {"scale_lr": "linear", "warm_up": 2},
    "square root": {"scale_lr": "sqrt"}}
BEST = "linear, warm-up"
NEAR = 0.5              # points of accuracy below batch 64: until there a rule holds
PARTS = ("arms", "batches", "sizes")
PAGE, PLOT = DOCS / "large_batch.md", FIGURES / "large_batch.svg"


def arm(batch: int, rule: str, epochs: int, text: str = "serial") -> Arm:
    def made(seed: int) -> tuple[pg.Job, str]:
        job = pg.job("mnist-mlp", width=1024).replace(batch=OWN, own_batch=OWN, epochs=epochs)
        return job.replace(batch=batch, **RULES[rule]), text
    return made


def read(run: pg.Run) -> dict[str, Any]:
    return {"accuracy": run.test, "steps": float(len(run.losses)), "seconds": run.end["seconds"],
            "noise": [(each.step, each.scale) for each in noise_of(run.steps()) if each.scale][::-50][::-1]}


# ---- what is measured --------------------------------------------------------------------------------------------------------
def arms(bench: Bench, run: Callable[..., Any], epochs: int) -> None:
    found = run({OWN: arm(OWN, OWN_RATE, epochs), **{rule: arm(512, rule, epochs) for rule in RULES}},
                bench.rounds(5, quick=1))
    bench.measured["arms"] = {str(name): each for name, each in found.items()}
    lost, error = apart(of(found, OWN, "accuracy"), of(found, BEST, "accuracy"))
    bench.figure("points of accuracy, batch 64 over 512 with linear scaling and warm-up", lost, at_most=0.3)
    bench.figure("standard error of that", error)
    for rule in RULES:
        bench.figure(f"accuracy [%] at 512, {rule}", of(found, rule, "accuracy"))


def batches(bench: Bench, run: Callable[..., Any], epochs: int) -> None:
    found = run({(rule, batch): arm(batch, rule, epochs) for batch in BATCHES for rule in RULES
                 if batch != OWN or rule == OWN_RATE}, bench.rounds(3, quick=1))
    found = {(rule, OWN): found[OWN_RATE, OWN] for rule in RULES} | found       # of the own batch all rules are one
    noisy = run({"": arm(OWN, OWN_RATE, epochs, "serial(micro=2)")}, 1, noise_scale=1)[""][0]["noise"]
    bench.measured |= {"batches": [[*name, each] for name, each in found.items()], "noise": noisy}
    bench.figure("noise scale in the end", noisy[-1][1])
    for rule in RULES:
        bench.figure(f"largest batch within {NEAR} points of 64, {rule}", until(found, rule))


def until(found: dict[Any, Any], rule: str) -> int:
    """The largest batch up to which all are near what the job's own one comes to, in the mean."""
    own = mean(of(found, (rule, OWN), "accuracy"))
    near = itertools.takewhile(lambda batch: mean(of(found, (rule, batch), "accuracy")) >= own - NEAR, BATCHES)
    return max(near)


def sizes(bench: Bench, run: Callable[..., Any], epochs: int) -> None:
    found = run({(rule, batch): arm(batch, rule, epochs) for batch in (1, OWN, 4096, 60_000) for rule in (OWN_RATE, "linear")
                 if (rule, batch) != ("linear", OWN)}, 1)
    bench.measured["sizes"] = [[*name, each] for name, each in found.items()]


# ---- the page ----------------------------------------------------------------------------------------------------------------
def page(bench: Bench) -> None:
    bench.keep(FIGURES / f"{'_'.join(['large_batch', *(bench.options.only or ())])}.json")
    text, measured = PAGE.read_text(), bench.measured
    if found := measured.get("arms"):
        text = filled(text, "arms", table(["batch", "accuracy [%]", "points beside batch 64"], [
            [f"{OWN}, own rate" if name == str(OWN) else f"512, {name}", spread(of(found, name, "accuracy")),
             "" if name == str(OWN) else beside(of(found, name, "accuracy"), of(found, str(OWN), "accuracy"))]
            for name in found]) + SPREAD)
    if "batches" in measured:
        text = filled(text, "batches", over_batches({(rule, batch): each for rule, batch, each in measured["batches"]},
                                                    measured["noise"]))
    if "sizes" in measured:
        text = filled(text, "sizes", table(["batch", "rate", "steps", "accuracy [%]", "seconds"], [
            [f"{batch:,}", rule, *(("", "failed: " + each["failed"].partition(": ")[2], "") if "failed" in each else
                                   (f"{each['steps']:,.0f}", f"{each['accuracy']:.2f}", f"{each['seconds']:.1f}"))]
            for rule, batch, (each,) in measured["sizes"]]))
    PAGE.write_text(text)


def over_batches(found: dict[Any, Any], noisy: list[tuple[int, float]]) -> str:
    """Table, plot, and where each rule ends."""
    rows = [[f"{batch:,}", *(spread(of(found, (rule, batch), "accuracy")) for rule in RULES)] for batch in BATCHES]

    def draw(axes: Any) -> None:
        for rule in RULES:
            axes[0].plot(BATCHES, [mean(of(found, (rule, batch), "accuracy")) for batch in BATCHES], marker="o", markersize=3,
                         label=rule)
        axes[0].set(xscale="log", xlabel="batch", ylabel="accuracy [%]", ylim=(90, 99))
        axes[0].axvline(noisy[-1][1], linestyle=":", color="gray", label="noise scale in the end")
        axes[1].plot(*zip(*noisy, strict=True), color="gray")
        axes[1].set(xlabel="steps of batch 64", ylabel="noise scale", yscale="log")
    panels(PLOT, 2, 300, draw)
    told = "accuracy over batches by rule, and the noise scale over the steps of batch 64"
    ends = ", ".join(f"{rule} {until(found, rule):,}" for rule in RULES)
    quarter = noisy[len(noisy) // 4][1]
    return (f"{table(['batch', *RULES], rows)}\n\n![{told.capitalize()}](figures/{PLOT.name})\n\n"
            f"{told.capitalize()}. Within {NEAR} points of batch 64 is, up to a batch of: {ends}. The noise scale, measured "
            f"from two micro-batches of batch 64, was {quarter:,.0f} after a quarter of the steps, and {noisy[-1][1]:,.0f} "
            "in the end.")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder of mnist")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone")
    parser.add_argument("--page", action="store_true", help="write docs/large_batch.md, its figures and its plot")


def main() -> None:
    bench = Bench(__doc__, options)
    run = partial(trained, read=read, data=bench.options.data)
    for name, part in zip(PARTS, (arms, batches, sizes), strict=True):
        if name in (bench.options.only or PARTS):
            part(bench, run, 1 if bench.quick else 5)
    if bench.options.page:
        page(bench)
    bench.finish()


if __name__ == "__main__":
    main()
