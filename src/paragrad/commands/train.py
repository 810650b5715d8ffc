"""train: one job under one strategy, on ranks of this host or in the world that a launcher
made.
"""

from __future__ import annotations

import functools
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paragrad.commands.fit_batch import fitted
from paragrad.commands.trial import tried
from paragrad.errors import Interrupted, RankFailed, Refused, StepFailed
from paragrad.jobs.job import Job, accuracy
from paragrad.launch import Ranks
from paragrad.loops.failure_recovery import run_recovering
from paragrad.loops.queue_coordinator import run_handed_out
from paragrad.loops.rounds import InRounds
from paragrad.loops.synchronous import Progress, train_rank
from paragrad.planner.step_timeline import whole_step
from paragrad.record import chrome_trace
from paragrad.record.clock_origin import common_origin
from paragrad.record.record import SCHEMA, Record, Recorder, new_folder
from paragrad.report.equivalence.lockstep import difference
from paragrad.report.notebook import below_the_cell
from paragrad.report.run import Run
from paragrad.runtime import allocator
from paragrad.runtime.launcher_env import cores, load
from paragrad.runtime.rendezvous import joined_from_environment, launched_rank, launched_size
from paragrad.runtime.stop_signals import Request, asking_to_stop
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint.checkpoint_files import remove_partial
from paragrad.trainer.pace import refuse_strange
from paragrad.trainer.settings import Settings, settings_of
from paragrad.validation.validate import Admitted, admitted, asking
from paragrad.version import __version__


def train(
    job: Job,
    strategy: str | Strategy = "serial",
    *,
    runs: str | Path = "runs",
    check: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Train a job under a strategy; returns when it is done.

    runs: the folder in which the run's own folder is made;  check: afterwards compare 20 steps
    with serial in float64 (`run.difference`);  settings: data, device, backend, overlap,
    loaders, save, resume, until, tensorboard, trace, memory, machine, sabotage, unproved,
    unchecked, timeout, slow, pace, listen, allow, limit, as in
    `paragrad.trainer.settings.Settings`. On SIGTERM the run saves a checkpoint and ends
    (`run.stopped`). Raises Refused (at the door), RankFailed, or Interrupted on Ctrl-C.
    """
    job, how, fits = fitted(job, strategy, settings_of(settings))
    checked = replace(admitted(job, strategy, how), fitted=fits)
    refuse_strange(how.slowed, checked.size - checked.resolved.servers)
    if check and checked.rounds:
        raise Refused(
            f"a check compares steps with serial's, and {checked.asked} has none: clients train "
            f"apart for a round; "
            "leave out --check, and judge it by its tests"
        )
    if checked.settings.machine and not (
        checked.resolved.picks_all_reduce() or whole_step(checked.resolved, checked.size)
    ):
        warnings.warn(
            f"nobody reads the machine file {checked.settings.machine}: {checked.resolved} has no "
            f"all-reduce to pick"
            "; leave out --machine, or give data(n, state=replicated) over gloo",
            stacklevel=2,
        )
    if progress is None and (bar := below_the_cell()):
        progress = bar(str(checked.asked))
    if launched_size() is not None:
        return _under_launcher(checked, Path(runs), check, progress)
    folder = new_folder(Path(runs), f"{job.name}-{folder_name(checked.asked)}")
    with Ranks(checked.size) as ranks:
        asked = Request()

        def ask() -> None:
            asked.set()
            ranks.ask_to_stop()

        with asking_to_stop(ask):
            checked = tried(ranks, checked)
            if asked.is_set():
                # the trial did not listen: the training saves at once
                ranks.ask_to_stop()
            finished = run(ranks, checked, folder, progress=progress, asked=asked)
        if finished.stopped or not check or checked.resolved.reference:
            return finished
        with Recorder(folder / "run.jsonl") as record:
            try:
                check_same(ranks, checked, finished.header["id"], record)
            except RankFailed as error:
                raise error.saying(unchecked(folder, error.message)) from error
    return Run(checked.job, folder)


def run(
    ranks: Ranks,
    checked: Admitted,
    folder: Path,
    *,
    progress: Progress | None = None,
    asked: Request | None = None,
) -> Run:
    """Train on ranks that are there already, recording into a folder. asked: set when the run
    is to stop, for one whose ranks are told so by this process.
    """
    with Recorder(folder / "run.jsonl") as record:
        _write_header(record, checked, folder)
        try:
            if checked.resolved.hands_out:
                statuses = [
                    run_handed_out(ranks, checked, folder, record, asked or Request(), progress)
                ]
            elif checked.resolved.recovers:
                statuses = [
                    run_recovering(ranks, checked, folder, record, asked or Request(), progress)
                ]
            else:
                statuses = checked.on(
                    ranks,
                    trained_by(checked),
                    checked,
                    folder,
                    record.origin,
                    on_report=lambda rank, value: progress(value) if progress else None,
                )
        # of this process, which leads the others
        except StepFailed as error:
            failed = _as_rank(error, None)
            _broke_off(record, checked, folder, "failed", failed)
            raise failed from error
        except RankFailed as error:
            _broke_off(record, checked, folder, "failed", error)
            raise
        except BaseException as error:
            _broke_off(record, checked, folder, "interrupted")
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(folder) from None
            raise
        _write_end(record, statuses[0])
    _write_trace(checked, folder)
    return Run(checked.job, folder)


def trained_by(checked: Admitted) -> Callable[..., str]:
    """What every rank runs of a training."""
    return train_rank if checked.rounds is None else functools.partial(train_rank, loop=InRounds)


def check_same(ranks: Ranks, checked: Admitted, run: str, record: Recorder) -> None:
    """Compare a strategy with serial (`lockstep.difference`) and record the answer."""
    found = checked.on(ranks, difference, checked.job, checked.resolved, checked.settings)[0]
    record.write("difference", baseline="serial", run=run, value=found.value, tensor=found.tensor)


def _under_launcher(checked: Admitted, runs: Path, check: bool, progress: Progress | None) -> Run:
    """This process is a rank that a launcher started: join, let rank 0 make the folder and the
    run's own lines.
    """
    leads = launched_rank() == 0
    allocator.keep()
    torch.set_num_threads(checked.threads)
    with (
        joined_from_environment(
            checked.backend, checked.settings.timeout, checked.settings.device
        ) as world,
        asking_to_stop(world.stop.set),
    ):
        folder = world.agreed(
            new_folder(runs, f"{checked.job.name}-{folder_name(checked.asked)}") if leads else None
        )
        _refuse_unseen(world, folder)
        origin, clocks = common_origin(world)
        with Recorder(folder / "run.jsonl" if leads else Path("/dev/null"), origin) as record:
            _write_header(record, checked, folder)
            if clocks > 1:
                record.write(
                    "choice",
                    what="origin",
                    bytes=None,
                    picked="a barrier",
                    because=f"ranks are on {clocks} hosts, each with a clock of its own",
                )
            try:
                status = trained_by(checked)(world, checked, folder, record.origin, report=progress)
            except StepFailed as error:
                failed = _as_rank(error, world.rank)
                with suppress(OSError):
                    _write_end(record, "failed", failed)
                with suppress(OSError):
                    _write_trace(checked, folder, leads)  # until then
                raise failed from error
            _write_end(record, status)
            _write_trace(checked, folder, leads)
            if check and status == "finished" and not checked.resolved.reference:
                try:
                    found = difference(world, checked.job, checked.resolved, checked.settings)
                except StepFailed as error:
                    raise _as_rank(error, world.rank).saying(
                        unchecked(folder, error.message)
                    ) from error
                record.write(
                    "difference",
                    baseline="serial",
                    run=folder.name,
                    value=found.value,
                    tensor=found.tensor,
                )
    return Run(checked.job, folder)


def unchecked(folder: Path, message: str) -> str:
    return f"the training is done ({folder}); its check against serial failed: {message}"


def _as_rank(error: StepFailed, rank: int | None) -> RankFailed:
    return RankFailed(
        error.message, rank=rank, step=error.step, tensor=error.tensor, differs=error.differs
    )


def _refuse_unseen(world: World, folder: Path) -> None:
    """Refuse a run's folder that not every rank sees: each writes its record into it, and
    whoever reads it reads all. Collective.
    """
    seen = world.collected(folder.is_dir())
    if blind := world.agreed([rank for rank, sees in enumerate(seen) if not sees]):
        if world.rank == 0:
            folder.rmdir()
        raise Refused(
            f"{folder}, which rank 0 has made for the records of all, is not seen by rank(s) "
            f"{', '.join(map(str, blind))}; give --runs a folder that all hosts share"
        )


def _write_header(record: Recorder, checked: Admitted, folder: Path) -> None:
    job = checked.job
    facts = checked.facts
    settings = checked.settings
    record.write(
        "run",
        schema=SCHEMA,
        id=folder.name,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        strategy=str(checked.asked),
        resolved=str(checked.resolved),
        exact=checked.resolved.exact,
        hands_out=checked.resolved.hands_out,
        seed=job.seed,
        job={
            "name": job.name,
            "arguments": {name: _as_json(value) for name, value in job.arguments},
            "batch": job.batch,
            "epochs": job.epochs,
            "metric": job.metric_name,
            "unit": "%" if job.metric is accuracy else "",
            "samples": facts.samples,
            "parameters": facts.parameters,
            "dtype": str(job.dtype).removeprefix("torch."),
        },
        workers=checked.size - checked.resolved.servers,
        servers=checked.resolved.servers,
        backend=checked.backend if checked.size > 1 else None,
        device=settings.device,
        threads=checked.threads,
        prediction=None,
        reverse=settings.reverse,
        resumed=checked.saved
        and {"run": str(checked.saved.folder.parent), "step": checked.saved.step},
        settings={
            name: str(value)
            for name, value in vars(settings).items()
            if value != getattr(Settings, name)
        },
        machine=this_machine(),
        rounds=checked.rounds and checked.rounds.told,
    )
    for what, picked, because in _choices(checked):
        record.write("choice", what=what, bytes=None, picked=picked, because=because)


def _as_json(value: Any) -> Any:
    """A value as JSON holds it, or as text."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)


def _choices(checked: Admitted) -> Iterator[tuple[str, str, str]]:
    """What was picked and why: (what, picked, because)."""
    settings = checked.settings
    if checked.saved is not None:
        yield "checkpoint", checked.saved.folder.name, checked.saved.because
    if not checked.resolved.exact:
        yield (
            "training",
            "another than serial's",
            ("by its design: judge it by its tests, and see how far it is by `paragrad compare`"),
        )
    if checked.rounds:
        yield (
            "rounds",
            str(checked.rounds),
            (
                "as many as pass over as many samples as the job's epochs do"
                if checked.rounds.asked is None
                else "asked for"
            ),
        )
    if checked.fitted:
        yield "batch", str(checked.job.batch), checked.fitted
    if checked.facts.scaled:
        factor, _, because = checked.facts.scaled.partition(": ")
        yield "learning rate", factor, because
    if settings.sabotage:
        yield (
            "sabotage",
            settings.sabotage,
            "asked for; " + ("not proved" if settings.unproved else "proved"),
        )
    if checked.facts.whole_batch:
        yield "collate", "whole batches on every rank", checked.facts.whole_batch
    if checked.size > 1 and settings.backend == "auto" and settings.device == "cpu":
        yield "backend", checked.backend, checked.not_shm or "all ranks are on this host"
    if checked.tried:
        yield "strategy", str(checked.resolved), checked.tried
    else:
        lacks = {
            "scheduler": checked.job.scheduler is None,
            "clipping": checked.job.clip_norm is None,
        }
        with asking(checked.asked):
            yield from [
                each
                for each in checked.asked.picked(checked.resolved, checked.here)
                if not lacks.get(each[0])
            ]


def _write_end(record: Recorder, status: str, error: RankFailed | None = None) -> None:
    told = error and {
        "rank": error.rank,
        "step": error.step,
        "tensor": error.tensor,
        "message": error.message,
    }
    record.write("end", status=status, seconds=round(record.now(), 6), error=told)


def _broke_off(
    record: Recorder, checked: Admitted, folder: Path, status: str, error: RankFailed | None = None
) -> None:
    """Every rank is gone: what one of them left half-written goes too. A full disk may be what
    they failed of.
    """
    with suppress(OSError):
        remove_partial(folder)
    with suppress(OSError):
        _write_end(record, status, error)
    with suppress(OSError):
        _write_trace(checked, folder)  # until then


def _write_trace(checked: Admitted, folder: Path, leads: bool = True) -> None:
    """leads: of ranks that a launcher started, this one writes it."""
    if leads and checked.settings.trace is not None:
        chrome_trace.write(Record(folder), Path(checked.settings.trace))


def folder_name(chosen: Strategy) -> str:
    """A strategy as part of a folder's name."""
    kept = "".join(sign if sign.isalnum() or sign in "_." else "-" for sign in str(chosen))
    return "-".join(part for part in kept.split("-") if part)


def this_machine() -> dict[str, Any]:
    """What a run ran on, and the versions."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "load": load(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "paragrad": __version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
