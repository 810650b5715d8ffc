"""What modules keep in Python that are in no unit: their forward is run on every rank, up to the end of the rank's part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paragrad.errors import StepFailed
from paragrad.techniques.model_parallel.watch import InUnits
from paragrad.techniques.untouched import State, owners
from paragrad.world.world import World


def outside(flow: InUnits) -> dict[str, Any]:
    """Modules that are in no unit, and the objects that these keep, by name."""
    units = tuple(f"{name}." for name in flow.units.values())
    return {name: owner for name, owner in owners(flow.model).items() if not f"{name}.".startswith(units)}


@contextlib.contextmanager
def put_back(found: dict[str, Any]) -> Iterator[None]:
    """Around a forward of one of several parts of a rank: the last of them leaves what one forward of the model does."""
    state = State(found, compared=False)
    yield
    state.put_back()


def refuse_unlike(before: State, line: World) -> None:
    """Numbers that forwards changed since then are the same on all ranks of a replica: a count at the end of a forward, to
    which not every rank comes, stands still on the others, and who reads it goes another way. Collective."""
    every = line.collected({each: value for each, value in before.changed().items() if isinstance(value, int | float)})
    unlike = [(each, told) for each in dict.fromkeys(each for numbers in every for each in numbers)
              if len(told := {repr(numbers[each]) if each in numbers else "as it was" for numbers in every}) > 1]
    if unlike := line.agreed(unlike[:1]):
        ((owner, what), told), = unlike
        raise StepFailed(f"forwards change this number, and not alike on all ranks that have a part of the model ("
                         f"{', '.join(sorted(told))}): each runs the model's Python up to the end of its part; change it where "
                         "forward begins, or train it with data(n)", tensor=f"{owner}.{what}".lstrip("."))
