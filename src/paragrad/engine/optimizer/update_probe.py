"""Test on a small copy how an optimizer updates its parameters.

The update may work element by element, tensor by tensor, or neither. It may continue from its own
copies of the weights, and it may draw random numbers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_torch

from paragrad.engine.optimizer.modes import has_modes, set_optimizer_mode
from paragrad.runtime.generators import (
    fingerprint_generators,
    keep_generators,
)
from paragrad.strategies.strategy import PER_ELEMENT, PER_TENSOR, WHOLE_MODEL

# Largest size of a dimension in a trial. Known optimizers factor a matrix from 128 on.
TRIAL_SIZE = 160
# The same for classes that are known to update element by element. They are tested for one step.
SHORT_TRIAL_SIZE = 8
# scale of the gradients in each step, so that clipping inside of an optimizer has an effect
GRADIENT_SCALES = (1.0, 1e3, 1e-3, 1.0, 1.0, 1.0, 1.0)
# steps: some optimizers write their copies into the parameters only every few steps
COPY_TRIAL_STEPS = 12
# share of a move by other code that must remain after one more step; weight decay leaves more
REMAINING_SHARE = 0.85
TensorGroups = list[list[Tensor]]


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
        """Return the first third of the elements (0) or the rest (1) as a flat parameter.

        Args:
            which: 0 or 1.
        """
        state = {
            entry: _slice_piece(value, which)
            if isinstance(value, Tensor) and value.dim()
            else value
            for entry, value in self.state.items()
        }
        return TrialParameter(_slice_piece(self.values, which), state)


def find_update_granularity(
    optimizer: torch.optim.Optimizer, known_elementwise: bool = False
) -> str:
    """Test whether an optimizer updates element by element or tensor by tensor.

    An optimizer with hooks, or with a step method set on the object, is not tested: these may hold
    the real parameters. An update that draws random numbers depends on the order of all parameters.

    Args:
        optimizer: The optimizer.
        known_elementwise: Its class is known to update element by element, so a short test is
            enough.

    Returns:
        PER_ELEMENT: any piece of a parameter can be updated alone. PER_TENSOR: each parameter can
            be updated alone. WHOLE_MODEL: neither, or it cannot be tested.
    """
    if find_step_hook(optimizer):
        return WHOLE_MODEL
    generator = torch.Generator().manual_seed(0)
    size = SHORT_TRIAL_SIZE if known_elementwise else TRIAL_SIZE
    scales = GRADIENT_SCALES[:1] if known_elementwise else GRADIENT_SCALES

    def draw(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with keep_generators():
        states_before = fingerprint_generators()
        groups = [
            [
                TrialParameter(
                    draw(_copy_corner_float64(parameter, size).shape),
                    {
                        entry: _copy_corner_float64(value, size)
                        for entry, value in optimizer.state.get(parameter, {}).items()
                    },
                )
                for parameter in _choose_largest(group["params"], 1 if known_elementwise else 2)
            ]
            for group in optimizer.param_groups
        ]
        gradients = [
            [[scale * draw(each.values.shape) for each in group] for group in groups]
            for scale in scales
        ]
        for kind, is_kind in ((PER_ELEMENT, _is_elementwise), (PER_TENSOR, _is_tensorwise)):
            try:
                if is_kind(optimizer, groups, gradients):
                    return WHOLE_MODEL if fingerprint_generators() != states_before else kind
            # an unknown step may raise anything on such parameters: then it is not of this kind
            except Exception:
                continue
    return WHOLE_MODEL


def has_weight_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Test whether an optimizer continues from its own copies of the weights.

    Examples are copies in float32 next to coarser weights, and slow weights. Such an optimizer
    loses what other code writes into the parameters. Two copies of the optimizer run the same
    steps, and the parameters of one are moved after the first step. The move must remain.

    Args:
        optimizer: The optimizer.

    Returns:
        False also if the optimizer cannot be tested or has modes.
    """
    if find_step_hook(optimizer) or has_modes(optimizer):
        return False
    generator = torch.Generator().manual_seed(0)

    def draw(like: Tensor) -> Tensor:
        values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return (values + values.sign()).to(like.dtype)  # no number near 0

    # an unknown step may raise anything on such parameters
    with keep_generators(), suppress(Exception):
        groups = [
            [
                TrialParameter(
                    _copy_corner(parameter.detach(), SHORT_TRIAL_SIZE),
                    {
                        entry: _copy_corner(value, SHORT_TRIAL_SIZE)
                        for entry, value in optimizer.state.get(parameter, {}).items()
                    },
                )
                for parameter in _choose_largest(group["params"], 2)
            ]
            for group in optimizer.param_groups
        ]
        moves = [draw(each.values) for each in _flatten_groups(groups)]
        (unmoved_parameters, unmoved_optimizer), (moved_parameters, moved_optimizer) = (
            _start_trial(optimizer, groups),
            _start_trial(optimizer, groups),
        )
        remaining = [1.0 for _ in moves]
        for step in range(COPY_TRIAL_STEPS):
            gradients = [[draw(each.values) for each in group] for group in groups]
            _run_trial_step(unmoved_optimizer, unmoved_parameters, gradients)
            _run_trial_step(moved_optimizer, moved_parameters, gradients)
            for parameter, move in (
                zip(_flatten_groups(moved_parameters), moves, strict=True) if not step else ()
            ):
                parameter.detach().add_(move)
            previous = remaining
            remaining = [
                _measure_remaining_share(*each)
                for each in zip(
                    _flatten_groups(unmoved_parameters),
                    _flatten_groups(moved_parameters),
                    moves,
                    strict=True,
                )
            ]
            if any(
                now < REMAINING_SHARE * earlier
                for now, earlier in zip(remaining, previous, strict=True)
            ):
                return True
    return False


def _measure_remaining_share(stayed: Tensor, moved: Tensor, move: Tensor) -> float:
    """Return which share of a move remains."""
    difference, full_move = (
        each.detach().to(torch.complex128).reshape(-1) for each in (moved - stayed, move)
    )
    return (
        float((torch.vdot(full_move, difference) / torch.vdot(full_move, full_move)).real)
        if move.numel()
        else 1.0
    )


def find_step_hook(optimizer: torch.optim.Optimizer) -> str | None:
    """Find what runs in a step besides the step method of the class.

    The step counter of a learning rate scheduler does not count. An object may never have been
    initialized as an Optimizer (a wrapper with the groups of another one). Its step is unknown, so
    it counts as hooked.

    Args:
        optimizer: The optimizer.

    Returns:
        A description for a message, or None.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return "a step of its own around another optimizer's"
    for hooks in (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        of_torch._global_optimizer_pre_hooks,
        of_torch._global_optimizer_post_hooks,
    ):
        for hook in hooks.values():
            return f"the hook {getattr(hook, '__name__', type(hook).__name__)}"
    step = vars(optimizer).get("step")
    is_counter = (
        getattr(step, "_wrapped_by_lr_sched", False)
        and getattr(step, "__wrapped__", None) is type(optimizer).step
    )
    return "a step that was put on the object" if step is not None and not is_counter else None


def _choose_largest(parameters: list[Tensor], count: int) -> list[Tensor]:
    """Choose the `count` largest parameters for each number of dimensions."""
    by_dims: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if len(by_dims[parameter.dim()]) < count:
            by_dims[parameter.dim()].append(parameter)
    return [parameter for each in by_dims.values() for parameter in each]


def _copy_corner(value: Any, size: int) -> Any:
    """Copy the corner of a tensor; return any other value as a copy."""
    if not isinstance(value, Tensor) or not value.dim():
        return copy.deepcopy(value)
    return value.detach()[tuple(slice(size) for _ in value.shape)].cpu().clone()


def _copy_corner_float64(value: Any, size: int) -> Any:
    """Copy the corner of a tensor in float64."""
    corner = _copy_corner(value, size)
    return (
        corner.double()
        if isinstance(corner, Tensor) and corner.dim() and corner.is_floating_point()
        else corner
    )


def _is_elementwise(
    optimizer: torch.optim.Optimizer,
    groups: list[list[TrialParameter]],
    gradients: list[TensorGroups],
) -> bool:
    """Compare an update of whole parameters with updates of their pieces.

    Two optimizers hold one piece of each parameter; a third one holds nothing.
    """
    whole = _run_trial(optimizer, groups, gradients)
    _run_trial(optimizer, [[] for _ in groups], [[[] for _ in groups] for _ in gradients])
    for which in (0, 1):
        pieces = [[each.slice_piece(which) for each in group] for group in groups]
        part = _run_trial(
            optimizer,
            pieces,
            [
                [[_slice_piece(each, which) for each in group] for group in step]
                for step in gradients
            ],
            are_pieces=True,
        )
        if not all(
            _is_equal_update(_slice_piece(expected, which), actual, initial.values)
            for expected, actual, initial in zip(
                _flatten_groups(whole), _flatten_groups(part), _flatten_groups(pieces), strict=True
            )
        ):
            return False
    return True


def _is_tensorwise(
    optimizer: torch.optim.Optimizer,
    groups: list[list[TrialParameter]],
    gradients: list[TensorGroups],
) -> bool:
    """Compare one update of all parameters with updates in which every second gradient is missing.

    Parameters without a gradient must not change.
    """
    whole = _flatten_groups(_run_trial(optimizer, groups, gradients))
    for which in (0, 1):
        some_gradients: Any = [
            [
                [each if place % 2 == which else None for place, each in enumerate(group)]
                for group in step
            ]
            for step in gradients
        ]
        is_updated = [place % 2 == which for group in groups for place in range(len(group))]
        part = _flatten_groups(_run_trial(optimizer, groups, some_gradients))
        for updated, expected, actual, initial in zip(
            is_updated, whole, part, _flatten_groups(groups), strict=True
        ):
            if not (
                _is_equal_update(expected, actual, initial.values)
                if updated
                else torch.equal(actual, initial.values)
            ):
                return False
    return True


def _flatten_groups(groups: list[list[Any]]) -> list[Any]:
    return [each for group in groups for each in group]


def _slice_piece(tensor: Tensor, which: int) -> Tensor:
    flat = tensor.reshape(-1)
    split = -(-len(flat) // 3)
    return flat[split:] if which else flat[:split]


def _is_equal_update(expected: Tensor, actual: Tensor, initial: Tensor) -> bool:
    """Return whether two results agree up to rounding, and differ from the start."""
    if not expected.numel():
        return True
    moved = float((expected - initial).abs().max())
    bound = 1e-9 * moved + 8 * torch.finfo(torch.float64).eps * float(expected.abs().max())
    return moved > 0 and float((expected - actual).abs().max()) <= bound


def _run_trial(
    optimizer: torch.optim.Optimizer,
    groups: list[list[TrialParameter]],
    gradients: list[TensorGroups],
    are_pieces: bool = False,
) -> TensorGroups:
    """Return the parameters after some steps of a copy of the optimizer.

    If the optimizer has modes, they are the parameters of eval mode.
    """
    parameters, trial_optimizer = _start_trial(optimizer, groups, are_pieces)
    for step in gradients:
        _run_trial_step(trial_optimizer, parameters, step)
    if are_pieces and any(
        value.dim() and value.shape != parameter.shape
        for parameter, state in trial_optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor)
    ):
        raise ValueError(
            "state of another shape than the piece, which could not be put together again"
        )
    return [[parameter.detach() for parameter in group] for group in parameters]


def _start_trial(
    optimizer: torch.optim.Optimizer, groups: list[list[TrialParameter]], are_pieces: bool = False
) -> tuple[Any, torch.optim.Optimizer]:
    """Return (small parameters, a copy of the optimizer for them) before the first step."""
    parameters: Any = [
        [each.values.clone() if are_pieces else nn.Parameter(each.values.clone()) for each in group]
        for group in groups
    ]
    trial_optimizer = _copy_optimizer(optimizer, parameters)
    for parameter, trial in zip(_flatten_groups(parameters), _flatten_groups(groups), strict=True):
        if trial.state:
            trial_optimizer.state[parameter] = copy.deepcopy(trial.state)
    return parameters, trial_optimizer


def _run_trial_step(
    trial_optimizer: torch.optim.Optimizer, parameters: Any, gradients: TensorGroups
) -> None:
    """Run a step; an optimizer with modes is in eval mode afterwards."""
    set_optimizer_mode(trial_optimizer, "train")
    for parameter, gradient in zip(
        _flatten_groups(parameters), _flatten_groups(gradients), strict=True
    ):
        parameter.grad = None if gradient is None else gradient.clone()
    trial_optimizer.step()
    set_optimizer_mode(trial_optimizer, "eval")


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, parameter_groups: TensorGroups
) -> torch.optim.Optimizer:
    """Copy an optimizer (class, attributes, hyper-parameters) for other parameters.

    The copy function of torch's Optimizer loses the attributes.
    """
    memo: dict[int, Any] = _RefusingMemo(
        {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    )
    trial_optimizer: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(trial_optimizer).update(
        copy.deepcopy(
            {
                name: value
                for name, value in vars(optimizer).items()
                if name not in ("state", "param_groups", "step")
                and not name.startswith("_optimizer_")
            },
            memo,
        )
    )
    torch.optim.Optimizer.__setstate__(
        trial_optimizer, {"state": defaultdict(dict), "param_groups": []}
    )
    for group, parameters in zip(optimizer.param_groups, parameter_groups, strict=True):
        settings = copy.deepcopy(
            {name: value for name, value in group.items() if name != "params"}, memo
        )
        # a warm-up starts with a rate of 0, with which nothing changes
        if not settings.get("lr", 1.0):
            settings["lr"] = settings["lr"] + 0.01
        trial_optimizer.param_groups.append({**settings, "params": parameters})
    return trial_optimizer


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


def compute_clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor for gradients of a norm, as torch.nn.utils.clip_grad_norm_ computes it.

    Args:
        norm: The norm of all gradients.
        max_norm: The largest norm that is allowed; None: the factor is 1.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
