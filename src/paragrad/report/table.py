"""The table of a comparison: drawn at a terminal, tab-separated lines in a pipe."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.table import Table as Drawn

from paragrad.record import Line
from paragrad.results import TWIN, Row, Table

TOO_SHORT = 5e-3        # seconds of a serial step below which one exchange costs more than a second worker saves

COLUMNS = ("strategy", "test {metric}", "ms/step", "speed-up", "over 1 thread", "sent/rank/step", "difference", "where largest",
           "parameters")


def columns_of(table: Table) -> list[str]:
    """The names of the columns of a comparison."""
    named = [column.format(metric=table.metric) for column in COLUMNS]
    if table.until:
        named[2:2] = [f"{what} to {table.until}" for what in ("seconds", "epochs", "samples")]
    return named


def show(table: Table, console: Console) -> None:
    """Print the table and the lines that explain it."""
    columns, shown = columns_of(table), [*notes(table), f"record: {table.folder}", f"page: {table.folder / 'page.html'}"]
    if not console.is_terminal:
        print("\t".join(columns))
        for row in table.rows:
            print("\t".join(cells(table, row)))
        print("\n".join(f"# {note}" for note in shown))
    else:
        drawn = Drawn(title=f"{table.job}: {len(table.rows)} strategies", title_justify="left")
        for place, column in enumerate(columns):
            drawn.add_column(column, no_wrap=place == 0, overflow="fold")
        for row in table.rows:
            drawn.add_row(*cells(table, row))
        console.print(drawn)
        for note in shown:
            console.print(note, highlight=False, soft_wrap=True, markup=False)


def cells(table: Table, row: Row) -> list[str]:
    """A row as text."""
    if row.seconds_per_step is None:
        return [row.strategy, f"failed: {row.failure}", *[""] * (len(columns_of(table)) - 2)]
    reference = row.resolved.startswith("serial") and "micro" not in row.resolved and row.strategy != TWIN
    difference = "reference" if reference else "-" if row.difference is None else f"{row.difference:.1e}"
    return [row.strategy, _test(row), *(_goal(row) if table.until else []), f"{1e3 * row.seconds_per_step:.2f}",
            _times(row.speed_up), _times(row.speed_up_one_thread), sent(row.sent),
            f"failed: {row.failure}" if row.failure else difference, row.tensor or "", " ".join(row.digests)]


def _test(row: Row) -> str:
    if row.test is None:
        return "-"
    return f"{row.test:.2f}" + (f" ± {row.spread:.2f}" if row.spread is not None else "")


def _goal(row: Row) -> list[str]:
    """Seconds, epochs and samples to the goal: means over the seeds, or how many seeds came there."""
    there = [reached for reached in row.reached if reached is not None]
    if len(there) < len(row.reached):
        return [f"{len(there)} of {len(row.reached)} seeds reach it", "-", "-"]
    return [f"{fmean(each.seconds for each in there):.1f}", f"{fmean(each.epochs for each in there):.1f}",
            f"{fmean(each.samples for each in there):,.0f}"]


def sent(kinds: dict[str, Line]) -> str:
    """Bytes by kind; * marks what was computed from the closed form of the backend's own collective."""
    return ", ".join(f"{kind} {number['bytes']:,}{'*' if number['computed'] else ''}" for kind, number in kinds.items()) or "0"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def notes(table: Table) -> list[str]:
    """The lines under the table."""
    machine = table.machine
    lines = [f"machine: {machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}, Python {machine['python']}",
             f"speed-up: over serial with all {machine['cores']} threads; difference: from serial in float64 over 20 steps; "
             "parameters: digest of the final ones"]
    if any(row.seeds > 1 for row in table.rows):
        lines.append(f"test {table.metric}: mean ± standard deviation over {table.rows[0].seeds} seeds; "
                     "parameters: one digest per seed")
    if any(number["computed"] for row in table.rows for number in row.sent.values()):
        lines.append("*: computed from the closed form of the backend's own collective; the rest was counted on the wire")
    serial = next((row.seconds_per_step for row in table.rows if row.resolved.startswith("serial")), None)
    if serial is not None and serial < TOO_SHORT:
        lines.append(f"No speed-up is promised on {table.job}: a serial step takes {1e3 * serial:.2f} ms, "
                     "too short for an exchange to pay; it shows that the training is the same")
    return lines
