"""The split of a model into consecutive parts: where it is cut, and what of it a rank keeps."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import called, copied
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed
from paragrad.planner.profile import unfused
from paragrad.techniques.cut import Share
from paragrad.techniques.draws import Recording
from paragrad.techniques.kernels import drawing
from paragrad.techniques.layout import Held
from paragrad.techniques.model_parallel.flow import Flow, entered
from paragrad.techniques.model_parallel.watch import InUnits, Running, Unit, calls_watched, tensors_in
from paragrad.techniques.untouched import untouched
from paragrad.world.world import World

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
    backward, as it was measured;  uses: of each parameter and buffer that was used, in which parts;  draws: the random calls of
    each part."""
    parts: tuple[tuple[Unit, ...], ...]
    seconds: tuple[float, ...]
    uses: Mapping[str, tuple[int, ...]]
    draws: tuple[range, ...]

    def __str__(self) -> str:
        return " | ".join(units[0][0] + (f" to {units[-1][0]}" if len(units) > 1 else "") for units in self.parts)


def cut(model: nn.Module, example: Any, parts: int, asked: Sequence[int] | None = None) -> Cut:
    """Into parts that take equally long, or of as many units as asked for. Raises StepFailed where there are not as many."""
    units = units_of(model, example, parts, asked)
    with untouched(Summed(model, NO_LOSS)):
        timed = _timed(model, units, example)
    ends = list(itertools.accumulate(asked or (), initial=0))
    cuts = [range(*two) for two in itertools.pairwise(ends)] if asked else balanced(timed, parts)
    found = tuple(tuple(units[at] for at in part) for part in cuts)
    return Cut(found, tuple(sum(timed[at] for at in part) for part in cuts), *parts_of(InUnits(model, found), example))


def units_of(model: nn.Module, example: Any, parts: int, asked: Sequence[int] | None = None) -> list[Unit]:
    """The calls of a forward between which so many parts can be cut. Raises StepFailed where there are too few of them, or not
    as many as asked for."""
    with untouched(Summed(model, NO_LOSS)):
        tree = calls(model, example)
    counted: Counter[str] = Counter()
    units = []
    for call in _units(tree, tree.work / (FINE * parts)):
        units.append((call.name, counted[call.name]))
        counted[call.name] += 1
    listed = ", ".join(name for name, _ in units)
    if len(units) < parts:
        raise StepFailed(f"the model calls {len(units)} module(s) one after another ({listed}), and {parts} parts are wanted; "
                         "give fewer workers, or a model of more modules")
    if asked is not None and (len(asked) != parts or sum(asked) != len(units)):
        raise StepFailed(f"cut={list(asked)} is {len(asked)} part(s) of {sum(asked)} modules together, and there are {parts} "
                         f"of {len(units)}: {listed}; give {parts} numbers that add up to {len(units)}")
    return units


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
        called(model, copied(example))
    return stack[0].inside[0]


def _units(call: Call, most: float, root: bool = True) -> Iterator[Call]:
    """Calls that are not split further."""
    if call.inside and (root or call.work > most):
        for inner in call.inside:
            yield from _units(inner, most, root=False)
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


# ---- what a rank keeps -------------------------------------------------------------------------------------------------------
class Looking(Running):
    """A forward that notes which part uses which tensors, and what it draws."""

    def __init__(self, flow: InUnits, recording: Recording) -> None:
        super().__init__(flow)
        self.recording, self.drawn = recording, [0]             # draws before each part
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
        return func(*args, **kwargs)

    def unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begins(name)
        self.used([*self.under[name], *(id(each) for each in tensors_in((args, kwargs)) if id(each) in self.held)])
        with self.unwatched():
            return call(*args, **kwargs)


def parts_of(flow: InUnits, example: Any) -> tuple[dict[str, tuple[int, ...]], tuple[range, ...]]:
    """({tensor, by its first name: the parts that use it}, the random calls of each part)."""
    with untouched(Summed(flow.model, NO_LOSS)), torch.no_grad(), drawing(Recording()) as recording:
        looking = Looking(flow, recording)
        looking.run(copied(example))
    uses = {name: tuple(sorted(looking.uses[id(tensor)]))
            for name, tensor in (*flow.model.named_parameters(), *flow.model.named_buffers()) if id(tensor) in looking.uses}
    drawn = looking.drawn + [len(recording.calls)] * (flow.last + 1 - len(looking.drawn))
    return uses, tuple(range(*each) for each in zip(drawn, [*drawn[1:], len(recording.calls)], strict=True))


def supposed(model: nn.Module, uses: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The parts that use each tensor: where nobody was seen to, as what was defined before it."""
    found: dict[str, tuple[int, ...]] = {}
    near: tuple[int, ...] = (0,)
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        near = found[name] = uses.get(name, near)
    return found


class Part(nn.Module):
    """Some parts of a model: its parameters and buffers are those of the whole one, by the same names, that they use.

    Everything else of the model is there without values. trained: the first part of all with a parameter to train;
    first: which of this rank's random calls the first one of each part is.
    """
    flow: Flow
    trained: int
    first: Mapping[int, int]

    def __init__(self, flow: Flow, trained: int, first: Mapping[int, int]) -> None:
        super().__init__()
        self.__dict__.update(flow=flow, trained=trained, first=first, training=flow.model.training,
                             _modules=flow.model._modules, _parameters=flow.model._parameters, _buffers=flow.model._buffers)

    def train(self, mode: bool = True) -> Part:
        self.flow.model.train(mode)
        return super().train(mode)


def kept(flow: Flow, uses: Mapping[str, tuple[int, ...]], axis: World) -> dict[str, Held]:
    """Which tensors of the model a rank's parts hold; of the others it loses the values. Collective over the axis."""
    model = flow.model
    named = [*model.named_parameters(), *model.named_buffers()]
    held: dict[str, Held] = {}
    for name, tensor in named:
        owners = sorted({part % axis.size for part in uses[name]})
        world = axis.among([owners]) if len(owners) > 1 and isinstance(tensor, nn.Parameter) else None
        if axis.rank in owners:
            held[name] = Held(name, tuple(tensor.shape), counts=owners[0] == axis.rank,
                              owners=() if world is None else (world,))
    ours = {id(tensor) for name, tensor in named if name in held}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) not in ours:
                    del tensors[name]
                    setattr(module, name, flow.hollow(tensor))
    return held


def share_of(model: nn.Module, cut: Cut, mine: Sequence[int], axis: World) -> Share:
    """What a rank holds of a model, which loses the rest. Collective over the axis."""
    flow, uses = Flow(model, cut.parts), supposed(model, cut.uses)
    trained = min((part for name, parameter in model.named_parameters() if parameter.requires_grad for part in uses[name]),
                  default=flow.last + 1)
    held = kept(flow, uses, axis)
    calls = [call for part in mine for call in cut.draws[part]]
    first = {part: calls.index(cut.draws[part].start) if cut.draws[part] else 0 for part in mine}
    return Share(Part(flow, trained, first), held, gives=flow.last in mine, draws=tuple(calls))
