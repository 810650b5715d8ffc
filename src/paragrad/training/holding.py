"""Holding: what a rank holds of a model that is cut, and the optimizer over it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed
from paragrad.strategies.strategy import Strategy
from paragrad.techniques import layout
from paragrad.techniques.cut import Share
from paragrad.techniques.draws import Draws
from paragrad.techniques.layout import Held, Layout
from paragrad.techniques.slices import FOREACH
from paragrad.techniques.table import share_of
from paragrad.techniques.updating import ALL, ELEMENT, updates_by
from paragrad.world.world import World


@dataclass(frozen=True)
class Holding:
    """module: this rank's part of the model, and the loss;  layout: where it stands in the whole;  hollow: the whole, without
    values;  draws: with the number that each random call of the part has in the whole."""
    module: Summed
    layout: Layout
    hollow: nn.Module
    draws: Draws


def placed(strategy: Strategy, world: World) -> World:
    """Where this rank stands: among the workers, in their axes, or among the servers, which are the last ranks. Collective."""
    if not strategy.servers:
        return world.with_axes(*strategy.axes)
    workers = world.size - strategy.servers
    found = world.among([range(workers), range(workers, world.size)])
    assert found is not None
    return found if world.rank >= workers else found.with_axes(*strategy.axes)


def divided(strategy: Strategy, module: Summed, optimizer: torch.optim.Optimizer, draws: Draws, world: World, example: Any,
            whole_too: bool) -> Holding:
    """Cut a model, and let the optimizer hold this rank's part. Collective. example: inputs of some samples;  whole_too: the
    whole model stays as it is beside it.

    Raises StepFailed where the parts do not make up the model, or where the optimizer cannot update parts.
    """
    kind = updates_by(optimizer, known=type(optimizer) in FOREACH)
    parameters, hollow = dict(module.model.named_parameters()), layout.hollow(module.model)
    serial = {**parameters, **dict(module.model.named_buffers())}
    share = share_of(strategy, copy.deepcopy(module.model) if whole_too else module.model, example, world)
    own = Layout(world.along([axis.name for axis in world.axes if axis.divides != "samples"]), share.held, list(serial),
                 share.gives)
    _check(strategy, own, share, serial, optimizer, kind)
    held: dict[Tensor, list[tuple[Held, Tensor]]] = {parameter: [] for parameter in parameters.values()}
    for name, parameter in share.model.named_parameters():
        held[parameters[share.held[name].name]].append((share.held[name], parameter))
    layout.hold(optimizer, held)
    return Holding(module.around(share.model), own, hollow, replace(draws, serial=share.draws))


def _check(strategy: Strategy, own: Layout, share: Share, serial: Mapping[str, Tensor], optimizer: torch.optim.Optimizer,
           kind: str) -> None:
    """Every local tensor is a part of a serial one, every element counts once, and the optimizer updates parts. Collective."""
    counted, wrong = dict.fromkeys(serial, 0), None
    for name, tensor in [*share.model.named_parameters(), *share.model.named_buffers()]:
        held = share.held.get(name)
        if held is None or held.name not in serial:
            wrong = wrong or f"{name} is held as {held and held.name}, which the model does not have"
        elif serial[held.name].shape != held.shape or held.of(serial[held.name]).shape != tensor.shape:
            wrong = wrong or (f"{name} has the shape {tuple(tensor.shape)}, and what it says to hold of {held.name}, whole "
                              f"{tuple(serial[held.name].shape)}, has another")
        elif held.counts:
            counted[held.name] += tensor.numel()
    sums = own.world.all_reduced(torch.tensor([*counted.values()], dtype=torch.float64)).tolist()
    for (name, tensor), found in zip(serial.items(), sums, strict=True):
        if found != tensor.numel():
            wrong = wrong or f"of the {tensor.numel()} elements of {name} {found:.0f} count"
    if told := own.world.agreed(next(filter(None, own.world.collected(wrong)), None)):
        raise StepFailed(f"{strategy} cuts the model wrongly: {told}; every element of every parameter and buffer is to be "
                         "held, and to count on one rank of a replica")
    parts = own.world.all_reduced(torch.tensor(float(any(held.where is not None for held in share.held.values()))), "MAX")
    if kind == ALL or (kind != ELEMENT and parts):
        raise StepFailed(f"{type(optimizer).__name__} wants {'all parameters' if kind == ALL else 'whole tensors'} together "
                         f"(tried on a small copy), and {strategy} cuts them; use one that updates element by element, such as "
                         "Adam")
