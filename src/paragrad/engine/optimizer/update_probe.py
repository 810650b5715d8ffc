"""Test on a small copy how an optimizer updates its parameters.

The update may work element by element, tensor by tensor, or neither. It may continue from its own
copies of the weights, and it may draw random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.exchange import find_step_hook
from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.update_trial import (
    GRADIENT_SEQUENCES,
    TINY_SIZE,
    UNKNOWN,
    Gradients,
    TrialGroup,
    TrialParameter,
    TrialResult,
    build_trial_groups,
    choose_corner_sizes,
    choose_largest,
    copy_corner,
    list_parameters,
    repeat_sequence,
    run_trial_step,
    run_with_gradients,
    run_with_sequence,
    slice_piece,
    start_trial,
)
from paragrad.engine.state.values import is_same_value
from paragrad.runtime.generators import (
    fingerprint_generators,
    keep_generators,
)
from paragrad.runtime.world import World
from paragrad.strategies.strategy import (
    PER_ELEMENT,
    PER_TENSOR,
    UPDATE_GRANULARITIES,
    WHOLE_MODEL,
)

# Largest size of a dimension in a trial. Known optimizers factor a matrix from 128 on.
TRIAL_SIZE = 160
# Steps of a run with tiny parameters: some optimizers begin to look at whole tensors after 25.
TINY_STEPS = 32
# the same with larger ones
LARGE_STEPS = 8
# An optimizer whose step is slow makes fewer: (seconds of a step, steps). A trial has about ten
# runs, and is to take 0.3 s.
SLOW_STEPS = ((8e-3, 2), (2e-3, 8), (1e-3, 16))
# steps whose time is measured
MEASURED_STEPS = 3
# steps: some optimizers write their copies into the parameters only every few steps
COPY_TRIAL_STEPS = 12
# share of a move by other code that must remain after one more step; weight decay leaves more
REMAINING_SHARE = 0.85
# Classes of torch whose step works element by element, whatever their options are. The exact type
# counts: a subclass may have another step.
ELEMENTWISE_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def find_update_granularity(optimizer: torch.optim.Optimizer) -> str:
    """Test whether an optimizer updates element by element or tensor by tensor.

    Classes of torch are known by their exact type. Of others, a small copy makes some steps. The
    parameters, their state and the numbers of the groups must be the same whether the parameters
    are whole or in pieces. Numbers that depend on the gradients belong to whatever they were
    computed from, so an optimizer with such a number does not update element by element.

    An optimizer with hooks, or with a step method set on the object, is not tested: these may hold
    the real parameters. An update that draws random numbers depends on the order of all parameters.

    Args:
        optimizer: The optimizer.

    Returns:
        PER_ELEMENT: any piece of a parameter can be updated alone. PER_TENSOR: each parameter can
            be updated alone. WHOLE_MODEL: neither, or it cannot be tested.
    """
    if find_step_hook(optimizer):
        return WHOLE_MODEL
    if _is_known_elementwise(optimizer):
        return PER_ELEMENT
    with keep_generators(), _use_one_thread():
        states_before = fingerprint_generators()
        # Tiny parameters first: most optimizers that look at more than elements show it there, and
        # those that are slow on large parameters are among them.
        granularity = _try_granularity(optimizer, TINY_SIZE, TINY_STEPS)
        if granularity in (PER_ELEMENT, None):
            granularity = _try_granularity(optimizer, TRIAL_SIZE, LARGE_STEPS) or WHOLE_MODEL
        return WHOLE_MODEL if fingerprint_generators() != states_before else granularity


def agree_on_granularity(optimizer: torch.optim.Optimizer, world: World) -> str:
    """Return the granularity of an optimizer, the same on all ranks. Collective.

    A trial on another rank may have had time for more steps.

    Args:
        optimizer: The optimizer.
        world: The ranks.

    Returns:
        The result of `find_update_granularity` that asks for most.
    """
    number = UPDATE_GRANULARITIES.index(find_update_granularity(optimizer))
    return UPDATE_GRANULARITIES[int(world.all_reduce(torch.tensor(float(number)), "MAX"))]


def _is_known_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is a class of torch that updates element by element.

    An object on which other code has put attributes is not known.
    """
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS and all(
        name.startswith("_") or name in ("defaults", "state", "param_groups", "step")
        for name in vars(optimizer)
    )


def _try_granularity(optimizer: torch.optim.Optimizer, limit: int, most_steps: int) -> str | None:
    """Test how an optimizer updates parameters whose dimensions have a largest size.

    Returns:
        The granularity, or None if a step fails on whole parameters, or if some do not move.
    """
    generator = torch.Generator().manual_seed(0)
    # an unknown step may raise anything on such parameters
    try:
        groups = build_trial_groups(optimizer, limit, generator)
        steps = _choose_steps(optimizer, groups, most_steps)
        (whole, gradients), (other, _) = (
            run_with_sequence(optimizer, groups, repeat_sequence(sequence, steps), generator)
            for sequence in GRADIENT_SEQUENCES
        )
    except Exception:
        return None
    trials = list_parameters(groups)
    if not all(map(_has_moved, whole.parameters, trials)):
        return None
    if not is_same_value(whole.shared_values, other.shared_values):
        return WHOLE_MODEL
    has_equal_numbers = all(
        is_same_value(_select_numbers(one), _select_numbers(another))
        for trial, one, another in zip(trials, whole.states, other.states, strict=True)
        # the state of a parameter that is one number is a number, too
        if trial.values.dim()
    )
    # a step may raise anything on a part of the parameters: then it is not of this kind
    with suppress(Exception):
        if has_equal_numbers and _is_elementwise(optimizer, groups, whole, gradients):
            return PER_ELEMENT
    with suppress(Exception):
        if _is_tensorwise(optimizer, groups, whole, gradients):
            return PER_TENSOR
    return WHOLE_MODEL


def _choose_steps(
    optimizer: torch.optim.Optimizer, groups: list[TrialGroup], most_steps: int
) -> int:
    """Choose the number of steps of a run: a slow step is made fewer times."""
    parameters, trial_optimizer = start_trial(optimizer, groups)
    seconds = []
    for _ in range(MEASURED_STEPS):
        start = time.thread_time()
        run_trial_step(trial_optimizer, parameters, [torch.ones_like(each) for each in parameters])
        seconds.append(time.thread_time() - start)
    # the shortest one: the first step of a process loads what it calls
    allowed = next((steps for limit, steps in SLOW_STEPS if min(seconds) > limit), most_steps)
    return min(allowed, most_steps)


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Let torch use one thread: on small tensors several threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _has_moved(values: Tensor, trial: TrialParameter) -> bool:
    return not values.numel() or _find_largest(values - trial.values) > 0


def _select_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Select what is not a tensor with dimensions."""
    return {
        path: value
        for path, value in state.items()
        if not isinstance(value, Tensor) or not value.dim()
    }


def _is_elementwise(
    optimizer: torch.optim.Optimizer,
    groups: list[TrialGroup],
    whole: TrialResult,
    gradients: Gradients,
) -> bool:
    """Compare an update of whole parameters with updates of their pieces.

    Two optimizers hold one piece of each parameter; a third one holds nothing.
    """
    if not _can_hold_nothing(optimizer, groups, whole, gradients):
        return False
    for which in (0, 1):
        pieces = [group.slice_piece(which) for group in groups]
        part = run_with_gradients(
            optimizer,
            pieces,
            [[slice_piece(each, which) for each in step if each is not None] for step in gradients],
            are_pieces=True,
        )
        if not is_same_value(part.shared_values, whole.shared_values):
            return False
        for index, piece in enumerate(list_parameters(pieces)):
            if not piece.values.numel():
                continue
            expected_state = whole.states[index]
            if whole.parameters[index].dim():
                # the state of whole tensors is cut and put together by the elements of each entry
                if any(
                    value is UNKNOWN or (isinstance(value, Tensor) and value.dim() and "/" in path)
                    for path, value in expected_state.items()
                ):
                    return False
                expected_state = {
                    path: _slice_state(value, whole.parameters[index], which)
                    for path, value in expected_state.items()
                }
                if not _is_equal_state(expected_state, part.states[index]):
                    return False
            if not _is_equal_update(
                slice_piece(whole.parameters[index], which), part.parameters[index], piece.values
            ):
                return False
    return True


def _slice_state(value: Any, parameter: Tensor, which: int) -> Any:
    """Return what a piece of a parameter must have in its state."""
    is_sliced = isinstance(value, Tensor) and value.shape == parameter.shape
    return slice_piece(value, which) if is_sliced else value


def _can_hold_nothing(
    optimizer: torch.optim.Optimizer,
    groups: list[TrialGroup],
    whole: TrialResult,
    gradients: Gradients,
) -> bool:
    """Test an optimizer without parameters: a step must work and change the same numbers."""
    empty_groups = [TrialGroup(group.settings, []) for group in groups]
    empty = run_with_gradients(optimizer, empty_groups, [[] for _ in gradients])
    return is_same_value(empty.shared_values, whole.shared_values)


def _is_tensorwise(
    optimizer: torch.optim.Optimizer,
    groups: list[TrialGroup],
    whole: TrialResult,
    gradients: Gradients,
) -> bool:
    """Compare one update of all parameters with updates of every second one.

    Other parameters are there without a gradient, and must not change; or they are not there.
    """
    if not _can_hold_nothing(optimizer, groups, whole, gradients):
        return False
    trials = list_parameters(groups)
    for which in (0, 1):
        indices = [index for index in range(len(trials)) if index % 2 == which]
        chosen = {id(trials[index]) for index in indices}
        some_groups = [
            TrialGroup(group.settings, [each for each in group.parameters if id(each) in chosen])
            for group in groups
        ]
        alone = run_with_gradients(
            optimizer, some_groups, [[step[index] for index in indices] for step in gradients]
        )
        beside = run_with_gradients(
            optimizer,
            groups,
            [
                [each if index in indices else None for index, each in enumerate(step)]
                for step in gradients
            ],
        )
        if not all(
            is_same_value(part.shared_values, whole.shared_values) for part in (alone, beside)
        ):
            return False
        for place, index in enumerate(indices):
            for values, state in (
                (alone.parameters[place], alone.states[place]),
                (beside.parameters[index], beside.states[index]),
            ):
                if not _is_equal_update(
                    whole.parameters[index], values, trials[index].values
                ) or not _is_equal_state(whole.states[index], state):
                    return False
        if not all(
            torch.equal(beside.parameters[index], trial.values)
            for index, trial in enumerate(trials)
            if index not in indices
        ):
            return False
    return True


def _is_equal_update(expected: Tensor, actual: Tensor, initial: Tensor) -> bool:
    """Return whether two results agree up to rounding of the move and of the values."""
    if not expected.numel():
        return True
    moved = _find_largest(expected - initial)
    bound = 1e-9 * moved + 8 * torch.finfo(torch.float64).eps * _find_largest(expected)
    return bool(_find_largest(expected - actual) <= bound)


def _is_equal_state(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    """Return whether two states agree: tensors up to rounding, and all else exactly."""
    if expected.keys() != actual.keys():
        return False
    for path, value in expected.items():
        other = actual[path]
        if not isinstance(value, Tensor) or not value.dim() or not value.is_floating_point():
            if not is_same_value(value, other):
                return False
        elif not (
            isinstance(other, Tensor)
            and value.shape == other.shape
            and value.dtype == other.dtype
            and torch.allclose(
                other,
                value,
                rtol=1e-9,
                atol=64 * torch.finfo(value.dtype).eps * _find_largest(value),
                equal_nan=True,
            )
        ):
            return False
    return True


def _find_largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


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
    with keep_generators(), _use_one_thread(), suppress(Exception):
        groups = [
            TrialGroup(
                group,
                [
                    _copy_tiny(optimizer, parameter)
                    for _, parameter in choose_largest(group["params"], 2)
                ],
            )
            for group in optimizer.param_groups
        ]
        moves = [draw(each.values) for each in list_parameters(groups)]
        unmoved_parameters, unmoved_optimizer = start_trial(optimizer, groups)
        moved_parameters, moved_optimizer = start_trial(optimizer, groups)
        remaining = [1.0 for _ in moves]
        for step in range(COPY_TRIAL_STEPS):
            gradients = [draw(each.values) for each in list_parameters(groups)]
            run_trial_step(unmoved_optimizer, unmoved_parameters, gradients)
            run_trial_step(moved_optimizer, moved_parameters, gradients)
            for parameter, move in zip(moved_parameters, moves, strict=True) if not step else ():
                parameter.detach().add_(move)
            previous = remaining
            remaining = [
                _measure_remaining_share(*each)
                for each in zip(unmoved_parameters, moved_parameters, moves, strict=True)
            ]
            if any(
                now < REMAINING_SHARE * earlier
                for now, earlier in zip(remaining, previous, strict=True)
            ):
                return True
    return False


def _copy_tiny(optimizer: torch.optim.Optimizer, parameter: Tensor) -> TrialParameter:
    """Copy the corner of a parameter and of its state, in their own dtypes."""
    sizes = choose_corner_sizes(parameter.shape, TINY_SIZE)
    return TrialParameter(
        copy_corner(parameter.detach(), sizes),
        {
            entry: copy_corner(value, sizes)
            for entry, value in optimizer.state.get(parameter, {}).items()
        },
    )


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


def compute_clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor for gradients of a norm, as torch.nn.utils.clip_grad_norm_ computes it.

    Args:
        norm: The norm of all gradients.
        max_norm: The largest norm that is allowed; None: the factor is 1.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
