"""The split of a model into consecutive parts: between which calls of modules it is cut, and what each part uses."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import called, copied
from paragrad.errors import StepFailed, told
from paragrad.jobs.loss import Summed
from paragrad.notation.choices import unknown
from paragrad.planner.profile import unfused
from paragrad.strategies.pipeline import Asked
from paragrad.techniques.draws import Recording
from paragrad.techniques.kernels import drawing
from paragrad.techniques.model_parallel.flow import entered
from paragrad.techniques.model_parallel.watch import InUnits, Running, Unit, calls_watched, tensors_in
from paragrad.techniques.untouched import untouched

FINE = 8                # units are split further while one is more than an eighth of a part's work
NO_LOSS = nn.functional.mse_loss        # of models that are looked at without one
ROUNDS = 3              # of which the quickest counts


@dataclass
class Call:
    """A call of a module in a forward. work: operations in matrix products, of everything in it."""
    name: str
    work: int = 0
    inside: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Cut:
    """Where a model is cut. parts: the units of each, modules that are called as a whole;  seconds: of each part, forward and
    backward, as it was measured;  work: of each, operations in the matrix products of a forward;  uses: of each parameter and
    buffer that was used, in which parts;  draws: the random calls that are made where each part is run."""
    parts: tuple[tuple[Unit, ...], ...]
    seconds: tuple[float, ...]
    work: tuple[int, ...]
    uses: Mapping[str, tuple[int, ...]]
    draws: tuple[tuple[int, ...], ...]

    @property
    def told(self) -> list[str]:
        """Each part in words."""
        return [units[0][0] + (f" to {units[-1][0]}" if len(units) > 1 else "") for units in self.parts]

    def __str__(self) -> str:
        return " | ".join(self.told)


def cut(model: nn.Module, example: Any, parts: int, asked: Asked | None = None) -> Cut:
    """Into parts that take equally long, or as asked for. Raises StepFailed where there are not as many."""
    units = units_of(model, example, parts, asked)
    names = list(units)
    with untouched(Summed(model, NO_LOSS)):
        timed = _timed(model, names, example)
    cuts = divided(model, names, parts, asked) if asked else balanced(timed, parts)
    found = tuple(tuple(names[at] for at in part) for part in cuts)
    return Cut(found, tuple(sum(timed[at] for at in part) for part in cuts),
               tuple(sum(units[unit] for unit in part) for part in found), *parts_of(InUnits(model, found), example))


def units_of(model: nn.Module, example: Any, parts: int, asked: Asked | None = None) -> dict[Unit, int]:
    """The calls of a forward between which so many parts can be cut, in order, and the work of each. Raises StepFailed where
    there are too few of them."""
    begins = [named(model, each) for each in asked or () if isinstance(each, str)]
    with untouched(Summed(model, NO_LOSS)):
        tree = calls(model, example)
    most = tree.work / (FINE * parts)
    counted: Counter[str] = Counter()
    units: dict[Unit, int] = {}
    for call in _units(tree, lambda each: each.work <= most and not any(name.startswith(f"{each.name}.") for name in begins)):
        units[call.name, counted[call.name]] = call.work
        counted[call.name] += 1
    if len(units) < parts:
        raise StepFailed(f"the model calls {len(units)} module(s) one after another ({_listed(units)}), and {parts} parts are "
                         "wanted; give fewer workers, or a model of more modules")
    return units


def _listed(units: Iterable[Unit]) -> str:
    return ", ".join(name for name, _ in units)


def named(model: nn.Module, name: str) -> str:
    """The name of a module by which it is cut: it may be given by its end. Raises StepFailed where there is none."""
    first = {module: own for own, module in reversed(list(model.named_modules()))}
    found = {first[module] for each, module in model.named_modules(remove_duplicate=False)
             if each == name or each.endswith(f".{name}")}
    if len(found) > 1 and name not in found:
        raise StepFailed(f"cut names {name}, which may be {' or '.join(sorted(found))}; give the whole name")
    if not found:
        raise StepFailed(f"cut: {unknown('module', name, filter(None, first.values()))}")
    return name if name in found else found.pop()


def divided(model: nn.Module, units: Sequence[Unit], parts: int, asked: Asked) -> list[range]:
    """The parts that are asked for. Raises StepFailed where they are not as many, or one would be empty."""
    said, sizes = f"cut=[{', '.join(map(str, asked))}]", [each for each in asked if isinstance(each, int)]
    if sizes and (len(sizes) != parts or sum(sizes) != len(units)):
        raise StepFailed(f"{said} is {len(sizes)} part(s) of {sum(sizes)} modules together, and there are {parts} of "
                         f"{len(units)}: {_listed(units)}; give {parts} numbers that add up to {len(units)}")
    if sizes:
        ends = list(itertools.accumulate(sizes, initial=0))
        return [range(*two) for two in itertools.pairwise(ends)]
    starts = [0]
    for name in (named(model, str(each)) for each in asked):
        inside = [at for at, (unit, _) in enumerate(units) if f"{unit}.".startswith(f"{name}.")]
        if not inside:
            raise StepFailed(f"{said}: {name} is not called in a forward; cut at one of {_listed(units[1:])}")
        starts.append(inside[0])
    starts.append(len(units))
    if len(asked) != parts - 1 or any(start >= stop for start, stop in itertools.pairwise(starts)):
        raise StepFailed(f"{said} names the modules with which all parts but the first begin, and {parts} parts that are not "
                         f"empty need {parts - 1} in the order in which they are called: of {_listed(units[1:])}")
    return [range(*two) for two in itertools.pairwise(starts)]


def calls(model: nn.Module, example: Any) -> Call:
    """Every call of a module in a forward, as a tree."""
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    stack = [Call("")]

    def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in names:
            return plain(module, *args, **kwargs)
        stack[-1].inside.append(here := Call(names[module]))
        stack.append(here)
        before = counter.get_total_flops()
        try:
            return plain(module, *args, **kwargs)
        finally:
            here.work = counter.get_total_flops() - before
            stack.pop()

    with unfused() as counter, calls_watched(call), torch.no_grad():
        try:
            called(model, copied(example))
        except RuntimeError as error:
            raise StepFailed(f"a forward without gradients raised {told(error)}; a model that takes gradients itself is not "
                             "cut, for none come to it from parts on other ranks: train it with data(n)") from error
    return stack[0].inside[0]


def _units(call: Call, whole: Callable[[Call], bool], root: bool = True) -> Iterator[Call]:
    """Calls that are not split further."""
    if call.inside and (root or not whole(call)):
        for inner in call.inside:
            yield from _units(inner, whole, root=False)
    else:
        yield call


class Timing(Running):
    """A forward in which every unit's backward follows at once, alone."""

    def __init__(self, flow: InUnits) -> None:
        super().__init__(flow)
        self.found: list[float] = []

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        with self.unwatched():
            start = time.monotonic()
            (args, kwargs), _ = entered((args, kwargs))
            out = call(*args, **kwargs)
            ends = [each for each in tensors_in(out) if each.requires_grad and each.is_floating_point()]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
            self.found.append(time.monotonic() - start)
        return tree_map_only(Tensor, Tensor.detach, out)


def _timed(model: nn.Module, units: Sequence[Unit], example: Any) -> list[float]:
    """Seconds of each unit, forward and backward."""
    rounds = []
    for _ in range(ROUNDS):
        timing = Timing(InUnits(model, [units]))
        timing.run(copied(example))
        rounds.append(timing.found)
        model.zero_grad()
    return [min(each) for each in zip(*rounds, strict=True)]


def balanced(seconds: Sequence[float], parts: int) -> list[range]:
    """Consecutive parts, none empty, of which the longest is as short as can be."""
    ends = list(itertools.accumulate(seconds, initial=0.0))
    count = len(seconds)
    best: list[list[float]] = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    last = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                longest = max(best[part - 1][start], ends[stop] - ends[start])
                if longest < best[part][stop]:
                    best[part][stop], last[part][stop] = longest, start
    found, stop = [], count
    for part in range(parts, 0, -1):
        found.append(range(last[part][stop], stop))
        stop = last[part][stop]
    return found[::-1]


# ---- who uses what -----------------------------------------------------------------------------------------------------------
class Looking(Running):
    """A forward that notes which part uses which tensors, and what it draws."""

    def __init__(self, flow: InUnits, recording: Recording) -> None:
        super().__init__(flow)
        self.recording, self.drawn = recording, [0]             # draws before each part
        self.alone: list[int] = []                              # draws by operations on the inputs alone
        self.noted = 0                                          # draws of which that is known
        self.uses: dict[int, set[int]] = {}                     # tensor -> parts
        self.under = {name: [id(each) for each in itertools.chain(module.parameters(), module.buffers())]
                      for module, name in flow.units.items()}

    def begins(self, name: str) -> None:
        before = self.part
        super().begins(name)
        self.drawn += [len(self.recording.calls)] * (self.part - before)

    def used(self, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            self.uses.setdefault(tensor, set()).add(self.part)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.used([id(each) for each in tensors_in((args, kwargs)) if id(each) in self.held])
        out = func(*args, **kwargs)
        self.noted = len(self.recording.calls)
        return out

    def of_inputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.alone += range(self.noted, len(self.recording.calls))
        self.noted = len(self.recording.calls)

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        self.used([*self.under[name], *(id(each) for each in tensors_in((args, kwargs)) if id(each) in self.held)])
        with self.unwatched():
            out = call(*args, **kwargs)
        self.noted = len(self.recording.calls)
        place = next(self.places)
        for number, tensor in enumerate(tensors_in(out)):
            self.make(tensor, (place, number))
        return out


def parts_of(flow: InUnits, example: Any) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
    """({tensor, by its first name: the parts that use it}, the random calls that are made where each part is run: its own, and
    those that parts before it make of the inputs alone)."""
    with untouched(Summed(flow.model, NO_LOSS)), torch.no_grad(), drawing(Recording()) as recording:
        looking = Looking(flow, recording)
        looking.run(copied(example))
    uses = {name: tuple(sorted(looking.uses[id(tensor)]))
            for name, tensor in (*flow.model.named_parameters(), *flow.model.named_buffers()) if id(tensor) in looking.uses}
    drawn = looking.drawn + [len(recording.calls)] * (flow.last + 2 - len(looking.drawn))
    return uses, tuple((*(call for call in looking.alone if call < start), *range(start, stop))
                       for start, stop in itertools.pairwise(drawn))
