"""The page of a comparison: one HTML file to read, print and send; it needs no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from paragrad.report import charts, page_text
from paragrad.report.comparison_table import format_cells, list_columns, list_notes
from paragrad.report.palette import PALETTE
from paragrad.report.results import ROUNDING_BASELINE, ComparisonResults, ComparisonRow
from paragrad.report.sections import Sections


def write_page(table: ComparisonResults) -> Path:
    """Write page.html into the folder of a comparison.

    Args:
        table: The comparison.

    Returns:
        The path of the page.
    """
    page = table.folder / "page.html"
    partial = page.with_name("page.html.partial")
    partial.write_text(render_page(table), encoding="utf-8")
    partial.rename(page)
    return page


def render_page(table: ComparisonResults) -> str:
    """Render the page as text.

    If a record lacks the values of a chart, a sentence takes its place.

    Args:
        table: The comparison.

    Returns:
        The HTML.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    styles = [
        charts.choose_style(place, row.strategy == ROUNDING_BASELINE)
        for place, row in enumerate(table.rows)
    ]
    return templates.get_template("page.html.jinja").render(
        title=f"{table.job}: {page_text.count_strategies(table)}",
        made=page_text.describe_creation(table),
        lead=page_text.write_lead(table),
        palette=PALETTE,
        twin=ROUNDING_BASELINE,
        columns=list_columns(table),
        notes=list_notes(table),
        sections=Sections(table, styles).build_sections(),
        breakable=mark_line_breaks,
        rows=[
            TableRow(place, row, format_cells(table, row)) for place, row in enumerate(table.rows)
        ],
        samples=[
            Markup(charts.draw_legend_sample(f"style-{place}", each))
            for place, each in enumerate(styles)
        ],
        definitions=page_text.define_columns(table),
        facts=page_text.list_job_facts(table),
        ran=[page_text.describe_row_runs(table, row) for row in table.rows if row.resolved],
        repeat=table.comparison_line["command"] or page_text.format_compare_call(table),
        typed=table.comparison_line["command"] is not None,
    )


@dataclass(frozen=True)
class TableRow:
    """A row of the page's table.

    Attributes:
        place: The number of the row.
        row: The values of the row.
        cells: The texts of its cells.
    """

    place: int
    row: ComparisonRow
    cells: list[str]

    @property
    def cell_spans(self) -> list[tuple[int, str, int]]:
        """(column, text, columns it spans): the message of a failure covers empty cells."""
        if self.row.seconds_per_step is not None:
            return [(place, text, 1) for place, text in enumerate(self.cells)]
        return [(0, self.cells[0], 1), (1, self.cells[1], len(self.cells) - 1)]


def mark_line_breaks(text: str) -> Markup:
    """Allow line breaks after / and = in the name of a column.

    Args:
        text: The name.

    Returns:
        The name as HTML.
    """
    return Markup(re.sub("([/=])", r"\1<wbr>", str(escape(text))))
