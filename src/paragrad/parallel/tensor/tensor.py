"""tensor: every layer's neurons, channels, heads or vocabulary over ranks; what cannot be
divided is on all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paragrad.engine.model_shard import Share
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import Line
from paragrad.parallel.tensor import summary
from paragrad.parallel.tensor.shard_module import Split, divide
from paragrad.parallel.tensor.sharding_plan import Plan, planned
from paragrad.runtime.world import World
from paragrad.strategies.tensor import Tensor as Strategy


def check(strategy: Strategy, model: nn.Module, example: Any, tested: bool) -> None:
    """Can the model be split so? Raises StepFailed with the repair."""
    look(strategy, model, example, tested)


def look(strategy: Strategy, model: nn.Module, example: Any, tested: bool = False) -> Plan:
    """How the model's layers are split."""
    plan = planned(model, example, strategy.size, pairs=strategy.pairs, tested=tested)
    if not plan.divided:
        widest = max((max(shape) for shape in plan.shapes.values() if shape), default=0)
        repair = (
            f"give at most tensor({widest})"
            if 1 < widest < strategy.size
            else "train it with data(n)"
        )
        raise StepFailed(
            f"no layer of the model can be split over {strategy.size} ranks: its parameters meet "
            f"the data in no "
            f"product that has as many outputs; {repair}"
        )
    return plan


def told(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """How a model is split, layer by layer. inputs: of so many samples."""
    return summary.told(look(strategy, model, inputs), samples)


def share(strategy: Strategy, model: nn.Module, example: Any, axis: World, plan: Plan) -> Share:
    """This rank's pieces. Collective over the axis."""
    line = Line(axis, plan.manner)
    held, pieces = divide(model, plan, line, axis.rank == 0)
    split = sum(each.where is not None for each in held.values())
    whole_ones = ", ".join(plan.whole[:8]) or "none"
    return Share(
        model,
        held,
        chose=(
            (
                "split",
                f"{split} of {len(held)} tensors",
                f"the others are on every rank: {whole_ones}",
            ),
        ),
        around=(Split("tensor", model, [line], pieces),),
    )
