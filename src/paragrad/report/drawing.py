"""A schedule as a space-time diagram, in SVG: a line for each rank, a column for each round, an arrow for each message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.players.draw import Arrow, Diagram
from paragrad.report.charts import COLOURS, FAINT, INK, MUTED, TEXT, drawing, inline
from paragrad.schedules.actions import Schedule, shown

MARGIN, ROW = 34, 62                # units beside the first round; between two ranks
SLOPE, LETTER = 46, 6.6             # units of a round for its arrows; of a letter of its labels


def write_space_time(schedule: Schedule, size: int, file: Path) -> None:
    """The diagram as an SVG file. Raises Refused where it cannot be written."""
    try:
        file.write_text(space_time(schedule, size))
    except OSError as error:
        raise Refused(f"--svg {file}: {error.strerror}; give a file in a folder that is there and can be written") from None


def space_time(schedule: Schedule, size: int) -> str:
    """The diagram of a schedule over `size` ranks, the rounds being those of `paragrad draw`.

    A message leaves its sender's line at the left of the round it is sent in, and comes to its receiver's at the right of the
    round it is received in, where its slot stands, with + where it is added.
    """
    diagram = Diagram.of(schedule, size)
    labels = [shown(arrow.slot) + ("+" if arrow.added else "") for arrow in diagram.arrows]
    column = SLOPE + LETTER * max(map(len, labels), default=1) + 14
    width, height = 2 * MARGIN + column * max(1, diagram.columns), ROW * size
    with drawing("schedule", width, height) as figure:
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        for rank in range(size):
            axes.plot([MARGIN, width - MARGIN], [_line(rank)] * 2, color=MUTED, linewidth=1, zorder=1)
            axes.text(MARGIN - 12, _line(rank), str(rank), color=INK, ha="right", va="center")
        for place in range(1, diagram.columns):
            axes.plot([MARGIN + column * place] * 2, [0, height], color=FAINT, linewidth=1, zorder=0)
        for number, (arrow, label) in enumerate(zip(diagram.arrows, labels, strict=True)):
            _message(axes, number, arrow, label, column)
        told = f"{schedule} over {size} ranks: {len(diagram.arrows)} messages in {diagram.columns} rounds"
        return inline(figure, "schedule", told).replace(" viewBox", f' width="{width:g}" height="{height:g}" viewBox', 1) + "\n"


def _line(rank: int) -> float:
    return ROW * (rank + 0.5)


def _message(axes: Any, number: int, arrow: Arrow, label: str, column: float) -> None:
    """Coloured by its sender; the label beside its head, on the side it does not come from."""
    from matplotlib.patches import FancyArrowPatch
    colour = COLOURS[arrow.source % len(COLOURS)]
    start = MARGIN + column * arrow.sent + 5, _line(arrow.source)
    end = MARGIN + column * arrow.received + SLOPE, _line(arrow.target)
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0, color=colour,
                                   linewidth=1.3, zorder=2, gid=f"message-{number}"))
    below = arrow.source < arrow.target
    axes.annotate(label, end, (3, -3 if below else 3), textcoords="offset points", color=colour, fontsize=TEXT - 1,
                  va="top" if below else "bottom", zorder=3)
