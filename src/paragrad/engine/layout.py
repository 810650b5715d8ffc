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

from paragrad.engine.optimizer.optimizer_state import select_global_state
from paragrad.engine.state.empty_parameter import EmptyTensor
from paragrad.errors import StepFailed
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.runtime.world import World

# start to stop along the first dimensions of a tensor; the others whole
TensorBox = tuple[slice, ...]
# an optimizer's, by the parameter's name, then by what
OptimizerState = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ShardSpec:
    """What a local tensor holds of a serial one, of that name and shape.

    where: all of it (None), elements of it in a row (a range), or boxes, which follow each
    other along `dim` of the local tensor (the heads of this rank in a fused qkv are three);
    counts: this copy is the one that counts, in norms, bytes and files: of every element that
    of exactly one rank does;  owners: worlds over which its gradient is still to be summed.
    """

    name: str
    shape: tuple[int, ...]
    where: range | tuple[TensorBox, ...] | None = None
    dim: int = 0
    is_primary: bool = True
    gradient_worlds: tuple[World, ...] = ()

    def extract_shard(self, serial: Tensor) -> Tensor:
        """The part, out of the serial tensor; a copy."""
        if self.where is None:
            return serial.detach().clone()
        if isinstance(self.where, range):
            return serial.detach().reshape(-1)[self.where.start : self.where.stop].clone()
        return torch.cat([serial.detach()[box] for box in self.where], self.dim)

    def insert_shard(self, part: Tensor, serial: Tensor) -> None:
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

    def compose_with(self, earlier: ShardSpec) -> ShardSpec:
        """The same in terms of the serial model, where this is a part of what an earlier cut
        left of it.
        """
        if self.where is not None and earlier.where is not None:
            raise StepFailed("two cuts divide it; leave one of them out", tensor=earlier.name)
        cut = self if earlier.where is None else earlier
        return ShardSpec(
            earlier.name,
            earlier.shape,
            cut.where,
            cut.dim,
            self.is_primary and earlier.is_primary,
            self.gradient_worlds + earlier.gradient_worlds,
        )

    def has_overlap(self, other: ShardSpec) -> bool:
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
                max(a.start or 0, b.start or 0)
                < min(_get_slice_stop(a, size), _get_slice_stop(b, size))
                for a, b, size in zip(one, two, self.shape, strict=False)
            )
            for one in self.where
            for two in other.where
        )


def _get_slice_stop(part: slice, size: int) -> int:
    return size if part.stop is None else min(int(part.stop), size)


def assemble_tensors(parts: Iterable[tuple[ShardSpec, Tensor | None]]) -> dict[str, Tensor | None]:
    """Serial tensors by name, from parts; None where no part of one is there."""
    found: dict[str, Tensor | None] = {}
    for held, part in parts:
        serial = found.setdefault(held.name, None)
        if part is not None:
            if serial is None:
                serial = torch.zeros(held.shape, dtype=part.dtype, device=part.device)
                found[held.name] = serial
            try:
                held.insert_shard(part, serial)
            except RuntimeError as error:
                raise StepFailed(
                    f"a part of it has the shape {tuple(part.shape)} now, and had another one when "
                    f"the model was "
                    "cut",
                    tensor=held.name,
                ) from error
    return found


def assemble_optimizer_state(parts: Iterable[tuple[ShardSpec, dict[str, Any]]]) -> OptimizerState:
    """An optimizer's state in serial shapes, from that of parts; numbers are those of any
    part.
    """
    found: OptimizerState = {}
    tensors = []
    for held, values in parts:
        for what, value in values.items():
            if held.where is None or not isinstance(value, Tensor) or not value.dim():
                found.setdefault(held.name, {})[what] = value
            else:
                tensors.append((replace(held, name=f"{held.name}/{what}"), value))
    for name, value in assemble_tensors(tensors).items():
        parameter, _, what = name.rpartition("/")
        found.setdefault(parameter, {})[what] = value
    return found


def install_shards(
    optimizer: torch.optim.Optimizer, shards: Mapping[Tensor, Sequence[tuple[ShardSpec, Tensor]]]
) -> None:
    """Give an optimizer parts, and their part of the state, in place of parameters: {parameter:
    [(which, the part)]}.
    """
    before = optimizer.state
    optimizer.state = type(optimizer.state)(dict, select_global_state(optimizer))
    for group in optimizer.param_groups:
        pairs = [
            (parameter, *each)
            for parameter in group["params"]
            for each in shards.get(parameter, ())
        ]
        for parameter, which, part in pairs:
            if parameter in before:
                optimizer.state[part] = {
                    what: which.extract_shard(value)
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
        specs: Mapping[str, ShardSpec] | None = None,
        serial_names: Sequence[str] = (),
        has_output: bool = True,
    ) -> None:
        self.world = world or World()
        self.specs = dict(specs or {})
        self.serial_names = list(serial_names)
        self.has_output = has_output
        self.is_partitioned = specs is not None
        self.sent_bytes = 0
        self.output_rank_count = 1
        # serial parameters of which several ranks hold a part, once known
        self.divided_names: list[str] | None = None

    def gather_serial_tensors(
        self, tensors: Mapping[str, Tensor | None], on_all_ranks: bool = True
    ) -> dict[str, Tensor | None]:
        """The serial tensors of which these are the local ones, on every rank, or on the first
        alone. Collective.
        """
        if not self.is_partitioned:
            return dict(tensors)
        if late := [name for name in tensors if name not in self.specs]:
            raise StepFailed(
                "it was not there when the model was cut, and has no place in the whole; make it "
                "in the "
                "constructor, or train it with data(n)",
                tensor=", ".join(late[:3]),
            )
        told = self.world.gather_objects(
            [
                (replace(self.specs[name], gradient_worlds=()), copy_to_host(tensor))
                for name, tensor in tensors.items()
                if self.specs[name].is_primary
            ]
        )
        found = assemble_tensors(each for parts in told for each in parts)
        found = self.world.broadcast_object(found) if on_all_ranks else found
        return {
            name: None if (tensor := found[name]) is None else tensor.to(self.world.device)
            for name in self.serial_names
            if name in found
        }

    def gather_serial_state(self, state: OptimizerState) -> OptimizerState:
        """An optimizer's state in serial shapes, on the first rank. Collective."""
        if not self.is_partitioned:
            return state
        told = self.world.gather_objects(
            [
                (
                    replace(self.specs[name], gradient_worlds=()),
                    {what: copy_to_host(value) for what, value in values.items()},
                )
                for name, values in state.items()
                if self.specs[name].is_primary
            ]
        )
        return assemble_optimizer_state(each for parts in told for each in parts)

    def select_local_state(self, state: OptimizerState) -> OptimizerState:
        """What of a state in serial shapes belongs to this rank's parts."""
        if not self.is_partitioned:
            return state
        return {
            name: {what: held.extract_shard(value) for what, value in state[held.name].items()}
            for name, held in self.specs.items()
            if held.name in state
        }

    def compute_norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        """The 2-norm of every serial tensor of which these are the local ones. Collective."""
        squares = dict.fromkeys(self.serial_names, 0.0)
        for name, tensor in tensors.items():
            if tensor is not None and self.specs[name].is_primary:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                squares[self.specs[name].name] += (
                    float(torch.linalg.vector_norm(tensor, dtype=wide)) ** 2
                )
        sums = self._all_reduce(torch.tensor([*squares.values()], dtype=torch.float64)).sqrt()
        return dict(zip(squares, sums.tolist(), strict=True))

    def clip_gradients(self, parameters: Mapping[str, Tensor], max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, by the norm of the serial gradients.
        Collective.
        """
        if not self.is_partitioned:
            nn.utils.clip_grad_norm_(parameters.values(), max_norm)
            return
        norms = self.compute_norms({name: parameter.grad for name, parameter in parameters.items()})
        total = torch.tensor(
            math.sqrt(sum(norm**2 for norm in norms.values())), dtype=torch.float64
        )
        nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total)

    def sum_shared_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Gradients of what several ranks own become their sum; a part without one is zero
        where another part of the same serial tensor has one, as in serial. Collective.
        """
        if not self.is_partitioned:
            return
        if self.divided_names is None:
            counted = Counter(self.specs[name].name for name in parameters)
            holders = self._all_reduce(
                torch.tensor([float(counted[name]) for name in self.serial_names])
            ).tolist()
            self.divided_names = [
                name for name, count in zip(self.serial_names, holders, strict=True) if count > 1
            ]
        if not self.divided_names:
            return
        there = dict.fromkeys(self.divided_names, 0.0)
        mine = {
            name: parameter
            for name, parameter in parameters.items()
            if self.specs[name].name in there
        }
        for name, parameter in mine.items():
            if parameter.grad is not None:
                there[self.specs[name].name] = 1.0
        used = dict(
            zip(
                there,
                self._all_reduce(torch.tensor([*there.values()]), "MAX").tolist(),
                strict=True,
            )
        )
        # as all owners do
        for name, parameter in sorted(mine.items(), key=lambda item: self.specs[item[0]].name):
            if not used[self.specs[name].name]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for world in self.specs[name].gradient_worlds:
                parameter.grad = self._all_reduce(parameter.grad, subworld=world)

    def select_copies(
        self, parameters: Mapping[str, Tensor], replicas: int
    ) -> Mapping[str, Tensor]:
        """Those of a model that is cut of which other ranks hold copies: of this replica, or of
        so many.
        """
        return {
            name: each
            for name, each in parameters.items()
            if self.is_partitioned and (replicas > 1 or self.specs[name].gradient_worlds)
        }

    def find_unequal_copies(
        self, tensors: Mapping[str, Tensor | None], world: World | None = None
    ) -> tuple[int, int, str] | None:
        """The first two ranks that hold the same part of a serial tensor with other bits, and
        its name; None. Collective.

        world: of all replicas, otherwise of this one.
        """
        world = world or self.world
        mine = {}
        for name, tensor in tensors.items():
            held = self.specs.get(name)
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
        for rank, theirs in enumerate(world.gather_objects(mine)):
            for key, digest in theirs.items():
                holder, seen = first.setdefault(key, (rank, digest))
                found = (holder, rank, key[0]) if found is None and seen != digest else found
        return world.broadcast_object(found)  # type: ignore[no-any-return]

    def share_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks that hold this replica, first of those that have the loss.
        Collective.
        """
        if not self.is_partitioned:
            return [list(numbers)]
        mine = torch.tensor([not self.has_output, *numbers], dtype=torch.float64)
        self.sent_bytes += count_collective_bytes("all_gather", mine.nbytes, self.world.size)
        every = [each.tolist() for each in self.world.all_gather(mine)]
        return [each[1:] for each in sorted(every, key=lambda each: each[0])]

    def _all_reduce(
        self, tensor: Tensor, operation: str = "SUM", subworld: World | None = None
    ) -> Tensor:
        world = subworld or self.world
        self.sent_bytes += count_collective_bytes("all_reduce", tensor.nbytes, world.size)
        return world.all_reduce(tensor, operation)


def copy_to_host(value: Any) -> Any:
    """A tensor as it goes to another process: through the host, and without what it is a view
    of.
    """
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def build_empty_model(model: nn.Module) -> nn.Module:
    """The same modules, their parameters and buffers without values. Raises StepFailed where
    they keep what torch does not copy.
    """
    try:
        return copy.deepcopy(model, dict(_make_placeholders(model)))
    except RuntimeError as error:
        raise StepFailed(
            f"the model cannot be copied, as a cut wants it: {error}. Keep nothing in attributes "
            f"that is "
            "computed of parameters (torch.nn.utils.parametrizations.weight_norm, not "
            "torch.nn.utils.weight_norm)"
            ", or train it with data(n)"
        ) from error


def remove_model_values(model: nn.Module) -> None:
    """Take the values out of a model: who asks for some is told so."""
    _swap_tensors(
        model,
        {
            id(each): EmptyTensor.make_empty(each, name)
            for name, each in (*model.named_parameters(), *model.named_buffers())
        },
    )


def set_model_values(
    model: nn.Module, tensors: Mapping[str, Tensor | None]
) -> dict[str, nn.Parameter]:
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
    _swap_tensors(model, values)
    return found


def _make_placeholders(model: nn.Module) -> dict[int, Tensor]:
    """What stands for each parameter and buffer of a model, without values."""
    return {
        **{
            id(each): nn.Parameter(each.to("meta"), requires_grad=each.requires_grad)
            for each in model.parameters()
        },
        **{id(each): each.to("meta") for each in model.buffers()},
    }


def _swap_tensors(model: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if id(tensor) in replacements:
                    # by which an LSTM hears of it
                    setattr(module, name, replacements[id(tensor)])


def build_filled_model(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> nn.Module:
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
