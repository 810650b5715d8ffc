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
from paragrad.executors.machine import Machine, read_machine_file
from paragrad.planner.step_timeline import (
    PREDICTED_STEPS,
    StepPrediction,
    predict_step,
    read_step_timelines,
    select_median_step,
)
from paragrad.record.record import Record
from paragrad.report.charts import TEXT_SIZE, WIDTH, add_chart_axes, convert_to_svg, open_figure
from paragrad.report.palette import FAINT, INK, KINDS, MUTED, PAPER
from paragrad.report.timing import StepTime, measure_step_time

STEEL, OCHRE, MOSS, PLUM, ASH = KINDS
KIND_COLOURS = {
    "forward": STEEL,
    "backward": PLUM,
    "weights' part": OCHRE,
    "exchange": MOSS,
    "load, update": ASH,
    "waits": FAINT,
}
# of a rank, of which one is the next; rows between the two timelines
ROW_HEIGHT = 0.8
ROWS_BETWEEN = 0.9
LETTER_WIDTH = 7.0  # units of a label
MAX_CHART_RANKS = 16  # more are no picture


def classify_span(span: Span) -> str | None:
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


def list_boxes(timeline: Timeline) -> Iterator[tuple[str, Span]]:
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
            yield from ((kind, span) for span in own if (kind := classify_span(span)))
            continue
        done = 0.0
        for span in (span for span in own if span.lane == "compute"):
            if span.start > done:
                yield "waits", Span(rank, "", "wait", done, span.start - done, 0)
            yield classify_span(span) or "", span
            done = span.start + span.seconds


def draw_step_chart(
    name: str, measurement: Timeline, prediction: StepPrediction | None, alt: str
) -> str:
    """The SVG: what was foretold above what was measured, over one axis of milliseconds."""
    ranks = len(measurement.ends)
    above = (ranks + ROWS_BETWEEN) if prediction else 0.0
    with open_figure(name, WIDTH, 24 * (ranks + above) + 62) as figure:
        axes = add_chart_axes(figure, "", "ms")
        axes.grid(axis="y", visible=False)
        end = 1e3 * max(measurement.seconds, prediction.timeline.seconds if prediction else 0.0)
        if prediction:
            _draw_timeline_rows(
                axes,
                prediction.timeline,
                0.0,
                end,
                f"foretold: {1e3 * prediction.timeline.seconds:.3g} ms",
            )
        _draw_timeline_rows(
            axes, measurement, above, end, f"measured: {1e3 * measurement.seconds:.3g} ms"
        )
        axes.set_xlim(0, end)
        axes.set_ylim(ranks + above - 0.45, -1.3)
        axes.set_yticks(
            [
                place + start
                for start in ([0.0, above] if prediction else [0.0])
                for place in range(ranks)
            ],
            labels=[str(rank) for _ in range(2 if prediction else 1) for rank in range(ranks)],
        )
        return convert_to_svg(figure, name, alt)


def _draw_timeline_rows(axes: Any, timeline: Timeline, top: float, end: float, title: str) -> None:
    """A timeline from a height on. Buckets are summed beside what their rank does: below it,
    and thinner.
    """
    axes.text(0, top - 0.62, title, color=INK, va="bottom")
    beside = any(span.name.startswith("reduce ") for span in timeline.spans)
    for kind, span in list_boxes(timeline):
        start = 1e3 * span.start
        width = 1e3 * span.seconds
        place = top + span.rank
        high = ROW_HEIGHT * (0.35 if span.name.startswith("reduce ") else 0.6 if beside else 1.0)
        low = (
            place + ROW_HEIGHT / 2 - high
            if span.name.startswith("reduce ")
            else place - ROW_HEIGHT / 2
        )
        axes.barh(
            low,
            width,
            height=high,
            left=start,
            align="edge",
            color=KIND_COLOURS[kind],
            edgecolor=PAPER,
            linewidth=0.4,
            zorder=2 if kind == "waits" else 3,
        )
        if (
            kind in ("forward", "backward", "weights' part")
            and width / end * (WIDTH - 40) > LETTER_WIDTH * len(span.name) + 3
        ):
            axes.text(
                start + width / 2,
                low + high / 2,
                span.name,
                color=PAPER,
                fontsize=TEXT_SIZE - 1,
                ha="center",
                va="center",
                zorder=4,
            )
    for rank, done in enumerate(timeline.ends):
        axes.plot(
            [1e3 * done] * 2,
            [top + rank - ROW_HEIGHT / 2, top + rank + ROW_HEIGHT / 2],
            color=MUTED,
            linewidth=1,
            zorder=5,
        )


# ---- of a run --------------------------------------------------------------------------------
def draw_measured_step(name: str, record: Record) -> tuple[str, str] | None:
    """(what there is to say, the chart) of a run's step; None where the run has too few, or too
    many ranks to draw, or workers that step by themselves.
    """
    if record.has_independent_workers:
        return None
    steps_told = read_step_timelines(record)
    shown = select_median_step(steps_told)
    if shown is None or not shown[1].spans or len(shown[1].ends) > MAX_CHART_RANKS:
        return None
    number, found = shown
    told = _predict_step(record)
    steps = measure_step_time([record], PREDICTED_STEPS.start)
    title = record.header["strategy"]
    says = (
        f"Step {number}, the middle one of {len(steps_told)} of full batches that were told in "
        f"detail. "
    )
    if isinstance(told, StepPrediction):
        says += describe_prediction(told, steps)
        return says, draw_step_chart(
            name,
            found,
            told,
            f"One step of {title}. {describe_prediction(told, steps)} {_describe_ranks(found)}",
        )
    return says + told, draw_step_chart(
        name,
        found,
        None,
        f"One step of {title}: {1e3 * found.seconds:.3g} ms. {_describe_ranks(found)}",
    )


def _predict_step(record: Record) -> StepPrediction | str:
    """What the clock says of a run's step, or why it says nothing."""
    try:
        told = predict_step(record, _read_run_machine(record))
    # of a user's own, whose file is not imported here
    except Refused as error:
        return f"Nothing is foretold: {error}."
    return (
        told
        or "The clock plays the schedules of pipelines, and foretells nothing of this one's step "
        "as a whole."
    )


def _read_run_machine(record: Record) -> Machine | None:
    """That of the machine file which the run was given, where it is still there and has its
    link.
    """
    path = record.header.get("settings", {}).get("machine")
    try:
        machine = (
            read_machine_file(Path(path), record.header["machine"]["cores"])[0] if path else None
        )
        return machine if machine and record.header["backend"] in machine.links else None
    except Refused:
        return None


def describe_prediction(prediction: StepPrediction, steps: StepTime | None) -> str:
    """The prediction beside the measurement, each with its interval, in words."""
    low, middle_, high = (
        f"{1e3 * seconds:.3g}"
        for seconds in (prediction.low, prediction.timeline.seconds, prediction.high)
    )
    says = (
        f"Foretold: {middle_} ms ({low} to {high}), by the clock, of what each kind of task took "
        f"in {prediction.steps} steps "
        f"before; a message: {prediction.messages}."
    )
    if steps is None:
        return says
    around = f" ({1e3 * steps.low:.3g} to {1e3 * steps.high:.3g})" if steps.finite_bounds else ""
    return says + (
        f" Measured: {1e3 * steps.seconds:.3g} ms{around}, the median of the steps after those; "
        f"foretold is "
        f"{prediction.timeline.seconds / steps.seconds:.2f} of it."
    )


def _describe_ranks(found: Timeline) -> str:
    """What every rank did, for those who cannot see the chart."""
    told = []
    for rank in range(len(found.ends)):
        kinds: dict[str, list[float]] = {}
        for kind, span in list_boxes(found):
            if span.rank == rank:
                kinds.setdefault(kind, []).append(span.seconds)
        told.append(
            f"Rank {rank}: "
            + ", ".join(_format_task_times(kind, each) for kind, each in kinds.items())
        )
    return "; ".join(told)


def _format_task_times(kind: str, seconds: Sequence[float]) -> str:
    many = (
        f"{len(seconds)} of {1e3 * median(seconds):.2g} ms"
        if len(seconds) > 1
        else f"{1e3 * seconds[0]:.2g} ms"
    )
    return f"{kind} {many}"
