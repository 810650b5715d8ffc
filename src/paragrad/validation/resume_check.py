"""Whether a job can resume a checkpoint: the identity that both must share."""

from __future__ import annotations

import copy
import zlib
from pathlib import Path
from typing import Any

from paragrad.datasets.clients import ClientRounds
from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import Refused, warn_user
from paragrad.jobs.job import Job
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint, find_newest_checkpoint
from paragrad.trainer.identity import INITIAL_LOSS_KEY, refuse_other_training
from paragrad.validation.inspect_job import JobInspection


def build_job_identity(job: Job, inspection: JobInspection) -> dict[str, Any]:
    """Build the identity that a job must share with the saved one.

    Args:
        job: The job.
        inspection: What validation found out about the job.
    """
    return {
        "name": job.name,
        "seed": job.seed,
        "batch": job.batch,
        "samples": inspection.samples,
        "dtype": str(job.parameter_dtype).removeprefix("torch."),
        **describe_sampler(inspection.order),
        **inspection.initial_training,
        **checkpoint.describe_shapes(inspection.shapes),
        INITIAL_LOSS_KEY: inspection.first_loss,
    }


def describe_sampler(order: SampleOrder) -> dict[str, Any]:
    """Describe the sampler that gives an order, by the samples of the first epoch.

    Args:
        order: The order.

    Returns:
        {"sampler": name and checksum}; empty without a sampler.
    """
    if order.is_in_order:
        return {"sampler": "the order of a stream"}
    if order.sampler is None:
        return {}
    sampler = order.sampler.sampler
    name = getattr(sampler, "__name__", type(sampler).__name__)
    return {"sampler": f"{name} {zlib.crc32(order.sampler.draw_indices(0).tobytes()):08x}"}


def find_checkpoint(
    parent: Path, job: Job, inspection: JobInspection, rounds: ClientRounds | None = None
) -> SavedCheckpoint:
    """Find the newest undamaged checkpoint of a run, and check that it belongs to this job.

    A damaged checkpoint is named in a warning.

    Args:
        parent: The folder of a run, or of one checkpoint.
        job: The job.
        inspection: What validation found out about the job.
        rounds: The rounds to train, or None.

    Raises:
        Refused: If there is no undamaged checkpoint, or if it does not fit the job.
    """
    saved = find_newest_checkpoint(parent)
    identity = build_job_identity(job, inspection)
    refuse_other_training(saved.folder, saved.state["identity"], identity, f"job {job.name} has")
    done = saved.step
    wanted = job.epochs * inspection.order.steps
    unit = "steps"
    if rounds is not None:
        finished_rounds = rounds.match_checkpoint(saved.step, saved.state.get("rounds"))
        done, wanted, unit = (
            (done, rounds.count_serial_steps(rounds.count), unit)
            if finished_rounds is None
            else (finished_rounds, rounds.count, "rounds")
        )
    repair = (
        "more --epochs" if rounds is None or rounds.requested_rounds is None else "more rounds="
    )
    if done > wanted:
        raise Refused(
            f"{saved.folder} has finished {done} {unit}, and job {job.name} has only {wanted}; "
            f"give {repair}"
        )
    if done == wanted:
        scope = f" of {job.epochs} epoch(s)" if unit == "steps" else ""
        warn_user(
            f"{saved.folder}: all {done} {unit}{scope} are finished; nothing is left to train "
            f"(to continue, give {repair})"
        )
    # Ranks of another launcher already have their own models, which take memory.
    if get_launched_size() is None:
        _try_loading(saved, job)
    return saved


def _try_loading(saved: SavedCheckpoint, job: Job) -> None:
    """Load the checkpoint into a temporary model and optimizer before any rank starts."""
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    try:
        # model() may return one shared object.
        model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    # The model cannot be copied; the ranks report whether loading fails.
    except Exception:
        return
    checkpoint.load_checkpoint(
        saved, checkpoint.Snapshot(0, "", model, optimizer, scheduler, {}, {}, {})
    )
