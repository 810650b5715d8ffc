"""Before the first step: the model is looked at, one worker's first step is made beside, then the exchange is wired."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paragrad.additive import ASKED, Part, misshapen, wrong_with
from paragrad.batches import Batch
from paragrad.causes import by_layout, not_the_same
from paragrad.data_parallel.all_reduce import Exchange
from paragrad.data_parallel.alone import Alone
from paragrad.data_parallel.batch_norm import BatchNorm
from paragrad.data_parallel.shared_memory import SharedMemory
from paragrad.datasets.loading import brought, called, copied, cut, parted, tensors_of
from paragrad.draws import Draws
from paragrad.errors import Refused, StepFailed
from paragrad.first_step import Made, Proof, made_alone, precise, spread
from paragrad.launched import memory_left
from paragrad.loss import loss_in
from paragrad.probe import Left, Probe, probed, untouched
from paragrad.schedules.sabotage import sabotaged
from paragrad.shares import micro_batches
from paragrad.strategy import Data

if TYPE_CHECKING:
    from paragrad.trainer import Trainer


def before(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> None:
    """Look at the model and wire up; make one worker's step beside, where this one has to show that it is the same.

    That is the first one, and, where the weight of the loss is not known, of later ones the loss: rare targets that do not
    count come late. Collective.
    """
    if trainer.exchange is not None:
        power = (trainer.taken + 1).bit_count() == 1            # the 2nd, 4th, 8th, ...
        if trainer.splits and trainer.module.traced is False and power:
            here = torch.tensor([float(_given_as_loaded(trainer, inputs, target))])
            as_loaded = bool(trainer.world.all_reduced(here, "MIN"))
            trainer.proof = proof(trainer, batch, inputs, target, trainer.activations, as_loaded, loss_alone=True)
        return
    found, as_loaded = looked_at(trainer, batch, inputs, target)
    trainer.draws, trainer.activations, trainer.module.traced = found.draws, found.activations, found.known
    if found.draws.by_layout and (trainer.splits or trainer.unchecked):
        trainer.log.choice("random", "by layout", found.draws.by_layout)
        if trainer.splits:
            raise StepFailed(by_layout(found.draws.by_layout))
    if trainer.splits:
        trainer.proof = proof(trainer, batch, inputs, target, found.activations, as_loaded)
    elif trainer.unchecked:
        trainer.log.choice("first step", "not checked", "asked for")
    trainer.exchange = wired(trainer, found.some_unused)
    if trainer.proof is not None and trainer.autocast is not None:
        rehearse(trainer, batch, inputs, target)


def wired(trainer: Trainer, some_unused: bool) -> Alone:
    """The exchange of the trainer's strategy."""
    world, strategy, log = trainer.world, trainer.strategy, trainer.log
    if world.size == 1:
        return Alone(trainer.module, trainer.optimizer, trainer.clip_norm)
    assert isinstance(strategy, Data)
    if strategy.state == "shared_memory":
        shared = SharedMemory(trainer.module, world, trainer.optimizer, trainer.clip_norm, log.now, log.add_span)
        log.choice("slices", type(trainer.optimizer).__name__, shared.because)
        return shared
    return Exchange(trainer.module, world, trainer.optimizer, trainer.clip_norm, sabotaged(strategy.reduce, trainer.sabotage),
                    some_unused=some_unused, overlap=trainer.overlap, log=log, machine=trainer.machine)


def rehearse(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> None:
    """The first step without autocast, in which a reversed batch hardly differs and a right split does; and no update."""
    assert trainer.exchange is not None
    trainer.rehearsing = True
    with untouched(trainer.model):
        trainer.gradients_of(batch, inputs, target)
        weight, loss, _ = trainer.exchange.counted()
        trainer.exchange.average(weight)
        prove(trainer, loss / weight, weight)
    trainer.rehearsing = False
    trainer.log.spans.clear()


def looked_at(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> tuple[Probe, bool]:
    """What one forward and backward of this rank's first micro-batch shows, and whether step got what batches gave; agreed by
    all ranks. Collective."""
    world, as_loaded = trainer.world, _given_as_loaded(trainer, inputs, target)
    piece, part = next(batch.cuts())
    if len(batch.pieces) > 1:
        inputs, target = cut((inputs, target), part, len(batch.places))
    trainer.part.samples = samples = len(piece.positions)
    with untouched(trainer.model), trainer.batch_norm.looking():
        with trainer.casting():
            if not trainer.examined:
                _check_shape(trainer, inputs, target)
            found = probed(trainer.module, inputs, target, samples, lambda count: _repeated(
                trainer, batch, inputs, target, max(samples, 1), count, as_loaded))
        if not trainer.examined and not found.draws.by_layout:
            _examine(trainer, inputs, target, samples, found.draws)
    told = world.collected((found, as_loaded, trainer.batch_norm.inside))
    probe, as_loaded, inside = world.agreed(told and (
        functools.reduce(operator.or_, (each for each, *_ in told)), all(loaded for _, loaded, _ in told),
        set().union(*(inside for *_, inside in told))))
    trainer.batch_norm.agree(inside)
    return probe, as_loaded


def _repeated(trainer: Trainer, batch: Batch, inputs: Any, target: Any, samples: int, count: int,
              as_loaded: bool) -> tuple[Any, Any]:
    """A batch of one sample so many times: loaded anew, or, where step was given something else, cut out of that."""
    if as_loaded:
        assert trainer.samples is not None
        return parted(brought(trainer.samples[batch.epoch, batch.indices[:1] * count], trainer.world.device, trainer.dtype))
    return cut((inputs, target), [0] * count, samples)      # type: ignore[no-any-return]


def _check_shape(trainer: Trainer, inputs: Any, target: Any) -> None:
    """Does the loss return one number, or a pair?"""
    inputs, target = copied((inputs, target))
    if wrong := misshapen(trainer.module.loss(called(trainer.model, inputs), target)):
        raise StepFailed(wrong)


def _examine(trainer: Trainer, inputs: Any, target: Any, samples: int, draws: Draws) -> None:
    """Does the loss add up? What a Job is asked at the door."""
    places = list(range(min(samples, ASKED)))
    middle = -(-len(places) // 3)
    try:
        given = Part(inputs, target, list(range(samples)))
        parts = [given.cut(some) for some in (places, places[:middle], places[middle:]) if some]
    except ValueError as error:
        trainer.log.choice("loss", "not asked", f"whether it adds up: {error}")
        return
    if len(parts) == 3 and (wrong := wrong_with(trainer.module, parts, draws, tight=trainer.dtype == torch.float64)):
        raise StepFailed(wrong)


# ---- one worker's step -------------------------------------------------------------------------------------------------------
Order = Callable[[list[int]], list[int]]
ORDERS: tuple[Order, ...] = (lambda group: group[::-1], lambda group: group[len(group) // 2:] + group[:len(group) // 2],
                             lambda group: group[::2] + group[1::2])


@dataclass(frozen=True)
class Beside:
    """One worker's step on the global batch of the step under way, on the trainer's model, which is put back.

    batch(order): its parts, the samples of each in that order;  buffers: as they are before the step.
    """
    trainer: Trainer
    batch: Callable[[Order], list[Part]]
    loss_alone: bool
    buffers: dict[str, torch.Tensor]

    def made(self, order: Order = list) -> tuple[Made, Left]:
        trainer, parts = self.trainer, self.batch(order)
        with untouched(trainer.model) as left, trainer.batch_norm.looking():
            for name, buffer in trainer.model.named_buffers():
                buffer.data.copy_(self.buffers[name])           # the strategy's own step may have been made since
            found = made_alone(trainer.module, parts, trainer.draws, trainer.seed, trainer.steps, self.loss_alone)
        return found, left

    def another(self, number: int) -> Made:
        """Of the samples in one of several orders."""
        return self.made(ORDERS[number])[0]

    def precise(self) -> Made:
        """In float64. Raises what the model raises there."""
        trainer = self.trainer
        model = copy.deepcopy(trainer.model)
        for name, buffer in model.named_buffers():
            buffer.data = self.buffers[name].clone()
        with BatchNorm(trainer.world, model, trainer.part, lambda payload: None).looking():
            return precise(model, trainer.module, self.batch(list), trainer.draws, trainer.seed, trainer.steps,
                           loss_in(trainer.module.loss, trainer.world.device, torch.float64), self.loss_alone)


def proof(trainer: Trainer, batch: Batch, inputs: Any, target: Any, activations: int, as_loaded: bool,
          loss_alone: bool = False) -> Proof | None:
    """Make one worker's step on rank 0 and its rounding twin on rank 1; None, and the record says why, where that cannot be.

    as_loaded: `step` got, on every rank, what `batches` gave. Collective.
    """
    world = trainer.world
    because, serial, twin, beside = _no_room(trainer, batch, activations), None, None, None
    given = None if as_loaded else world.agreed(world.collected((batch, inputs, target)))
    like = Made(0.0, 0.0, {} if loss_alone else {name: each.detach() for name, each in trainer.parameters.items()},
                {} if loss_alone else {name: each.detach() for name, each in trainer.model.named_buffers()})
    if not because and world.rank < 2:
        try:
            parts = functools.partial(_loaded, trainer, batch) if given is None else functools.partial(_joined, trainer, given)
            beside = Beside(trainer, parts, loss_alone,
                            {name: buffer.clone() for name, buffer in trainer.model.named_buffers()})
            if world.rank == 0:
                serial, left = beside.made()
                because = f"the forward changes {', '.join(left.changed[:3])}" if left.changed else None
                serial = None if because else serial
            else:
                twin, _ = beside.made(ORDERS[0])
        except Exception as error:              # on rank 1: then there is no twin
            because = f"one worker's step ended with {type(error).__name__}: {error}"
    everywhere, because = spread(world, serial, like, because=because)
    if everywhere is None:
        trainer.log.choice("first step", "not checked", because or "rank 1 has no room for a second step")
        return None
    return Proof(world, everywhere, twin, beside.another if beside else None, beside.precise if beside else None,
                 torch.finfo(trainer.precision).eps, loss_alone)


def _given_as_loaded(trainer: Trainer, inputs: Any, target: Any) -> bool:
    """Did this rank's `step` get what `batches` gave?"""
    try:
        gave = tensors_of(list(parted(trainer.fetched)))
    except Refused:                 # neither a pair nor a dict
        return False
    return all(a is b for a, b in itertools.zip_longest(tensors_of([inputs, target]), gave))


def _groups(trainer: Trainer, samples: int) -> list[list[int]]:
    """The micro-batches that are one worker's: all in one, unless batch norm sees them apart."""
    if not trainer.batch_norm.computed or trainer.micro == 1:
        return [list(range(samples))]
    micros = micro_batches(range(samples), trainer.shares, trainer.micro)
    return [list(itertools.chain.from_iterable(parts)) for parts in micros]


def _loaded(trainer: Trainer, batch: Batch, order: Order) -> list[Part]:
    """From the dataset, each part collated by itself."""
    assert trainer.samples is not None
    groups = [order(group) for group in _groups(trainer, len(batch.indices))]
    device = trainer.world.device
    return [Part(*parted(brought(trainer.samples[batch.epoch, batch.indices, group], device, trainer.dtype)), group)
            for group in groups]


def _joined(trainer: Trainer, given: list[tuple[Batch, Any, Any]], order: Order) -> list[Part]:
    """What step was given on all ranks, put together; stand-ins of empty parts left out."""
    if trainer.batch_norm.computed and trainer.micro > 1:
        raise ValueError("step was given another batch than trainer.batches gave, and batch norm sees micro-batches")
    parts = []
    for batch, inputs, target in given:
        places = [place for piece, part in batch.cuts() for place in range(part.start, part.stop) if piece.positions]
        if places:
            parts.append(Part(inputs, target, batch.places).cut(places))
    whole = Part(_together([part.inputs for part in parts]), _together([part.target for part in parts]),
                 [position for part in parts for position in part.positions])
    places = list(range(len(whole.positions)))
    return [whole if order is list else whole.cut(order(places))]


def _together(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.dim() else first
    if isinstance(first, dict):
        return {name: _together([value[name] for value in values]) for name in first}
    if isinstance(first, tuple | list) and any(isinstance(each, torch.Tensor | dict | tuple | list) for each in first):
        return type(first)(_together(list(each)) for each in zip(*values, strict=True))
    return functools.reduce(operator.add, values) if isinstance(first, tuple | list) else first


def _no_room(trainer: Trainer, batch: Batch, activations: int) -> str | None:
    """Is there memory for the whole batch on one rank? In the same words on all."""
    here = max(1, len(batch.pieces[0].positions))
    wanted = activations * len(batch.indices) // here + 2 * sum(
        parameter.numel() * parameter.element_size() for parameter in trainer.parameters.values())
    left = memory_left()
    if left is None or wanted <= left or trainer.world.rank > 1:
        return None
    return f"the whole batch wants about {wanted >> 20} MiB on one rank, and {left >> 20} MiB are left"


def prove(trainer: Trainer, loss: float, weight: float) -> None:
    """Compare; raises StepFailed before the update where the step is not one worker's. Collective."""
    proof, trainer.proof = trainer.proof, None
    assert proof is not None
    assert trainer.exchange is not None
    gradients = trainer.exchange.averaged()
    buffers = {name: buffer.detach() for name, buffer in trainer.model.named_buffers()}
    misses = proof.missed(Made(loss, weight, {} if proof.loss_alone else gradients, {} if proof.loss_alone else buffers))
    if misses:
        raise StepFailed(not_the_same(trainer, misses), tensor=misses[0].gap.tensor)
    what = "the loss" if proof.loss_alone else f"loss, weight, {len(gradients)} gradients, {len(buffers)} buffers"
    trainer.log.event("checked", f"{what} of this step are one worker's", step=trainer.steps)
