"""train: one job under one strategy, on ranks of this host or in a launcher's world."""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from paragrad.commands.fit_batch import fit_job_batch
from paragrad.commands.stop_timer import StopOverdue, StopTimer
from paragrad.commands.trial import choose_by_trial
from paragrad.errors import Interrupted, RankFailed, Refused, StepFailed, warn_user
from paragrad.jobs.callback import Callback
from paragrad.jobs.job import Job, accuracy
from paragrad.launch import Launcher
from paragrad.loops.failure_recovery import run_recoverable_training
from paragrad.loops.plain_pytorch import PLAIN_PYTORCH, time_plain_pytorch
from paragrad.loops.queue_coordinator import run_queue_training
from paragrad.loops.rounds import RoundTraining
from paragrad.loops.synchronous import Progress, train_rank
from paragrad.planner.step_timeline import find_step_schedule
from paragrad.record import chrome_trace
from paragrad.record.clock_origin import find_common_origin
from paragrad.record.record import RECORD_SCHEMA, Record, Recorder, create_run_folder
from paragrad.report.certificate import Difference
from paragrad.report.equivalence.lockstep import compare_with_serial
from paragrad.report.python_progress import make_progress
from paragrad.report.run import Run
from paragrad.runtime import allocator
from paragrad.runtime.launcher_env import count_cores, read_load_average
from paragrad.runtime.rendezvous import get_launched_rank, get_launched_size, join_launched_world
from paragrad.runtime.stop_signals import StopRequest, handle_stop_signals, stop_on_interrupt
from paragrad.runtime.stragglers import note_missing_ranks
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint.checkpoint_files import remove_partial_files
from paragrad.trainer.pace import refuse_unknown_ranks
from paragrad.trainer.settings import Settings, Until, build_settings, name_in_records
from paragrad.validation.validate import ValidatedRun, convert_strategy_errors, validate_run
from paragrad.version import __version__

STOP_NOTICE = (
    b"paragrad: the run ends after this step, and saves it; Ctrl-C once more ends it at once\n"
)


class SettingArguments(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments of a function."""

    data: str | Path | None
    device: str
    backend: str
    overlap: bool
    loaders: int
    save: int | None
    keep: str | None
    resume: str | Path | None
    until: str | Until | None
    tensorboard: bool
    trace: str | Path | None
    memory: str | int | None
    machine: str | Path | None
    inject_fault: str | None
    check: str | float
    skip_schedule_check: bool
    skip_first_step_check: bool
    timeout: float
    slow: str | None
    pace: float | None
    listen: str | None
    allow: str | Path | None
    noise_scale: int | None
    reverse: bool
    limit: int | None


def train(
    job: Job,
    strategy: str | Strategy = "serial",
    *,
    epochs: int | None = None,
    batch: int | str | None = None,
    seed: int | None = None,
    scale_lr: str | None = None,
    warm_up: float | None = None,
    callbacks: Sequence[Callback] = (),
    runs: str | Path = "runs",
    verify: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[SettingArguments],
) -> Run:
    """Train a job under a strategy; returns when the run is done.

    On SIGTERM the run saves a checkpoint and ends (`run.stopped`). On Ctrl-C too, and then raises
    Interrupted; a second Ctrl-C ends it at once.

    Args:
        job: the job.

        strategy: the strategy.

        epochs: the number of epochs, in place of the job's.

        batch: the global batch size, in place of the job's.

        seed: the seed, in place of the job's.

        scale_lr: how the learning rate grows with the batch, in place of the job's.

        warm_up: the epochs in which the rate reaches the scaled rate, in place of the job's.

        callbacks: what the run calls, after the callbacks of the job.

        runs: the folder in which the run's own folder is made.

        verify: afterwards compare 20 steps with serial in float64 (`run.difference`).

        progress: receives the progress of the run; None: a bar in a notebook, elsewhere a line on
            stderr every five seconds.

        **settings: the attributes of `paragrad.trainer.settings.Settings` as keywords, such as
            data, device, save, keep, resume, until, check, timeout and trace.

    Returns:
        The finished run.

    Raises:
        Refused: validation refuses the run.

        RankFailed: a rank failed.

        Interrupted: on Ctrl-C.

    Examples:
        >>> import paragrad as pg
        >>> run = pg.train(pg.job("digits"), "data(2, reduce=ring)", epochs=2)
        >>> run.sample_count.missed
        0
        >>> run.test > 90
        True
    """
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    job_changes = {
        "epochs": epochs,
        "batch": batch,
        "seed": seed,
        "scale_lr": scale_lr,
        "warm_up": warm_up,
    }
    job = job.replace(**{name: value for name, value in job_changes.items() if value is not None})
    if not isinstance(callbacks, list | tuple):
        raise Refused(f"callbacks must be a list of paragrad.Callback objects, got {callbacks!r}")
    if callbacks:
        job = job.replace(callbacks=(*job.callbacks, *callbacks))
    job, resolved_settings, batch_reason = fit_job_batch(
        job, strategy, build_settings({**settings})
    )
    validated_run = replace(
        validate_run(job, strategy, resolved_settings), batch_reason=batch_reason
    )
    refuse_unknown_ranks(
        resolved_settings.slow_ranks, validated_run.size - validated_run.resolved.servers
    )
    if verify and validated_run.rounds:
        raise Refused(
            f"--verify compares steps with serial's, and {validated_run.requested} has none: "
            "clients train apart for a round; leave out --verify, and judge it by its tests"
        )
    if validated_run.settings.machine and not (
        validated_run.resolved.has_open_all_reduce()
        or find_step_schedule(validated_run.resolved, validated_run.size)
    ):
        warn_user(
            f"the machine file {validated_run.settings.machine} is not used: "
            f"{validated_run.resolved} has no all-reduce to pick; leave out --machine, or give "
            "data(n, state=replicated) over gloo"
        )
    if progress is None:
        progress = make_progress()(str(validated_run.requested))
    if get_launched_size() is not None:
        return _train_under_launcher(validated_run, Path(runs), verify, progress)
    folder = create_run_folder(
        Path(runs), f"{job.name}-{make_folder_name(validated_run.requested)}"
    )
    with Launcher(validated_run.size) as launcher:
        stop_request = StopRequest()
        stop_timer = StopTimer(launcher)

        def request_stop() -> None:
            stop_request.set()
            stop_timer.start()
            launcher.request_stop()

        def announce_stop() -> None:
            request_stop()
            # not by print, which a signal handler cannot call inside of another print
            with suppress(OSError):
                os.write(2, STOP_NOTICE)

        with (
            stop_timer.watch(),
            handle_stop_signals(request_stop),
            stop_on_interrupt(announce_stop) as interrupted,
        ):
            validated_run = choose_by_trial(launcher, validated_run)
            if stop_request.is_set():
                # the trial ignores the request; the training then saves at once
                launcher.request_stop()
            result = train_on_ranks(
                launcher,
                validated_run,
                folder,
                progress=progress,
                stop_request=stop_request,
            )
            if interrupted.is_set():
                raise Interrupted(folder, result.checkpoint_step if result.stopped else None)
        if result.stopped or not verify or validated_run.resolved.is_reference:
            return result
        with Recorder(folder / "run.jsonl") as record:
            try:
                check_against_serial(launcher, validated_run, result.header["id"], record)
            except RankFailed as error:
                raise error.with_message(describe_failed_check(folder, error.message)) from error
    return Run(validated_run.job, folder)


def train_on_ranks(
    launcher: Launcher,
    validated_run: ValidatedRun,
    folder: Path,
    *,
    progress: Progress | None = None,
    stop_request: StopRequest | None = None,
) -> Run:
    """Train on ranks that are started already, and record into a folder.

    Args:
        launcher: has started the ranks.

        validated_run: the run.

        folder: the folder of the run.

        progress: receives the progress of the run.

        stop_request: set when the run is to stop; for runs that this process stops.

    Raises:
        RankFailed: a rank failed.

        Interrupted: on Ctrl-C.
    """
    with Recorder(folder / "run.jsonl") as record:
        _write_run_header(record, validated_run, folder)
        try:
            if validated_run.resolved.uses_work_queue:
                statuses = [
                    run_queue_training(
                        launcher,
                        validated_run,
                        folder,
                        record,
                        stop_request or StopRequest(),
                        progress,
                    )
                ]
            elif validated_run.resolved.can_recover:
                statuses = [
                    run_recoverable_training(
                        launcher,
                        validated_run,
                        folder,
                        record,
                        stop_request or StopRequest(),
                        progress,
                    )
                ]
            else:
                statuses = validated_run.run_on_ranks(
                    launcher,
                    select_rank_function(validated_run),
                    validated_run,
                    folder,
                    record.origin,
                    on_report=lambda rank, value: progress(value) if progress else None,
                )
        except StopOverdue as error:
            failed = error.make_failure()
            _record_broken_run(record, validated_run, folder, "failed", failed)
            raise failed from None
        # raised in this process, which coordinates the others
        except StepFailed as error:
            failed = RankFailed.wrap_error(error, None)
            _record_broken_run(record, validated_run, folder, "failed", failed)
            raise failed from error
        except RankFailed as error:
            _record_broken_run(record, validated_run, folder, "failed", error)
            raise
        except BaseException as error:
            _record_broken_run(record, validated_run, folder, "interrupted")
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(folder) from None
            raise
        _write_end_line(record, statuses[0])
    _write_trace_file(validated_run, folder)
    return Run(validated_run.job, folder)


def select_rank_function(validated_run: ValidatedRun) -> Callable[..., str]:
    """The function that every rank of a training runs."""
    if validated_run.is_plain_pytorch:
        return time_plain_pytorch
    return (
        train_rank
        if validated_run.rounds is None
        else functools.partial(train_rank, loop_class=RoundTraining)
    )


def check_against_serial(
    launcher: Launcher,
    validated_run: ValidatedRun,
    run_id: str,
    record: Recorder,
    progress: Progress | None = None,
) -> str:
    """Compare a strategy with serial (`lockstep.compare_with_serial`) and record the result.

    Args:
        launcher: has started the ranks.
        validated_run: the run.
        run_id: the name of the run in the record.
        record: receives the result.
        progress: receives {"step", "steps", "difference"} after every step.

    Returns:
        The name of the training with which it was compared.
    """
    difference = validated_run.run_on_ranks(
        launcher,
        compare_with_serial,
        validated_run.job,
        validated_run.resolved,
        validated_run.settings,
        on_report=lambda rank, state: progress(state) if progress else None,
    )[0]
    _write_difference(record, run_id, difference)
    return str(difference.reference)


def _write_difference(record: Recorder, run_id: str, difference: Difference) -> None:
    record.write_line(
        "difference",
        baseline=difference.reference,
        run=run_id,
        value=difference.value,
        tensor=difference.tensor,
    )


def _train_under_launcher(
    validated_run: ValidatedRun, runs: Path, verify: bool, progress: Progress | None
) -> Run:
    """Train as a rank that a launcher started.

    Rank 0 makes the folder and the run's own lines.
    """
    is_first = get_launched_rank() == 0
    allocator.keep_freed_memory()
    torch.set_num_threads(validated_run.threads)
    with (
        join_launched_world(
            validated_run.backend, validated_run.settings.timeout, validated_run.settings.device
        ) as world,
        handle_stop_signals(world.stop.set),
    ):
        folder = world.broadcast_object(
            create_run_folder(
                runs, f"{validated_run.job.name}-{make_folder_name(validated_run.requested)}"
            )
            if is_first
            else None
        )
        _refuse_unshared_folder(world, folder)
        origin, clock_count = find_common_origin(world)
        with Recorder(folder / "run.jsonl" if is_first else Path("/dev/null"), origin) as record:
            _write_run_header(record, validated_run, folder)
            if clock_count > 1:
                record.write_line(
                    "choice",
                    what="origin",
                    bytes=None,
                    picked="a barrier",
                    because=f"ranks are on {clock_count} hosts, each with a clock of its own",
                )
            try:
                status = select_rank_function(validated_run)(
                    world, validated_run, folder, record.origin, report=progress
                )
            except Refused:
                raise
            except Exception as error:  # also of user code between steps, and of a dead rank
                note_missing_ranks(world, error)
                failed = RankFailed.wrap_error(error, world.rank)
                with suppress(OSError):
                    _write_end_line(record, "failed", failed)
                with suppress(OSError):
                    _write_trace_file(
                        validated_run, folder, is_first
                    )  # of the time until the failure
                raise failed from error
            _write_end_line(record, status)
            _write_trace_file(validated_run, folder, is_first)
            if verify and status == "finished" and not validated_run.resolved.is_reference:
                try:
                    difference = compare_with_serial(
                        world, validated_run.job, validated_run.resolved, validated_run.settings
                    )
                except Refused:
                    raise
                except Exception as error:
                    raise RankFailed.wrap_error(error, world.rank).with_message(
                        describe_failed_check(folder, StepFailed.wrap_error(error).message)
                    ) from error
                _write_difference(record, folder.name, difference)
    return Run(validated_run.job, folder)


def describe_failed_check(folder: Path, message: str) -> str:
    """The message of a comparison with serial that failed after the training was done.

    Args:
        folder: the folder of the run.
        message: the message of the failure.
    """
    return f"the training is done ({folder}); its comparison with serial failed: {message}"


def _refuse_unshared_folder(world: World, folder: Path) -> None:
    """Refuse a run's folder that some rank does not see. Collective.

    Each rank writes its record into it, and the records are read together.
    """
    visible = world.gather_objects(folder.is_dir())
    if blind_ranks := world.broadcast_object(
        [rank for rank, is_visible in enumerate(visible) if not is_visible]
    ):
        if world.rank == 0:
            folder.rmdir()
        raise Refused(
            f"{folder}, which rank 0 has made for the records of all, is not seen by rank(s) "
            f"{', '.join(map(str, blind_ranks))}; give --runs a folder that all hosts share"
        )


def _write_run_header(record: Recorder, validated_run: ValidatedRun, folder: Path) -> None:
    job = validated_run.job
    inspection = validated_run.inspection
    settings = validated_run.settings
    record.write_line(
        "run",
        schema=RECORD_SCHEMA,
        id=folder.name,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **(
            dict.fromkeys(("strategy", "resolved"), PLAIN_PYTORCH)
            if validated_run.is_plain_pytorch
            else {
                "strategy": str(validated_run.requested),
                "resolved": str(validated_run.resolved),
            }
        ),
        exact=validated_run.resolved.exact,
        hands_out=validated_run.resolved.uses_work_queue,
        seed=job.seed,
        job={
            "name": job.name,
            "arguments": {name: _convert_to_json_value(value) for name, value in job.arguments},
            "batch": job.batch,
            "epochs": job.epochs,
            "metric": job.metric_name,
            "lower_is_better": job.wants_lower_tests,
            "unit": "%" if job.metric is accuracy else "",
            "samples": inspection.samples,
            "sampler": job.sampler is not None,
            "parameters": inspection.trained_elements,
            "dtype": str(job.dtype).removeprefix("torch."),
        },
        workers=validated_run.size - validated_run.resolved.servers,
        servers=validated_run.resolved.servers,
        backend=validated_run.backend if validated_run.size > 1 else None,
        device=settings.device,
        threads=validated_run.threads,
        prediction=None,
        reverse=settings.reverse,
        resumed=validated_run.resume_checkpoint
        and {
            "run": str(validated_run.resume_checkpoint.folder.parent),
            "step": validated_run.resume_checkpoint.step,
        },
        settings={
            name_in_records(name): str(value)
            for name, value in vars(settings).items()
            if value != getattr(Settings, name)
        },
        machine=describe_this_machine(),
        rounds=validated_run.rounds and validated_run.rounds.summary,
    )
    for what, picked, because in _list_recorded_choices(validated_run):
        record.write_line("choice", what=what, bytes=None, picked=picked, because=because)


def _convert_to_json_value(value: Any) -> Any:
    """Convert a value to what JSON can hold, or to text."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)


def _list_recorded_choices(validated_run: ValidatedRun) -> Iterator[tuple[str, str, str]]:
    """List what was chosen and why, as (what, picked, because)."""
    settings = validated_run.settings
    if validated_run.resume_checkpoint is not None:
        yield (
            "checkpoint",
            validated_run.resume_checkpoint.folder.name,
            validated_run.resume_checkpoint.choice_reason,
        )
    if not validated_run.resolved.exact:
        yield (
            "training",
            "not the same as serial's",
            ("by its design: judge it by its tests, and see the difference in `paragrad compare`"),
        )
    if validated_run.rounds:
        yield (
            "rounds",
            str(validated_run.rounds),
            (
                "as many as use the number of samples of the job's epochs"
                if validated_run.rounds.requested_rounds is None
                else "asked for"
            ),
        )
    if validated_run.batch_reason:
        yield "batch", str(validated_run.job.batch), validated_run.batch_reason
    if validated_run.inspection.rate_scaling:
        factor, _, because = validated_run.inspection.rate_scaling.partition(": ")
        yield "learning rate", factor, because
    if settings.inject_fault:
        yield (
            "sabotage",
            settings.inject_fault,
            "asked for; " + ("not proved" if settings.skip_schedule_check else "proved"),
        )
    if validated_run.inspection.whole_batch_reason:
        yield "collate", "whole batches on every rank", validated_run.inspection.whole_batch_reason
    if validated_run.size > 1 and settings.backend == "auto" and settings.device == "cpu":
        yield (
            "backend",
            validated_run.backend,
            validated_run.shm_obstacle or "all ranks are on this host",
        )
    if validated_run.trial_result:
        yield "strategy", str(validated_run.resolved), validated_run.trial_result
    else:
        lacks = {
            "scheduler": validated_run.job.scheduler is None,
            "clipping": validated_run.job.clip_norm is None,
        }
        with convert_strategy_errors(validated_run.requested):
            yield from [
                each
                for each in validated_run.requested.explain_choices(
                    validated_run.resolved, validated_run.environment
                )
                if not lacks.get(each[0])
            ]


def _write_end_line(record: Recorder, status: str, error: RankFailed | None = None) -> None:
    error_fields = error and {
        "rank": error.rank,
        "step": error.step,
        "tensor": error.tensor,
        "message": error.message,
        "traceback": error.traceback,
    }
    record.write_line("end", status=status, seconds=round(record.now(), 6), error=error_fields)


def _record_broken_run(
    record: Recorder,
    validated_run: ValidatedRun,
    folder: Path,
    status: str,
    error: RankFailed | None = None,
) -> None:
    """Record the end of a run after its ranks are gone, and remove its half-written files.

    Errors are ignored, because a full disk may be the cause of the failure.
    """
    with suppress(OSError):
        remove_partial_files(folder)
    with suppress(OSError):
        _write_end_line(record, status, error)
    with suppress(OSError):
        _write_trace_file(validated_run, folder)  # of the time until the end


def _write_trace_file(validated_run: ValidatedRun, folder: Path, is_first: bool = True) -> None:
    """Write the trace if the settings request one.

    Args:
        validated_run: the run.
        folder: the folder of the run.
        is_first: of ranks that a launcher started, whether this one writes it.
    """
    if is_first and validated_run.settings.trace is not None:
        chrome_trace.write_trace(Record(folder), Path(validated_run.settings.trace))


def make_folder_name(chosen: Strategy | str) -> str:
    """A strategy, or another name, as part of a folder's name."""
    cleaned = "".join(sign if sign.isalnum() or sign in "_." else "-" for sign in str(chosen))
    return "-".join(part for part in cleaned.split("-") if part)


def describe_this_machine() -> dict[str, Any]:
    """The machine that a run ran on, and the versions."""
    return {
        "cpu": _read_cpu_name(),
        "cores": count_cores(),
        "load": read_load_average(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "paragrad": __version__,
    }


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
