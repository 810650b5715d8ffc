"""spatial: every image over ranks, by rows and columns; each fetches of its neighbours what its
outputs see.

And what has the neurons of fully connected layers on the same ranks (dense=tensor), of spatial
and of data: there every rank is given the whole batch, of which it takes its samples
(Krizhevsky 2014, arXiv 1404.5997; Gholami et al. 2018, 1712.04432).
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
from paragrad.parallel.tensor.shard_module import SplitContext, shard_module_tensors
from paragrad.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from paragrad.runtime.world import World
from paragrad.strategies.data import Data
from paragrad.strategies.spatial import Spatial


def check_model(strategy: Spatial | Data, model: nn.Module, example: Any, tested: bool) -> None:
    """Can the model be split so? Raises StepFailed with the repair."""
    inspect_model(strategy, model, example, tested)


def inspect_model(
    strategy: Spatial | Data, model: nn.Module, example: Any, tested: bool = False
) -> ShardingPlan:
    """What the layers of a model do with pieces."""
    domain = build_input_sharding(strategy)
    if isinstance(strategy, Spatial):
        refuse_small_images(strategy, domain, example)
    elif not has_samples_first(example):
        raise StepFailed(
            "the inputs of the model have not all samples as their first dimension, so which part "
            "of them a rank "
            "has is not known; leave out dense=tensor"
        )
    plan = plan_sharding(model, example, strategy.size, domain, tested=tested)
    if isinstance(strategy, Spatial) and not any(
        note.kind in ("fetched", "statistics") for note in plan.transfers
    ):
        raise StepFailed(
            "no layer of the model works on rows of images: none is a convolution, or pools; train "
            "it with "
            "data(n) or tensor(n)"
        )
    if domain.dense and not plan.sharded_tensors:
        raise StepFailed(
            f"no fully connected layer of the model can be split over {strategy.size} ranks; leave "
            f"out "
            "dense=tensor"
        )
    return plan


def refuse_small_images(strategy: Spatial, input_sharding: InputSharding, example: Any) -> None:
    if not (found := find_images(example)):
        raise StepFailed(
            "spatial divides images, numbers of (samples, channels, rows, columns), and the inputs "
            "of the model "
            "are none; train it with data(n) or tensor(n)"
        )
    for dim, along in input_sharding.dims.items():
        if (most := min(each.shape[dim] for each in found)) < along.ranks:
            given = f"{most}" if dim == ROWS else f"{strategy.rows}, columns={most}"
            repair = (
                f"give at most spatial({given})"
                if given != "1"
                else "train it with data(n) or tensor(n)"
            )
            raise StepFailed(
                f"images of {most} {along.name} cannot be divided over {along.ranks} ranks; "
                f"{repair}"
            )


def build_input_sharding(strategy: Spatial | Data) -> InputSharding:
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
    """What a model's layers do, one by one. inputs: of so many samples."""
    return summary.format_fetch_table(inspect_model(strategy, model, inputs), samples)


def shard_model(
    strategy: Spatial | Data, model: nn.Module, example: Any, axis: World, plan: ShardingPlan
) -> ModelShard:
    """All of the model, but for the neurons of others, which is given pieces of its inputs.
    Collective over the axis.
    """
    domain = build_input_sharding(strategy)
    worlds = [axis.select_axes(each.name) for each in axis.axes] if len(domain.dims) > 1 else [axis]
    lines = {
        dim: AxisGroup(world, plan.options._replace(data_dim=each.name, dense=domain.dense))
        for (dim, each), world in zip(domain.dims.items(), worlds, strict=True)
    }
    held, pieces = shard_module_tensors(model, plan, next(iter(lines.values())), axis.rank == 0)
    # beside replicas, whose buckets are exchanged while backward runs, gradients are summed
    # where a layer makes them
    whole_ones = [
        each for each in model.parameters() if axis.has_all_ranks and id(each) not in pieces
    ]

    def begun(_: nn.Module, args: Any, kwargs: Any) -> Any:
        copies: list[Tensor] = whole_ones
        for line in lines.values():
            copies = line.copy_parameters_early(copies)
        return shard_inputs((args, kwargs), lines)

    model.register_forward_pre_hook(begun, prepend=True, with_kwargs=True)
    return ModelShard(
        model, held, contexts=(SplitContext(strategy.name, model, list(lines.values()), pieces),)
    )
