"""Is a job the same each time it is asked: its samples, its loss, its optimizer? Where some
parts of a training are made by whoever has time for them, what nobody puts back goes from one
to the next, and who was first decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paragrad.datasets.loading import Samples, alike, parted, tensors_of
from paragrad.engine import batch_norm
from paragrad.engine.loss_additivity import ASKED, Excerpt, another_number, parts_of
from paragrad.engine.rng.draws import Draws
from paragrad.jobs.job import Job, opened
from paragrad.jobs.loss import Summed
from paragrad.runtime.generators import generators_kept
from paragrad.runtime.world import World


def unsteady(job: Job, data: Path | None = None, draws: Draws | None = None) -> str | None:
    """Why the same samples are not the same twice, or their loss is not, or None."""
    train = opened(job.train, data)
    samples = job.samples(train)
    indices = list(range(min(job.batch, len(train), ASKED)))
    module = Summed(job.built_model(), job.built_loss())
    norm = batch_norm.BatchNorm(World(), module.model, lambda *_: None, samples=len(indices))
    with (
        generators_kept(),
        torch.autocast("cpu", job.autocast, enabled=job.autocast is not None),
        norm,
    ):
        whole = parts_of(samples, indices)[0]
        return unlike(samples, indices, whole) or another_number(
            module, whole.to(job.parameter_dtype), draws or Draws()
        )


def unlike(samples: Samples, indices: list[int], loaded: Excerpt) -> str | None:
    """Loaded again, are the samples others?"""
    both = [
        [tensor.to_dense() for tensor in tensors_of(list(pair))]
        for pair in ((loaded.inputs, loaded.target), parted(samples[0, indices]))
    ]
    return (
        None
        if alike(*both)
        else (
            "train gives other values each time it is asked for the same samples: dataset or "
            "collate keeps a state or a random "
            "generator of its own; draw by torch, numpy.random or random themselves, which are "
            "seeded for every sample"
        )
    )


def made_once(job: Job) -> str | None:
    """Why a job's optimizer cannot be made anew over the same parameters, or None."""
    parameters: list[Any] = list(job.built_model().parameters())
    before = [_hooks(each) for each in parameters]
    first = job.optimizer(parameters)
    if [_hooks(each) for each in parameters] != before:
        return (
            "it registers hooks on parameters, which stay there: register them where the model "
            "is made"
        )
    second = job.optimizer(parameters)
    return (
        "the function gives the same one each time it is called: let it make one"
        if second is first
        else None
    )


def _hooks(parameter: Any) -> int:
    return sum(
        len(getattr(parameter, name) or ())
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
