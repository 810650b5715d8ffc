"""Larger batches at equal epochs: with the job's own rate, and by rules for another one; and what the noise scale says of them.

    python benchmarks/large_batch.py --check --data DIR
    python benchmarks/large_batch.py --check --page --data DIR      # the same, written into docs/large_batch.md

| figure | bar |
|---|---|
| points of accuracy that batch 512 with linear scaling and warm-up is below batch 64, means of five seeds | at most 0.3 |

mnist-mlp of width 1024, five epochs, written for batch 64 at a rate of 0.05 with momentum 0.9, serial. Arms at batch 512: the
own rate, linear scaling without warm-up and with one of two epochs, square root. The same rules over batches from 64 to 8,192,
three seeds. One sample at a time, 64, 4,096 and the whole set (gradient descent), one seed: steps, accuracy, time. The noise
scale is measured over the epochs of batch 64, from two micro-batches. Accuracies do not hang on what else the machine does; the
times of the third table do. --quick: one seed, one epoch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any

from arms import Arm, apart, of, spread, trained
from common import Bench
from pages import DOCS, FIGURES, filled, table
from plots import panels

import paragrad as pg
from paragrad.record.noise_scale import noise_of

OWN = 64
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
RULES: dict[str, dict[str, Any]] = {
    "own rate": {}, "linear": {"scale_lr": "linear"}, "linear, warm-up": {"scale_lr": "linear", "warm_up": 2},
    "square root": {"scale_lr": "sqrt"}}
BEST = "linear, warm-up"
PAGE, RESULTS, PLOT = DOCS / "large_batch.md", FIGURES / "large_batch.json", FIGURES / "large_batch.svg"


def arm(batch: int, rule: str, epochs: int, text: str = "serial") -> Arm:
    def made(seed: int) -> tuple[pg.Job, str]:
        job = pg.job("mnist-mlp", width=1024).replace(batch=OWN, own_batch=OWN, epochs=epochs)
        return job.replace(batch=batch, **RULES[rule]), text
    return made


def read(run: pg.Run) -> dict[str, Any]:
    return {"accuracy": run.test, "steps": float(len(run.losses)), "seconds": run.end["seconds"],
            "noise": [(each.step, each.scale) for each in noise_of(run.steps()) if each.scale][::-50][::-1]}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder of mnist")
    parser.add_argument("--page", action="store_true", help="write docs/large_batch.md, its figures and its plot")


def main() -> None:
    bench = Bench(__doc__, options)
    epochs = 1 if bench.quick else 5
    run = partial(trained, read=read, data=bench.options.data)
    fixed = run({OWN: arm(OWN, "own rate", epochs), **{rule: arm(512, rule, epochs) for rule in RULES}},
                bench.rounds(5, quick=1))
    swept = run({(rule, batch): arm(batch, rule, epochs) for batch in BATCHES for rule in RULES}, bench.rounds(3, quick=1))
    sizes = run({(rule, batch): arm(batch, rule, epochs) for batch in (1, 64, 4096, 60_000) for rule in ("own rate", "linear")},
                1)
    noisy = run({"": arm(OWN, "own rate", epochs, "serial(micro=2)")}, 1, noise_scale=1)[""][0]["noise"]
    bench.measured |= {"at 512": {str(name): each for name, each in fixed.items()}, "noise": noisy,
                       "over batches": [[*name, each] for name, each in swept.items()],
                       "sizes": [[*name, each] for name, each in sizes.items()]}
    lost, error = apart(of(fixed, OWN, "accuracy"), of(fixed, BEST, "accuracy"))
    bench.figure("points of accuracy, batch 64 over 512 with linear scaling and warm-up", lost, at_most=0.3)
    bench.figure("standard error of that", error)
    bench.figure("noise scale in the end", noisy[-1][1])
    for rule in RULES:
        bench.figure(f"accuracy [%] at 512, {rule}", of(fixed, rule, "accuracy"))
    if bench.options.page:
        page(bench, fixed, swept, sizes, noisy)
    bench.finish()


def page(bench: Bench, fixed: Mapping[Any, Any], swept: Mapping[Any, Any], sizes: Mapping[Any, Any],
         noisy: list[tuple[int, float]]) -> None:
    bench.keep(RESULTS)
    arms = [[f"{OWN}, own rate" if name == OWN else f"512, {name}", spread(of(fixed, name, "accuracy")),
             "" if name == OWN else "{:+.2f} ± {:.2f}".format(*apart(of(fixed, name, "accuracy"), of(fixed, OWN, "accuracy")))]
            for name in fixed]
    over = [[f"{batch:,}", *(spread(of(swept, (rule, batch), "accuracy")) for rule in RULES)] for batch in BATCHES]
    one = [[f"{batch:,}", rule, *((each["failed"], "", "") if "failed" in each else
                                  (f"{each['steps']:,.0f}", f"{each['accuracy']:.2f}", f"{each['seconds']:.1f}"))]
           for (rule, batch), (each,) in sizes.items()]
    text = filled(PAGE.read_text(), "arms", table(["batch", "accuracy [%]", "beside batch 64"], arms))
    text = filled(text, "batches", table(["batch", *RULES], over))
    PAGE.write_text(filled(text, "sizes", table(["batch", "rate", "steps", "accuracy [%]", "seconds"], one)))

    def draw(axes: Any) -> None:
        for rule in RULES:
            axes[0].plot(BATCHES, [mean(of(swept, (rule, batch), "accuracy")) for batch in BATCHES], marker="o", markersize=3,
                         label=rule)
        axes[0].set(xscale="log", xlabel="batch", ylabel="accuracy [%]", ylim=(90, 99))
        axes[0].axvline(noisy[-1][1], linestyle=":", color="gray", label="noise scale")
        axes[1].plot(*zip(*noisy, strict=True), color="gray")
        axes[1].set(xlabel="steps of batch 64", ylabel="noise scale", yscale="log")
    panels(PLOT, 2, 300, draw)


if __name__ == "__main__":
    main()
