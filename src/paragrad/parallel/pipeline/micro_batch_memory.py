"""What a micro-batch weighs, on a whole model and on each part of one: they are run here, as
their ranks would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paragrad.datasets.loading import copied, tensors_of
from paragrad.engine.activation_meter import Alive, storage
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import Alone, Replica
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.rng.draws import Calls, Draws, keyed
from paragrad.executors.pipeline_memory import Weight
from paragrad.jobs.loss import Summed
from paragrad.parallel.pipeline.balance import Cut
from paragrad.parallel.pipeline.pipeline import InStages, Step
from paragrad.parallel.pipeline.stage import share_of
from paragrad.parallel.pipeline.stage_messages import Messages
from paragrad.parallel.tracing.tracer import calls_watched
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.schedules.pipeline import Pipelined
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.shares import Micro

Given = tuple[Micro, Any, Any]  # a micro-batch, its inputs and its target


@dataclass
class AllHere:
    """What passes are offered by a trainer, of one worker that has all parts."""

    world: World
    module: Summed
    batch_norm: BatchNorm
    draws: Draws
    autocast: torch.dtype | None
    seed: int = 0
    log: Log = field(default_factory=lambda: Log(None))
    noise: GradientNorms = field(default_factory=lambda: GradientNorms((), 0))
    rehearsing: bool = False

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def keyed(
        self, micro: Micro, first: int = 0, calls: Calls | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        return keyed(self.draws, self.seed, 0, micro.places, first=first, calls=calls)


def whole(module: Summed, draws: Draws, autocast: torch.dtype | None, given: Given) -> Weight:
    """Of a micro-batch, on a model that is not cut; nothing where nobody can look (torch.func
    takes no hooks).
    """
    micro, inputs, target = given
    alive = Alive([*module.parameters(), *module.buffers(), *tensors_of([inputs, target])])
    within = AllHere(
        World(), module, BatchNorm(World(), module.model, lambda *_: None), draws, autocast
    )
    within.batch_norm.samples = len(micro.positions)
    try:
        with within.keyed(micro), within.batch_norm, within.casting(), alive.noting():
            total = module(inputs, target, len(micro.positions))
            kept = alive.now
            del total  # whose graph holds it
            return Weight(0, 0, kept)
    except RuntimeError as error:
        if not unseen(error):
            raise
        return Weight(0, 0, 0)


def unseen(error: RuntimeError) -> bool:
    """Is it that of torch.func, in which nobody can look at what is kept?"""
    return "saved tensor hooks" in str(error)


def passes_here(
    strategy: InParts, cut: Cut, module: Summed, draws: Draws, autocast: torch.dtype | None
) -> InStages:
    """The passes of one worker that has all parts of a model, which is no longer what it
    was.
    """
    alone = World().with_axes((strategy.name, 1))
    share = share_of(module.model, cut, range(len(cut.parts)), alone)
    within = AllHere(
        alone,
        module.around(share.model),
        BatchNorm(alone, share.model, lambda *_: None),
        replace(draws, serial=share.draws),
        autocast,
    )
    exchange = Alone(Replica(within.module, torch.optim.SGD(module.model.parameters(), lr=0.0)))
    return InStages(strategy, within, exchange)


def messages(passes: InStages, inputs: Any) -> Iterator[int]:
    """Bytes that come into each part."""
    found = Messages([passes.part.flow.planned(inputs)], passes.line)
    yield from (found[f"x{stage}.0"].nbytes if stage else 0 for stage in range(passes.stages))


def weighed(passes: InStages, given: Given) -> Iterator[Weight]:
    """Of a micro-batch, on each part."""
    schedule = passes.strategy.pipelined.schedule
    given = (given[0], *copied(given[1:]))
    step = Step(passes, [given], Pipelined(schedule, 1, passes.part.trained))
    step.again = set()
    stages = passes.stages
    step.in_halves = any(what == "W" for what, *_ in Pipelined(schedule, 1).tasks(0, 1))
    alives = []
    beside = [*passes.part.parameters(), *passes.part.buffers()]
    places = dict(filter(None, map(storage, tensors_of([given[1:]]))))
    came, back, shared, kept, halving, halved, batch = ([0] * stages for _ in range(7))
    with calls_watched(None):
        for stage in range(stages):
            step.alive = Alive(beside)
            alive = step.alive
            alives.append(alive)
            message = step.messages.made.get(f"x{stage}.0")
            step.forward(stage, 0)
            batch[stage] = sum(size for address, size in places.items() if address in alive.holders)
            kept[stage] = alive.now - batch[stage]
            if message is not None:
                came[stage] = message.nbytes
                shared[stage] = message.nbytes if alive.holds(message) else 0
        for stage in range(stages - 1, passes.part.trained - 1, -1):
            alives[stage].most = 0
            step.backward(stage, 0)
            if f"g{stage}.0" in step.messages.made:
                back[stage] = step.messages[f"g{stage}.0"].nbytes
            still = sum(
                size for address, size in places.items() if address in alives[stage].holders
            )
            halving[stage] = max(alives[stage].most - still, kept[stage])
            halved[stage] = alives[stage].now - still
            if step.in_halves:
                step.halves.pop((stage, 0)).weights()
    yield from (
        Weight(*each) for each in zip(came, back, kept, shared, halved, halving, batch, strict=True)
    )
