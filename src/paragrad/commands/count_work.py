"""work: the work and depth of one step of a job, counted on one batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.datasets.loading import brought, copied, parted
from paragrad.errors import Refused
from paragrad.jobs.job import Job, opened
from paragrad.jobs.loss import Summed
from paragrad.planner.profile import Profile, counted
from paragrad.runtime.generators import generators_kept
from paragrad.validation.inspect_job import examined


def profile(job: Job, data: Path | None = None) -> Profile:
    """Count one step of a job's global batch. data: folder for jobs that read files. Raises
    Refused with the repair.
    """
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    job = _on_copies(job)
    with generators_kept():
        facts = examined(job, data)
        job = facts.ready(job)
        order = facts.order
        places = order.at(0)
        fetched = parted(job.samples(opened(job.train, data))[0, order.indices(0, places)])
        inputs, target = brought(copied(fetched), torch.device("cpu"), job.parameter_dtype)
        module = Summed(job.built_model(), job.built_loss())
        try:
            calls, products, missed = counted(module, inputs, target, len(places), job.autocast)
        except (RuntimeError, ValueError, TypeError) as error:
            raise Refused(
                f"job {job.name}: one step of its model raised {type(error).__name__}: {error}; "
                f"mend the model, or "
                "give another --batch"
            ) from error
    return Profile(job.name, len(places), tuple(calls), products, tuple(missed))


def _on_copies(job: Job) -> Job:
    """The job with a copy of what its model function builds: that may be a model that somebody
    holds.
    """

    def copy_of_model() -> Any:
        try:
            return copy.deepcopy(job.model())
        # tensors that are results, such as those of the old weight_norm
        except RuntimeError as error:
            raise Refused(
                f"job {job.name}: the model cannot be copied ({error}); keep no tensor with a "
                f"history as an attribute "
                "(torch.nn.utils.parametrizations.weight_norm instead of "
                "torch.nn.utils.weight_norm)"
            ) from error

    return (
        job
        if isinstance(job.model, nn.Module) or not callable(job.model)
        else job.replace(model=copy_of_model)
    )
