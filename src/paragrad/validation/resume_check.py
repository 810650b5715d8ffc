"""Can a job go on from a checkpoint? What both must have in common, and the newest that fits."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from paragrad.datasets.clients import Rounds
from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.runtime.rendezvous import launched_size
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint_files import Saved, newest
from paragrad.trainer.identity import LOSS_BEFORE, refuse_another
from paragrad.validation.inspect_job import Findings


def identity_of(job: Job, facts: Findings) -> dict[str, Any]:
    """What a job must have in common with the one that was saved."""
    return {
        "name": job.name,
        "seed": job.seed,
        "batch": job.batch,
        "samples": facts.samples,
        "dtype": str(job.parameter_dtype).removeprefix("torch."),
        **facts.training,
        **checkpoint.shapes_of(facts.shapes),
        LOSS_BEFORE: facts.first_loss,
    }


def found(parent: Path, job: Job, facts: Findings, rounds: Rounds | None = None) -> Saved:
    """The newest whole checkpoint of a run, if it is this job's. rounds: to be made. Raises
    Refused; a damaged one is warned of by name.
    """
    saved = newest(parent)
    ours = identity_of(job, facts)
    refuse_another(saved.folder, saved.state["identity"], ours, f"job {job.name} has")
    made = saved.step
    wanted = job.epochs * facts.order.steps
    what = "steps"
    if rounds is not None:
        own = rounds.own(saved.step, saved.state.get("rounds"))
        made, wanted, what = (
            (made, rounds.passed(rounds.count), what)
            if own is None
            else (own, rounds.count, "rounds")
        )
    more = "more --epochs" if rounds is None or rounds.asked is None else "more rounds="
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
    if launched_size() is None:
        _try_to_load(saved, job)
    return saved


def _try_to_load(saved: Saved, job: Job) -> None:
    """Before any rank starts: on a model and an optimizer that are then let go."""
    model = job.built_model()
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    try:
        # model() may give one to everybody
        model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    # which cannot be copied: the ranks will tell
    except Exception:
        return
    checkpoint.load(saved, checkpoint.Snapshot(0, "", model, optimizer, scheduler, {}, {}, {}))
