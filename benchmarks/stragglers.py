"""Slow workers, always slow or only sometimes: which strategies wait for them, and which do not.

    python benchmarks/stragglers.py --check --data DIR
    # the same, written into docs/results/stragglers.md
    python benchmarks/stragglers.py --check --page --data DIR

| figure | bar |
|---|---|
| samples a second, one worker always 3x slower: server(4, sync=asp) over server(4) | at least 1.8 |
| the same, data(4, shares=auto) over data(4), in their second epoch | at least 1.5 |
| samples a second, every worker 3x slower in a random fifth of its steps: server(4, sync=asp) over server(4) | at least 1.3 |
| the same, server(4, sync=ssp(4)) over server(4) | at least 1.3 |
| points of accuracy that asp and ssp(4) are below server(4), means of the seeds | at most 0.5 |

Each run trains mnist-mlp for one epoch (two for `data`), with three seeds. A worker waits until the
step of a full share has taken 50 ms; for other shares the time is in proportion. So the speed of
the cores does not matter.

Samples a second are those of an epoch, from the beginning of its first step to the end of its last
step. The plot is of the first seed. It shows the mean loss of every hundred shares in a row, over
the seconds since the first step of the run. There are figures without a bar: bsp with a backup
worker, and local(4, every=16).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from statistics import mean
from typing import Any

from common import Bench, ratios
from pages import DOCS, FIGURES, fill_block, format_plot, table
from plots import draw_panels

import paragrad as pg
from paragrad.record.record import Line, Record
from paragrad.record.sample_count import count_range_samples
from paragrad.report.charts import COLOURS

BSP = "server(4)"
ASP = "server(4, sync=asp)"
SSP = "server(4, sync=ssp(4))"
BACKUP = "server(4, sync=bsp(backup=1))"
DATA = "data(4)"
AUTO = "data(4, shares=auto)"
LOCAL = "local(4, every=16)"
ALWAYS = "1=3x"
SOMETIMES = "random:0.2=3x"
CASES = {
    ALWAYS: (BSP, BACKUP, SSP, ASP, DATA, AUTO, LOCAL),
    SOMETIMES: (BSP, BACKUP, SSP, ASP, LOCAL),
}
PACE = 0.05
PAGE = DOCS / "results" / "stragglers.md"
RESULTS = FIGURES / "stragglers.json"
PLOT = FIGURES / "stragglers.svg"
TOLD = (
    "The loss over seconds, of the first seed: one worker always 3x slower, and a random fifth of "
    "all steps 3x slower"
)


def list_steps(run: pg.Run) -> list[Line]:
    """Return the steps of all workers, in the order in which they ended."""
    record = Record(run.folder, spans=False)
    return sorted(
        (line for lines in record.ranks for line in lines if line["kind"] == "step"),
        key=lambda line: float(line["start"] + line["seconds"]),
    )


def compute_rates(run: pg.Run) -> list[float]:
    """Return the samples per second of every epoch."""
    epochs: dict[int, list[Line]] = defaultdict(list)
    for line in list_steps(run):
        epochs[line["epoch"]].append(line)
    return [
        sum(count_range_samples(line["order"]) for line in lines)
        / (
            max(line["start"] + line["seconds"] for line in lines)
            - min(line["start"] for line in lines)
        )
        for _, lines in sorted(epochs.items())
    ]


def compute_losses(run: pg.Run) -> list[tuple[float, float]]:
    """Return pairs (seconds, mean loss of the hundred shares before this time)."""
    lines = list_steps(run)
    begun = min(line["start"] for line in lines)
    parts = [lines[first : first + 100] for first in range(0, len(lines), 100)]
    return [
        (
            part[-1]["start"] + part[-1]["seconds"] - begun,
            sum(line["loss"][0] for line in part) / sum(line["loss"][1] for line in part),
        )
        for part in parts
    ]


def plot_losses(curves: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    def draw(axes: Any) -> None:
        for each, (slow, found) in zip(axes, curves.items(), strict=True):
            for number, text in enumerate(CASES[ALWAYS]):
                if text in found:
                    each.plot(
                        *zip(*found[text], strict=True),
                        label=text,
                        color=COLOURS[number],
                        linewidth=1,
                    )
            each.set(title=f"--slow {slow}", xlabel="seconds", ylabel="loss", yscale="log")

    draw_panels(PLOT, len(curves), 300, draw)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("PARAGRAD_DATA"), help="folder with MNIST")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/results/stragglers.md, and its figures",
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    found: dict[str, dict[str, list[float]]] = {slow: defaultdict(list) for slow in CASES}
    tested: dict[str, list[float]] = defaultdict(list)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {slow: {} for slow in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(bench.rounds(3, quick=1)):
            for slow, texts in CASES.items():
                for text in texts:
                    job = pg.job("mnist-mlp").replace(
                        epochs=2 if text in (DATA, AUTO) else 1, seed=seed
                    )
                    run = pg.train(
                        job, text, runs=folder, data=bench.options.data, slow=slow, pace=PACE
                    )
                    found[slow][text].append(compute_rates(run)[-1])
                    curves[slow].setdefault(text, compute_losses(run))
                    if text not in (DATA, AUTO):
                        tested[text].append(run.test)
                    print(
                        f"seed {seed}, {slow}: {text} {found[slow][text][-1]:.0f} samples/s, "
                        f"{run.test:.2f} %",
                        flush=True,
                    )
    bench.measured.update(rates=found, accuracies=tested)
    bench.figure(
        f"{ALWAYS}: asp over bsp", ratios(found[ALWAYS][ASP], found[ALWAYS][BSP]), at_least=1.8
    )
    bench.figure(
        f"{ALWAYS}: shares=auto over data",
        ratios(found[ALWAYS][AUTO], found[ALWAYS][DATA]),
        at_least=1.5,
    )
    bench.figure(
        f"{SOMETIMES}: asp over bsp",
        ratios(found[SOMETIMES][ASP], found[SOMETIMES][BSP]),
        at_least=1.3,
    )
    bench.figure(
        f"{SOMETIMES}: ssp(4) over bsp",
        ratios(found[SOMETIMES][SSP], found[SOMETIMES][BSP]),
        at_least=1.3,
    )
    for text in (ASP, SSP):
        bench.figure(
            f"points of accuracy below bsp, {text}",
            mean(tested[BSP]) - mean(tested[text]),
            at_most=0.5,
        )
    if bench.options.page:
        bench.keep(RESULTS)
        rows = [
            [
                f"`{text}`",
                *(f"{mean(found[slow][text]):,.0f}" if found[slow][text] else "" for slow in CASES),
                f"{mean(tested[text]):.2f}" if text in tested else "",
            ]
            for text in CASES[ALWAYS]
        ]
        head = [
            "strategy",
            "one always 3x slower (`--slow 1=3x`)",
            "a random fifth of all steps 3x slower",
            "accuracy [%]",
        ]
        plot_losses(curves)
        block = f"{table(head, rows)}{format_plot(PLOT.stem, TOLD)}"
        PAGE.write_text(fill_block(PAGE.read_text(), "stragglers", block))
    bench.finish()


if __name__ == "__main__":
    main()
