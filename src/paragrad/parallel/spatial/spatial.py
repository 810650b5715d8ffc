"""The spatial strategy: every image is divided over ranks by rows and columns.

This is spatial parallelism.

Each rank fetches from its neighbours the elements that its outputs need. This module also serves
strategies that divide the neurons of fully connected layers over the same ranks (dense=tensor), for
spatial and for data. With data, every rank gets the whole batch and takes its samples (Krizhevsky
2014, arXiv 1404.5997; Gholami et al. 2018, arXiv 1712.04432).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paragrad.engine.model_shard import ModelShard
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.tensor import summary
from paragrad.parallel.tensor.input_sharding import (
    COLUMNS,
    ROWS,
    SAMPLES,
    InputAxis,
    InputSharding,
    find_images,
    has_samples_first,
    shard_inputs,
)
from paragrad.parallel.tensor.shard_module import shard_module_tensors
from paragrad.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from paragrad.parallel.tensor.split_context import SplitContext
from paragrad.runtime.world import World
from paragrad.strategies.data import Data
from paragrad.strategies.spatial import Spatial


def check_model(strategy: Spatial | Data, model: nn.Module, example: Any, tested: bool) -> None:
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
    strategy: Spatial | Data, model: nn.Module, example: Any, tested: bool = False
) -> ShardingPlan:
    """Plan what the layers of a model do with pieces of inputs.

    Args:
        strategy: The strategy.
        model: The model.
        example: Inputs of some samples.
        tested: Whether the model must run in eval mode too.

    Returns:
        The plan.

    Raises:
        StepFailed: The inputs or the model cannot be divided; the message names the repair.
    """
    domain = build_input_sharding(strategy)
    if isinstance(strategy, Spatial):
        refuse_small_images(strategy, domain, example)
    elif not has_samples_first(example):
        raise StepFailed(
            "not all inputs of the model have the samples as their first dimension, so the part "
            "of a rank is not known; leave out dense=tensor"
        )
    plan = plan_sharding(model, example, strategy.size, domain, tested=tested)
    if isinstance(strategy, Spatial) and not any(
        note.kind in ("fetched", "statistics") for note in plan.transfers
    ):
        raise StepFailed(
            "no layer of the model works on rows of images: none is a convolution, or pools; "
            "train it with data(n) or tensor(n)"
        )
    if domain.dense and not plan.sharded_tensors:
        raise StepFailed(
            f"no fully connected layer of the model can be split over {strategy.size} ranks; leave "
            "out dense=tensor"
        )
    return plan


def refuse_small_images(strategy: Spatial, input_sharding: InputSharding, example: Any) -> None:
    """Refuse inputs without images, or with fewer rows or columns than ranks.

    Args:
        strategy: The strategy.
        input_sharding: How the inputs are to be divided.
        example: Inputs of some samples.

    Raises:
        StepFailed: The inputs cannot be divided; the message names the repair.
    """
    if not (images := find_images(example)):
        raise StepFailed(
            "spatial divides images, numbers of (samples, channels, rows, columns), and no input "
            "of the model is one; train it with data(n) or tensor(n)"
        )
    for dim, axis in input_sharding.dims.items():
        if (smallest := min(each.shape[dim] for each in images)) < axis.ranks:
            argument = f"{smallest}" if dim == ROWS else f"{strategy.rows}, columns={smallest}"
            repair = (
                f"give at most spatial({argument})"
                if argument != "1"
                else "train it with data(n) or tensor(n)"
            )
            raise StepFailed(
                f"images of {smallest} {axis.name} cannot be divided over {axis.ranks} ranks; "
                f"{repair}"
            )


def build_input_sharding(strategy: Spatial | Data) -> InputSharding:
    """Return how a strategy divides the inputs."""
    if isinstance(strategy, Data):
        return InputSharding({SAMPLES: InputAxis("samples", strategy.size)}, dense=True)
    dims = {ROWS: InputAxis("rows", strategy.rows), COLUMNS: InputAxis("columns", strategy.columns)}
    return InputSharding(
        {dim: each for dim, each in dims.items() if each.ranks > 1 or dim == ROWS},
        strategy.dense == "tensor",
    )


def describe_layers(
    strategy: Spatial | Data, model: nn.Module, inputs: Any, samples: int
) -> list[str]:
    """Describe one by one what a model's layers do.

    Args:
        strategy: The strategy.
        model: The model.
        inputs: Inputs of some samples.
        samples: Number of these samples.

    Returns:
        Lines of a table.
    """
    return summary.format_fetch_table(inspect_model(strategy, model, inputs), samples)


def shard_model(
    strategy: Spatial | Data, model: nn.Module, example: Any, axis: World, plan: ShardingPlan
) -> ModelShard:
    """Leave all of a model, except for the neurons of other ranks. Collective over the axis.

    The model then divides its inputs itself.

    Args:
        strategy: The strategy.
        model: The model, which is changed.
        example: Inputs of some samples.
        axis: The ranks.
        plan: How the layers are split.

    Returns:
        This rank's shard of the model.
    """
    domain = build_input_sharding(strategy)
    worlds = [axis.select_axes(each.name) for each in axis.axes] if len(domain.dims) > 1 else [axis]
    groups = {
        dim: AxisGroup(world, plan.options._replace(data_dim=each.name, dense=domain.dense))
        for (dim, each), world in zip(domain.dims.items(), worlds, strict=True)
    }
    specs, sharded_tensors = shard_module_tensors(
        model, plan, next(iter(groups.values())), axis.rank == 0
    )
    # Replicas exchange buckets while the backward runs. Then gradients of whole parameters are
    # summed in the layers that make them, not early.
    whole_parameters = [
        each
        for each in model.parameters()
        if axis.has_all_ranks and id(each) not in sharded_tensors
    ]

    def shard_arguments(_: nn.Module, args: Any, kwargs: Any) -> Any:
        copies: list[Tensor] = whole_parameters
        for group in groups.values():
            copies = group.copy_parameters_early(copies)
        return shard_inputs((args, kwargs), groups)

    model.register_forward_pre_hook(shard_arguments, prepend=True, with_kwargs=True)
    return ModelShard(
        model,
        specs,
        contexts=(SplitContext(strategy.name, model, list(groups.values()), sharded_tensors),),
    )
