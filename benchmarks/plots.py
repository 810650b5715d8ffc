"""Plots for the pages of docs/, as panels next to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paragrad.report.charts import open_figure

WIDTH = 760  # of a plot


def draw_panels(
    path: Path, count: int, height: float, draw: Callable[[Sequence[Any]], None]
) -> None:
    with open_figure(path.stem, WIDTH, height) as figure:
        figure.set_layout_engine("constrained")
        axes = [
            figure.add_subplot(
                -(-count // 2) if count > 3 else 1, 2 if count > 3 else count, number + 1
            )
            for number in range(count)
        ]
        draw(axes)
        entries: dict[str, Any] = {}
        for each in axes:
            each.grid(alpha=0.3)
            each.tick_params(labelsize=8)
            each.xaxis.label.set_size(9)
            each.yaxis.label.set_size(9)
            for axis in (each.xaxis, each.yaxis):
                # plain numbers: powers of ten would be drawn as formulas, not as text
                if axis.get_scale() == "log":
                    low, high = axis.get_view_interval()
                    axis.set_major_formatter("{x:,g}")
                    axis.set_minor_formatter("{x:,g}" if high < 20 * low else "")
            entries |= dict(zip(*reversed(each.get_legend_handles_labels()), strict=True))
        figure.legend(
            entries.values(),
            entries.keys(),
            loc="outside lower center",
            ncols=5,
            fontsize=7,
            frameon=False,
        )
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
