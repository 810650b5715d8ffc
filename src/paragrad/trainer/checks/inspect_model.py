"""Inspect the model before the first step.

One forward and backward shows what the model does, and whether its loss is additive.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from paragrad.datasets.loading import (
    clone_batch,
    convert_batch,
    list_batch_tensors,
    separate_target,
    slice_batch,
)
from paragrad.engine.loss_additivity import BatchExcerpt, find_additivity_error
from paragrad.engine.probe import Probe, probe_model
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import Refused, StepFailed
from paragrad.runtime.allocator import return_freed_memory
from paragrad.runtime.single_group import act_alone
from paragrad.trainer.batch import Batch
from paragrad.trainer.training import Training


def reuse_validation_probe(training: Training) -> Probe | None:
    """Return the probe of the validation if a probe on every rank would show no more.

    A new probe is needed in three cases. Buckets depend on which parameters are used. Other devices
    draw by other kernels. Calls of batch norm ask other ranks only where there are some.

    Args:
        training: The training.
    """
    probe = training.options.validation_probe
    differs_by_rank = not training.is_plain and (
        training.setup.strategy.uses_buckets
        or training.world.device.type != "cpu"
        or (probe is not None and probe.has_batch_norm)
    )
    return None if differs_by_rank else probe


def probe_first_micro_batch(
    training: Training, batch: Batch, inputs: Any, target: Any
) -> tuple[Probe, bool]:
    """Probe the model by one forward and backward of a first micro-batch.

    Collective; all ranks agree on the result.

    Args:
        training: The training.
        batch: This rank's part of the global batch.
        inputs: The inputs that `step` received.
        target: The target that `step` received.

    Returns:
        (probe, as_loaded): the merged probe of all ranks, and whether `step` received on every rank
        what `batches` gave.
    """
    world = training.world
    as_loaded = is_given_as_loaded(training, inputs, target)
    micro, inputs, target = next(batch.iterate_micro_batches(inputs, target))
    training.batch_norm.start_micro_batch(len(micro.positions))
    own_probe = None
    failure = None
    for is_turn in _take_turns(training):
        if is_turn:
            try:
                own_probe = _probe_on_rank(
                    training, batch, inputs, target, len(micro.positions), as_loaded
                )
            except Exception as error:
                if training.shared_hosts is None:
                    raise
                # The ranks that do not probe would meet the same error. It is raised on all ranks
                # below.
                failure = error
            if training.shared_hosts is not None:
                return_freed_memory()  # The memory is needed by the next rank that probes.
    results = world.gather_objects(
        (
            own_probe,
            as_loaded,
            training.batch_norm.per_sample_calls,
            failure and StepFailed.wrap_error(failure),
        )
    )
    if first_error := world.broadcast_object(next((each for *_, each in results if each), None)):
        raise failure or first_error
    probe, as_loaded, inside_calls = world.broadcast_object(
        results
        and (
            functools.reduce(operator.or_, (each for each, *_ in results if each)),
            all(loaded for _, loaded, *_ in results),
            set().union(*(inside_calls for _, _, inside_calls, _ in results)),
        )
    )
    training.batch_norm.adopt_per_sample_calls(inside_calls)
    return probe, as_loaded


def _take_turns(training: Training) -> Iterator[bool]:
    """Yield on each rank whether it probes now. Collective.

    All ranks probe at once, unless the ranks of a host share the model's values. One rank of each
    replica then probes, one after another: a probe needs gradients and a copy to restore.
    """
    if training.shared_hosts is None:
        yield True
        return
    leader_flags = training.world.all_gather(torch.tensor([training.world.is_first("samples")]))
    yield from training.shared_hosts.take_turns(
        training.world, [rank for rank, each in enumerate(leader_flags) if each]
    )


def _probe_on_rank(
    training: Training, batch: Batch, inputs: Any, target: Any, samples: int, as_loaded: bool
) -> Probe:
    with (
        act_alone(),
        preserve_all_state(training.module),
        training.batch_norm.use_probe_mode(records_calls=True),
    ):
        with training.use_autocast():
            probe = probe_model(
                training.module,
                inputs,
                target,
                samples,
                training.batch_norm,
                lambda count: _repeat_first_sample(
                    training, batch, inputs, target, max(samples, 1), count, as_loaded
                ),
                # On one worker the probe is for draws and memory only. A hook may count its calls,
                # or step an optimizer.
                runs_backward=not training.is_plain,
            )
        if not training.options.is_validated and not probe.draws.layout_dependence:
            _check_loss_additivity(training, inputs, target, samples, probe.draws)
    return probe


def is_given_as_loaded(training: Training, inputs: Any, target: Any) -> bool:
    """Return whether this rank's `step` received what `batches` gave.

    Args:
        training: The training.
        inputs: The inputs that `step` received.
        target: The target that `step` received.
    """
    try:
        given = list_batch_tensors(list(separate_target(training.feed.loaded_batch)))
    except Refused:  # The loaded batch is neither a pair nor a dict.
        return False
    return all(
        a is b for a, b in itertools.zip_longest(list_batch_tensors([inputs, target]), given)
    )


def is_given_as_loaded_everywhere(training: Training, inputs: Any, target: Any) -> bool:
    """Return whether every rank's `step` received what `batches` gave. Collective.

    Args:
        training: The training.
        inputs: The inputs that `step` received.
        target: The target that `step` received.
    """
    return bool(
        training.world.all_reduce(
            torch.tensor([float(is_given_as_loaded(training, inputs, target))]), "MIN"
        )
    )


def _repeat_first_sample(
    training: Training,
    batch: Batch,
    inputs: Any,
    target: Any,
    length: int,
    count: int,
    as_loaded: bool,
) -> tuple[Any, Any]:
    """Build a batch of `count` copies of one sample.

    The sample is loaded again, or sliced from what `step` received if that was not loaded.
    """
    if as_loaded:
        samples = training.feed.samples
        assert samples is not None
        return separate_target(
            convert_batch(
                samples[batch.epoch, [int(batch.sample_indices[0])] * count],
                training.world.device,
                training.feed.dtype,
            )
        )
    return slice_batch((inputs, target), [0] * count, length)  # type: ignore[no-any-return]


def _check_loss_additivity(
    training: Training, inputs: Any, target: Any, samples: int, draws: Draws
) -> None:
    """Check that the loss is additive, as the validation does for a Job."""
    try:
        parts = BatchExcerpt(inputs, target, list(range(samples))).split_unequally()
    except ValueError as error:
        training.log.write_choice("loss", "not asked", f"whether it adds up: {error}")
        return
    if len(parts) == 3 and (
        problem := find_additivity_error(
            training.module, parts, draws, in_float64=training.feed.dtype == torch.float64
        )
    ):
        raise StepFailed(problem)


def run_model_once(
    training: Training, batch: Batch, inputs: Any, target: Any, without_autocast: bool = False
) -> None:
    """Run model and loss on this rank's first micro-batch, and restore all state.

    Args:
        training: The training.

        batch: This rank's part of the global batch.

        inputs: The inputs that `step` received.

        target: The target that `step` received.

        without_autocast: Run without autocast, and only if the training uses autocast at all.
    """
    if without_autocast and training.options.autocast is None:
        return
    micro, inputs, target = next(batch.iterate_micro_batches(inputs, target))
    autocast = contextlib.nullcontext() if without_autocast else training.use_autocast()
    with (
        act_alone(),
        preserve_all_state(training.module),
        training.batch_norm.use_probe_mode(),
        autocast,
    ):
        training.module(*clone_batch((inputs, target)), len(micro.positions))
