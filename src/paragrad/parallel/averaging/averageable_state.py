"""Which values have a mean over workers, and how that mean is computed.

It serves all strategies that average weights instead of gradients.

Values with a mean are parameters, buffers in the state_dict of the model, and the saved buffers of
a loss that is a module. A buffer outside of the state_dict (`persistent=False`) is recomputed where
it is missing. It may be a cache that one worker filled further than another, so it has no mean.
Python state of modules has no mean either.

In the state of an optimizer, tensors of numbers are averaged. Of tensors that hold codes for
numbers, those of one worker are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine import layout
from paragrad.engine.state.preserve_state import PythonState
from paragrad.engine.state.values import (
    get_accumulation_dtype,
    is_differentiable,
    list_saved_buffers,
)
from paragrad.jobs.loss import LossModule
from paragrad.record.step_log import StepLog

# statistics of norm layers: the documentation says that they are averaged
BATCH_NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
GroupNumbers = list[dict[str, float]]  # the numbers in each group of an optimizer
LOSS_PREFIX = "the loss"  # prefix of the names of its buffers
REPLACED_MESSAGE = (
    "a forward put another parameter in its place, tied it or made it, and averaging finds "
    "parameters by their names; do that in __init__, and change values in place"
)
ONE_SHAPE_HINT = (
    "give it one shape, whatever the batch; or register it with persistent=False, or keep it in "
    "an attribute that is no buffer: then it is not averaged"
)


def collect_averageable(loss_module: LossModule) -> dict[str, Tensor]:
    """Return the values that have a mean, by name.

    Args:
        loss_module: The model and the loss.

    Returns:
        Parameters and saved buffers of the model, and saved buffers of the loss with LOSS_PREFIX.
    """
    loss = loss_module.state_owner
    loss_buffers = list_saved_buffers(loss, LOSS_PREFIX) if isinstance(loss, nn.Module) else {}
    return {
        **dict(loss_module.model.named_parameters()),
        **list_saved_buffers(loss_module.model),
        **loss_buffers,
    }


def round_to_type(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mean to the dtype of the value.

    Args:
        mean: The mean.
        dtype: The dtype. Integers are rounded to the nearest one; a boolean is true from 0.5 on.

    Returns:
        A tensor of that dtype.
    """
    if dtype == torch.bool:
        return mean >= 0.5
    return (mean if dtype.is_floating_point or dtype.is_complex else mean.round()).to(dtype)


class AveragingNotes:
    """Notes in the step log on averaged values and on values without a mean, each written once.

    Args:
        log: The step log.

    Attributes:
        log: The step log.
        averaged_names: Names of averaged values that were noted.
        noted_topics: Topics that were noted, such as "python".
    """

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self.averaged_names = set[str]()
        self.noted_topics = set[str]()

    def note_averages(self, names: Iterable[str]) -> None:
        """Note values that forward passes changed and that were averaged.

        Args:
            names: Their names. Statistics of norm layers are left out; the documentation covers
                them.
        """
        new = [
            name
            for name in names
            if name not in self.averaged_names
            and name.rpartition(".")[2] not in BATCH_NORM_STATISTICS
        ]
        self.averaged_names.update(new)
        if new:
            self.log.write_choice(
                "averaged too",
                _shorten_names(new),
                "forwards change it, and state_dict holds it; if its mean is useless, register it "
                "with persistent=False",
            )

    def note_python_state(
        self, before: PythonState, description: str, tensors: Sequence[str] = ()
    ) -> None:
        """Note the Python state that forward passes changed. It has no mean.

        It is called after a forward pass; only the first call has an effect.

        Args:
            before: The Python state before the forward pass.

            description: How that state relates between workers, as the log shows it.

            tensors: Names of tensors of a partitioned model that may be attributes. They are left
                out.
        """
        changed = before.collect_changes() if "python" not in self.noted_topics else ()
        self.noted_topics.add("python")
        every = (f"{owner}.{what}".lstrip(".") for owner, what in changed)
        if names := [name for name in every if name not in tensors]:
            self.log.write_choice(
                "kept in Python",
                description,
                f"forwards change it, and it has no mean: {_shorten_names(names)}",
            )

    def note_optimizer_groups(self, worker_groups: list[GroupNumbers]) -> None:
        """Note settings of optimizer groups that differ between workers.

        A checkpoint holds those of the first worker.

        Args:
            worker_groups: For each worker, the numbers in its groups.
        """
        group_values = [
            (what, {each[what] for each in groups if what in each})
            for groups in zip(*worker_groups, strict=True)
            for what in groups[0]
        ]
        differ = [
            f"{what} ({min(values):g} to {max(values):g})"
            for what, values in group_values
            if len(values) > 1
        ]
        if differ and "groups" not in self.noted_topics:
            self.noted_topics.add("groups")
            self.log.write_choice(
                "optimizer",
                "with the first worker's settings",
                "they differ, and a checkpoint has one of each: " + _shorten_names(differ),
            )


def _shorten_names(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"


# ---- optimizer states -------------------------------------------------------------------------
def average_state(
    worker_states: list[tuple[float, layout.OptimizerState]],
) -> layout.OptimizerState:
    """Compute the mean of the optimizer states of workers.

    Tensors of numbers are averaged, each by the weight of its worker. Of anything else, the value
    of the first worker is used. If a parameter has other tensors too, its whole state is that of
    one worker. An example is an 8-bit optimizer, which keeps codes and their scales.

    Args:
        worker_states: For each worker, its weight and its state.

    Returns:
        The state by parameter name.
    """
    # if all weights are 0, the replicas were averaged just now and count equally
    worker_states = (
        worker_states
        if any(weight for weight, _ in worker_states)
        else [(1.0, state) for _, state in worker_states]
    )
    averaged: layout.OptimizerState = {}
    for name in dict.fromkeys(name for _, state in worker_states for name in state):
        parameter_states = [
            (weight, state[name]) for weight, state in worker_states if name in state
        ]
        if any(_is_code(value) for _, values in parameter_states for value in values.values()):
            averaged[name] = dict(parameter_states[0][1])
        else:
            averaged[name] = {
                what: _average_state_value(
                    [
                        (weight, values[what])
                        for weight, values in parameter_states
                        if what in values
                    ]
                )
                for what in dict.fromkeys(what for _, values in parameter_states for what in values)
            }
    return averaged


def _is_averageable(value: Any) -> bool:
    """Return whether a value is a tensor that has a mean.

    A count has none, and neither has a dtype so coarse that its values are codes.
    """
    return (
        isinstance(value, Tensor)
        and bool(value.dim())
        and is_differentiable(value)
        and value.dtype.itemsize > 1
    )


def _is_code(value: Any) -> bool:
    """Return whether a value is a tensor, with dimensions, that has no mean."""
    return isinstance(value, Tensor) and bool(value.dim()) and not _is_averageable(value)


def _average_state_value(weighted_values: list[tuple[float, Any]]) -> Any:
    first = weighted_values[0][1]
    if not all(_is_averageable(value) for _, value in weighted_values):
        return first
    weighted_values = (
        weighted_values
        if any(weight for weight, _ in weighted_values)
        else [(1.0, value) for _, value in weighted_values]
    )
    total = sum(weight for weight, _ in weighted_values)
    wider = get_accumulation_dtype(first.dtype)
    return sum(value.to(wider) * (weight / total) for weight, value in weighted_values).to(
        first.dtype
    )


def collect_group_numbers(optimizer: torch.optim.Optimizer) -> GroupNumbers:
    """Return the numbers in each group of an optimizer.

    Args:
        optimizer: The optimizer.
    """
    return [
        {what: value for what, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
