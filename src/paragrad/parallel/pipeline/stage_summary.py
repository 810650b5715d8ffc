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
from paragrad.parallel.pipeline.stage import supposed
from paragrad.parallel.tracing.crossing_plan import Crossing
from paragrad.parallel.tracing.stage_forward import Flow
from paragrad.strategies.pipeline import InParts


@dataclass(frozen=True)
class Piece:
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
    on: int
    back: int


def pieces(strategy: InParts, model: nn.Module, inputs: Any) -> list[Piece]:
    """Those of a model that is cut as a resolved strategy says. inputs: of a micro-batch.
    Raises StepFailed.
    """
    cut = balance.cut(model, inputs, strategy.pipelined.stages(strategy.size), strategy.asked)
    crossing = [*Flow(model, cut.watched, cut.standing).planned(inputs).crossing, []]
    uses = supposed(model, cut.uses, len(cut.parts))
    parameters = [
        sum(each.numel() for name, each in model.named_parameters() if part in uses[name])
        for part in range(len(cut.parts))
    ]
    return [
        Piece(
            part % strategy.size,
            told,
            parameters[part],
            cut.work[part],
            cut.seconds[part],
            _bytes(crossing[part]),
            _bytes(each for each in crossing[part] if each.grad),
        )
        for part, told in enumerate(cut.told)
    ]


def _bytes(crossing: Iterable[Crossing]) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in crossing)
