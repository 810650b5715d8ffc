"""tensor: every layer's neurons, channels, heads or vocabulary over ranks; what cannot be
divided is on all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paragrad.errors import StepFailed
from paragrad.strategies.tensor import Tensor as Strategy
from paragrad.techniques.cut import Share
from paragrad.techniques.width import account
from paragrad.techniques.width.held import Split, divide
from paragrad.techniques.width.pairs import Line
from paragrad.techniques.width.planning import Plan, planned
from paragrad.world.world import World


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
    return account.told(look(strategy, model, inputs), samples)


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
