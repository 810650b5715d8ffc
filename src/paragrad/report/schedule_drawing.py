"""Drawings of a schedule: as text, below the model's stages, and as a space-time diagram in SVG.

In the diagram each rank is a line, each round a column, and each message an arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.executors.message_count import refuse_many_messages
from paragrad.executors.proof import check_schedule
from paragrad.executors.text_drawing import Arrow, Diagram
from paragrad.executors.text_drawing import draw_text as as_text
from paragrad.parallel.pipeline.stage_summary import StageSummary
from paragrad.report.charts import (
    COLOURS,
    FAINT,
    INK,
    MUTED,
    PAPER,
    TEXT_SIZE,
    convert_to_svg,
    open_figure,
    write_svg_file,
)
from paragrad.report.comparison_table import format_bytes
from paragrad.schedules.actions import Schedule, ScheduleError, format_slot
from paragrad.strategies.strategy import ScheduleUse

MARGIN = 34  # units to the left of the first round and to the right of the last
RANK_HEIGHT = 62  # units between two ranks
ARROW_WIDTH = 46  # units of a round for its arrows
LETTER_WIDTH = 6.6  # units of a letter of a label


# the largest number of messages in a drawing, which then takes some seconds
MAX_TEXT_MESSAGES = 10_000
MAX_SVG_MESSAGES = 2_000


def draw_schedule(
    plan: ScheduleUse, parts: Sequence[StageSummary] = (), svg: Path | None = None
) -> str:
    """Draw a schedule as text, below the stages of the model.

    Args:
        plan: The use of the schedule.
        parts: The stages of the model, if any.
        svg: A file for the space-time diagram, or None.

    Returns:
        The drawing.

    Raises:
        Refused: The schedule is wrong or has too many messages, or the file cannot be written.
    """
    check_schedule(plan.schedule, plan.size, plan.goal)
    try:
        refuse_many_messages(
            plan.schedule, plan.size, MAX_SVG_MESSAGES if svg else MAX_TEXT_MESSAGES, "drawn"
        )
    except ScheduleError as error:
        raise Refused(str(error)) from None
    if svg:
        rank_labels = [
            "; ".join(
                f"{each.modules} ({each.parameters:,} parameters)"
                for each in parts
                if each.rank == rank
            )
            for rank in range(plan.size)
        ]
        write_svg_file(draw_space_time_svg(plan.schedule, plan.size, rank_labels), svg)
    return "\n".join(
        (
            *_format_stage_table(parts),
            f"{plan.schedule}, {plan.size} ranks; a line is a rank, a column a round. >1:0 sends "
            "slot 0 to rank 1, <3:2+ receives slot 2 from rank 3 and adds it, ! waits",
            as_text(plan.schedule, plan.size),
        )
    )


def _format_stage_table(parts: Sequence[StageSummary]) -> list[str]:
    """A line for each stage of a model, in columns."""
    if not parts:
        return []
    work = sum(each.work for each in parts) or 1
    rows = [
        (
            "part",
            "rank",
            "modules",
            "parameters",
            "matrix products",
            "measured alone",
            "activations",
            "gradients",
        ),
        *(
            (
                str(number),
                str(each.rank),
                each.modules,
                f"{each.parameters:,}",
                f"{each.work:,} ({each.work / work:.0%})",
                f"{1e3 * each.seconds:.3g} ms",
                format_bytes(each.forward_bytes),
                format_bytes(each.backward_bytes),
            )
            for number, each in enumerate(parts)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [
        *lines,
        "matrix products: of a forward; measured alone: forward and backward; activations and "
        "gradients: bytes sent to the next part and back; all of one micro-batch",
        "",
    ]


def draw_space_time_svg(schedule: Schedule, size: int, rank_labels: Sequence[str] = ()) -> str:
    """Draw the space-time diagram of a schedule, with the rounds of `paragrad draw`.

    A message leaves the line of its sender at the left of the round in which it is sent. It reaches
    the line of its receiver at the right of the round in which it is received. There its slot is
    shown, with + if it is added. A computation is a box.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        rank_labels: A text for the line of each rank.

    Returns:
        The SVG.
    """
    diagram = Diagram.build(schedule, size)
    labels = [format_slot(arrow.slot) + ("+" if arrow.added else "") for arrow in diagram.arrows]
    boxes = [text for _, _, text in diagram.computed]
    column = max(
        ARROW_WIDTH + LETTER_WIDTH * max(map(len, labels), default=1) + 14,
        LETTER_WIDTH * max(map(len, boxes), default=0) + 26,
    )
    width = 2 * MARGIN + column * max(1, diagram.columns)
    height = RANK_HEIGHT * size
    with open_figure("schedule", width, height) as figure:
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        for rank in range(size):
            axes.plot(
                [MARGIN, width - MARGIN],
                [_get_rank_y(rank)] * 2,
                color=MUTED,
                linewidth=1,
                zorder=1,
            )
            axes.text(MARGIN - 12, _get_rank_y(rank), str(rank), color=INK, ha="right", va="center")
        for place in range(1, diagram.columns):
            axes.plot(
                [MARGIN + column * place] * 2, [0, height], color=FAINT, linewidth=1, zorder=0
            )
        for rank, text in enumerate(rank_labels):
            axes.text(
                MARGIN,
                _get_rank_y(rank) - RANK_HEIGHT * 0.36,
                text,
                color=MUTED,
                fontsize=TEXT_SIZE - 2,
                va="center",
            )
        for rank, place, text in diagram.computed:
            _draw_computation_box(axes, rank, MARGIN + column * place + 5, text)
        for number, (arrow, label) in enumerate(zip(diagram.arrows, labels, strict=True)):
            _draw_message_arrow(axes, number, arrow, label, column)
        alternative = (
            f"{schedule} over {size} ranks: {len(diagram.arrows)} messages in {diagram.columns} "
            "rounds"
        )
        size_attributes = f' width="{width:g}" height="{height:g}" viewBox'
        return (
            convert_to_svg(figure, "schedule", alternative).replace(" viewBox", size_attributes, 1)
            + "\n"
        )


def _get_rank_y(rank: int) -> float:
    return RANK_HEIGHT * (rank + 0.5)


def _draw_computation_box(axes: Any, rank: int, left: float, text: str) -> None:
    """Draw what a rank computes, at the left of a round."""
    from matplotlib.patches import Rectangle

    width = LETTER_WIDTH * len(text) + 8
    axes.add_patch(
        Rectangle(
            (left, _get_rank_y(rank) - 9),
            width,
            18,
            facecolor=PAPER,
            edgecolor=INK,
            linewidth=1,
            zorder=4,
        )
    )
    axes.text(
        left + width / 2,
        _get_rank_y(rank),
        text,
        color=INK,
        fontsize=TEXT_SIZE - 1,
        ha="center",
        va="center",
        zorder=5,
    )


def _draw_message_arrow(axes: Any, number: int, arrow: Arrow, label: str, column: float) -> None:
    """Draw a message in its sender's colour, with a label beside the head, on the free side."""
    from matplotlib.patches import FancyArrowPatch

    colour = COLOURS[arrow.source % len(COLOURS)]
    start = MARGIN + column * arrow.sent + 5, _get_rank_y(arrow.source)
    end = MARGIN + column * arrow.received + ARROW_WIDTH, _get_rank_y(arrow.target)
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=0,
            shrinkB=0,
            color=colour,
            linewidth=1.3,
            zorder=2,
            gid=f"message-{number}",
        )
    )
    below = arrow.source < arrow.target
    axes.annotate(
        label,
        end,
        (3, -3 if below else 3),
        textcoords="offset points",
        color=colour,
        fontsize=TEXT_SIZE - 1,
        va="top" if below else "bottom",
        zorder=3,
    )
