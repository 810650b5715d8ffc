"""tensor: every layer's neurons, channels, heads or vocabulary over ranks; what cannot be
divided is on all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paragrad.engine.model_shard import ModelShard
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.tensor import summary
from paragrad.parallel.tensor.shard_module import SplitContext, shard_module_tensors
from paragrad.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from paragrad.runtime.world import World
from paragrad.strategies.tensor import Tensor as Strategy


def check_model(strategy: Strategy, model: nn.Module, example: Any, tested: bool) -> None:
    """Can the model be split so? Raises StepFailed with the repair."""
    inspect_model(strategy, model, example, tested)


def inspect_model(
    strategy: Strategy, model: nn.Module, example: Any, tested: bool = False
) -> ShardingPlan:
    """How the model's layers are split."""
    plan = plan_sharding(model, example, strategy.size, pairs=strategy.pairs, tested=tested)
    if not plan.sharded_tensors:
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


def describe_layers(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """How a model is split, layer by layer. inputs: of so many samples."""
    return summary.format_sharding_table(inspect_model(strategy, model, inputs), samples)


def shard_model(
    strategy: Strategy, model: nn.Module, example: Any, axis: World, plan: ShardingPlan
) -> ModelShard:
    """This rank's pieces. Collective over the axis."""
    line = AxisGroup(axis, plan.options)
    held, pieces = shard_module_tensors(model, plan, line, axis.rank == 0)
    split = sum(each.where is not None for each in held.values())
    whole_ones = ", ".join(plan.whole_names[:8]) or "none"
    return ModelShard(
        model,
        held,
        choices=(
            (
                "split",
                f"{split} of {len(held)} tensors",
                f"the others are on every rank: {whole_ones}",
            ),
        ),
        contexts=(SplitContext("tensor", model, [line], pieces),),
    )
