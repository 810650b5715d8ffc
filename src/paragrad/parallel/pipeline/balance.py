"""The split of a model into consecutive parts: between which calls of modules it is cut, and
what each part uses.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import copied
from paragrad.engine.rng.draws import Recording
from paragrad.engine.rng.random_kernels import drawing
from paragrad.engine.state.preserve_state import untouched
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed
from paragrad.parallel.tracing.cut_points import (
    NO_LOSS,
    Units,
    joined,
    listed,
    named,
    opened,
    units_of,
)
from paragrad.parallel.tracing.plan_builder import Standing
from paragrad.parallel.tracing.receive_boundary import entered
from paragrad.parallel.tracing.stage_forward import Flow
from paragrad.parallel.tracing.tracer import InUnits, Running, Unit, tensors_in
from paragrad.strategies.pipeline import Asked

ROUNDS = 3  # of which the quickest counts
# a part, where that leaves modules whole: inside of one that is cut every operation is watched
LONGER = 1.1


@dataclass(frozen=True)
class Cut:
    """Where a model is cut. parts: the units of each, modules that are called as a whole;
    seconds: of each part, forward and backward, as it was measured;  work: of each, operations
    in the matrix products of a forward;  uses: of each parameter and buffer that was used, in
    which parts;  draws: the random calls that are made where each part is run; standing: what
    those modules give that decide shapes by values;  watched: the parts as ranks run them, in
    larger calls.
    """

    parts: tuple[tuple[Unit, ...], ...]
    seconds: tuple[float, ...]
    work: tuple[int, ...]
    uses: Mapping[str, tuple[int, ...]]
    draws: tuple[tuple[int, ...], ...]
    standing: Standing
    watched: Sequence[Sequence[Unit]]

    @property
    def told(self) -> list[str]:
        """Each part in words."""
        return [
            units[0][0] + (f" to {units[-1][0]}" if len(units) > 1 else "") for units in self.parts
        ]

    def __str__(self) -> str:
        return " | ".join(self.told)


def cut(model: nn.Module, example: Any, parts: int, asked: Asked | None = None) -> Cut:
    """Into parts that take equally long, or as asked for. Raises StepFailed where there are not
    as many.
    """
    units = units_of(model, example, parts, asked)
    names = list(units.work)
    with untouched(Summed(model, NO_LOSS)):
        timed = _timed(model, names, example)
    cuts = (
        divided(model, names, parts, asked)
        if asked
        else balanced(timed, parts, None if units.straight else opened(units))
    )
    found = tuple(tuple(names[at] for at in part) for part in cuts)
    # of which the operations between them are another part's
    watched = _watched(model, example, units, found)
    return Cut(
        found,
        tuple(sum(timed[at] for at in part) for part in cuts),
        tuple(sum(units.work[unit] for unit in part) for part in found),
        *parts_of(InUnits(model, watched), example),
        units.standing,
        watched,
    )


def _watched(
    model: nn.Module, example: Any, units: Units, parts: Sequence[Sequence[Unit]]
) -> Sequence[Sequence[Unit]]:
    """The parts as ranks run them: in calls as large as can be, unless a tensor goes from one
    part to another by a way that is seen inside of them alone.
    """
    if units.straight:
        return parts
    found = joined(units, parts)
    try:
        with untouched(Summed(model, NO_LOSS)):
            Flow(model, found, units.standing).tried(example)
    except StepFailed:
        return parts
    return found


def divided(model: nn.Module, units: Sequence[Unit], parts: int, asked: Asked) -> list[range]:
    """The parts that are asked for. Raises StepFailed where they are not as many, or one would
    be empty.
    """
    said = f"cut=[{', '.join(map(str, asked))}]"
    sizes = [each for each in asked if isinstance(each, int)]
    if sizes and (len(sizes) != parts or sum(sizes) != len(units)):
        raise StepFailed(
            f"{said} is {len(sizes)} part(s) of {sum(sizes)} modules together, and there are "
            f"{parts} of "
            f"{len(units)}: {listed(units)}; give {parts} numbers that add up to {len(units)}"
        )
    if sizes:
        ends = list(itertools.accumulate(sizes, initial=0))
        return [range(*two) for two in itertools.pairwise(ends)]
    starts = [0]
    for name in (named(model, str(each)) for each in asked):
        inside = [at for at, (unit, _) in enumerate(units) if f"{unit}.".startswith(f"{name}.")]
        if not inside:
            raise StepFailed(
                f"{said}: {name} is not called in a forward; cut at one of {listed(units[1:])}"
            )
        starts.append(inside[0])
    starts.append(len(units))
    if len(asked) != parts - 1 or any(start >= stop for start, stop in itertools.pairwise(starts)):
        raise StepFailed(
            f"{said} names the modules with which all parts but the first begin, and {parts} parts "
            f"that are not "
            f"empty need {parts - 1} in the order in which they are called: of {listed(units[1:])}"
        )
    return [range(*two) for two in itertools.pairwise(starts)]


class Timing(Running):
    """A forward in which every unit's backward follows at once, alone."""

    def __init__(self, flow: InUnits) -> None:
        super().__init__(flow)
        self.found: list[float] = []

    def operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        return func(*args, **kwargs)

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        with self.unwatched():
            start = time.monotonic()
            args, kwargs = self.entered((args, kwargs))
            out = call(*args, **kwargs)
            ends = [each for each in tensors_in(out) if each.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
            self.found.append(time.monotonic() - start)
        given = tensors_in(out)
        place = next(self.places)
        fresh = dict(
            zip(
                map(id, given),
                entered(given, [each.requires_grad for each in given])[0],
                strict=True,
            )
        )
        out = tree_map_only(Tensor, lambda each: fresh[id(each)], out)
        for number, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (place, number))
        return out

    def entered(self, tree: Any) -> Any:
        """What units before have made, as if it had been made here; the model's inputs stay
        what they are.
        """
        made = {id(each): each for each in tensors_in(tree) if each in self.made}
        fresh = dict(
            zip(
                made,
                entered(list(made.values()), [each.requires_grad for each in made.values()])[0],
                strict=True,
            )
        )
        return tree_map_only(Tensor, lambda each: fresh.get(id(each), each), tree)


def _timed(model: nn.Module, units: Sequence[Unit], example: Any) -> list[float]:
    """Seconds of each unit, forward and backward."""
    rounds = []
    for _ in range(ROUNDS):
        timing = Timing(InUnits(model, [units]))
        timing.run(copied(example))
        rounds.append(timing.found)
        model.zero_grad()
    return [min(each) for each in zip(*rounds, strict=True)]


def balanced(
    seconds: Sequence[float], parts: int, opened: Sequence[int] | None = None
) -> list[range]:
    """Consecutive parts, none empty, of which the longest is as short as can be. opened: how
    many modules a cut before each goes through: the fewest in all, as far as the longest part
    is at most LONGER times as long for it.
    """
    count = len(seconds)
    even = _divided(seconds, parts, [0] * count, math.inf)
    if opened is None:
        return even
    return _divided(
        seconds, parts, opened, LONGER * max(sum(seconds[at] for at in part) for part in even)
    )


def _divided(
    seconds: Sequence[float], parts: int, opened: Sequence[int], limit: float
) -> list[range]:
    """The fewest opened, then the shortest longest part; no part is longer than the limit."""
    ends = list(itertools.accumulate(seconds, initial=0.0))
    count = len(seconds)
    best = [[(math.inf, math.inf)] * (count + 1) for _ in range(parts + 1)]
    last = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0, 0.0
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                cut, longest = best[part - 1][start]
                found = (
                    cut + (opened[start] if start else 0),
                    max(longest, ends[stop] - ends[start]),
                )
                if ends[stop] - ends[start] <= limit and found < best[part][stop]:
                    best[part][stop] = found
                    last[part][stop] = start
    found_parts = []
    stop = count
    for part in range(parts, 0, -1):
        found_parts.append(range(last[part][stop], stop))
        stop = last[part][stop]
    return found_parts[::-1]


# ---- who uses what ---------------------------------------------------------------------------
class Looking(Running):
    """A forward that notes which part uses which tensors, and what it draws."""

    def __init__(self, flow: InUnits, recording: Recording) -> None:
        super().__init__(flow)
        # draws before each part
        self.recording = recording
        self.drawn = [0]
        # draws by operations on the inputs alone
        self.alone: list[int] = []
        self.noted = 0  # draws of which that is known
        self.uses: dict[int, set[int]] = {}  # tensor -> parts
        self.under = {
            name: [id(each) for each in itertools.chain(module.parameters(), module.buffers())]
            for module, name in flow.units.items()
        }

    def begins(self, name: str) -> None:
        before = self.part
        super().begins(name)
        self.drawn += [len(self.recording.calls)] * (self.part - before)

    def used(self, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            self.uses.setdefault(tensor, set()).add(self.part)

    def operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        self.used([id(each) for each in tensors_in((args, kwargs)) if id(each) in self.held])
        out = func(*args, **kwargs)
        self.noted = len(self.recording.calls)
        return out

    def of_inputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.alone += range(self.noted, len(self.recording.calls))
        self.noted = len(self.recording.calls)

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        self.used(
            [
                *self.under[name],
                *(id(each) for each in tensors_in((args, kwargs)) if id(each) in self.held),
            ]
        )
        with self.unwatched():
            out = call(*args, **kwargs)
        self.noted = len(self.recording.calls)
        place = next(self.places)
        for number, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (place, number))
        return out


def parts_of(
    flow: InUnits, example: Any
) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
    """({tensor, by its first name: the parts that use it}, the random calls that are made where
    each part is run: its own, and those that parts before it make of the inputs alone).
    """
    with untouched(Summed(flow.model, NO_LOSS)), torch.no_grad(), drawing(Recording()) as recording:
        looking = Looking(flow, recording)
        looking.run(copied(example))
    uses = {
        name: tuple(sorted(looking.uses[id(tensor)]))
        for name, tensor in (*flow.model.named_parameters(), *flow.model.named_buffers())
        if id(tensor) in looking.uses
    }
    drawn = looking.drawn + [len(recording.calls)] * (flow.last + 2 - len(looking.drawn))
    return uses, tuple(
        (*(call for call in looking.alone if call < start), *range(start, stop))
        for start, stop in itertools.pairwise(drawn)
    )
