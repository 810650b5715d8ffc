"""The results of a comparison, read from its folder: a row for every strategy."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paragrad.errors import RankFailed
from paragrad.record.record import Line, Record, read_lines
from paragrad.report.timing import NO_SPEED_UP, SpeedUp, StepTime, measure_step_time
from paragrad.strategies.serial import Serial
from paragrad.trainer.settings import Settings

ROUNDING_BASELINE = "rounding twin"  # serial, every batch back to front


@dataclass(frozen=True)
class GoalReached:
    """Where a run reached the goal of `--until`."""

    seconds: float  # of its steps, each by the row's time per step
    epochs: int
    samples: int


@dataclass(frozen=True)
class ComparisonRow:
    """What one strategy did, over its seeds; None where it did not come that far."""

    strategy: str
    resolved: str
    # the job's metric (accuracy: per cent): the mean over seeds
    test: float | None = None
    spread: float | None = None  # its standard deviation over seeds
    seeds: int = 1
    times: StepTime | None = None  # of a step
    faster: SpeedUp | None = None  # than serial with all threads
    faster_than_one_thread: SpeedUp | None = None
    # per rank and step, by kind: {bytes, computed}
    sent: dict[str, Line] = field(default_factory=dict)
    # bytes by kind, each of the rank that holds most of it
    memory: dict[str, int] = field(default_factory=dict)
    # bytes by kind of the rank that holds most of all together
    fullest: dict[str, int] = field(default_factory=dict)
    difference: float | None = None  # from serial, float64, first seed
    tensor: str | None = None  # where it is largest
    digests: tuple[str, ...] = ()  # of the final parameters, by seed
    reached: tuple[GoalReached | None, ...] = ()  # the goal, by seed
    runs: tuple[str, ...] = ()  # folders, by seed
    failure: str | None = None
    # serial itself, which the others are compared with
    reference: bool = False
    exact: bool = True  # it is to be the same training

    @property
    def seconds_per_step(self) -> float | None:
        """The median of the slowest rank; median over seeds."""
        return self.times.seconds if self.times else None

    @property
    def speed_up(self) -> float | None:
        """Over serial with all threads; None where noise would have made it."""
        return self.faster.value if self.faster and self.faster.is_significant else None

    @property
    def speed_up_one_thread(self) -> float | None:
        """Over serial with one thread, likewise."""
        return (
            self.faster_than_one_thread.value
            if self.faster_than_one_thread and self.faster_than_one_thread.is_significant
            else None
        )

    def to_json(self) -> Line:
        """All of it, a number and from where to where it may be side by side."""
        told = asdict(self) | {
            name: getattr(self, name)
            for name in ("seconds_per_step", "speed_up", "speed_up_one_thread")
        }
        del told["times"], told["faster"], told["faster_than_one_thread"]
        told["is_reference"] = told.pop("reference")
        for name, each in (
            ("seconds_per_step", self.times),
            ("speed_up", self.faster),
            ("speed_up_one_thread", self.faster_than_one_thread),
        ):
            told[f"{name}_between"] = each and each.finite_bounds
        return told | {"others": self.times and self.times.load and self.times.load.others}


@dataclass(frozen=True)
class ComparisonResults:
    """A comparison, read from its folder."""

    folder: Path

    @cached_property
    def comparison_line(self) -> Line:
        """What was asked for: the comparison's own line."""
        return next(
            line
            for line in read_lines(self.folder / "compare.jsonl")
            if line["kind"] == "comparison"
        )

    @cached_property
    def records(self) -> dict[str, Record]:
        """Every run of the comparison that began, by the name of its folder."""
        found = {
            path.name: Record(path, spans=False)
            for path in sorted(self.folder.iterdir())
            if path.is_dir()
        }
        return {name: record for name, record in found.items() if record.header}

    @cached_property
    def rows(self) -> list[ComparisonRow]:
        names = self.comparison_line.get("strategies", [""] * len(self.comparison_line["rows"]))
        return [
            _build_row(self, name, runs)
            for name, runs in zip(names, self.comparison_line["rows"], strict=True)
        ]

    @cached_property
    def serial_times(self) -> dict[int, tuple[list[str], StepTime | None]]:
        """Runs of plain serial, and its time per step, with one thread and with all of them:
        what speed-ups are over.
        """
        found = {}
        for threads in {1, int(self.machine["cores"])}:
            runs = [
                name
                for name, record in self.records.items()
                if record.header["resolved"] == str(Serial(threads=threads))
                and not record.header["reverse"]
            ]
            found[threads] = runs, measure_step_time([self.records[name] for name in runs])
        return found

    @cached_property
    def ending(self) -> Line:
        """How the comparison ended, the last time: {"status": finished, stopped, interrupted,
        failed or died, "error": why}.
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
        """The strategies of the rows that are not done, and the runs for speed."""
        for_speed = [
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
        ] + for_speed

    def _has_rounds(self, row: ComparisonRow) -> bool:
        """It has no steps that could be compared with serial's."""
        return any(self.records[run].rounds for run in row.runs if run in self.records)

    @property
    def header(self) -> Line:
        return next(iter(self.records.values())).header

    @property
    def job(self) -> str:
        return str(self.header["job"]["name"])

    @property
    def metric(self) -> str:
        """What the test column holds."""
        return str(self.header["job"]["metric"])

    @property
    def machine(self) -> Line:
        return dict(self.header["machine"])

    @property
    def until(self) -> str | None:
        return self.comparison_line["until"]  # type: ignore[no-any-return]

    @property
    def failed(self) -> bool:
        return any(row.failure for row in self.rows)

    def index_lines(self, kind: str) -> dict[str, Line]:
        """The comparison's own lines of a kind (difference, distance), by run."""
        return {
            line["run"]: line
            for line in read_lines(self.folder / "compare.jsonl")
            if line["kind"] == kind
        }

    def to_json(self) -> Line:
        return {
            "schema": 3,
            "job": self.job,
            "metric": self.metric,
            "until": self.until,
            "folder": str(self.folder),
            "machine": self.machine,
            "rows": [row.to_json() for row in self.rows],
        }


def _build_row(results: ComparisonResults, strategy: str, names: list[str]) -> ComparisonRow:
    records = [results.records[name] for name in names if name in results.records]
    if not records:
        return ComparisonRow(strategy, "", failure="not run", runs=tuple(names))
    header = records[0].header
    named: dict[str, Any] = {
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
                **named, failure=str(RankFailed(**error)) if error else end["status"]
            )
    if len(records) < len(names):
        return ComparisonRow(**named, failure=f"{len(records)} of {len(names)} seeds were run")
    tests = [record.test for record in records if record.test is not None]
    taken = measure_step_time(records)
    difference = results.index_lines("difference").get(names[0], {})
    failure = (
        {}
        if names[0] in results.index_lines("distance")
        else results.index_lines("event").get(names[0], {})
    )
    # a client's batch is no step of serial's
    over = None if records[0].rounds else taken
    return ComparisonRow(
        **named,
        test=fmean(tests) if tests else None,
        spread=stdev(tests) if len(tests) > 1 else None,
        times=taken,
        faster=_compute_speed_up(results, names[0], over, int(results.machine["cores"])),
        faster_than_one_thread=_compute_speed_up(results, names[0], over, 1),
        sent=records[0].sent_per_step,
        memory=records[0].memory,
        fullest=records[0].fullest,
        difference=difference.get("value"),
        tensor=difference.get("tensor"),
        digests=tuple(map(_hash_parameters, records)),
        failure=failure.get("message"),
        reached=tuple(_find_goal_reached(results, record, taken) for record in records)
        if results.until
        else (),
    )


def _compute_speed_up(
    results: ComparisonResults, name: str, taken: StepTime | None, threads: int
) -> SpeedUp | None:
    """A step of plain serial with so many threads over this row's; exactly 1 where it is that
    row itself.
    """
    runs, serial = results.serial_times[threads]
    if taken is None or serial is None:
        return None
    return NO_SPEED_UP if name in runs else serial.divide_by(taken)


def _find_goal_reached(
    results: ComparisonResults, record: Record, taken: StepTime | None
) -> GoalReached | None:
    goal = Settings(until=results.until).goal
    for line in record.select_lines("epoch"):
        if goal and taken and line["test"] and goal.is_reached(line["test"]["value"]):
            steps = sum(each["epoch"] <= line["epoch"] for each in record.select_lines("step"))
            seconds = steps * taken.seconds
            # by the clock: workers have steps of their own
            if record.has_independent_workers:
                seconds = line["start"] + line["seconds"] - record.select_lines("epoch")[0]["start"]
            return GoalReached(
                seconds, line["epoch"] + 1, record.count_passed_samples(line["epoch"])
            )
    return None


def _hash_parameters(record: Record) -> str:
    return hashlib.sha256((record.folder / "model.safetensors").read_bytes()).hexdigest()[:8]
