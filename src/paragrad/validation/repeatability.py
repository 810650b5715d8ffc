"""Whether a job's samples, loss and optimizer are repeatable.

Some strategies let any free process compute a part of the training. State that is not restored
would then pass from one part to the next, and the order of the processes would change the
training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paragrad.datasets.loading import Samples, is_same_batch, list_batch_tensors, separate_target
from paragrad.engine import batch_norm
from paragrad.engine.loss_additivity import (
    MAX_SAMPLES,
    BatchExcerpt,
    collect_parts,
    explain_changed_loss,
)
from paragrad.engine.rng.draws import Draws
from paragrad.jobs.job import Job, open_dataset
from paragrad.jobs.loss import LossModule
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.world import World


def explain_unrepeatable(
    job: Job, data: Path | None = None, draws: Draws | None = None
) -> str | None:
    """Explain why the same samples, or their loss, differ when they are repeated, or return None.

    Args:
        job: The job.
        data: The folder of data.
        draws: The random draws of the model.
    """
    train = open_dataset(job.train, data)
    samples = job.make_samples(train)
    indices = list(range(min(job.batch, len(train), MAX_SAMPLES)))
    module = LossModule(job.build_model(), job.build_loss())
    norm = batch_norm.BatchNorm(World(), module.model, lambda *_: None, samples=len(indices))
    with (
        keep_generators(),
        torch.autocast("cpu", job.autocast, enabled=job.autocast is not None),
        norm,
    ):
        whole = collect_parts(samples, indices)[0]
        return explain_unequal_samples(samples, indices, whole) or explain_changed_loss(
            module, whole.convert(job.parameter_dtype), draws or Draws()
        )


def explain_unequal_samples(
    samples: Samples, indices: list[int], first_loaded: BatchExcerpt
) -> str | None:
    """Explain that the same samples differ when they are loaded again, or return None.

    Args:
        samples: The source of the samples.
        indices: The indices of the samples.
        first_loaded: The samples as they were loaded first.
    """
    loads = [
        [tensor.to_dense() for tensor in list_batch_tensors(list(pair))]
        for pair in (
            (first_loaded.inputs, first_loaded.target),
            separate_target(samples[0, indices]),
        )
    ]
    return (
        None
        if is_same_batch(*loads)
        else (
            "train gives other values each time it is asked for the same samples: dataset or "
            "collate keeps a state or a random generator of its own; draw by torch, numpy.random "
            "or random themselves, which are seeded for every sample"
        )
    )


def explain_single_use_optimizer(job: Job) -> str | None:
    """Explain why a job's optimizer cannot be built twice over one model, or return None."""
    parameters: list[Any] = list(job.build_model().parameters())
    hooks_before = [_count_hooks(each) for each in parameters]
    first = job.optimizer(parameters)
    if [_count_hooks(each) for each in parameters] != hooks_before:
        return (
            "it registers hooks on parameters, which stay there: register them where the model is "
            "made"
        )
    second = job.optimizer(parameters)
    return (
        "the function returns the same object each time it is called: let it make a new one"
        if second is first
        else None
    )


def _count_hooks(parameter: Any) -> int:
    return sum(
        len(getattr(parameter, name) or ())
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
