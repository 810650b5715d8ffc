"""The chart of one step: a row for each rank, with boxes for what it did.

The prediction of the clock is above the measurement.
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
ROW_HEIGHT = 0.8  # height of a rank's boxes, where the distance of two ranks is 1
ROWS_BETWEEN = 0.9  # distance of the two timelines, in the same unit
LETTER_WIDTH = 7.0  # width of a letter of a label, in units
MAX_CHART_RANKS = 16  # more ranks cannot be drawn clearly


def classify_span(span: Span) -> str | None:
    """Classify a span by the kind of its box.

    Args:
        span: The span.

    Returns:
        The kind. None for parts of an exchange, which have a duration but no start time.
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
    """List everything that is drawn of a timeline.

    A predicted timeline contains messages under way, but no waiting. There, waiting is the time
    between the tasks of a rank.

    Args:
        timeline: The timeline.

    Yields:
        (kind, span).
    """
    has_waits = any(span.lane in ("wait", "update") for span in timeline.spans)
    for rank in range(len(timeline.ends)):
        spans = sorted(
            (span for span in timeline.spans if span.rank == rank),
            key=lambda span: (span.start, -span.seconds),
        )
        if has_waits:
            yield from ((kind, span) for span in spans if (kind := classify_span(span)))
            continue
        end = 0.0
        for span in (span for span in spans if span.lane == "compute"):
            if span.start > end:
                yield "waits", Span(rank, "", "wait", end, span.start - end, 0)
            yield classify_span(span) or "", span
            end = span.start + span.seconds


def draw_step_chart(
    name: str, measurement: Timeline, prediction: StepPrediction | None, alt: str
) -> str:
    """Draw the prediction above the measurement, over one axis of milliseconds.

    Args:
        name: The id of the chart.
        measurement: The measured timeline.
        prediction: The prediction, or None.
        alt: The description for readers without the picture.

    Returns:
        The SVG.
    """
    ranks = len(measurement.ends)
    first_measured_row = (ranks + ROWS_BETWEEN) if prediction else 0.0
    with open_figure(name, WIDTH, 24 * (ranks + first_measured_row) + 62) as figure:
        axes = add_chart_axes(figure, "", "ms")
        axes.grid(axis="y", visible=False)
        end = 1e3 * max(measurement.seconds, prediction.timeline.seconds if prediction else 0.0)
        if prediction:
            _draw_timeline_rows(
                axes,
                prediction.timeline,
                0.0,
                end,
                f"predicted: {1e3 * prediction.timeline.seconds:.3g} ms",
            )
        _draw_timeline_rows(
            axes,
            measurement,
            first_measured_row,
            end,
            f"measured: {1e3 * measurement.seconds:.3g} ms",
        )
        axes.set_xlim(0, end)
        axes.set_ylim(ranks + first_measured_row - 0.45, -1.3)
        axes.set_yticks(
            [
                place + start
                for start in ([0.0, first_measured_row] if prediction else [0.0])
                for place in range(ranks)
            ],
            labels=[str(rank) for _ in range(2 if prediction else 1) for rank in range(ranks)],
        )
        return convert_to_svg(figure, name, alt)


def _draw_timeline_rows(axes: Any, timeline: Timeline, top: float, end: float, title: str) -> None:
    """Draw a timeline from a height on.

    Buckets are summed at the same time as the tasks of their rank. They are below these, and
    thinner.
    """
    axes.text(0, top - 0.62, title, color=INK, va="bottom")
    has_buckets = any(span.name.startswith("reduce ") for span in timeline.spans)
    for kind, span in list_boxes(timeline):
        start = 1e3 * span.start
        width = 1e3 * span.seconds
        place = top + span.rank
        height = ROW_HEIGHT * (
            0.35 if span.name.startswith("reduce ") else 0.6 if has_buckets else 1.0
        )
        bottom = (
            place + ROW_HEIGHT / 2 - height
            if span.name.startswith("reduce ")
            else place - ROW_HEIGHT / 2
        )
        axes.barh(
            bottom,
            width,
            height=height,
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
                bottom + height / 2,
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


# ---- from a run ------------------------------------------------------------------------------
def draw_measured_step(name: str, record: Record) -> tuple[str, str] | None:
    """Draw the middle step of a run.

    Args:
        name: The id of the chart.
        record: The record of the run.

    Returns:
        A caption and the SVG. None if the run has too few steps, too many ranks, or workers that
        step independently.
    """
    if record.has_independent_workers:
        return None
    measured_steps = read_step_timelines(record)
    middle_step = select_median_step(measured_steps)
    if (
        middle_step is None
        or not middle_step[1].spans
        or len(middle_step[1].ends) > MAX_CHART_RANKS
    ):
        return None
    number, timeline = middle_step
    prediction = _predict_step(record)
    steps = measure_step_time([record], PREDICTED_STEPS.start)
    title = record.header["strategy"]
    caption = (
        f"Step {number}, the median of {len(measured_steps)} steps of full batches that were "
        "recorded in detail. "
    )
    if isinstance(prediction, StepPrediction):
        caption += describe_prediction(prediction, steps)
        return caption, draw_step_chart(
            name,
            timeline,
            prediction,
            f"One step of {title}. {describe_prediction(prediction, steps)} "
            f"{_describe_ranks(timeline)}",
        )
    return caption + prediction, draw_step_chart(
        name,
        timeline,
        None,
        f"One step of {title}: {1e3 * timeline.seconds:.3g} ms. {_describe_ranks(timeline)}",
    )


def _predict_step(record: Record) -> StepPrediction | str:
    """The prediction of the clock for a step of a run, or the reason why there is none."""
    try:
        prediction = predict_step(record, _read_run_machine(record))
    # a user's strategy or schedule: its file is not imported here
    except Refused as error:
        return f"There is no prediction: {error}."
    return (
        prediction
        or "There is no prediction: the clock predicts steps of place and pipeline alone, and only "
        "if enough steps were recorded in detail."
    )


def _read_run_machine(record: Record) -> Machine | None:
    """The machine of the run's machine file, if that file still exists and has the run's link."""
    path = record.header.get("settings", {}).get("machine")
    try:
        machine = (
            read_machine_file(Path(path), record.header["machine"]["cores"])[0] if path else None
        )
        return machine if machine and record.header["backend"] in machine.links else None
    except Refused:
        return None


def describe_prediction(prediction: StepPrediction, steps: StepTime | None) -> str:
    """Compare prediction and measurement in words, each with its interval.

    Args:
        prediction: The prediction.
        steps: The measured time of a step, or None.

    Returns:
        The text.
    """
    low, middle_, high = (
        f"{1e3 * seconds:.3g}"
        for seconds in (prediction.low, prediction.timeline.seconds, prediction.high)
    )
    text = (
        f"Predicted: {middle_} ms ({low} to {high}), by the clock, from the times of each kind of "
        f"task in {prediction.steps} earlier steps; cost of a message: {prediction.messages}."
    )
    if steps is None:
        return text
    interval = f" ({1e3 * steps.low:.3g} to {1e3 * steps.high:.3g})" if steps.finite_bounds else ""
    return text + (
        f" Measured: {1e3 * steps.seconds:.3g} ms{interval}, the median of the later steps; the "
        f"prediction is {prediction.timeline.seconds / steps.seconds:.2f} of it."
    )


def _describe_ranks(found: Timeline) -> str:
    """What each rank did, for readers without the picture."""
    texts = []
    for rank in range(len(found.ends)):
        kinds: dict[str, list[float]] = {}
        for kind, span in list_boxes(found):
            if span.rank == rank:
                kinds.setdefault(kind, []).append(span.seconds)
        texts.append(
            f"Rank {rank}: "
            + ", ".join(_format_task_times(kind, each) for kind, each in kinds.items())
        )
    return "; ".join(texts)


def _format_task_times(kind: str, seconds: Sequence[float]) -> str:
    times = (
        f"{len(seconds)} of {1e3 * median(seconds):.2g} ms"
        if len(seconds) > 1
        else f"{1e3 * seconds[0]:.2g} ms"
    )
    return f"{kind} {times}"
