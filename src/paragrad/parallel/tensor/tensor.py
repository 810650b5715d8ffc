"""The tensor strategy: neurons, channels, heads or vocabulary of every layer over ranks.

This is tensor parallelism.

What cannot be divided is on all ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paragrad.engine.model_shard import ModelShard
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.tensor import summary
from paragrad.parallel.tensor.shard_module import shard_module_tensors
from paragrad.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from paragrad.parallel.tensor.split_context import SplitContext
from paragrad.runtime.world import World
from paragrad.strategies.tensor import Tensor as Strategy


def check_model(strategy: Strategy, model: nn.Module, example: Any, tested: bool) -> None:
    """Check that the model can be split.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.
        tested: Whether the model must run in eval mode too.

    Raises:
        StepFailed: It cannot; the message names the repair.
    """
    inspect_model(strategy, model, example, tested)


def inspect_model(
    strategy: Strategy, model: nn.Module, example: Any, tested: bool = False
) -> ShardingPlan:
    """Plan how the model's layers are split.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.
        tested: Whether the model must run in eval mode too.

    Returns:
        The plan.

    Raises:
        StepFailed: No layer can be split, or the model cannot run in pieces.
    """
    plan = plan_sharding(model, example, strategy.size, pairs=strategy.pairs, tested=tested)
    if not plan.sharded_tensors:
        largest_dim = max((max(shape) for shape in plan.shapes.values() if shape), default=0)
        repair = (
            f"give at most tensor({largest_dim})"
            if 1 < largest_dim < strategy.size
            else "train it with data(n)"
        )
        raise StepFailed(
            f"no layer of the model can be split over {strategy.size} ranks: no product of its "
            f"parameters and the data has so many outputs; {repair}"
        )
    return plan


def describe_layers(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """Describe layer by layer how a model is split.

    Args:
        strategy: The strategy.
        model: The model.
        inputs: Inputs of some samples.
        samples: Number of these samples.

    Returns:
        Lines of a table.
    """
    return summary.format_sharding_table(inspect_model(strategy, model, inputs), samples)


def shard_model(
    strategy: Strategy, model: nn.Module, example: Any, axis: World, plan: ShardingPlan
) -> ModelShard:
    """Leave this rank's pieces of a model. Collective over the axis.

    Args:
        strategy: The strategy.
        model: The model, which is changed.
        example: Inputs of some samples.
        axis: The ranks.
        plan: How the layers are split.

    Returns:
        This rank's shard of the model.
    """
    group = AxisGroup(axis, plan.options)
    specs, sharded_tensors = shard_module_tensors(model, plan, group, axis.rank == 0)
    sharded_count = sum(each.where is not None for each in specs.values())
    whole_names = ", ".join(plan.whole_names[:8]) or "none"
    return ModelShard(
        model,
        specs,
        choices=(
            (
                "split",
                f"{sharded_count} of {len(specs)} tensors",
                f"the others are on every rank: {whole_names}",
            ),
        ),
        contexts=(SplitContext("tensor", model, [group], sharded_tensors),),
    )
