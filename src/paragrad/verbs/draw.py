"""draw: what the ranks of a strategy do and send each other, and the parts of a model that it cuts."""

from __future__ import annotations

from pathlib import Path

import torch

from paragrad.datasets.loading import brought, parted
from paragrad.errors import Refused, StepFailed
from paragrad.jobs.job import CPU, Job, opened
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.shares import micro_batches
from paragrad.strategies.strategy import Strategy, factors_of
from paragrad.techniques.model_parallel.account import Piece, pieces
from paragrad.training.door import examined
from paragrad.world.generators import generators_kept


def parts(job: Job, chosen: Strategy, data: Path | None = None) -> list[Piece]:
    """The parts into which a resolved strategy cuts a job's model, for a micro-batch of a full batch; none where it cuts none.

    data: folder for jobs that read files. Raises Refused with the repair.
    """
    if not (cutting := [factor for factor in factors_of(chosen) if isinstance(factor, InParts)]):
        return []
    with generators_kept():
        facts = examined(job, data)
        job = facts.ready(job)
        first = micro_batches(facts.order.at(0), chosen.division)[0][0]
        samples = job.samples(opened(job.train, data))[0, facts.order.indices(0, first)]
        inputs, _ = brought(parted(samples), CPU, job.parameter_dtype)
        try:
            with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
                return pieces(cutting[0], job.built_model(), inputs)
        except StepFailed as error:
            raise Refused(f"job {job.name}, {chosen}: {error}") from error
