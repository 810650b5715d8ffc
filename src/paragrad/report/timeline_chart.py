"""The chart of one step: a row for each rank, what it did as boxes; the clock's prediction
above the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from paragrad.errors import Refused
from paragrad.executors.clock import Span, Timeline
from paragrad.executors.machine import Machine, read_machine
from paragrad.planner.step_timeline import FORETOLD, Foretold, foretold, measured, middle
from paragrad.record.record import Record
from paragrad.report.charts import TEXT, WIDTH, drawing, framed, inline
from paragrad.report.palette import FAINT, INK, KINDS, MUTED, PAPER
from paragrad.report.timing import StepTime, times_of

STEEL, OCHRE, MOSS, PLUM, ASH = KINDS
COLOURS = {
    "forward": STEEL,
    "backward": PLUM,
    "weights' part": OCHRE,
    "exchange": MOSS,
    "load, update": ASH,
    "waits": FAINT,
}
# of a rank, of which one is the next; rows between the two timelines
ROW = 0.8
BETWEEN = 0.9
LETTER = 7.0  # units of a label
RANKS = 16  # more are no picture


def kind_of(span: Span) -> str | None:
    """What its box is; None of what is none: parts of an exchange, which say how long and not
    when.
    """
    if span.name == "reduce":
        return "exchange"
    if span.name.startswith("reduce "):
        return "exchange" if span.lane == "send" else None
    if span.lane == "compute" and span.name not in ("load", "update"):
        return {"F": "forward", "W": "weights' part"}.get(span.name[:1], "backward")
    if span.lane == "send":
        return "exchange"
    return "waits" if span.lane in ("receive", "wait") else "load, update"


def boxes(timeline: Timeline) -> Iterator[tuple[str, Span]]:
    """(kind, span) of all that is drawn; of what a clock foretold, which tells of messages on
    their way, not of who waits for them, waiting is what lies between a rank's tasks.
    """
    waits_told = any(span.lane in ("wait", "update") for span in timeline.spans)
    for rank in range(len(timeline.ends)):
        own = sorted(
            (span for span in timeline.spans if span.rank == rank),
            key=lambda span: (span.start, -span.seconds),
        )
        if waits_told:
            yield from ((kind, span) for span in own if (kind := kind_of(span)))
            continue
        done = 0.0
        for span in (span for span in own if span.lane == "compute"):
            if span.start > done:
                yield "waits", Span(rank, "", "wait", done, span.start - done, 0)
            yield kind_of(span) or "", span
            done = span.start + span.seconds


def chart(name: str, found: Timeline, told: Foretold | None, alt: str) -> str:
    """The SVG: what was foretold above what was measured, over one axis of milliseconds."""
    ranks = len(found.ends)
    above = (ranks + BETWEEN) if told else 0.0
    with drawing(name, WIDTH, 24 * (ranks + above) + 62) as figure:
        axes = framed(figure, "", "ms")
        axes.grid(axis="y", visible=False)
        end = 1e3 * max(found.seconds, told.timeline.seconds if told else 0.0)
        if told:
            _rows(axes, told.timeline, 0.0, end, f"foretold: {1e3 * told.timeline.seconds:.3g} ms")
        _rows(axes, found, above, end, f"measured: {1e3 * found.seconds:.3g} ms")
        axes.set_xlim(0, end)
        axes.set_ylim(ranks + above - 0.45, -1.3)
        axes.set_yticks(
            [
                place + start
                for start in ([0.0, above] if told else [0.0])
                for place in range(ranks)
            ],
            labels=[str(rank) for _ in range(2 if told else 1) for rank in range(ranks)],
        )
        return inline(figure, name, alt)


def _rows(axes: Any, timeline: Timeline, top: float, end: float, title: str) -> None:
    """A timeline from a height on. Buckets are summed beside what their rank does: below it,
    and thinner.
    """
    axes.text(0, top - 0.62, title, color=INK, va="bottom")
    beside = any(span.name.startswith("reduce ") for span in timeline.spans)
    for kind, span in boxes(timeline):
        start = 1e3 * span.start
        width = 1e3 * span.seconds
        place = top + span.rank
        high = ROW * (0.35 if span.name.startswith("reduce ") else 0.6 if beside else 1.0)
        low = place + ROW / 2 - high if span.name.startswith("reduce ") else place - ROW / 2
        axes.barh(
            low,
            width,
            height=high,
            left=start,
            align="edge",
            color=COLOURS[kind],
            edgecolor=PAPER,
            linewidth=0.4,
            zorder=2 if kind == "waits" else 3,
        )
        if (
            kind in ("forward", "backward", "weights' part")
            and width / end * (WIDTH - 40) > LETTER * len(span.name) + 3
        ):
            axes.text(
                start + width / 2,
                low + high / 2,
                span.name,
                color=PAPER,
                fontsize=TEXT - 1,
                ha="center",
                va="center",
                zorder=4,
            )
    for rank, done in enumerate(timeline.ends):
        axes.plot(
            [1e3 * done] * 2,
            [top + rank - ROW / 2, top + rank + ROW / 2],
            color=MUTED,
            linewidth=1,
            zorder=5,
        )


# ---- of a run --------------------------------------------------------------------------------
def pictured(name: str, record: Record) -> tuple[str, str] | None:
    """(what there is to say, the chart) of a run's step; None where the run has too few, or too
    many ranks to draw, or workers that step by themselves.
    """
    if record.apart:
        return None
    steps_told = measured(record)
    shown = middle(steps_told)
    if shown is None or not shown[1].spans or len(shown[1].ends) > RANKS:
        return None
    number, found = shown
    told = _foretold(record)
    steps = times_of([record], FORETOLD.start)
    title = record.header["strategy"]
    says = (
        f"Step {number}, the middle one of {len(steps_told)} of full batches that were told in "
        f"detail. "
    )
    if isinstance(told, Foretold):
        says += compared(told, steps)
        return says, chart(
            name, found, told, f"One step of {title}. {compared(told, steps)} {_by_rank(found)}"
        )
    return says + told, chart(
        name, found, None, f"One step of {title}: {1e3 * found.seconds:.3g} ms. {_by_rank(found)}"
    )


def _foretold(record: Record) -> Foretold | str:
    """What the clock says of a run's step, or why it says nothing."""
    try:
        told = foretold(record, _machine(record))
    # of a user's own, whose file is not imported here
    except Refused as error:
        return f"Nothing is foretold: {error}."
    return (
        told
        or "The clock plays the schedules of pipelines, and foretells nothing of this one's step "
        "as a whole."
    )


def _machine(record: Record) -> Machine | None:
    """That of the machine file which the run was given, where it is still there and has its
    link.
    """
    path = record.header.get("settings", {}).get("machine")
    try:
        machine = read_machine(Path(path), record.header["machine"]["cores"])[0] if path else None
        return machine if machine and record.header["backend"] in machine.links else None
    except Refused:
        return None


def compared(told: Foretold, steps: StepTime | None) -> str:
    """The prediction beside the measurement, each with its interval, in words."""
    low, middle_, high = (
        f"{1e3 * seconds:.3g}" for seconds in (told.low, told.timeline.seconds, told.high)
    )
    says = (
        f"Foretold: {middle_} ms ({low} to {high}), by the clock, of what each kind of task took "
        f"in {told.steps} steps "
        f"before; a message: {told.messages}."
    )
    if steps is None:
        return says
    around = f" ({1e3 * steps.low:.3g} to {1e3 * steps.high:.3g})" if steps.between else ""
    return says + (
        f" Measured: {1e3 * steps.seconds:.3g} ms{around}, the median of the steps after those; "
        f"foretold is "
        f"{told.timeline.seconds / steps.seconds:.2f} of it."
    )


def _by_rank(found: Timeline) -> str:
    """What every rank did, for those who cannot see the chart."""
    told = []
    for rank in range(len(found.ends)):
        kinds: dict[str, list[float]] = {}
        for kind, span in boxes(found):
            if span.rank == rank:
                kinds.setdefault(kind, []).append(span.seconds)
        told.append(
            f"Rank {rank}: " + ", ".join(_counted(kind, each) for kind, each in kinds.items())
        )
    return "; ".join(told)


def _counted(kind: str, seconds: Sequence[float]) -> str:
    many = (
        f"{len(seconds)} of {1e3 * median(seconds):.2g} ms"
        if len(seconds) > 1
        else f"{1e3 * seconds[0]:.2g} ms"
    )
    return f"{kind} {many}"
