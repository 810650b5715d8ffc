"""compare: one job under many strategies, one table."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paragrad.commands.train import check_against_serial, make_folder_name, train_on_ranks
from paragrad.commands.trial import choose_by_trial
from paragrad.engine.gradient_noise import explain_no_measurement
from paragrad.errors import Interrupted, RankFailed, Refused
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.loops.synchronous import Progress
from paragrad.record.record import Line, Record, Recorder, create_run_folder, read_lines
from paragrad.report.comparison_page import write_page
from paragrad.report.comparison_table import Table
from paragrad.report.equivalence.lockstep import measure_distances
from paragrad.report.notebook import make_notebook_progress
from paragrad.report.results import ROUNDING_BASELINE
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.runtime.stop_signals import StopRequest, handle_stop_signals
from paragrad.strategies.registry import parse_strategies, strategy
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.identity import refuse_other_training
from paragrad.trainer.pace import refuse_unknown_ranks
from paragrad.trainer.settings import Settings, name_in_records
from paragrad.validation.inspect_job import JobInspection, inspect_job
from paragrad.validation.resume_check import build_job_identity
from paragrad.validation.validate import (
    ValidatedRun,
    detect_environment,
    resolve_and_check_strategy,
    validate_run,
)

BASELINE_STEPS = 200  # of a serial run that is there for its speed alone
DISTANCE_STEPS = 100  # over which the page draws the distance from serial


def compare(
    job: Job,
    chosen: str | Iterable[str | Strategy],
    *,
    runs: str | Path = "runs",
    seeds: int = 1,
    rounding_baseline: bool = False,
    data: str | Path | None = None,
    device: str = "cpu",
    backend: str = "auto",
    overlap: bool = True,
    loaders: int = 0,
    until: str | None = None,
    inject_fault: str | None = None,
    skip_schedule_check: bool = False,
    skip_first_step_check: bool = False,
    machine: str | Path | None = None,
    slow: str | None = None,
    pace: float | None = None,
    noise_scale: int | None = None,
    resume: str | Path | None = None,
    command: str | None = None,
    progress: Callable[[str], Progress | None] | None = None,
) -> Table:
    """Train a job under every strategy, check each against serial in float64 over 20 steps; one
    table, and one page.html.

    chosen: "serial; data(2)" or a list;  runs: the folder for the comparison's own folder;
    seeds: trainings of each, with the job's seed and the following ones;  twin: also train
    serial with every batch back to front, to show what rounding alone does;  resume: the folder
    of such a comparison that ended early: what it has is kept, the rest is done;  command: what
    to type to repeat it;  progress(strategy) gives what is told of that run's progress;  the
    others as in `paragrad.trainer.settings.Settings`. All strategies are checked at the door
    (Refused) before the first run; one that fails while it runs says so in its row. On SIGTERM,
    or where nothing can be written any more, the table has the rows that are done and names the
    others (`table.ended`); Ctrl-C raises Interrupted, of whose folder `Table(folder)` is such a
    table.
    """
    if get_launched_size() is not None:
        raise Refused(
            "compare starts its own ranks and cannot run under a launcher; call it with plain "
            "python"
        )
    _check_seeds(seeds)
    how = Settings(
        data=data,
        device=device,
        backend=backend,
        overlap=overlap,
        loaders=loaders,
        until=until,
        inject_fault=inject_fault,
        skip_schedule_check=skip_schedule_check,
        skip_first_step_check=skip_first_step_check,
        machine=machine,
        slow=slow,
        pace=pace,
        noise_scale=noise_scale,
    )
    listed = parse_strategies(chosen) if isinstance(chosen, str) else list(chosen)
    if not listed:
        raise Refused("compare needs at least one strategy")
    facts = inspect_job(job, how.folder)
    rows, baselines = validate_rows(job, listed, how, rounding_baseline, facts)
    # it is in some rows alone
    refuse_unknown_ranks(how.slow_ranks, max(each.size - each.resolved.servers for each in rows))
    names = [
        [
            f"{place:02}-{make_folder_name(row.requested)}"
            + ("-twin" if row.settings.reverse else "")
            + (f"-seed-{job.seed + more}" if seeds > 1 else "")
            for more in range(seeds)
        ]
        for place, row in enumerate(rows, start=1)
    ]
    asked: Line = {
        "rows": names,
        "strategies": [label_row(row) for row in rows],
        "until": str(how.goal) if how.goal else None,
        "seeds": seeds,
        "command": command,
        "baselines": [name_baseline_folder(row) for row in baselines],
        "identity": collect_comparison_identity(rows[0], how),
    }
    folder = (
        create_run_folder(Path(runs), f"{job.name}-compare")
        if resume is None
        else find_resumed_folder(Path(resume), asked, job)
    )
    with (
        Recorder(folder / "compare.jsonl", exclusive=True) as record,
        Launcher(max(each.size for each in rows)) as ranks,
    ):
        comparing = ComparisonRun(
            ranks, folder, record, progress or make_notebook_progress() or (lambda name: None)
        )
        if resume is None:
            record.write_line("comparison", **asked)
        status, why = comparing.train_all_rows(list(zip(rows, names, strict=True)), baselines)
        with suppress(OSError):  # a full disk has no room for it
            record.write_line("end", status=status, seconds=round(record.now(), 6), error=why)
    table = Table(folder)
    with warn_on_write_error(folder / "page.html"):
        if table.records:
            write_page(table)
    if status == "interrupted":
        raise Interrupted(folder)
    return table


def _check_seeds(seeds: int) -> None:
    if not isinstance(seeds, int) or seeds < 1:
        raise Refused(f"seeds must be a whole number from 1, got {seeds!r}")


def validate_rows(
    job: Job,
    requested: Sequence[str | Strategy],
    settings: Settings,
    rounding_baseline: bool,
    inspection: JobInspection,
) -> tuple[list[ValidatedRun], list[ValidatedRun]]:
    """(rows, what else is trained for its speed): all checked at the door."""
    honest = replace(settings, inject_fault=None, noise_scale=None)
    hows = [drop_noise_scale(each, settings) for each in requested]
    if settings.noise_scale and not any(each.noise_scale for each in hows):
        raise Refused(
            "no strategy here has the gradient of parts and of the whole batch on a rank; add "
            "data(n), or leave out "
            "--noise-scale"
        )
    if without := [
        str(each)
        for each, own in zip(requested, hows, strict=True)
        if settings.noise_scale and not own.noise_scale
    ]:
        warnings.warn(
            f"the noise scale is not measured under {', '.join(without)}: no rank there has the "
            f"gradient of parts "
            "and of the whole batch",
            stacklevel=3,
        )
    rows = [
        validate_run(job, each, own, inspection) for each, own in zip(requested, hows, strict=True)
    ]
    if rounding_baseline:
        rows.append(validate_run(job, Serial(), replace(honest, reverse=True), inspection))
    for_speed = {
        each.resolved: each
        for each in (
            validate_run(job, each, replace(honest, limit=BASELINE_STEPS), inspection)
            for each in (Serial(), Serial(threads=1))
        )
    }
    # the twin's time is not plain serial's
    timed = [row.resolved for row in rows if not row.settings.reverse]
    return rows, [each for resolved, each in for_speed.items() if resolved not in timed]


def drop_noise_scale(requested: str | Strategy, settings: Settings) -> Settings:
    """Without the noise scale where that cannot be measured: serial is in most comparisons."""
    resolved = resolve_and_check_strategy(strategy(requested), detect_environment(settings))
    return replace(settings, noise_scale=None) if explain_no_measurement(resolved) else settings


def collect_comparison_identity(row: ValidatedRun, settings: Settings) -> Line:
    """What must be equal where a comparison goes on."""
    job = row.job
    facts = row.inspection
    return {
        **build_job_identity(job, facts),
        "epochs": job.epochs,
        "metric": job.metric_name,
        "test samples": facts.test_samples,
        **{
            name_in_records(name): str(value)
            for name, value in vars(settings).items()
            if name not in ("until", "data", "memory")
            and (
                # which earlier versions did not know
                name != "noise_scale" or value is not None
            )
        },
    }


def _format_value_list(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else str(value)


def name_baseline_folder(row: ValidatedRun) -> str:
    """The folder of a run that is made for its speed."""
    return f"baseline-{make_folder_name(row.resolved)}"


@contextmanager
def warn_on_write_error(path: Path) -> Iterator[None]:
    """Around writing what a comparison can do without."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path} could not be written: {error.strerror or error}", stacklevel=3)


def label_row(row: ValidatedRun) -> str:
    return ROUNDING_BASELINE if row.settings.reverse else str(row.requested)


def find_resumed_folder(folder: Path, header: Line, job: Job) -> Path:
    """A comparison's folder, if it is one of the same. Raises Refused."""
    before = next(
        (line for line in read_lines(folder / "compare.jsonl") if line["kind"] == "comparison"),
        None,
    )
    if before is None:
        raise Refused(
            f"{folder} holds no comparison; give the folder that a comparison was written to, as "
            f"it says at its end"
        )
    if "identity" not in before:
        raise Refused(
            f"{folder} is a comparison of an earlier version, which cannot be gone on with; begin "
            f"a new one"
        )
    refuse_other_training(folder, before["identity"], header["identity"], f"job {job.name} has")
    for what, name in (("strategies", "strategies"), ("--until", "until"), ("--seeds", "seeds")):
        if before[name] != header[name]:
            raise Refused(
                f"{folder} is a comparison with {what} {_format_value_list(before[name])}, and "
                f"here it is with "
                f"{_format_value_list(header[name])}; go on with the same"
                + (f": {before['command']}" if before.get("command") else "")
            )
    return folder


@dataclass
class ComparisonRun:
    """A comparison under way."""

    launcher: Launcher
    folder: Path
    record: Recorder
    progress: Callable[[str], Progress | None]
    stop_request: StopRequest = field(default_factory=StopRequest)  # to stop

    def train_all_rows(
        self, rows: list[tuple[ValidatedRun, list[str]]], baselines: list[ValidatedRun]
    ) -> tuple[str, str | None]:
        """Every row that is not there yet: how that ended (finished, stopped, interrupted,
        failed), and why.
        """

        def ask() -> None:
            self.stop_request.set()
            self.launcher.request_stop()

        try:
            with handle_stop_signals(ask):
                for row, names in rows:
                    if not self.stop_request.is_set():
                        self.train_row(row, names)
                for row in baselines:
                    if not self.stop_request.is_set():
                        self.train_unless_finished(
                            row, name_baseline_folder(row), f"{row.resolved}, for its speed"
                        )
        except KeyboardInterrupt:
            return "interrupted", None
        # of the record: nothing can be written any more
        except OSError as error:
            return "failed", f"{error.filename or self.folder}: {error.strerror or error}"
        return ("stopped" if self.stop_request.is_set() else "finished"), None

    def train_row(self, row: ValidatedRun, names: list[str]) -> None:
        """The trainings of one strategy, and its distances from serial; a failure is in the
        run's own record.
        """
        if not all(map(self.is_finished, names)):
            row = choose_by_trial(self.launcher, row)
        for more, name in enumerate(names):
            # the trial before, or the seed before, did not hear it
            if self.stop_request.is_set():
                return
            seeded = row.replace_seed(row.job.seed + more)
            told = f"{label_row(row)}, seed {seeded.job.seed}" if len(names) > 1 else label_row(row)
            if not self.train_unless_finished(seeded, name, told):
                return
        if (
            (row.settings.reverse or not row.resolved.is_reference)
            and row.rounds is None
            and not self.stop_request.is_set()
        ):
            self.record_distances(row, names[0])

    def is_finished(self, name: str) -> bool:
        return Record(self.folder / name, spans=False).finished

    def train_unless_finished(self, row: ValidatedRun, name: str, label: str) -> bool:
        """Whether the run is there, finished; one that is there and is not, is made anew."""
        if self.is_finished(name):
            return True
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        try:
            return not train_on_ranks(
                self.launcher, row, self.folder / name, progress=self.progress(label)
            ).stopped
        except RankFailed:
            return False

    def record_distances(self, row: ValidatedRun, name: str) -> None:
        """The distances from serial, unless they are there."""
        if any(
            line["kind"] == "distance" and line["run"] == name
            for line in read_lines(self.folder / "compare.jsonl")
        ):
            return
        try:
            if not row.settings.reverse:
                check_against_serial(self.launcher, row, name, self.record)
            values = row.run_on_ranks(
                self.launcher,
                measure_distances,
                row.job,
                row.resolved,
                row.settings,
                DISTANCE_STEPS,
            )[0]
            self.record.write_line("distance", baseline="serial", run=name, values=values)
        except RankFailed as error:
            self.record.write_line(
                "event", name="difference failed", numbers={}, run=name, message=str(error)
            )
