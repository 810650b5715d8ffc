"""Compare the update of a step with that of one worker's optimizer.

Rank 0 copies the optimizer, with the state that one worker would have, and gives it the strategy's
mean gradients and parameters. After the strategy's update both must have left the same parameters
and the same state. The optimizer of each rank may hold a part of the parameters, and may run on
another process (a server).

The operations are the same on the same numbers. So a value may differ by a few units in its last
place, and by a small part of the largest change in its tensor. The reason is the norm of a divided
gradient, which is summed in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.layout import OptimizerState
from paragrad.engine.optimizer.optimizer_state import copy_optimizer, select_global_state
from paragrad.engine.optimizer.update_probe import ELEMENTWISE_OPTIMIZERS
from paragrad.errors import describe_error
from paragrad.trainer.checks.step_result import (
    Gap,
    compute_largest,
    compute_largest_finite,
)
from paragrad.trainer.checks.whole_module import explain_no_room
from paragrad.trainer.training import Training

VALUE_EPS = 8  # in eps of a value: how far it may differ
CHANGE_EPS = 4096  # in eps of a value's change
LARGEST_CHANGE = 0.01  # of a value's change, in types of few digits


# what torch keeps in an optimizer besides groups, state and defaults, and sets anew in a copy
TORCH_ATTRIBUTES = frozenset(
    (
        "defaults",
        "state",
        "param_groups",
        "step",  # as a scheduler of torch wraps it
        "_opt_called",
        "_wrapped_by_lr_sched",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
)
PLAIN_TYPES = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def list_group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
    """List the names of the parameters in each group of an optimizer.

    Args:
        model: The whole model.
        optimizer: The optimizer over it, before any part of it is moved or divided.

    Returns:
        The names; None if the optimizer holds a parameter that the model does not have.
    """
    names = {id(each): name for name, each in model.named_parameters()}
    groups = [[names.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    return None if any(None in group for group in groups) else groups  # type: ignore[return-value]


def list_group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """List the parameters in each group of an optimizer by identity.

    Args:
        optimizer: The optimizer.
    """
    return [[id(each) for each in group["params"]] for group in optimizer.param_groups]


def explain_no_copy(
    optimizer: torch.optim.Optimizer,
    group_names: list[list[str]] | None,
    steps_on_servers: bool = False,
) -> str | None:
    """Explain why one worker's optimizer cannot be copied from this one.

    Args:
        optimizer: The optimizer of a rank.
        group_names: As `list_group_names` returns them.
        steps_on_servers: Whether the optimizer of a rank never steps, because servers update.

    Returns:
        The explanation, or None.
    """
    kind = type(optimizer).__name__
    if group_names is None:
        return f"{kind} holds other parameters than the model's, or than at the beginning"
    if len(group_names) != len(optimizer.param_groups):
        return f"{kind} has got another group of parameters since the first step"
    if steps_on_servers and not type(optimizer).__module__.startswith("torch.optim."):
        return f"{kind} steps on the servers, which hold its counts outside of states"
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and not _is_plain(value) and not _is_number_tensor(value):
                return f"{kind} keeps {name} in a group"
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks") and value:
            return f"{kind} has a hook, which may act on the model itself"
        if name not in TORCH_ATTRIBUTES and not _is_plain(value):
            return f"{kind} keeps {name} in an attribute"
    return None


def _is_number_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of one number, such as a rate, and no parameter."""
    return isinstance(value, Tensor) and value.numel() == 1 and not isinstance(value, nn.Parameter)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN_TYPES)


def copy_whole_optimizer(
    optimizer: torch.optim.Optimizer,
    group_names: list[list[str]],
    parameters: Mapping[str, Tensor],
    state: OptimizerState,
) -> torch.optim.Optimizer:
    """Copy the optimizer of a rank as one over the whole model.

    Args:
        optimizer: The optimizer, of which `explain_no_copy` says nothing.
        group_names: The names of the parameters in each group.
        parameters: The parameters of the whole model by name.
        state: Their state, as one worker's optimizer has it.
    """
    groups = [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [parameters[name] for name in names],
        }
        for group, names in zip(optimizer.param_groups, group_names, strict=True)
    ]
    copied_state = copy.deepcopy(select_global_state(optimizer))
    for name, values in state.items():
        if name in parameters and values:
            copied_state[parameters[name]] = {
                entry: _copy_state_value(value, parameters[name]) for entry, value in values.items()
            }
    return copy_optimizer(optimizer, groups, copied_state)


def _copy_state_value(value: Any, parameter: Tensor) -> Any:
    """Copy an entry of a state; what has the form of a tensor lies where its parameter does."""
    if isinstance(value, Tensor) and value.dim():
        return value.detach().to(parameter.device, copy=True)
    return copy.deepcopy(value)


@dataclass(frozen=True)
class UpdateCheck:
    """One worker's update of some parameters, made on copies, to compare the strategy's with.

    Attributes:
        parameters: The parameters that one worker's update leaves.

        state: The optimizer's state that it leaves, by parameter.

        changes: By how much it changes a parameter or an entry of the state at most, by name.
    """

    parameters: dict[str, Tensor]
    state: OptimizerState
    changes: dict[str, float]

    def find_gap(
        self, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> tuple[float, Gap] | None:
        """Find the parameter or the entry of the state that differs most.

        Args:
            parameters: The parameters that the strategy's update left.
            state: The state that it left.

        Returns:
            (excess, gap): the difference, and how many times it is what may differ. None if all are
            equal.
        """
        worst: tuple[float, Gap] | None = None
        ours = dict(_iterate_tensors(parameters, state))
        for name, expected in _iterate_tensors(self.parameters, self.state):
            excess, value = _measure_excess(ours.get(name), expected, self.changes.get(name, 0.0))
            if excess > 1.0 and (worst is None or excess > worst[0]):
                worst = excess, Gap(value, name, float(expected.abs().max()))
        return worst


def _iterate_tensors(
    parameters: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the tensors of their state, by name."""
    yield from parameters.items()
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"{key} of {name}", value


def _measure_excess(ours: Tensor | None, expected: Tensor, change: float) -> tuple[float, float]:
    """Return (largest difference by what is allowed, largest difference)."""
    if ours is None or ours.shape != expected.shape:
        return math.inf, math.inf
    ours = ours.detach().to(expected.device)
    if not expected.numel() or torch.equal(ours, expected):
        return 0.0, 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return math.inf, float((ours.double() - expected.double()).abs().max())
    eps = torch.finfo(expected.dtype).eps
    allowed_change = min(CHANGE_EPS * eps, LARGEST_CHANGE) * change
    largest = compute_largest(ours.to(expected.dtype) - expected)
    if largest <= allowed_change:  # without copies; values that are not finite are not less
        return largest / (allowed_change or 1.0), largest
    if not torch.equal(torch.isfinite(ours), torch.isfinite(expected)):
        return math.inf, math.inf
    wide = torch.promote_types(expected.dtype, torch.float32)
    difference = (ours.to(wide) - expected.to(wide)).abs()
    allowed = VALUE_EPS * eps * expected.to(wide).abs() + allowed_change
    finite = torch.isfinite(difference)
    excess = (difference / allowed.clamp_min(torch.finfo(allowed.dtype).tiny))[finite]
    return float(excess.max()) if excess.numel() else 0.0, float(difference[finite].max())


def _measure_change(before: Tensor | None, after: Tensor) -> float:
    """Return the largest finite change of a value; of a new one, its largest magnitude."""
    if not after.numel() or not (after.is_floating_point() or after.is_complex()):
        return 0.0
    has_start = before is not None and before.shape == after.shape
    return compute_largest_finite(
        after - before.to(after) if has_start and before is not None else after
    )


def make_reference_update(
    training: Training,
    group_names: list[list[str]] | None,
    gradients: Mapping[str, Tensor | None] | None,
) -> list[UpdateCheck] | str:
    """Make one worker's update on copies, on rank 0. Collective, between gradients and update.

    Args:
        training: The training.
        group_names: As `list_group_names` returns them.
        gradients: The mean gradients of the whole model, on rank 0 at least; None on all ranks to
            gather them.

    Returns:
        The checks of all parameters; on other ranks empty ones. Or why the update cannot be
        compared.
    """
    setup, optimizer = training.setup, training.state.optimizer
    reason = explain_no_copy(optimizer, group_names, bool(setup.strategy.servers))
    # Copies of parameters and gradients, and of Adam's state, which is twice the parameters. What
    # ranks hold parts of is gathered besides, all of it or a part at a time.
    is_gathered = setup.shard_layout.is_partitioned or training.exchange.sharing_ranks > 1
    copies = 4 if not is_gathered else 5 if _updates_alone(training) else 10
    # one rank's reason is all ranks' reason: the rest is collective
    reasons = training.world.gather_objects(reason or explain_no_room(training, copies))
    if reason := training.world.broadcast_object(next(filter(None, reasons), None)):
        return str(reason)
    assert group_names is not None
    if gradients is None:
        gradients = setup.shard_layout.gather_serial_tensors(
            training.exchange.gather_mean_gradients(), on_all_ranks=False
        )
    checks = list[UpdateCheck]()
    obstacle: str | None = None
    for current, state in iterate_trained(training):
        check = UpdateCheck({}, {}, {})
        if training.world.rank == 0 and obstacle is None:
            try:
                check = _run_reference_update(training, group_names, gradients, current, state)
            except Exception as error:
                obstacle = f"a copy of {type(optimizer).__name__} raised {describe_error(error)}"
        checks.append(check)
    compared = {name for check in checks for name in check.parameters}
    missing = [name for names in group_names for name in names if name not in compared]
    if training.world.rank == 0 and obstacle is None and missing:
        obstacle = f"no rank has {missing[0]}, which {type(optimizer).__name__} updates"
    return training.world.broadcast_object(obstacle) or checks


def _run_reference_update(
    training: Training,
    group_names: list[list[str]],
    gradients: Mapping[str, Tensor | None],
    current: dict[str, Tensor],
    state: OptimizerState,
) -> UpdateCheck:
    optimizer, clip_norm = training.state.optimizer, training.options.clip_norm
    # some optimizers change gradients in place, and clipping does
    copies_gradients = clip_norm is not None or type(optimizer) not in ELEMENTWISE_OPTIMIZERS
    parameters = {name: nn.Parameter(each.clone()) for name, each in current.items()}
    for name, each in parameters.items():
        if (gradient := gradients.get(name)) is not None:
            each.grad = gradient.detach().clone() if copies_gradients else gradient.detach()
    names = [[name for name in group if name in parameters] for group in group_names]
    whole_optimizer = copy_whole_optimizer(optimizer, names, parameters, state)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
    training.draw_alike("update", training.state.steps, whole_optimizer.step)
    new_parameters = {name: each.detach() for name, each in parameters.items()}
    new_state = {
        name: dict(whole_optimizer.state[each])
        for name, each in parameters.items()
        if each in whole_optimizer.state
    }
    before = dict(_iterate_tensors(current, state))
    changes = {
        name: _measure_change(before.get(name), each)
        for name, each in _iterate_tensors(new_parameters, new_state)
    }
    for each in parameters.values():
        each.grad = None
    return UpdateCheck(new_parameters, new_state, changes)


def iterate_trained(training: Training) -> Iterator[tuple[dict[str, Tensor], OptimizerState]]:
    """Gather the parameters and the optimizer's state on rank 0. Collective.

    They are gathered some parameters at a time, if one worker's optimizer can update these alone.
    Without parts these are the tensors themselves, which the next update changes.

    Args:
        training: The training.

    Yields:
        (parameters, state) of the whole model by name; nothing on other ranks.
    """
    layout = training.setup.shard_layout
    is_first_rank = training.world.rank == 0
    parameters: dict[str, Tensor | None] = {
        name: each.detach() for name, each in training.setup.parameters.items()
    }
    for names, state in (
        training.exchange.iterate_optimizer_state()
        if _updates_alone(training)
        else [(list(parameters), training.exchange.gather_optimizer_state())]
    ):
        part = {name: parameters.pop(name) for name in names if name in parameters}
        (tensors,), state = layout.gather_serial_values([part], state)
        yield (
            {name: each for name, each in tensors.items() if each is not None}
            if is_first_rank
            else {},
            state if is_first_rank else {},
        )
    if parameters:  # no rank trains them
        rest = {name: each for name, each in parameters.items() if each is not None}
        yield (rest if is_first_rank else {}), {}


def _updates_alone(training: Training) -> bool:
    """Return whether one worker's optimizer can update some parameters without the others."""
    return (
        type(training.state.optimizer) in ELEMENTWISE_OPTIMIZERS
        and training.options.clip_norm is None
        and not training.setup.shard_layout.is_partitioned
    )
