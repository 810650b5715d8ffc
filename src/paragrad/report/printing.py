"""Prints facts and rows to standard output: tables at a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print a line for each fact.

    Args:
        facts: (name, value).
    """
    for name, value in facts:
        Console(soft_wrap=True).print(f"{name}: {value}", highlight=False, markup=False)


def print_rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows as a table at a terminal, and as tab-separated lines without a heading in a pipe.

    Args:
        columns: The headings.
        rows: The cells of each row.
    """
    console = Console()
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)
