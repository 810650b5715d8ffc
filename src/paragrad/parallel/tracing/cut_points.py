"""The units of a model: the calls of modules between which it can be cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils._pytree import tree_flatten, tree_map_only

from paragrad.datasets.loading import called, copied
from paragrad.engine.state.preserve_state import untouched
from paragrad.engine.state.values import UNCHANGING
from paragrad.errors import StepFailed, told
from paragrad.jobs.loss import Summed
from paragrad.notation.choices import unknown
from paragrad.parallel.tracing.plan_builder import Like, Standing
from paragrad.parallel.tracing.stage_forward import Flow, Unplanned
from paragrad.parallel.tracing.tracer import Unit, calls_watched, tensors_in
from paragrad.planner.profile import unfused
from paragrad.strategies.pipeline import Asked

# units are split further while one is more than an eighth of a part's work
FINE = 8
NO_LOSS = nn.functional.mse_loss  # of models that are looked at without one


@dataclass
class Call:
    """A call of a module in a forward. work: operations in matrix products, of everything in
    it;  gives: what it returned, each tensor as an input of its shape; None where one is like
    no input.
    """

    name: str
    work: int = 0
    gives: Any = None
    inside: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Units:
    """work: of the calls of a forward between which it can be cut, in order;  standing: what
    those modules give that decide shapes by values, such as experts of which each takes what
    comes to it: they are units as they are;  tree: all calls; hooked: modules with forward
    hooks, also those that the first forward registered;  straight: nothing is to be watched.
    """

    work: dict[Unit, int]
    standing: Standing
    tree: Call
    hooked: list[str]
    straight: bool


def units_of(model: nn.Module, example: Any, parts: int, asked: Asked | None = None) -> Units:
    """The calls of a forward between which so many parts can be cut.

    Raises StepFailed where there are too few of them, or nobody knows what one gives.
    """
    if compiled(model):
        raise StepFailed(
            "torch.compile made the model one graph, which is not cut; give the model as it was "
            "before"
        )
    graphs = {name for name, module in model.named_modules() if compiled(module)}
    closed: set[type] = set()
    with untouched(Summed(model, NO_LOSS)):
        tree = calls(model, example)
        while True:
            names = {name for name, module in model.named_modules() if type(module) in closed}
            units = _chosen(model, tree, parts, asked, names | graphs)
            standing = {each.name: each.gives for each in _all(tree) if each.name in names}
            try:
                plan = Flow(model, [list(units)], standing).planned(example)
            except Unplanned as error:
                module = next(
                    (each for each in _all(tree) if model.get_submodule(each.name) is error.module),
                    tree,
                )
                if module is tree or module.gives is None or module.name in names:
                    raise
                closed.add(type(error.module))
                continue
            hooked = [name for name, module in model.named_modules() if module._forward_hooks]
            return Units(units, standing, tree, hooked, plan.straight is not None)


def opened(units: Units) -> list[int]:
    """How many modules a cut before each unit goes through."""
    names = {name for name, _ in units.work}
    found: list[int] = []

    def look(call: Call, depth: int, here: int) -> None:
        """here: what a cut before it goes through, which the first call inside shares."""
        if call.name in names:
            found.append(here)
        else:
            for number, inner in enumerate(call.inside):
                look(inner, depth + 1, depth + 1 if number else here)

    look(units.tree, 0, 0)
    return found


def joined(units: Units, parts: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """The same parts in calls as large as can be, which cost less to watch: a module of which
    every call lies in one part is a unit itself. Not where something inside is to be seen on
    every rank: what has a hook, or stands for itself.
    """
    part_of = {unit: part for part, calls in enumerate(parts) for unit in calls}
    names = {name for name, _ in part_of}
    counted = Counter[str]()
    # of each call, the parts in which it lies
    within: dict[int, set[int]] = {}

    def look(call: Call) -> set[int]:
        if call.name in names:
            within[id(call)] = {part_of[call.name, counted[call.name]]}
            counted[call.name] += 1
        else:
            within[id(call)] = set[int]().union(*map(look, call.inside))
        return within[id(call)]

    look(units.tree)
    seen = [*units.standing, *units.hooked]
    opened = {
        call.name
        for call in _all(units.tree)
        if len(within.get(id(call), ())) > 1
        or any(name.startswith(f"{call.name}.") for name in seen)
    }
    calls = list(_units(units.tree, lambda call: call.name in names or call.name not in opened))
    found: list[list[Unit]] = [[] for _ in parts]
    for call, unit in zip(calls, _numbered(calls), strict=True):
        found[min(within[id(call)])].append(unit)
    return found


def compiled(module: nn.Module) -> bool:
    """Is it what torch.compile made of another?"""
    return type(module).__name__ == "OptimizedModule"


def _all(call: Call) -> Iterator[Call]:
    yield call
    for inner in call.inside:
        yield from _all(inner)


def _chosen(
    model: nn.Module, tree: Call, parts: int, asked: Asked | None, closed: set[str]
) -> dict[Unit, int]:
    """closed: modules that are not split."""
    begins = [named(model, each) for each in asked or () if isinstance(each, str)]
    # what keeps for later what a module gives (auxiliary losses, hidden states) is to see it on
    # every rank
    seen = begins + [name for name, module in model.named_modules() if module._forward_hooks]
    # torch calls it where both the module's outputs and its inputs have come by
    hooked = {
        name
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    }
    if (
        "" in hooked
        or every_module._global_backward_hooks
        or every_module._global_backward_pre_hooks
    ):
        raise StepFailed(
            "a backward hook is registered on the whole model, or on all modules, of which no rank "
            "has all; "
            "register it on modules that lie in one part, or train the model with data(n)"
        )
    if inside := [
        (name, each) for name in begins for each in hooked if name.startswith(f"{each}.")
    ]:
        raise StepFailed(
            f"cut={inside[0][0]} goes through {inside[0][1]}, which has a backward hook and is to "
            f"be whole on one "
            "rank; cut before or after it"
        )
    closed = closed | hooked

    # a module is watched in all its calls or in none
    largest: dict[str, int] = {}
    for call in _all(tree):
        largest[call.name] = max(call.work, largest.get(call.name, 0))

    def small(call: Call) -> bool:
        return largest[call.name] <= tree.work / (FINE * parts) and not any(
            name.startswith(f"{call.name}.") for name in seen
        )

    units = _numbered(_units(tree, lambda each: each.name in closed or small(each)))
    if len(units) < parts:  # split as far as can be
        units = _numbered(_units(tree, lambda each: each.name in closed))
    if len(units) < parts:
        inner = any(name for name, _ in units)
        called = (
            "the model calls none of its modules (where it calls their forward() instead, "
            "nobody sees it)"
        )
        if inner or not any(model.children()):
            called = (
                f"the model calls {len(units)} module(s) one after another "
                f"({listed(units) if inner else type(model).__name__})"
            )
        raise StepFailed(
            f"{called}, and {parts} parts are wanted; give fewer workers or chunks, or a model "
            f"that calls more"
        )
    return units


def _numbered(calls: Iterable[Call]) -> dict[Unit, int]:
    """The work of each call, by its name and number."""
    counted: Counter[str] = Counter()
    units: dict[Unit, int] = {}
    for call in calls:
        units[call.name, counted[call.name]] = call.work
        counted[call.name] += 1
    return units


def listed(units: Iterable[Unit]) -> str:
    return ", ".join(name for name, _ in units)


def named(model: nn.Module, name: str) -> str:
    """The name of a module by which it is cut: it may be given by its end. Raises StepFailed
    where there is none.
    """
    first = {module: own for own, module in reversed(list(model.named_modules()))}
    found = {
        first[module]
        for each, module in model.named_modules(remove_duplicate=False)
        if each == name or each.endswith(f".{name}")
    }
    if len(found) > 1 and name not in found:
        raise StepFailed(
            f"cut names {name}, which may be {' or '.join(sorted(found))}; give the whole name"
        )
    if not found:
        raise StepFailed(f"cut: {unknown('module', name, filter(None, first.values()))}")
    return name if name in found else found.pop()


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
            out = plain(module, *args, **kwargs)
            here.gives = _alike(out, tensors_in((args, kwargs)))
            return out
        finally:
            here.work = counter.get_total_flops() - before
            stack.pop()

    with unfused() as counter, calls_watched(call), torch.no_grad():
        try:
            called(model, copied(example))
        except RuntimeError as error:
            raise StepFailed(
                f"a forward without gradients raised {told(error)}; a model that takes gradients "
                f"itself is not "
                "cut, for none come to it from parts on other ranks: train it with data(n)"
            ) from error
    return stack[0].inside[0]


def _alike(out: Any, inputs: list[Tensor]) -> Any:
    """A module's output, each tensor as the first input of its shape and type; None where one
    has none, or there is more.
    """

    def like(tensor: Tensor) -> Like | object:
        alike = (
            number
            for number, each in enumerate(inputs)
            if each.shape == tensor.shape and each.dtype == tensor.dtype
        )
        return next(map(Like, alike), out)

    try:
        found = tree_map_only(Tensor, like, out)
    # a tuple that looks at what it holds, such as a PackedSequence
    except Exception:
        return None
    return (
        found
        if all(isinstance(leaf, (Like, *UNCHANGING)) for leaf in tree_flatten(found)[0])
        else None
    )


def _units(call: Call, whole: Callable[[Call], bool], root: bool = True) -> Iterator[Call]:
    """Calls that are not split further."""
    if call.inside and (root or not whole(call)):
        for inner in call.inside:
            yield from _units(inner, whole, root=False)
    else:
        yield call
