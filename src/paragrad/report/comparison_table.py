"""The table of a comparison: drawn at a terminal, tab-separated lines in a pipe."""

from __future__ import annotations

from html import escape
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table as Drawn

from paragrad.record.record import Line
from paragrad.report.results import ComparisonResults, ComparisonRow
from paragrad.report.timing import MIN_BLOCKS, SpeedUp, StepTime

# seconds of a serial step below which one exchange costs more than a second worker saves
MIN_SERIAL_SECONDS = 5e-3

# what * means at a number of bytes
COMPUTED_NOTE = "computed from the closed form of the backend's own collective"

TABLE_COLUMNS = (
    "strategy",
    "test {metric}",
    "ms/step",
    "speed-up",
    "over 1 thread",
    "sent/rank/step",
    "memory",
    "difference",
    "where largest",
    "parameters",
)

# columns whose cells may take several lines
FOLDED_COLUMNS = ("strategy", "where largest", "parameters")
DROPPABLE_COLUMNS = (
    "where largest",
    "over 1 thread",
    "samples to",
    "epochs to",
    "sent/rank/step",
    "seconds to",
    "memory",
    "parameters",
    "speed-up",
)
# characters that a strategy gets, before it takes a second line
STRATEGY_WIDTH = len("data(2, reduce=ring_async)")
NARROW_STYLE: dict[str, Any] = {
    "box": SIMPLE_HEAVY,
    "pad_edge": False,
    "padding": (0, 1, 0, 0),
    "show_edge": False,
}


class Table(ComparisonResults):
    """A comparison, read from its folder; it prints as its table."""

    def __str__(self) -> str:
        return format_table(self)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        rows = [
            [f"<th>{escape(each)}</th>" for each in list_columns(self)],
            *(
                [f"<td>{escape(each)}</td>" for each in _shorten_failures(format_cells(self, row))]
                for row in self.rows
            ),
        ]
        notes = "<br>".join(map(escape, [*_list_failures(self), *_list_footer_lines(self)]))
        return (
            "<table>"
            + "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
            + f"</table><p>{notes}</p>"
        )


def list_columns(table: ComparisonResults) -> list[str]:
    """The names of the columns of a comparison."""
    named = [column.format(metric=table.metric) for column in TABLE_COLUMNS]
    if table.until:
        named[2:2] = [f"{what} to {table.until}" for what in ("seconds", "epochs", "samples")]
    return named


def print_table(table: ComparisonResults, console: Console) -> None:
    """Print the table and the lines that explain it."""
    if not console.is_terminal:
        print("\t".join(list_columns(table)))
        for each in table.rows:
            print("\t".join(format_cells(table, each)))
        print("\n".join(f"# {note}" for note in _list_footer_lines(table)))
        return
    columns = list_columns(table)
    rows = [_shorten_failures(format_cells(table, row)) for row in table.rows]
    narrow = (
        sum(max(map(len, each)) + 3 for each in zip(columns, *rows, strict=True)) + 1
        > console.width
    )
    places = choose_columns(columns, rows, console.width) if narrow else list(range(len(columns)))
    drawn = Drawn(
        title=f"{table.job}: {len(table.rows)} strategies",
        title_justify="left",
        **(NARROW_STYLE if narrow else {}),
    )
    for place in places:
        heading = columns[place].replace(" ", "\n") if narrow else columns[place]
        drawn.add_column(heading, no_wrap=columns[place] not in FOLDED_COLUMNS, overflow="fold")
    for texts in rows:
        drawn.add_row(*(texts[place] for place in places))
    console.print(drawn, markup=False)
    missing = [column for place, column in enumerate(columns) if place not in places]
    left_out = (
        [f"in page.html, too wide for this terminal: {', '.join(missing)}"] if missing else []
    )
    for note in [*_list_failures(table), *left_out, *_list_footer_lines(table)]:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def choose_columns(columns: list[str], rows: list[list[str]], width: int) -> list[int]:
    """The places of the columns that a terminal of so many characters has room for; the least
    useful ones go first.
    """

    def needed(place: int) -> int:
        """Characters of a column and the space after it; headings break between words, and so
        do some cells.
        """
        texts = [row[place] for row in rows]
        if place == 0:
            return min(max(map(len, texts)), STRATEGY_WIDTH) + 2
        words = (
            [word for text in texts for word in text.split()]
            if columns[place] in FOLDED_COLUMNS
            else texts
        )
        return max(map(len, [*columns[place].split(), *words])) + 2

    kept = list(range(len(columns)))
    for column in [
        column for name in DROPPABLE_COLUMNS for column in columns if column.startswith(name)
    ]:
        if sum(map(needed, kept)) - 2 <= width:
            break
        kept.remove(columns.index(column))
    return kept


def format_table(table: ComparisonResults) -> str:
    """The table as text in columns, with its notes: what print(table) shows."""
    columns = list_columns(table)
    rows = [_shorten_failures(format_cells(table, row)) for row in table.rows]
    widths = [max(len(line[place]) for line in [columns, *rows]) for place in range(len(columns))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in [columns, *rows]]
    return "\n".join([*lines, *_list_failures(table), *_list_footer_lines(table)])


def _list_footer_lines(table: ComparisonResults) -> list[str]:
    return [*list_notes(table), f"record: {table.folder}", f"page: {table.folder / 'page.html'}"]


def _shorten_failures(texts: list[str]) -> list[str]:
    """A row whose failures are told below, where there is room."""
    return ["failed" if text.startswith("failed: ") else text for text in texts]


def _list_failures(table: ComparisonResults) -> list[str]:
    return [
        f"{row.strategy} failed: {row.failure}"
        for row in table.rows
        if row.failure and row.resolved
    ]


def format_cells(table: ComparisonResults, row: ComparisonRow) -> list[str]:
    """A row as text."""
    if row.seconds_per_step is None:
        return [
            row.strategy,
            f"failed: {row.failure}" if row.resolved else "not run",
            *[""] * (len(list_columns(table)) - 2),
        ]
    difference = (
        "reference" if row.reference else "-" if row.difference is None else f"{row.difference:.1e}"
    )
    return [
        row.strategy,
        _format_test(row),
        *(_format_goal(table, row) if table.until else []),
        _format_milliseconds(row),
        _format_speed_up(row.faster),
        _format_speed_up(row.faster_than_one_thread),
        format_sent_bytes(row.sent),
        format_row_memory(row),
        f"failed: {row.failure}" if row.failure else difference,
        row.tensor or "",
        " ".join(row.digests),
    ]


def _format_test(row: ComparisonRow) -> str:
    if row.test is None:
        return "-"
    return f"{row.test:.2f}" + (f" ± {row.spread:.2f}" if row.spread is not None else "")


def _format_goal(table: ComparisonResults, row: ComparisonRow) -> list[str]:
    """Seconds, epochs and samples to the goal: means over the seeds, or how many seeds came
    there.
    """
    there = [reached for reached in row.reached if reached is not None]
    if len(there) < len(row.reached):
        return [f"{len(there)} of {len(row.reached)} seeds reach it", "-", "-"]
    return [
        f"{fmean(each.seconds for each in there):.1f}{_get_crowded_mark(row.times)}",
        f"{fmean(each.epochs for each in there):.1f}",
        f"{fmean(each.samples for each in there):,.0f}",
    ]


def format_sent_bytes(kinds: dict[str, Line]) -> str:
    """Bytes by kind; * marks what was computed from the closed form of the backend's own
    collective.
    """
    return (
        ", ".join(
            f"{kind} {number['bytes']:,}{'*' if number['computed'] else ''}"
            for kind, number in kinds.items()
        )
        or "0"
    )


def format_row_memory(row: ComparisonRow) -> str:
    """Of the fullest rank."""
    return format_bytes(sum(row.fullest.values())) if row.fullest else "-"


def format_memory_kinds(memory: dict[str, int]) -> str:
    """Bytes by kind, what there is, in the units that people use."""
    return ", ".join(f"{kind} {format_bytes(number)}" for kind, number in memory.items() if number)


def format_bytes(number: float) -> str:
    """Bytes in the unit that people use."""
    for unit in ("bytes", "KB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.1f} GB"


def _format_milliseconds(row: ComparisonRow) -> str:
    return f"{1e3 * (row.seconds_per_step or 0.0):.2f}{_get_crowded_mark(row.times)}"


def _format_speed_up(faster: SpeedUp | None) -> str:
    return (
        "-"
        if faster is None
        else f"{faster}{_get_crowded_mark(faster) if faster.finite_bounds else ''}"
    )


def _get_crowded_mark(told: StepTime | SpeedUp | None) -> str:
    """What stands behind a time that was taken while others kept the machine busy."""
    return "!" if told and told.crowded else ""


def list_timing_doubts(table: ComparisonResults) -> list[str]:
    """Why some times and ratios are not to be believed, or are not told."""
    taken = [
        *(row.times for row in table.rows),
        *(found for _, found in table.serial_times.values()),
    ]
    crowded = [each.load for each in taken if each and each.load and each.crowded]
    ratios = [
        each for row in table.rows for each in (row.faster, row.faster_than_one_thread) if each
    ]
    told = []
    if crowded:
        often, most = (
            max(getattr(load, name) for load in crowded) for name in ("switched", "others")
        )
        told.append(
            f"!: other work kept up to {most:.1f} of {crowded[0].cores} cores busy meanwhile"
            + (
                f", and the system gave a rank's core to another thread up to {often:,.0f} times a "
                f"second"
                if often >= 1
                else ""
            )
            + "; such times say little"
        )
    if any(each.finite_bounds is not None and not each.is_significant for each in ratios):
        told.append(
            "two numbers (as 0.8-1.3x) in place of a speed-up: the times of steps scatter so much "
            "that it may lie "
            "anywhere between them (90 % interval)"
        )
    if any(each.finite_bounds is None for each in ratios):
        told.append(
            f"no speed-up (-) where a strategy made fewer than {MIN_BLOCKS} steps after its first: "
            f"so "
            f"few say nothing"
        )
    return told


def list_notes(table: ComparisonResults) -> list[str]:
    """The lines under the table."""
    machine = table.machine
    ended = table.ending["status"], table.ending["error"]
    lines = (
        []
        if ended[0] == "finished" or not table.missing
        else [
            f"the comparison "
            f"{'was ' if ended[0] != 'died' and ended[0] != 'failed' else ''}{ended[0]}"
            + (f" ({ended[1]})" if ended[1] else "")
            + f"; not done: {'; '.join(table.missing)}"
        ]
    )
    lines += [
        f"machine: {machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}, Python "
        f"{machine['python']}",
        f"speed-up: over serial with all {machine['cores']} threads; difference: from serial in "
        f"float64 over 20 steps; "
        "parameters: digest of the final ones",
    ]
    lines += list_timing_doubts(table)
    if any(row.seeds > 1 for row in table.rows):
        lines.append(
            f"test {table.metric}: mean ± standard deviation over {table.rows[0].seeds} seeds; "
            "parameters: one digest per seed"
        )
    if any(number["computed"] for row in table.rows for number in row.sent.values()):
        lines.append(f"*: {COMPUTED_NOTE}; the rest was counted on the wire")
    looser = [row.strategy for row in table.rows if not row.exact]
    if looser:
        lines.append(
            f"{'; '.join(looser)}: another training than serial's, by design; tests judge it, not "
            f"the difference"
        )
    serial = next((row.seconds_per_step for row in table.rows if row.reference), None)
    if serial is not None and serial < MIN_SERIAL_SECONDS:
        lines.append(
            f"No speed-up is promised on {table.job}: a serial step takes {1e3 * serial:.2f} ms, "
            "too short for an exchange to pay; it shows that the training is the same"
            + (" under the others" if looser else "")
        )
    return lines
