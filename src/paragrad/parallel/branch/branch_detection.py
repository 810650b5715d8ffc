"""Detection of the forks of a model: independent branches, found by running the model.

Every function of torch that is called on something computed from the inputs is a node. A node
through which every path goes belongs to the trunk. Between two such nodes, each connected component
with parameters of its own is a branch. A component that only combines branches (a sum of three,
step by step) is none.
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

from paragrad.datasets.loading import clone_batch
from paragrad.engine.unwrap import get_function_name
from paragrad.jobs.loss import call_model
from paragrad.parallel.sharding.sharded_tensor import is_in_place
from paragrad.parallel.tracing.tracer import track_modules


@dataclass
class FunctionNode:
    """A function that was called.

    Attributes:
        name: Name of the function.

        input_nodes: Nodes that make its arguments; -1 stands for the model's inputs.

        parameters: Names of the parameters that it uses, also through values that are computed from
            parameters alone.

        seconds: Duration of the call.

        module: Name of the module that called it.
    """

    name: str
    input_nodes: set[int]
    parameters: set[str]
    seconds: float
    module: str


@dataclass(frozen=True)
class ModelBranch:
    """A branch of a fork.

    Attributes:
        modules: Modules with functions in the branch that use parameters.
        parameters: Names of the parameters and buffers that only this branch uses.
        seconds: Duration of its forward.
    """

    modules: tuple[str, ...]
    parameters: frozenset[str]
    seconds: float


class FunctionRecorder(TorchFunctionMode):
    """Records one forward, function by function.

    Attributes:
        names: Names of parameters and buffers, by their ids.

        module_stack: Names of the modules that are being called.

        depth: Depth inside of a recorded function.

        nodes: The functions so far.

        results: By the id of a tensor: the tensor, and the node that made it. The node is -1 for an
            input, and a set of names for a value that is computed from parameters alone.
    """

    def __init__(self, names: Mapping[int, str], module_stack: Sequence[str], inputs: Any) -> None:
        super().__init__()
        self.names = names
        self.module_stack = module_stack
        self.depth = 0
        self.nodes = list[FunctionNode]()
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
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        input_nodes = set[int]()
        parameters = set[str]()
        for each in tensors:
            origin = self.results.get(id(each), (each, set()))[1]
            parameters |= {self.names[id(each)]} if id(each) in self.names else set()
            if isinstance(origin, int):
                input_nodes.add(origin)
            else:
                parameters |= origin
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        name = get_function_name(func)
        written = tensors[:1] if is_in_place(name) else []
        if input_nodes and results:
            self.nodes.append(
                FunctionNode(name, input_nodes, parameters, seconds, self.module_stack[-1])
            )
        for each in (*results, *(each for each in written if id(each) not in self.names)):
            self.results[id(each)] = each, len(self.nodes) - 1 if input_nodes else parameters
        return out


def record_functions(model: nn.Module, inputs: Any) -> tuple[list[FunctionNode], set[int]]:
    """Record a forward.

    Args:
        model: The model.
        inputs: Its inputs.

    Returns:
        (the nodes in their order, the nodes that make outputs of the model).
    """
    names = {id(each): name for name, each in [*model.named_parameters(), *model.named_buffers()]}
    inputs = clone_batch(inputs)
    with (
        track_modules(model) as module_stack,
        FunctionRecorder(names, module_stack, inputs) as recorder,
    ):
        out = call_model(model, inputs)
    ends = {
        node
        for each in _iterate_tensors(out)
        if isinstance(node := recorder.results.get(id(each), (each, set()))[1], int)
    }
    return recorder.nodes, ends


def _iterate_tensors(out: Any) -> Iterator[Tensor]:
    """Yield tensors, also those in a dataclass, which a tree of torch treats as a leaf."""
    for each in tree_leaves(out):
        if isinstance(each, Tensor):
            yield each
        elif is_dataclass(each) and not isinstance(each, type):
            yield from _iterate_tensors([getattr(each, field.name, None) for field in fields(each)])


def find_forks(
    nodes: list[FunctionNode], ends: Collection[int], ranks: int
) -> list[list[ModelBranch]]:
    """Find the branches of every fork.

    A branch may take so long that it should itself be divided over the ranks. Then it is not a
    branch; the forks inside of it are used instead.

    Args:
        nodes: The nodes of a forward.
        ends: The nodes that make outputs of the model.
        ranks: Number of ranks.

    Returns:
        The branches of each fork, in the order of a forward.
    """
    forks_of_nodes = _find_region_forks(nodes, range(len(nodes)), set(ends), ranks)[0]
    use_counts = Counter(
        name
        for components in forks_of_nodes
        for component in components
        for name in collect_parameters(nodes, component)
    )
    branch_nodes = {
        node for components in forks_of_nodes for component in components for node in component
    }
    use_counts.update(
        collect_parameters(nodes, (node for node in range(len(nodes)) if node not in branch_nodes))
    )
    shared = {name for name, count in use_counts.items() if count > 1}
    branches = [
        [_build_branch(nodes, component, shared) for component in components]
        for components in forks_of_nodes
    ]
    with_parameters = [[branch for branch in fork if branch.parameters] for fork in branches]
    return [fork for fork in with_parameters if fork]


def _find_region_forks(
    nodes: list[FunctionNode], region: Sequence[int], ends: Collection[int], ranks: int
) -> tuple[list[list[list[int]]], float]:
    """Return the forks of a region, each as lists of nodes, and the duration of the region then."""
    members = set(region)
    end = len(nodes)
    # the last node that uses a node's result; -1: what the region is given
    last_use = {node: node for node in (-1, *region)}
    for node in region:
        for each in nodes[node].input_nodes:
            last_use[each if each in members else -1] = node
    for each in members & set(ends) if len(members) < len(nodes) else ends:
        last_use[each] = end
    trunk = [-1]
    reach = last_use[-1]
    for node in region:
        if reach <= node:  # no earlier result is used behind this node
            trunk.append(node)
        reach = max(reach, last_use[node])
    forks = list[list[list[int]]]()
    seconds = sum(nodes[node].seconds for node in trunk if node >= 0)
    for start, stop in zip(trunk, [*trunk[1:], end], strict=True):
        components = [
            each
            for component in find_components(
                nodes, [node for node in region if start < node < stop]
            )
            for each in refine_component(nodes, component)
        ]
        branches = sorted(
            (component for component in components if collect_parameters(nodes, component)),
            key=lambda component: -_sum_seconds(nodes, component),
        )
        seconds += sum(_sum_seconds(nodes, component) for component in components) - sum(
            _sum_seconds(nodes, component) for component in branches
        )
        if not branches:
            continue
        longest = branches[0]
        others = branches[1:]
        seconds_whole = _estimate_longest_rank(
            [_sum_seconds(nodes, component) for component in branches], ranks
        )
        inner_forks, seconds_inside = (
            _find_region_forks(nodes, longest, longest[-1:], ranks)
            if len(longest) < len(region)
            else ([], seconds_whole)
        )
        seconds_divided = seconds_inside + _estimate_longest_rank(
            [_sum_seconds(nodes, component) for component in others], ranks
        )
        if inner_forks and seconds_divided < seconds_whole:
            forks += [*inner_forks, others] if others else inner_forks
        elif len(branches) > 1:
            forks.append(branches)
        seconds += min(seconds_divided, seconds_whole) if inner_forks else seconds_whole
    return forks, seconds


def _sum_seconds(nodes: list[FunctionNode], part: Iterable[int]) -> float:
    return sum(nodes[node].seconds for node in part)


def _estimate_longest_rank(seconds: Sequence[float], ranks: int) -> float:
    """Give each duration, longest first, to the rank with the least; return the longest sum."""
    load = [0.0] * ranks
    for duration in sorted(seconds, reverse=True):
        load[load.index(min(load))] += duration
    return max(load)


def collect_parameters(nodes: list[FunctionNode], part: Iterable[int]) -> set[str]:
    """Return the names of the parameters that nodes use."""
    return set[str]().union(*(nodes[node].parameters for node in part))


def find_components(nodes: list[FunctionNode], region: Iterable[int]) -> list[list[int]]:
    """Find connected components of nodes, by results and by shared parameters."""
    region = list(region)
    group = {node: node for node in region}

    def root(node: int) -> int:
        while group[node] != node:
            node = group[node]
        return node

    first_users: dict[str, int] = {}
    for node in region:
        for other in (
            *(each for each in nodes[node].input_nodes if each in group),
            *(first_users.setdefault(name, node) for name in nodes[node].parameters),
        ):
            group[root(node)] = root(other)
    components: dict[int, list[int]] = {}
    for node in region:
        components.setdefault(root(node), []).append(node)
    return list(components.values())


def refine_component(nodes: list[FunctionNode], part: list[int]) -> list[list[int]]:
    """Leave out final functions without parameters, if this splits a component into branches."""
    remaining = set(part)
    while True:
        used_nodes = set[int]().union(*(nodes[node].input_nodes for node in remaining))
        ends = {node for node in remaining if node not in used_nodes and not nodes[node].parameters}
        if not ends:
            return [part]
        remaining -= ends
        components = [
            each
            for each in find_components(nodes, sorted(remaining))
            if collect_parameters(nodes, each)
        ]
        if len(components) > 1:
            return [each for one in components for each in refine_component(nodes, one)]


def _build_branch(
    nodes: list[FunctionNode], part: list[int], shared: Collection[str]
) -> ModelBranch:
    """Build a branch; shared parameters, which other nodes use too, are on all ranks."""
    modules = dict.fromkeys(nodes[node].module for node in part if nodes[node].parameters)
    return ModelBranch(
        tuple(modules),
        frozenset(collect_parameters(nodes, part) - set(shared)),
        _sum_seconds(nodes, part),
    )


def assign_branches(forks: list[list[ModelBranch]], ranks: int) -> dict[str, int]:
    """Assign the branches of each fork to ranks.

    The longest branch comes first, and goes to the rank with the least work.

    Args:
        forks: The branches of each fork.
        ranks: Number of ranks.

    Returns:
        The rank of each parameter and buffer.
    """
    owners: dict[str, int] = {}
    for branches in forks:
        load = [0.0] * ranks
        for branch in sorted(branches, key=lambda each: -each.seconds):
            rank = load.index(min(load))
            load[rank] += branch.seconds
            owners |= dict.fromkeys(branch.parameters, rank)
    return owners


def time_forks(model: nn.Module, inputs: Any, ranks: int) -> list[list[ModelBranch]]:
    """Find the forks of a model, and measure them.

    Args:
        model: The model.
        inputs: Its inputs.
        ranks: Number of ranks.

    Returns:
        The branches of each fork; each function takes as long as in the quicker of two forwards.
    """
    with torch.no_grad():
        first, second = (record_functions(model, inputs) for _ in range(2))
    for one, other in zip(first[0], second[0], strict=False):
        one.seconds = min(one.seconds, other.seconds)
    return find_forks(*first, ranks)
