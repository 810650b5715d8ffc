"""The table of a comparison: drawn at a terminal, tab-separated lines in a pipe."""

from __future__ import annotations

from html import escape
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table as Drawn

from paragrad.loops.plain_pytorch import PLAIN_PYTORCH
from paragrad.record.record import Line
from paragrad.report.results import ComparisonResults, ComparisonRow
from paragrad.report.run import format_test_value
from paragrad.report.timing import MIN_BLOCKS, SpeedUp, StepTime

# seconds: in a shorter serial step, an exchange costs more than a second worker saves
MIN_SERIAL_SECONDS = 5e-3

# the meaning of * at a number of bytes
COMPUTED_NOTE = "computed from the formula of the backend's own collective"

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

# columns with cells that may take several lines
FOLDED_COLUMNS = ("strategy", "where largest", "parameters")
# columns that a narrow terminal leaves out, the least useful first
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
# characters of a strategy in one line; a longer one takes a second line
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
        """The table as a notebook shows it."""
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
    """List the names of the columns of a comparison.

    Args:
        table: The comparison.

    Returns:
        The names.
    """
    names = [column.format(metric=table.metric) for column in TABLE_COLUMNS]
    if table.until:
        names[2:2] = [f"{what} to {table.until}" for what in ("seconds", "epochs", "samples")]
    return names


def print_table(table: ComparisonResults, console: Console) -> None:
    """Print the table and the lines that explain it.

    Args:
        table: The comparison.
        console: The console to print to.
    """
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
    rich_table = Drawn(
        title=f"{table.job}: {len(table.rows)} strategies",
        title_justify="left",
        **(NARROW_STYLE if narrow else {}),
    )
    for place in places:
        heading = columns[place].replace(" ", "\n") if narrow else columns[place]
        rich_table.add_column(
            heading, no_wrap=columns[place] not in FOLDED_COLUMNS, overflow="fold"
        )
    for texts in rows:
        rich_table.add_row(*(texts[place] for place in places))
    console.print(rich_table, markup=False)
    left_out_columns = [column for place, column in enumerate(columns) if place not in places]
    left_out = (
        [f"in page.html, too wide for this terminal: {', '.join(left_out_columns)}"]
        if left_out_columns
        else []
    )
    for note in [*_list_failures(table), *left_out, *_list_footer_lines(table)]:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def choose_columns(columns: list[str], rows: list[list[str]], width: int) -> list[int]:
    """Choose the columns that fit into a terminal; the least useful ones are left out first.

    Args:
        columns: The names of the columns.
        rows: The cells of each row.
        width: The width of the terminal, in characters.

    Returns:
        The places of the columns.
    """

    def measure_column(place: int) -> int:
        """The width of a column and the space after it.

        Headings break between words, and so do some cells.
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

    kept_places = list(range(len(columns)))
    for column in [
        column for name in DROPPABLE_COLUMNS for column in columns if column.startswith(name)
    ]:
        if sum(map(measure_column, kept_places)) - 2 <= width:
            break
        kept_places.remove(columns.index(column))
    return kept_places


def format_table(table: ComparisonResults) -> str:
    """Format the table as text in columns, with its notes: what print(table) shows.

    Args:
        table: The comparison.

    Returns:
        The text.
    """
    columns = list_columns(table)
    rows = [_shorten_failures(format_cells(table, row)) for row in table.rows]
    widths = [max(len(line[place]) for line in [columns, *rows]) for place in range(len(columns))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in [columns, *rows]]
    return "\n".join([*lines, *_list_failures(table), *_list_footer_lines(table)])


def list_other_baselines(table: ComparisonResults) -> list[str]:
    """List the strategies that were compared with another training than serial, with the reason.

    Args:
        table: The comparison.

    Returns:
        A line for each such training.
    """
    strategies: dict[str, list[str]] = {}
    for row in table.rows:
        if row.baseline not in (None, "serial"):
            strategies.setdefault(row.baseline, []).append(row.strategy)
    return [
        f"{'; '.join(names)}: compared with {baseline}, because batch norm takes its statistics "
        "over micro-batches; that training may differ from serial's"
        for baseline, names in strategies.items()
    ]


def list_other_overflows(table: ComparisonResults) -> list[str]:
    """List the strategies under which other steps overflowed in float16 than under serial.

    Args:
        table: The comparison.

    Returns:
        A line for each step at which such trainings part from serial's.
    """
    serial = next((row.overflowed_steps for row in table.rows if row.reference), ())
    strategies: dict[int, list[str]] = {}
    for row in table.rows:
        other_steps = [
            step
            for own, expected in zip(row.overflowed_steps, serial, strict=False)
            for step in set(own) ^ set(expected)
        ]
        if other_steps and row.exact:
            strategies.setdefault(min(other_steps), []).append(row.strategy)
    return [
        f"{'; '.join(names)}: not the training of serial from step {step} on. In that step a "
        "gradient overflowed in float16 in only one of the two: parts of a batch have other "
        "gradients than the whole batch. bfloat16 has the range of float32"
        for step, names in sorted(strategies.items())
    ]


def _list_footer_lines(table: ComparisonResults) -> list[str]:
    return [*list_notes(table), f"record: {table.folder}", f"page: {table.folder / 'page.html'}"]


def _shorten_failures(texts: list[str]) -> list[str]:
    """The cells of a row with failures shortened; their messages follow below the table."""
    return ["failed" if text.startswith("failed: ") else text for text in texts]


def _list_failures(table: ComparisonResults) -> list[str]:
    return [
        f"{row.strategy} failed: {row.failure}"
        for row in table.rows
        if row.failure and row.resolved
    ]


def format_cells(table: ComparisonResults, row: ComparisonRow) -> list[str]:
    """Format a row as text.

    Args:
        table: The comparison.
        row: The row.

    Returns:
        The cells.
    """
    if row.times is None:
        return [
            row.strategy,
            f"failed: {row.failure}" if row.resolved else "not run",
            *[""] * (len(list_columns(table)) - 2),
        ]
    is_reference = row.reference or row.strategy in {each.baseline for each in table.rows}
    difference = (
        "reference" if is_reference else "-" if row.difference is None else f"{row.difference:.1e}"
    )
    return [
        row.strategy,
        _format_test(table, row),
        *(_format_goal(table, row) if table.until else []),
        _format_milliseconds(row.times),
        _format_speed_up(row.faster),
        _format_speed_up(row.faster_than_one_thread),
        format_sent_bytes(row.sent),
        format_row_memory(row),
        f"failed: {row.failure}" if row.failure else difference,
        row.tensor or "",
        " ".join(row.digests),
    ]


def _format_test(table: ComparisonResults, row: ComparisonRow) -> str:
    if row.test is None:
        return "-"
    return format_test_value(row.test, table.header["job"].get("unit", ""), row.spread)


def _format_goal(table: ComparisonResults, row: ComparisonRow) -> list[str]:
    """Seconds, epochs and samples to the goal (means over seeds), or how many seeds reached it."""
    reached_goals = [reached for reached in row.reached if reached is not None]
    if len(reached_goals) < len(row.reached):
        return [f"{len(reached_goals)} of {len(row.reached)} seeds reach it", "-", "-"]
    return [
        f"{fmean(goal.seconds for goal in reached_goals):.1f}{_get_crowded_mark(row.times)}",
        f"{fmean(goal.epochs for goal in reached_goals):.1f}",
        f"{fmean(goal.samples for goal in reached_goals):,.0f}",
    ]


def format_sent_bytes(kinds: dict[str, Line]) -> str:
    """Format bytes by kind; * marks bytes that come from the closed form of a backend's collective.

    Args:
        kinds: {kind: {bytes, computed}}.

    Returns:
        The text.
    """
    return (
        ", ".join(
            f"{kind} {number['bytes']:,}{'*' if number['computed'] else ''}"
            for kind, number in kinds.items()
        )
        or "0"
    )


def format_row_memory(row: ComparisonRow) -> str:
    """Format the memory of the fullest rank.

    Args:
        row: The row.

    Returns:
        The text.
    """
    return format_bytes(sum(row.fullest.values())) if row.fullest else "-"


def format_memory_kinds(memory: dict[str, int]) -> str:
    """Format bytes by kind, without kinds of 0 bytes.

    Args:
        memory: Bytes by kind.

    Returns:
        The text.
    """
    return ", ".join(f"{kind} {format_bytes(number)}" for kind, number in memory.items() if number)


def format_bytes(number: float) -> str:
    """Format a number of bytes with its unit: bytes, KB, MB or GB.

    Args:
        number: The number of bytes.

    Returns:
        The text.
    """
    for unit in ("bytes", "KB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.1f} GB"


def _format_milliseconds(times: StepTime) -> str:
    return f"{1e3 * times.seconds:.2f}{_get_crowded_mark(times)}"


def _format_speed_up(faster: SpeedUp | None) -> str:
    return (
        "-"
        if faster is None
        else f"{faster}{_get_crowded_mark(faster) if faster.finite_bounds else ''}"
    )


def _get_crowded_mark(told: StepTime | SpeedUp | None) -> str:
    """The mark of a time that was measured while other processes kept the machine busy."""
    return "!" if told and told.crowded else ""


def describe_speed_baseline(table: ComparisonResults) -> str:
    """Describe what the speed-ups are over, and what serial takes.

    Args:
        table: The comparison.

    Returns:
        The sentence.
    """
    threads = f"all {table.machine['cores']} threads"
    serial_time = table.serial_time and f"{_format_milliseconds(table.serial_time)} ms/step"
    if table.plain_time is None:
        return (
            f"speed-up: over serial with {threads}{f' ({serial_time})' if serial_time else ''}, "
            f"because {table.explain_no_plain_time()}"
        )
    return (
        f"speed-up: over a {PLAIN_PYTORCH} with {threads} "
        f"({_format_milliseconds(table.plain_time)} ms/step)"
        + (f"; paragrad's serial with {threads} takes {serial_time}" if serial_time else "")
    )


def list_timing_doubts(table: ComparisonResults) -> list[str]:
    """List why some times and ratios are doubtful or not shown.

    Args:
        table: The comparison.

    Returns:
        The sentences.
    """
    step_times = [
        *(row.times for row in table.rows),
        table.plain_time,
        *(found for _, found in table.serial_times.values()),
    ]
    loads = [each.load for each in step_times if each and each.load and each.crowded]
    ratios = [
        each for row in table.rows for each in (row.faster, row.faster_than_one_thread) if each
    ]
    sentences = []
    if loads:
        switches, cores = (
            max(getattr(load, name) for load in loads) for name in ("switched", "others")
        )
        sentences.append(
            f"!: other programs kept up to {cores:.1f} of {loads[0].cores} cores busy during the "
            "run"
            + (
                f", and the system gave a rank's core to another thread up to {switches:,.0f} "
                "times per second"
                if switches >= 1
                else ""
            )
            + "; do not trust these times"
        )
    if any(each.is_narrow and not each.is_significant for each in ratios):
        sentences.append(
            "two numbers, such as 0.8-1.3x: the speed-up lies between them (90 % interval); the "
            "times of steps vary too much for one number"
        )
    if any(each.finite_bounds is not None and not each.is_narrow for each in ratios):
        sentences.append(
            "unknown: the times of steps vary so much that one end of the speed-up's 90 % interval "
            "is more than twice the other end; train more epochs"
        )
    if any(each.finite_bounds is None for each in ratios):
        sentences.append(
            f"- as speed-up: fewer than {MIN_BLOCKS} steps were timed, too few for a speed-up; the "
            "first ones warm up and do not count"
        )
    return sentences


def list_notes(table: ComparisonResults) -> list[str]:
    """List the lines below the table.

    Args:
        table: The comparison.

    Returns:
        The lines.
    """
    machine = table.machine
    ending = table.ending["status"], table.ending["error"]
    lines = (
        []
        if ending[0] == "finished" or not table.missing
        else [
            "the comparison "
            f"{'was ' if ending[0] != 'died' and ending[0] != 'failed' else ''}{ending[0]}"
            + (f" ({ending[1]})" if ending[1] else "")
            + f"; not done: {'; '.join(table.missing)}"
        ]
    )
    lines += [
        f"machine: {machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}, Python "
        f"{machine['python']}",
        describe_speed_baseline(table),
        "difference: from serial in float64 over 20 steps; parameters: digest of the final "
        "parameters",
    ]
    lines += list_timing_doubts(table)
    if any(row.seeds > 1 for row in table.rows):
        lines.append(
            f"test {table.metric}: mean ± standard deviation over {table.rows[0].seeds} seeds; "
            "parameters: one digest per seed"
        )
    if any(number["computed"] for row in table.rows for number in row.sent.values()):
        lines.append(f"*: {COMPUTED_NOTE}; numbers without * are counted")
    lines += list_other_baselines(table)
    lines += list_other_overflows(table)
    inexact = [row.strategy for row in table.rows if not row.exact]
    if inexact:
        lines.append(
            f"{'; '.join(inexact)}: by design not the same training as serial; judge it by the "
            "test, not by the difference"
        )
    serial_seconds = next((row.seconds_per_step for row in table.rows if row.reference), None)
    if serial_seconds is not None and serial_seconds < MIN_SERIAL_SECONDS:
        lines.append(
            f"expect no speed-up on {table.job}: a serial step takes only "
            f"{1e3 * serial_seconds:.2f} ms, so an exchange costs more time than it saves; the "
            "comparison shows that the training is the same"
            + (" under the other strategies" if inexact else "")
        )
    return lines
