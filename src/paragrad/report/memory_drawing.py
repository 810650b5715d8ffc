"""Drawings of the bytes alive during a schedule, as text and SVG, and a table of what ranks hold.

Each task of each rank has a bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.executors.pipeline_memory import TaskMemory
from paragrad.report.charts import (
    INK,
    MUTED,
    PAPER,
    TEXT_SIZE,
    convert_to_svg,
    open_figure,
    write_svg_file,
)
from paragrad.report.comparison_table import format_bytes
from paragrad.report.palette import KINDS

BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
STEEL, OCHRE, _, PLUM, ASH = KINDS
TASK_COLOURS = {"F": STEEL, "B": PLUM, "I": PLUM, "W": OCHRE}
MARGIN = 34  # units to the left and to the right of the bars
RANK_HEIGHT = 86  # units of a rank
BAR_HEIGHT = 48  # units of the highest bar
LETTER_WIDTH = 6.6  # units of a letter


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank.

    Attributes:
        rank: The rank.

        moments: The predicted memory, task by task.

        test_bytes: The most that a test needs, or None.

        counted_bytes: The bytes counted in a step, by kind, from a record, or None.
    """

    rank: int
    moments: Sequence[TaskMemory]
    test_bytes: int | None = None
    counted_bytes: dict[str, int] | None = None

    @property
    def peak(self) -> TaskMemory:
        """The task with the most bytes."""
        return max(self.moments, key=lambda each: each.bytes)


def draw_memory_text(title: str, ranks: Sequence[RankMemory], svg: Path | None = None) -> str:
    """Draw the bars of all ranks as text, with a table below.

    Args:
        title: The first line.
        ranks: The memory of each rank.
        svg: A file for the drawing as SVG, or None.

    Returns:
        The text.

    Raises:
        Refused: The file cannot be written.
    """
    if svg:
        write_svg_file(draw_memory_svg(title, ranks), svg)
    most = max(1, *(each.peak.bytes for each in ranks))
    margin = len(str(ranks[-1].rank))
    lines = [f"{title}; █ is {format_bytes(most)}"]
    for each in ranks:
        bars = " ".join(
            BAR_CHARACTERS[-(-8 * moment.bytes // most)] * len(moment.task)
            for moment in each.moments
        )
        lines += [
            f"{each.rank:>{margin}} | " + " ".join(moment.task for moment in each.moments),
            f"{'':>{margin}} | {bars}",
        ]
    return "\n".join([*lines, "", *_format_memory_table(ranks)])


def _format_memory_table(ranks: Sequence[RankMemory]) -> list[str]:
    """A line for each rank with what it holds, in columns."""
    kinds = [
        kind
        for kind in ("parameters", "gradients", "optimizer", "exchange")
        if any(each.counted_bytes for each in ranks)
    ]
    rows = [("rank", "activations, predicted", "in", "counted", "in a test", *kinds)]
    for each in ranks:
        counted = each.counted_bytes or {}
        rows.append(
            (
                str(each.rank),
                format_bytes(each.peak.bytes),
                each.peak.task,
                format_bytes(counted["activations"]) if "activations" in counted else "-",
                "-" if each.test_bytes is None else format_bytes(each.test_bytes),
                *(format_bytes(counted.get(kind, 0)) for kind in kinds),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def draw_memory_svg(title: str, ranks: Sequence[RankMemory]) -> str:
    """Draw a bar for each task, as high as the bytes held then; all ranks have the same scale.

    Args:
        title: The description.
        ranks: The memory of each rank.

    Returns:
        The SVG.
    """
    most = max(1, *(each.peak.bytes for each in ranks))
    letters = max(len(moment.task) for each in ranks for moment in each.moments)
    column = LETTER_WIDTH * letters + 6
    width = 2 * MARGIN + column * max(len(each.moments) for each in ranks)
    with open_figure("memory", width, RANK_HEIGHT * len(ranks)) as figure:
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(RANK_HEIGHT * len(ranks), 0))
        for row, each in enumerate(ranks):
            base = RANK_HEIGHT * (row + 1) - 18
            axes.plot([MARGIN, width - MARGIN], [base] * 2, color=MUTED, linewidth=1, zorder=1)
            axes.text(MARGIN - 12, base, str(each.rank), color=INK, ha="right", va="bottom")
            axes.text(
                MARGIN,
                base - BAR_HEIGHT - 4,
                f"at most {format_bytes(each.peak.bytes)}, in {each.peak.task}",
                color=MUTED,
                fontsize=TEXT_SIZE - 2,
                va="bottom",
            )
            for place, moment in enumerate(each.moments):
                height = BAR_HEIGHT * moment.bytes / most
                axes.bar(
                    MARGIN + column * (place + 0.5),
                    -height,
                    bottom=base,
                    width=column - 2,
                    edgecolor=PAPER,
                    linewidth=0.6,
                    color=TASK_COLOURS.get(moment.task[:1], ASH),
                    zorder=3,
                )
                axes.text(
                    MARGIN + column * (place + 0.5),
                    base + 3,
                    moment.task,
                    color=INK,
                    fontsize=TEXT_SIZE - 2,
                    ha="center",
                    va="top",
                )
        description = "; ".join(
            f"rank {each.rank}: at most {each.peak.bytes:,} bytes, in {each.peak.task}"
            for each in ranks
        )
        size_attributes = f' width="{width:g}" height="{RANK_HEIGHT * len(ranks):g}" viewBox'
        return (
            convert_to_svg(figure, "memory", f"{title}. {description}").replace(
                " viewBox", size_attributes, 1
            )
            + "\n"
        )
