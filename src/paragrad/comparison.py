"""compare: one job under many strategies, one table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paragrad.errors import RankFailed, Refused
from paragrad.job import Job, examined
from paragrad.launching import Ranks
from paragrad.record import Line, Record, Recorder, lines_of, new_folder
from paragrad.strategy import Serial, Strategy, strategies
from paragrad.training import Admitted, Progress, admitted, check_same, folder_name, run
from paragrad.world import launched_size

BASELINE_STEPS = 200            # of a serial run that is there for its speed alone


@dataclass(frozen=True)
class Row:
    """What one strategy did; None where it did not come that far."""
    strategy: str
    resolved: str
    test: float | None = None                       # the job's metric (accuracy: per cent)
    seconds_per_step: float | None = None           # median of the slowest rank
    speed_up: float | None = None                   # over serial with all threads
    speed_up_one_thread: float | None = None
    sent: dict[str, Line] = field(default_factory=dict)     # per rank and step, by kind: {bytes, computed}
    difference: float | None = None                 # from serial, float64
    tensor: str | None = None                       # where it is largest
    digest: str | None = None                       # of the final parameters
    failure: str | None = None


@dataclass(frozen=True)
class Table:
    """A comparison, read from its folder."""
    job: str
    metric: str                                     # what the test column holds
    folder: Path
    rows: list[Row]
    machine: Line

    @property
    def failed(self) -> bool:
        return any(row.failure for row in self.rows)

    def as_json(self) -> Line:
        return {"schema": 1, "job": self.job, "metric": self.metric, "folder": str(self.folder), "machine": self.machine,
                "rows": [asdict(row) for row in self.rows]}


def compare(job: Job, chosen: str | Iterable[str | Strategy], *, runs: str | Path = "runs",
            data: str | Path | None = None, progress: Callable[[str], Progress | None] | None = None) -> Table:
    """Train a job under every strategy, check each against serial in float64 over 20 steps, and put them in one table.

    chosen: "serial; data(2)" or a list; runs: the folder for the comparison's own folder; progress(strategy) gives what is
    told of that run's progress. All strategies are checked at the door (Refused) before the first run; one that fails
    while it runs says so in its row.
    """
    if launched_size() is not None:
        raise Refused("compare starts its own ranks and cannot run under torchrun; call it with plain python")
    data = Path(data) if data else None
    listed = strategies(chosen) if isinstance(chosen, str) else list(chosen)
    if not listed:
        raise Refused("compare needs at least one strategy")
    facts = examined(job, data)
    rows = [admitted(job, each, data, facts) for each in listed]
    for_speed = {each.resolved: each for each in (admitted(job, each, data, facts) for each in (Serial(), Serial(threads=1)))}
    baselines = [each for resolved, each in for_speed.items() if resolved not in [row.resolved for row in rows]]
    folder = new_folder(Path(runs), f"{job.name}-compare")
    with Recorder(folder / "compare.jsonl") as record, Ranks(max(each.size for each in rows)) as ranks:
        for number, row in enumerate(rows, start=1):
            name = f"{number:02}-{folder_name(row.asked)}"
            _compared(ranks, row, folder / name, data, record, progress(str(row.asked)) if progress else None)
        for row in baselines:
            name = f"baseline-{folder_name(row.resolved)}"
            _try(ranks, row, folder / name, data, progress(f"{row.resolved}, for its speed") if progress else None,
                 limit=BASELINE_STEPS)
    return read(folder)


def _compared(ranks: Ranks, row: Admitted, folder: Path, data: Path | None, record: Recorder,
              progress: Progress | None) -> None:
    """One run, and its difference from serial; a failure is in the run's own record."""
    if not _try(ranks, row, folder, data, progress) or isinstance(row.resolved, Serial):
        return
    try:
        check_same(ranks, row, folder.name, data, record)
    except RankFailed as error:
        record.write("event", name="difference failed", numbers={}, run=folder.name, message=str(error))


def _try(ranks: Ranks, row: Admitted, folder: Path, data: Path | None, progress: Progress | None,
         limit: int | None = None) -> bool:
    folder.mkdir()
    try:
        run(ranks, row, folder, data=data, progress=progress, limit=limit)
    except RankFailed:
        return False
    return True


def read(folder: Path) -> Table:
    """The table of a comparison's folder."""
    records = {path.name: Record(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    lines = {line["run"]: line for line in lines_of(folder / "compare.jsonl")}
    all_threads = _seconds(records.values(), lambda serial: serial.threads == cores_of(records))
    one_thread = _seconds(records.values(), lambda serial: serial.threads == 1)
    rows = [_row(record, lines.get(name, {}), all_threads, one_thread)
            for name, record in records.items() if not name.startswith("baseline-")]
    header = next(iter(records.values())).header
    return Table(header["job"]["name"], header["job"]["metric"], folder, rows, header["machine"])


def cores_of(records: dict[str, Record]) -> int:
    return int(next(iter(records.values())).header["machine"]["cores"])


def _seconds(records: Iterable[Record], wanted: Callable[[Serial], bool]) -> float | None:
    for record in records:
        resolved = strategies(record.header["resolved"])[0]
        if isinstance(resolved, Serial) and resolved.micro == 1 and wanted(resolved):
            return record.seconds_per_step
    return None


def _row(record: Record, line: Line, all_threads: float | None, one_thread: float | None) -> Row:
    header, end = record.header, record.end or {"status": "died", "error": None}
    named: dict[str, Any] = {"strategy": header["strategy"], "resolved": header["resolved"]}
    if end["status"] != "finished":
        error = end["error"]
        return Row(**named, failure=str(RankFailed(**error)) if error else end["status"])
    seconds = record.seconds_per_step
    return Row(**named, test=record.test, seconds_per_step=seconds,
               speed_up=all_threads / seconds if all_threads and seconds else None,
               speed_up_one_thread=one_thread / seconds if one_thread and seconds else None,
               sent=record.sent_per_step, difference=line.get("value"), tensor=line.get("tensor"),
               digest=hashlib.sha256((record.folder / "model.safetensors").read_bytes()).hexdigest()[:8],
               failure=line.get("message"))
