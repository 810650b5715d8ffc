"""The page of the ring-versus-tree experiment and its plots, made from the results of
ring_vs_tree.py.

The text of docs/results/ring_vs_tree.md is written by hand. This module writes the blocks between
`<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import ring_vs_tree_tables as tables
from common import Bench
from matplotlib.ticker import LogLocator, NullFormatter
from pages import DOCS, FIGURES, fill_block
from plots import draw_panels
from ring_vs_tree_tables import (
    NAMES,
    ORDER,
    STEPS,
    Found,
    group_by_ranks,
    group_by_width,
    predict_step,
)

from paragrad.report.charts import COLOURS, MARKERS

PAGE = DOCS / "results" / "ring_vs_tree.md"


def add_accuracy_figures(bench: Bench, found: Found) -> None:
    """Add the figures of the accuracies, with their bars."""
    rows = [row for row in found["rows"] if row["width"] == 256]
    serial = fmean(rows[0]["tests"])
    of_two = [row["digests"] for row in rows if row["strategy"].startswith("data(2,")]
    bench.figure(
        "different final parameters at 2 ranks, over algorithms",
        max(len(set(seed)) for seed in zip(*of_two, strict=True)),
        at_most=1,
    )
    away = [
        abs(row["mean"] - serial)
        for row in rows
        if row["strategy"].startswith(("data(4,", "data(8,"))
    ]
    if away:
        bench.figure(
            "accuracy at 4 and 8 ranks less serial's mean, the farthest", max(away), at_most=0.25
        )


def write_page(found: Found) -> None:
    """Draw the plots and write the tables of the parts that have results. The blocks of the other
    parts do not change.
    """
    text = PAGE.read_text()
    for name, (parts, table, draw, told) in BLOCKS.items():
        if set(parts) <= set(found):
            block = table(found)
            if draw:
                draw(found, FIGURES / f"ring_vs_tree_{name}.svg")
                block = f"![{told}](../figures/ring_vs_tree_{name}.svg)\n\n{block}"
            text = fill_block(text, name, block)
    PAGE.write_text(text)


# ---- plots -----------------------------------------------------------------------------------
def plot_exchanges(axes: Any, points: Sequence[Found], over: Callable[[Found], float]) -> None:
    """Plot the times of exchanges.

    Dots with bars are measured: the median, the lowest and the highest. Lines are the clock's
    predictions. Dotted lines are closed forms.
    """
    for number, series in enumerate(ORDER):
        mine = sorted((point for point in points if point["series"] == series), key=over)
        look: Found = {"color": COLOURS[number]}
        done = [point for point in mine if point.get("measured")]
        axes.errorbar(
            [over(point) for point in done],
            [median(point["measured"]) for point in done],
            compute_error_bars(done),
            linestyle="none",
            marker=MARKERS[number],
            markersize=4,
            elinewidth=1,
            label=NAMES.get(series, series),
            **look,
        )
        for key, dashes in (("clock", "-"), ("form", ":")):
            told = [point for point in mine if point.get(key)]
            axes.plot(
                [over(point) for point in told],
                [point[key] for point in told],
                linestyle=dashes,
                linewidth=1,
                **look,
            )
    make_logarithmic(axes, over(points[0]) if points else 1)


def compute_error_bars(points: Sequence[Found]) -> list[list[float]]:
    """Return the distances from each median to the lowest and to the highest measurement."""
    middle = [(point["measured"], median(point["measured"])) for point in points]
    return [
        [value - min(taken) for taken, value in middle],
        [max(taken) - value for taken, value in middle],
    ]


def make_logarithmic(axes: Any, first: float) -> None:
    """Make both axes logarithmic, with plain numbers. An axis of ranks has powers of two."""
    axes.set(yscale="log")
    if isinstance(first, int):
        axes.set_xscale("log", base=2)
    else:
        axes.set(xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


def draw_sizes(found: Found, path: Path) -> None:
    def draw(axes: Sequence[Any]) -> None:
        for each, (title, points) in zip(axes, group_by_width(found).items(), strict=True):
            plot_exchanges(each, points, lambda point: point["bytes"] / 1e6)
            each.set_title(title, fontsize=9)
            each.set(xlabel="MB of gradients", ylabel="seconds of an exchange")

    draw_panels(path, 2, 330, draw)


def draw_ranks(found: Found, path: Path) -> None:
    def draw(axes: Sequence[Any]) -> None:
        for number, (each, (title, points)) in enumerate(
            zip(axes, group_by_ranks(found).items(), strict=True)
        ):
            plot_exchanges(
                each,
                points,
                (lambda point: point["group"]) if number == 2 else (lambda point: point["ranks"]),
            )
            each.set_title(title, fontsize=9)
            each.set(ylabel="seconds of an exchange" if number == 0 else None)

    draw_panels(path, 3, 330, draw)


def draw_steps(found: Found, path: Path) -> None:
    """Plot the times of steps. Dots are measured. Lines are predictions: a measured step without
    exchange plus the clock's exchange.
    """

    def draw(axes: Sequence[Any]) -> None:
        for number, (each, where) in enumerate(zip(axes, ("host", "links") * 2, strict=True)):
            over_width = number < 2
            mine = [
                step
                for step in found[where]["steps"]
                if step["group"] == 1
                and (
                    step["ranks"] == (4 if where == "host" else 8)
                    if over_width
                    else step["width"] == 256
                )
            ]
            for series in ("none", "tree", "ring", "native"):
                chosen = [step for step in mine if step["series"] == series]
                chosen.sort(key=lambda step: (step["bytes"], step["ranks"]))
                place = [step["bytes"] / 1e6 if over_width else step["ranks"] for step in chosen]
                colour = COLOURS[ORDER.index(series)] if series in ORDER else "#999999"
                each.plot(
                    place,
                    [STEPS * median(step["measured"]) for step in chosen],
                    color=colour,
                    linestyle="none",
                    marker=MARKERS[ORDER.index(series)] if series in ORDER else ".",
                    markersize=4,
                    label=NAMES.get(series, series) if series != "none" else "no exchange",
                )
                told = [
                    STEPS * predict_step(found, step)
                    for step in chosen
                    if series in ("tree", "ring")
                ]
                each.plot(place[: len(told)], told, color=colour, linewidth=1)
            make_logarithmic(each, 1.0 if over_width else 1)
            each.set(
                xlabel="MB of gradients" if over_width else "ranks", ylabel="seconds of an epoch"
            )
            each.set_title(
                {"host": "one host", "links": "100 Mbit/s"}[where]
                + (f", {4 if where == 'host' else 8} ranks" if over_width else ", width 256"),
                fontsize=9,
            )

    draw_panels(path, 4, 520, draw)


def draw_accuracies(found: Found, path: Path) -> None:
    rows = found["accuracy"]["rows"]

    def draw(axes: Sequence[Any]) -> None:
        over_ranks, over_width = axes
        serial = next(row for row in rows if row["width"] == 256)
        over_ranks.axhspan(
            min(serial["tests"]), max(serial["tests"]), color="#dddddd", label="serial, 3 seeds"
        )
        for row in rows:
            match = re.match(r"data\((\d+), reduce=(\w+)\)", row["strategy"])
            if row["width"] == 256 and match:
                number = ["tree", "butterfly", "halving", "ring", "", "ring_async"].index(match[2])
                over_ranks.plot(
                    [int(match[1]) * 1.05 ** (number - 2)] * len(row["tests"]),
                    row["tests"],
                    linestyle="none",
                    marker=MARKERS[number],
                    markersize=4,
                    color=COLOURS[number],
                    label=match[2],
                )
        over_ranks.set_xscale("log", base=2)
        over_ranks.set(
            xticks=[2, 4, 8], xticklabels=["2", "4", "8"], xlabel="ranks", ylabel="accuracy, %"
        )
        over_ranks.set_title("width 256, every seed", fontsize=9)
        for text, number in (
            ("serial", None),
            ("data(4, reduce=tree)", 0),
            ("data(4, reduce=ring)", 3),
        ):
            mine = sorted(
                (row for row in rows if row["strategy"] == text), key=lambda row: row["width"]
            )
            over_width.errorbar(
                [row["width"] for row in mine],
                [row["mean"] for row in mine],
                [row["spread"] for row in mine],
                color="#999999" if number is None else COLOURS[number],
                linewidth=1,
                capsize=2,
            )
        over_width.set_xscale("log", base=2)
        over_width.set(xticks=[16, 256, 1024], xticklabels=["16", "256", "1,024"], xlabel="width")
        over_width.set_title("4 ranks and serial (grey), mean and deviation", fontsize=9)

    draw_panels(path, 2, 300, draw)


def draw_weights(found: Found, path: Path) -> None:
    def draw(axes: Sequence[Any]) -> None:
        for name, run in found["weights"]["found"].items():
            first = name.split(",")[0]
            axes[0].plot(
                range(1, len(run["accuracies"]) + 1),
                run["accuracies"],
                linewidth=1.5,
                linestyle="--" if "epoch" in name else ":" if "batches of" in name else "-",
                label=name,
                color=COLOURS[ORDER.index(first)] if first in ORDER else "#999999",
            )
        axes[0].set(xlabel="epoch", ylabel="accuracy, %")
        for row in found["bugs"]["rows"]:
            if row["averaged"] == "weights":
                axes[1].plot(
                    range(1, len(row["accuracies"]) + 1),
                    row["accuracies"],
                    linewidth=1.5,
                    label=row["bug"] or "no bug",
                )
        axes[1].set(xlabel="epoch")
        axes[0].set_title("80 replicas, weights averaged", fontsize=9)
        axes[1].set_title("every epoch, by a ring, with a planted bug", fontsize=9)

    draw_panels(path, 2, 330, draw)


# a block of the page -> the parts that it needs, its table, its plot, and the caption of the plot
BLOCKS: dict[
    str, tuple[tuple[str, ...], Callable[[Found], str], Callable[[Found, Path], None] | None, str]
] = {
    "sizes": (
        ("host", "links"),
        tables.build_size_table,
        draw_sizes,
        "seconds of an exchange over megabytes: one host and limited links",
    ),
    "ranks": (
        ("host", "links", "clock"),
        tables.build_rank_table,
        draw_ranks,
        "seconds of an exchange over ranks",
    ),
    "far": (("clock",), tables.build_prediction_table, None, ""),
    "slow": (("links", "slow"), tables.build_slow_links_table, None, ""),
    "steps": (("host", "links"), tables.build_step_table, draw_steps, "seconds of an epoch"),
    "ratios": (("links",), tables.build_ratio_table, None, ""),
    "accuracy": (
        ("accuracy",),
        tables.build_accuracy_table,
        draw_accuracies,
        "accuracy over ranks and over width",
    ),
    "bugs": (("bugs",), tables.build_bug_table, None, ""),
    "weights": (
        ("weights", "bugs"),
        tables.build_weight_table,
        draw_weights,
        "accuracy over epochs, 80 replicas",
    ),
    "rounding": (("rounding",), tables.build_rounding_table, None, ""),
    "machine": ((), tables.build_machine_table, None, ""),
}
