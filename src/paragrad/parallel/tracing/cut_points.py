"""The units of a model: the calls of modules between which a cut into stages is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils._pytree import tree_flatten, tree_map_only

from paragrad.datasets.loading import clone_batch
from paragrad.engine.compiled_modules import is_compiled
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.engine.state.values import IMMUTABLE_TYPES
from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.loss import LossModule, call_model
from paragrad.notation.choices import describe_unknown_name
from paragrad.parallel.tracing.plan_builder import FixedOutputs, InputLike
from paragrad.parallel.tracing.stage_forward import PlanFailed, StageForward
from paragrad.parallel.tracing.tracer import Unit, find_tensors, hook_module_calls
from paragrad.planner.profile import disable_fused_kernels
from paragrad.strategies.pipeline import RequestedCut

# a unit is opened while its work exceeds 1 / UNITS_PER_STAGE of a stage's work
UNITS_PER_STAGE = 8
# stands for the loss of a model that is inspected without one
PLACEHOLDER_LOSS = nn.functional.mse_loss


@dataclass
class ModuleCall:
    """A call of a module in a forward.

    Attributes:
        name: Name of the module.

        work: Operations in matrix products, with those of inner calls.

        output: What it returned, each tensor as the input with its shape; None if one is like no
            input.

        inner_calls: Calls of modules inside of it.
    """

    name: str
    work: int = 0
    output: Any = None
    inner_calls: list[ModuleCall] = field(default_factory=list)


@dataclass(frozen=True)
class CutPoints:
    """The calls of a forward between which a model can be cut.

    Attributes:
        work: Operations in matrix products of each unit, in order.

        fixed_outputs: Outputs of modules with shapes that depend on values, such as experts that
            each take the samples that come to it. These modules are units as they are.

        call_tree: All calls.

        hooked_modules: Names of modules with forward hooks, also hooks that the first forward
            registered.

        is_sequential: Whether nothing needs to be traced.
    """

    work: dict[Unit, int]
    fixed_outputs: FixedOutputs
    call_tree: ModuleCall
    hooked_modules: list[str]
    is_sequential: bool


def find_cut_points(
    model: nn.Module,
    example: Any,
    stage_count: int,
    requested: RequestedCut | None = None,
    opens_all: bool = False,
) -> CutPoints:
    """Find the calls of a forward between which so many stages can be cut.

    Args:
        model: The model.
        example: Inputs of some samples.
        stage_count: Number of stages.

        requested: Where the user wants to cut, if anywhere.
        opens_all: Whether every module is opened that can be.

    Returns:
        The units.

    Raises:
        StepFailed: There are too few units, or the output of one cannot be known without its
            values.
    """
    if is_compiled(model):
        raise StepFailed(
            "torch.compile made the model one graph, which cannot be divided; give the model "
            "without torch.compile, or compile its layers, each by itself (layer.compile())"
        )
    compiled_names = {name for name, module in model.named_modules() if is_compiled(module)}
    closed: set[type] = set()
    with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
        tree = record_module_calls(model, example)
        while True:
            names = {name for name, module in model.named_modules() if type(module) in closed}
            units = _choose_units(
                model, tree, stage_count, requested, names | compiled_names, opens_all
            )
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
    """Return how many modules a cut before each unit goes through."""
    names = {name for name, _ in cut_points.work}
    counts: list[int] = []

    def visit(call: ModuleCall, depth: int, opened: int) -> None:
        """Visit a call; a cut before its first inner call goes through as many modules."""
        if call.name in names:
            counts.append(opened)
        else:
            for number, inner in enumerate(call.inner_calls):
                visit(inner, depth + 1, depth + 1 if number else opened)

    visit(cut_points.call_tree, 0, 0)
    return counts


def join_units(cut_points: CutPoints, stages: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """Join units into calls that are as large as possible, because tracing costs less for these.

    A module is a unit itself if every call of it lies in one stage. That does not hold if something
    inside must be seen on every rank: a module with a hook, or with a fixed output.

    Args:
        cut_points: The units.
        stages: The units of each stage.

    Returns:
        The joined units of each stage.
    """
    part_of = {unit: stage for stage, calls in enumerate(stages) for unit in calls}
    names = {name for name, _ in part_of}
    call_counts = Counter[str]()
    # the stages of each call
    stages_of_call: dict[int, set[int]] = {}

    def visit(call: ModuleCall) -> set[int]:
        if call.name in names:
            stages_of_call[id(call)] = {part_of[call.name, call_counts[call.name]]}
            call_counts[call.name] += 1
        else:
            stages_of_call[id(call)] = set[int]().union(*map(visit, call.inner_calls))
        return stages_of_call[id(call)]

    visit(cut_points.call_tree)
    visible = [*cut_points.fixed_outputs, *cut_points.hooked_modules]
    opened_names = {
        call.name
        for call in _iterate_calls(cut_points.call_tree)
        if len(stages_of_call.get(id(call), ())) > 1
        or any(name.startswith(f"{call.name}.") for name in visible)
    }
    calls = list(
        _iterate_units(
            cut_points.call_tree, lambda call: call.name in names or call.name not in opened_names
        )
    )
    joined: list[list[Unit]] = [[] for _ in stages]
    for call, unit in zip(calls, _number_calls(calls), strict=True):
        joined[min(stages_of_call[id(call)])].append(unit)
    return joined


def _iterate_calls(call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield a call and all calls inside of it."""
    yield call
    for inner in call.inner_calls:
        yield from _iterate_calls(inner)


def _choose_units(
    model: nn.Module,
    tree: ModuleCall,
    stage_count: int,
    requested: RequestedCut | None,
    closed: set[str],
    opens_all: bool,
) -> dict[Unit, int]:
    """Choose units that are small enough; modules in `closed` are not opened."""
    cut_names = [
        resolve_module_name(model, each) for each in requested or () if isinstance(each, str)
    ]
    # a hook that keeps an output for later (auxiliary losses, hidden states) must be called on
    # every rank
    visible = cut_names + [name for name, module in model.named_modules() if module._forward_hooks]
    # torch calls a backward hook once it has seen the module's outputs and its inputs
    hooked_names = {
        name
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    }
    if (
        "" in hooked_names
        or every_module._global_backward_hooks
        or every_module._global_backward_pre_hooks
    ):
        raise StepFailed(
            "a backward hook is registered on the whole model, or on all modules, and no rank has "
            "all of them; register it on modules that are in one part, or train the model with "
            "data(n)"
        )
    if inside := [
        (name, each) for name in cut_names for each in hooked_names if name.startswith(f"{each}.")
    ]:
        raise StepFailed(
            f"cut={inside[0][0]} goes through {inside[0][1]}, which has a backward hook and must "
            "be whole on one rank; cut before or after it"
        )
    closed = closed | hooked_names

    # a module is a unit in all its calls or in none
    largest: dict[str, int] = {}
    for call in _iterate_calls(tree):
        largest[call.name] = max(call.work, largest.get(call.name, 0))

    def is_small(call: ModuleCall) -> bool:
        return largest[call.name] <= tree.work / (UNITS_PER_STAGE * stage_count) and not any(
            name.startswith(f"{call.name}.") for name in visible
        )

    units = _number_calls(_iterate_units(tree, lambda each: each.name in closed or is_small(each)))
    if opens_all or len(units) < stage_count:
        units = _number_calls(_iterate_units(tree, lambda each: each.name in closed))
    if len(units) < stage_count:
        has_inner = any(name for name, _ in units)
        finding = (
            "the model calls none of its modules (paragrad does not see direct calls of their "
            "forward())"
        )
        if has_inner or not any(model.children()):
            finding = (
                f"the model calls {len(units)} module(s) one after another "
                f"({format_units(units) if has_inner else type(model).__name__})"
            )
        raise StepFailed(
            f"{finding}, and {stage_count} parts are wanted; give fewer workers or chunks, or a "
            "model that calls more"
        )
    return units


def _number_calls(calls: Iterable[ModuleCall]) -> dict[Unit, int]:
    """Return the work of each call, by its name and number."""
    counted: Counter[str] = Counter()
    units: dict[Unit, int] = {}
    for call in calls:
        units[call.name, counted[call.name]] = call.work
        counted[call.name] += 1
    return units


def format_units(units: Iterable[Unit]) -> str:
    """Return the names of units as text."""
    return ", ".join(name for name, _ in units)


def resolve_module_name(model: nn.Module, name: str) -> str:
    """Resolve the name of a module where the model is cut; the end of its name suffices.

    Args:
        model: The model.
        name: The name, or its end.

    Returns:
        The full name.

    Raises:
        StepFailed: No module has this name, or several have.
    """
    first_names = {
        module: module_name for module_name, module in reversed(list(model.named_modules()))
    }
    matches = {
        first_names[module]
        for each, module in model.named_modules(remove_duplicate=False)
        if each == name or each.endswith(f".{name}")
    }
    if len(matches) > 1 and name not in matches:
        raise StepFailed(
            f"cut names {name}, which may be {' or '.join(sorted(matches))}; give the whole name"
        )
    if not matches:
        raise StepFailed(
            f"cut: {describe_unknown_name('module', name, filter(None, first_names.values()))}"
        )
    return name if name in matches else matches.pop()


def record_module_calls(model: nn.Module, example: Any) -> ModuleCall:
    """Record every call of a module in a forward.

    torch's counter cannot run some models (jagged nested tensors). Then the elements of a module's
    parameters stand for its work.

    Args:
        model: The model.
        example: Inputs of some samples.

    Returns:
        The call of the model, with all calls inside.

    Raises:
        StepFailed: The forward failed without gradients.
    """
    with suppress(Exception), disable_fused_kernels() as counter:
        return _record_calls(model, example, lambda module: counter.get_total_flops())
    done = 0

    def count_elements(module: nn.Module | None) -> int:
        nonlocal done
        parameters = module.parameters(recurse=False) if module is not None else ()
        done += sum(parameter.numel() for parameter in parameters)
        return done

    try:
        return _record_calls(model, example, count_elements)
    except Exception as error:
        cause = ""
        with suppress(Exception):
            call_model(model, clone_batch(example))
            cause = (
                "; with gradients it does not, and a model that takes gradients itself is not cut, "
                "because it gets no gradients of parts on other ranks"
            )
        raise StepFailed(
            f"a forward without gradients raised {describe_error(error)}{cause}; train it with "
            "data(n)"
        ) from error


def _record_calls(
    model: nn.Module, example: Any, count_work: Callable[[nn.Module | None], int]
) -> ModuleCall:
    """Record every call of a module in a forward.

    Args:
        model: The model.
        example: Inputs of some samples.
        count_work: Returns the work of the forward so far; after a call, it gets the module.

    Returns:
        The call of the model, with all calls inside.
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    stack = [ModuleCall("")]

    def record_call(
        original_call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        if module not in names:
            return original_call(module, *args, **kwargs)
        stack[-1].inner_calls.append(inner_call := ModuleCall(names[module]))
        stack.append(inner_call)
        work_before = count_work(None)
        try:
            out = original_call(module, *args, **kwargs)
            inner_call.output = _match_inputs(out, find_tensors((args, kwargs)))
            return out
        finally:
            inner_call.work = count_work(module) - work_before
            stack.pop()

    with hook_module_calls(record_call), torch.no_grad():
        call_model(model, clone_batch(example))
    return stack[0].inner_calls[0]


def _match_inputs(out: Any, inputs: list[Tensor]) -> Any:
    """Describe a module's output by the first input that has the shape and type of each tensor.

    The result is None if a tensor has no such input, or if the output holds other objects.
    """

    def match_tensor(tensor: Tensor) -> InputLike | object:
        matching = (
            number
            for number, each in enumerate(inputs)
            if each.shape == tensor.shape and each.dtype == tensor.dtype
        )
        return next(map(InputLike, matching), out)

    try:
        matched = tree_map_only(Tensor, match_tensor, out)
    # a tuple that checks its items, such as a PackedSequence
    except Exception:
        return None
    return (
        matched
        if all(isinstance(leaf, (InputLike, *IMMUTABLE_TYPES)) for leaf in tree_flatten(matched)[0])
        else None
    )


def _iterate_units(
    call: ModuleCall, is_whole: Callable[[ModuleCall], bool], root: bool = True
) -> Iterator[ModuleCall]:
    """Yield the calls that are not opened further."""
    if call.inner_calls and (root or not is_whole(call)):
        for inner in call.inner_calls:
            yield from _iterate_units(inner, is_whole, root=False)
    else:
        yield call
