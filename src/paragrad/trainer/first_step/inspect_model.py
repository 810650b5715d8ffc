"""A look at the model before the first step: what one forward and backward shows, and whether
its loss adds up.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from paragrad.trainer.batch import Batch

if TYPE_CHECKING:
    from paragrad.trainer.trainer import Trainer


def reuse_validation_probe(trainer: Trainer) -> Probe | None:
    """What the door saw, where a look by every rank would show no more: whether all parameters
    are used matters to an exchange alone, which calls of batch norm ask other ranks only where
    there are some, and other devices draw by other kernels.
    """
    seen = trainer.validation_probe
    by_rank = (
        trainer.strategy.uses_buckets
        or trainer.world.device.type != "cpu"
        or (seen is not None and seen.has_batch_norm)
    )
    return None if by_rank else seen


def probe_first_micro_batch(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any
) -> tuple[Probe, bool]:
    """What one forward and backward of a first micro-batch shows, and whether step got what
    batches gave; agreed by all ranks. Collective.
    """
    world = trainer.world
    as_loaded = is_given_as_loaded(trainer, inputs, target)
    micro, inputs, target = next(batch.iterate_micro_batches(inputs, target))
    trainer.batch_norm.samples = len(micro.positions)
    found = None
    failed = None
    for mine in _take_turns(trainer):
        if mine:
            try:
                found = _probe_on_rank(
                    trainer, batch, inputs, target, len(micro.positions), as_loaded
                )
            except Exception as error:
                if trainer.shared_hosts is None:
                    raise
                # which those that do not look would meet too
                failed = error
            if trainer.shared_hosts is not None:
                return_freed_memory()  # before the next one looks
    told = world.gather_objects(
        (
            found,
            as_loaded,
            trainer.batch_norm.per_sample_calls,
            failed and StepFailed.wrap_error(failed),
        )
    )
    if wrong := world.broadcast_object(next((each for *_, each in told if each), None)):
        raise failed or wrong
    probe, as_loaded, inside = world.broadcast_object(
        told
        and (
            functools.reduce(operator.or_, (each for each, *_ in told if each)),
            all(loaded for _, loaded, *_ in told),
            set().union(*(inside for _, _, inside, _ in told)),
        )
    )
    trainer.batch_norm.adopt_per_sample_calls(inside)
    return probe, as_loaded


def _take_turns(trainer: Trainer) -> Iterator[bool]:
    """All ranks look at once; where those of a host have the model's values in one place, one
    of each replica, and one after another: a look takes gradients, and a copy to put back.
    Collective.
    """
    if trainer.shared_hosts is None:
        yield True
        return
    leads = trainer.world.all_gather(torch.tensor([trainer.is_share_leader]))
    yield from trainer.shared_hosts.take_turns(
        trainer.world, [rank for rank, each in enumerate(leads) if each]
    )


def _probe_on_rank(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, samples: int, as_loaded: bool
) -> Probe:
    with preserve_all_state(trainer.module), trainer.batch_norm.use_probe_mode():
        with trainer.use_autocast():
            found = probe_model(
                trainer.module,
                inputs,
                target,
                samples,
                trainer.batch_norm,
                lambda count: _repeat_first_sample(
                    trainer, batch, inputs, target, max(samples, 1), count, as_loaded
                ),
            )
        if not trainer.loss_checked and not found.draws.layout_dependence:
            _check_loss_additivity(trainer, inputs, target, samples, found.draws)
    return found


def is_given_as_loaded(trainer: Trainer, inputs: Any, target: Any) -> bool:
    """Did this rank's `step` get what `batches` gave?"""
    try:
        gave = list_batch_tensors(list(separate_target(trainer.feed.loaded_batch)))
    except Refused:  # neither a pair nor a dict
        return False
    return all(a is b for a, b in itertools.zip_longest(list_batch_tensors([inputs, target]), gave))


def is_given_as_loaded_everywhere(trainer: Trainer, inputs: Any, target: Any) -> bool:
    """The same of every rank. Collective."""
    return bool(
        trainer.world.all_reduce(
            torch.tensor([float(is_given_as_loaded(trainer, inputs, target))]), "MIN"
        )
    )


def _repeat_first_sample(
    trainer: Trainer,
    batch: Batch,
    inputs: Any,
    target: Any,
    length: int,
    count: int,
    as_loaded: bool,
) -> tuple[Any, Any]:
    """A batch of one sample so many times: loaded anew, or, where step was given something
    else, cut out of that.
    """
    if as_loaded:
        samples = trainer.feed.samples
        assert samples is not None
        return separate_target(
            convert_batch(
                samples[batch.epoch, batch.sample_indices[:1] * count],
                trainer.world.device,
                trainer.dtype,
            )
        )
    return slice_batch((inputs, target), [0] * count, length)  # type: ignore[no-any-return]


def _check_loss_additivity(
    trainer: Trainer, inputs: Any, target: Any, samples: int, draws: Draws
) -> None:
    """Does the loss add up? What a Job is asked at the door."""
    try:
        parts = BatchExcerpt(inputs, target, list(range(samples))).split_unequally()
    except ValueError as error:
        trainer.log.write_choice("loss", "not asked", f"whether it adds up: {error}")
        return
    if len(parts) == 3 and (
        wrong := find_additivity_error(
            trainer.module, parts, draws, in_float64=trainer.dtype == torch.float64
        )
    ):
        raise StepFailed(wrong)


def run_model_once(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, without_autocast: bool = False
) -> None:
    """Of model and loss, on this rank's first micro-batch; it leaves nothing behind. rehearsed:
    without autocast, where there is any; otherwise nothing.
    """
    if without_autocast and trainer.autocast is None:
        return
    micro, inputs, target = next(batch.iterate_micro_batches(inputs, target))
    casting = contextlib.nullcontext() if without_autocast else trainer.use_autocast()
    with preserve_all_state(trainer.module), trainer.batch_norm.use_probe_mode(), casting:
        trainer.module(*clone_batch((inputs, target)), len(micro.positions))
