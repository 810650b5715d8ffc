"""Bytes alive over a schedule, drawn: a bar for every task of each rank, as text and as SVG;
and a table of what ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.executors.pipeline_memory import Moment
from paragrad.report.charts import INK, MUTED, PAPER, TEXT, drawing, inline
from paragrad.report.comparison_table import sized
from paragrad.report.palette import KINDS

BARS = " ▁▂▃▄▅▆▇█"
STEEL, OCHRE, _, PLUM, ASH = KINDS
COLOURS = {"F": STEEL, "B": PLUM, "I": PLUM, "W": OCHRE}
# beside bars; of a rank; of the highest bar; of a letter
MARGIN = 34
ROW = 86
BAR = 48
LETTER = 6.6


@dataclass(frozen=True)
class Lifetimes:
    """Of one rank. moments: as foretold, task by task;  tested: at most, in a test;  counted:
    in a step, as its record says.
    """

    rank: int
    moments: Sequence[Moment]
    tested: int | None = None
    counted: dict[str, int] | None = None

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda each: each.bytes)


def as_text(title: str, ranks: Sequence[Lifetimes], svg: Path | None = None) -> str:
    """The drawing, and below it the table. svg: a file for the drawing, too. Raises Refused."""
    if svg:
        try:
            svg.write_text(as_svg(title, ranks))
        except OSError as error:
            raise Refused(
                f"--svg {svg}: {error.strerror}; give a file in a folder that is there and can be "
                f"written"
            ) from None
    most = max(1, *(each.peak.bytes for each in ranks))
    margin = len(str(ranks[-1].rank))
    lines = [f"{title}; █ is {sized(most)}"]
    for each in ranks:
        bars = " ".join(
            BARS[-(-8 * moment.bytes // most)] * len(moment.task) for moment in each.moments
        )
        lines += [
            f"{each.rank:>{margin}} | " + " ".join(moment.task for moment in each.moments),
            f"{'':>{margin}} | {bars}",
        ]
    return "\n".join([*lines, "", *_table(ranks)])


def _table(ranks: Sequence[Lifetimes]) -> list[str]:
    """What each rank holds."""
    kinds = [
        kind
        for kind in ("parameters", "gradients", "optimizer", "exchange")
        if any(each.counted for each in ranks)
    ]
    rows = [("rank", "activations, foretold", "in", "counted", "in a test", *kinds)]
    for each in ranks:
        counted = each.counted or {}
        rows.append(
            (
                str(each.rank),
                sized(each.peak.bytes),
                each.peak.task,
                sized(counted["activations"]) if "activations" in counted else "-",
                "-" if each.tested is None else sized(each.tested),
                *(sized(counted.get(kind, 0)) for kind in kinds),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def as_svg(title: str, ranks: Sequence[Lifetimes]) -> str:
    """A bar for every task, as high as what was held then; of all ranks in one measure."""
    most = max(1, *(each.peak.bytes for each in ranks))
    letters = max(len(moment.task) for each in ranks for moment in each.moments)
    column = LETTER * letters + 6
    width = 2 * MARGIN + column * max(len(each.moments) for each in ranks)
    with drawing("memory", width, ROW * len(ranks)) as figure:
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(ROW * len(ranks), 0))
        for row, each in enumerate(ranks):
            base = ROW * (row + 1) - 18
            axes.plot([MARGIN, width - MARGIN], [base] * 2, color=MUTED, linewidth=1, zorder=1)
            axes.text(MARGIN - 12, base, str(each.rank), color=INK, ha="right", va="bottom")
            axes.text(
                MARGIN,
                base - BAR - 4,
                f"at most {sized(each.peak.bytes)}, in {each.peak.task}",
                color=MUTED,
                fontsize=TEXT - 2,
                va="bottom",
            )
            for place, moment in enumerate(each.moments):
                high = BAR * moment.bytes / most
                axes.bar(
                    MARGIN + column * (place + 0.5),
                    -high,
                    bottom=base,
                    width=column - 2,
                    edgecolor=PAPER,
                    linewidth=0.6,
                    color=COLOURS.get(moment.task[:1], ASH),
                    zorder=3,
                )
                axes.text(
                    MARGIN + column * (place + 0.5),
                    base + 3,
                    moment.task,
                    color=INK,
                    fontsize=TEXT - 2,
                    ha="center",
                    va="top",
                )
        told = "; ".join(
            f"rank {each.rank}: at most {each.peak.bytes:,} bytes, in {each.peak.task}"
            for each in ranks
        )
        sized_as = f' width="{width:g}" height="{ROW * len(ranks):g}" viewBox'
        return inline(figure, "memory", f"{title}. {told}").replace(" viewBox", sized_as, 1) + "\n"
