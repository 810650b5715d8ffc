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

from paragrad.datasets.loading import call_model, clone_batch
from paragrad.engine.unwrap import get_function_name
from paragrad.parallel.sharding.sharded_tensor import is_in_place
from paragrad.parallel.tracing.tracer import track_modules


@dataclass
class FunctionNode:
    """A function that was called. before: nodes whose results it takes; -1 is the inputs;
    parameters: by name, those that it uses, also by way of what is made of parameters alone;
    at: the module that called it.
    """

    name: str
    input_nodes: set[int]
    parameters: set[str]
    seconds: float
    module: str


@dataclass(frozen=True)
class ModelBranch:
    """modules: that begin in it;  parameters, buffers: of its own;  seconds: of its forward."""

    modules: tuple[str, ...]
    parameters: frozenset[str]
    seconds: float


class FunctionRecorder(TorchFunctionMode):
    """One forward, function by function. names: of parameters and buffers, by their ids;  at:
    the last is the module that is being called.
    """

    def __init__(self, names: Mapping[int, str], module_stack: Sequence[str], inputs: Any) -> None:
        super().__init__()
        self.names = names
        self.module_stack = module_stack
        self.depth = 0
        self.nodes = list[FunctionNode]()
        # by id: of which node, -1 of an input, or of which parameters alone
        self.results: dict[int, tuple[Tensor, int | set[str]]] = {
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
            found = self.results.get(id(each), (each, set()))[1]
            own |= {self.names[id(each)]} if id(each) in self.names else set()
            if isinstance(found, int):
                before.add(found)
            else:
                own |= found
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        name = get_function_name(func)
        written = given[:1] if is_in_place(name) else []
        if before and results:
            self.nodes.append(FunctionNode(name, before, own, seconds, self.module_stack[-1]))
        for each in (*results, *(each for each in written if id(each) not in self.names)):
            self.results[id(each)] = each, len(self.nodes) - 1 if before else own
        return out


def record_functions(model: nn.Module, inputs: Any) -> tuple[list[FunctionNode], set[int]]:
    """(The nodes of a forward in their order, those whose results come out)."""
    names = {id(each): name for name, each in [*model.named_parameters(), *model.named_buffers()]}
    inputs = clone_batch(inputs)
    with track_modules(model) as at, FunctionRecorder(names, at, inputs) as watching:
        out = call_model(model, inputs)
    ends = {
        found
        for each in _iterate_tensors(out)
        if isinstance(found := watching.results.get(id(each), (each, set()))[1], int)
    }
    return watching.nodes, ends


def _iterate_tensors(out: Any) -> Iterator[Tensor]:
    """Also those in a dataclass, which torch's trees take for a leaf."""
    for each in tree_leaves(out):
        if isinstance(each, Tensor):
            yield each
        elif is_dataclass(each) and not isinstance(each, type):
            yield from _iterate_tensors([getattr(each, field.name, None) for field in fields(each)])


def find_forks(
    nodes: list[FunctionNode], ends: Collection[int], ranks: int
) -> list[list[ModelBranch]]:
    """The branches of every fork, in the order of a forward. One that takes so long that it is
    better split itself, over so many ranks, is not a branch but what forks in it.
    """
    found = _find_region_forks(nodes, range(len(nodes)), set(ends), ranks)[0]
    users = Counter(
        name for parts in found for part in parts for name in collect_parameters(nodes, part)
    )
    inside = {place for parts in found for part in parts for place in part}
    users.update(
        collect_parameters(nodes, (place for place in range(len(nodes)) if place not in inside))
    )
    shared = {name for name, count in users.items() if count > 1}
    branches = [[_build_branch(nodes, part, shared) for part in parts] for parts in found]
    kept = [[branch for branch in fork if branch.parameters] for fork in branches]
    return [fork for fork in kept if fork]


def _find_region_forks(
    nodes: list[FunctionNode], region: Sequence[int], ends: Collection[int], ranks: int
) -> tuple[list[list[list[int]]], float]:
    """(The forks of a region, each as the nodes of its branches; how long it then takes)."""
    inside = set(region)
    beyond = len(nodes)
    # who uses a node's result last; -1: what the region is given
    last = {place: place for place in (-1, *region)}
    for place in region:
        for each in nodes[place].input_nodes:
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
            for part in find_components(nodes, [place for place in region if start < place < stop])
            for each in refine_component(nodes, part)
        ]
        alone = sorted(
            (part for part in parts if collect_parameters(nodes, part)),
            key=lambda part: -_sum_seconds(nodes, part),
        )
        seconds += sum(_sum_seconds(nodes, part) for part in parts) - sum(
            _sum_seconds(nodes, part) for part in alone
        )
        if not alone:
            continue
        longest = alone[0]
        rest = alone[1:]
        closed = _estimate_longest_rank([_sum_seconds(nodes, part) for part in alone], ranks)
        inner, taken = (
            _find_region_forks(nodes, longest, longest[-1:], ranks)
            if len(longest) < len(region)
            else ([], closed)
        )
        opened = taken + _estimate_longest_rank([_sum_seconds(nodes, part) for part in rest], ranks)
        if inner and opened < closed:
            found += [*inner, rest] if rest else inner
        elif len(alone) > 1:
            found.append(alone)
        seconds += min(opened, closed) if inner else closed
    return found, seconds


def _sum_seconds(nodes: list[FunctionNode], part: Iterable[int]) -> float:
    return sum(nodes[place].seconds for place in part)


def _estimate_longest_rank(seconds: Sequence[float], ranks: int) -> float:
    """Of the rank that has most, each going to whom has least, the longest first."""
    load = [0.0] * ranks
    for each in sorted(seconds, reverse=True):
        load[load.index(min(load))] += each
    return max(load)


def collect_parameters(nodes: list[FunctionNode], part: Iterable[int]) -> set[str]:
    return set[str]().union(*(nodes[place].parameters for place in part))


def find_components(nodes: list[FunctionNode], region: Iterable[int]) -> list[list[int]]:
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
            *(each for each in nodes[place].input_nodes if each in group),
            *(users.setdefault(name, place) for name in nodes[place].parameters),
        ):
            group[root(place)] = root(other)
    found: dict[int, list[int]] = {}
    for place in region:
        found.setdefault(root(place), []).append(place)
    return list(found.values())


def refine_component(nodes: list[FunctionNode], part: list[int]) -> list[list[int]]:
    """Without functions at its ends that have no parameters, if that leaves several
    branches.
    """
    rest = set(part)
    while True:
        used = set[int]().union(*(nodes[place].input_nodes for place in rest))
        ends = {place for place in rest if place not in used and not nodes[place].parameters}
        if not ends:
            return [part]
        rest -= ends
        parts = [
            each for each in find_components(nodes, sorted(rest)) if collect_parameters(nodes, each)
        ]
        if len(parts) > 1:
            return [each for one in parts for each in refine_component(nodes, one)]


def _build_branch(
    nodes: list[FunctionNode], part: list[int], shared: Collection[str]
) -> ModelBranch:
    """shared: parameters that something else uses too, which are on all ranks."""
    modules = dict.fromkeys(nodes[place].module for place in part if nodes[place].parameters)
    return ModelBranch(
        tuple(modules),
        frozenset(collect_parameters(nodes, part) - set(shared)),
        _sum_seconds(nodes, part),
    )


def assign_branches(forks: list[list[ModelBranch]], ranks: int) -> dict[str, int]:
    """Whose each parameter is: of every fork the longest branch first, to whom has least."""
    owners: dict[str, int] = {}
    for branches in forks:
        load = [0.0] * ranks
        for branch in sorted(branches, key=lambda each: -each.seconds):
            rank = load.index(min(load))
            load[rank] += branch.seconds
            owners |= dict.fromkeys(branch.parameters, rank)
    return owners


def time_forks(model: nn.Module, inputs: Any, ranks: int) -> list[list[ModelBranch]]:
    """The forks of a model for so many ranks, each branch as long as in the quicker of two
    forwards.
    """
    with torch.no_grad():
        first, second = (record_functions(model, inputs) for _ in range(2))
    for one, other in zip(first[0], second[0], strict=False):
        one.seconds = min(one.seconds, other.seconds)
    return find_forks(*first, ranks)
