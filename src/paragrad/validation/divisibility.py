"""Whether a job's batches can be divided: into micro-batches, and down to one sample."""

from __future__ import annotations

from pathlib import Path

from paragrad.datasets.loading import convert_batch, separate_target, slice_batch
from paragrad.engine import batch_norm
from paragrad.engine.state.preserve_state import preserve_module_state
from paragrad.jobs.job import CPU, Job, open_dataset
from paragrad.jobs.loss import LossModule, call_model
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.world import World


def explain_no_micro_batches(job: Job, data: Path | None = None) -> str | None:
    """Explain why batches of a job cannot be sliced into micro-batches, or return None.

    Batches of two lengths are tried, because one length may equal another dimension by chance.

    Args:
        job: The job.
        data: The folder of data.
    """
    train = open_dataset(job.train, data)
    for count in {min(len(train), 3), min(len(train), 2)}:
        batch = job.make_samples(train)[0, list(range(count))]
        try:
            slice_batch(batch, slice(0, 1), count)
        except ValueError as error:
            return str(error)
    return None


def explain_no_single_sample(job: Job, data: Path | None = None) -> str | None:
    """Explain why a job's model cannot train on a single sample, or return None.

    The usual reason is a batch norm over one value for each channel.

    Args:
        job: The job.
        data: The folder of data.
    """
    model = job.build_model()
    samples = job.make_samples(open_dataset(job.train, data))
    norm = batch_norm.BatchNorm(World(), model, lambda *_: None, samples=1)
    with keep_generators(), preserve_module_state(LossModule(model, job.build_loss())), norm:
        try:
            call_model(
                model, convert_batch(separate_target(samples[0, [0]])[0], CPU, job.parameter_dtype)
            )
        except ValueError as error:
            message = str(error).partition(";")[0]
            return (
                f"batch norm cannot train on one sample ({message})"
                if message.startswith(batch_norm.TOO_FEW_VALUES)
                else None
            )
        except Exception:  # The first step reports any other error.
            return None
    return None
