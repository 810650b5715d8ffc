"""What has a mean over workers, besides weights, and what mean it has: for all who average
weights in place of gradients.

Values: parameters, buffers that the model's state_dict holds, and those of a loss that is a
module. What it does not hold (`persistent=False`) is computed anew where it is missing: a cache
that one worker filled further than another has no mean. Nor has what modules keep in Python.
Optimizers' states: of numbers the mean, of codes for numbers one worker's.
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

# of norms, which docs say become means
BATCH_NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
GroupNumbers = list[dict[str, float]]  # of an optimizer, by group
LOSS_PREFIX = "the loss"  # before the names of its buffers
REPLACED_MESSAGE = (
    "a forward put another parameter in its place, tied it or made it, and what is averaged is "
    "known by its name; do "
    "that in __init__, and change values in place"
)
ONE_SHAPE_HINT = (
    "give it one shape, whatever the batch; or register it with persistent=False, or keep it in an "
    "attribute that is "
    "no buffer: then it has no mean"
)


def collect_averageable(loss_module: LossModule) -> dict[str, Tensor]:
    """What has a mean, by name."""
    loss = loss_module.state_owner
    beside = list_saved_buffers(loss, LOSS_PREFIX) if isinstance(loss, nn.Module) else {}
    return {
        **dict(loss_module.model.named_parameters()),
        **list_saved_buffers(loss_module.model),
        **beside,
    }


def round_to_type(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """A mean as a value of a type; of whole numbers the nearest one."""
    if dtype == torch.bool:
        return mean >= 0.5
    return (mean if dtype.is_floating_point or dtype.is_complex else mean.round()).to(dtype)


class AveragingNotes:
    """What a record says, once: which values become means, and what has none."""

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self.averaged_names = set[str]()
        self.noted_topics = set[str]()

    def note_averages(self, names: Iterable[str]) -> None:
        """Of values that forwards changed, and that were averaged."""
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
                "forwards change it, and state_dict holds it; where a mean of it is "
                "good for nothing, register it with persistent=False",
            )

    def note_python_state(
        self, before: PythonState, description: str, tensors: Sequence[str] = ()
    ) -> None:
        """A forward has been. tensors: of a model that is cut, which may stand in
        attributes.
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
        """What optimizers have in their groups, of which the first one's are saved."""
        every = [
            (what, {each[what] for each in groups if what in each})
            for groups in zip(*worker_groups, strict=True)
            for what in groups[0]
        ]
        differ = [
            f"{what} ({min(found):g} to {max(found):g})" for what, found in every if len(found) > 1
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


# ---- optimizers' states ----------------------------------------------------------------------
def average_state(
    worker_states: list[tuple[float, layout.OptimizerState]],
) -> layout.OptimizerState:
    """Of some workers', each by its weight, the mean of what tensors of numbers hold; of
    anything else the first one's. Where a parameter's holds other tensors too (the codes of an
    8-bit optimizer, beside their scales) one worker's, whole.
    """
    # they have just met
    worker_states = (
        worker_states
        if any(weight for weight, _ in worker_states)
        else [(1.0, state) for _, state in worker_states]
    )
    found: layout.OptimizerState = {}
    for name in dict.fromkeys(name for _, state in worker_states for name in state):
        there = [(weight, state[name]) for weight, state in worker_states if name in state]
        if any(_is_code(value) for _, values in there for value in values.values()):
            found[name] = dict(there[0][1])
        else:
            found[name] = {
                what: _average_state_value(
                    [(weight, values[what]) for weight, values in there if what in values]
                )
                for what in dict.fromkeys(what for _, values in there for what in values)
            }
    return found


def _is_averageable(value: Any) -> bool:
    """A tensor that has a mean: not a count, nor of a type so coarse that its values are
    codes.
    """
    return (
        isinstance(value, Tensor)
        and bool(value.dim())
        and is_differentiable(value)
        and value.dtype.itemsize > 1
    )


def _is_code(value: Any) -> bool:
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
    """What it has in each of its groups."""
    return [
        {what: value for what, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
