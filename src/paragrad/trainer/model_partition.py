"""Holding: what a rank holds of a model that is cut, and the optimizer over it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine import layout
from paragrad.engine.layout import Layout, ShardSpec
from paragrad.engine.model_shard import ModelShard, PassContext
from paragrad.engine.optimizer.update_probe import find_step_hook, find_update_granularity
from paragrad.engine.optimizer.update_slices import FOREACH_OPTIMIZERS
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state import shared_initialization
from paragrad.engine.state.values import is_same_value
from paragrad.errors import StepFailed
from paragrad.jobs.job import TRAINED_MODELS, Job
from paragrad.jobs.loss import LossModule
from paragrad.parallel.registry import (
    build_model_shard,
    has_model_shards,
    is_builtin_technique,
    select_factors,
)
from paragrad.runtime.world import CPU, World
from paragrad.strategies.strategy import (
    PER_ELEMENT,
    PER_TENSOR,
    UPDATE_GRANULARITIES,
    WHOLE_MODEL,
    Strategy,
)
from paragrad.trainer.pace import Pace
from paragrad.trainer.parameter_access import refuse_parameter_views
from paragrad.trainer.settings import Settings


@dataclass(frozen=True)
class ModelPartition:
    """module: this rank's part of the model, and the loss;  layout: where it stands in the
    whole;  hollow: the whole, without values;  draws: with the number that each random call of
    the part has in the whole;  chose: as in Share;  groups: of the optimizer, the serial names
    of its parameters;  around: as in Share.
    """

    module: LossModule
    layout: Layout
    empty_model: nn.Module
    draws: Draws
    choices: tuple[tuple[str, str, str], ...]
    groups: list[list[str]]
    contexts: tuple[PassContext, ...] = ()


def place_rank(strategy: Strategy, world: World) -> World:
    """Where this rank stands: among the workers, in their axes, or among the servers, which are
    the last ranks. Collective.
    """
    if not strategy.servers:
        return world.add_axes(*strategy.axes)
    # workers come and go, and are each in a world of their own
    if world.size == 1:
        return world
    if world.size == strategy.size - strategy.servers:  # servers are in none
        return world.add_axes(*strategy.axes)
    workers = world.size - strategy.servers
    found = world.split_ranks([range(workers), range(workers, world.size)])
    assert found is not None
    return found if strategy.is_server(world.rank) else found.add_axes(*strategy.axes)


def is_shared_per_host(strategy: Strategy, world: World) -> bool:
    """Do the ranks of one host have the whole model's values in one place, until it is cut?"""
    return has_model_shards(strategy) and world.size > 1 and world.device.type == "cpu"


def build_trainer_arguments(
    world: World, job: Job, strategy: Strategy, settings: Settings
) -> dict[str, Any]:
    """What a Trainer is made of where it trains a job: model, optimizer and all that the job
    says; what servers hold lies where messages are sent from. Collective.
    """
    if strategy.servers and world.size == strategy.size and strategy.is_server(world.rank):
        world = replace(world, device=CPU)
    if is_shared_per_host(strategy, world):
        begun = shared_initialization.build_shared_model(world, job.build_model_to_train)
        TRAINED_MODELS.add(begun.model)
    else:
        begun = shared_initialization.InitialModel(job.build_model_to_train().to(world.device))
    optimizer = job.optimizer(begun.model.parameters())
    return {
        "world": world,
        "model": begun.model,
        "loss": job.build_loss(world.device),
        "optimizer": optimizer,
        "seed": job.seed,
        "loss_checked": True,
        "scheduler": job.scheduler(optimizer) if job.scheduler else None,
        "clip_norm": job.clip_norm,
        "autocast": job.autocast,
        "collate": job.collate,
        "dtype": job.parameter_dtype,
        "initial_model": begun,
        "exchange_options": settings.exchange_options,
        "reverse": settings.reverse,
        "skip_first_step_check": settings.skip_first_step_check,
        "noise_interval": settings.noise_scale or 0,
        "has_tests": job.test is not None,
        "pace": Pace(settings.slow_ranks, job.seed, world.rank, world.device.type != "cpu"),
    }


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
    """Cut a model, and let the optimizer hold this rank's part. Collective. example: inputs of
    some samples; looks: as share_of has them;  whole_too: the whole model stays as it is beside
    it.

    Raises StepFailed where the parts do not make up the model, or where the optimizer cannot
    update parts.
    """
    kind = find_update_granularity(
        optimizer, known_elementwise=type(optimizer) in FOREACH_OPTIMIZERS
    )
    refuse_parameter_views(module.model)
    parameters = dict(module.model.named_parameters())
    if hooked := [
        name
        for name, each in parameters.items()
        if each._backward_hooks or each._post_accumulate_grad_hooks
    ]:
        raise StepFailed(
            f"{strategy} cuts it, and it has a hook, which its parts would not have; hook the "
            f"module",
            tensor=", ".join(hooked[:3]),
        )
    # by ours the values are; others' may write to them
    untouched = all(map(is_builtin_technique, select_factors(strategy, "shard_model")))
    twin = shared_initialization.copy_modules if untouched else copy.deepcopy
    hollow = layout.build_empty_model(module.model)
    model = twin(module.model) if keep_whole else module.model
    serial = {
        **parameters,
        **{name: buffer.clone() for name, buffer in module.model.named_buffers()},
    }
    share = build_model_shard(strategy, model, example_inputs, world, inspections)
    shared_initialization.make_values_private(share.model)
    if draws.other_generators and share.draw_calls is not None:
        raise StepFailed(
            f"the model draws from {', '.join(draws.other_generators)}, and in parts its calls are "
            f"others; "
            f"draw by torch, "
            f"or in the dataset, or train without {strategy}"
        )
    if share.draw_calls is not None and not all(
        call in range(len(draws.calls)) for call in share.draw_calls
    ):
        raise StepFailed(
            f"{strategy} gives the random calls of a part the numbers {list(share.draw_calls)}, "
            f"and the "
            f"model's are "
            f"0 to {len(draws.calls) - 1}"
        )
    own = Layout(
        world.select_axes([axis.name for axis in world.axes if axis.divides != "samples"]),
        share.specs,
        list(serial),
        share.has_output,
    )
    _check_partition(strategy, own, share, serial, optimizer, kind)
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [
        [names[parameter] for parameter in group["params"]] for group in optimizer.param_groups
    ]
    held: dict[Tensor, list[tuple[ShardSpec, Tensor]]] = {
        parameter: [] for parameter in parameters.values()
    }
    for name, parameter in share.model.named_parameters():
        held[parameters[share.specs[name].name]].append((share.specs[name], parameter))
    layout.install_shards(optimizer, held)
    return ModelPartition(
        module.wrap_model(share.model),
        own,
        hollow,
        replace(draws, serial_calls=share.draw_calls),
        share.choices,
        groups,
        share.contexts,
    )


def check_loss_ranks(weights: list[float], loss_rank_count: int) -> None:
    """Of the ranks of a replica, givers first: those that say so have the loss, and no others.
    Raises StepFailed.
    """
    if any(weight != weights[0] for weight in weights[:loss_rank_count]) or any(
        weights[loss_rank_count:]
    ):
        raise StepFailed(
            f"of the ranks of one replica {loss_rank_count} say that they give the loss, and they "
            f"are not "
            f"those that have "
            f"one (weights {weights}, those of givers first); mend Share(gives=)"
        )


def _check_partition(
    strategy: Strategy,
    layout: Layout,
    shard: ModelShard,
    serial: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    granularity: str,
) -> None:
    """Every local tensor is a part of a serial one, every element counts once, and the
    optimizer updates parts. Collective.
    """
    layout.output_rank_count = int(layout.world.all_reduce(torch.tensor(float(shard.has_output))))
    every = layout.world.gather_objects(
        (
            _find_wrong_tensor(shard, serial),
            [replace(held, gradient_worlds=()) for held in shard.specs.values()],
        )
    )
    told = next(filter(None, (wrong for wrong, *_ in every)), None)
    if every and not told:
        told = _find_uncounted_tensor(
            [held for *_, helds in every for held in helds if held.is_primary], serial
        )
    if every and not told and not layout.output_rank_count:
        told = "no rank gives the output and the loss"
    if told := layout.world.broadcast_object(told):
        raise StepFailed(
            f"{strategy} cuts the model wrongly: {told}; every element of every parameter and "
            f"buffer is to be "
            "held, and to count on one rank of a replica"
        )
    parts = layout.world.all_reduce(
        torch.tensor(float(any(held.where is not None for held in shard.specs.values()))), "MAX"
    )
    refuse_unfit_optimizer(strategy, optimizer, granularity, PER_ELEMENT if parts else PER_TENSOR)


def refuse_unfit_optimizer(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    granularity: str,
    available_granularity: str,
) -> None:
    """Raises StepFailed where an optimizer, which updates by that kind, wants more together
    than a rank has (ELEMENT or TENSOR: one that has a hook, or a list of its own, knows the
    parameters of the model, and not those of a part).
    """
    if beside := find_step_hook(optimizer):
        raise StepFailed(
            f"{type(optimizer).__name__} has {beside}, which may look at parameters that are on "
            f"another rank, for "
            f"{strategy} cuts the model; do what it does in the step() of an optimizer of your "
            f"own, or train "
            f"without {strategy}"
        )
    if UPDATE_GRANULARITIES.index(granularity) > UPDATE_GRANULARITIES.index(available_granularity):
        wants = "all parameters" if granularity == WHOLE_MODEL else "whole tensors"
        has, by = (
            ("cuts them", "element by element")
            if available_granularity == PER_ELEMENT
            else ("has them on several ranks", "each tensor by itself")
        )
        raise StepFailed(
            f"{type(optimizer).__name__} wants {wants} together (tried on a small copy), and "
            f"{strategy} {has}; "
            f"use one that updates {by}, such as Adam"
        )


def _find_wrong_tensor(shard: ModelShard, serial: Mapping[str, Tensor]) -> str | None:
    """What a local tensor is not, of what it says."""
    local = {**dict(shard.model.named_parameters()), **dict(shard.model.named_buffers())}
    if strange := [name for name in shard.specs if name not in local]:
        return f"{strange[0]} is said to be held, and the part has no such parameter or buffer"
    for name, tensor in local.items():
        if (held := shard.specs.get(name)) is None:
            return f"{name} is held, and of which tensor it is a part is not said"
        whole = serial[held.name]
        if whole.shape != held.shape or held.extract_shard(whole).shape != tensor.shape:
            return (
                f"{name} has the shape {tuple(tensor.shape)}, and what it says to hold of "
                f"{held.name}, whole "
                f"{tuple(whole.shape)}, has another"
            )
        if not is_same_value(held.extract_shard(whole), tensor.detach()):
            return f"{name} has other values than what it says to hold of {held.name}"
        if tensor.requires_grad != whole.requires_grad:
            return (
                f"{name} is {'trained' if tensor.requires_grad else 'frozen'}, and {held.name} "
                f"of the model is not"
            )
        if held.gradient_worlds and not isinstance(tensor, nn.Parameter):
            return f"{name} has owners and is a buffer, which has no gradient"
    return None


def _find_uncounted_tensor(
    counted_specs: list[ShardSpec], serial: Mapping[str, Tensor]
) -> str | None:
    """A tensor of which an element counts nowhere, or twice."""
    for name, tensor in serial.items():
        parts = [held for held in counted_specs if held.name == name]
        found = sum(held.extract_shard(tensor).numel() for held in parts)
        if found != tensor.numel():
            return f"of the {tensor.numel()} elements of {name} {found} count"
        if any(
            one.has_overlap(other)
            for one, other in itertools.combinations(parts, 2)
            if tensor.numel()
        ):
            return f"of {name} some elements count twice, and others not at all"
    return None
