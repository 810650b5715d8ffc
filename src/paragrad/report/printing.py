"""Facts and rows on standard output: tables at a terminal, plain lines in a pipe, JSON where that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    for name, value in facts:
        Console(soft_wrap=True).print(f"{name}: {value}", highlight=False, markup=False)


def print_rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], as_json: bool) -> None:
    console = Console()
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
    elif not console.is_terminal:
        for row in rows:
            print("\t".join(row))
    else:
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
