"""Run some steps of a small copy of an optimizer, and record everything that they leave behind.

A trial has small parameters, gradients of several kinds, and a copy of the optimizer. The result
has the parameters, their state, and all numbers that belong to no parameter.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paragrad.engine.optimizer.modes import set_optimizer_mode
from paragrad.engine.optimizer.optimizer_state import copy_optimizer
from paragrad.engine.state.values import is_same_value

# Two gradient sequences: (kind, scale) for each step. The scales let clipping inside of an
# optimizer have an effect. A repeated gradient lets estimates of a distance grow. A gradient that
# is orthogonal to the weights starts what some optimizers do for normalized weights. The sequences
# have another number of large gradients, so that a count of these differs.
RANDOM, REPEATED, ORTHOGONAL = "random", "repeated", "orthogonal"
GRADIENT_SEQUENCES = (
    (
        (RANDOM, 1.0),
        (RANDOM, 1e3),
        (RANDOM, 1e-3),
        (RANDOM, 1.0),
        (REPEATED, 1.0),
        (REPEATED, 1.0),
        (ORTHOGONAL, 1.0),
        (RANDOM, 1.0),
    ),
    (
        (RANDOM, 2.0),
        (ORTHOGONAL, 1.0),
        (RANDOM, 1e-3),
        (RANDOM, 1e3),
        (REPEATED, 1e3),
        (RANDOM, 1.0),
        (REPEATED, 1.0),
        (RANDOM, 0.5),
    ),
)
# most elements of a parameter in a trial
MAX_TRIAL_ELEMENTS = 2**17
# most elements of a piece: what is cubic in the length of a vector stays quick
MAX_PIECE_ELEMENTS = 256
# nested containers in a state or a group are read to this depth
MAX_DEPTH = 6
# what stands for an object of which nothing is known
UNKNOWN = "<object>"

# groups of a trial in which groups with equal settings are kept
MAX_ALIKE_GROUPS = 4
# largest size of a dimension of a tiny parameter
TINY_SIZE = 8

Gradients = list[list[Tensor | None]]  # for each step, for each parameter of all groups


@dataclass
class TrialParameter:
    """A small parameter and its optimizer state before the first step.

    Attributes:
        values: The values of the parameter.
        state: The optimizer state of the parameter.
    """

    values: Tensor
    state: dict[str, Any]

    def slice_piece(self, which: int) -> TrialParameter:
        """Return some of the first third of the elements (0) or of the rest (1), flat.

        Args:
            which: 0 or 1.
        """
        state = {
            # some entries are one number for the parameter, as a tensor of one element
            entry: slice_piece(value, which)
            if isinstance(value, Tensor) and value.dim() and value.shape == self.values.shape
            else value
            for entry, value in self.state.items()
        }
        return TrialParameter(slice_piece(self.values, which), state)


@dataclass(frozen=True)
class TrialGroup:
    """A parameter group of a trial.

    Attributes:
        settings: The group of the real optimizer, whose settings are copied.
        parameters: The parameters.
    """

    settings: dict[str, Any]
    parameters: list[TrialParameter]

    def slice_piece(self, which: int) -> TrialGroup:
        """Return the group with one flat piece of each parameter.

        Args:
            which: 0 or 1, as in `TrialParameter.slice_piece`.
        """
        return TrialGroup(self.settings, [each.slice_piece(which) for each in self.parameters])


@dataclass(frozen=True)
class TrialResult:
    """What the steps of a trial leave behind.

    Attributes:
        parameters: The parameters of all groups. If the optimizer has modes, of eval mode.

        states: For each parameter, the values in its state by path.

        shared_values: The values of groups, of attributes, and of the state that belongs to no
            parameter, by path.
    """

    parameters: list[Tensor]
    states: list[dict[str, Any]]
    shared_values: dict[str, Any]


def build_trial_groups(
    optimizer: torch.optim.Optimizer, limit: int, generator: torch.Generator
) -> list[TrialGroup]:
    """Build small parameters with random values in float64, and the state that they have already.

    Of each group the two largest parameters of each number of dimensions are chosen; the second one
    is tiny. If a group has the settings of an earlier one, except for the rate, it has tiny
    parameters. If there are several groups already, it is left out.

    Args:
        optimizer: The optimizer.
        limit: The largest size of a dimension.
        generator: The generator of the random values.
    """
    groups: list[TrialGroup] = []
    distinct_settings: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {
            name: value
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr")
        }
        settings["dims"] = sorted({parameter.dim() for parameter in group["params"]})
        is_alike = any(is_same_value(settings, each) for each in distinct_settings)
        if is_alike and len(groups) >= MAX_ALIKE_GROUPS:
            continue
        if not is_alike:
            distinct_settings.append(settings)
        parameters = []
        for place, parameter in choose_largest(group["params"], 1 if is_alike else 2):
            is_tiny = is_alike or place > 0
            sizes = choose_corner_sizes(
                parameter.shape, min(limit, TINY_SIZE) if is_tiny else limit
            )
            shape = [sizes[length] for length in parameter.shape]
            parameters.append(
                TrialParameter(
                    torch.randn(shape, generator=generator, dtype=torch.float64),
                    {
                        entry: _convert_float64(copy_corner(value, sizes))
                        for entry, value in optimizer.state.get(parameter, {}).items()
                    },
                )
            )
        groups.append(TrialGroup(group, parameters))
    return groups


def choose_largest(parameters: list[Tensor], count: int) -> list[tuple[int, Tensor]]:
    """Choose the `count` largest parameters for each number of dimensions.

    Args:
        parameters: The parameters.
        count: How many are chosen.

    Returns:
        (place among the chosen ones of this number of dimensions, parameter) pairs.
    """
    by_dims: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if len(by_dims[parameter.dim()]) < count:
            by_dims[parameter.dim()].append(parameter)
    return [pair for chosen in by_dims.values() for pair in enumerate(chosen)]


def choose_corner_sizes(shape: Sequence[int], limit: int) -> dict[int, int]:
    """Choose to which size each length of a dimension is cut.

    The shortest lengths are halved first until the corner has few enough elements. So the largest
    two dimensions of a convolution or of a stack of matrices keep the limit.

    Args:
        shape: The shape of a parameter.
        limit: The largest size.

    Returns:
        The size by length, so that state of another shape is cut alike.
    """
    sizes = {length: min(length, limit) for length in shape}
    while math.prod(sizes[length] for length in shape) > MAX_TRIAL_ELEMENTS:
        shortest = min((length for length, size in sizes.items() if size > 2), default=None)
        if shortest is None:
            break
        sizes[shortest] = max(2, sizes[shortest] // 2)
    return sizes


def copy_corner(value: Any, sizes: dict[int, int]) -> Any:
    """Copy the corner of a tensor, also in containers; return any other value as a copy.

    Args:
        value: The value.
        sizes: The result of `choose_corner_sizes`.
    """
    if isinstance(value, dict | list | tuple | deque):
        return tree_map(lambda each: copy_corner(each, sizes), value)
    if not isinstance(value, Tensor) or not value.dim():
        return copy.deepcopy(value)
    limit = max(sizes.values(), default=1)
    corner = tuple(slice(sizes.get(length, min(length, limit))) for length in value.shape)
    return value.detach()[corner].cpu().clone()


def _convert_float64(value: Any) -> Any:
    if isinstance(value, dict | list | tuple | deque):
        return tree_map(_convert_float64, value)
    is_converted = isinstance(value, Tensor) and value.dim() and value.is_floating_point()
    return value.double() if is_converted else value


def slice_piece(tensor: Tensor, which: int) -> Tensor:
    """Return some elements of the first third of a tensor (0) or of the rest (1), flat.

    Args:
        tensor: The tensor.
        which: 0 or 1.
    """
    flat = tensor.reshape(-1)
    split = -(-len(flat) // 3)
    return (flat[split:] if which else flat[:split])[:MAX_PIECE_ELEMENTS]


def list_parameters(groups: list[TrialGroup]) -> list[TrialParameter]:
    """List the parameters of all groups.

    Args:
        groups: The groups.
    """
    return [each for group in groups for each in group.parameters]


def repeat_sequence(sequence: Sequence[tuple[str, float]], steps: int) -> list[tuple[str, float]]:
    """Return so many steps of a gradient sequence, which is repeated.

    Args:
        sequence: (kind, scale) for each step.
        steps: The number of steps.
    """
    return list(itertools.islice(itertools.cycle(sequence), steps))


def run_with_sequence(
    optimizer: torch.optim.Optimizer,
    groups: list[TrialGroup],
    sequence: Sequence[tuple[str, float]],
    generator: torch.Generator,
) -> tuple[TrialResult, Gradients]:
    """Run a trial in which gradients are drawn as a sequence says.

    Args:
        optimizer: The optimizer.
        groups: The parameters.
        sequence: (kind, scale) for each step.
        generator: The generator of the gradients.

    Returns:
        (what the steps leave behind, the gradients).
    """
    recorded: Gradients = []

    def draw_gradients(step: int, parameters: list[Tensor]) -> list[Tensor | None]:
        kind, scale = sequence[step]
        if kind == REPEATED:
            recorded.append(recorded[-1])
        else:
            recorded.append([_draw_gradient(each, kind, generator) * scale for each in parameters])
        return recorded[-1]

    return _run_steps(optimizer, groups, draw_gradients, len(sequence)), recorded


def run_with_gradients(
    optimizer: torch.optim.Optimizer,
    groups: list[TrialGroup],
    gradients: Gradients,
    are_pieces: bool = False,
) -> TrialResult:
    """Run a trial with given gradients.

    Args:
        optimizer: The optimizer.
        groups: The parameters.
        gradients: The gradients.
        are_pieces: The parameters are flat pieces, which are tensors and no nn.Parameters.
    """
    return _run_steps(
        optimizer, groups, lambda step, _: gradients[step], len(gradients), are_pieces
    )


def _draw_gradient(parameter: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if kind == ORTHOGONAL and parameter.numel() > 1:
        rows, weights = (
            each.reshape(len(each) if each.dim() > 1 else 1, -1)
            for each in (values, parameter.detach())
        )
        lengths = weights.square().sum(1, keepdim=True).clamp_min(1e-30)
        rows = rows - weights * ((rows * weights).sum(1, keepdim=True) / lengths)
        values = rows.reshape(parameter.shape)
    return values


def _run_steps(
    optimizer: torch.optim.Optimizer,
    groups: list[TrialGroup],
    choose_gradients: Callable[[int, list[Tensor]], list[Tensor | None]],
    steps: int,
    are_pieces: bool = False,
) -> TrialResult:
    parameters, trial_optimizer = start_trial(optimizer, groups, are_pieces)
    for step in range(steps):
        set_optimizer_mode(trial_optimizer, "train")
        run_trial_step(trial_optimizer, parameters, choose_gradients(step, parameters))
    return TrialResult(
        [parameter.detach() for parameter in parameters],
        [
            dict(_iterate_leaves(dict(trial_optimizer.state.get(parameter, {}))))
            for parameter in parameters
        ],
        _collect_shared_values(trial_optimizer),
    )


def start_trial(
    optimizer: torch.optim.Optimizer, groups: list[TrialGroup], are_pieces: bool = False
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Return (small parameters, a copy of the optimizer for them) before the first step.

    Args:
        optimizer: The optimizer.
        groups: The parameters.
        are_pieces: The parameters are flat pieces, which are tensors and no nn.Parameters.
    """
    trials = list_parameters(groups)
    parameters: list[Tensor] = [
        each.values.clone() if are_pieces else nn.Parameter(each.values.clone()) for each in trials
    ]
    trial_optimizer = _copy_optimizer(optimizer, groups, parameters)
    for parameter, trial in zip(parameters, trials, strict=True):
        if trial.state:
            trial_optimizer.state[parameter] = copy.deepcopy(trial.state)
    return parameters, trial_optimizer


def run_trial_step(
    trial_optimizer: torch.optim.Optimizer,
    parameters: list[Tensor],
    gradients: Sequence[Tensor | None],
) -> None:
    """Run a step; an optimizer with modes is in eval mode afterwards.

    Args:
        trial_optimizer: The copy of the optimizer.
        parameters: The parameters of all groups.
        gradients: A gradient of each, or None.
    """
    set_optimizer_mode(trial_optimizer, "train")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    trial_optimizer.step()
    set_optimizer_mode(trial_optimizer, "eval")


def _collect_shared_values(trial_optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collect the values that belong to no parameter: of groups, attributes and the state."""
    shared_values: dict[str, Any] = {}
    for number, group in enumerate(trial_optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name != "params"}
        shared_values.update(_iterate_leaves(settings, f"group {number}"))
    attributes = {
        name: value
        for name, value in vars(trial_optimizer).items()
        if name not in ("state", "param_groups", "defaults")
    }
    shared_values.update(_iterate_leaves(attributes, "attribute"))
    global_state = {
        str(key): value
        for key, value in trial_optimizer.state.items()
        if not isinstance(key, Tensor)
    }
    shared_values.update(_iterate_leaves(global_state, "state"))
    return shared_values


def _iterate_leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the values in nested containers.

    The path of a value that is no direct entry contains "/". An object of an unknown class is
    represented by `UNKNOWN`.
    """
    if value is None or isinstance(value, Tensor | bool | int | float | complex | str):
        yield path, value
    elif depth < MAX_DEPTH and isinstance(value, dict):
        for key, each in value.items():
            name = "tensor" if isinstance(key, Tensor) else str(key)
            yield from _iterate_leaves(each, f"{path}/{name}" if path else name, depth + 1)
    elif depth < MAX_DEPTH and isinstance(value, list | tuple | deque):
        for place, each in enumerate(value):
            yield from _iterate_leaves(each, f"{path}/{place}", depth + 1)
    else:
        yield path, UNKNOWN


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[TrialGroup], parameters: list[Tensor]
) -> torch.optim.Optimizer:
    """Copy an optimizer for the parameters of a trial."""
    memo: dict[int, Any] = _RefusingMemo(
        {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    )
    rest = iter(parameters)
    trial_groups = []
    for group in groups:
        settings = copy.deepcopy(
            {name: value for name, value in group.settings.items() if name != "params"}, memo
        )
        # a warm-up starts with a rate of 0, with which nothing changes
        if not settings.get("lr", 1.0):
            settings["lr"] = settings["lr"] + 0.01
        trial_groups.append(
            {**settings, "params": list(itertools.islice(rest, len(group.parameters)))}
        )
    return copy_optimizer(optimizer, trial_groups, {}, memo)


class _RefusingMemo(dict[int, Any]):
    """The memo of deepcopy, which raises an error if a real parameter would be copied.

    Attributes:
        refused_ids: Ids of the real parameters.
    """

    def __init__(self, refused_ids: set[int]) -> None:
        super().__init__()
        self.refused_ids = refused_ids

    def get(self, key: int, default: Any = None) -> Any:
        """Return what was copied already.

        Args:
            key: Id of an object.
            default: Returned if the object was not copied yet.

        Raises:
            ValueError: The object is a real parameter.
        """
        if key in self.refused_ids:
            raise ValueError("the optimizer keeps its parameters outside of its groups")
        return super().get(key, default)
