"""Layout: which part of which serial tensor a rank holds, and the serial model put together
again.

Written once for all techniques that cut: from it follow checkpoints, the comparison with one
worker, the norm of gradients, the gradients of what several ranks own, and who tells the loss.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.optimizer.optimizer_state import beside_parameters
from paragrad.engine.state.empty_parameter import Vacant
from paragrad.errors import StepFailed
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.runtime.world import World

# start to stop along the first dimensions of a tensor; the others whole
Box = tuple[slice, ...]
# an optimizer's, by the parameter's name, then by what
State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Held:
    """What a local tensor holds of a serial one, of that name and shape.

    where: all of it (None), elements of it in a row (a range), or boxes, which follow each
    other along `dim` of the local tensor (the heads of this rank in a fused qkv are three);
    counts: this copy is the one that counts, in norms, bytes and files: of every element that
    of exactly one rank does;  owners: worlds over which its gradient is still to be summed.
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
            return serial.detach().reshape(-1)[self.where.start : self.where.stop].clone()
        return torch.cat([serial.detach()[box] for box in self.where], self.dim)

    def put(self, part: Tensor, serial: Tensor) -> None:
        """The part, into its place in the serial tensor."""
        if self.where is None:
            serial.copy_(part)
        elif isinstance(self.where, range):
            serial.view(-1)[self.where.start : self.where.stop] = part
        else:
            places = [serial[box] for box in self.where]
            for place, each in zip(
                places,
                part.split([place.shape[self.dim] for place in places], self.dim),
                strict=True,
            ):
                place.copy_(each)

    def after(self, before: Held) -> Held:
        """The same in terms of the serial model, where this is a part of what an earlier cut
        left of it.
        """
        if self.where is not None and before.where is not None:
            raise StepFailed("two cuts divide it; leave one of them out", tensor=before.name)
        cut = self if before.where is None else before
        return Held(
            before.name,
            before.shape,
            cut.where,
            cut.dim,
            self.counts and before.counts,
            self.owners + before.owners,
        )

    def overlaps(self, other: Held) -> bool:
        """Do two parts of one tensor have an element in common?"""
        if self.where is None or other.where is None:
            return True
        if isinstance(self.where, range) and isinstance(other.where, range):
            return max(self.where.start, other.where.start) < min(self.where.stop, other.where.stop)
        if isinstance(self.where, range) or isinstance(other.where, range):
            raise StepFailed(
                "one rank holds a range of it and another one boxes; hold it alike everywhere",
                tensor=self.name,
            )
        return any(
            all(
                max(a.start or 0, b.start or 0) < min(_stop(a, size), _stop(b, size))
                for a, b, size in zip(one, two, self.shape, strict=False)
            )
            for one in self.where
            for two in other.where
        )


def _stop(part: slice, size: int) -> int:
    return size if part.stop is None else min(int(part.stop), size)


def together(parts: Iterable[tuple[Held, Tensor | None]]) -> dict[str, Tensor | None]:
    """Serial tensors by name, from parts; None where no part of one is there."""
    found: dict[str, Tensor | None] = {}
    for held, part in parts:
        serial = found.setdefault(held.name, None)
        if part is not None:
            if serial is None:
                serial = torch.zeros(held.shape, dtype=part.dtype, device=part.device)
                found[held.name] = serial
            try:
                held.put(part, serial)
            except RuntimeError as error:
                raise StepFailed(
                    f"a part of it has the shape {tuple(part.shape)} now, and had another one when "
                    f"the model was "
                    "cut",
                    tensor=held.name,
                ) from error
    return found


def state_together(parts: Iterable[tuple[Held, dict[str, Any]]]) -> State:
    """An optimizer's state in serial shapes, from that of parts; numbers are those of any
    part.
    """
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


def hand_over(
    optimizer: torch.optim.Optimizer, held: Mapping[Tensor, Sequence[tuple[Held, Tensor]]]
) -> None:
    """Give an optimizer parts, and their part of the state, in place of parameters: {parameter:
    [(which, the part)]}.
    """
    before = optimizer.state
    optimizer.state = type(optimizer.state)(dict, beside_parameters(optimizer))
    for group in optimizer.param_groups:
        pairs = [
            (parameter, *each) for parameter in group["params"] for each in held.get(parameter, ())
        ]
        for parameter, which, part in pairs:
            if parameter in before:
                optimizer.state[part] = {
                    what: which.of(value)
                    if isinstance(value, Tensor) and value.dim()
                    else copy.deepcopy(value)
                    for what, value in before[parameter].items()
                }
        group["params"] = [part for *_, part in pairs]


class Layout:
    """What this rank holds of a model, by local name.

    world: the ranks that hold one replica together;  serial: the names of the serial model's
    tensors;  gives: the output and the loss are on this rank. An uncut model is a layout too,
    of no parts. To be read: `sent`, bytes of its own messages; `givers`: ranks of a replica
    that have the loss.
    """

    def __init__(
        self,
        world: World | None = None,
        held: Mapping[str, Held] | None = None,
        serial: Sequence[str] = (),
        gives: bool = True,
    ) -> None:
        self.world = world or World()
        self.held = dict(held or {})
        self.serial = list(serial)
        self.gives = gives
        self.cut = held is not None
        self.sent = 0
        self.givers = 1
        # serial parameters of which several ranks hold a part, once known
        self.divided: list[str] | None = None

    def whole(
        self, tensors: Mapping[str, Tensor | None], everywhere: bool = True
    ) -> dict[str, Tensor | None]:
        """The serial tensors of which these are the local ones, on every rank, or on the first
        alone. Collective.
        """
        if not self.cut:
            return dict(tensors)
        if late := [name for name in tensors if name not in self.held]:
            raise StepFailed(
                "it was not there when the model was cut, and has no place in the whole; make it "
                "in the "
                "constructor, or train it with data(n)",
                tensor=", ".join(late[:3]),
            )
        told = self.world.collected(
            [
                (replace(self.held[name], owners=()), on_host(tensor))
                for name, tensor in tensors.items()
                if self.held[name].counts
            ]
        )
        found = together(each for parts in told for each in parts)
        found = self.world.agreed(found) if everywhere else found
        return {
            name: None if (tensor := found[name]) is None else tensor.to(self.world.device)
            for name in self.serial
            if name in found
        }

    def state(self, state: State) -> State:
        """An optimizer's state in serial shapes, on the first rank. Collective."""
        if not self.cut:
            return state
        told = self.world.collected(
            [
                (
                    replace(self.held[name], owners=()),
                    {what: on_host(value) for what, value in values.items()},
                )
                for name, values in state.items()
                if self.held[name].counts
            ]
        )
        return state_together(each for parts in told for each in parts)

    def parted(self, state: State) -> State:
        """What of a state in serial shapes belongs to this rank's parts."""
        if not self.cut:
            return state
        return {
            name: {what: held.of(value) for what, value in state[held.name].items()}
            for name, held in self.held.items()
            if held.name in state
        }

    def norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        """The 2-norm of every serial tensor of which these are the local ones. Collective."""
        squares = dict.fromkeys(self.serial, 0.0)
        for name, tensor in tensors.items():
            if tensor is not None and self.held[name].counts:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                squares[self.held[name].name] += (
                    float(torch.linalg.vector_norm(tensor, dtype=wide)) ** 2
                )
        sums = self._all_reduced(torch.tensor([*squares.values()], dtype=torch.float64)).sqrt()
        return dict(zip(squares, sums.tolist(), strict=True))

    def clip(self, parameters: Mapping[str, Tensor], most: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, by the norm of the serial gradients.
        Collective.
        """
        if not self.cut:
            nn.utils.clip_grad_norm_(parameters.values(), most)
            return
        norms = self.norms({name: parameter.grad for name, parameter in parameters.items()})
        total = torch.tensor(
            math.sqrt(sum(norm**2 for norm in norms.values())), dtype=torch.float64
        )
        nn.utils.clip_grads_with_norm_(parameters.values(), most, total)

    def sum_owned(self, parameters: Mapping[str, Tensor]) -> None:
        """Gradients of what several ranks own become their sum; a part without one is zero
        where another part of the same serial tensor has one, as in serial. Collective.
        """
        if not self.cut:
            return
        if self.divided is None:
            counted = Counter(self.held[name].name for name in parameters)
            holders = self._all_reduced(
                torch.tensor([float(counted[name]) for name in self.serial])
            ).tolist()
            self.divided = [
                name for name, count in zip(self.serial, holders, strict=True) if count > 1
            ]
        if not self.divided:
            return
        there = dict.fromkeys(self.divided, 0.0)
        mine = {
            name: parameter
            for name, parameter in parameters.items()
            if self.held[name].name in there
        }
        for name, parameter in mine.items():
            if parameter.grad is not None:
                there[self.held[name].name] = 1.0
        used = dict(
            zip(
                there,
                self._all_reduced(torch.tensor([*there.values()]), "MAX").tolist(),
                strict=True,
            )
        )
        # as all owners do
        for name, parameter in sorted(mine.items(), key=lambda item: self.held[item[0]].name):
            if not used[self.held[name].name]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for world in self.held[name].owners:
                parameter.grad = self._all_reduced(parameter.grad, among=world)

    def copied(self, parameters: Mapping[str, Tensor], replicas: int) -> Mapping[str, Tensor]:
        """Those of a model that is cut of which other ranks hold copies: of this replica, or of
        so many.
        """
        return {
            name: each
            for name, each in parameters.items()
            if self.cut and (replicas > 1 or self.held[name].owners)
        }

    def unequal(
        self, tensors: Mapping[str, Tensor | None], world: World | None = None
    ) -> tuple[int, int, str] | None:
        """The first two ranks that hold the same part of a serial tensor with other bits, and
        its name; None. Collective.

        world: of all replicas, otherwise of this one.
        """
        world = world or self.world
        mine = {}
        for name, tensor in tensors.items():
            held = self.held.get(name)
            bits = (
                b""
                if tensor is None
                else tensor.detach()
                .reshape(-1)
                .contiguous()
                .view(torch.uint8)
                .cpu()
                .numpy()
                .tobytes()
            )
            mine[held.name if held else name, str((held.where, held.dim)) if held else ""] = (
                hashlib.sha256(bits).digest()
            )
        first: dict[tuple[str, str], tuple[int, bytes]] = {}
        found = None
        for rank, theirs in enumerate(world.collected(mine)):
            for key, digest in theirs.items():
                holder, seen = first.setdefault(key, (rank, digest))
                found = (holder, rank, key[0]) if found is None and seen != digest else found
        return world.agreed(found)  # type: ignore[no-any-return]

    def told(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks that hold this replica, first of those that have the loss.
        Collective.
        """
        if not self.cut:
            return [list(numbers)]
        mine = torch.tensor([not self.gives, *numbers], dtype=torch.float64)
        self.sent += computed_bytes("all_gather", mine.nbytes, self.world.size)
        every = [each.tolist() for each in self.world.gathered(mine)]
        return [each[1:] for each in sorted(every, key=lambda each: each[0])]

    def _all_reduced(
        self, tensor: Tensor, operation: str = "SUM", among: World | None = None
    ) -> Tensor:
        world = among or self.world
        self.sent += computed_bytes("all_reduce", tensor.nbytes, world.size)
        return world.all_reduced(tensor, operation)


def on_host(value: Any) -> Any:
    """A tensor as it goes to another process: through the host, and without what it is a view
    of.
    """
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def hollow(model: nn.Module) -> nn.Module:
    """The same modules, their parameters and buffers without values. Raises StepFailed where
    they keep what torch does not copy.
    """
    try:
        return copy.deepcopy(model, dict(_empty(model)))
    except RuntimeError as error:
        raise StepFailed(
            f"the model cannot be copied, as a cut wants it: {error}. Keep nothing in attributes "
            f"that is "
            "computed of parameters (torch.nn.utils.parametrizations.weight_norm, not "
            "torch.nn.utils.weight_norm)"
            ", or train it with data(n)"
        ) from error


def vacate(model: nn.Module) -> None:
    """Take the values out of a model: who asks for some is told so."""
    _exchange(
        model,
        {
            id(each): Vacant.of(each, name)
            for name, each in (*model.named_parameters(), *model.named_buffers())
        },
    )


def fill(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> dict[str, nn.Parameter]:
    """Give a vacated model values, by a tensor's first name, but for what others put in the
    place of one since; its parameters that have some now.
    """
    values: dict[int, Tensor] = {}
    found: dict[str, nn.Parameter] = {}
    for name, each in model.named_buffers():
        if (value := tensors.get(name)) is not None and each.is_meta:
            values[id(each)] = value
    for name, parameter in model.named_parameters():
        if (value := tensors.get(name)) is not None and parameter.is_meta:
            values[id(parameter)] = found[name] = nn.Parameter(
                value, requires_grad=parameter.requires_grad
            )
    _exchange(model, values)
    return found


def _empty(model: nn.Module) -> dict[int, Tensor]:
    """What stands for each parameter and buffer of a model, without values."""
    return {
        **{
            id(each): nn.Parameter(each.to("meta"), requires_grad=each.requires_grad)
            for each in model.parameters()
        },
        **{id(each): each.to("meta") for each in model.buffers()},
    }


def _exchange(model: nn.Module, instead: Mapping[int, Tensor]) -> None:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if id(tensor) in instead:
                    # by which an LSTM hears of it
                    setattr(module, name, instead[id(tensor)])


def filled(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> nn.Module:
    """A hollow model with values: those under a tensor's first name are under its others
    too.
    """
    whole = copy.deepcopy(model)
    first: dict[int, str] = {}
    values = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        value = tensors.get(first.setdefault(id(tensor), name))
        if value is not None:
            values[name] = value
    whole.load_state_dict(values, strict=False, assign=True)
    return whole
