"""A step as it was, and as the clock foretells it: two Timelines, for the chart of a page and
for a benchmark.

The clock plays the strategy's own schedule. How long each task takes it is told from the first
of the steps that a run tells in detail, the median of its kind on its rank; what it foretells
are the steps after them, which it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from paragrad.executors.clock import Span, Timeline, time_schedule
from paragrad.executors.machine import Cluster, Link, Machine
from paragrad.record.record import DETAILED_STEPS, Line, Record, read_lines
from paragrad.schedules.actions import Compute, Program, Recv, Send, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule, parse_task_slot
from paragrad.strategies.registry import strategy
from paragrad.strategies.strategy import Strategy

# steps, as the run counts them
LEARNING_STEPS = DETAILED_STEPS[: len(DETAILED_STEPS) // 2]
PREDICTED_STEPS = DETAILED_STEPS[len(DETAILED_STEPS) // 2 :]
QUARTILES = 0.25, 0.5, 0.75
# bytes of what ranks tell each other of a step: weight, loss, the wish to stop
STATUS_BYTES = 64


@dataclass(frozen=True)
class StepPrediction:
    """A step by the clock. low, high: its seconds where every task takes the lower or the upper
    quartile of what it took; steps: in so many it was learnt what tasks take;  messages: what
    they were taken to cost, in words.
    """

    timeline: Timeline
    low: float
    high: float
    steps: int
    messages: str


@dataclass(frozen=True)
class WholeStep:
    """What every rank does in a step: load its samples, its passes, hear of the others' ends,
    update.
    """

    passes: MicroBatchSchedule

    def program(self, rank: int, size: int) -> Program:
        yield Compute("load", "")
        yield from self.passes.program(rank, size)
        others = [peer for peer in range(size) if peer != rank]
        yield from (Send(peer, f"told {rank}") for peer in others)
        yield from (Recv(peer, f"told {peer}") for peer in others)
        yield Compute("update", "")


# ---- as it was -------------------------------------------------------------------------------
def read_step_timelines(record: Record, turns: range = PREDICTED_STEPS) -> dict[int, Timeline]:
    """Some of the steps of full batches that every worker told in detail, by their numbers.
    record: read with spans or without.

    turns: which of the run's steps, from 0. Seconds count from where the first rank began with
    the step.
    """
    if record.rounds:  # every worker is in a step of its own
        return {}
    full = (
        min(record.header["job"]["batch"], record.header["job"]["samples"])
        if "job" in record.header
        else 0
    )
    lines = {
        rank: list(_read_first_lines(record, rank, turns.stop))
        for rank in range(record.header.get("workers", 0))
    }
    steps = [[line for line in each if line["kind"] == "step"] for each in lines.values()]
    found = {}
    for turn in range(turns.start, min([turns.stop, *map(len, steps)]) if steps else 0):
        if sum(stop - first for first, stop in (each[turn]["order"] for each in steps)) < full:
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
        found[number] = Timeline(
            max(ends), ends, sum(span.name.startswith(">") for span in spans), spans
        )
    return found


def _read_first_lines(record: Record, rank: int, count: int) -> Iterator[Line]:
    """The lines of a rank's first steps: spans stand before the step's own line."""
    made = 0
    for line in read_lines(record.folder / f"rank-{rank}.jsonl"):
        if made < count:
            yield line
        else:
            return
        made += line["kind"] == "step"


def _build_span(rank: int, line: Line, start: float) -> Span:
    return Span(
        rank, line["name"], line["lane"], line["start"] - start, line["seconds"], line["bytes"] or 0
    )


def select_median_step(steps: Mapping[int, Timeline]) -> tuple[int, Timeline] | None:
    """(number, Timeline) of the step that took the median of them; None of none."""
    ordered = sorted(steps.items(), key=lambda step: step[1].seconds)
    return ordered[len(ordered) // 2] if ordered else None


# ---- as it is foretold -----------------------------------------------------------------------
def find_recorded_schedule(record: Record) -> MicroBatchSchedule | None:
    """The schedule of a whole step; None where a strategy's step is none. Raises Refused where
    it is not known here.
    """
    return find_step_schedule(strategy(record.header["resolved"]), record.header["workers"])


def find_step_schedule(resolved: Strategy, size: int) -> MicroBatchSchedule | None:
    """The schedule of a whole step of a resolved strategy on so many ranks; None where its step
    is none.
    """
    found = [plan.schedule for plan in resolved.plan_schedules() if plan.size == size]
    return found[0] if found and isinstance(found[0], MicroBatchSchedule) else None


def predict_step(record: Record, machine: Machine | None = None) -> StepPrediction | None:
    """A step by the clock, of what tasks took in the steps before; None where no schedule says
    it, or there were too few.

    machine: what was measured of its links; otherwise a message costs its sender what posting
    it took, and no time on its way.
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
    whole = [
        step for step in steps if _list_task_names(step, size) == [set(each) for each in tasks]
    ]
    if not whole:
        return None
    taken = _collect_task_seconds(whole, tasks, posting=machine is None)
    lengths: dict[Slot, int] = {
        span.name.partition(":")[2]: span.bytes for span in whole[0].spans if span.lane == "send"
    }
    lengths |= {f"told {rank}": STATUS_BYTES for rank in range(size)}
    link = Link(0.0, 0.0)
    messages = "what posting it took, and no time on its way"
    if machine is not None:
        link = machine.select_link(record.header["backend"])
        messages = f"the link as measured ({machine.measured})"

    def played(part: float) -> Timeline:
        return time_schedule(
            WholeStep(schedule),
            size,
            lengths,
            Cluster(link),
            element_bytes=1,
            keep_spans=True,
            durations=_make_durations(taken, part),
        )

    low, found, high = map(played, QUARTILES)
    return StepPrediction(found, low.seconds, high.seconds, len(whole), messages)


def _name_task_kind(action: Compute, rank: int) -> str:
    """What takes as long: the same, of any micro-batch, of one stage."""
    return f"{action.what}.{parse_task_slot(rank, action.at)[0]}"


def _list_task_names(step: Timeline, size: int) -> list[set[str]]:
    """Of every rank the tasks that it told of."""
    return [
        {span.name for span in step.spans if span.rank == rank and span.lane == "compute"}
        for rank in range(size)
    ]


def _find_first_trained_stage(
    schedule: MicroBatchSchedule, size: int, steps: list[Timeline]
) -> int:
    """The first stage with a backward."""
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
    """(rank, kind) -> seconds of all tasks of that kind, load and update among them, each with
    what is between it and the next span: Python. posting: also with the posting of what it
    gave.
    """
    taken: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for rank, kinds in enumerate(tasks):
            done = 0.0
            last = [0.0]
            for span in sorted(
                (span for span in step.spans if span.rank == rank), key=lambda span: span.start
            ):
                last[-1] += max(0.0, span.start - done)
                done = span.start + span.seconds
                if kind := kinds.get(
                    span.name, span.name if span.name in ("load", "update") else None
                ):
                    last = taken.setdefault((rank, kind), [])
                    last.append(span.seconds)
                elif span.lane == "send" and posting:
                    last[-1] += span.seconds
            last[-1] += max(0.0, step.ends[rank] - done)
    return taken


def _make_durations(
    task_seconds: Mapping[tuple[int, str], list[float]], fraction: float
) -> Callable[[int, Compute], float]:
    """Of every task a quantile of what its kind took."""
    seconds = {kind: select_quantile(each, fraction) for kind, each in task_seconds.items()}
    return lambda rank, action: seconds[
        rank, action.what if action.at == "" else _name_task_kind(action, rank)
    ]


def select_quantile(values: list[float], fraction: float) -> float:
    """So large a part of the values is smaller."""
    return sorted(values)[round(fraction * (len(values) - 1))]
