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
from paragrad.engine.layout import Held, Layout
from paragrad.engine.model_shard import Around, Share
from paragrad.engine.optimizer.update_probe import hooked, updates_by
from paragrad.engine.optimizer.update_slices import FOREACH
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state import shared_initialization
from paragrad.engine.state.values import same
from paragrad.errors import StepFailed
from paragrad.jobs.job import TRAINED, Job
from paragrad.jobs.loss import Summed
from paragrad.parallel.registry import bringing, cuts, ours, share_of
from paragrad.runtime.world import CPU, World
from paragrad.strategies.strategy import ALL, ELEMENT, KINDS, TENSOR, Strategy
from paragrad.trainer.pace import Pace
from paragrad.trainer.parameter_access import refuse_views
from paragrad.trainer.settings import Settings


@dataclass(frozen=True)
class Holding:
    """module: this rank's part of the model, and the loss;  layout: where it stands in the
    whole;  hollow: the whole, without values;  draws: with the number that each random call of
    the part has in the whole;  chose: as in Share;  groups: of the optimizer, the serial names
    of its parameters;  around: as in Share.
    """

    module: Summed
    layout: Layout
    hollow: nn.Module
    draws: Draws
    chose: tuple[tuple[str, str, str], ...]
    groups: list[list[str]]
    around: tuple[Around, ...] = ()


def placed(strategy: Strategy, world: World) -> World:
    """Where this rank stands: among the workers, in their axes, or among the servers, which are
    the last ranks. Collective.
    """
    if not strategy.servers:
        return world.with_axes(*strategy.axes)
    # workers come and go, and are each in a world of their own
    if world.size == 1:
        return world
    if world.size == strategy.size - strategy.servers:  # servers are in none
        return world.with_axes(*strategy.axes)
    workers = world.size - strategy.servers
    found = world.among([range(workers), range(workers, world.size)])
    assert found is not None
    return found if strategy.serves(world.rank) else found.with_axes(*strategy.axes)


def once_on_a_host(strategy: Strategy, world: World) -> bool:
    """Do the ranks of one host have the whole model's values in one place, until it is cut?"""
    return cuts(strategy) and world.size > 1 and world.device.type == "cpu"


def begun_of(world: World, job: Job, strategy: Strategy, settings: Settings) -> dict[str, Any]:
    """What a Trainer is made of where it trains a job: model, optimizer and all that the job
    says; what servers hold lies where messages are sent from. Collective.
    """
    if strategy.servers and world.size == strategy.size and strategy.serves(world.rank):
        world = replace(world, device=CPU)
    if once_on_a_host(strategy, world):
        begun = shared_initialization.built(world, job.model_to_train)
        TRAINED.add(begun.model)
    else:
        begun = shared_initialization.Start(job.model_to_train().to(world.device))
    optimizer = job.optimizer(begun.model.parameters())
    return {
        "world": world,
        "model": begun.model,
        "loss": job.built_loss(world.device),
        "optimizer": optimizer,
        "seed": job.seed,
        "examined": True,
        "scheduler": job.scheduler(optimizer) if job.scheduler else None,
        "clip_norm": job.clip_norm,
        "autocast": job.autocast,
        "collate": job.collate,
        "dtype": job.parameter_dtype,
        "begun": begun,
        "how": settings.how,
        "reverse": settings.reverse,
        "unchecked": settings.unchecked,
        "noise": settings.noise_scale or 0,
        "tests": job.test is not None,
        "pace": Pace(settings.slowed, job.seed, world.rank, world.device.type != "cpu"),
    }


def divided(
    strategy: Strategy,
    module: Summed,
    optimizer: torch.optim.Optimizer,
    draws: Draws,
    world: World,
    example: Any,
    looks: dict[str, Any],
    whole_too: bool,
) -> Holding:
    """Cut a model, and let the optimizer hold this rank's part. Collective. example: inputs of
    some samples; looks: as share_of has them;  whole_too: the whole model stays as it is beside
    it.

    Raises StepFailed where the parts do not make up the model, or where the optimizer cannot
    update parts.
    """
    kind = updates_by(optimizer, known=type(optimizer) in FOREACH)
    refuse_views(module.model)
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
    untouched = all(map(ours, bringing(strategy, "share")))
    twin = shared_initialization.beside if untouched else copy.deepcopy
    hollow = layout.hollow(module.model)
    model = twin(module.model) if whole_too else module.model
    serial = {
        **parameters,
        **{name: buffer.clone() for name, buffer in module.model.named_buffers()},
    }
    share = share_of(strategy, model, example, world, looks)
    shared_initialization.own(share.model)
    if draws.others and share.draws is not None:
        raise StepFailed(
            f"the model draws from {', '.join(draws.others)}, and in parts its calls are others; "
            f"draw by torch, "
            f"or in the dataset, or train without {strategy}"
        )
    if share.draws is not None and not all(call in range(len(draws.calls)) for call in share.draws):
        raise StepFailed(
            f"{strategy} gives the random calls of a part the numbers {list(share.draws)}, and the "
            f"model's are "
            f"0 to {len(draws.calls) - 1}"
        )
    own = Layout(
        world.along([axis.name for axis in world.axes if axis.divides != "samples"]),
        share.held,
        list(serial),
        share.gives,
    )
    _check(strategy, own, share, serial, optimizer, kind)
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [
        [names[parameter] for parameter in group["params"]] for group in optimizer.param_groups
    ]
    held: dict[Tensor, list[tuple[Held, Tensor]]] = {
        parameter: [] for parameter in parameters.values()
    }
    for name, parameter in share.model.named_parameters():
        held[parameters[share.held[name].name]].append((share.held[name], parameter))
    layout.hand_over(optimizer, held)
    return Holding(
        module.around(share.model),
        own,
        hollow,
        replace(draws, serial=share.draws),
        share.chose,
        groups,
        share.around,
    )


def check_given(weights: list[float], givers: int) -> None:
    """Of the ranks of a replica, givers first: those that say so have the loss, and no others.
    Raises StepFailed.
    """
    if any(weight != weights[0] for weight in weights[:givers]) or any(weights[givers:]):
        raise StepFailed(
            f"of the ranks of one replica {givers} say that they give the loss, and they are not "
            f"those that have "
            f"one (weights {weights}, those of givers first); mend Share(gives=)"
        )


def _check(
    strategy: Strategy,
    own: Layout,
    share: Share,
    serial: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    kind: str,
) -> None:
    """Every local tensor is a part of a serial one, every element counts once, and the
    optimizer updates parts. Collective.
    """
    own.givers = int(own.world.all_reduced(torch.tensor(float(share.gives))))
    every = own.world.collected(
        (_wrong(share, serial), [replace(held, owners=()) for held in share.held.values()])
    )
    told = next(filter(None, (wrong for wrong, *_ in every)), None)
    if every and not told:
        told = _uncounted([held for *_, helds in every for held in helds if held.counts], serial)
    if every and not told and not own.givers:
        told = "no rank gives the output and the loss"
    if told := own.world.agreed(told):
        raise StepFailed(
            f"{strategy} cuts the model wrongly: {told}; every element of every parameter and "
            f"buffer is to be "
            "held, and to count on one rank of a replica"
        )
    parts = own.world.all_reduced(
        torch.tensor(float(any(held.where is not None for held in share.held.values()))), "MAX"
    )
    refuse_optimizer(strategy, optimizer, kind, ELEMENT if parts else TENSOR)


def refuse_optimizer(
    strategy: Strategy, optimizer: torch.optim.Optimizer, kind: str, together: str
) -> None:
    """Raises StepFailed where an optimizer, which updates by that kind, wants more together
    than a rank has (ELEMENT or TENSOR: one that has a hook, or a list of its own, knows the
    parameters of the model, and not those of a part).
    """
    if beside := hooked(optimizer):
        raise StepFailed(
            f"{type(optimizer).__name__} has {beside}, which may look at parameters that are on "
            f"another rank, for "
            f"{strategy} cuts the model; do what it does in the step() of an optimizer of your "
            f"own, or train "
            f"without {strategy}"
        )
    if KINDS.index(kind) > KINDS.index(together):
        wants = "all parameters" if kind == ALL else "whole tensors"
        has, by = (
            ("cuts them", "element by element")
            if together == ELEMENT
            else ("has them on several ranks", "each tensor by itself")
        )
        raise StepFailed(
            f"{type(optimizer).__name__} wants {wants} together (tried on a small copy), and "
            f"{strategy} {has}; "
            f"use one that updates {by}, such as Adam"
        )


def _wrong(share: Share, serial: Mapping[str, Tensor]) -> str | None:
    """What a local tensor is not, of what it says."""
    local = {**dict(share.model.named_parameters()), **dict(share.model.named_buffers())}
    if strange := [name for name in share.held if name not in local]:
        return f"{strange[0]} is said to be held, and the part has no such parameter or buffer"
    for name, tensor in local.items():
        if (held := share.held.get(name)) is None:
            return f"{name} is held, and of which tensor it is a part is not said"
        whole = serial[held.name]
        if whole.shape != held.shape or held.of(whole).shape != tensor.shape:
            return (
                f"{name} has the shape {tuple(tensor.shape)}, and what it says to hold of "
                f"{held.name}, whole "
                f"{tuple(whole.shape)}, has another"
            )
        if not same(held.of(whole), tensor.detach()):
            return f"{name} has other values than what it says to hold of {held.name}"
        if tensor.requires_grad != whole.requires_grad:
            return (
                f"{name} is {'trained' if tensor.requires_grad else 'frozen'}, and {held.name} "
                f"of the model is not"
            )
        if held.owners and not isinstance(tensor, nn.Parameter):
            return f"{name} has owners and is a buffer, which has no gradient"
    return None


def _uncounted(counting: list[Held], serial: Mapping[str, Tensor]) -> str | None:
    """A tensor of which an element counts nowhere, or twice."""
    for name, tensor in serial.items():
        parts = [held for held in counting if held.name == name]
        found = sum(held.of(tensor).numel() for held in parts)
        if found != tensor.numel():
            return f"of the {tensor.numel()} elements of {name} {found} count"
        if any(
            one.overlaps(other) for one, other in itertools.combinations(parts, 2) if tensor.numel()
        ):
            return f"of {name} some elements count twice, and others not at all"
    return None
