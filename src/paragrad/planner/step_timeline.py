"""A measured step, and the prediction of a step by the clock, as Timelines.

They are for the page and for a benchmark. The clock plays the strategy's own schedule. A run
records some steps in detail. The first of these give the duration of each task: the median of its
kind on its rank. The prediction is compared with the later ones, which it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from paragrad.executors.clock import Span, Timeline, time_schedule
from paragrad.executors.machine import Cluster, Link, Machine
from paragrad.record.record import DETAILED_STEPS, Line, Record, read_lines
from paragrad.record.sample_count import count_range_samples
from paragrad.schedules.actions import Compute, Program, Recv, Send, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule, parse_task_slot
from paragrad.strategies.registry import strategy
from paragrad.strategies.strategy import Strategy

# steps by their number in the run
LEARNING_STEPS = DETAILED_STEPS[: len(DETAILED_STEPS) // 2]
PREDICTED_STEPS = DETAILED_STEPS[len(DETAILED_STEPS) // 2 :]
QUARTILES = 0.25, 0.5, 0.75
# bytes of the status of a step that ranks exchange: weight, loss, stop request
STATUS_BYTES = 64


@dataclass(frozen=True)
class StepPrediction:
    """The clock's prediction of a step.

    Attributes:
        timeline: the predicted step.

        low: seconds of the step if every task takes its lower quartile.

        high: seconds of the step if every task takes its upper quartile.

        steps: number of steps that the durations come from.

        messages: the assumed cost of messages, in words.
    """

    timeline: Timeline
    low: float
    high: float
    steps: int
    messages: str


@dataclass(frozen=True)
class WholeStep:
    """The schedule of a whole step on every rank.

    A rank loads its samples, does its passes, exchanges its status with the others, and updates.

    Attributes:
        passes: the schedule of the passes.
    """

    passes: MicroBatchSchedule

    def program(self, rank: int, size: int) -> Program:
        """The actions of one rank.

        Args:
            rank: the rank.
            size: number of ranks.
        """
        yield Compute("load", "")
        yield from self.passes.program(rank, size)
        others = [peer for peer in range(size) if peer != rank]
        yield from (Send(peer, f"totals {rank}") for peer in others)
        yield from (Recv(peer, f"totals {peer}") for peer in others)
        yield Compute("update", "")


# ---- measured steps --------------------------------------------------------------------------
def read_step_timelines(record: Record, turns: range = PREDICTED_STEPS) -> dict[int, Timeline]:
    """Read steps of full batches that every worker recorded in detail, by their step numbers.

    Seconds count from the moment when the first rank began the step.

    Args:
        record: the run, read with spans or without.
        turns: which of the run's steps to read, counted from 0.
    """
    if record.rounds:  # the workers do not step together
        return {}
    full_batch = (
        min(record.header["job"]["batch"], record.header["job"]["samples"])
        if "job" in record.header
        else 0
    )
    lines = {
        rank: list(_read_first_lines(record, rank, turns.stop))
        for rank in range(record.header.get("workers", 0))
    }
    steps = [[line for line in each if line["kind"] == "step"] for each in lines.values()]
    timelines = {}
    for turn in range(turns.start, min([turns.stop, *map(len, steps)]) if steps else 0):
        if sum(count_range_samples(each[turn]["order"]) for each in steps) < full_batch:
            continue
        number = steps[0][turn]["step"]
        start = min(each[turn]["start"] for each in steps)
        ends = tuple(each[turn]["start"] + each[turn]["seconds"] - start for each in steps)
        spans = tuple(
            _build_span(rank, line, start)
            for rank, each in lines.items()
            for line in each
            if line["kind"] == "span" and line["step"] == number
        )
        timelines[number] = Timeline(
            max(ends), ends, sum(span.name.startswith(">") for span in spans), spans
        )
    return timelines


def _read_first_lines(record: Record, rank: int, count: int) -> Iterator[Line]:
    """Read the lines of a rank's first steps. Spans stand before the line of their step."""
    finished_steps = 0
    for line in read_lines(record.folder / f"rank-{rank}.jsonl"):
        if finished_steps < count:
            yield line
        else:
            return
        finished_steps += line["kind"] == "step"


def _build_span(rank: int, line: Line, start: float) -> Span:
    return Span(
        rank, line["name"], line["lane"], line["start"] - start, line["seconds"], line["bytes"] or 0
    )


def select_median_step(steps: Mapping[int, Timeline]) -> tuple[int, Timeline] | None:
    """Select the step with the median duration.

    Returns:
        (number, Timeline); None if there are no steps.
    """
    ordered = sorted(steps.items(), key=lambda step: step[1].seconds)
    return ordered[len(ordered) // 2] if ordered else None


# ---- predicted steps -------------------------------------------------------------------------
def find_recorded_schedule(record: Record) -> MicroBatchSchedule | None:
    """Find the schedule of a whole step of a recorded run.

    Returns:
        The schedule; None if a step of the strategy is no pipeline schedule.

    Raises:
        Refused: the strategy is not known here.
    """
    return find_step_schedule(strategy(record.header["resolved"]), record.header["workers"])


def find_step_schedule(resolved: Strategy, size: int) -> MicroBatchSchedule | None:
    """Find the schedule of a whole step of a resolved strategy.

    Args:
        resolved: the resolved strategy.
        size: number of ranks.

    Returns:
        The schedule; None if a step of the strategy is no pipeline schedule.
    """
    schedules = [plan.schedule for plan in resolved.plan_schedules() if plan.size == size]
    return schedules[0] if schedules and isinstance(schedules[0], MicroBatchSchedule) else None


def predict_step(record: Record, machine: Machine | None = None) -> StepPrediction | None:
    """Predict a step by the clock, from the durations of tasks in the steps before.

    Args:
        record: the run.
        machine: gives the measured link. If None, a message costs its sender the posting time, and
            no time in flight.

    Returns:
        The prediction; None if the step has no schedule or too few steps were recorded.
    """
    schedule = find_recorded_schedule(record)
    steps = list(read_step_timelines(record, LEARNING_STEPS).values())
    if schedule is None or not steps:
        return None
    size = record.header["workers"]
    schedule = replace(
        schedule, first_trained_stage=_find_first_trained_stage(schedule, size, steps)
    )
    tasks = [
        {
            str(each): _name_task_kind(each, rank)
            for each in schedule.program(rank, size)
            if isinstance(each, Compute)
        }
        for rank in range(size)
    ]
    complete_steps = [
        step for step in steps if _list_task_names(step, size) == [set(each) for each in tasks]
    ]
    if not complete_steps:
        return None
    task_seconds = _collect_task_seconds(complete_steps, tasks, posting=machine is None)
    lengths: dict[Slot, int] = {
        span.name.partition(":")[2]: span.bytes
        for span in complete_steps[0].spans
        if span.lane == "send"
    }
    lengths |= {f"totals {rank}": STATUS_BYTES for rank in range(size)}
    link = Link(0.0, 0.0)
    messages = "the time to post it, and no transfer time"
    if machine is not None:
        link = machine.select_link(record.header["backend"])
        messages = f"the link as measured ({machine.measured})"

    def play_step(part: float) -> Timeline:
        return time_schedule(
            WholeStep(schedule),
            size,
            lengths,
            Cluster(link),
            element_bytes=1,
            keep_spans=True,
            durations=_make_durations(task_seconds, part),
        )

    low, timeline, high = map(play_step, QUARTILES)
    return StepPrediction(timeline, low.seconds, high.seconds, len(complete_steps), messages)


def _name_task_kind(action: Compute, rank: int) -> str:
    """Name the kind of a task.

    Tasks of one kind take equally long: the same action and stage, any micro-batch.
    """
    return f"{action.what}.{parse_task_slot(rank, action.at)[0]}"


def _list_task_names(step: Timeline, size: int) -> list[set[str]]:
    """For every rank, the names of the tasks that it recorded."""
    return [
        {span.name for span in step.spans if span.rank == rank and span.lane == "compute"}
        for rank in range(size)
    ]


def _find_first_trained_stage(
    schedule: MicroBatchSchedule, size: int, steps: list[Timeline]
) -> int:
    """Find the first stage that has a backward pass."""
    return min(
        (
            parse_task_slot(span.rank, span.name[1:])[0]
            for step in steps
            for span in step.spans
            if span.lane == "compute" and span.name[0] in "BI"
        ),
        default=schedule.count_stages(size),
    )


def _collect_task_seconds(
    steps: list[Timeline], tasks: list[dict[str, str]], posting: bool
) -> dict[tuple[int, str], list[float]]:
    """Collect the seconds of all tasks, by (rank, kind); load and update are kinds, too.

    A task's time includes the Python time until the next span. With `posting` it also includes
    posting the messages that the task produced.
    """
    task_seconds: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for rank, kinds in enumerate(tasks):
            previous_end = 0.0
            current = [0.0]
            for span in sorted(
                (span for span in step.spans if span.rank == rank), key=lambda span: span.start
            ):
                current[-1] += max(0.0, span.start - previous_end)
                previous_end = span.start + span.seconds
                if kind := kinds.get(
                    span.name, span.name if span.name in ("load", "update") else None
                ):
                    current = task_seconds.setdefault((rank, kind), [])
                    current.append(span.seconds)
                elif span.lane == "send" and posting:
                    current[-1] += span.seconds
            current[-1] += max(0.0, step.ends[rank] - previous_end)
    return task_seconds


def _make_durations(
    task_seconds: Mapping[tuple[int, str], list[float]], fraction: float
) -> Callable[[int, Compute], float]:
    """Build a function that returns a quantile of the seconds of a task's kind."""
    seconds = {kind: select_quantile(each, fraction) for kind, each in task_seconds.items()}
    return lambda rank, action: seconds[
        rank, action.what if action.at == "" else _name_task_kind(action, rank)
    ]


def select_quantile(values: list[float], fraction: float) -> float:
    """Select a quantile of some values.

    Args:
        values: the values, in any order.
        fraction: the fraction of the values that is smaller.
    """
    return sorted(values)[round(fraction * (len(values) - 1))]
