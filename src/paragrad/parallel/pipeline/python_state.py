"""What modules keep in Python that are in no unit: their forward is run on every rank, up to
the end of the rank's part.
"""

from __future__ import annotations

from typing import Any

from paragrad.engine.state.preserve_state import (
    PythonState,
    find_state_owners,
    list_comparable_attributes,
)
from paragrad.errors import StepFailed
from paragrad.parallel.tracing.tracer import StagedModel
from paragrad.runtime.world import World


def collect_outer_owners(staged_model: StagedModel) -> dict[str, Any]:
    """Modules that are in no unit, and the objects that these keep, by name."""
    units = tuple(f"{name}." for name in staged_model.units.values())
    return {
        name: owner
        for name, owner in find_state_owners(staged_model.model).items()
        if not f"{name}.".startswith(units)
    }


def read_owner_numbers(owners: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Those of these owners, by owner and attribute."""
    return {
        (name, what): vars(owner)[what]
        for name, owner in owners.items()
        for what in list_comparable_attributes(owner)
        if isinstance(vars(owner)[what], int | float) and what != "training"
    }


def refuse_diverging_numbers(before: PythonState, axis: World, runs_repeatedly: bool) -> None:
    """Numbers that forwards changed since then are the same on all ranks of a replica: a count
    at the end of a forward, to which not every rank comes, stands still on the others, and who
    reads it goes another way. often: a rank runs the model's Python more than once for a
    micro-batch, and nothing but a count has changed. Collective.
    """
    every = axis.gather_objects(
        {
            each: value
            for each, value in before.collect_changes().items()
            if isinstance(value, int | float)
        }
    )
    unlike = [
        (each, told)
        for each in dict.fromkeys(each for numbers in every for each in numbers)
        if len(
            told := {repr(numbers[each]) if each in numbers else "as it was" for numbers in every}
        )
        > 1
        or runs_repeatedly
    ]
    if unlike := axis.broadcast_object(unlike[:1]):
        (((owner, what), told),) = unlike
        because = (
            "and with interleaved parts, or recompute, a rank runs the model's Python more than "
            "once for a micro-batch; "
            "leave these out"
            if runs_repeatedly
            else f"and not alike on all ranks that have a part of the model "
            f"({', '.join(sorted(told))}): each runs the "
            "model's Python up to the end of its part; change it where forward begins"
        )
        raise StepFailed(
            f"forwards change this number, {because}, or train it with data(n)",
            tensor=f"{owner}.{what}".lstrip("."),
        )
