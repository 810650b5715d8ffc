"""The place and pipeline strategies: a model is cut into stages, one or more on each rank.

Pipeline parallelism: micro-batches go through the stages of a model (`pipeline_passes.py`).

Messages to users call a stage a part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from paragrad.engine.exchange import Exchange
from paragrad.engine.model_shard import ModelShard
from paragrad.engine.passes import Passes, PassesHost
from paragrad.parallel.pipeline import balance
from paragrad.parallel.pipeline.pipeline_passes import PipelinePasses
from paragrad.parallel.pipeline.stage import shard_stages
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.parallel.tracing.stage_trial import try_all_stages, try_in_eval_mode
from paragrad.runtime.world import World
from paragrad.strategies.pipeline import PartitionedStrategy


def check_model(
    strategy: PartitionedStrategy, model: nn.Module, example: Any, tested: bool
) -> None:
    """Check that the model can be cut.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.
        tested: Whether the model must run in eval mode too.

    Raises:
        StepFailed: It cannot; the message names the repair.
    """
    stage_count = strategy.micro_batch_schedule.count_stages(strategy.size)
    cut_points, inseparable = balance.find_separable_units(
        model, example, stage_count, strategy.requested_cut
    )
    units = list(cut_points.work)
    ranges = (
        balance.partition_as_requested(
            model, units, stage_count, strategy.requested_cut, inseparable
        )
        if strategy.requested_cut
        else balance.balance_stages([1.0] * len(units), stage_count, None, inseparable)
    )
    stage_forward = StageForward(
        model, [[units[at] for at in stage] for stage in ranges], cut_points.fixed_outputs
    )
    try_all_stages(stage_forward, example)
    if tested:
        try_in_eval_mode(stage_forward, example)


def inspect_model(
    strategy: PartitionedStrategy, model: nn.Module, example: Any
) -> balance.StagePartition:
    """Find where the model is cut.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.

    Returns:
        The stages.

    Raises:
        StepFailed: The model cannot be cut.
    """
    return balance.partition_into_stages(
        model,
        example,
        strategy.micro_batch_schedule.count_stages(strategy.size),
        strategy.requested_cut,
    )


def shard_model(
    strategy: PartitionedStrategy,
    model: nn.Module,
    example: Any,
    axis: World,
    partition: balance.StagePartition,
) -> ModelShard:
    """Leave this rank's stages of a model. Collective over the axis.

    Args:
        strategy: The strategy.
        model: The model, which is changed.
        example: Inputs of some samples.
        axis: The ranks.
        partition: The stages.

    Returns:
        This rank's shard of the model.
    """
    own_stages = range(axis.rank, len(partition.stages), axis.size)
    model_shard = shard_stages(model, partition, own_stages, axis)
    seconds = ", ".join(f"{1e3 * each:.3g}" for each in partition.seconds)
    return replace(
        model_shard,
        choices=(
            ("cut", str(partition), f"forward and backward in {seconds} ms, each measured alone"),
        ),
    )


def make_passes(strategy: PartitionedStrategy, host: PassesHost, exchange: Exchange) -> Passes:
    """Make the passes of a rank.

    Args:
        strategy: The strategy.
        host: What passes need of the trainer.
        exchange: The exchange of gradients between replicas.

    Returns:
        The passes.
    """
    return PipelinePasses(strategy, host, exchange)
