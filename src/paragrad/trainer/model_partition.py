"""The part of a partitioned model that a rank holds, and the optimizer over it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine import layout
from paragrad.engine.exchange import find_step_hook
from paragrad.engine.layout import Layout, ShardSpec
from paragrad.engine.model_shard import ModelShard, PassContext
from paragrad.engine.optimizer.update_probe import agree_on_granularity
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state import shared_initialization
from paragrad.engine.state.values import is_same_value
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule
from paragrad.parallel.registry import (
    build_model_shard,
    has_model_shards,
    is_builtin_technique,
    select_factors,
)
from paragrad.runtime.world import World
from paragrad.strategies.strategy import (
    PER_ELEMENT,
    PER_TENSOR,
    UPDATE_GRANULARITIES,
    WHOLE_MODEL,
    Strategy,
)
from paragrad.trainer.parameter_access import refuse_parameter_views


@dataclass(frozen=True)
class ModelPartition:
    """The part of a partitioned model that a rank holds.

    Attributes:
        module: This rank's part of the model, and the loss.

        layout: The place of the part in the whole model.

        empty_model: The whole model without values.

        draws: The random draws, with the number that each random call of the part has in the whole.

        choices: The choices for the log, as in ModelShard.

        groups: The serial names of the parameters in each group of the optimizer.

        contexts: The contexts of the passes, as in ModelShard.
    """

    module: LossModule
    layout: Layout
    empty_model: nn.Module
    draws: Draws
    choices: tuple[tuple[str, str, str], ...]
    groups: list[list[str]]
    contexts: tuple[PassContext, ...] = ()


def place_rank(strategy: Strategy, world: World) -> World:
    """Place a rank among the workers, in their axes, or among the servers.

    Collective. The servers are the last ranks.

    Args:
        strategy: The resolved strategy.
        world: All ranks.

    Returns:
        The world of this rank.
    """
    if not strategy.servers:
        return world.add_axes(*strategy.axes)
    # Workers of a work queue come and go; each one is in a world of its own.
    if world.size == 1:
        return world
    if world.size == strategy.size - strategy.servers:  # The world has no servers.
        return world.add_axes(*strategy.axes)
    workers = world.size - strategy.servers
    group = world.split_ranks([range(workers), range(workers, world.size)])
    assert group is not None
    return group if strategy.is_server(world.rank) else group.add_axes(*strategy.axes)


def is_shared_per_host(strategy: Strategy, world: World) -> bool:
    """Return whether the ranks of a host share the whole model's values until it is partitioned.

    Args:
        strategy: The resolved strategy.
        world: The ranks.
    """
    return has_model_shards(strategy) and world.size > 1 and world.device.type == "cpu"


def build_model_partition(
    strategy: Strategy,
    module: LossModule,
    optimizer: torch.optim.Optimizer,
    draws: Draws,
    world: World,
    example_inputs: Any,
    inspections: dict[str, Any],
    keep_whole: bool,
) -> ModelPartition:
    """Partition a model, and let the optimizer hold this rank's part.

    Collective.

    Args:
        strategy: The resolved strategy.

        module: The whole model and the loss.

        optimizer: The optimizer over the whole model.

        draws: The random draws of the whole model.

        world: The ranks.

        example_inputs: The inputs of some samples.

        inspections: The inspections of the model, as in `build_model_shard`.

        keep_whole: Whether the whole model stays unchanged beside the part.

    Returns:
        This rank's part.

    Raises:
        StepFailed: If the parts do not make up the model, or if the optimizer cannot update parts.
    """
    granularity = agree_on_granularity(optimizer, world)
    refuse_parameter_views(module.model)
    parameters = dict(module.model.named_parameters())
    if hooked_names := [
        name
        for name, each in parameters.items()
        if each._backward_hooks or each._post_accumulate_grad_hooks
    ]:
        raise StepFailed(
            f"{strategy} divides it, and it has a hook, which its parts would not have; hook the "
            "module",
            tensor=", ".join(hooked_names[:3]),
        )
    # Built-in strategies leave the values untouched; a strategy of the user may write to them.
    values_untouched = all(map(is_builtin_technique, select_factors(strategy, "shard_model")))
    copy_model = shared_initialization.copy_modules if values_untouched else copy.deepcopy
    empty_model = layout.build_empty_model(module.model)
    model = copy_model(module.model) if keep_whole else module.model
    serial = {
        **parameters,
        **{name: buffer.clone() for name, buffer in module.model.named_buffers()},
    }
    shard = build_model_shard(strategy, model, example_inputs, world, inspections)
    shared_initialization.make_values_private(shard.model)
    if draws.other_generators and shard.draw_calls is not None:
        raise StepFailed(
            f"the model draws from {', '.join(draws.other_generators)}, and in parts its calls are "
            f"others; draw by torch, or in the dataset, or train without {strategy}"
        )
    if shard.draw_calls is not None and not all(
        call in range(len(draws.calls)) for call in shard.draw_calls
    ):
        raise StepFailed(
            f"{strategy} gives the random calls of a part the numbers {list(shard.draw_calls)}, "
            f"and the model's are 0 to {len(draws.calls) - 1}"
        )
    own_layout = Layout(
        world.select_axes([axis.name for axis in world.axes if axis.divides != "samples"]),
        shard.specs,
        list(serial),
        shard.has_output,
    )
    _check_partition(strategy, own_layout, shard, serial, optimizer, granularity)
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [
        [names[parameter] for parameter in group["params"]] for group in optimizer.param_groups
    ]
    shards: dict[Tensor, list[tuple[ShardSpec, Tensor]]] = {
        parameter: [] for parameter in parameters.values()
    }
    for name, parameter in shard.model.named_parameters():
        shards[parameters[shard.specs[name].name]].append((shard.specs[name], parameter))
    layout.install_shards(optimizer, shards)
    return ModelPartition(
        module.wrap_model(shard.model),
        own_layout,
        empty_model,
        replace(draws, serial_calls=shard.draw_calls),
        shard.choices,
        groups,
        shard.contexts,
    )


def _check_partition(
    strategy: Strategy,
    layout: Layout,
    shard: ModelShard,
    serial: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    granularity: str,
) -> None:
    """Check a partition: shards match, each element counts once, the optimizer can update shards.

    Collective.
    """
    layout.count_output_ranks()
    rank_reports = layout.world.gather_objects(
        (
            _find_wrong_tensor(shard, serial),
            [replace(spec, gradient_worlds=()) for spec in shard.specs.values()],
        )
    )
    problem = next(filter(None, (wrong_tensor for wrong_tensor, *_ in rank_reports)), None)
    if rank_reports and not problem:
        problem = _find_uncounted_tensor(
            [spec for *_, specs in rank_reports for spec in specs if spec.is_primary], serial
        )
    if rank_reports and not problem and not layout.output_rank_count:
        problem = "no rank gives the output and the loss"
    if problem := layout.world.broadcast_object(problem):
        raise StepFailed(
            f"{strategy} divides the model wrongly: {problem}; hold every element of every "
            "parameter and buffer, and count it on one rank of a replica"
        )
    has_split_tensors = layout.world.all_reduce(
        torch.tensor(float(any(spec.where is not None for spec in shard.specs.values()))), "MAX"
    )
    refuse_unfit_optimizer(
        strategy, optimizer, granularity, PER_ELEMENT if has_split_tensors else PER_TENSOR
    )


def refuse_unfit_optimizer(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    granularity: str,
    available_granularity: str,
) -> None:
    """Refuse an optimizer that needs more in one update than a rank has.

    An optimizer with a hook, or with a list of its own, uses the parameters of the whole model, and
    not those of a part.

    Args:
        strategy: The strategy that partitions the model.
        optimizer: The optimizer.
        granularity: What one update of the optimizer needs.
        available_granularity: What a rank has: PER_ELEMENT or PER_TENSOR.

    Raises:
        StepFailed: If the optimizer cannot update parts.
    """
    if hook := find_step_hook(optimizer):
        raise StepFailed(
            f"{type(optimizer).__name__} has {hook}, which may look at parameters that are on "
            f"another rank, because {strategy} divides the model; do what it does in the step() of "
            f"an optimizer of your own, or train without {strategy}"
        )
    if UPDATE_GRANULARITIES.index(granularity) > UPDATE_GRANULARITIES.index(available_granularity):
        needs = "all parameters" if granularity == WHOLE_MODEL else "whole tensors"
        situation, unit = (
            ("divides them", "element by element")
            if available_granularity == PER_ELEMENT
            else ("has them on several ranks", "each tensor by itself")
        )
        raise StepFailed(
            f"{type(optimizer).__name__} needs {needs} together (tried on a small copy), and "
            f"{strategy} {situation}; use one that updates {unit}, such as Adam"
        )


def _find_wrong_tensor(shard: ModelShard, serial: Mapping[str, Tensor]) -> str | None:
    """Describe a local tensor that differs from its shard spec, or return None."""
    local_tensors = {**dict(shard.model.named_parameters()), **dict(shard.model.named_buffers())}
    if unknown := [name for name in shard.specs if name not in local_tensors]:
        return f"{unknown[0]} has a spec, and the part has no such parameter or buffer"
    for name, tensor in local_tensors.items():
        if (spec := shard.specs.get(name)) is None:
            return f"{name} is held, and no spec says of which tensor it is a part"
        serial_tensor = serial[spec.name]
        if (
            serial_tensor.shape != spec.shape
            or spec.extract_shard(serial_tensor).shape != tensor.shape
        ):
            return (
                f"{name} has the shape {tuple(tensor.shape)}, and the part of {spec.name} "
                f"in its spec, whole {tuple(serial_tensor.shape)}, has another"
            )
        if not is_same_value(spec.extract_shard(serial_tensor), tensor.detach()):
            return f"{name} has other values than the part of {spec.name} in its spec"
        if tensor.requires_grad != serial_tensor.requires_grad:
            return (
                f"{name} is {'trained' if tensor.requires_grad else 'frozen'}, and {spec.name} of "
                "the model is not"
            )
        if spec.gradient_worlds and not isinstance(tensor, nn.Parameter):
            return f"{name} has owners and is a buffer, which has no gradient"
    return None


def _find_uncounted_tensor(
    counted_specs: list[ShardSpec], serial: Mapping[str, Tensor]
) -> str | None:
    """Describe a tensor with an element that counts nowhere or twice, or return None."""
    for name, tensor in serial.items():
        specs = [spec for spec in counted_specs if spec.name == name]
        count = sum(spec.extract_shard(tensor).numel() for spec in specs)
        if count != tensor.numel():
            return f"of the {tensor.numel()} elements of {name} {count} count"
        if any(
            one.has_overlap(other)
            for one, other in itertools.combinations(specs, 2)
            if tensor.numel()
        ):
            return f"of {name} some elements count twice, and others not at all"
    return None
