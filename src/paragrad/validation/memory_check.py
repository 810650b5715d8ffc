"""Is there room for a training? What its ranks will take of this host's memory at least, before
any of them starts.
"""

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
from paragrad.strategies.shares import MicroBatch, apportion_samples
from paragrad.strategies.strategy import Strategy, list_factors
from paragrad.validation.inspect_job import JobInspection

# bytes of a rank's process that are its own, forked and joined, before it has a model
PROCESS_BYTES = 20 << 20


def refuse_insufficient_memory(
    job: Job,
    requested: Strategy,
    resolved: Strategy,
    inspection: JobInspection,
    data: Path | None,
    device: str = "cpu",
) -> None:
    """Refuse ranks that this host's memory cannot hold, with the largest number that it can;
    and a batch, and a model.

    Counted is what they need at least: processes, gradients in each and parameters once, and
    what backward keeps of a micro-batch; not the optimizer's state, nor what a backend or an
    operation takes for itself.
    """
    if get_launched_size() is None:
        refuse_oversized_dataset(inspection.samples, f"job {job.name}: train", resolved.size)
    left = read_available_memory()
    here = resolved.size
    # launched ranks would look at different moments
    if left is None or device != "cpu" or get_launched_size() is not None:
        return
    model = inspection.parameter_count * job.parameter_dtype.itemsize
    full = min(job.batch, inspection.samples)
    micro = resolved.division.micro
    largest = -(-max(apportion_samples(full, resolved.division.shares)) // micro)

    kept = min(
        full,
        largest
        * (
            len(resolved.division.shares) * count_in_flight(resolved)
            if has_model_shards(resolved)
            else here
        ),
    )

    def gradients(ranks: int) -> int:
        # of a cut model, once a replica
        return model * (len(resolved.division.shares) if has_model_shards(resolved) else ranks)

    def wanted(ranks: int, of_sample: int) -> int:
        return model + ranks * PROCESS_BYTES + gradients(ranks) + kept * of_sample

    if wanted(here, inspection.probe.activation_bytes) <= left:
        return
    of_sample = _measure_sample_bytes(job, inspection.probe.draws, data)
    if wanted(here, of_sample) <= left:
        return
    told = (
        f"{requested} wants at least {_format_bytes(wanted(here, of_sample))} here: {here} "
        f"process{'es' if here > 1 else ''} of "
        f"{_format_bytes(PROCESS_BYTES + gradients(here) // here)} with gradients, "
        f"{_format_bytes(model)} of "
        f"parameters, "
        f"{_format_bytes(kept * of_sample)} that backward keeps of {kept} "
        f"sample{'s' if kept > 1 else ''}; "
        f"{_format_bytes(left)} are left: "
    )
    once, each = (
        (gradients(here) + kept * of_sample, PROCESS_BYTES)
        if has_model_shards(resolved)
        else (full * of_sample, PROCESS_BYTES + model)
    )
    if here > 1 and (fit := (left - model - once) // each) > 0:
        raise Refused(f"{told}at most {fit} rank{'s fit' if fit > 1 else ' fits'}")
    if wanted(here, 0) > left:
        raise Refused(
            f"{told}the model does not fit; train a smaller one, or on a host with more memory"
        )
    raise Refused(
        f"{told}the batch does not fit; make it smaller"
        + (f", or cut it into micro-batches (micro={2 * micro})" if largest > 1 else "")
    )


def count_in_flight(strategy: Strategy) -> int:
    """Micro-batches of a replica whose activations its parts keep at a time, at least, however
    unlike the parts are.
    """
    parts = next(
        (each for each in list_factors(strategy) if isinstance(each, PartitionedStrategy)), None
    )
    if parts is None or parts.recompute:
        return 1
    pipelined = parts.micro_batch_schedule
    kept = min(pipelined.count_kept_micro_batches(rank, parts.size) for rank in range(parts.size))
    return max(1, kept * parts.size // pipelined.count_stages(parts.size))


def _measure_sample_bytes(job: Job, draws: Draws, data: Path | None) -> int:
    """Bytes that backward keeps of one sample more."""
    samples = job.make_samples(open_dataset(job.train, data))
    model = job.build_model()
    module = LossModule(model, job.build_loss())
    found = []
    for count in sorted({min(len(samples), 2), min(len(samples), 4)}):
        places = list(range(count))
        with keep_generators(), preserve_module_state(module):
            pair = separate_target(convert_batch(samples[0, places], CPU, job.parameter_dtype))
            found.append(
                (
                    count,
                    measure_whole_model(
                        module, draws, job.autocast, (MicroBatch(places, places), *pair)
                    ).saved,
                )
            )
    (few, least), (more, most) = found[0], found[-1]
    return max(0, most - least) // max(1, more - few)


def _format_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, count >> 20)} MiB"
