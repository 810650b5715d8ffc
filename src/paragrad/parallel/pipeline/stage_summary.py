"""What the parts of a model are: what each rank holds and computes, and what goes from one to
the next.
"""

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
    """A part of a model. parameters: numbers in those that it uses, others may use them too;
    work: operations in the matrix products of a forward;  seconds: forward and backward,
    measured alone;  on, back: bytes of a micro-batch's activations that go on to the next part,
    and of their gradients that come back.
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
    """Those of a model that is cut as a resolved strategy says. inputs: of a micro-batch.
    Raises StepFailed.
    """
    cut = balance.partition_into_stages(
        model,
        inputs,
        strategy.micro_batch_schedule.count_stages(strategy.size),
        strategy.requested_cut,
    )
    crossing = [
        *StageForward(model, cut.watched_stages, cut.fixed_outputs).find_plan(inputs).crossing,
        [],
    ]
    uses = assume_uses(model, cut.tensor_uses, len(cut.stages))
    parameters = [
        sum(each.numel() for name, each in model.named_parameters() if part in uses[name])
        for part in range(len(cut.stages))
    ]
    return [
        StageSummary(
            part % strategy.size,
            told,
            parameters[part],
            cut.work[part],
            cut.seconds[part],
            _sum_crossing_bytes(crossing[part]),
            _sum_crossing_bytes(each for each in crossing[part] if each.has_gradient),
        )
        for part, told in enumerate(cut.stage_names)
    ]


def _sum_crossing_bytes(crossing: Iterable[Crossing]) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in crossing)
