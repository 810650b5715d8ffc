"""Numbers that modules keep in Python outside of units.

The forward of such modules runs on every rank, up to the end of the rank's stage.
"""

from __future__ import annotations

from typing import Any

from paragrad.engine.state.preserve_state import PythonState, find_state_owners
from paragrad.errors import StepFailed
from paragrad.parallel.tracing.tracer import StagedModel
from paragrad.runtime.world import World


def collect_outer_owners(staged_model: StagedModel) -> dict[str, Any]:
    """Collect modules that are in no unit, and the objects that these keep, by name."""
    units = tuple(f"{name}." for name in staged_model.units.values())
    return {
        name: owner
        for name, owner in find_state_owners(staged_model.model).items()
        if not f"{name}.".startswith(units)
    }


def refuse_diverging_numbers(before: PythonState, axis: World, runs_repeatedly: bool) -> None:
    """Refuse numbers that forwards changed and that differ between the ranks of a replica.

    The function is collective. Not every rank reaches the end of a forward. A count there stays
    unchanged on the other ranks, and code that reads it takes another path.

    Args:
        before: The state before the forwards.

        axis: The ranks of the replica.

        runs_repeatedly: Whether a rank runs the model's Python several times for a micro-batch, and
            only counts have changed. Then every changed number is refused.

    Raises:
        StepFailed: There is such a number.
    """
    changes_of_ranks = axis.gather_objects(
        {
            each: value
            for each, value in before.collect_changes().items()
            if isinstance(value, int | float)
        }
    )
    diverging = [
        (each, values)
        for each in dict.fromkeys(each for numbers in changes_of_ranks for each in numbers)
        if len(
            values := {
                repr(numbers[each]) if each in numbers else "as it was"
                for numbers in changes_of_ranks
            }
        )
        > 1
        or runs_repeatedly
    ]
    if diverging := axis.broadcast_object(diverging[:1]):
        (((owner, what), values),) = diverging
        reason = (
            "and with interleaved parts, or recompute, a rank runs the model's Python more than "
            "once for a micro-batch; leave these out"
            if runs_repeatedly
            else f"and not alike on all ranks that have a part of the model "
            f"({', '.join(sorted(values))}): each runs the model's Python up to the end of its "
            "part; change it where forward begins"
        )
        raise StepFailed(
            f"forwards change this number, {reason}, or train it with data(n)",
            tensor=f"{owner}.{what}".lstrip("."),
        )
