"""The results of a comparison, read from its folder: a row for each strategy."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paragrad.errors import RankFailed
from paragrad.loops.plain_pytorch import PLAIN_PYTORCH, UNTIMED_STEPS
from paragrad.record.record import Line, Record, read_lines
from paragrad.report.timing import NO_SPEED_UP, SpeedUp, StepTime, measure_step_time
from paragrad.strategies.serial import Serial
from paragrad.trainer.settings import Settings

ROUNDING_BASELINE = "rounding baseline"  # serial with the samples of each batch in reverse order
EARLIER_ROUNDING_BASELINE = "rounding twin"  # the name of that row in earlier records


@dataclass(frozen=True)
class GoalReached:
    """Where a run reached the goal of `--until`.

    Attributes:
        seconds: The time of its steps, each with the row's time per step.
        epochs: The number of epochs.
        samples: The number of samples.
    """

    seconds: float
    epochs: int
    samples: int


@dataclass(frozen=True)
class ComparisonRow:
    """The results of one strategy over its seeds; values are None if the runs did not get that far.

    Attributes:
        strategy: The strategy as written.

        resolved: The strategy with every `auto` replaced.

        test: The job's metric (accuracy: per cent), as mean over seeds.

        spread: The standard deviation of the metric over seeds.

        seeds: The number of seeds.

        times: The time of a step.

        faster: The speed-up over a plain PyTorch loop with all threads, or over serial
            (`ComparisonResults.speed_baseline`).

        faster_than_one_thread: The speed-up over serial with one thread.

        sent: Bytes per rank and step, by kind: {bytes, computed}.

        memory: Bytes by kind, each of the rank that holds most of it.

        fullest: Bytes by kind of the rank that holds most of all together.

        difference: The largest difference from serial, in float64, of the first seed.

        tensor: The tensor with the largest difference.

        baseline: The training with which it is compared: serial, or serial(micro=m) if batch norm
            takes its statistics over micro-batches; None if it is compared with none.

        digests: Digests of the final parameters, by seed.

        overflowed_steps: The steps without an update, by seed, because a gradient overflowed in
            float16.

        reached: Where the goal was reached, by seed.

        runs: The names of the folders, by seed.

        failure: What failed, or None.

        reference: Whether it is serial itself, with which the others are compared.

        exact: Whether it is meant to be the same training as serial.
    """

    strategy: str
    resolved: str
    test: float | None = None
    spread: float | None = None
    seeds: int = 1
    times: StepTime | None = None
    faster: SpeedUp | None = None
    faster_than_one_thread: SpeedUp | None = None
    sent: dict[str, Line] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    fullest: dict[str, int] = field(default_factory=dict)
    difference: float | None = None
    tensor: str | None = None
    baseline: str | None = None
    digests: tuple[str, ...] = ()
    overflowed_steps: tuple[tuple[int, ...], ...] = ()
    reached: tuple[GoalReached | None, ...] = ()
    runs: tuple[str, ...] = ()
    failure: str | None = None
    reference: bool = False
    exact: bool = True

    @property
    def seconds_per_step(self) -> float | None:
        """The median of the slowest rank; median over seeds."""
        return self.times.seconds if self.times else None

    @property
    def speed_up(self) -> float | None:
        """The speed-up over a plain PyTorch loop or serial, or None if it may be noise."""
        return self.faster.value if self.faster and self.faster.is_significant else None

    @property
    def speed_up_one_thread(self) -> float | None:
        """The speed-up over serial with one thread, or None if it may be noise."""
        return (
            self.faster_than_one_thread.value
            if self.faster_than_one_thread and self.faster_than_one_thread.is_significant
            else None
        )

    def to_json(self) -> Line:
        """Convert the row to plain JSON, with the interval of each measured time or ratio."""
        values = asdict(self) | {
            name: getattr(self, name)
            for name in ("seconds_per_step", "speed_up", "speed_up_one_thread")
        }
        del values["times"], values["faster"], values["faster_than_one_thread"]
        values["is_reference"] = values.pop("reference")
        for name, measured in (
            ("seconds_per_step", self.times),
            ("speed_up", self.faster),
            ("speed_up_one_thread", self.faster_than_one_thread),
        ):
            values[f"{name}_between"] = measured and measured.finite_bounds
        return values | {"others": self.times and self.times.load and self.times.load.others}


@dataclass(frozen=True)
class ComparisonResults:
    """A comparison, read from its folder.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @cached_property
    def comparison_line(self) -> Line:
        """The request: the comparison's own first line."""
        return next(
            line
            for line in read_lines(self.folder / "compare.jsonl")
            if line["kind"] == "comparison"
        )

    @cached_property
    def records(self) -> dict[str, Record]:
        """The records of all runs that started, by the name of the folder."""
        records = {
            path.name: Record(path, spans=False)
            for path in sorted(self.folder.iterdir())
            if path.is_dir()
        }
        return {name: record for name, record in records.items() if record.header}

    @cached_property
    def rows(self) -> list[ComparisonRow]:
        """The row of each strategy."""
        names = list_row_names(self.comparison_line)
        return [
            _build_row(self, name, runs)
            for name, runs in zip(names, self.comparison_line["rows"], strict=True)
        ]

    @cached_property
    def serial_times(self) -> dict[int, tuple[list[str], StepTime | None]]:
        """The runs of plain serial and its time per step, with 1 thread and with all threads."""
        times = {}
        for threads in {1, int(self.machine["cores"])}:
            runs = [
                name
                for name, record in self.records.items()
                if record.header["resolved"] == str(Serial(threads=threads))
                and not record.header["reverse"]
            ]
            times[threads] = runs, measure_step_time([self.records[name] for name in runs])
        return times

    @cached_property
    def plain_record(self) -> Record | None:
        """The record of the plain PyTorch loop, or None if it did not start."""
        return next(
            (
                record
                for record in self.records.values()
                if record.header["resolved"] == PLAIN_PYTORCH
            ),
            None,
        )

    @cached_property
    def plain_time(self) -> StepTime | None:
        """The time per step of the plain PyTorch loop with all threads; None unless it finished."""
        if self.plain_record is None or not self.plain_record.finished:
            return None
        return measure_step_time([self.plain_record], UNTIMED_STEPS)

    @property
    def serial_time(self) -> StepTime | None:
        """The time per step of plain serial with all threads, or None if it made no step."""
        return self.serial_times[int(self.machine["cores"])][1]

    @property
    def speed_baseline(self) -> str:
        """What the speed-ups are over: a plain PyTorch loop, or else serial."""
        return "serial" if self.plain_time is None else PLAIN_PYTORCH

    def explain_no_plain_time(self) -> str:
        """Explain why there is no time of a plain PyTorch loop."""
        settings = self.header.get("settings", {})
        if self.plain_record is not None:
            error = (self.plain_record.end or {}).get("error")
            return f"the {PLAIN_PYTORCH} " + (
                f"failed: {RankFailed(**error)}" if error else "did not finish"
            )
        if "slow" in settings or "pace" in settings:
            return f"the ranks are slowed on purpose, and a {PLAIN_PYTORCH} is not"
        return f"this comparison has no {PLAIN_PYTORCH}"

    @cached_property
    def ending(self) -> Line:
        """How the comparison last ended: {"status", "error"}.

        The status is finished, stopped, interrupted, failed or died.
        """
        return {
            "status": "died" if "strategies" in self.comparison_line else "finished",
            "error": None,
            **(
                {line["kind"]: line for line in read_lines(self.folder / "compare.jsonl")}.get(
                    "end"
                )
                or {}
            ),
        }

    @property
    def missing(self) -> list[str]:
        """The strategies with unfinished rows, and the unfinished runs for speed-ups."""
        unfinished_baselines = [
            name
            for name in self.comparison_line.get("baselines", [])
            if name not in self.records or not self.records[name].finished
        ]
        return [
            row.strategy
            for row in self.rows
            if row.failure
            or (
                row.difference is None
                and not row.reference
                and row.strategy != ROUNDING_BASELINE
                and not self._has_rounds(row)
            )
        ] + unfinished_baselines

    def _has_rounds(self, row: ComparisonRow) -> bool:
        """Whether clients train in rounds, so that no step can be compared with serial's."""
        return any(self.records[run].rounds for run in row.runs if run in self.records)

    @property
    def header(self) -> Line:
        """The header of the first run; job and machine are the same in all runs."""
        return next(iter(self.records.values())).header

    @property
    def job(self) -> str:
        """The name of the job."""
        return str(self.header["job"]["name"])

    @property
    def metric(self) -> str:
        """The name of the test value."""
        return str(self.header["job"]["metric"])

    @property
    def machine(self) -> Line:
        """The machine: cpu, cores, load, versions."""
        return dict(self.header["machine"])

    @property
    def until(self) -> str | None:
        """The goal of `--until`, or None."""
        return self.comparison_line["until"]  # type: ignore[no-any-return]

    @property
    def failed(self) -> bool:
        """Whether a strategy failed."""
        return any(row.failure for row in self.rows)

    def index_lines(self, kind: str) -> dict[str, Line]:
        """Return the comparison's own lines of a kind.

        Args:
            kind: Such as difference or distance.

        Returns:
            The lines, by run.
        """
        return {
            line["run"]: line
            for line in read_lines(self.folder / "compare.jsonl")
            if line["kind"] == kind
        }

    def to_json(self) -> Line:
        """Convert the comparison to plain JSON.

        Returns:
            The values, by name.
        """
        return {
            "schema": 4,
            "job": self.job,
            "metric": self.metric,
            "until": self.until,
            "folder": str(self.folder),
            "machine": self.machine,
            "speed_up_over": self.speed_baseline,
            "plain_pytorch": {
                **_convert_step_time(self.plain_time),
                "why": self.explain_no_plain_time() if self.plain_time is None else None,
            },
            "serial": _convert_step_time(self.serial_time),
            "rows": [row.to_json() for row in self.rows],
        }


def _convert_step_time(times: StepTime | None) -> Line:
    """Convert a time per step to plain JSON."""
    return {
        "seconds_per_step": times and times.seconds,
        "seconds_per_step_between": times and times.finite_bounds,
    }


def list_row_names(comparison_line: Line) -> list[str]:
    """List the names of a comparison's rows.

    Args:
        comparison_line: The comparison's own first line.

    Returns:
        The names. The rounding baseline of an earlier record has its present name.
    """
    # records of version 1 have no names
    names = comparison_line.get("strategies", [""] * len(comparison_line["rows"]))
    return [ROUNDING_BASELINE if name == EARLIER_ROUNDING_BASELINE else name for name in names]


def _build_row(results: ComparisonResults, strategy: str, names: list[str]) -> ComparisonRow:
    records = [results.records[name] for name in names if name in results.records]
    if not records:
        return ComparisonRow(strategy, "", failure="not run", runs=tuple(names))
    header = records[0].header
    fields: dict[str, Any] = {
        "strategy": ROUNDING_BASELINE if header["reverse"] else header["strategy"],
        "resolved": header["resolved"],
        "exact": header.get("exact", True),
        "seeds": len(names),
        "runs": tuple(names),
        "reference": not header["reverse"]
        and header["resolved"] == str(Serial(threads=header["threads"])),
    }
    for record in records:
        end = record.end or {"status": "died", "error": None}
        if end["status"] != "finished":
            error = end["error"]
            return ComparisonRow(
                **fields, failure=str(RankFailed(**error)) if error else end["status"]
            )
    if len(records) < len(names):
        return ComparisonRow(**fields, failure=f"{len(records)} of {len(names)} seeds were run")
    tests = [record.test for record in records if record.test is not None]
    step_time = measure_step_time(records)
    difference = results.index_lines("difference").get(names[0], {})
    failure = (
        {}
        if names[0] in results.index_lines("distance")
        else results.index_lines("event").get(names[0], {})
    )
    # a batch of a client cannot be compared with a step of serial
    compared_time = None if records[0].rounds else step_time
    return ComparisonRow(
        **fields,
        test=fmean(tests) if tests else None,
        spread=stdev(tests) if len(tests) > 1 else None,
        times=step_time,
        faster=_compute_speed_up(results, names[0], compared_time),
        faster_than_one_thread=_compute_serial_speed_up(results, names[0], compared_time, 1),
        sent=records[0].sent_per_step,
        memory=records[0].memory,
        fullest=records[0].fullest,
        difference=difference.get("value"),
        tensor=difference.get("tensor"),
        baseline=difference.get("baseline"),
        digests=tuple(map(_hash_parameters, records)),
        overflowed_steps=tuple(record.overflowed_steps for record in records),
        failure=failure.get("message"),
        reached=tuple(_find_goal_reached(results, record, step_time) for record in records)
        if results.until
        else (),
    )


def _compute_speed_up(
    results: ComparisonResults, name: str, taken: StepTime | None
) -> SpeedUp | None:
    """The speed-up over a plain PyTorch loop with all threads, or else over such a serial."""
    if results.plain_time is None:
        return _compute_serial_speed_up(results, name, taken, int(results.machine["cores"]))
    return None if taken is None else results.plain_time.divide_by(taken)


def _compute_serial_speed_up(
    results: ComparisonResults, name: str, taken: StepTime | None, threads: int
) -> SpeedUp | None:
    """The speed-up over plain serial with some threads; exactly 1 for that row itself."""
    runs, serial = results.serial_times[threads]
    if taken is None or serial is None:
        return None
    return NO_SPEED_UP if name in runs else serial.divide_by(taken)


def _find_goal_reached(
    results: ComparisonResults, record: Record, taken: StepTime | None
) -> GoalReached | None:
    goal = Settings(until=results.until).goal
    job = record.header["job"]
    # records of earlier versions do not say it
    lower = job.get("lower_is_better", job["metric"] == "loss")
    for line in record.select_lines("epoch"):
        if goal and taken and line["test"] and goal.is_reached(line["test"]["value"], lower):
            steps = sum(
                step_line["epoch"] <= line["epoch"] for step_line in record.select_lines("step")
            )
            seconds = steps * taken.seconds
            # by the clock, because workers step independently
            if record.has_independent_workers:
                seconds = line["start"] + line["seconds"] - record.select_lines("epoch")[0]["start"]
            return GoalReached(
                seconds, line["epoch"] + 1, record.count_passed_samples(line["epoch"])
            )
    return None


def _hash_parameters(record: Record) -> str:
    return hashlib.sha256((record.folder / "model.safetensors").read_bytes()).hexdigest()[:8]
