"""The layout: which part of which serial tensor a rank holds, and how to assemble the serial model.

Tied weights may belong to several ranks; the layout sums their gradients over these owners.
Gradient clipping uses the norm over the serial tensors, so every strategy clips as one worker
does.

All techniques that divide a model use this module. Each of the ranks that together hold a replica
has a layout. Several features follow from it: checkpoints, the comparison with one worker, and the
norm of gradients. It also gives the gradients of tensors that several ranks own, and the ranks that
share the loss.
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
from paragrad.engine.state.empty_tensor import EmptyTensor
from paragrad.engine.state.values import is_same_value
from paragrad.errors import StepFailed
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.runtime.world import CPU, World

# start to stop along the first dimensions of a tensor; the other dimensions are whole
TensorBox = tuple[slice, ...]
# the state of an optimizer, by parameter name, then by entry
OptimizerState = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ShardSpec:
    """Which part of a serial tensor a local tensor is.

    Attributes:
        name: Name of the serial tensor.

        shape: Shape of the serial tensor.

        where: Which elements are here. None: all. A range: these elements of the flat tensor.
            Boxes: these blocks, joined along `dim` of the local tensor (for a fused qkv, the heads
            of this rank are three boxes).

        dim: Dimension of the local tensor along which boxes are joined.

        is_primary: This copy counts in norms, bytes and files. For each element, exactly one rank
            has the primary copy.

        gradient_worlds: Worlds over which its gradient must still be summed.
    """

    name: str
    shape: tuple[int, ...]
    where: range | tuple[TensorBox, ...] | None = None
    dim: int = 0
    is_primary: bool = True
    gradient_worlds: tuple[World, ...] = ()

    @property
    def element_count(self) -> int:
        """The number of elements of the local tensor."""
        if self.where is None:
            return math.prod(self.shape)
        if isinstance(self.where, range):
            return len(self.where)
        return sum(
            math.prod(
                _get_slice_stop(part, size) - (part.start or 0)
                for part, size in zip(box, self.shape, strict=False)
            )
            * math.prod(self.shape[len(box) :])
            for box in self.where
        )

    def extract_shard(self, serial: Tensor) -> Tensor:
        """Copy the part out of the serial tensor.

        Args:
            serial: The serial tensor.

        Returns:
            A new tensor with the local shape.
        """
        if self.where is None:
            return serial.detach().clone()
        if isinstance(self.where, range):
            return serial.detach().reshape(-1)[self.where.start : self.where.stop].clone()
        return torch.cat([serial.detach()[box] for box in self.where], self.dim)

    def insert_shard(self, part: Tensor, serial: Tensor) -> None:
        """Copy the part into its place in the serial tensor.

        Args:
            part: The local tensor.
            serial: The serial tensor, changed in place.
        """
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
        """Express this part of an earlier part in terms of the serial model.

        Args:
            earlier: The part of the serial tensor from which this part is taken.

        Returns:
            The part in terms of the serial tensor.

        Raises:
            StepFailed: Both divide the tensor.
        """
        if self.where is not None and earlier.where is not None:
            raise StepFailed("two cuts divide it; leave one of them out", tensor=earlier.name)
        divider = self if earlier.where is None else earlier
        return ShardSpec(
            earlier.name,
            earlier.shape,
            divider.where,
            divider.dim,
            self.is_primary and earlier.is_primary,
            self.gradient_worlds + earlier.gradient_worlds,
        )

    def has_overlap(self, other: ShardSpec) -> bool:
        """Return whether two parts of one tensor have an element in common.

        Args:
            other: Another part of the same tensor.

        Raises:
            StepFailed: One part is a range and the other one is made of boxes.
        """
        if self.where is None or other.where is None:
            return True
        if isinstance(self.where, range) and isinstance(other.where, range):
            return max(self.where.start, other.where.start) < min(self.where.stop, other.where.stop)
        if isinstance(self.where, range) or isinstance(other.where, range):
            raise StepFailed(
                "one rank holds a range of it and another one boxes; give every rank the same form",
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
    """Assemble serial tensors from their parts.

    Args:
        parts: (spec, part) pairs; the part is None if the tensor has no value.

    Returns:
        The serial tensors by name; None if no part of a tensor has a value.

    Raises:
        StepFailed: A part does not have the shape that its spec says.
    """
    serial_tensors: dict[str, Tensor | None] = {}
    for spec, part in parts:
        serial = serial_tensors.setdefault(spec.name, None)
        if part is not None:
            if serial is None:
                serial = torch.zeros(spec.shape, dtype=part.dtype, device=part.device)
                serial_tensors[spec.name] = serial
            try:
                spec.insert_shard(part, serial)
            except RuntimeError as error:
                raise StepFailed(
                    f"a part of it has the shape {tuple(part.shape)} now, and had another one when "
                    "the model was divided",
                    tensor=spec.name,
                ) from error
    return serial_tensors


def assemble_optimizer_state(parts: Iterable[tuple[ShardSpec, dict[str, Any]]]) -> OptimizerState:
    """Assemble an optimizer state in serial shapes from the state of parts.

    Args:
        parts: (spec, state of the part) pairs.

    Returns:
        The state by parameter and entry. Entries without a value per element come from any one
        part.

    Raises:
        StepFailed: A tensor has neither a value per element nor the same values in all parts.
    """
    parts = list(parts)
    assembled: OptimizerState = {}
    tensors = []
    whole_entries = {
        (spec.name, entry)
        for spec, values in parts
        for entry, value in values.items()
        if spec.where is None
        or not isinstance(value, Tensor)
        or not value.dim()
        or value.numel() != spec.element_count
    }
    for spec, values in parts:
        for entry, value in values.items():
            if (spec.name, entry) in whole_entries:
                known = assembled.setdefault(spec.name, {}).setdefault(entry, value)
                if isinstance(value, Tensor) and value.dim() and not is_same_value(known, value):
                    raise StepFailed(
                        f"the optimizer's {entry} is no value per element, and differs between "
                        "the ranks that hold parts of the parameter, so no file can hold it",
                        tensor=spec.name,
                    )
            else:
                tensors.append((replace(spec, name=f"{spec.name}/{entry}"), value))
    for name, value in assemble_tensors(tensors).items():
        parameter, _, entry = name.rpartition("/")
        assembled.setdefault(parameter, {})[entry] = value
    return assembled


def install_shards(
    optimizer: torch.optim.Optimizer, shards: Mapping[Tensor, Sequence[tuple[ShardSpec, Tensor]]]
) -> None:
    """Replace the parameters of an optimizer by their shards, and divide their state.

    Args:
        optimizer: The optimizer, changed in place.
        shards: For each parameter, its (spec, shard) pairs.
    """
    old_state = optimizer.state
    optimizer.state = type(optimizer.state)(dict, select_global_state(optimizer))
    for group in optimizer.param_groups:
        pairs = [
            (parameter, *each)
            for parameter in group["params"]
            for each in shards.get(parameter, ())
        ]
        for parameter, spec, part in pairs:
            if parameter in old_state:
                optimizer.state[part] = {
                    entry: spec.extract_shard(value)
                    if isinstance(value, Tensor) and value.dim() and value.shape == spec.shape
                    else copy.deepcopy(value)
                    for entry, value in old_state[parameter].items()
                }
        group["params"] = [part for *_, part in pairs]


class Layout:
    """What this rank holds of a model, by local name.

    A model that is not divided also has a layout, without parts.

    Args:
        world: The ranks that together hold one replica.

        specs: For each local tensor, which part of which serial tensor it is; None: the model is
            not divided.

        serial_names: Names of the tensors of the serial model.

        has_output: The output and the loss are on this rank.

    Attributes:
        is_partitioned: Whether the model is divided.

        sent_bytes: Bytes of the messages of this layout.

        output_rank_count: Number of ranks of a replica that have the loss.

        divided_names: Serial parameters of which several ranks hold a part; None until it is known.
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
        self.divided_names: list[str] | None = None

    def count_output_ranks(self) -> None:
        """Count the ranks of a replica that have the loss. Collective."""
        has_output = torch.tensor(float(self.has_output))
        self.output_rank_count = int(self.world.all_reduce(has_output))

    def reset_sent_bytes(self) -> None:
        """Count the bytes of messages from 0 again."""
        self.sent_bytes = 0

    def gather_serial_tensors(
        self, tensors: Mapping[str, Tensor | None], on_all_ranks: bool = True
    ) -> dict[str, Tensor | None]:
        """Assemble serial tensors from local tensors. Collective.

        Args:
            tensors: Local tensors by local name.
            on_all_ranks: Return the result on every rank; otherwise only on the first one.

        Returns:
            The serial tensors by name.

        Raises:
            StepFailed: A tensor was created after the model was divided.
        """
        if not self.is_partitioned:
            return dict(tensors)
        (serial_tensors,), _ = self.gather_serial_values([tensors])
        if not on_all_ranks:
            return serial_tensors
        sent = {name: _move_tensor(each, CPU) for name, each in serial_tensors.items()}
        received = self.world.broadcast_object(sent)
        return {name: _move_tensor(each, self.world.device) for name, each in received.items()}

    def gather_serial_state(self, state: OptimizerState) -> OptimizerState:
        """Assemble an optimizer state in serial shapes, on the first rank. Collective.

        Args:
            state: The state of the parameters on this rank.
        """
        return self.gather_serial_values([], state)[1]

    def gather_serial_values(
        self, groups: Sequence[Mapping[str, Tensor | None]], state: OptimizerState | None = None
    ) -> tuple[list[dict[str, Tensor | None]], OptimizerState]:
        """Assemble several groups of tensors and an optimizer state, in one message. Collective.

        Args:
            groups: In each group, local tensors by local name.
            state: The optimizer state of the parameters on this rank.

        Returns:
            (groups, state) in serial shapes on the first rank. On other ranks of a divided model
            they are empty. If the model is not divided, these are the given tensors.

        Raises:
            StepFailed: A tensor was created after the model was divided.
        """
        state = state or {}
        if not self.is_partitioned:
            return [dict(group) for group in groups], state
        if late := [name for each in (*groups, state) for name in each if name not in self.specs]:
            raise StepFailed(
                "it did not exist when the model was divided, and has no place in the whole model; "
                "make it in the constructor, or train it with data(n)",
                tensor=", ".join(late[:3]),
            )
        specs = {
            name: replace(spec, gradient_worlds=())
            for name, spec in self.specs.items()
            if spec.is_primary
        }
        gathered = self.world.gather_objects(
            (
                [
                    [
                        (specs[name], _move_tensor(each, CPU))
                        for name, each in group.items()
                        if name in specs
                    ]
                    for group in groups
                ],
                [
                    (specs[name], {entry: copy_to_host(each) for entry, each in values.items()})
                    for name, values in state.items()
                    if name in specs
                ],
            )
        )
        serial_groups = []
        for number in range(len(groups)):
            found = assemble_tensors(each for parts, _ in gathered for each in parts[number])
            serial_groups.append(
                {
                    name: _move_tensor(found[name], self.world.device)
                    for name in self.serial_names
                    if name in found
                }
            )
        return serial_groups, assemble_optimizer_state(
            each for _, parts in gathered for each in parts
        )

    def select_local_state(self, state: OptimizerState) -> OptimizerState:
        """Return the part of a serial state that belongs to this rank.

        Args:
            state: A state in serial shapes.
        """
        if not self.is_partitioned:
            return state
        return {
            name: {entry: spec.extract_shard(value) for entry, value in state[spec.name].items()}
            for name, spec in self.specs.items()
            if spec.name in state
        }

    def compute_norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        """Compute the 2-norm of every serial tensor from local tensors. Collective.

        Args:
            tensors: Local tensors by local name.

        Returns:
            The norm of each serial tensor by name, on all ranks.
        """
        squares = dict.fromkeys(self.serial_names, 0.0)
        for name, tensor in tensors.items():
            if tensor is not None and self.specs[name].is_primary:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                squares[self.specs[name].name] += (
                    float(torch.linalg.vector_norm(tensor, dtype=wide)) ** 2
                )
        sums = self.all_reduce(torch.tensor([*squares.values()], dtype=torch.float64)).sqrt()
        return dict(zip(squares, sums.tolist(), strict=True))

    def clip_gradients(self, parameters: Mapping[str, Tensor], max_norm: float) -> None:
        """Clip by the norm of the serial gradients, as torch.nn.utils.clip_grad_norm_ does.

        Collective.

        Args:
            parameters: The parameters of this rank by local name.
            max_norm: The largest norm that is allowed.
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
        """Sum the gradients of tensors that several ranks own. Collective.

        If one part of a serial tensor has a gradient, its other parts get a zero gradient, as in
        serial.

        Args:
            parameters: The parameters of this rank by local name.
        """
        if not self.is_partitioned:
            return
        if self.divided_names is None:
            local_counts = Counter(self.specs[name].name for name in parameters)
            holders = self.all_reduce(
                torch.tensor([float(local_counts[name]) for name in self.serial_names])
            ).tolist()
            self.divided_names = [
                name for name, count in zip(self.serial_names, holders, strict=True) if count > 1
            ]
        if not self.divided_names:
            return
        has_gradient = dict.fromkeys(self.divided_names, 0.0)
        shared = {
            name: parameter
            for name, parameter in parameters.items()
            if self.specs[name].name in has_gradient
        }
        for name, parameter in shared.items():
            if parameter.grad is not None:
                has_gradient[self.specs[name].name] = 1.0
        used = dict(
            zip(
                has_gradient,
                self.all_reduce(torch.tensor([*has_gradient.values()]), "MAX").tolist(),
                strict=True,
            )
        )
        # in the same order on all owners
        for name, parameter in sorted(shared.items(), key=lambda item: self.specs[item[0]].name):
            if not used[self.specs[name].name]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for world in self.specs[name].gradient_worlds:
                parameter.grad = self.all_reduce(parameter.grad, subworld=world)

    def select_copies(
        self, parameters: Mapping[str, Tensor], replicas: int
    ) -> Mapping[str, Tensor]:
        """Select the parameters of a divided model that other ranks hold copies of.

        Args:
            parameters: The parameters of this rank by local name.
            replicas: Number of replicas. With more than one, every parameter of a divided model has
                copies.

        Returns:
            These parameters by local name; none if the model is not divided.
        """
        return {
            name: each
            for name, each in parameters.items()
            if self.is_partitioned and (replicas > 1 or self.specs[name].gradient_worlds)
        }

    def find_unequal_copies(
        self, tensors: Mapping[str, Tensor | None], world: World | None = None
    ) -> tuple[int, int, str] | None:
        """Find two ranks with copies of the same part that differ in some bits. Collective.

        Args:
            tensors: Tensors of this rank by local name.
            world: The ranks to compare: those of all replicas, or by default those of this replica.

        Returns:
            (first rank, second rank, name of the serial tensor) of the first difference, or None.
        """
        world = world or self.world
        local_digests = {}
        for name, tensor in tensors.items():
            spec = self.specs.get(name)
            bits = (
                b""
                if tensor is None
                else tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
            )
            local_digests[
                spec.name if spec else name, str((spec.where, spec.dim)) if spec else ""
            ] = hashlib.sha256(bits).digest()
        first: dict[tuple[str, str], tuple[int, bytes]] = {}
        difference = None
        for rank, digests in enumerate(world.gather_objects(local_digests)):
            for key, digest in digests.items():
                holder, first_digest = first.setdefault(key, (rank, digest))
                difference = (
                    (holder, rank, key[0])
                    if difference is None and first_digest != digest
                    else difference
                )
        return world.broadcast_object(difference)  # type: ignore[no-any-return]

    def share_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather numbers from all ranks of this replica. Collective.

        Args:
            numbers: The numbers of this rank.

        Returns:
            One list for each rank. The ranks that have the loss come first.
        """
        if not self.is_partitioned:
            return [list(numbers)]
        gathered = self.world.gather_numbers([float(not self.has_output), *numbers])
        self.sent_bytes += count_collective_bytes(
            "all_reduce", 8 * len(gathered) * len(gathered[0]), self.world.size
        )
        return [each[1:] for each in sorted(gathered, key=lambda each: each[0])]

    def all_reduce(
        self, tensor: Tensor, operation: str = "SUM", subworld: World | None = None
    ) -> Tensor:
        """Combine a tensor over ranks, and count the bytes. Collective.

        Args:
            tensor: The tensor of this rank.
            operation: "SUM", "MAX" or "MIN".
            subworld: The ranks; None for all ranks of this replica.

        Returns:
            The combined tensor.
        """
        world = subworld or self.world
        self.sent_bytes += count_collective_bytes("all_reduce", tensor.nbytes, world.size)
        return world.all_reduce(tensor, operation)


def check_loss_ranks(weights: list[float], loss_rank_count: int) -> None:
    """Check that the ranks of a replica that declare an output are those that have the loss.

    Args:
        weights: The weights of the loss on the ranks; the ranks that declare an output come first.
        loss_rank_count: The number of ranks that declare an output.

    Raises:
        StepFailed: If other ranks have the loss.
    """
    if any(weight != weights[0] for weight in weights[:loss_rank_count]) or any(
        weights[loss_rank_count:]
    ):
        raise StepFailed(
            f"of the ranks of one replica {loss_rank_count} say that they give the loss, but "
            f"other ranks have it (weights {weights}, the ranks that say so first); correct "
            "ModelShard(has_output=)"
        )


def _move_tensor(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(device)


def copy_to_host(value: Any) -> Any:
    """Copy a tensor to the host, so that it can be sent to another process.

    Args:
        value: A tensor, or any other value.

    Returns:
        A copy without the rest of the storage that the tensor is a view of. Other values are
        returned unchanged.
    """
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def build_empty_model(model: nn.Module) -> nn.Module:
    """Copy a model with parameters and buffers that have no values.

    Args:
        model: The model to copy.

    Returns:
        The same modules, with tensors on the meta device.

    Raises:
        StepFailed: The model keeps something that torch cannot copy.
    """
    try:
        return copy.deepcopy(model, dict(_make_placeholders(model)))
    except RuntimeError as error:
        raise StepFailed(
            f"the model cannot be copied, which its division needs: {error}. Keep nothing in "
            "attributes that is computed from parameters "
            "(torch.nn.utils.parametrizations.weight_norm, not torch.nn.utils.weight_norm), or "
            "train it with data(n)"
        ) from error


def remove_model_values(model: nn.Module) -> None:
    """Replace all tensors of a model by empty tensors.

    An empty tensor raises an error if its values are used.

    Args:
        model: The model, changed in place.
    """
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
    """Give values to a model that has none (`remove_model_values`).

    A tensor that the user has replaced since then stays as it is.

    Args:
        model: The model, changed in place.
        tensors: Values by the first name of each tensor.

    Returns:
        The parameters that have values now, by name.
    """
    values: dict[int, Tensor] = {}
    filled: dict[str, nn.Parameter] = {}
    for name, each in model.named_buffers():
        if (value := tensors.get(name)) is not None and each.is_meta:
            values[id(each)] = value
    for name, parameter in model.named_parameters():
        if (value := tensors.get(name)) is not None and parameter.is_meta:
            values[id(parameter)] = filled[name] = nn.Parameter(
                value, requires_grad=parameter.requires_grad
            )
    _swap_tensors(model, values)
    return filled


def _make_placeholders(model: nn.Module) -> dict[int, Tensor]:
    """Map the id of each parameter and buffer to a tensor without values."""
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
                    # not into the dict: with setattr an LSTM updates its own list of weights
                    setattr(module, name, replacements[id(tensor)])


def build_filled_model(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> nn.Module:
    """Copy an empty model and give the copy values.

    Args:
        model: A model without values (`build_empty_model`).
        tensors: Values by the first name of each tensor. Tied tensors stay tied.

    Returns:
        The copy.
    """
    whole = copy.deepcopy(model)
    replacements: dict[int, Tensor] = {}
    for name, parameter in whole.named_parameters():
        if (value := tensors.get(name)) is not None:
            replacements[id(parameter)] = nn.Parameter(value.detach(), parameter.requires_grad)
    for name, buffer in whole.named_buffers():
        if (value := tensors.get(name)) is not None:
            replacements[id(buffer)] = value
    _swap_tensors(whole, replacements)
    return whole
