"""One worker's step, beside the strategy's own: the whole global batch on rank 0, and on rank 1
its rounding twin; where the model is cut, both on rank 0, one after the other, and no other
rank holds all of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from paragrad.datasets.loading import brought, parted
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.loss_additivity import Excerpt
from paragrad.engine.model_shard import over
from paragrad.engine.probe import evaluating
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import Before, untouched
from paragrad.engine.state.values import set_values
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed, loss_in
from paragrad.jobs.precision import move
from paragrad.parallel.registry import cuts
from paragrad.runtime import stragglers
from paragrad.runtime.allocator import give_back
from paragrad.runtime.launcher_env import memory_left
from paragrad.runtime.rendezvous import ranks_here
from paragrad.runtime.world import World
from paragrad.strategies.shares import micro_batches
from paragrad.trainer.batch import Batch
from paragrad.trainer.evaluation import at_once, averaged, scored
from paragrad.trainer.first_step.step_check import (
    ORDERS,
    Order,
    Proof,
    in_numbers,
    made_alone,
    precise,
    spread,
)
from paragrad.trainer.first_step.step_result import Made

if TYPE_CHECKING:
    from paragrad.trainer.trainer import Trainer


@dataclass(frozen=True)
class Beside:
    """One worker's step on the global batch of the step under way, on the trainer's model,
    which is put back.

    module, draws: of the whole model, as they are before any cut;  batch(order): its parts, the
    samples of each in that order; test(order): what is tested too, or why nothing is;  buffers:
    as they are before the step;  kept: what else the forward changes, so.
    """

    trainer: Trainer
    module: Summed
    draws: Draws
    batch: Callable[[Order], list[Excerpt]]
    test: Callable[[Order], Excerpt | str]
    loss_alone: bool
    buffers: dict[str, torch.Tensor]
    kept: list[Before]

    def made(self, order: Order = list, moved: bool = False) -> Made:
        """moved: every parameter up or down by one unit in its last place."""
        trainer = self.trainer
        parts = self.batch(order)
        test = self.test(order)
        with untouched(self.module), trainer.batch_norm.looking():
            self._as_before()
            if moved:
                move(self.module.model, torch.Generator().manual_seed(trainer.seed))
            return made_alone(
                self.module, parts, self.draws, trainer.seed, trainer.steps, self.loss_alone, test
            )

    def _as_before(self) -> None:
        """The model as it was before the step: the strategy's own may have been made since."""
        for name, buffer in self.module.model.named_buffers():
            if name in self.buffers:
                set_values(buffer, self.buffers[name])
        for each in self.kept:
            each.put_back()

    def another(self, number: int) -> Made:
        """Of the samples in one of several orders; before these the same once more, after them
        with the parameters moved.
        """
        return self.made(
            ORDERS[number] if 0 <= number < len(ORDERS) else list, moved=number == len(ORDERS)
        )

    def precise(self) -> Made:
        """In float64. Raises what the model raises there."""
        trainer = self.trainer
        # in which a loss that holds the model leaves gradients
        with untouched(self.module):
            self._as_before()
            model = copy.deepcopy(self.module.model)
            with BatchNorm(
                trainer.world, model, lambda *_: None, samples=trainer.batch_norm.samples
            ).looking():
                return precise(
                    model,
                    self.module,
                    self.batch(list),
                    self.draws,
                    trainer.seed,
                    trainer.steps,
                    loss_in(self.module.loss, trainer.world.device, torch.float64),
                    self.loss_alone,
                    self.test(list),
                )


def proof(
    trainer: Trainer,
    batch: Batch,
    inputs: Any,
    target: Any,
    as_loaded: bool,
    loss_alone: bool = False,
) -> tuple[Proof | None, str]:
    """Make one worker's step on rank 0, and its rounding twin on rank 1 or after it; or None,
    and why that cannot be.

    as_loaded: `step` got, on every rank, what `batches` gave. Collective.
    """
    world = trainer.world
    alone = cuts(trainer.strategy)
    serial = None
    twin = None
    beside = None
    room, words = _room(trainer, batch)
    because = words if room < len(batch.indices) else None
    given = (
        None
        if as_loaded
        else world.agreed(world.collected((batch, inputs, target) if trainer.leads else None))
    )
    like = Made(
        0.0,
        0.0,
        {} if loss_alone else {name: each.detach() for name, each in trainer.parameters.items()},
        {} if loss_alone else {name: each.detach() for name, each in trainer.model.named_buffers()},
    )
    test = functools.partial(_in_test, trainer, batch, given, loss_alone)
    if not because and world.rank < (1 if alone else 2):
        try:
            parts = (
                functools.partial(_loaded, trainer, batch)
                if given is None
                else functools.partial(_joined, trainer, given)
            )
            beside = Beside(
                trainer,
                trainer.module,
                trainer.draws,
                parts,
                test,
                loss_alone,
                {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
                [],
            )
            begun = time.monotonic()
            made = beside.made(list if world.rank == 0 else ORDERS[0])
            beside.kept.append(Before(trainer.module, made.moved))
            serial, twin = (made, None) if world.rank == 0 else (None, made)
            # all others wait for both
            if alone and world.size > 1 and time.monotonic() - begun < world.timeout / 3:
                with contextlib.suppress(Exception):  # then there is no twin
                    twin = beside.made(ORDERS[0])
                give_back()
        except Exception as error:  # on rank 1: then there is no twin
            because = f"one worker's step ended with {type(error).__name__}: {error}"
    waits = stragglers.meanwhile(
        "rank 0 makes the step of one worker, whole, to compare this one with", ", or --unchecked"
    )
    with waits if beside is None else contextlib.nullcontext():
        everywhere, because = (
            in_numbers(world, serial, because)
            if alone
            else spread(world, serial, like, because=because)
        )
    if everywhere is None:
        return None, because or "not one worker's step was made"
    part = test(list) if isinstance(everywhere.tested, float) else None
    # what a model in float64 computes in less
    eps = trainer.coarsest if trainer.precision == torch.float64 else 0.0
    return Proof(
        world,
        everywhere,
        twin,
        beside.another if beside else None,
        beside.precise if beside else None,
        eps,
        trainer.precision == torch.float64,
        alone,
        loss_alone,
        test=part if isinstance(part, Excerpt) else None,
    ), ""


def _groups(trainer: Trainer, samples: int) -> list[list[int]]:
    """The micro-batches that are one worker's: all in one, unless batch norm sees them
    apart.
    """
    if not trainer.batch_norm.computed or trainer.division.micro == 1:
        return [list(range(samples))]
    micros = micro_batches(range(samples), trainer.division)
    return [list(itertools.chain.from_iterable(parts)) for parts in micros]


def _loaded(trainer: Trainer, batch: Batch, order: Order) -> list[Excerpt]:
    """From the dataset, each part collated by itself."""
    groups = [order(group) for group in _groups(trainer, len(batch.indices))]
    return [Excerpt(*fetched(trainer, batch, group), group) for group in groups]


def fetched(trainer: Trainer, batch: Batch, places: list[int]) -> tuple[Any, Any]:
    """(inputs, target) of what stands at some places of a global batch."""
    assert trainer.feed.samples is not None
    fetched = brought(
        trainer.feed.samples[batch.epoch, batch.indices, places],
        trainer.world.device,
        trainer.dtype,
    )
    return parted(fetched)  # type: ignore[no-any-return]


def _in_test(
    trainer: Trainer,
    batch: Batch,
    given: list[tuple[Batch, Any, Any] | None] | None,
    loss_alone: bool,
    order: Order,
) -> Excerpt | str:
    """The first samples, as many as a rank runs at once, where the model is cut; or why there
    are none.
    """
    if loss_alone or not (trainer.tests and cuts(trainer.strategy)):
        return ""
    few = list(range(at_once(len(batch.indices), trainer.division, 0)))
    if given is None:
        return Excerpt(*fetched(trainer, batch, order(few)), order(few))
    try:
        (whole,) = _joined(trainer, given, list)
        return (
            whole
            if order is list and len(few) >= len(whole.positions)
            else whole.cut(order(few[: len(whole.positions)]))
        )
    except ValueError as error:
        return f"the batch that step was given cannot be cut: {error}"


def tested(trainer: Trainer, part: Excerpt, of_one: float) -> float:
    """The mean loss of some samples in a test, by the strategy's own passes: of all replicas'
    the furthest from one worker's. Collective.
    """
    assert trainer.passes is not None
    # without autocast, as beside
    module = trainer.module
    spans = list(trainer.log.spans)
    trainer.rehearsing = True
    try:
        with untouched(module), evaluating(trainer.model), over(trainer.around):
            sums = scored(
                module,
                trainer.passes.outputs,
                None,
                [part.copied()],
                [part.positions],
                module.by_graph,
            )
    finally:
        trainer.rehearsing, trainer.log.spans[:] = False, spans
    total, weight = averaged(trainer.layout, sums)
    every = trainer.replicated.gathered(torch.tensor(total / weight, dtype=torch.float64))
    return max(map(float, every), key=lambda value: abs(value - of_one))


def _joined(
    trainer: Trainer, given: list[tuple[Batch, Any, Any] | None], order: Order
) -> list[Excerpt]:
    """What step was given on all ranks, put together; stand-ins of empty parts left out."""
    if trainer.batch_norm.computed and trainer.division.micro > 1:
        raise ValueError(
            "step was given another batch than trainer.batches gave, and batch norm sees "
            "micro-batches"
        )
    parts = []
    for batch, inputs, target in filter(None, given):  # of each share one rank
        places = [
            place
            for micro, part in batch.cuts()
            for place in range(part.start, part.stop)
            if micro.positions
        ]
        if places:
            part = Excerpt(inputs, target, batch.places)
            try:
                parts.append(part.cut(places))
            # the loop dropped samples: what is left, as it is
            except ValueError:
                parts.append(replace(part, positions=places))
    whole = Excerpt(
        _together([part.inputs for part in parts]),
        _together([part.target for part in parts]),
        [position for part in parts for position in part.positions],
    )
    places = list(range(len(whole.positions)))
    return [whole if order is list else whole.cut(order(places))]


def _together(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.dim() else first
    if isinstance(first, dict):
        return {name: _together([value[name] for value in values]) for name in first}
    if isinstance(first, tuple | list) and any(
        isinstance(each, torch.Tensor | dict | tuple | list) for each in first
    ):
        return type(first)(_together(list(each)) for each in zip(*values, strict=True))
    return functools.reduce(operator.add, values) if isinstance(first, tuple | list) else first


def _room(trainer: Trainer, batch: Batch) -> tuple[int, str]:
    """For how many samples of the batch one worker's step has room here; in words."""
    samples = len(batch.indices)
    left = memory_left()
    alone = cuts(trainer.strategy)
    if left is None or trainer.world.rank > (0 if alone else 1):
        return samples, ""
    # every rank divides a copy, and gathers what is compared
    divides = trainer.strategy.sharded
    left //= 1 if alone else trainer.world.size if divides else min(2, trainer.world.size)
    each = max(1, trainer.activations // max(1, len(batch.micros[0].positions)))
    # cut: a copy to put back, gradients of step, twin and all parts together; the parts, and
    # their gradients
    model = (6 if alone else 4 if divides else 2) * sum(
        parameter.nbytes for parameter in trainer.parameters.values()
    )
    return (
        max(0, min(samples, (left - model) // each)),
        f"{samples} samples want about {(model + samples * each) >> 20} MiB on one rank, and "
        f"{left >> 20} MiB are left",
    )


def fewer(trainer: Trainer, batch: Batch) -> Batch | None:
    """Of the batch as many samples as there is room for, or None where that is all, or not one
    for every share. Collective.
    """
    room = int(trainer.world.all_reduced(torch.tensor(float(_room(trainer, batch)[0])), "MIN"))
    return (
        None
        if room >= len(batch.indices)
        else batch.fewer(room, trainer.division, trainer.replicas)
    )


def refuse_copies(world: World, module: Summed) -> None:
    """Raises StepFailed where not every rank may have the whole model some times more: to put
    back, and in float64, with gradients and parts beside it. Collective.
    """
    left = memory_left() if world.device.type == "cpu" else None
    wanted = 7 * (ranks_here() or world.size) * sum(each.nbytes for each in module.parameters())
    if not world.all_reduced(torch.tensor(float(left is None or wanted <= left)), "MIN"):
        raise StepFailed(
            f"this step is off from one worker's by more than rounding in its type explains at "
            f"once, and to make "
            f"it again in float64 wants about {wanted >> 20} MiB on each host, which is not there; "
            f"train it in "
            "float64, on fewer ranks of a host, or unchecked (--unchecked, unchecked=True)"
        )
