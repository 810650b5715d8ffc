"""Is there room for a training? What its ranks will take of this host's memory at least, before
any of them starts.
"""

from __future__ import annotations

from pathlib import Path

from paragrad.datasets.loading import brought, parted
from paragrad.datasets.sample_order import refuse_unordered
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import restored
from paragrad.errors import Refused
from paragrad.jobs.job import CPU, Job, opened
from paragrad.jobs.loss import Summed
from paragrad.parallel.pipeline.micro_batch_memory import whole
from paragrad.parallel.registry import cuts
from paragrad.runtime.generators import generators_kept
from paragrad.runtime.launcher_env import memory_left
from paragrad.runtime.rendezvous import launched_size
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.shares import Micro, divide
from paragrad.strategies.strategy import Strategy, factors_of
from paragrad.validation.inspect_job import Findings

# bytes of a rank's process that are its own, forked and joined, before it has a model
PROCESS = 20 << 20


def refuse_crowded(
    job: Job,
    asked: Strategy,
    resolved: Strategy,
    facts: Findings,
    data: Path | None,
    device: str = "cpu",
) -> None:
    """Refuse ranks that this host's memory cannot hold, with the largest number that it can;
    and a batch, and a model.

    Counted is what they need at least: processes, gradients in each and parameters once, and
    what backward keeps of a micro-batch; not the optimizer's state, nor what a backend or an
    operation takes for itself.
    """
    if launched_size() is None:
        refuse_unordered(facts.samples, f"job {job.name}: train", resolved.size)
    left = memory_left()
    here = resolved.size
    # launched ranks would look at different moments
    if left is None or device != "cpu" or launched_size() is not None:
        return
    model = facts.parameters * job.parameter_dtype.itemsize
    full = min(job.batch, facts.samples)
    micro = resolved.division.micro
    largest = -(-max(divide(full, resolved.division.shares)) // micro)

    kept = min(
        full,
        largest * (len(resolved.division.shares) * in_flight(resolved) if cuts(resolved) else here),
    )

    def gradients(ranks: int) -> int:
        # of a cut model, once a replica
        return model * (len(resolved.division.shares) if cuts(resolved) else ranks)

    def wanted(ranks: int, of_sample: int) -> int:
        return model + ranks * PROCESS + gradients(ranks) + kept * of_sample

    if wanted(here, facts.probe.activations) <= left:
        return
    of_sample = _by_sample(job, facts.probe.draws, data)
    if wanted(here, of_sample) <= left:
        return
    told = (
        f"{asked} wants at least {_sized(wanted(here, of_sample))} here: {here} "
        f"process{'es' if here > 1 else ''} of "
        f"{_sized(PROCESS + gradients(here) // here)} with gradients, {_sized(model)} of "
        f"parameters, "
        f"{_sized(kept * of_sample)} that backward keeps of {kept} "
        f"sample{'s' if kept > 1 else ''}; "
        f"{_sized(left)} are left: "
    )
    once, each = (
        (gradients(here) + kept * of_sample, PROCESS)
        if cuts(resolved)
        else (full * of_sample, PROCESS + model)
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


def in_flight(strategy: Strategy) -> int:
    """Micro-batches of a replica whose activations its parts keep at a time, at least, however
    unlike the parts are.
    """
    parts = next((each for each in factors_of(strategy) if isinstance(each, InParts)), None)
    if parts is None or parts.recompute:
        return 1
    pipelined = parts.pipelined
    kept = min(pipelined.kept(rank, parts.size) for rank in range(parts.size))
    return max(1, kept * parts.size // pipelined.stages(parts.size))


def _by_sample(job: Job, draws: Draws, data: Path | None) -> int:
    """Bytes that backward keeps of one sample more."""
    samples = job.samples(opened(job.train, data))
    model = job.built_model()
    module = Summed(model, job.built_loss())
    found = []
    for count in sorted({min(len(samples), 2), min(len(samples), 4)}):
        places = list(range(count))
        with generators_kept(), restored(module):
            pair = parted(brought(samples[0, places], CPU, job.parameter_dtype))
            found.append(
                (count, whole(module, draws, job.autocast, (Micro(places, places), *pair)).kept)
            )
    (few, least), (more, most) = found[0], found[-1]
    return max(0, most - least) // max(1, more - few)


def _sized(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, count >> 20)} MiB"
