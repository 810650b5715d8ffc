"""Measure the memory of a micro-batch, for a whole model and for each of its stages.

The stages run in this process, as their ranks would run them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paragrad.datasets.loading import clone_batch, list_batch_tensors
from paragrad.engine.activation_meter import ActivationMeter, find_storage
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import NoExchange, Replica
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.rng.draws import CallNumbers, Draws, key_draws
from paragrad.executors.pipeline_memory import StageBytes
from paragrad.jobs.loss import LossModule
from paragrad.parallel.pipeline.balance import StagePartition
from paragrad.parallel.pipeline.pipeline_passes import PipelinePasses, PipelineStep
from paragrad.parallel.pipeline.stage import shard_stages
from paragrad.parallel.pipeline.stage_messages import StageMessages
from paragrad.parallel.tracing.tracer import hook_module_calls
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.shares import MicroBatch

MicroBatchInputs = tuple[MicroBatch, Any, Any]  # a micro-batch, its inputs and its target


@dataclass
class LocalPassesHost:
    """A `PassesHost` for one worker that holds all stages.

    Attributes:
        world: A world of one rank.

        module: The model and the loss.

        batch_norm: The batch norm of this rank.

        draws: The random calls of a forward pass.

        autocast: Type of autocast, or None.

        seed: The seed of the draws.

        log: An empty record.

        noise: Measures nothing here.

        rehearsing: As in `PassesHost`.

        watched_parameters: None.
    """

    world: World
    module: LossModule
    batch_norm: BatchNorm
    draws: Draws
    autocast: torch.dtype | None
    seed: int = 0
    log: StepLog = field(default_factory=lambda: StepLog(None))
    noise: GradientNorms = field(default_factory=lambda: GradientNorms((), 0))
    rehearsing: bool = False
    watched_parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def use_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of autocast."""
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def key_draws(
        self, micro: MicroBatch, first_call: int = 0, call_numbers: CallNumbers | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context that keys the draws of a micro-batch.

        Args:
            micro: The micro-batch.
            first_call: As in `draws.KeyedDraws`.
            call_numbers: As in `draws.KeyedDraws`.
        """
        return key_draws(
            self.draws, self.seed, 0, micro.places, first_call=first_call, call_numbers=call_numbers
        )


def measure_whole_model(
    module: LossModule, draws: Draws, autocast: torch.dtype | None, micro_batch: MicroBatchInputs
) -> StageBytes:
    """Measure a micro-batch on a model that is not divided.

    Args:
        module: The model and the loss.
        draws: The random calls of a forward pass.
        autocast: Type of autocast, or None.
        micro_batch: The micro-batch.

    Returns:
        The bytes that are kept for backward; 0 if they cannot be measured (torch.func does not
        allow the hooks).
    """
    micro, inputs, target = micro_batch
    meter = ActivationMeter(
        [*module.parameters(), *module.buffers(), *list_batch_tensors([inputs, target])]
    )
    host = LocalPassesHost(
        World(), module, BatchNorm(World(), module.model, lambda *_: None), draws, autocast
    )
    host.batch_norm.start_micro_batch(len(micro.positions))
    try:
        with (
            host.key_draws(micro),
            host.batch_norm,
            host.use_autocast(),
            meter.count_saved_tensors(),
        ):
            total = module(inputs, target, len(micro.positions))
            saved = meter.current_bytes
            del total  # its graph keeps the saved tensors
            return StageBytes(0, 0, saved)
    except RuntimeError as error:
        if not is_saved_hooks_error(error):
            raise
        return StageBytes(0, 0, 0)


def is_saved_hooks_error(error: RuntimeError) -> bool:
    """Return whether an error says that torch.func does not allow saved-tensor hooks.

    Args:
        error: The error.
    """
    return "saved tensor hooks" in str(error)


def build_local_passes(
    strategy: PartitionedStrategy,
    cut: StagePartition,
    module: LossModule,
    draws: Draws,
    autocast: torch.dtype | None,
) -> PipelinePasses:
    """Build the passes of one worker that holds all stages. The model is changed.

    Args:
        strategy: The strategy with stages.

        cut: How the model is divided into stages.

        module: The model and the loss.

        draws: The random calls of a forward pass.

        autocast: Type of autocast, or None.

    Returns:
        The passes.
    """
    world = World().add_axes((strategy.name, 1))
    shard = shard_stages(module.model, cut, range(len(cut.stages)), world)
    host = LocalPassesHost(
        world,
        module.wrap_model(shard.model),
        BatchNorm(world, shard.model, lambda *_: None),
        replace(draws, serial_calls=shard.draw_calls),
        autocast,
    )
    exchange = NoExchange(Replica(host.module, torch.optim.SGD(module.model.parameters(), lr=0.0)))
    return PipelinePasses(strategy, host, exchange)


def count_boundary_bytes(passes: PipelinePasses, inputs: Any) -> Iterator[int]:
    """Count the bytes that each stage receives.

    Args:
        passes: The passes with all stages.
        inputs: The inputs of a micro-batch.

    Yields:
        Bytes for each stage; 0 for the first one.
    """
    messages = StageMessages(
        [passes.stage_module.stage_forward.find_plan(inputs)], passes.axis, passes.message_buffers
    )
    yield from (
        messages[f"x{stage}.0"].nbytes if stage else 0 for stage in range(passes.stage_count)
    )


def measure_stages(passes: PipelinePasses, micro_batch: MicroBatchInputs) -> Iterator[StageBytes]:
    """Measure a micro-batch on each stage.

    Args:
        passes: The passes with all stages.
        micro_batch: The micro-batch.

    Yields:
        The memory of each stage.
    """
    micro_batch = (micro_batch[0], *clone_batch(micro_batch[1:]))
    # nothing is recomputed, and the backward is split also if only later stages are trained
    splits_backward = passes.find_program(1, 0).splits_backward
    program = replace(
        passes.find_program(1, passes.stage_module.first_trained),
        splits_backward=splits_backward,
        recomputed_passes=frozenset(),
    )
    step = PipelineStep(passes, [micro_batch], program)
    stages = passes.stage_count
    meters = []
    excluded = [*passes.stage_module.parameters(), *passes.stage_module.buffers()]
    batch_storages = dict(filter(None, map(find_storage, list_batch_tensors([micro_batch[1:]]))))
    (
        input_message,
        gradient_message,
        shared_with_message,
        saved,
        first_half_peak,
        saved_between_halves,
        batch_copy,
    ) = ([0] * stages for _ in range(7))
    with hook_module_calls(None), step.host.batch_norm:
        for stage in range(stages):
            meter = ActivationMeter(excluded)
            step.use_meter(meter)
            meters.append(meter)
            buffer = step.messages.buffers.get(f"x{stage}.0")
            step.run_forward(stage, 0)
            batch_copy[stage] = sum(
                size
                for address, size in batch_storages.items()
                if address in meter.reference_counts
            )
            saved[stage] = meter.current_bytes - batch_copy[stage]
            if buffer is not None:
                size = buffer.bytes.nbytes
                input_message[stage] = size
                shared_with_message[stage] = size if meter.is_tracked(buffer.bytes) else 0
        for stage in range(stages - 1, passes.stage_module.first_trained - 1, -1):
            meters[stage].forget_peak()
            step.run_backward(stage, 0)
            if f"g{stage}.0" in step.messages.buffers:
                gradient_message[stage] = step.messages[f"g{stage}.0"].nbytes
            batch_bytes = sum(
                size
                for address, size in batch_storages.items()
                if address in meters[stage].reference_counts
            )
            first_half_peak[stage] = max(meters[stage].peak_bytes - batch_bytes, saved[stage])
            saved_between_halves[stage] = meters[stage].current_bytes - batch_bytes
            if splits_backward:
                step.deferred_weights.pop((stage, 0)).compute_weight_gradients()
    yield from (
        StageBytes(*each)
        for each in zip(
            input_message,
            gradient_message,
            saved,
            shared_with_message,
            saved_between_halves,
            first_half_peak,
            batch_copy,
            strict=True,
        )
    )
