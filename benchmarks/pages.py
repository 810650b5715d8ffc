"""Pages of docs/ whose tables a benchmark writes. It replaces the text between `<!-- NAME -->` and
`<!-- end -->`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
FIGURES = DOCS / "figures"


def fill_block(text: str, name: str, block: str) -> str:
    """Return the text of a page in which the block of this name is replaced."""
    before, rest = text.split(f"<!-- {name} -->\n")
    return f"{before}<!-- {name} -->\n{block}\n{rest[rest.index('<!-- end -->') :]}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def format_plot(plot: str, told: str) -> str:
    """Return the Markdown of a plot below a table, with a sentence about what the plot shows."""
    told = told[0].upper() + told[1:]
    return f"\n\n![{told}](../figures/{plot}.svg)\n\n{told}."


def find_results_file(name: str, parts: Sequence[str] | None) -> Path:
    """Return the file with the measurements of a benchmark, or of some of its parts."""
    return FIGURES / f"{'_'.join([name, *(parts or ())])}.json"


def format_milliseconds(seconds: float) -> str:
    """Return seconds as the milliseconds of a table cell."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
