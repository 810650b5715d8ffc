"""Layout: which part of which serial tensor a rank holds, and the serial model put together again.

Written once for all techniques that cut: from it follow checkpoints, the comparison with one worker, the norm of gradients,
the gradients of what several ranks own, and who tells the loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.errors import StepFailed
from paragrad.world.world import World

Box = tuple[slice, ...]                     # start to stop along the first dimensions of a tensor; the others whole
State = dict[str, dict[str, Any]]           # an optimizer's, by the parameter's name, then by what


@dataclass(frozen=True)
class Held:
    """What a local tensor holds of a serial one, of that name and shape.

    where: all of it (None), elements of it in a row (a range), or boxes, which follow each other along `dim` of the local
    tensor (the heads of this rank in a fused qkv are three);  counts: this copy is the one that counts, in norms, bytes and
    files: of every element that of exactly one rank does;  owners: worlds over which its gradient is still to be summed.
    """
    name: str
    shape: tuple[int, ...]
    where: range | tuple[Box, ...] | None = None
    dim: int = 0
    counts: bool = True
    owners: tuple[World, ...] = ()

    def of(self, serial: Tensor) -> Tensor:
        """The part, out of the serial tensor; a copy."""
        if self.where is None:
            return serial.detach().clone()
        if isinstance(self.where, range):
            return serial.detach().reshape(-1)[self.where.start:self.where.stop].clone()
        return torch.cat([serial.detach()[box] for box in self.where], self.dim)

    def put(self, part: Tensor, serial: Tensor) -> None:
        """The part, into its place in the serial tensor."""
        if self.where is None:
            serial.copy_(part)
        elif isinstance(self.where, range):
            serial.view(-1)[self.where.start:self.where.stop] = part
        else:
            places = [serial[box] for box in self.where]
            for place, each in zip(places, part.split([place.shape[self.dim] for place in places], self.dim), strict=True):
                place.copy_(each)

    def within(self, outer: Held) -> Held:
        """The same in terms of the model that an outer cut was given, where this one cut what that one left."""
        if self.where is not None and outer.where is not None:
            raise StepFailed("two cuts divide it; leave one of them out", tensor=outer.name)
        cut = self if outer.where is None else outer
        return Held(outer.name, outer.shape, cut.where, cut.dim, self.counts and outer.counts, self.owners + outer.owners)


def together(parts: Iterable[tuple[Held, Tensor | None]]) -> dict[str, Tensor | None]:
    """Serial tensors by name, from parts; None where no part of one is there."""
    found: dict[str, Tensor | None] = {}
    for held, part in parts:
        serial = found.setdefault(held.name, None)
        if part is not None:
            if serial is None:
                serial = found[held.name] = torch.zeros(held.shape, dtype=part.dtype, device=part.device)
            held.put(part, serial)
    return found


def state_together(parts: Iterable[tuple[Held, dict[str, Any]]]) -> State:
    """An optimizer's state in serial shapes, from that of parts; numbers are those of any part."""
    found: State = {}
    tensors = []
    for held, values in parts:
        for what, value in values.items():
            if held.where is None or not isinstance(value, Tensor) or not value.dim():
                found.setdefault(held.name, {})[what] = value
            else:
                tensors.append((replace(held, name=f"{held.name}/{what}"), value))
    for name, value in together(tensors).items():
        parameter, _, what = name.rpartition("/")
        found.setdefault(parameter, {})[what] = value
    return found


def hold(optimizer: torch.optim.Optimizer, held: Mapping[Tensor, Sequence[tuple[Held, Tensor]]]) -> None:
    """Let an optimizer hold parts, and their part of the state, instead of parameters: {parameter: [(which, the part)]}."""
    before, optimizer.state = optimizer.state, type(optimizer.state)(dict)
    for group in optimizer.param_groups:
        pairs = [(parameter, *each) for parameter in group["params"] for each in held.get(parameter, ())]
        for parameter, which, part in pairs:
            if parameter in before:
                optimizer.state[part] = {what: which.of(value) if isinstance(value, Tensor) and value.dim() else value
                                         for what, value in before[parameter].items()}
        group["params"] = [part for *_, part in pairs]


class Layout:
    """What this rank holds of a model, by local name.

    world: the ranks that hold one replica together;  serial: the names of the serial model's tensors;  gives: the output and
    the loss are on this rank. An uncut model is a layout in a world of one.
    """

    def __init__(self, world: World | None = None, held: Mapping[str, Held] | None = None, serial: Sequence[str] = (),
                 gives: bool = True) -> None:
        self.world, self.held, self.serial, self.gives = world or World(), dict(held or {}), list(serial), gives

    @property
    def cut(self) -> bool:
        return self.world.size > 1

    def whole(self, tensors: Mapping[str, Tensor | None], everywhere: bool = True) -> dict[str, Tensor | None]:
        """The serial tensors of which these are the local ones, on every rank, or on the first alone. Collective."""
        if not self.cut:
            return dict(tensors)
        told = self.world.collected([(replace(self.held[name], owners=()), _sent(tensor))
                                     for name, tensor in tensors.items() if self.held[name].counts])
        found = together(each for parts in told for each in parts)
        found = self.world.agreed(found) if everywhere else found
        return {name: None if (tensor := found[name]) is None else tensor.to(self.world.device)
                for name in self.serial if name in found}

    def state(self, state: State) -> State:
        """An optimizer's state in serial shapes, on the first rank. Collective."""
        if not self.cut:
            return state
        told = self.world.collected([
            (replace(self.held[name], owners=()), {what: _sent(value) for what, value in values.items()})
            for name, values in state.items() if self.held[name].counts])
        return state_together(each for parts in told for each in parts)

    def norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        """The 2-norm of every serial tensor of which these are the local ones. Collective."""
        squares = dict.fromkeys(self.serial, 0.0)
        for name, tensor in tensors.items():
            if tensor is not None and self.held[name].counts:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                squares[self.held[name].name] += float(torch.linalg.vector_norm(tensor, dtype=wide)) ** 2
        sums = self.world.all_reduced(torch.tensor([*squares.values()], dtype=torch.float64)).sqrt()
        return dict(zip(squares, sums.tolist(), strict=True))

    def clip(self, parameters: Mapping[str, Tensor], most: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, by the norm of the serial gradients. Collective."""
        if not self.cut:
            nn.utils.clip_grad_norm_(parameters.values(), most)
            return
        norms = self.norms({name: parameter.grad for name, parameter in parameters.items()})
        total = torch.tensor(math.sqrt(sum(norm**2 for norm in norms.values())), dtype=torch.float64)
        nn.utils.clip_grads_with_norm_(parameters.values(), most, total)

    def sum_owned(self, parameters: Mapping[str, Tensor]) -> None:
        """Gradients of what several ranks own become their sum. Collective."""
        for name, held in sorted(self.held.items(), key=lambda item: item[1].name):     # all owners in one order
            for world in held.owners:
                parameter = parameters[name]
                there = parameter.grad is not None
                mine = parameter.grad if there else torch.zeros_like(parameter)
                told = world.all_reduced(torch.cat([mine.reshape(-1), mine.new_tensor([float(there)])]))
                if there or told[-1].real > 0:
                    parameter.grad = told[:-1].view_as(parameter)

    def told(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks that hold this replica, first of those that have the loss. Collective."""
        if not self.cut:
            return [list(numbers)]
        every = [each.tolist() for each in self.world.gathered(torch.tensor([not self.gives, *numbers], dtype=torch.float64))]
        return [each[1:] for each in sorted(every, key=lambda each: each[0])]


def _sent(value: Any) -> Any:
    """A tensor as it goes to another process: through the host, and without what it is a view of."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def hollow(model: nn.Module) -> nn.Module:
    """The same modules, their parameters and buffers without values."""
    empty: dict[int, Any] = {id(each): nn.Parameter(each.to("meta"), requires_grad=each.requires_grad)
                             for each in model.parameters()}
    empty |= {id(each): each.to("meta") for each in model.buffers()}
    return copy.deepcopy(model, empty)


def filled(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> nn.Module:
    """A hollow model with values: those under a tensor's first name are under its others too."""
    filled = copy.deepcopy(model)
    first: dict[int, str] = {}
    values = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        value = tensors.get(first.setdefault(id(tensor), name))
        if value is not None:
            values[name] = value
    filled.load_state_dict(values, strict=False, assign=True)
    return filled
