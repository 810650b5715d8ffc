"""compare: one job under many strategies, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from paragrad.errors import RankFailed, Refused
from paragrad.jobs.job import Job
from paragrad.record.record import Recorder, new_folder
from paragrad.report.page import write_page
from paragrad.report.results import TWIN
from paragrad.report.table import Table
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.strategies.table import strategies
from paragrad.training.admission import Admitted, admitted
from paragrad.training.door import examined
from paragrad.training.loop import Progress
from paragrad.training.settings import Settings
from paragrad.verbs.lockstep import distances
from paragrad.verbs.train import check_same, folder_name, run
from paragrad.verbs.trial import tried
from paragrad.world.joining import launched_size
from paragrad.world.launching import Ranks

BASELINE_STEPS = 200            # of a serial run that is there for its speed alone
DISTANCE_STEPS = 100            # over which the page draws the distance from serial


def compare(job: Job, chosen: str | Iterable[str | Strategy], *, runs: str | Path = "runs", seeds: int = 1,
            twin: bool = False, data: str | Path | None = None, device: str = "cpu", backend: str = "auto",
            overlap: bool = True, loaders: int = 0, until: str | None = None, sabotage: str | None = None,
            unproved: bool = False, unchecked: bool = False, machine: str | Path | None = None, command: str | None = None,
            progress: Callable[[str], Progress | None] | None = None) -> Table:
    """Train a job under every strategy, check each against serial in float64 over 20 steps; one table, and one page.html.

    chosen: "serial; data(2)" or a list;  runs: the folder for the comparison's own folder;  seeds: trainings of each, with
    the job's seed and the following ones;  twin: also train serial with every batch back to front, to show what rounding
    alone does;  command: what to type to repeat it;  progress(strategy) gives what is told of that run's progress;
    the others as in `paragrad.training.settings.Settings`.
    All strategies are checked at the door (Refused) before the first run; one that fails while it runs says so in its row.
    """
    if launched_size() is not None:
        raise Refused("compare starts its own ranks and cannot run under a launcher; call it with plain python")
    if not isinstance(seeds, int) or seeds < 1:
        raise Refused(f"seeds must be a whole number from 1, got {seeds!r}")
    how = Settings(data=data, device=device, backend=backend, overlap=overlap, loaders=loaders, until=until, sabotage=sabotage,
                   unproved=unproved, unchecked=unchecked, machine=machine)
    listed = strategies(chosen) if isinstance(chosen, str) else list(chosen)
    if not listed:
        raise Refused("compare needs at least one strategy")
    facts = examined(job, how.folder)
    rows = [admitted(job, each, how, facts) for each in listed]
    honest = replace(how, sabotage=None)
    if twin:
        rows.append(admitted(job, Serial(), replace(honest, reverse=True), facts))
    for_speed = {each.resolved: each for each in (admitted(job, each, replace(honest, limit=BASELINE_STEPS), facts)
                                                  for each in (Serial(), Serial(threads=1)))}
    timed = [row.resolved for row in rows if not row.settings.reverse]         # the twin's time is not plain serial's
    baselines = [each for resolved, each in for_speed.items() if resolved not in timed]
    folder = new_folder(Path(runs), f"{job.name}-compare")
    with Recorder(folder / "compare.jsonl") as record, Ranks(max(each.size for each in rows)) as ranks:
        comparing = Comparing(ranks, folder, record, progress or (lambda name: None))
        names = [[f"{place:02}-{folder_name(row.asked)}" + ("-twin" if row.settings.reverse else "")
                  + (f"-seed-{job.seed + more}" if seeds > 1 else "") for more in range(seeds)]
                 for place, row in enumerate(rows, start=1)]
        record.write("comparison", rows=names, until=str(how.goal) if how.goal else None, seeds=seeds, command=command)
        for row, of_row in zip(rows, names, strict=True):
            comparing.row(tried(ranks, row), of_row)
        for row in baselines:
            comparing.trained(row, f"baseline-{folder_name(row.resolved)}", f"{row.resolved}, for its speed")
    table = Table(folder)
    write_page(table)
    return table


@dataclass
class Comparing:
    """A comparison under way."""
    ranks: Ranks
    folder: Path
    record: Recorder
    progress: Callable[[str], Progress | None]
    started: bool = False

    def row(self, row: Admitted, names: list[str]) -> None:
        """The trainings of one strategy, and its distances from serial; a failure is in the run's own record."""
        shown = TWIN if row.settings.reverse else str(row.asked)
        for more, name in enumerate(names):
            seeded = row.with_seed(row.job.seed + more)
            told = f"{shown}, seed {seeded.job.seed}" if len(names) > 1 else shown
            if not self.trained(seeded, name, told):
                return
        if row.settings.reverse or not row.resolved.reference:
            self.checked(row, names[0])

    def trained(self, row: Admitted, name: str, shown: str) -> bool:
        (self.folder / name).mkdir()
        try:
            run(self.ranks, row, self.folder / name, progress=self.progress(shown))
        except RankFailed:
            return False
        return True

    def checked(self, row: Admitted, name: str) -> None:
        try:
            if not row.settings.reverse:
                check_same(self.ranks, row, name, self.record)
            values = row.on(self.ranks, distances, row.job, row.resolved, row.settings, DISTANCE_STEPS)[0]
            self.record.write("distance", baseline="serial", run=name, values=values)
        except RankFailed as error:
            self.record.write("event", name="difference failed", numbers={}, run=name, message=str(error))
