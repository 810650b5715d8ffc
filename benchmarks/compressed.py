"""Compressed gradients on four workers: how much accuracy they cost, and how much time they save on
slow links.

    python benchmarks/compressed.py --check --data DIR
    # the same, written into docs/results/compression.md
    python benchmarks/compressed.py --check --page --data DIR
    # a part: accuracy, correction, links
    python benchmarks/compressed.py --only links --data DIR

| figure | bar |
|---|---|
| points of accuracy that dgc(0.01), and dgc(0.001), are below dense | at most 0.3, and 0.6 |
| bytes of a step after warm-up, dense along a ring over theirs | at least 20, and 100 |
| time of a step of DDP over gloo over dgc(0.001), dgc(0.01), bf16: hosts at 100 Mbit/s | at least 8, 5, 1.8 |
| the same of the time to 97 %: dgc(0.01) | at least 4 |

The job is mnist-mlp of width 1024, with batches of 128. --quick uses one seed and two epochs.

Accuracy: ten epochs, three seeds.

Correction: four compressors with five seeds: top_k(0.001), where SGD applies its momentum after the
compression; dgc without masking and without warm-up; dgc without warm-up; and dgc itself. The same
for mnist-cnn with its five epochs. The figures are differences of means, with standard errors.

Links: hosts of this machine (needs root and iproute2) at 100 Mbit/s and at 1 Gbit/s, and ranks of
one host. Whole trainings, timed by their records, and a loop over DDP run in turn. The figures are
medians of a step, without warm-up. The time to 97 % is the time of the steps to the first test
above 97 %. A test runs after each epoch, and the median of three seeds counts. Bytes are those of
the rank that sends most; for DDP, those of data(4). No other program may run during this part.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
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
from common import Bench, compute_step_milliseconds, measure_in_turn, ratios
from hosts import Cluster, hosts
from pages import DOCS, FIGURES, fill_block, find_results_file, format_plot, table
from plots import draw_panels
from trainings import train_with_ddp
from workers import TORCHRUN

import paragrad as pg
from paragrad.commands.train import train
from paragrad.record.record import Record

RANKS = 4
BATCH = 128
GOAL = 97.0
RING = "data(4, reduce=ring)"
DENSE = "data(4, state=replicated)"
CORRECTED = (
    "top_k(0.001)",
    "dgc(0.001, warmup=0, masking=false)",
    "dgc(0.001, warmup=0)",
    "dgc(0.001)",
)
# the compressors with which others are compared: without the correction, and without masking
BASES = CORRECTED[:2]
EVERY = (
    "bf16",
    "fp16",
    "int8",
    "one_bit",
    "threshold(0.001)",
    "power_sgd(1)",
    "power_sgd(4)",
    "top_k(0.01)",
    "top_k(0.001)",
    "dgc(0.01, warmup=0)",
    "dgc(0.001, warmup=0)",
)
DDP = "DDP"
SPARSE = "dgc(0.01, warmup=0)"
LINKS = {"100 Mbit/s": 100, "1 Gbit/s": 1000, "one host": None}
PARTS = ("accuracy", "correction", "links")
PAGE = DOCS / "results" / "compression.md"
TOLD = (
    "milliseconds of a step, by link. They are of the first steps, in which `threshold` sends more "
    "than in the last epoch, from which the bytes are"
)


def format_strategy(compressor: str) -> str:
    return f"data({RANKS}, compress={compressor})"


def make_wide_job() -> pg.Job:
    return pg.job("mnist-mlp", width=1024)


def make_arm(job: pg.Job, text: str) -> Arm:
    return lambda seed: (job, text)


def read(run: pg.Run) -> dict[str, Any]:
    """Return the numbers of a run. Bytes are those of the rank that sends most."""
    record = Record(run.folder, spans=False)
    each = [
        [
            sum(kind["bytes"] for kind in line["sent"].values())
            for line in record.select_lines("step", rank)
        ]
        for rank in range(RANKS)
    ]
    per = max(each, key=sum)
    tests = [line["test"]["value"] for line in record.select_lines("epoch")]
    steps = len(per) // len(tests)
    return {
        "accuracy": run.test,
        "bytes of a step": median(per[-steps:]),
        "bytes": float(sum(per)),
        "bytes until": [sum(per[: steps * epoch]) for epoch in range(1, len(tests) + 1)],
        "epochs": next((number for number, value in enumerate(tests, 1) if value >= GOAL), None),
        "steps": len(per),
        "tests": tests,
    }


# ---- accuracy --------------------------------------------------------------------------------
def measure_accuracies(bench: Bench, data: str) -> None:
    job = make_wide_job().replace(epochs=2 if bench.quick else 10)
    found = train_arms(
        {
            "dense": make_arm(job, RING),
            **{text: make_arm(job, format_strategy(text)) for text in ("dgc(0.01)", "dgc(0.001)")},
        },
        bench.rounds(3, quick=1),
        read,
        bench.options.so_far,
        data=data,
    )
    bench.measured["accuracy"] = found
    for text, points, times in (("dgc(0.01)", 0.3, 20), ("dgc(0.001)", 0.6, 100)):
        lost, error = compute_mean_difference(
            select_values(found, "dense", "accuracy"), select_values(found, text, "accuracy")
        )
        bench.figure(f"points of accuracy, dense over {text}", lost, at_most=points)
        bench.figure(f"dense over {text}: standard error of that", error)
        bench.figure(
            f"bytes of a step, dense over {text}",
            ratios(
                select_values(found, "dense", "bytes of a step"),
                select_values(found, text, "bytes of a step"),
            ),
            at_least=times,
        )
        bench.figure(
            f"bytes of the run, dense over {text}",
            ratios(select_values(found, "dense", "bytes"), select_values(found, text, "bytes")),
        )


def measure_corrections(bench: Bench, data: str) -> None:
    jobs = {"mnist-mlp": make_wide_job().replace(epochs=10), "mnist-cnn": pg.job("mnist-cnn")}
    for name, job in jobs.items():
        job = job.replace(epochs=2) if bench.quick else job
        texts = [
            text.replace("dgc(0.001)", "dgc(0.001, warmup=1)") if job.epochs < 10 else text
            for text in CORRECTED
        ]
        found = train_arms(
            {
                "dense": make_arm(job, DENSE),
                **{text: make_arm(job, format_strategy(text)) for text in texts},
            },
            bench.rounds(5, quick=1),
            read,
            bench.options.so_far,
            data=data,
        )
        bench.measured[f"correction, {name}"] = found
        for base, text in (
            (base, text) for base in BASES for text in texts if text not in (base, *BASES[:1])
        ):
            difference, error = compute_mean_difference(
                select_values(found, text, "accuracy"), select_values(found, base, "accuracy")
            )
            bench.figure(f"{name}: points of accuracy, {text} over {base}", difference)
            bench.figure(f"{name}: standard error, {text} over {base}", error)


# ---- links -----------------------------------------------------------------------------------
def measure_training(
    cluster: Cluster | None, folder: Path, text: str, data: str, steps: int
) -> float:
    """Run a whole training, and return the milliseconds of a step."""
    place = Path(tempfile.mkdtemp(dir=folder))
    if cluster is None:
        train(
            make_wide_job().replace(test=None, metric=None),
            text,
            runs=place,
            limit=steps,
            data=data,
            backend="gloo",
        )
    else:
        cluster.run(
            [str(Path(__file__).resolve()), "--worker", text, str(place), str(steps)], timeout=900
        )
    (run,) = place.iterdir()
    return compute_step_milliseconds(
        [line["start"] for line in Record(run).select_lines("step", 0)]
    )


def measure_ddp(cluster: Cluster | None, folder: Path, steps: int) -> float:
    """Run a loop over DDP, and return the milliseconds of a step."""
    words = [str(Path(__file__).resolve()), "--worker", DDP, str(folder), str(steps)]
    if cluster is not None:
        return float(cluster.run(words, timeout=900)[0].split()[-1])
    said = subprocess.run(
        [*TORCHRUN, str(RANKS), *words], stdout=subprocess.PIPE, text=True, check=True, timeout=900
    ).stdout
    return float(said.split()[-1])


def run_worker(text: str, folder: str, steps: str) -> None:
    if text != DDP:
        train(
            make_wide_job().replace(test=None, metric=None),
            text,
            runs=folder,
            limit=int(steps),
            data=os.environ["PARAGRAD_DATA"],
        )
        return
    starts = train_with_ddp(make_wide_job(), BATCH, int(steps), Path(os.environ["PARAGRAD_DATA"]))
    print(compute_step_milliseconds(starts))


def measure_links(bench: Bench, data: str) -> None:
    """Measure the time of a step on all links, and the steps to the goal on one host.

    The steps to the goal do not depend on the link.
    """
    job = make_wide_job().replace(epochs=3)  # most compressors reach the goal in two epochs
    goals = train_arms(
        {text: make_arm(job, format_strategy(text)) for text in EVERY}
        | {DDP: make_arm(job, DENSE)},
        bench.rounds(3, quick=1),
        read,
        bench.options.so_far,
        data=data,
    )
    steps_to = {
        text: median(
            each["steps"] / len(each["tests"]) * (each["epochs"] or math.inf)
            if "tests" in each
            else math.inf
            for each in runs
        )
        for text, runs in goals.items()
    }
    bench.measured |= {"to 97 %": goals, "milliseconds": {}}
    for name, megabits in LINKS.items():
        with tempfile.TemporaryDirectory() as folder:

            def measure_cluster(
                cluster: Cluster | None, steps: int, folder: Path = Path(folder)
            ) -> dict[str, list[float]]:
                return measure_in_turn(
                    {
                        DDP: partial(measure_ddp, cluster, folder, steps),
                        **{
                            text: partial(
                                measure_training,
                                cluster,
                                folder,
                                format_strategy(text),
                                data,
                                steps,
                            )
                            for text in EVERY
                        },
                    },
                    bench.rounds(3, quick=1),
                )

            if megabits is None:
                found = measure_cluster(None, 60)
            else:
                with hosts(RANKS, megabits=megabits) as cluster:
                    found = measure_cluster(cluster, 20)
        bench.measured["milliseconds"][name] = found
        slow = megabits == 100
        for text, bar in (("dgc(0.001, warmup=0)", 8), ("dgc(0.01, warmup=0)", 5), ("bf16", 1.8)):
            bench.figure(
                f"{name}: time of a step, DDP over {text}",
                ratios(found[DDP], found[text]),
                at_least=bar if slow else None,
            )
        times = {text: median(found[text]) * count for text, count in steps_to.items()}
        for text in (SPARSE, "dgc(0.001, warmup=0)"):
            bench.figure(
                f"{name}: time to {GOAL:g} %, DDP over {text}",
                times[DDP] / times[text],
                at_least=4 if slow and text == SPARSE else None,
            )
        bench.measured[f"seconds to {GOAL:g} %, {name}"] = {
            text: each / 1e3 for text, each in times.items()
        }


# ---- the page --------------------------------------------------------------------------------
def write_page(bench: Bench) -> None:
    bench.keep(find_results_file("compressed", bench.options.only))
    text = PAGE.read_text()
    measured = bench.measured
    if "accuracy" in measured:
        found = measured["accuracy"]
        plot_bytes(found)
        text = fill_block(
            text,
            "accuracy",
            table(
                ["", "accuracy [%]", "bytes of a step", "bytes of the run"],
                [
                    [
                        f"`{name}`" if "(" in name else name,
                        format_mean(select_values(found, name, "accuracy")),
                        f"{median(select_values(found, name, 'bytes of a step')):,.0f}",
                        f"{median(select_values(found, name, 'bytes')):,.0f}",
                    ]
                    for name in found
                ],
            )
            + format_plot(
                "compressed_bytes",
                "accuracy of the first seed, epoch by epoch, over what the rank that sends most "
                "has sent",
            ),
        )
    for job in ("mnist-mlp", "mnist-cnn"):
        if (found := measured.get(f"correction, {job}")) is not None:

            def format_difference(name: str, base: str, found: Mapping[str, Any] = found) -> str:
                return (
                    ""
                    if name in (base, "dense")
                    else format_mean_difference(
                        select_values(found, name, "accuracy"),
                        select_values(found, base, "accuracy"),
                    )
                )

            head = ["", "accuracy [%]", *(f"points beside `{base}`" for base in BASES)]
            text = fill_block(
                text,
                f"correction {job}",
                table(
                    head,
                    [
                        [
                            f"`{name}`" if "(" in name else name,
                            format_mean(select_values(found, name, "accuracy")),
                            *(format_difference(name, base) for base in BASES),
                        ]
                        for name in found
                    ],
                )
                + SPREAD,
            )
    if "milliseconds" in measured:
        plot_links(measured["milliseconds"])

        def format_link(name: str, each: str) -> str:
            to = measured[f"seconds to {GOAL:g} %, {name}"][each]
            return f"{median(measured['milliseconds'][name][each]):.3g}, " + (
                f"{to:.3g}" if math.isfinite(to) else "-"
            )

        head = [
            "",
            "bytes of a step",
            *(f"{name}: ms a step, and s to {GOAL:g} %" for name in LINKS),
        ]
        text = fill_block(
            text,
            "links",
            table(
                head,
                [
                    [
                        f"`{each}`" if each != DDP else "DDP over gloo",
                        f"{median(select_values(measured['to 97 %'], each, 'bytes of a step')):,.0f}",
                        *(format_link(name, each) for name in LINKS),
                    ]
                    for each in (DDP, *EVERY)
                ],
            )
            + format_plot("compressed_links", TOLD),
        )
    PAGE.write_text(text)


def plot_bytes(found: Mapping[str, Any]) -> None:
    def draw(axes: Any) -> None:
        for name, (first, *_) in found.items():
            axes[0].plot(
                [each / 1e6 for each in first["bytes until"]],
                first["tests"],
                marker="o",
                markersize=3,
                label=name,
            )
        axes[0].set(xscale="log", xlabel="MB sent", ylabel="accuracy [%]")

    draw_panels(FIGURES / "compressed_bytes.svg", 1, 300, draw)


def plot_links(found: Mapping[str, Mapping[str, list[float]]]) -> None:
    def draw(axes: Any) -> None:
        for each, (name, times) in zip(axes, found.items(), strict=True):
            each.barh(
                list(times)[::-1], [median(values) for values in times.values()][::-1], color="gray"
            )
            each.set(title=name, xlabel="ms a step")
            each.set_yticks(
                range(len(times)), list(times)[::-1] if each is axes[0] else [""] * len(times)
            )

    draw_panels(FIGURES / "compressed_links.svg", len(found), 320, draw)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder with MNIST")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the tables of docs/results/compression.md, and its figures",
    )
    parser.add_argument(
        "--so-far",
        type=Path,
        metavar="FILE",
        help="use the results of earlier trainings in FILE, and add the new ones",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        run_worker(*bench.options.worker)
        return
    data = str(Path(bench.options.data).resolve())
    os.environ["PARAGRAD_DATA"] = data
    for name, part in zip(
        PARTS, (measure_accuracies, measure_corrections, measure_links), strict=True
    ):
        if name in (bench.options.only or PARTS):
            part(bench, data)
    if bench.options.page:
        write_page(bench)
    bench.finish()


if __name__ == "__main__":
    main()
