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

from paragrad.datasets.loading import brought, copied, cut, parted, tensors_of
from paragrad.engine.loss_additivity import Excerpt, wrong_with
from paragrad.engine.probe import Probe, probed
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import untouched
from paragrad.errors import Refused, StepFailed
from paragrad.runtime.allocator import give_back
from paragrad.trainer.batch import Batch

if TYPE_CHECKING:
    from paragrad.trainer.trainer import Trainer


def seen_at_the_door(trainer: Trainer) -> Probe | None:
    """What the door saw, where a look by every rank would show no more: whether all parameters
    are used matters to an exchange alone, which calls of batch norm ask other ranks only where
    there are some, and other devices draw by other kernels.
    """
    seen = trainer.seen
    by_rank = (
        trainer.strategy.bucketed
        or trainer.world.device.type != "cpu"
        or (seen is not None and seen.normed)
    )
    return None if by_rank else seen


def looked_at(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> tuple[Probe, bool]:
    """What one forward and backward of a first micro-batch shows, and whether step got what
    batches gave; agreed by all ranks. Collective.
    """
    world = trainer.world
    as_loaded = given_as_loaded(trainer, inputs, target)
    micro, inputs, target = next(batch.parts(inputs, target))
    trainer.batch_norm.samples = len(micro.positions)
    found = None
    failed = None
    for mine in _turns(trainer):
        if mine:
            try:
                found = _look(trainer, batch, inputs, target, len(micro.positions), as_loaded)
            except Exception as error:
                if trainer.hosts is None:
                    raise
                # which those that do not look would meet too
                failed = error
            if trainer.hosts is not None:
                give_back()  # before the next one looks
    told = world.collected(
        (found, as_loaded, trainer.batch_norm.inside, failed and StepFailed.of(failed))
    )
    if wrong := world.agreed(next((each for *_, each in told if each), None)):
        raise failed or wrong
    probe, as_loaded, inside = world.agreed(
        told
        and (
            functools.reduce(operator.or_, (each for each, *_ in told if each)),
            all(loaded for _, loaded, *_ in told),
            set().union(*(inside for _, _, inside, _ in told)),
        )
    )
    trainer.batch_norm.agree(inside)
    return probe, as_loaded


def _turns(trainer: Trainer) -> Iterator[bool]:
    """All ranks look at once; where those of a host have the model's values in one place, one
    of each replica, and one after another: a look takes gradients, and a copy to put back.
    Collective.
    """
    if trainer.hosts is None:
        yield True
        return
    leads = trainer.world.gathered(torch.tensor([trainer.leads]))
    yield from trainer.hosts.turns(trainer.world, [rank for rank, each in enumerate(leads) if each])


def _look(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, samples: int, as_loaded: bool
) -> Probe:
    with untouched(trainer.module), trainer.batch_norm.looking():
        with trainer.casting():
            found = probed(
                trainer.module,
                inputs,
                target,
                samples,
                trainer.batch_norm,
                lambda count: _repeated(
                    trainer, batch, inputs, target, max(samples, 1), count, as_loaded
                ),
            )
        if not trainer.examined and not found.draws.by_layout:
            _examine(trainer, inputs, target, samples, found.draws)
    return found


def given_as_loaded(trainer: Trainer, inputs: Any, target: Any) -> bool:
    """Did this rank's `step` get what `batches` gave?"""
    try:
        gave = tensors_of(list(parted(trainer.feed.fetched)))
    except Refused:  # neither a pair nor a dict
        return False
    return all(a is b for a, b in itertools.zip_longest(tensors_of([inputs, target]), gave))


def all_given_as_loaded(trainer: Trainer, inputs: Any, target: Any) -> bool:
    """The same of every rank. Collective."""
    return bool(
        trainer.world.all_reduced(
            torch.tensor([float(given_as_loaded(trainer, inputs, target))]), "MIN"
        )
    )


def _repeated(
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
        return parted(
            brought(
                samples[batch.epoch, batch.indices[:1] * count], trainer.world.device, trainer.dtype
            )
        )
    return cut((inputs, target), [0] * count, length)  # type: ignore[no-any-return]


def _examine(trainer: Trainer, inputs: Any, target: Any, samples: int, draws: Draws) -> None:
    """Does the loss add up? What a Job is asked at the door."""
    try:
        parts = Excerpt(inputs, target, list(range(samples))).in_parts()
    except ValueError as error:
        trainer.log.choice("loss", "not asked", f"whether it adds up: {error}")
        return
    if len(parts) == 3 and (
        wrong := wrong_with(trainer.module, parts, draws, tight=trainer.dtype == torch.float64)
    ):
        raise StepFailed(wrong)


def run_once(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, rehearsed: bool = False
) -> None:
    """Of model and loss, on this rank's first micro-batch; it leaves nothing behind. rehearsed:
    without autocast, where there is any; otherwise nothing.
    """
    if rehearsed and trainer.autocast is None:
        return
    micro, inputs, target = next(batch.parts(inputs, target))
    casting = contextlib.nullcontext() if rehearsed else trainer.casting()
    with untouched(trainer.module), trainer.batch_norm.looking(), casting:
        trainer.module(*copied((inputs, target)), len(micro.positions))
