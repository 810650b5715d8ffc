"""Can a job go on from a checkpoint? What both must have in common, and the newest that fits."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from paragrad.datasets.clients import ClientRounds
from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint, find_newest_checkpoint
from paragrad.trainer.identity import INITIAL_LOSS_KEY, refuse_other_training
from paragrad.validation.inspect_job import JobInspection


def build_job_identity(job: Job, inspection: JobInspection) -> dict[str, Any]:
    """What a job must have in common with the one that was saved."""
    return {
        "name": job.name,
        "seed": job.seed,
        "batch": job.batch,
        "samples": inspection.samples,
        "dtype": str(job.parameter_dtype).removeprefix("torch."),
        **inspection.initial_training,
        **checkpoint.describe_shapes(inspection.shapes),
        INITIAL_LOSS_KEY: inspection.first_loss,
    }


def find_checkpoint(
    parent: Path, job: Job, inspection: JobInspection, rounds: ClientRounds | None = None
) -> SavedCheckpoint:
    """The newest whole checkpoint of a run, if it is this job's. rounds: to be made. Raises
    Refused; a damaged one is warned of by name.
    """
    saved = find_newest_checkpoint(parent)
    ours = build_job_identity(job, inspection)
    refuse_other_training(saved.folder, saved.state["identity"], ours, f"job {job.name} has")
    made = saved.step
    wanted = job.epochs * inspection.order.steps
    what = "steps"
    if rounds is not None:
        own = rounds.match_checkpoint(saved.step, saved.state.get("rounds"))
        made, wanted, what = (
            (made, rounds.count_serial_steps(rounds.count), what)
            if own is None
            else (own, rounds.count, "rounds")
        )
    more = "more --epochs" if rounds is None or rounds.requested_rounds is None else "more rounds="
    if made > wanted:
        raise Refused(
            f"{saved.folder} has {made} {what} behind it, and job {job.name} wants {wanted}; give "
            f"{more}"
        )
    if made == wanted:
        of = f" of {job.epochs} epoch(s)" if what == "steps" else ""
        warnings.warn(
            f"{saved.folder}: all {made} {what}{of} were made; nothing is left to train ({more} go "
            f"on)",
            stacklevel=2,
        )
    # launched ranks have their own models by then, and their memory
    if get_launched_size() is None:
        _try_loading(saved, job)
    return saved


def _try_loading(saved: SavedCheckpoint, job: Job) -> None:
    """Before any rank starts: on a model and an optimizer that are then let go."""
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    try:
        # model() may give one to everybody
        model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    # which cannot be copied: the ranks will tell
    except Exception:
        return
    checkpoint.load_checkpoint(
        saved, checkpoint.Snapshot(0, "", model, optimizer, scheduler, {}, {}, {})
    )
