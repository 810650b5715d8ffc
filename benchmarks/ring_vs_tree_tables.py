"""The tables on the page of the ring-versus-tree experiment, in Markdown, made from the results of
ring_vs_tree.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from pages import format_milliseconds, table

ORDER = (
    "tree",
    "butterfly",
    "halving(segments=4)",
    "ring",
    "ring(blocking=true)",
    "ring_async(segments=2)",
    "two_level",
    "native",
    "OpenMPI",
)
NAMES = {"native": "gloo's own", "OpenMPI": "OpenMPI's own"}
STEPS = 469  # per epoch: 60,000 samples in batches of 128
Found = dict[str, Any]


def group_by_width(found: Found) -> dict[str, list[Found]]:
    host = found["host"]["points"]
    links = found["links"]["points"]
    return {
        "4 ranks on one host (2 cores)": [point for point in host if point["ranks"] == 4],
        "8 hosts at 100 Mbit/s": [
            point for point in links if point["ranks"] == 8 and point["group"] == 1
        ],
    }


def group_by_ranks(found: Found) -> dict[str, list[Found]]:
    host, links = (
        [point for point in found[where]["points"] if point["width"] == 256]
        for where in ("host", "links")
    )
    return {
        "on one host: ranks": host,
        "on 100 Mbit/s: hosts": [point for point in links if point["group"] == 1]
        + found["clock"]["points"],
        "8 ranks on 100 Mbit/s: ranks per link": [point for point in links if point["ranks"] == 8],
    }


def predict_step(found: Found, step: Found) -> float:
    """Return the predicted seconds of a step: the measured step without exchange, plus the clock's
    exchange.
    """

    def is_same_setting(other: Found) -> bool:
        return all(other[key] == step[key] for key in ("ranks", "group", "width"))

    alone = next(
        other
        for other in found[step["where"]]["steps"]
        if is_same_setting(other) and other["series"] == "none"
    )
    point = next(
        point
        for point in found[step["where"]]["points"]
        if is_same_setting(point) and point["series"] == step["series"]
    )
    return float(median(alone["measured"]) + point["clock"])


def format_point(point: Found | None) -> str:
    """Return the measured milliseconds and the clock's error, as the text of a table cell."""
    if point is None:
        return ""
    taken = median(point["measured"])
    return format_milliseconds(taken) + (
        f" ({point['clock'] / taken - 1:+.0%})" if point["clock"] else ""
    )


def build_rows(
    points: list[Found], series: Sequence[str], over: str, values: Sequence[int]
) -> Iterable[list[str]]:
    for name in series:
        mine = {point[over]: point for point in points if point["series"] == name}
        if mine:
            yield [NAMES.get(name, name), *(format_point(mine.get(value)) for value in values)]


def build_size_table(found: Found) -> str:
    parts = []
    for title, points in group_by_width(found).items():
        widths = sorted({point["width"] for point in points})
        by_width = {point["width"]: point["bytes"] for point in points}
        parts.append(
            table(
                [
                    f"{title} [ms]",
                    *(f"width {width}: {by_width[width] / 1e6:.3g} MB" for width in widths),
                ],
                build_rows(points, ORDER, "width", widths),
            )
        )
    return "\n\n".join(parts)


def build_rank_table(found: Found) -> str:
    host, links, sharing = group_by_ranks(found).values()
    links = [point for point in links if point.get("measured")]
    return "\n\n".join(
        [
            table(
                [
                    "on one host, width 256 [ms]",
                    *(f"{count} ranks, {count // 2} per core" for count in (2, 4, 8, 16)),
                ],
                build_rows(host, ORDER, "ranks", (2, 4, 8, 16)),
            ),
            table(
                ["on 100 Mbit/s, width 256 [ms]", *(f"{count} hosts" for count in (2, 4, 8, 16))],
                build_rows(links, ORDER, "ranks", (2, 4, 8, 16)),
            ),
            table(
                [
                    "8 ranks on 100 Mbit/s, width 256 [ms]",
                    *(f"{group} per link" for group in (1, 2, 4)),
                ],
                build_rows(sharing, ORDER, "group", (1, 2, 4)),
            ),
        ]
    )


def build_slow_links_table(found: Found) -> str:
    """Return the table of 16 hosts on both kinds of links.

    It shows the clock's errors when the cores have time (slow links) and when they do not.
    """
    fast = [
        point for point in found["links"]["points"] if (point["ranks"], point["width"]) == (16, 256)
    ]
    rates = {"100 Mbit/s": fast, f"{found['slow']['megabits']} Mbit/s": found["slow"]["points"]}
    columns = [{point["series"]: point for point in points} for points in rates.values()]
    return table(
        ["16 hosts, width 256 [ms]", *rates],
        [
            [NAMES.get(name, name), *(format_point(column[name]) for column in columns)]
            for name in ORDER
            if name in columns[0]
        ],
    )


def build_prediction_table(found: Found) -> str:
    points = found["clock"]["points"]
    ranks = sorted({point["ranks"] for point in points})
    rows = []
    for name in ORDER[:7]:
        mine = {point["ranks"]: point for point in points if point["series"] == name}
        rows.append(
            [
                name,
                *(
                    f"{mine[each]['clock'] or mine[each]['form']:.3g}"
                    + ("" if mine[each]["clock"] else " (form)")
                    + (f" (groups of {mine[each]['inner']})" if name == "two_level" else "")
                    for each in ranks
                ),
            ]
        )
    return table(
        ["by the clock, width 256, 100 Mbit/s [s]", *(f"{each} hosts" for each in ranks)], rows
    )


def build_ratio_table(found: Found) -> str:
    """Return the table of the times of each tree over the ring: measured, by the clock, and by the
    formula.
    """
    points = [point for point in found["links"]["points"] if point["group"] == 1]
    rows = []
    for ranks, width in [(8, width) for width in (16, 256, 4096)] + [
        (ranks, 256) for ranks in (2, 4, 16)
    ]:
        here = {
            point["series"]: point
            for point in points
            if point["ranks"] == ranks and point["width"] == width
        }
        cells = []
        for name in ("tree", "butterfly", "halving(segments=4)"):
            one = here[name]
            ring = here["ring"]
            cells.append(
                f"{median(one['measured']) / median(ring['measured']):.2f} / "
                f"{one['clock'] / ring['clock']:.2f} / {one['form'] / ring['form']:.2f}"
            )
        rows.append([str(ranks), f"{here['ring']['bytes'] / 1e6:.3g} MB", *cells])
    return table(
        [
            "hosts",
            "message",
            "tree / ring: measured, clock, formula",
            "butterfly / ring",
            "halving(4) / ring",
        ],
        rows,
    )


def build_step_table(found: Found) -> str:
    rows = []
    for where in ("host", "links"):
        seen = [step for step in found[where]["steps"] if step["group"] == 1]
        for ranks, width in sorted({(step["ranks"], step["width"]) for step in seen}):
            mine = {
                step["series"]: step
                for step in seen
                if (step["ranks"], step["width"]) == (ranks, width)
            }
            epochs = [
                STEPS * median(mine[name]["measured"])
                for name in ("none", "tree", "ring", "native")
            ]
            cells = [
                f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" for seconds in epochs
            ]
            rows.append(
                [
                    {"host": "one host", "links": "100 Mbit/s"}[where],
                    str(ranks),
                    str(width),
                    *cells,
                    f"{median(mine['tree']['measured']) / median(mine['ring']['measured']):.2f}",
                    f"{predict_step(found, mine['tree']) / predict_step(found, mine['ring']):.2f}",
                ]
            )
    return table(
        [
            "where",
            "ranks",
            "width",
            "no exchange",
            "tree",
            "ring",
            "gloo's own",
            "tree / ring",
            "foretold",
        ],
        rows,
    )


def build_accuracy_table(found: Found) -> str:
    rows = found["accuracy"]["rows"]
    serial = {row["width"]: row["mean"] for row in rows if row["strategy"] == "serial"}
    return table(
        [
            "strategy",
            "width",
            "accuracy, mean ± deviation",
            "less serial's",
            "final parameters, by seed",
            "difference, float64",
        ],
        [
            [
                row["strategy"],
                str(row["width"]),
                f"{row['mean']:.2f} ± {row['spread']:.2f}",
                f"{row['mean'] - serial[row['width']]:+.2f}",
                " ".join(row["digests"]),
                "" if row["difference"] is None else f"{row['difference']:.1e}",
            ]
            for row in rows
        ],
    )


def build_weight_table(found: Found) -> str:
    return table(
        ["80 replicas", "after 1 epoch", "5", "10", "20", "replicas at the end"],
        [
            [
                name,
                *(f"{run['accuracies'][epoch - 1]:.2f}" for epoch in (1, 5, 10, 20)),
                "alone" if name.startswith("serial") else "equal" if run["equal"] else "not equal",
            ]
            for name, run in found["weights"]["found"].items()
        ],
    )


def build_bug_table(found: Found) -> str:
    rows = []
    for averaged in ("gradients", "weights"):
        mine = [row for row in found["bugs"]["rows"] if row["averaged"] == averaged]
        honest = mine[0]["accuracies"][-1]
        for row in mine:
            checks = row["checks"]
            rows.append(
                [
                    f"{averaged}, {row['replicas']}",
                    row["bug"] or "none",
                    f"{row['accuracies'][-1]:.2f}",
                    f"{row['accuracies'][-1] - honest:+.2f}",
                    "yes" if row["equal"] else "**no**",
                    f"**off by {checks['sum']:.3g}**" if checks["sum"] else "exact",
                    ""
                    if checks["serial"] is None
                    else f"{checks['serial']:.1e}"
                    if checks["serial"] < 1e-10
                    else f"**{checks['serial']:.1e}**",
                    f"**{checks['proof']}**" if checks["proof"] else "holds",
                ]
            )
    return table(
        [
            "averaged, replicas",
            "bug",
            "accuracy",
            "beside no bug",
            "replicas equal",
            "whole numbers",
            "from serial, float64",
            "proof",
        ],
        rows,
    )


def build_rounding_table(found: Found) -> str:
    return table(
        [
            "replicas",
            "gradient",
            "median, ulps",
            "99.9 %, ulps",
            "largest error / largest gradient",
        ],
        [
            [count, name, f"{row['median']:.2f}", f"{row['most']:.0f}", f"{row['relative']:.1e}"]
            for count, rows in found["rounding"]["of"].items()
            for name, row in rows.items()
        ],
    )


def build_machine_table(found: Found) -> str:
    return table(
        ["part", "minutes", "machine"],
        [
            [
                name,
                f"{part['minutes']:.1f}",
                ", ".join(f"{key} {value}" for key, value in part["machine"].items()),
            ]
            for name, part in found.items()
        ],
    )
