"""Check the memory of this host for a training before any rank starts."""

from __future__ import annotations

from pathlib import Path

from paragrad.datasets.loading import convert_batch, separate_target
from paragrad.datasets.sample_order import refuse_oversized_dataset
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import preserve_module_state
from paragrad.errors import Refused
from paragrad.jobs.job import CPU, Job, open_dataset
from paragrad.jobs.loss import LossModule
from paragrad.parallel.pipeline.micro_batch_memory import measure_whole_model
from paragrad.parallel.registry import has_model_shards
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.launcher_env import read_available_memory
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.shares import MicroBatch, count_largest_micro_batch
from paragrad.strategies.strategy import Strategy, list_factors
from paragrad.validation.inspect_job import JobInspection

# bytes of a forked rank that it shares with no other process, before it has a model
PROCESS_BYTES = 20 << 20


def refuse_insufficient_memory(
    job: Job,
    requested: Strategy,
    resolved: Strategy,
    inspection: JobInspection,
    data: Path | None,
    device: str = "cpu",
) -> None:
    """Refuse ranks, a batch, or a model that this host's memory cannot hold.

    The check counts the least that the ranks need: processes, the parameters once, gradients in
    each process, and what backward saves of a micro-batch. It does not count the optimizer's state,
    nor what a backend or an operation allocates.

    Args:
        job: The job.

        requested: The strategy as it was written.

        resolved: The resolved strategy.

        inspection: What validation found out about the job.

        data: The folder of data.

        device: The device of the training.

    Raises:
        Refused: If the memory is too small; the message names the largest number of ranks that
            fits.
    """
    if get_launched_size() is None:
        refuse_oversized_dataset(inspection.samples, f"job {job.name}: train", resolved.size)
    available = read_available_memory()
    ranks_here = resolved.size
    # Ranks of another launcher would read the memory at different moments.
    if available is None or device != "cpu" or get_launched_size() is not None:
        return
    model = inspection.trained_elements * job.parameter_dtype.itemsize
    full_batch = min(job.batch, inspection.samples)
    micro = resolved.division.micro
    largest = max(
        count_largest_micro_batch(full_batch, resolved.division, share)
        for share in range(len(resolved.division.shares))
    )
    saved_samples = min(
        full_batch,
        largest
        * (
            len(resolved.division.shares) * count_in_flight(resolved)
            if has_model_shards(resolved)
            else ranks_here
        ),
    )

    def gradient_bytes(count: int) -> int:
        # A replica of a partitioned model has its gradients once.
        return model * (len(resolved.division.shares) if has_model_shards(resolved) else count)

    def estimate(count: int, sample_bytes: int) -> int:
        return model + count * PROCESS_BYTES + gradient_bytes(count) + saved_samples * sample_bytes

    if estimate(ranks_here, inspection.probe.activation_bytes) <= available:
        return
    sample_bytes = _measure_sample_bytes(job, inspection.probe.draws, data)
    if estimate(ranks_here, sample_bytes) <= available:
        return
    need = (
        f"{requested} needs at least {_format_bytes(estimate(ranks_here, sample_bytes))} here: "
        f"{ranks_here} process{'es' if ranks_here > 1 else ''} of "
        f"{_format_bytes(PROCESS_BYTES + gradient_bytes(ranks_here) // ranks_here)} with "
        f"gradients, {_format_bytes(model)} of parameters, "
        f"{_format_bytes(saved_samples * sample_bytes)} that backward keeps of {saved_samples} "
        f"sample{'s' if saved_samples > 1 else ''}; {_format_bytes(available)} are free: "
    )
    fixed, per_rank = (
        (gradient_bytes(ranks_here) + saved_samples * sample_bytes, PROCESS_BYTES)
        if has_model_shards(resolved)
        else (full_batch * sample_bytes, PROCESS_BYTES + model)
    )
    if ranks_here > 1 and (fit := (available - model - fixed) // per_rank) > 0:
        raise Refused(f"{need}at most {fit} rank{'s fit' if fit > 1 else ' fits'}")
    if estimate(ranks_here, 0) > available:
        raise Refused(
            f"{need}the model does not fit; train a smaller one, or on a host with more memory"
        )
    raise Refused(
        f"{need}the batch does not fit; make it smaller"
        + (f", or divide it into micro-batches (micro={2 * micro})" if largest > 1 else "")
    )


def count_in_flight(strategy: Strategy) -> int:
    """Count the micro-batches of a replica for which its stages keep activations concurrently.

    The count is a lower bound, however the stages differ in size.

    Args:
        strategy: The resolved strategy.
    """
    parts = next(
        (each for each in list_factors(strategy) if isinstance(each, PartitionedStrategy)), None
    )
    if parts is None or parts.recompute:
        return 1
    pipelined = parts.micro_batch_schedule
    in_flight = min(
        pipelined.count_kept_micro_batches(rank, parts.size) for rank in range(parts.size)
    )
    return max(1, in_flight * parts.size // pipelined.count_stages(parts.size))


def _measure_sample_bytes(job: Job, draws: Draws, data: Path | None) -> int:
    """Measure the bytes that backward saves for each further sample."""
    samples = job.make_samples(open_dataset(job.train, data))
    model = job.build_model()
    module = LossModule(model, job.build_loss())
    measured = []
    for count in sorted({min(len(samples), 2), min(len(samples), 4)}):
        places = list(range(count))
        with keep_generators(), preserve_module_state(module):
            pair = separate_target(convert_batch(samples[0, places], CPU, job.parameter_dtype))
            measured.append(
                (
                    count,
                    measure_whole_model(
                        module, draws, job.autocast, (MicroBatch(places, places), *pair)
                    ).saved,
                )
            )
    (few, least), (more, most) = measured[0], measured[-1]
    return max(0, most - least) // max(1, more - few)


def _format_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, count >> 20)} MiB"
