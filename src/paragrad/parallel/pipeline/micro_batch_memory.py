"""What a micro-batch weighs, on a whole model and on each part of one: they are run here, as
their ranks would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paragrad.datasets.loading import clone_batch, list_batch_tensors
from paragrad.engine.activation_meter import ActivationMeter, find_storage
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import NoExchange, Replica
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.rng.draws import CallNumbers, Draws, key_draws
from paragrad.executors.pipeline_memory import StageBytes
from paragrad.jobs.loss import LossModule
from paragrad.parallel.pipeline.balance import StagePartition
from paragrad.parallel.pipeline.pipeline import PipelinePasses, PipelineStep
from paragrad.parallel.pipeline.stage import shard_stages
from paragrad.parallel.pipeline.stage_messages import StageMessages
from paragrad.parallel.tracing.tracer import hook_module_calls
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.schedules.pipeline import MicroBatchSchedule
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.shares import MicroBatch

MicroBatchInputs = tuple[MicroBatch, Any, Any]  # a micro-batch, its inputs and its target


@dataclass
class LocalPassesHost:
    """What passes are offered by a trainer, of one worker that has all parts."""

    world: World
    module: LossModule
    batch_norm: BatchNorm
    draws: Draws
    autocast: torch.dtype | None
    seed: int = 0
    log: StepLog = field(default_factory=lambda: StepLog(None))
    noise: GradientNorms = field(default_factory=lambda: GradientNorms((), 0))
    rehearsing: bool = False

    def use_autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def key_draws(
        self, micro: MicroBatch, first_call: int = 0, call_numbers: CallNumbers | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        return key_draws(
            self.draws, self.seed, 0, micro.places, first_call=first_call, call_numbers=call_numbers
        )


def measure_whole_model(
    module: LossModule, draws: Draws, autocast: torch.dtype | None, micro_batch: MicroBatchInputs
) -> StageBytes:
    """Of a micro-batch, on a model that is not cut; nothing where nobody can look (torch.func
    takes no hooks).
    """
    micro, inputs, target = micro_batch
    alive = ActivationMeter(
        [*module.parameters(), *module.buffers(), *list_batch_tensors([inputs, target])]
    )
    within = LocalPassesHost(
        World(), module, BatchNorm(World(), module.model, lambda *_: None), draws, autocast
    )
    within.batch_norm.samples = len(micro.positions)
    try:
        with (
            within.key_draws(micro),
            within.batch_norm,
            within.use_autocast(),
            alive.count_saved_tensors(),
        ):
            total = module(inputs, target, len(micro.positions))
            kept = alive.current_bytes
            del total  # whose graph holds it
            return StageBytes(0, 0, kept)
    except RuntimeError as error:
        if not is_saved_hooks_error(error):
            raise
        return StageBytes(0, 0, 0)


def is_saved_hooks_error(error: RuntimeError) -> bool:
    """Is it that of torch.func, in which nobody can look at what is kept?"""
    return "saved tensor hooks" in str(error)


def build_local_passes(
    strategy: PartitionedStrategy,
    cut: StagePartition,
    module: LossModule,
    draws: Draws,
    autocast: torch.dtype | None,
) -> PipelinePasses:
    """The passes of one worker that has all parts of a model, which is no longer what it
    was.
    """
    alone = World().add_axes((strategy.name, 1))
    share = shard_stages(module.model, cut, range(len(cut.stages)), alone)
    within = LocalPassesHost(
        alone,
        module.wrap_model(share.model),
        BatchNorm(alone, share.model, lambda *_: None),
        replace(draws, serial_calls=share.draw_calls),
        autocast,
    )
    exchange = NoExchange(
        Replica(within.module, torch.optim.SGD(module.model.parameters(), lr=0.0))
    )
    return PipelinePasses(strategy, within, exchange)


def count_boundary_bytes(passes: PipelinePasses, inputs: Any) -> Iterator[int]:
    """Bytes that come into each part."""
    found = StageMessages([passes.stage_module.stage_forward.find_plan(inputs)], passes.axis)
    yield from (found[f"x{stage}.0"].nbytes if stage else 0 for stage in range(passes.stage_count))


def measure_stages(passes: PipelinePasses, micro_batch: MicroBatchInputs) -> Iterator[StageBytes]:
    """Of a micro-batch, on each part."""
    schedule = passes.strategy.micro_batch_schedule.schedule
    micro_batch = (micro_batch[0], *clone_batch(micro_batch[1:]))
    step = PipelineStep(
        passes, [micro_batch], MicroBatchSchedule(schedule, 1, passes.stage_module.first_trained)
    )
    step.recomputed_passes = set()
    stages = passes.stage_count
    step.splits_backward = any(
        what == "W" for what, *_ in MicroBatchSchedule(schedule, 1).list_tasks(0, 1)
    )
    alives = []
    beside = [*passes.stage_module.parameters(), *passes.stage_module.buffers()]
    places = dict(filter(None, map(find_storage, list_batch_tensors([micro_batch[1:]]))))
    came, back, shared, kept, halving, halved, batch = ([0] * stages for _ in range(7))
    with hook_module_calls(None):
        for stage in range(stages):
            step.meter = ActivationMeter(beside)
            alive = step.meter
            alives.append(alive)
            message = step.messages.buffers.get(f"x{stage}.0")
            step.run_forward(stage, 0)
            batch[stage] = sum(
                size for address, size in places.items() if address in alive.reference_counts
            )
            kept[stage] = alive.current_bytes - batch[stage]
            if message is not None:
                came[stage] = message.nbytes
                shared[stage] = message.nbytes if alive.is_tracked(message) else 0
        for stage in range(stages - 1, passes.stage_module.first_trained - 1, -1):
            alives[stage].peak_bytes = 0
            step.run_backward(stage, 0)
            if f"g{stage}.0" in step.messages.buffers:
                back[stage] = step.messages[f"g{stage}.0"].nbytes
            still = sum(
                size
                for address, size in places.items()
                if address in alives[stage].reference_counts
            )
            halving[stage] = max(alives[stage].peak_bytes - still, kept[stage])
            halved[stage] = alives[stage].current_bytes - still
            if step.splits_backward:
                step.deferred_weights.pop((stage, 0)).compute_weight_gradients()
    yield from (
        StageBytes(*each)
        for each in zip(came, back, kept, shared, halved, halving, batch, strict=True)
    )
