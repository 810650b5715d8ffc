"""May a job's batches be divided: into micro-batches, and down to one sample?"""

from __future__ import annotations

from pathlib import Path

from paragrad.datasets.loading import brought, called, cut, parted
from paragrad.engine import batch_norm
from paragrad.engine.state.preserve_state import restored
from paragrad.jobs.job import CPU, Job, opened
from paragrad.jobs.loss import Summed
from paragrad.runtime.generators import generators_kept
from paragrad.runtime.world import World


def uncut(job: Job, data: Path | None = None) -> str | None:
    """Why batches of a job cannot be cut into micro-batches, or None. Batches of two lengths
    are looked at: one may be that of another dimension by chance.
    """
    train = opened(job.train, data)
    for count in {min(len(train), 3), min(len(train), 2)}:
        batch = job.samples(train)[0, list(range(count))]
        try:
            cut(batch, slice(0, 1), count)
        except ValueError as error:
            return str(error)
    return None


def alone(job: Job, data: Path | None = None) -> str | None:
    """Why a job's model cannot train on one sample alone, or None: a batch norm over one value
    for each channel.
    """
    model = job.built_model()
    samples = job.samples(opened(job.train, data))
    norm = batch_norm.BatchNorm(World(), model, lambda *_: None, samples=1)
    with generators_kept(), restored(Summed(model, job.built_loss())), norm:
        try:
            called(model, brought(parted(samples[0, [0]])[0], CPU, job.parameter_dtype))
        except ValueError as error:
            said = str(error).partition(";")[0]
            return (
                f"batch norm cannot train on one sample ({said})"
                if said.startswith(batch_norm.FEW)
                else None
            )
        except Exception:  # of anything else the step will tell
            return None
    return None
