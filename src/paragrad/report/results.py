"""The results of a comparison, read from its folder: a row for every strategy."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from paragrad.errors import RankFailed
from paragrad.record.record import Line, Record, lines_of
from paragrad.strategies.serial import Serial
from paragrad.training.settings import Settings

TWIN = "rounding twin"          # serial, every batch back to front


@dataclass(frozen=True)
class Reached:
    """Where a run reached the goal of `--until`."""
    seconds: float              # since the first step began, tests included
    epochs: int
    samples: int


@dataclass(frozen=True)
class Row:
    """What one strategy did, over its seeds; None where it did not come that far."""
    strategy: str
    resolved: str
    test: float | None = None                       # the job's metric (accuracy: per cent): the mean over seeds
    spread: float | None = None                     # its standard deviation over seeds
    seeds: int = 1
    seconds_per_step: float | None = None           # median of the slowest rank; median over seeds
    speed_up: float | None = None                   # over serial with all threads
    speed_up_one_thread: float | None = None
    sent: dict[str, Line] = field(default_factory=dict)     # per rank and step, by kind: {bytes, computed}
    memory: dict[str, int] = field(default_factory=dict)    # bytes by kind, each of the rank that holds most of it
    difference: float | None = None                 # from serial, float64, first seed
    tensor: str | None = None                       # where it is largest
    digests: tuple[str, ...] = ()                   # of the final parameters, by seed
    reached: tuple[Reached | None, ...] = ()        # the goal, by seed
    runs: tuple[str, ...] = ()                      # folders, by seed
    failure: str | None = None
    reference: bool = False                         # serial itself, which the others are compared with


@dataclass(frozen=True)
class Results:
    """A comparison, read from its folder."""
    folder: Path

    @cached_property
    def asked(self) -> Line:
        """What was asked for: the comparison's own line."""
        return next(line for line in lines_of(self.folder / "compare.jsonl") if line["kind"] == "comparison")

    @cached_property
    def records(self) -> dict[str, Record]:
        """Every run of the comparison that began, by the name of its folder."""
        found = {path.name: Record(path, spans=False) for path in sorted(self.folder.iterdir()) if path.is_dir()}
        return {name: record for name, record in found.items() if record.header}

    @cached_property
    def rows(self) -> list[Row]:
        names = self.asked.get("strategies", [""] * len(self.asked["rows"]))
        return [_row(self, name, runs) for name, runs in zip(names, self.asked["rows"], strict=True)]

    @cached_property
    def ended(self) -> Line:
        """How the comparison ended, the last time: {"status": finished, stopped, interrupted, failed or died, "error": why}."""
        return {"status": "died" if "strategies" in self.asked else "finished", "error": None,
                **({line["kind"]: line for line in lines_of(self.folder / "compare.jsonl")}.get("end") or {})}

    @property
    def missing(self) -> list[str]:
        """The strategies of the rows that are not done, and the runs for speed."""
        for_speed = [name for name in self.asked.get("baselines", [])
                     if name not in self.records or not self.records[name].finished]
        return [row.strategy for row in self.rows if row.failure
                or (row.difference is None and not row.reference and row.strategy != TWIN)] + for_speed

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
        return self.asked["until"]                  # type: ignore[no-any-return]

    @property
    def failed(self) -> bool:
        return any(row.failure for row in self.rows)

    def lines(self, kind: str) -> dict[str, Line]:
        """The comparison's own lines of a kind (difference, distance), by run."""
        return {line["run"]: line for line in lines_of(self.folder / "compare.jsonl") if line["kind"] == kind}

    def as_json(self) -> Line:
        return {"schema": 2, "job": self.job, "metric": self.metric, "until": self.until, "folder": str(self.folder),
                "machine": self.machine, "rows": [asdict(row) for row in self.rows]}


def _row(results: Results, strategy: str, names: list[str]) -> Row:
    records = [results.records[name] for name in names if name in results.records]
    if not records:
        return Row(strategy, "", failure="not run", runs=tuple(names))
    header = records[0].header
    named: dict[str, Any] = {"strategy": TWIN if header["reverse"] else header["strategy"], "resolved": header["resolved"],
                             "seeds": len(names), "runs": tuple(names),
                             "reference": not header["reverse"]
                             and header["resolved"] == str(Serial(threads=header["threads"]))}
    for record in records:
        end = record.end or {"status": "died", "error": None}
        if end["status"] != "finished":
            error = end["error"]
            return Row(**named, failure=str(RankFailed(**error)) if error else end["status"])
    if len(records) < len(names):
        return Row(**named, failure=f"{len(records)} of {len(names)} seeds were run")
    tests = [record.test for record in records if record.test is not None]
    seconds = median([record.seconds_per_step for record in records if record.seconds_per_step] or [0.0]) or None
    all_threads, one_thread = _serial_seconds(results, int(results.machine["cores"])), _serial_seconds(results, 1)
    difference = results.lines("difference").get(names[0], {})
    failure = {} if names[0] in results.lines("distance") else results.lines("event").get(names[0], {})
    return Row(**named, test=fmean(tests) if tests else None, spread=stdev(tests) if len(tests) > 1 else None,
               seconds_per_step=seconds, speed_up=all_threads / seconds if all_threads and seconds else None,
               speed_up_one_thread=one_thread / seconds if one_thread and seconds else None,
               sent=records[0].sent_per_step, memory=records[0].memory, difference=difference.get("value"),
               tensor=difference.get("tensor"), digests=tuple(map(_digest, records)), failure=failure.get("message"),
               reached=tuple(_reached(results, record) for record in records) if results.until else ())


def _serial_seconds(results: Results, threads: int) -> float | None:
    """The median step of plain serial with so many threads, over its runs."""
    found = [record.seconds_per_step for record in results.records.values()
             if record.header["resolved"] == str(Serial(threads=threads)) and not record.header["reverse"]]
    return median([seconds for seconds in found if seconds] or [0.0]) or None


def _reached(results: Results, record: Record) -> Reached | None:
    goal = Settings(until=results.until).goal
    for line in record.of("epoch"):
        if goal and line["test"] and goal.reached(line["test"]["value"]):
            return Reached(line["start"] + line["seconds"] - record.of("step")[0]["start"], line["epoch"] + 1,
                           (line["epoch"] + 1) * record.header["job"]["samples"])
    return None


def _digest(record: Record) -> str:
    return hashlib.sha256((record.folder / "model.safetensors").read_bytes()).hexdigest()[:8]
