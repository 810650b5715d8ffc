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
from paragrad.engine.state.preserve_state import State
from paragrad.engine.state.values import differentiable, saved_buffers, wide
from paragrad.jobs.loss import Summed
from paragrad.record.step_log import Log

# of norms, which docs say become means
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Numbers = list[dict[str, float]]  # of an optimizer, by group
LOSS = "the loss"  # before the names of its buffers
REPLACED = (
    "a forward put another parameter in its place, tied it or made it, and what is averaged is "
    "known by its name; do "
    "that in __init__, and change values in place"
)
ONE_SHAPE = (
    "give it one shape, whatever the batch; or register it with persistent=False, or keep it in an "
    "attribute that is "
    "no buffer: then it has no mean"
)


def values_of(summed: Summed) -> dict[str, Tensor]:
    """What has a mean, by name."""
    loss = summed.keeper
    beside = saved_buffers(loss, LOSS) if isinstance(loss, nn.Module) else {}
    return {**dict(summed.model.named_parameters()), **saved_buffers(summed.model), **beside}


def nearest(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """A mean as a value of a type; of whole numbers the nearest one."""
    if dtype == torch.bool:
        return mean >= 0.5
    return (mean if dtype.is_floating_point or dtype.is_complex else mean.round()).to(dtype)


class Said:
    """What a record says, once: which values become means, and what has none."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.averaged = set[str]()
        self.once = set[str]()

    def means(self, names: Iterable[str]) -> None:
        """Of values that forwards changed, and that were averaged."""
        new = [
            name
            for name in names
            if name not in self.averaged and name.rpartition(".")[2] not in STATISTICS
        ]
        self.averaged.update(new)
        if new:
            self.log.choice(
                "averaged too",
                _some(new),
                "forwards change it, and state_dict holds it; where a mean of it is "
                "good for nothing, register it with persistent=False",
            )

    def python(self, before: State, whose: str, tensors: Sequence[str] = ()) -> None:
        """A forward has been. tensors: of a model that is cut, which may stand in
        attributes.
        """
        changed = before.changed() if "python" not in self.once else ()
        self.once.add("python")
        every = (f"{owner}.{what}".lstrip(".") for owner, what in changed)
        if names := [name for name in every if name not in tensors]:
            self.log.choice(
                "kept in Python", whose, f"forwards change it, and it has no mean: {_some(names)}"
            )

    def groups(self, told: list[Numbers]) -> None:
        """What optimizers have in their groups, of which the first one's are saved."""
        every = [
            (what, {each[what] for each in groups if what in each})
            for groups in zip(*told, strict=True)
            for what in groups[0]
        ]
        differ = [
            f"{what} ({min(found):g} to {max(found):g})" for what, found in every if len(found) > 1
        ]
        if differ and "groups" not in self.once:
            self.once.add("groups")
            self.log.choice(
                "optimizer",
                "with the first worker's settings",
                "they differ, and a checkpoint has one of each: " + _some(differ),
            )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"


# ---- optimizers' states ----------------------------------------------------------------------
def mean_state(told: list[tuple[float, layout.State]]) -> layout.State:
    """Of some workers', each by its weight, the mean of what tensors of numbers hold; of
    anything else the first one's. Where a parameter's holds other tensors too (the codes of an
    8-bit optimizer, beside their scales) one worker's, whole.
    """
    # they have just met
    told = told if any(weight for weight, _ in told) else [(1.0, state) for _, state in told]
    found: layout.State = {}
    for name in dict.fromkeys(name for _, state in told for name in state):
        there = [(weight, state[name]) for weight, state in told if name in state]
        if any(_code(value) for _, values in there for value in values.values()):
            found[name] = dict(there[0][1])
        else:
            found[name] = {
                what: _mean([(weight, values[what]) for weight, values in there if what in values])
                for what in dict.fromkeys(what for _, values in there for what in values)
            }
    return found


def _number(value: Any) -> bool:
    """A tensor that has a mean: not a count, nor of a type so coarse that its values are
    codes.
    """
    return (
        isinstance(value, Tensor)
        and bool(value.dim())
        and differentiable(value)
        and value.dtype.itemsize > 1
    )


def _code(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.dim()) and not _number(value)


def _mean(there: list[tuple[float, Any]]) -> Any:
    first = there[0][1]
    if not all(_number(value) for _, value in there):
        return first
    there = there if any(weight for weight, _ in there) else [(1.0, value) for _, value in there]
    total = sum(weight for weight, _ in there)
    wider = wide(first.dtype)
    return sum(value.to(wider) * (weight / total) for weight, value in there).to(first.dtype)


def numbers_of(optimizer: torch.optim.Optimizer) -> Numbers:
    """What it has in each of its groups."""
    return [
        {what: value for what, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
