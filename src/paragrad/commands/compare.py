"""compare: one job under many strategies, one table."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paragrad.commands.train import check_same, folder_name, run
from paragrad.commands.trial import tried
from paragrad.engine.gradient_noise import unmeasured
from paragrad.errors import Interrupted, RankFailed, Refused
from paragrad.jobs.job import Job
from paragrad.launch import Ranks
from paragrad.loops.synchronous import Progress
from paragrad.record.record import Line, Record, Recorder, lines_of, new_folder
from paragrad.report.comparison_page import write_page
from paragrad.report.comparison_table import Table
from paragrad.report.equivalence.lockstep import distances
from paragrad.report.notebook import below_the_cell
from paragrad.report.results import TWIN
from paragrad.runtime.rendezvous import launched_size
from paragrad.runtime.stop_signals import Request, asking_to_stop
from paragrad.strategies.registry import strategies, strategy
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.identity import refuse_another
from paragrad.trainer.pace import refuse_strange
from paragrad.trainer.settings import Settings
from paragrad.validation.inspect_job import Findings, examined
from paragrad.validation.resume_check import identity_of
from paragrad.validation.validate import Admitted, admitted, here_for, ready

BASELINE_STEPS = 200  # of a serial run that is there for its speed alone
DISTANCE_STEPS = 100  # over which the page draws the distance from serial


def compare(
    job: Job,
    chosen: str | Iterable[str | Strategy],
    *,
    runs: str | Path = "runs",
    seeds: int = 1,
    twin: bool = False,
    data: str | Path | None = None,
    device: str = "cpu",
    backend: str = "auto",
    overlap: bool = True,
    loaders: int = 0,
    until: str | None = None,
    sabotage: str | None = None,
    unproved: bool = False,
    unchecked: bool = False,
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
    if launched_size() is not None:
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
        sabotage=sabotage,
        unproved=unproved,
        unchecked=unchecked,
        machine=machine,
        slow=slow,
        pace=pace,
        noise_scale=noise_scale,
    )
    listed = strategies(chosen) if isinstance(chosen, str) else list(chosen)
    if not listed:
        raise Refused("compare needs at least one strategy")
    facts = examined(job, how.folder)
    rows, baselines = rows_of(job, listed, how, twin, facts)
    # it is in some rows alone
    refuse_strange(how.slowed, max(each.size - each.resolved.servers for each in rows))
    names = [
        [
            f"{place:02}-{folder_name(row.asked)}"
            + ("-twin" if row.settings.reverse else "")
            + (f"-seed-{job.seed + more}" if seeds > 1 else "")
            for more in range(seeds)
        ]
        for place, row in enumerate(rows, start=1)
    ]
    asked: Line = {
        "rows": names,
        "strategies": [shown(row) for row in rows],
        "until": str(how.goal) if how.goal else None,
        "seeds": seeds,
        "command": command,
        "baselines": [for_speed(row) for row in baselines],
        "identity": identity(rows[0], how),
    }
    folder = (
        new_folder(Path(runs), f"{job.name}-compare")
        if resume is None
        else begun(Path(resume), asked, job)
    )
    with (
        Recorder(folder / "compare.jsonl", alone=True) as record,
        Ranks(max(each.size for each in rows)) as ranks,
    ):
        comparing = Comparing(
            ranks, folder, record, progress or below_the_cell() or (lambda name: None)
        )
        if resume is None:
            record.write("comparison", **asked)
        status, why = comparing.all(list(zip(rows, names, strict=True)), baselines)
        with suppress(OSError):  # a full disk has no room for it
            record.write("end", status=status, seconds=round(record.now(), 6), error=why)
    table = Table(folder)
    with warned(folder / "page.html"):
        if table.records:
            write_page(table)
    if status == "interrupted":
        raise Interrupted(folder)
    return table


def _check_seeds(seeds: int) -> None:
    if not isinstance(seeds, int) or seeds < 1:
        raise Refused(f"seeds must be a whole number from 1, got {seeds!r}")


def rows_of(
    job: Job, listed: Sequence[str | Strategy], how: Settings, twin: bool, facts: Findings
) -> tuple[list[Admitted], list[Admitted]]:
    """(rows, what else is trained for its speed): all checked at the door."""
    honest = replace(how, sabotage=None, noise_scale=None)
    hows = [as_it_can(each, how) for each in listed]
    if how.noise_scale and not any(each.noise_scale for each in hows):
        raise Refused(
            "no strategy here has the gradient of parts and of the whole batch on a rank; add "
            "data(n), or leave out "
            "--noise-scale"
        )
    if without := [
        str(each)
        for each, own in zip(listed, hows, strict=True)
        if how.noise_scale and not own.noise_scale
    ]:
        warnings.warn(
            f"the noise scale is not measured under {', '.join(without)}: no rank there has the "
            f"gradient of parts "
            "and of the whole batch",
            stacklevel=3,
        )
    rows = [admitted(job, each, own, facts) for each, own in zip(listed, hows, strict=True)]
    if twin:
        rows.append(admitted(job, Serial(), replace(honest, reverse=True), facts))
    for_speed = {
        each.resolved: each
        for each in (
            admitted(job, each, replace(honest, limit=BASELINE_STEPS), facts)
            for each in (Serial(), Serial(threads=1))
        )
    }
    # the twin's time is not plain serial's
    timed = [row.resolved for row in rows if not row.settings.reverse]
    return rows, [each for resolved, each in for_speed.items() if resolved not in timed]


def as_it_can(asked: str | Strategy, how: Settings) -> Settings:
    """Without the noise scale where that cannot be measured: serial is in most comparisons."""
    resolved = ready(strategy(asked), here_for(how))
    return replace(how, noise_scale=None) if unmeasured(resolved) else how


def identity(row: Admitted, how: Settings) -> Line:
    """What must be equal where a comparison goes on."""
    job = row.job
    facts = row.facts
    return {
        **identity_of(job, facts),
        "epochs": job.epochs,
        "metric": job.metric_name,
        "test samples": facts.test_samples,
        **{
            name: str(value)
            for name, value in vars(how).items()
            if name not in ("until", "data", "memory")
            and (
                # which earlier versions did not know
                name != "noise_scale" or value is not None
            )
        },
    }


def _named(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else str(value)


def for_speed(row: Admitted) -> str:
    """The folder of a run that is made for its speed."""
    return f"baseline-{folder_name(row.resolved)}"


@contextmanager
def warned(path: Path) -> Iterator[None]:
    """Around writing what a comparison can do without."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path} could not be written: {error.strerror or error}", stacklevel=3)


def shown(row: Admitted) -> str:
    return TWIN if row.settings.reverse else str(row.asked)


def begun(folder: Path, asked: Line, job: Job) -> Path:
    """A comparison's folder, if it is one of the same. Raises Refused."""
    before = next(
        (line for line in lines_of(folder / "compare.jsonl") if line["kind"] == "comparison"), None
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
    refuse_another(folder, before["identity"], asked["identity"], f"job {job.name} has")
    for what, name in (("strategies", "strategies"), ("--until", "until"), ("--seeds", "seeds")):
        if before[name] != asked[name]:
            raise Refused(
                f"{folder} is a comparison with {what} {_named(before[name])}, and here it is with "
                f"{_named(asked[name])}; go on with the same"
                + (f": {before['command']}" if before.get("command") else "")
            )
    return folder


@dataclass
class Comparing:
    """A comparison under way."""

    ranks: Ranks
    folder: Path
    record: Recorder
    progress: Callable[[str], Progress | None]
    asked: Request = field(default_factory=Request)  # to stop

    def all(
        self, rows: list[tuple[Admitted, list[str]]], baselines: list[Admitted]
    ) -> tuple[str, str | None]:
        """Every row that is not there yet: how that ended (finished, stopped, interrupted,
        failed), and why.
        """

        def ask() -> None:
            self.asked.set()
            self.ranks.ask_to_stop()

        try:
            with asking_to_stop(ask):
                for row, names in rows:
                    if not self.asked.is_set():
                        self.row(row, names)
                for row in baselines:
                    if not self.asked.is_set():
                        self.trained(row, for_speed(row), f"{row.resolved}, for its speed")
        except KeyboardInterrupt:
            return "interrupted", None
        # of the record: nothing can be written any more
        except OSError as error:
            return "failed", f"{error.filename or self.folder}: {error.strerror or error}"
        return ("stopped" if self.asked.is_set() else "finished"), None

    def row(self, row: Admitted, names: list[str]) -> None:
        """The trainings of one strategy, and its distances from serial; a failure is in the
        run's own record.
        """
        if not all(map(self.done, names)):
            row = tried(self.ranks, row)
        for more, name in enumerate(names):
            # the trial before, or the seed before, did not hear it
            if self.asked.is_set():
                return
            seeded = row.with_seed(row.job.seed + more)
            told = f"{shown(row)}, seed {seeded.job.seed}" if len(names) > 1 else shown(row)
            if not self.trained(seeded, name, told):
                return
        if (
            (row.settings.reverse or not row.resolved.reference)
            and row.rounds is None
            and not self.asked.is_set()
        ):
            self.checked(row, names[0])

    def done(self, name: str) -> bool:
        return Record(self.folder / name, spans=False).finished

    def trained(self, row: Admitted, name: str, shown: str) -> bool:
        """Whether the run is there, finished; one that is there and is not, is made anew."""
        if self.done(name):
            return True
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        try:
            return not run(
                self.ranks, row, self.folder / name, progress=self.progress(shown)
            ).stopped
        except RankFailed:
            return False

    def checked(self, row: Admitted, name: str) -> None:
        """The distances from serial, unless they are there."""
        if any(
            line["kind"] == "distance" and line["run"] == name
            for line in lines_of(self.folder / "compare.jsonl")
        ):
            return
        try:
            if not row.settings.reverse:
                check_same(self.ranks, row, name, self.record)
            values = row.on(
                self.ranks, distances, row.job, row.resolved, row.settings, DISTANCE_STEPS
            )[0]
            self.record.write("distance", baseline="serial", run=name, values=values)
        except RankFailed as error:
            self.record.write(
                "event", name="difference failed", numbers={}, run=name, message=str(error)
            )
