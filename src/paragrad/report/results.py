"""The results of a comparison, read from its folder: a row for every strategy."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paragrad.errors import RankFailed
from paragrad.record.record import Line, Record, lines_of
from paragrad.report.timing import SAME, SpeedUp, StepTime, times_of
from paragrad.strategies.serial import Serial
from paragrad.trainer.settings import Settings

TWIN = "rounding twin"  # serial, every batch back to front


@dataclass(frozen=True)
class Reached:
    """Where a run reached the goal of `--until`."""

    seconds: float  # of its steps, each by the row's time per step
    epochs: int
    samples: int


@dataclass(frozen=True)
class Row:
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
    reached: tuple[Reached | None, ...] = ()  # the goal, by seed
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
        return self.faster.value if self.faster and self.faster.clear else None

    @property
    def speed_up_one_thread(self) -> float | None:
        """Over serial with one thread, likewise."""
        return (
            self.faster_than_one_thread.value
            if self.faster_than_one_thread and self.faster_than_one_thread.clear
            else None
        )

    def as_json(self) -> Line:
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
            told[f"{name}_between"] = each and each.between
        return told | {"others": self.times and self.times.load and self.times.load.others}


@dataclass(frozen=True)
class Results:
    """A comparison, read from its folder."""

    folder: Path

    @cached_property
    def asked(self) -> Line:
        """What was asked for: the comparison's own line."""
        return next(
            line for line in lines_of(self.folder / "compare.jsonl") if line["kind"] == "comparison"
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
    def rows(self) -> list[Row]:
        names = self.asked.get("strategies", [""] * len(self.asked["rows"]))
        return [
            _row(self, name, runs) for name, runs in zip(names, self.asked["rows"], strict=True)
        ]

    @cached_property
    def serial(self) -> dict[int, tuple[list[str], StepTime | None]]:
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
            found[threads] = runs, times_of([self.records[name] for name in runs])
        return found

    @cached_property
    def ended(self) -> Line:
        """How the comparison ended, the last time: {"status": finished, stopped, interrupted,
        failed or died, "error": why}.
        """
        return {
            "status": "died" if "strategies" in self.asked else "finished",
            "error": None,
            **(
                {line["kind"]: line for line in lines_of(self.folder / "compare.jsonl")}.get("end")
                or {}
            ),
        }

    @property
    def missing(self) -> list[str]:
        """The strategies of the rows that are not done, and the runs for speed."""
        for_speed = [
            name
            for name in self.asked.get("baselines", [])
            if name not in self.records or not self.records[name].finished
        ]
        return [
            row.strategy
            for row in self.rows
            if row.failure
            or (
                row.difference is None
                and not row.reference
                and row.strategy != TWIN
                and not self._in_rounds(row)
            )
        ] + for_speed

    def _in_rounds(self, row: Row) -> bool:
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
        return self.asked["until"]  # type: ignore[no-any-return]

    @property
    def failed(self) -> bool:
        return any(row.failure for row in self.rows)

    def lines(self, kind: str) -> dict[str, Line]:
        """The comparison's own lines of a kind (difference, distance), by run."""
        return {
            line["run"]: line
            for line in lines_of(self.folder / "compare.jsonl")
            if line["kind"] == kind
        }

    def as_json(self) -> Line:
        return {
            "schema": 3,
            "job": self.job,
            "metric": self.metric,
            "until": self.until,
            "folder": str(self.folder),
            "machine": self.machine,
            "rows": [row.as_json() for row in self.rows],
        }


def _row(results: Results, strategy: str, names: list[str]) -> Row:
    records = [results.records[name] for name in names if name in results.records]
    if not records:
        return Row(strategy, "", failure="not run", runs=tuple(names))
    header = records[0].header
    named: dict[str, Any] = {
        "strategy": TWIN if header["reverse"] else header["strategy"],
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
            return Row(**named, failure=str(RankFailed(**error)) if error else end["status"])
    if len(records) < len(names):
        return Row(**named, failure=f"{len(records)} of {len(names)} seeds were run")
    tests = [record.test for record in records if record.test is not None]
    taken = times_of(records)
    difference = results.lines("difference").get(names[0], {})
    failure = (
        {} if names[0] in results.lines("distance") else results.lines("event").get(names[0], {})
    )
    # a client's batch is no step of serial's
    over = None if records[0].rounds else taken
    return Row(
        **named,
        test=fmean(tests) if tests else None,
        spread=stdev(tests) if len(tests) > 1 else None,
        times=taken,
        faster=_faster(results, names[0], over, int(results.machine["cores"])),
        faster_than_one_thread=_faster(results, names[0], over, 1),
        sent=records[0].sent_per_step,
        memory=records[0].memory,
        fullest=records[0].fullest,
        difference=difference.get("value"),
        tensor=difference.get("tensor"),
        digests=tuple(map(_digest, records)),
        failure=failure.get("message"),
        reached=tuple(_reached(results, record, taken) for record in records)
        if results.until
        else (),
    )


def _faster(results: Results, name: str, taken: StepTime | None, threads: int) -> SpeedUp | None:
    """A step of plain serial with so many threads over this row's; exactly 1 where it is that
    row itself.
    """
    runs, serial = results.serial[threads]
    if taken is None or serial is None:
        return None
    return SAME if name in runs else serial.over(taken)


def _reached(results: Results, record: Record, taken: StepTime | None) -> Reached | None:
    goal = Settings(until=results.until).goal
    for line in record.of("epoch"):
        if goal and taken and line["test"] and goal.reached(line["test"]["value"]):
            steps = sum(each["epoch"] <= line["epoch"] for each in record.of("step"))
            seconds = steps * taken.seconds
            # by the clock: workers have steps of their own
            if record.apart:
                seconds = line["start"] + line["seconds"] - record.of("epoch")[0]["start"]
            return Reached(seconds, line["epoch"] + 1, record.passed(line["epoch"]))
    return None


def _digest(record: Record) -> str:
    return hashlib.sha256((record.folder / "model.safetensors").read_bytes()).hexdigest()[:8]
