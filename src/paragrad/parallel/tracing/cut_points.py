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

from paragrad.datasets.loading import call_model, clone_batch
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.engine.state.values import IMMUTABLE_TYPES
from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.loss import LossModule
from paragrad.notation.choices import describe_unknown_name
from paragrad.parallel.tracing.plan_builder import FixedOutputs, InputLike
from paragrad.parallel.tracing.stage_forward import PlanFailed, StageForward
from paragrad.parallel.tracing.tracer import Unit, find_tensors, hook_module_calls
from paragrad.planner.profile import disable_fused_kernels
from paragrad.strategies.pipeline import RequestedCut

# units are split further while one is more than an eighth of a part's work
UNITS_PER_STAGE = 8
PLACEHOLDER_LOSS = nn.functional.mse_loss  # of models that are looked at without one


@dataclass
class ModuleCall:
    """A call of a module in a forward. work: operations in matrix products, of everything in
    it;  gives: what it returned, each tensor as an input of its shape; None where one is like
    no input.
    """

    name: str
    work: int = 0
    output: Any = None
    inner_calls: list[ModuleCall] = field(default_factory=list)


@dataclass(frozen=True)
class CutPoints:
    """work: of the calls of a forward between which it can be cut, in order;  standing: what
    those modules give that decide shapes by values, such as experts of which each takes what
    comes to it: they are units as they are;  tree: all calls; hooked: modules with forward
    hooks, also those that the first forward registered;  straight: nothing is to be watched.
    """

    work: dict[Unit, int]
    fixed_outputs: FixedOutputs
    call_tree: ModuleCall
    hooked_modules: list[str]
    is_sequential: bool


def find_cut_points(
    model: nn.Module, example: Any, stage_count: int, requested: RequestedCut | None = None
) -> CutPoints:
    """The calls of a forward between which so many parts can be cut.

    Raises StepFailed where there are too few of them, or nobody knows what one gives.
    """
    if is_compiled(model):
        raise StepFailed(
            "torch.compile made the model one graph, which is not cut; give the model as it was "
            "before"
        )
    graphs = {name for name, module in model.named_modules() if is_compiled(module)}
    closed: set[type] = set()
    with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
        tree = record_module_calls(model, example)
        while True:
            names = {name for name, module in model.named_modules() if type(module) in closed}
            units = _choose_units(model, tree, stage_count, requested, names | graphs)
            standing = {
                each.name: each.output for each in _iterate_calls(tree) if each.name in names
            }
            try:
                plan = StageForward(model, [list(units)], standing).find_plan(example)
            except PlanFailed as error:
                module = next(
                    (
                        each
                        for each in _iterate_calls(tree)
                        if model.get_submodule(each.name) is error.module
                    ),
                    tree,
                )
                if module is tree or module.output is None or module.name in names:
                    raise
                closed.add(type(error.module))
                continue
            hooked = [name for name, module in model.named_modules() if module._forward_hooks]
            return CutPoints(units, standing, tree, hooked, plan.sequential_stages is not None)


def count_opened_modules(cut_points: CutPoints) -> list[int]:
    """How many modules a cut before each unit goes through."""
    names = {name for name, _ in cut_points.work}
    found: list[int] = []

    def look(call: ModuleCall, depth: int, here: int) -> None:
        """here: what a cut before it goes through, which the first call inside shares."""
        if call.name in names:
            found.append(here)
        else:
            for number, inner in enumerate(call.inner_calls):
                look(inner, depth + 1, depth + 1 if number else here)

    look(cut_points.call_tree, 0, 0)
    return found


def join_units(cut_points: CutPoints, stages: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """The same parts in calls as large as can be, which cost less to watch: a module of which
    every call lies in one part is a unit itself. Not where something inside is to be seen on
    every rank: what has a hook, or stands for itself.
    """
    part_of = {unit: part for part, calls in enumerate(stages) for unit in calls}
    names = {name for name, _ in part_of}
    counted = Counter[str]()
    # of each call, the parts in which it lies
    within: dict[int, set[int]] = {}

    def look(call: ModuleCall) -> set[int]:
        if call.name in names:
            within[id(call)] = {part_of[call.name, counted[call.name]]}
            counted[call.name] += 1
        else:
            within[id(call)] = set[int]().union(*map(look, call.inner_calls))
        return within[id(call)]

    look(cut_points.call_tree)
    seen = [*cut_points.fixed_outputs, *cut_points.hooked_modules]
    opened = {
        call.name
        for call in _iterate_calls(cut_points.call_tree)
        if len(within.get(id(call), ())) > 1
        or any(name.startswith(f"{call.name}.") for name in seen)
    }
    calls = list(
        _iterate_units(
            cut_points.call_tree, lambda call: call.name in names or call.name not in opened
        )
    )
    found: list[list[Unit]] = [[] for _ in stages]
    for call, unit in zip(calls, _number_calls(calls), strict=True):
        found[min(within[id(call)])].append(unit)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Is it what torch.compile made of another?"""
    return type(module).__name__ == "OptimizedModule"


def _iterate_calls(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for inner in call.inner_calls:
        yield from _iterate_calls(inner)


def _choose_units(
    model: nn.Module,
    tree: ModuleCall,
    stage_count: int,
    requested: RequestedCut | None,
    closed: set[str],
) -> dict[Unit, int]:
    """closed: modules that are not split."""
    begins = [resolve_module_name(model, each) for each in requested or () if isinstance(each, str)]
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
    for call in _iterate_calls(tree):
        largest[call.name] = max(call.work, largest.get(call.name, 0))

    def small(call: ModuleCall) -> bool:
        return largest[call.name] <= tree.work / (UNITS_PER_STAGE * stage_count) and not any(
            name.startswith(f"{call.name}.") for name in seen
        )

    units = _number_calls(_iterate_units(tree, lambda each: each.name in closed or small(each)))
    if len(units) < stage_count:  # split as far as can be
        units = _number_calls(_iterate_units(tree, lambda each: each.name in closed))
    if len(units) < stage_count:
        inner = any(name for name, _ in units)
        called = (
            "the model calls none of its modules (where it calls their forward() instead, "
            "nobody sees it)"
        )
        if inner or not any(model.children()):
            called = (
                f"the model calls {len(units)} module(s) one after another "
                f"({format_units(units) if inner else type(model).__name__})"
            )
        raise StepFailed(
            f"{called}, and {stage_count} parts are wanted; give fewer workers or chunks, or a "
            f"model "
            f"that calls more"
        )
    return units


def _number_calls(calls: Iterable[ModuleCall]) -> dict[Unit, int]:
    """The work of each call, by its name and number."""
    counted: Counter[str] = Counter()
    units: dict[Unit, int] = {}
    for call in calls:
        units[call.name, counted[call.name]] = call.work
        counted[call.name] += 1
    return units


def format_units(units: Iterable[Unit]) -> str:
    return ", ".join(name for name, _ in units)


def resolve_module_name(model: nn.Module, name: str) -> str:
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
        raise StepFailed(
            f"cut: {describe_unknown_name('module', name, filter(None, first.values()))}"
        )
    return name if name in found else found.pop()


def record_module_calls(model: nn.Module, example: Any) -> ModuleCall:
    """Every call of a module in a forward, as a tree."""
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    stack = [ModuleCall("")]

    def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in names:
            return plain(module, *args, **kwargs)
        stack[-1].inner_calls.append(here := ModuleCall(names[module]))
        stack.append(here)
        before = counter.get_total_flops()
        try:
            out = plain(module, *args, **kwargs)
            here.output = _match_inputs(out, find_tensors((args, kwargs)))
            return out
        finally:
            here.work = counter.get_total_flops() - before
            stack.pop()

    with disable_fused_kernels() as counter, hook_module_calls(call), torch.no_grad():
        try:
            call_model(model, clone_batch(example))
        except RuntimeError as error:
            raise StepFailed(
                f"a forward without gradients raised {describe_error(error)}; a model that takes "
                f"gradients "
                f"itself is not "
                "cut, for none come to it from parts on other ranks: train it with data(n)"
            ) from error
    return stack[0].inner_calls[0]


def _match_inputs(out: Any, inputs: list[Tensor]) -> Any:
    """A module's output, each tensor as the first input of its shape and type; None where one
    has none, or there is more.
    """

    def like(tensor: Tensor) -> InputLike | object:
        alike = (
            number
            for number, each in enumerate(inputs)
            if each.shape == tensor.shape and each.dtype == tensor.dtype
        )
        return next(map(InputLike, alike), out)

    try:
        found = tree_map_only(Tensor, like, out)
    # a tuple that looks at what it holds, such as a PackedSequence
    except Exception:
        return None
    return (
        found
        if all(isinstance(leaf, (InputLike, *IMMUTABLE_TYPES)) for leaf in tree_flatten(found)[0])
        else None
    )


def _iterate_units(
    call: ModuleCall, is_whole: Callable[[ModuleCall], bool], root: bool = True
) -> Iterator[ModuleCall]:
    """Calls that are not split further."""
    if call.inner_calls and (root or not is_whole(call)):
        for inner in call.inner_calls:
            yield from _iterate_units(inner, is_whole, root=False)
    else:
        yield call
