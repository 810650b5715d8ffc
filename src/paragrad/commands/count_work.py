"""work: the work and depth of one step of a job, counted on one batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.datasets.loading import clone_batch, convert_batch, separate_target
from paragrad.errors import Refused
from paragrad.jobs.job import Job, open_dataset
from paragrad.jobs.loss import LossModule
from paragrad.planner.profile import JobProfile, count_model_calls
from paragrad.runtime.generators import keep_generators
from paragrad.validation.inspect_job import inspect_job


def profile_job(job: Job, data: Path | None = None) -> JobProfile:
    """Count one step of a job's global batch.

    Args:
        job: the job.
        data: folder of data for jobs that read files.

    Raises:
        Refused: the job or its model fails; with the repair.
    """
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    job = _copy_model_function(job)
    with keep_generators():
        inspection = inspect_job(job, data)
        job = inspection.prepare_job(job)
        order = inspection.order
        places = order.get_batch(0)
        fetched = separate_target(
            job.make_samples(open_dataset(job.train, data))[0, order.get_indices(0, places)]
        )
        inputs, target = convert_batch(
            clone_batch(fetched), torch.device("cpu"), job.parameter_dtype
        )
        module = LossModule(job.build_model(), job.build_loss())
        try:
            calls, products, uncounted = count_model_calls(
                module, inputs, target, len(places), job.autocast
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise Refused(
                f"job {job.name}: one step of its model raised {type(error).__name__}: {error}; "
                "repair the model, or give another --batch"
            ) from error
    return JobProfile(job.name, len(places), tuple(calls), products, tuple(uncounted))


def _copy_model_function(job: Job) -> Job:
    """Return the job with a model function that copies its result.

    The original function may return a model that is used elsewhere, too.
    """

    def copy_of_model() -> Any:
        try:
            return copy.deepcopy(job.model())
        # attributes that are results of autograd, such as those of the old weight_norm
        except RuntimeError as error:
            raise Refused(
                f"job {job.name}: the model cannot be copied ({error}); keep no tensor with a "
                "history as an attribute (torch.nn.utils.parametrizations.weight_norm instead of "
                "torch.nn.utils.weight_norm)"
            ) from error

    return (
        job
        if isinstance(job.model, nn.Module) or not callable(job.model)
        else job.replace(model=copy_of_model)
    )
