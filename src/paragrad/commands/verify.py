"""verify: 20 steps of a strategy compared with serial and its rounding baseline; a certificate."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from paragrad.commands.train import describe_this_machine, make_folder_name
from paragrad.datasets.loading import map_leaves
from paragrad.errors import RankFailed, Refused
from paragrad.jobs.job import Job, open_dataset
from paragrad.launch import Launcher
from paragrad.loops.synchronous import Progress
from paragrad.record.record import create_run_folder
from paragrad.report.certificate import Certificate, Difference
from paragrad.report.equivalence.lockstep import COMPARED_STEPS, compare_with_serial
from paragrad.report.python_progress import make_progress
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checks.diagnosis import BY_DESIGN, diagnose_difference
from paragrad.trainer.settings import Settings, refuse_old_arguments
from paragrad.validation.validate import ValidatedRun, validate_run

NO_COMMON_STEP = (
    "there is no step to compare: clients train apart for a round, each over its own samples, "
    "from the round's weights; it is not the same training, so judge it by its tests"
)


@refuse_old_arguments
def verify(
    job: Job,
    strategy: str | Strategy,
    *,
    runs: str | Path = "runs",
    data: str | Path | None = None,
    device: str = "cpu",
    backend: str = "auto",
    overlap: bool = True,
    loaders: int = 0,
    inject_fault: str | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Train 20 steps, compare each with serial, and write a certificate.

    The comparison is in float64 if the job can. The file certificate.json is written to a new
    folder in `runs`. An injected fault runs even if the proof of the schedule finds it.

    Args:
        job: the job.

        strategy: the strategy.

        runs: the folder in which the certificate's own folder is made.

        data: as in `paragrad.trainer.settings.Settings`.

        device: as in `Settings`.

        backend: as in `Settings`.

        overlap: as in `Settings`.

        loaders: as in `Settings`.

        inject_fault: as in `Settings`.

        progress: receives {"step", "steps", "difference"} after every step; None: as in `train`.

    Returns:
        The certificate.

    Raises:
        Refused: the job or the strategy is refused before the first step.

        RankFailed: the run failed, so whether the training is the same is not known.

    Examples:
        >>> import paragrad as pg
        >>> certificate = pg.verify(pg.job("digits"), "tensor(2)")
        >>> certificate.same, certificate.difference < 1e-12
        (True, True)
    """
    if get_launched_size() is not None:
        raise Refused(
            "verify starts its own ranks and cannot run under a launcher; call it with plain python"
        )
    validated_run = validate_run(
        job,
        strategy,
        Settings(
            data=data,
            device=device,
            backend=backend,
            overlap=overlap,
            loaders=loaders,
            inject_fault=inject_fault,
            skip_schedule_check=True,
        ),
    )
    if progress is None:
        progress = make_progress()(f"verify {validated_run.requested}")
    difference, failure = (
        _compare_run(validated_run, progress)
        if validated_run.rounds is None
        else (Difference(float("nan")), NO_COMMON_STEP)
    )
    tensor = difference.first[0] if difference.first else None
    exact = validated_run.resolved.exact
    cause = (
        BY_DESIGN
        if not exact and (failure or tensor)
        else None
        if tensor is None
        else diagnose_difference(
            tensor,
            tensor in validated_run.inspection.shapes
            and f"gradient of {tensor}" not in difference.tensors,
            inject_fault,
        )
    )
    folder = create_run_folder(
        Path(runs), f"{job.name}-verify-{make_folder_name(validated_run.requested)}"
    )
    certificate = Certificate(
        **vars(difference),
        job=job.name,
        digest=compute_training_digest(validated_run),
        strategy=str(validated_run.requested),
        resolved=str(validated_run.resolved),
        device=device,
        backend=validated_run.backend if validated_run.size > 1 else "none",
        steps=0 if validated_run.rounds else COMPARED_STEPS,
        failure=failure,
        cause=cause,
        sabotage=validated_run.settings.inject_fault,
        folder=folder,
        machine=describe_this_machine(),
    )
    partial = folder / "certificate.json.partial"
    partial.write_text(json.dumps(certificate.to_json(), indent=1, allow_nan=False) + "\n")
    partial.rename(folder / "certificate.json")
    return certificate


def _compare_run(
    validated_run: ValidatedRun, progress: Progress | None
) -> tuple[Difference, str | None]:
    """Return (the difference, the message of a rank with an unequal replica)."""
    with Launcher(validated_run.size) as launcher:
        try:
            return validated_run.run_on_ranks(
                launcher,
                compare_with_serial,
                validated_run.job,
                validated_run.resolved,
                validated_run.settings,
                on_report=lambda rank, value: progress(value) if progress else None,
            )[0], None
        except RankFailed as error:
            if not error.differs:
                job_steps = validated_run.inspection.order.steps * validated_run.job.epochs
                hint = (
                    ""
                    if error.step is None or error.step < job_steps
                    else (
                        f"; a comparison makes {COMPARED_STEPS} steps and the job {job_steps}: if "
                        "a part of it ends with these (a scheduler), give it more epochs"
                    )
                )
                raise error.with_message(
                    f"{error.message}{hint} (the run failed, so whether it is the same training is "
                    "not known)"
                ) from error
            return Difference(float("nan")), str(error)


def compute_training_digest(validated_run: ValidatedRun) -> str:
    """The sha256 of what a training begins with.

    This is the job's settings; its model, optimizer, scheduler and loss by what they show of
    themselves; its initial parameters; and its first batch.

    Args:
        validated_run: the run.
    """
    job = validated_run.job.replace(dtype=torch.float64)
    inspection = validated_run.inspection
    model = job.build_model()
    description = {
        "name": job.name,
        "arguments": dict(job.arguments),
        "batch": job.batch,
        "epochs": job.epochs,
        "seed": job.seed,
        "samples": inspection.samples,
        "dtype": str(validated_run.job.dtype),
        **inspection.initial_training,
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode())

    def add(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            map_leaves(add, leaf.unbind())
        elif isinstance(leaf, torch.Tensor):
            digest.update(str((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(
                leaf.detach()
                .to_dense()
                .reshape(-1)
                .contiguous()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        return leaf

    map_leaves(add, dict(model.state_dict()))
    first = inspection.order.get_indices(0, inspection.order.get_batch(0))
    map_leaves(
        add, job.make_samples(open_dataset(job.train, validated_run.settings.folder))[0, first]
    )
    return digest.hexdigest()
