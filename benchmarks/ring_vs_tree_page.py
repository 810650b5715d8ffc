"""The page of the ring-versus-tree experiment: its plots and tables, from what ring_vs_tree.py found.

The text of docs/ring-vs-tree.md is written by hand; what stands between `<!-- NAME -->` and `<!-- end -->` is written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import Bench
from matplotlib.ticker import LogLocator, NullFormatter

from paragrad.report.charts import COLOURS, MARKERS, drawing

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURES = DOCS / "ring-vs-tree.md", DOCS / "figures"
ORDER = ("tree", "butterfly", "halving(segments=4)", "ring", "ring(blocking=true)", "ring_async(segments=2)", "two_level",
         "native", "OpenMPI")
NAMES = {"native": "gloo's own", "OpenMPI": "OpenMPI's own"}
WIDTH = 760                 # of a plot
STEPS = 469                 # of an epoch: 60,000 samples in batches of 128
Found = dict[str, Any]


def accuracy_figures(bench: Bench, found: Found) -> None:
    """The bars of the accuracies."""
    rows = [row for row in found["rows"] if row["width"] == 256]
    serial = fmean(rows[0]["tests"])
    of_two = [row["digests"] for row in rows if row["strategy"].startswith("data(2,")]
    bench.figure("different final parameters at 2 ranks, over algorithms",
                 max(len(set(seed)) for seed in zip(*of_two, strict=True)), at_most=1)
    away = [abs(row["mean"] - serial) for row in rows if row["strategy"].startswith(("data(4,", "data(8,"))]
    if away:
        bench.figure("accuracy at 4 and 8 ranks less serial's mean, the farthest", max(away), at_most=0.25)


def write(found: Found) -> None:
    """Draw the plots, and fill in the page's tables."""
    for name, draw in {"sizes": sizes, "ranks": ranks, "steps": steps, "accuracy": accuracies, "weights": weights}.items():
        draw(found, FIGURES / f"ring_vs_tree_{name}.svg")
    blocks = {"sizes": sizes_table(found), "ranks": ranks_table(found), "ratios": ratios_table(found),
              "far": far_table(found), "steps": steps_table(found),
              "accuracy": accuracy_table(found), "weights": weights_table(found), "bugs": bugs_table(found),
              "rounding": rounding_table(found), "machine": machines(found)}
    text = PAGE.read_text()
    for name, block in blocks.items():
        text, times = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, block=block, name=name:       # type: ignore[misc]
                              f"<!-- {name} -->\n{block}\n<!-- end -->", text, flags=re.DOTALL)
        assert times == 1, f"{PAGE} has {times} places for {name}"
    PAGE.write_text(text)


# ---- plots -------------------------------------------------------------------------------------------------------------
def panels(path: Path, count: int, height: float, draw: Callable[[Sequence[Any]], None]) -> None:
    with drawing(path.stem, WIDTH, height) as figure:
        figure.set_layout_engine("constrained")
        axes = [figure.add_subplot(-(-count // 2) if count > 3 else 1, 2 if count > 3 else count, number + 1)
                for number in range(count)]
        draw(axes)
        entries: dict[str, Any] = {}
        for each in axes:
            each.grid(alpha=0.3)
            each.tick_params(labelsize=8)
            each.xaxis.label.set_size(9)
            each.yaxis.label.set_size(9)
            entries |= dict(zip(*reversed(each.get_legend_handles_labels()), strict=True))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def exchanges(axes: Any, points: Sequence[Found], over: Callable[[Found], float]) -> None:
    """Dots: measured. Lines: the clock. Dotted: closed form."""
    for number, series in enumerate(ORDER):
        mine = sorted((point for point in points if point["series"] == series), key=over)
        look: Found = {"color": COLOURS[number]}
        done = [point for point in mine if point.get("measured")]
        axes.plot([over(point) for point in done], [median(point["measured"]) for point in done], linestyle="none",
                  marker=MARKERS[number], markersize=4, label=NAMES.get(series, series), **look)
        for key, dashes in (("clock", "-"), ("form", ":")):
            told = [point for point in mine if point.get(key)]
            axes.plot([over(point) for point in told], [point[key] for point in told], linestyle=dashes, linewidth=1, **look)
    logarithmic(axes, over(points[0]) if points else 1)


def logarithmic(axes: Any, first: float) -> None:
    """Both axes, with numbers as people write them; over ranks in powers of two."""
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


def of_width(found: Found) -> dict[str, list[Found]]:
    host, links = found["host"]["points"], found["links"]["points"]
    return {"4 ranks on one host (2 cores)": [point for point in host if point["ranks"] == 4],
            "8 hosts at 100 Mbit/s": [point for point in links if point["ranks"] == 8 and point["group"] == 1]}


def sizes(found: Found, path: Path) -> None:
    def draw(axes: Sequence[Any]) -> None:
        for each, (title, points) in zip(axes, of_width(found).items(), strict=True):
            exchanges(each, points, lambda point: point["bytes"] / 1e6)
            each.set_title(title, fontsize=9)
            each.set(xlabel="MB of gradients", ylabel="seconds of an exchange")
    panels(path, 2, 330, draw)


def of_ranks(found: Found) -> dict[str, list[Found]]:
    host, links = ([point for point in found[where]["points"] if point["width"] == 256] for where in ("host", "links"))
    return {"on one host: ranks": host,
            "on 100 Mbit/s: hosts": [point for point in links if point["group"] == 1] + found["clock"]["points"],
            "8 ranks on 100 Mbit/s: ranks per link": [point for point in links if point["ranks"] == 8]}


def ranks(found: Found, path: Path) -> None:
    def draw(axes: Sequence[Any]) -> None:
        for number, (each, (title, points)) in enumerate(zip(axes, of_ranks(found).items(), strict=True)):
            exchanges(each, points, (lambda point: point["group"]) if number == 2 else (lambda point: point["ranks"]))
            each.set_title(title, fontsize=9)
            each.set(ylabel="seconds of an exchange" if number == 0 else None)
    panels(path, 3, 330, draw)


def steps(found: Found, path: Path) -> None:
    """Dots: measured. Lines: steps without exchange, and the clock's exchange."""
    def draw(axes: Sequence[Any]) -> None:
        for number, (each, where) in enumerate(zip(axes, ("host", "links") * 2, strict=True)):
            over_width = number < 2
            mine = [step for step in found[where]["steps"] if step["group"] == 1 and
                    (step["ranks"] == (4 if where == "host" else 8) if over_width else step["width"] == 256)]
            for series in ("none", "tree", "ring", "native"):
                chosen = [step for step in mine if step["series"] == series]
                chosen.sort(key=lambda step: (step["bytes"], step["ranks"]))
                place = [step["bytes"] / 1e6 if over_width else step["ranks"] for step in chosen]
                colour = COLOURS[ORDER.index(series)] if series in ORDER else "#999999"
                each.plot(place, [STEPS * median(step["measured"]) for step in chosen], color=colour, linestyle="none",
                          marker=MARKERS[ORDER.index(series)] if series in ORDER else ".", markersize=4,
                          label=NAMES.get(series, series) if series != "none" else "no exchange")
                told = [STEPS * foretold(found, step) for step in chosen if series in ("tree", "ring")]
                each.plot(place[:len(told)], told, color=colour, linewidth=1)
            logarithmic(each, 1.0 if over_width else 1)
            each.set(xlabel="MB of gradients" if over_width else "ranks", ylabel="seconds of an epoch")
            each.set_title({"host": "one host", "links": "100 Mbit/s"}[where] + (
                f", {4 if where == 'host' else 8} ranks" if over_width else ", width 256"), fontsize=9)
    panels(path, 4, 520, draw)


def foretold(found: Found, step: Found) -> float:
    """Seconds of a step: what it takes without exchange, and the clock's exchange."""
    def same(other: Found) -> bool:
        return all(other[key] == step[key] for key in ("ranks", "group", "width"))
    alone = next(other for other in found[step["where"]]["steps"] if same(other) and other["series"] == "none")
    point = next(point for point in found[step["where"]]["points"] if same(point) and point["series"] == step["series"])
    return float(median(alone["measured"]) + point["clock"])


def accuracies(found: Found, path: Path) -> None:
    rows = found["accuracy"]["rows"]

    def draw(axes: Sequence[Any]) -> None:
        over_ranks, over_width = axes
        serial = next(row for row in rows if row["width"] == 256)
        over_ranks.axhspan(min(serial["tests"]), max(serial["tests"]), color="#dddddd", label="serial, 3 seeds")
        for row in rows:
            match = re.match(r"data\((\d+), reduce=(\w+)\)", row["strategy"])
            if row["width"] == 256 and match:
                number = ["tree", "butterfly", "halving", "ring", "", "ring_async"].index(match[2])
                over_ranks.plot([int(match[1]) * 1.05 ** (number - 2)] * len(row["tests"]), row["tests"], linestyle="none",
                                marker=MARKERS[number], markersize=4, color=COLOURS[number], label=match[2])
        over_ranks.set_xscale("log", base=2)
        over_ranks.set(xticks=[2, 4, 8], xticklabels=["2", "4", "8"], xlabel="ranks", ylabel="accuracy, %")
        over_ranks.set_title("width 256, every seed", fontsize=9)
        for text, number in (("serial", None), ("data(4, reduce=tree)", 0), ("data(4, reduce=ring)", 3)):
            mine = sorted((row for row in rows if row["strategy"] == text), key=lambda row: row["width"])
            over_width.errorbar([row["width"] for row in mine], [row["mean"] for row in mine], [row["spread"] for row in mine],
                                color="#999999" if number is None else COLOURS[number], linewidth=1, capsize=2)
        over_width.set_xscale("log", base=2)
        over_width.set(xticks=[16, 256, 1024], xticklabels=["16", "256", "1,024"], xlabel="width")
        over_width.set_title("4 ranks and serial (grey), mean and deviation", fontsize=9)
    panels(path, 2, 300, draw)


def weights(found: Found, path: Path) -> None:
    def draw(axes: Sequence[Any]) -> None:
        for name, run in found["weights"]["found"].items():
            first = name.split(",")[0]
            axes[0].plot(range(1, len(run["accuracies"]) + 1), run["accuracies"], linewidth=1.5,
                         linestyle="--" if "epoch" in name else "-", label=name,
                         color=COLOURS[ORDER.index(first)] if first in ORDER else "#999999")
        axes[0].set(xlabel="epoch", ylabel="accuracy, %")
        for row in found["bugs"]["rows"]:
            if row["averaged"] == "weights":
                axes[1].plot(range(1, len(row["accuracies"]) + 1), row["accuracies"], linewidth=1.5,
                             label=row["bug"] or "no bug")
        axes[1].set(xlabel="epoch")
        axes[0].set_title("80 replicas, weights averaged", fontsize=9)
        axes[1].set_title("every epoch, by a ring, with a planted bug", fontsize=9)
    panels(path, 2, 330, draw)


# ---- tables ------------------------------------------------------------------------------------------------------------
def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def shown(point: Found | None) -> str:
    """Measured milliseconds, and the clock's error."""
    if point is None:
        return ""
    taken = median(point["measured"])
    return milliseconds(taken) + (f" ({point['clock'] / taken - 1:+.0%})" if point["clock"] else "")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def beside(points: list[Found], series: Sequence[str], over: str, values: Sequence[int]) -> Iterable[list[str]]:
    for name in series:
        mine = {point[over]: point for point in points if point["series"] == name}
        if mine:
            yield [NAMES.get(name, name), *(shown(mine.get(value)) for value in values)]


def sizes_table(found: Found) -> str:
    parts = []
    for title, points in of_width(found).items():
        widths = sorted({point["width"] for point in points})
        by_width = {point["width"]: point["bytes"] for point in points}
        parts.append(table([f"{title} [ms]", *(f"width {width}: {by_width[width] / 1e6:.3g} MB" for width in widths)],
                           beside(points, ORDER, "width", widths)))
    return "\n\n".join(parts)


def ranks_table(found: Found) -> str:
    host, links, sharing = of_ranks(found).values()
    links = [point for point in links if point.get("measured")]
    return "\n\n".join([
        table(["on one host, width 256 [ms]", *(f"{ranks} ranks, {ranks // 2} per core" for ranks in (2, 4, 8, 16))],
              beside(host, ORDER, "ranks", (2, 4, 8, 16))),
        table(["on 100 Mbit/s, width 256 [ms]", *(f"{ranks} hosts" for ranks in (2, 4, 8, 16))],
              beside(links, ORDER, "ranks", (2, 4, 8, 16))),
        table(["8 ranks on 100 Mbit/s, width 256 [ms]", *(f"{group} per link" for group in (1, 2, 4))],
              beside(sharing, ORDER, "group", (1, 2, 4)))])


def far_table(found: Found) -> str:
    points = found["clock"]["points"]
    ranks = sorted({point["ranks"] for point in points})
    rows = []
    for name in ORDER[:7]:
        mine = {point["ranks"]: point for point in points if point["series"] == name}
        rows.append([name, *(f"{mine[each]['clock'] or mine[each]['form']:.3g}" + ("" if mine[each]["clock"] else " (form)")
                             for each in ranks)])
    return table(["by the clock, width 256, 100 Mbit/s [s]", *(f"{each} hosts" for each in ranks)], rows)


def ratios_table(found: Found) -> str:
    """Each tree over the ring: measured, by the clock, by formula."""
    points = [point for point in found["links"]["points"] if point["group"] == 1]
    rows = []
    for ranks, width in [(8, width) for width in (16, 256, 4096)] + [(ranks, 256) for ranks in (2, 4, 16)]:
        here = {point["series"]: point for point in points if point["ranks"] == ranks and point["width"] == width}
        cells = []
        for name in ("tree", "butterfly", "halving(segments=4)"):
            one, ring = here[name], here["ring"]
            cells.append(f"{median(one['measured']) / median(ring['measured']):.2f} / {one['clock'] / ring['clock']:.2f} / "
                         f"{one['form'] / ring['form']:.2f}")
        rows.append([str(ranks), f"{here['ring']['bytes'] / 1e6:.3g} MB", *cells])
    return table(["hosts", "message", "tree / ring: measured, clock, formula", "butterfly / ring", "halving(4) / ring"], rows)


def steps_table(found: Found) -> str:
    rows = []
    for where in ("host", "links"):
        seen = [step for step in found[where]["steps"] if step["group"] == 1]
        for ranks, width in sorted({(step["ranks"], step["width"]) for step in seen}):
            mine = {step["series"]: step for step in seen if (step["ranks"], step["width"]) == (ranks, width)}
            epochs = [STEPS * median(mine[name]["measured"]) for name in ("none", "tree", "ring", "native")]
            cells = [f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" for seconds in epochs]
            rows.append([{"host": "one host", "links": "100 Mbit/s"}[where], str(ranks), str(width), *cells,
                         f"{median(mine['tree']['measured']) / median(mine['ring']['measured']):.2f}",
                         f"{foretold(found, mine['tree']) / foretold(found, mine['ring']):.2f}"])
    return table(["where", "ranks", "width", "no exchange", "tree", "ring", "gloo's own", "tree / ring", "foretold"], rows)


def accuracy_table(found: Found) -> str:
    rows = found["accuracy"]["rows"]
    serial = {row["width"]: row["mean"] for row in rows if row["strategy"] == "serial"}
    return table(["strategy", "width", "accuracy, mean ± deviation", "less serial's", "final parameters, by seed",
                  "difference, float64"],
                 [[row["strategy"], str(row["width"]), f"{row['mean']:.2f} ± {row['spread']:.2f}",
                   f"{row['mean'] - serial[row['width']]:+.2f}", " ".join(row["digests"]),
                   "" if row["difference"] is None else f"{row['difference']:.1e}"] for row in rows])


def weights_table(found: Found) -> str:
    return table(["80 replicas", "after 1 epoch", "5", "10", "20", "replicas at the end"],
                 [[name, *(f"{run['accuracies'][epoch - 1]:.2f}" for epoch in (1, 5, 10, 20)),
                   "alone" if name.startswith("serial") else "equal" if run["equal"] else "not equal"]
                  for name, run in found["weights"]["found"].items()])


def bugs_table(found: Found) -> str:
    rows = []
    for averaged in ("gradients", "weights"):
        mine = [row for row in found["bugs"]["rows"] if row["averaged"] == averaged]
        honest = mine[0]["accuracies"][-1]
        for row in mine:
            checks = row["checks"]
            rows.append([f"{averaged}, {row['replicas']}", row["bug"] or "none", f"{row['accuracies'][-1]:.2f}",
                         f"{row['accuracies'][-1] - honest:+.2f}", "yes" if row["equal"] else "**no**",
                         f"**off by {checks['sum']:.3g}**" if checks["sum"] else "exact",
                         "" if checks["serial"] is None else f"{checks['serial']:.1e}" if checks["serial"] < 1e-10
                         else f"**{checks['serial']:.1e}**",
                         f"**{checks['proof']}**" if checks["proof"] else "holds"])
    return table(["averaged, replicas", "bug", "accuracy", "lost", "replicas equal", "whole numbers", "from serial, float64",
                  "proof"], rows)


def rounding_table(found: Found) -> str:
    return table(["replicas", "gradient", "median, ulps", "99.9 %, ulps", "largest error / largest gradient"],
                 [[count, name, f"{row['median']:.2f}", f"{row['most']:.0f}", f"{row['relative']:.1e}"]
                  for count, rows in found["rounding"]["of"].items() for name, row in rows.items()])


def machines(found: Found) -> str:
    return table(["part", "minutes", "machine"], [[name, f"{part['minutes']:.1f}", ", ".join(
        f"{key} {value}" for key, value in part["machine"].items())] for name, part in found.items()])
