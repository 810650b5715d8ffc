"""A summary of a model's stages: what each rank holds and computes, and what crosses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from paragrad.parallel.pipeline import balance
from paragrad.parallel.pipeline.stage import assume_uses
from paragrad.parallel.tracing.crossing_plan import Crossing
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.strategies.pipeline import PartitionedStrategy


@dataclass(frozen=True)
class StageSummary:
    """A stage of a model.

    Attributes:
        rank: The rank that runs it.

        modules: Its modules, in words.

        parameters: Number of elements of the parameters that it uses; other stages may use them
            too.

        work: Operations in the matrix products of a forward.

        seconds: Forward and backward, measured alone.

        forward_bytes: Activations of a micro-batch that go to the next stage, in bytes.

        backward_bytes: Gradients of these that come back, in bytes.
    """

    rank: int
    modules: str
    parameters: int
    work: int
    seconds: float
    forward_bytes: int
    backward_bytes: int


def summarize_stages(
    strategy: PartitionedStrategy, model: nn.Module, inputs: Any
) -> list[StageSummary]:
    """Summarize the stages of a model that is cut as a resolved strategy says.

    Args:
        strategy: The strategy.
        model: The model.
        inputs: Inputs of a micro-batch.

    Returns:
        One entry for each stage.

    Raises:
        StepFailed: The model cannot be cut so.
    """
    partition = balance.partition_into_stages(
        model,
        inputs,
        strategy.micro_batch_schedule.count_stages(strategy.size),
        strategy.requested_cut,
    )
    crossing = [
        *StageForward(model, partition.watched_stages, partition.fixed_outputs)
        .find_plan(inputs)
        .crossing,
        [],
    ]
    uses = assume_uses(model, partition.tensor_uses, len(partition.stages))
    parameters = [
        sum(each.numel() for name, each in model.named_parameters() if stage in uses[name])
        for stage in range(len(partition.stages))
    ]
    return [
        StageSummary(
            stage % strategy.size,
            names,
            parameters[stage],
            partition.work[stage],
            partition.seconds[stage],
            _sum_crossing_bytes(crossing[stage]),
            _sum_crossing_bytes(each for each in crossing[stage] if each.has_gradient),
        )
        for stage, names in enumerate(partition.stage_names)
    ]


def _sum_crossing_bytes(crossing: Iterable[Crossing]) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in crossing)
