"""compare: one job under many strategies, in one table."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paragrad.commands.stop_timer import StopTimer
from paragrad.commands.train import check_against_serial, make_folder_name, train_on_ranks
from paragrad.commands.trial import choose_by_trial
from paragrad.engine.gradient_noise import explain_no_measurement
from paragrad.errors import Interrupted, RankFailed, Refused, warn_user
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.loops.plain_pytorch import PLAIN_PYTORCH
from paragrad.loops.synchronous import Progress
from paragrad.record.record import Line, Record, Recorder, create_run_folder, read_lines
from paragrad.report.comparison_page import write_page
from paragrad.report.comparison_table import Table
from paragrad.report.equivalence.lockstep import measure_distances
from paragrad.report.python_progress import make_progress
from paragrad.report.results import ROUNDING_BASELINE, list_row_names
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.runtime.stop_signals import StopRequest, handle_stop_signals
from paragrad.strategies.registry import parse_strategies, strategy
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.identity import refuse_other_training
from paragrad.trainer.pace import refuse_unknown_ranks
from paragrad.trainer.settings import Settings, name_in_records, refuse_old_arguments
from paragrad.validation.inspect_job import JobInspection, inspect_job
from paragrad.validation.resume_check import build_job_identity
from paragrad.validation.validate import (
    ValidatedRun,
    detect_environment,
    resolve_and_check_strategy,
    validate_run,
)

BASELINE_STEPS = 200  # steps of a run that is trained for its speed alone
DISTANCE_STEPS = 100  # steps over which the page draws the distance from serial


@refuse_old_arguments
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
    """Train a job under every strategy and compare the results in one table and one page.html.

    Each strategy is checked against serial in float64 over 20 steps. Validation refuses a strategy
    before the first run. A strategy that fails while it runs has the failure in its row.

    On SIGTERM, or if nothing can be written any more, the table has the finished rows and names the
    others (`table.ended`).

    Args:
        job: the job to train.

        chosen: strategies, as "serial; data(2)" or as a list.

        runs: the folder in which the comparison's own folder is made.

        seeds: trainings of each strategy, with the job's seed and the following ones.

        rounding_baseline: also train serial with every batch in reverse order, which shows what
            rounding alone does.

        data: as in `paragrad.trainer.settings.Settings`.

        device: as in `Settings`.

        backend: as in `Settings`.

        overlap: as in `Settings`.

        loaders: as in `Settings`.

        until: as in `Settings`.

        inject_fault: as in `Settings`.

        skip_schedule_check: as in `Settings`.

        skip_first_step_check: as in `Settings`.

        machine: as in `Settings`.

        slow: as in `Settings`.

        pace: as in `Settings`.

        noise_scale: as in `Settings`.

        resume: the folder of such a comparison that ended early. Its finished runs are kept, the
            rest is done.

        command: the command line that repeats the comparison.

        progress: progress(strategy) returns the function that receives this run's progress;
            None: as in `train`.

    Returns:
        The table.

    Raises:
        Refused: an argument or a strategy is refused before the first run.

        Interrupted: on Ctrl-C. `Table(error.folder)` is the table of the finished rows.

    Examples:
        >>> import paragrad as pg
        >>> table = pg.compare(pg.job("digits").replace(epochs=1), "serial; data(2)")
        >>> [row.strategy for row in table.rows]
        ['serial', 'data(2)']
    """
    if get_launched_size() is not None:
        raise Refused(
            "compare starts its own ranks and cannot run under a launcher; call it with plain "
            "python"
        )
    _check_seeds(seeds)
    settings = Settings(
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
    requested = parse_strategies(chosen) if isinstance(chosen, str) else list(chosen)
    if not requested:
        raise Refused("compare needs at least one strategy")
    inspection = inspect_job(job, settings.folder)
    rows, baselines = validate_rows(job, requested, settings, rounding_baseline, inspection)
    # only some rows have that rank, so that no row refuses it by itself
    refuse_unknown_ranks(
        settings.slow_ranks, max(each.size - each.resolved.servers for each in rows)
    )
    names = [
        [
            f"{place:02}-{make_folder_name(row.requested)}"
            + ("-twin" if row.settings.reverse else "")
            + (f"-seed-{job.seed + seed_offset}" if seeds > 1 else "")
            for seed_offset in range(seeds)
        ]
        for place, row in enumerate(rows, start=1)
    ]
    header: Line = {
        "rows": names,
        "strategies": [label_row(row) for row in rows],
        "until": str(settings.goal) if settings.goal else None,
        "seeds": seeds,
        "command": command,
        "baselines": [name_baseline_folder(row) for row in baselines],
        "identity": collect_comparison_identity(rows[0], settings),
    }
    folder = (
        create_run_folder(Path(runs), f"{job.name}-compare")
        if resume is None
        else find_resumed_folder(Path(resume), header, job)
    )
    with (
        Recorder(folder / "compare.jsonl", exclusive=True) as record,
        Launcher(max(each.size for each in rows)) as launcher,
    ):
        comparison = ComparisonRun(launcher, folder, record, progress or make_progress())
        if resume is None:
            record.write_line("comparison", **header)
        status, why = comparison.train_all_rows(list(zip(rows, names, strict=True)), baselines)
        with suppress(OSError):  # the disk may be full
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
    """Validate all rows of a comparison.

    Args:
        job: the job to train.

        requested: the strategies as they are written.

        settings: the settings of all rows.

        rounding_baseline: whether to add serial with every batch in reverse order.

        inspection: the inspected job.

    Returns:
        (the rows, further runs that are trained for their speed).
    """
    baseline_settings = replace(settings, inject_fault=None, noise_scale=None)
    row_settings = [drop_noise_scale(each, settings) for each in requested]
    if settings.noise_scale and not any(each.noise_scale for each in row_settings):
        raise Refused(
            "no strategy here has the gradient of parts and of the whole batch on a rank; add "
            "data(n), or leave out --noise-scale"
        )
    if unmeasured := [
        str(each)
        for each, one_settings in zip(requested, row_settings, strict=True)
        if settings.noise_scale and not one_settings.noise_scale
    ]:
        warn_user(
            f"the noise scale is not measured under {', '.join(unmeasured)}: no rank there has the "
            "gradient of parts and of the whole batch"
        )
    rows = [
        validate_run(job, each, one_settings, inspection)
        for each, one_settings in zip(requested, row_settings, strict=True)
    ]
    if rounding_baseline:
        rows.append(
            validate_run(job, Serial(), replace(baseline_settings, reverse=True), inspection)
        )
    speed_runs = {
        each.resolved: each
        for each in (
            validate_run(
                job.replace(callbacks=()),
                each,
                replace(baseline_settings, limit=BASELINE_STEPS),
                inspection,
            )
            for each in (Serial(threads=count_cores()), Serial(threads=1))
        )
    }
    # the rounding baseline is not as fast as plain serial
    timed_strategies = [row.resolved for row in rows if not row.settings.reverse]
    baselines = [each for resolved, each in speed_runs.items() if resolved not in timed_strategies]
    # a plain PyTorch loop does not wait on purpose, as slowed rows do
    if settings.slow is None and settings.pace is None:
        all_threads = next(iter(speed_runs.values()))
        baselines.insert(0, replace(all_threads, is_plain_pytorch=True))
    return rows, baselines


def drop_noise_scale(requested: str | Strategy, settings: Settings) -> Settings:
    """Drop the noise scale from the settings if the strategy cannot measure it.

    Serial cannot, and serial is in most comparisons.

    Args:
        requested: the strategy as it is written.
        settings: the settings of all rows.
    """
    resolved = resolve_and_check_strategy(strategy(requested), detect_environment(settings))
    return replace(settings, noise_scale=None) if explain_no_measurement(resolved) else settings


def collect_comparison_identity(row: ValidatedRun, settings: Settings) -> Line:
    """Collect what must be equal when a comparison is resumed.

    Args:
        row: any row of the comparison.
        settings: the settings of all rows.
    """
    job = row.job
    inspection = row.inspection
    return {
        **build_job_identity(job, inspection),
        "epochs": job.epochs,
        "metric": job.metric_name,
        "test samples": inspection.test_samples,
        **{
            name_in_records(name): str(value)
            for name, value in vars(settings).items()
            if name not in ("until", "data", "memory")
            and (
                # earlier versions do not have these
                name not in ("noise_scale", "keep") or value is not None
            )
        },
    }


def _format_value_list(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else str(value)


def label_baseline(run: ValidatedRun) -> str:
    """The name of a run that is made for its speed."""
    return PLAIN_PYTORCH if run.is_plain_pytorch else str(run.resolved)


def name_baseline_folder(run: ValidatedRun) -> str:
    """Name the folder of a run that is made for its speed."""
    return f"baseline-{make_folder_name(label_baseline(run))}"


@contextmanager
def warn_on_write_error(path: Path) -> Iterator[None]:
    """Warn if the file cannot be written inside this context; the comparison does not need it."""
    try:
        yield
    except OSError as error:
        warn_user(f"{path} could not be written: {error.strerror or error}")


def label_row(row: ValidatedRun) -> str:
    """The name of a row in the table."""
    return ROUNDING_BASELINE if row.settings.reverse else str(row.requested)


def find_resumed_folder(folder: Path, header: Line, job: Job) -> Path:
    """Check that a folder holds the same comparison, and return it.

    Args:
        folder: the folder of the earlier comparison.
        header: the first line that this comparison would record.
        job: the job to train.

    Raises:
        Refused: the folder holds no comparison, or another one.
    """
    earlier = next(
        (line for line in read_lines(folder / "compare.jsonl") if line["kind"] == "comparison"),
        None,
    )
    if earlier is None:
        raise Refused(
            f"{folder} holds no comparison; give the folder that a comparison prints at its end"
        )
    if "identity" not in earlier:
        raise Refused(
            f"{folder} is a comparison of an earlier version, which cannot be resumed; begin a new "
            "one"
        )
    refuse_other_training(folder, earlier["identity"], header["identity"], f"job {job.name} has")
    earlier = {**earlier, "strategies": list_row_names(earlier)}
    for what, name in (("strategies", "strategies"), ("--until", "until"), ("--seeds", "seeds")):
        if earlier[name] != header[name]:
            raise Refused(
                f"{folder} is a comparison with {what} {_format_value_list(earlier[name])}, and "
                f"here it is with {_format_value_list(header[name])}; resume it with the same"
                + (f": {earlier['command']}" if earlier.get("command") else "")
            )
    return folder


@dataclass
class ComparisonRun:
    """A running comparison.

    Attributes:
        launcher: starts the ranks.

        folder: the folder of the comparison.

        record: the record of the comparison.

        progress: progress(strategy) returns the function that receives a run's progress.

        stop_request: set when the comparison is to stop.
    """

    launcher: Launcher
    folder: Path
    record: Recorder
    progress: Callable[[str], Progress | None]
    stop_request: StopRequest = field(default_factory=StopRequest)

    @cached_property
    def stop_timer(self) -> StopTimer:
        """Ends a run that was asked to stop and does not."""
        return StopTimer(self.launcher)

    def train_all_rows(
        self, rows: list[tuple[ValidatedRun, list[str]]], baselines: list[ValidatedRun]
    ) -> tuple[str, str | None]:
        """Train every row that is not finished yet.

        Args:
            rows: the rows, each with the folder names of its trainings.
            baselines: runs that are trained for their speed.

        Returns:
            (how it ended: finished, stopped, interrupted or failed; the reason of a failure).
        """

        def request_stop() -> None:
            self.stop_request.set()
            self.stop_timer.start()
            self.launcher.request_stop()

        try:
            with self.stop_timer.watch(), handle_stop_signals(request_stop):
                for row, names in rows:
                    if not self.stop_request.is_set():
                        self.train_row(row, names)
                for row in baselines:
                    if not self.stop_request.is_set():
                        self.train_unless_finished(
                            row, name_baseline_folder(row), f"{label_baseline(row)}, for its speed"
                        )
        except KeyboardInterrupt:
            return "interrupted", None
        # in a trial or a comparison with serial, beside the runs of rows
        except RankFailed:
            if not self.stop_request.is_set():
                raise
            return "stopped", None
        # from the record: nothing can be written any more
        except OSError as error:
            return "failed", f"{error.filename or self.folder}: {error.strerror or error}"
        return ("stopped" if self.stop_request.is_set() else "finished"), None

    def train_row(self, row: ValidatedRun, names: list[str]) -> None:
        """Train one strategy with each seed, and record its distances from serial.

        A failure is in the run's own record.

        Args:
            row: the strategy.
            names: the folder name of each training.
        """
        if not all(map(self.is_finished, names)):
            row = choose_by_trial(self.launcher, row)
        for seed_offset, name in enumerate(names):
            # a stop during the trial or the previous seed
            if self.stop_request.is_set():
                return
            seeded = row.replace_seed(row.job.seed + seed_offset)
            label = (
                f"{label_row(row)}, seed {seeded.job.seed}" if len(names) > 1 else label_row(row)
            )
            if not self.train_unless_finished(seeded, name, label):
                return
        if (
            (row.settings.reverse or not row.resolved.is_reference)
            and row.rounds is None
            and not self.stop_request.is_set()
        ):
            self.record_distances(row, names[0])

    def is_finished(self, name: str) -> bool:
        """Tell whether a run is recorded as finished."""
        return Record(self.folder / name, spans=False).finished

    def train_unless_finished(self, row: ValidatedRun, name: str, label: str) -> bool:
        """Train a run that is not finished; an incomplete one starts from the beginning.

        Args:
            row: the validated run.
            name: the name of its folder.
            label: the name that the progress shows.

        Returns:
            Whether the run is finished.
        """
        if self.is_finished(name):
            return True
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        try:
            return not train_on_ranks(
                self.launcher,
                row,
                self.folder / name,
                progress=self.progress(label),
                stop_request=self.stop_request,
            ).stopped
        except RankFailed:
            return False

    def record_distances(self, row: ValidatedRun, name: str) -> None:
        """Check a run against serial, and record its distances from serial.

        A run with recorded distances is skipped.

        Args:
            row: the strategy.
            name: the folder name of its first training.
        """
        if any(
            line["kind"] == "distance" and line["run"] == name
            for line in read_lines(self.folder / "compare.jsonl")
        ):
            return
        try:
            baseline = "serial"
            if not row.settings.reverse:
                baseline = check_against_serial(
                    self.launcher, row, name, self.record, self.progress(f"{row.requested}, check")
                )
            report_distance = self.progress(f"{row.requested}, distance from {baseline}")
            values = row.run_on_ranks(
                self.launcher,
                measure_distances,
                row.job,
                row.resolved,
                row.settings,
                DISTANCE_STEPS,
                on_report=lambda rank, state: report_distance and report_distance(state),
            )[0]
            self.record.write_line("distance", baseline=baseline, run=name, values=values)
        except RankFailed as error:
            self.record.write_line(
                "event", name="difference failed", numbers={}, run=name, message=str(error)
            )
