"""The page of a comparison: one HTML file that needs no network, for reading, printing and
sending on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from paragrad.report import charts, page_text
from paragrad.report.comparison_table import cells, columns_of, notes
from paragrad.report.palette import PALETTE
from paragrad.report.results import TWIN, Results, Row
from paragrad.report.sections import Sections


def write_page(table: Results) -> Path:
    """Write page.html into the comparison's folder; its path."""
    page = table.folder / "page.html"
    partial = page.with_name("page.html.partial")
    partial.write_text(rendered(table), encoding="utf-8")
    partial.rename(page)
    return page


def rendered(table: Results) -> str:
    """The page as text. What a record lacks is a sentence in the place of its chart."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    styles = [charts.style(place, row.strategy == TWIN) for place, row in enumerate(table.rows)]
    return templates.get_template("page.html.jinja").render(
        title=f"{table.job}: {page_text.count(table)}",
        made=page_text.made(table),
        lead=page_text.lead_of(table),
        palette=PALETTE,
        twin=TWIN,
        columns=columns_of(table),
        notes=notes(table),
        sections=Sections(table, styles).all(),
        breakable=breakable,
        rows=[TableRow(place, row, cells(table, row)) for place, row in enumerate(table.rows)],
        samples=[
            Markup(charts.sample(f"style-{place}", each)) for place, each in enumerate(styles)
        ],
        definitions=page_text.definitions(table),
        facts=page_text.facts(table),
        ran=[page_text.ran(table, row) for row in table.rows if row.resolved],
        repeat=table.asked["command"] or page_text.call(table),
        typed=table.asked["command"] is not None,
    )


@dataclass(frozen=True)
class TableRow:
    """A row of the page's table."""

    place: int
    row: Row
    cells: list[str]

    @property
    def told(self) -> list[tuple[int, str, int]]:
        """(column, text, columns it spans): what follows a failure and is empty makes room for
        its message.
        """
        if self.row.seconds_per_step is not None:
            return [(place, text, 1) for place, text in enumerate(self.cells)]
        return [(0, self.cells[0], 1), (1, self.cells[1], len(self.cells) - 1)]


def breakable(text: str) -> Markup:
    """A column's name, which may be broken after / and =."""
    return Markup(re.sub("([/=])", r"\1<wbr>", str(escape(text))))
