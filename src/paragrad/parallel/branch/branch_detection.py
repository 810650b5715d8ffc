"""Where a model forks: branches of which none needs another, found by running it once.

Every function of torch that is called on what comes from the inputs is a node. A node through
which everything goes is the trunk; between two of these, what hangs together is a branch, if it
has parameters of its own. What only puts branches together (a sum of three, step by step) is
none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paragrad.datasets.loading import called, copied
from paragrad.engine.unwrap import name_of
from paragrad.parallel.sharding.sharded_tensor import changes
from paragrad.parallel.tracing.tracer import whereabouts


@dataclass
class Node:
    """A function that was called. before: nodes whose results it takes; -1 is the inputs;
    parameters: by name, those that it uses, also by way of what is made of parameters alone;
    at: the module that called it.
    """

    name: str
    before: set[int]
    parameters: set[str]
    seconds: float
    at: str


@dataclass(frozen=True)
class Branch:
    """modules: that begin in it;  parameters, buffers: of its own;  seconds: of its forward."""

    modules: tuple[str, ...]
    parameters: frozenset[str]
    seconds: float


class Run(TorchFunctionMode):
    """One forward, function by function. names: of parameters and buffers, by their ids;  at:
    the last is the module that is being called.
    """

    def __init__(self, names: Mapping[int, str], at: Sequence[str], inputs: Any) -> None:
        super().__init__()
        self.names = names
        self.at = at
        self.depth = 0
        self.nodes = list[Node]()
        # by id: of which node, -1 of an input, or of which parameters alone
        self.made: dict[int, tuple[Tensor, int | set[str]]] = {
            id(each): (each, -1) for each in tree_leaves(inputs) if isinstance(each, Tensor)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            return func(*args, **(kwargs or {}))
        self.depth += 1
        try:
            start = time.perf_counter()
            out = func(*args, **(kwargs or {}))
            seconds = time.perf_counter() - start
        finally:
            self.depth -= 1
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        before = set[int]()
        own = set[str]()
        for each in given:
            found = self.made.get(id(each), (each, set()))[1]
            own |= {self.names[id(each)]} if id(each) in self.names else set()
            if isinstance(found, int):
                before.add(found)
            else:
                own |= found
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        name = name_of(func)
        written = given[:1] if changes(name) else []
        if before and results:
            self.nodes.append(Node(name, before, own, seconds, self.at[-1]))
        for each in (*results, *(each for each in written if id(each) not in self.names)):
            self.made[id(each)] = each, len(self.nodes) - 1 if before else own
        return out


def run(model: nn.Module, inputs: Any) -> tuple[list[Node], set[int]]:
    """(The nodes of a forward in their order, those whose results come out)."""
    names = {id(each): name for name, each in [*model.named_parameters(), *model.named_buffers()]}
    inputs = copied(inputs)
    with whereabouts(model) as at, Run(names, at, inputs) as watching:
        out = called(model, inputs)
    ends = {
        found
        for each in _tensors(out)
        if isinstance(found := watching.made.get(id(each), (each, set()))[1], int)
    }
    return watching.nodes, ends


def _tensors(out: Any) -> Iterator[Tensor]:
    """Also those in a dataclass, which torch's trees take for a leaf."""
    for each in tree_leaves(out):
        if isinstance(each, Tensor):
            yield each
        elif is_dataclass(each) and not isinstance(each, type):
            yield from _tensors([getattr(each, field.name, None) for field in fields(each)])


def forks(nodes: list[Node], ends: Collection[int], ranks: int) -> list[list[Branch]]:
    """The branches of every fork, in the order of a forward. One that takes so long that it is
    better split itself, over so many ranks, is not a branch but what forks in it.
    """
    found = _forks(nodes, range(len(nodes)), set(ends), ranks)[0]
    users = Counter(name for parts in found for part in parts for name in own(nodes, part))
    inside = {place for parts in found for part in parts for place in part}
    users.update(own(nodes, (place for place in range(len(nodes)) if place not in inside)))
    shared = {name for name, count in users.items() if count > 1}
    branches = [[_branch(nodes, part, shared) for part in parts] for parts in found]
    kept = [[branch for branch in fork if branch.parameters] for fork in branches]
    return [fork for fork in kept if fork]


def _forks(
    nodes: list[Node], region: Sequence[int], ends: Collection[int], ranks: int
) -> tuple[list[list[list[int]]], float]:
    """(The forks of a region, each as the nodes of its branches; how long it then takes)."""
    inside = set(region)
    beyond = len(nodes)
    # who uses a node's result last; -1: what the region is given
    last = {place: place for place in (-1, *region)}
    for place in region:
        for each in nodes[place].before:
            last[each if each in inside else -1] = place
    for each in inside & set(ends) if len(inside) < len(nodes) else ends:
        last[each] = beyond
    trunk = [-1]
    reach = last[-1]
    for place in region:
        if reach <= place:  # nothing of before goes past it
            trunk.append(place)
        reach = max(reach, last[place])
    found = list[list[list[int]]]()
    seconds = sum(nodes[place].seconds for place in trunk if place >= 0)
    for start, stop in zip(trunk, [*trunk[1:], beyond], strict=True):
        parts = [
            each
            for part in components(nodes, [place for place in region if start < place < stop])
            for each in finer(nodes, part)
        ]
        alone = sorted(
            (part for part in parts if own(nodes, part)), key=lambda part: -_seconds(nodes, part)
        )
        seconds += sum(_seconds(nodes, part) for part in parts) - sum(
            _seconds(nodes, part) for part in alone
        )
        if not alone:
            continue
        longest = alone[0]
        rest = alone[1:]
        closed = _shared_out([_seconds(nodes, part) for part in alone], ranks)
        inner, taken = (
            _forks(nodes, longest, longest[-1:], ranks)
            if len(longest) < len(region)
            else ([], closed)
        )
        opened = taken + _shared_out([_seconds(nodes, part) for part in rest], ranks)
        if inner and opened < closed:
            found += [*inner, rest] if rest else inner
        elif len(alone) > 1:
            found.append(alone)
        seconds += min(opened, closed) if inner else closed
    return found, seconds


def _seconds(nodes: list[Node], part: Iterable[int]) -> float:
    return sum(nodes[place].seconds for place in part)


def _shared_out(seconds: Sequence[float], ranks: int) -> float:
    """Of the rank that has most, each going to whom has least, the longest first."""
    load = [0.0] * ranks
    for each in sorted(seconds, reverse=True):
        load[load.index(min(load))] += each
    return max(load)


def own(nodes: list[Node], part: Iterable[int]) -> set[str]:
    return set[str]().union(*(nodes[place].parameters for place in part))


def components(nodes: list[Node], region: Iterable[int]) -> list[list[int]]:
    """What hangs together, by results and by parameters that several use."""
    region = list(region)
    group = {place: place for place in region}

    def root(place: int) -> int:
        while group[place] != place:
            place = group[place]
        return place

    users: dict[str, int] = {}
    for place in region:
        for other in (
            *(each for each in nodes[place].before if each in group),
            *(users.setdefault(name, place) for name in nodes[place].parameters),
        ):
            group[root(place)] = root(other)
    found: dict[int, list[int]] = {}
    for place in region:
        found.setdefault(root(place), []).append(place)
    return list(found.values())


def finer(nodes: list[Node], part: list[int]) -> list[list[int]]:
    """Without functions at its ends that have no parameters, if that leaves several
    branches.
    """
    rest = set(part)
    while True:
        used = set[int]().union(*(nodes[place].before for place in rest))
        ends = {place for place in rest if place not in used and not nodes[place].parameters}
        if not ends:
            return [part]
        rest -= ends
        parts = [each for each in components(nodes, sorted(rest)) if own(nodes, each)]
        if len(parts) > 1:
            return [each for one in parts for each in finer(nodes, one)]


def _branch(nodes: list[Node], part: list[int], shared: Collection[str]) -> Branch:
    """shared: parameters that something else uses too, which are on all ranks."""
    modules = dict.fromkeys(nodes[place].at for place in part if nodes[place].parameters)
    return Branch(tuple(modules), frozenset(own(nodes, part) - set(shared)), _seconds(nodes, part))


def placed(found: list[list[Branch]], ranks: int) -> dict[str, int]:
    """Whose each parameter is: of every fork the longest branch first, to whom has least."""
    owners: dict[str, int] = {}
    for branches in found:
        load = [0.0] * ranks
        for branch in sorted(branches, key=lambda each: -each.seconds):
            rank = load.index(min(load))
            load[rank] += branch.seconds
            owners |= dict.fromkeys(branch.parameters, rank)
    return owners


def timed(model: nn.Module, inputs: Any, ranks: int) -> list[list[Branch]]:
    """The forks of a model for so many ranks, each branch as long as in the quicker of two
    forwards.
    """
    with torch.no_grad():
        first, second = (run(model, inputs) for _ in range(2))
    for one, other in zip(first[0], second[0], strict=False):
        one.seconds = min(one.seconds, other.seconds)
    return forks(*first, ranks)
