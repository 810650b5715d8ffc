"""verify: 20 steps of a strategy beside serial and its rounding twin, and a certificate that
says what was seen.
"""

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
from paragrad.report.notebook import make_notebook_progress
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.first_step.diagnosis import BY_DESIGN, diagnose_difference
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import ValidatedRun, validate_run

NO_COMMON_STEP = (
    "there is no step to compare: clients train apart for a round, each over samples of its own, "
    "from the round's "
    "weights; it is another training, to be judged by its tests"
)


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
    """Train 20 steps beside serial (`lockstep`), in float64 where the job can, and write the
    certificate.json below runs.

    progress: told {"step", "steps", "difference"} after every step;  the others as in
    `paragrad.trainer.settings.Settings`. A planted bug is played, whatever the proof says of
    it. Raises Refused; and RankFailed where the run failed, so that there is nothing to say of
    its being the same.
    """
    if get_launched_size() is not None:
        raise Refused(
            "verify starts its own ranks and cannot run under a launcher; call it with plain python"
        )
    checked = validate_run(
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
    if progress is None and (bar := make_notebook_progress()):
        progress = bar(f"verify {checked.requested}")
    found, failure = (
        _compare_run(checked, progress)
        if checked.rounds is None
        else (Difference(float("nan")), NO_COMMON_STEP)
    )
    tensor = found.first[0] if found.first else None
    exact = checked.resolved.exact
    cause = (
        BY_DESIGN
        if not exact and (failure or tensor)
        else None
        if tensor is None
        else diagnose_difference(
            tensor,
            tensor in checked.inspection.shapes and f"gradient of {tensor}" not in found.tensors,
            inject_fault,
        )
    )
    folder = create_run_folder(
        Path(runs), f"{job.name}-verify-{make_folder_name(checked.requested)}"
    )
    certificate = Certificate(
        **vars(found),
        job=job.name,
        digest=compute_training_digest(checked),
        strategy=str(checked.requested),
        resolved=str(checked.resolved),
        device=device,
        backend=checked.backend if checked.size > 1 else "none",
        steps=0 if checked.rounds else COMPARED_STEPS,
        failure=failure,
        cause=cause,
        sabotage=checked.settings.inject_fault,
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
    """(the difference, what a rank said of replicas that are not equal)."""
    with Launcher(validated_run.size) as ranks:
        try:
            return validated_run.run_on_ranks(
                ranks,
                compare_with_serial,
                validated_run.job,
                validated_run.resolved,
                validated_run.settings,
                on_report=lambda rank, told: progress(told) if progress else None,
            )[0], None
        except RankFailed as error:
            if not error.differs:
                own = validated_run.inspection.order.steps * validated_run.job.epochs
                ended = (
                    ""
                    if error.step is None or error.step < own
                    else (
                        f"; a comparison makes {COMPARED_STEPS} steps and the job {own}: if "
                        f"something of it "
                        f"ends with these (a scheduler), "
                        "give it more epochs"
                    )
                )
                raise error.with_message(
                    f"{error.message}{ended} (the run failed, so whether it is the same training "
                    f"is not known)"
                ) from error
            return Difference(float("nan")), str(error)


def compute_training_digest(validated_run: ValidatedRun) -> str:
    """sha256 of what a training begins with: the job's settings, its model, optimizer,
    scheduler and loss by what they show of themselves, its initial parameters and its first
    batch.
    """
    job = validated_run.job.replace(dtype=torch.float64)
    facts = validated_run.inspection
    model = job.build_model()
    told = {
        "name": job.name,
        "arguments": dict(job.arguments),
        "batch": job.batch,
        "epochs": job.epochs,
        "seed": job.seed,
        "samples": facts.samples,
        "dtype": str(validated_run.job.dtype),
        **facts.initial_training,
    }
    found = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())

    def add(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            map_leaves(add, leaf.unbind())
        elif isinstance(leaf, torch.Tensor):
            found.update(str((leaf.dtype, tuple(leaf.shape))).encode())
            found.update(
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
    first = facts.order.get_indices(0, facts.order.get_batch(0))
    map_leaves(
        add, job.make_samples(open_dataset(job.train, validated_run.settings.folder))[0, first]
    )
    return found.hexdigest()
