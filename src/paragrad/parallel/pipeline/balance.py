"""Balanced stages: between which calls of modules a model is cut, and what each stage uses."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import clone_batch
from paragrad.engine.rng.draws import DrawRecorder, use_draw_source
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.engine.state.values import is_same_value
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule
from paragrad.parallel.tracing.cut_points import (
    PLACEHOLDER_LOSS,
    CutPoints,
    count_opened_modules,
    find_cut_points,
    format_units,
    join_units,
    resolve_module_name,
)
from paragrad.parallel.tracing.plan_builder import FixedOutputs
from paragrad.parallel.tracing.stage_forward import StageForward, attach_received
from paragrad.parallel.tracing.stage_trial import try_all_stages
from paragrad.parallel.tracing.tracer import StagedModel, TracedForward, Unit, find_tensors
from paragrad.strategies.pipeline import RequestedCut

ROUNDS = 3  # runs of each measurement, of which the quickest counts
# how much longer a stage may take if the cut then opens fewer modules: inside of an opened module
# every operation is traced
MAX_SLOWDOWN = 1.1
# a buffer of at most so many elements is compared by value also if its version is the same
MAX_COMPARED_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class StagePartition:
    """Where a model is cut into stages.

    Attributes:
        stages: The units of each stage: modules that are called as a whole.

        seconds: Measured duration of each stage, forward and backward.

        work: Operations in the matrix products of each stage's forward.

        tensor_uses: For each parameter and buffer that was used, the stages that use it.

        draw_calls: The random calls that are made where each stage runs.

        fixed_outputs: Outputs of modules with shapes that depend on values.

        watched_stages: The units of each stage as ranks run them, in larger calls.
    """

    stages: tuple[tuple[Unit, ...], ...]
    seconds: tuple[float, ...]
    work: tuple[int, ...]
    tensor_uses: Mapping[str, tuple[int, ...]]
    draw_calls: tuple[tuple[int, ...], ...]
    fixed_outputs: FixedOutputs
    watched_stages: Sequence[Sequence[Unit]]

    @property
    def stage_names(self) -> list[str]:
        """The modules of each stage, in words."""
        return [
            units[0][0] + (f" to {units[-1][0]}" if len(units) > 1 else "") for units in self.stages
        ]

    def __str__(self) -> str:
        return " | ".join(self.stage_names)


def partition_into_stages(
    model: nn.Module, example: Any, stage_count: int, requested: RequestedCut | None = None
) -> StagePartition:
    """Cut a model into stages that take equally long, or as requested.

    Args:
        model: The model.
        example: Inputs of some samples.
        stage_count: Number of stages.
        requested: Where the user wants to cut, if anywhere.

    Returns:
        The partition.

    Raises:
        StepFailed: The model cannot be cut into as many stages.
    """
    units, inseparable = find_separable_units(model, example, stage_count, requested)
    units_in_order = list(units.work)
    with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
        seconds = _time_units(model, units_in_order, example)
    ranges = (
        partition_as_requested(model, units_in_order, stage_count, requested, inseparable)
        if requested
        else balance_stages(
            seconds,
            stage_count,
            None if units.is_sequential else count_opened_modules(units),
            inseparable,
        )
    )
    stages = tuple(tuple(units_in_order[at] for at in stage) for stage in ranges)
    # operations between joined units must not belong to another stage
    watched_stages = _enlarge_units(model, example, units, stages)
    return StagePartition(
        stages,
        tuple(sum(seconds[at] for at in stage) for stage in ranges),
        tuple(sum(units.work[unit] for unit in stage) for stage in stages),
        *find_uses_and_draws(StagedModel(model, watched_stages), example),
        units.fixed_outputs,
        watched_stages,
    )


def find_separable_units(
    model: nn.Module, example: Any, stage_count: int, requested: RequestedCut | None
) -> tuple[CutPoints, dict[int, str]]:
    """Find the units of a model, and with which of them no stage may begin.

    Args:
        model: The model.
        example: Inputs of some samples.
        stage_count: Number of stages.
        requested: Where the user wants to cut, if anywhere.

    Returns:
        (the units, as of `find_inseparable_units`).

    Raises:
        StepFailed: There are too few units.
    """
    units = find_cut_points(model, example, stage_count, requested)
    inseparable = find_inseparable_units(model, list(units.work), example)
    if not requested and len(units.work) - len(inseparable) < stage_count:
        units = find_cut_points(model, example, stage_count, opens_all=True)
        inseparable = find_inseparable_units(model, list(units.work), example)
    return units, inseparable


class BufferRecorder(TracedForward):
    """A forward that notes in which units the value of each buffer changes.

    What changes between two units counts for the first of them, because it belongs to its stage.

    Attributes:
        unit_number: The number of the last unit that began.
        values: The last value of each buffer, by name.
        versions: The identity and version of each buffer when its value was taken, by name.
        changing_units: The numbers of the units that change each buffer, by name.
    """

    def __init__(self, staged_model: StagedModel) -> None:
        super().__init__(staged_model)
        self.unit_number = 0
        self.values = {name: each.clone() for name, each in staged_model.model.named_buffers()}
        self.versions = {
            name: (id(each), each._version) for name, each in staged_model.model.named_buffers()
        }
        self.changing_units: dict[str, set[int]] = {name: set() for name in self.values}

    def note_changes(self) -> None:
        """Note the buffers that have changed since the last call."""
        for name, each in self.staged_model.model.named_buffers():
            if name not in self.values:
                continue
            version = id(each), each._version
            # a write by .data has no version; a large buffer, such as a mask, takes long to compare
            may_change = version != self.versions[name] or each.numel() <= MAX_COMPARED_ELEMENTS
            self.versions[name] = version
            if may_change and not is_same_value(each, self.values[name]):
                self.values[name] = each.clone()
                self.changing_units[name].add(self.unit_number)

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        return func(*args, **kwargs)

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.note_changes()
        self.begin_unit(name)
        self.unit_number = next(self.unit_numbers)
        with self.pause_tracing():
            return call(*args, **kwargs)


def find_inseparable_units(model: nn.Module, units: Sequence[Unit], example: Any) -> dict[int, str]:
    """Find the units with which no stage may begin.

    A buffer that several calls change lies in one stage, as of a batch norm that is called twice.
    If the ranks of two stages changed a copy each, both copies would be wrong. A buffer that each
    call fills with the same values is none of these: its copies stay equal.

    Args:
        model: The model.
        units: Its units, in order.
        example: Inputs of some samples.

    Returns:
        The names of the modules with such buffers, by the number of the unit.
    """
    names = {id(each): name for name, each in model.named_buffers()}
    if not names:
        return {}
    users: dict[str, set[int]] = {name: set() for name in names.values()}
    for number, (unit, _) in enumerate(units):
        for buffer in model.get_submodule(unit).buffers():
            users[names[id(buffer)]].add(number)
    with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)), torch.no_grad():
        recorder = BufferRecorder(StagedModel(model, [units]))
        recorder.run_forward(clone_batch(example))
        recorder.note_changes()
    inseparable: dict[int, str] = {}
    for name, changing in recorder.changing_units.items():
        if len(changing) > 1:
            numbers = changing | users[name]
            module = name.rpartition(".")[0] or "the model"
            inseparable |= dict.fromkeys(range(min(numbers) + 1, max(numbers) + 1), module)
    return inseparable


def _enlarge_units(
    model: nn.Module, example: Any, units: CutPoints, stages: Sequence[Sequence[Unit]]
) -> Sequence[Sequence[Unit]]:
    """Return the units of each stage as ranks run them: in calls as large as possible.

    If a tensor goes from one stage to another by a way that is visible only inside of a larger
    call, the units stay as they are.
    """
    if units.is_sequential:
        return stages
    joined = join_units(units, stages)
    try:
        with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
            try_all_stages(StageForward(model, joined, units.fixed_outputs), example)
    except StepFailed:
        return stages
    return joined


def partition_as_requested(
    model: nn.Module,
    units: Sequence[Unit],
    stage_count: int,
    requested: RequestedCut,
    inseparable: Mapping[int, str],
) -> list[range]:
    """Cut a model as requested.

    Args:
        model: The model.
        units: Its units, in order.
        stage_count: Number of stages.
        requested: Numbers of modules, or names of the modules with which stages begin.
        inseparable: As of `find_inseparable_units`.

    Returns:
        The units of each stage, by number.

    Raises:
        StepFailed: The request gives another number of stages, or an empty one, or begins one with
            an inseparable unit.
    """
    ranges = _read_requested_cut(model, units, stage_count, requested)
    for stage in ranges:
        if stage.start in inseparable:
            raise StepFailed(
                f"cut=[{', '.join(map(str, requested))}] lies between two calls that change "
                f"buffers of {inseparable[stage.start]}, which only one part can have; cut before "
                "or after both"
            )
    return ranges


def _read_requested_cut(
    model: nn.Module, units: Sequence[Unit], stage_count: int, requested: RequestedCut
) -> list[range]:
    """Return the units of each requested stage, by number."""
    spec = f"cut=[{', '.join(map(str, requested))}]"
    sizes = [each for each in requested if isinstance(each, int)]
    if sizes and (len(sizes) != stage_count or sum(sizes) != len(units)):
        raise StepFailed(
            f"{spec} is {len(sizes)} part(s) of {sum(sizes)} modules together, and the model needs "
            f"{stage_count} of {len(units)}: {format_units(units)}; give {stage_count} numbers "
            f"that add up to {len(units)}"
        )
    if sizes:
        ends = list(itertools.accumulate(sizes, initial=0))
        return [range(*borders) for borders in itertools.pairwise(ends)]
    starts = [0]
    for name in (resolve_module_name(model, str(each)) for each in requested):
        unit_numbers = [
            at for at, (unit, _) in enumerate(units) if f"{unit}.".startswith(f"{name}.")
        ]
        if not unit_numbers:
            raise StepFailed(
                f"{spec}: {name} is not called in a forward; cut at one of "
                f"{format_units(units[1:])}"
            )
        starts.append(unit_numbers[0])
    starts.append(len(units))
    if len(requested) != stage_count - 1 or any(
        start >= stop for start, stop in itertools.pairwise(starts)
    ):
        raise StepFailed(
            f"{spec} must name the first module of each part except the first, and {stage_count} "
            f"parts that are not empty need {stage_count - 1} in the order in which they are "
            f"called: of {format_units(units[1:])}"
        )
    return [range(*borders) for borders in itertools.pairwise(starts)]


class UnitTimer(TracedForward):
    """A forward in which every unit's backward follows at once, by itself.

    Attributes:
        seconds: Duration of each unit so far.
    """

    def __init__(self, staged_model: StagedModel) -> None:
        super().__init__(staged_model)
        self.seconds: list[float] = []

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        return func(*args, **kwargs)

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begin_unit(name)
        with self.pause_tracing():
            start = time.monotonic()
            args, kwargs = self.attach_made_tensors((args, kwargs))
            out = call(*args, **kwargs)
            ends = [each for each in find_tensors(out) if each.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
            self.seconds.append(time.monotonic() - start)
        outputs = find_tensors(out)
        operation_id = next(self.operation_ids)
        attached = dict(
            zip(
                map(id, outputs),
                attach_received(outputs, [each.requires_grad for each in outputs])[0],
                strict=True,
            )
        )
        out = tree_map_only(Tensor, lambda each: attached[id(each)], out)
        for number, tensor in enumerate(find_tensors(out)):
            self.mark_made(tensor, (operation_id, number))
        return out

    def attach_made_tensors(self, tree: Any) -> Any:
        """Attach what earlier units made to the graph, as if it were received.

        The model's inputs stay as they are.
        """
        result = {id(each): each for each in find_tensors(tree) if each in self.origins}
        attached = dict(
            zip(
                result,
                attach_received(
                    list(result.values()), [each.requires_grad for each in result.values()]
                )[0],
                strict=True,
            )
        )
        return tree_map_only(Tensor, lambda each: attached.get(id(each), each), tree)


def _time_units(model: nn.Module, units: Sequence[Unit], example: Any) -> list[float]:
    """Return the seconds of each unit, forward and backward."""
    rounds = []
    for _ in range(ROUNDS):
        timing = UnitTimer(StagedModel(model, [units]))
        timing.run_forward(clone_batch(example))
        rounds.append(timing.seconds)
        model.zero_grad()
    if any(len(each) != len(units) for each in rounds):
        raise StepFailed(
            "the forward runs other operations each time it is called, such as a layer that is "
            "left out at random, and a model that is divided must always run the same operations; "
            "train it with data(n)"
        )
    return [min(each) for each in zip(*rounds, strict=True)]


def balance_stages(
    seconds: Sequence[float],
    stage_count: int,
    opened_modules: Sequence[int] | None = None,
    inseparable: Mapping[int, str] | None = None,
) -> list[range]:
    """Divide units into consecutive stages so that the longest stage is as short as possible.

    Args:
        seconds: Duration of each unit.
        stage_count: Number of stages; none is empty.
        opened_modules: How many modules a cut before each unit goes through. The sum of these is as
            small as possible, if the longest stage takes at most MAX_SLOWDOWN times as long for it.
        inseparable: As of `find_inseparable_units`.

    Returns:
        The units of each stage, by number.

    Raises:
        StepFailed: There are not so many stages, because units are inseparable.
    """
    count = len(seconds)
    inseparable = inseparable or {}
    if count - len(inseparable) < stage_count:
        names = ", ".join(list(dict.fromkeys(inseparable.values()))[:3])
        raise StepFailed(
            f"{stage_count} parts are wanted, and {count - len(inseparable)} can be made: several "
            f"calls change buffers of {names}, and they lie in one part; give fewer workers or "
            "chunks, or train it with data(n)"
        )
    balanced = _find_partition(seconds, stage_count, [0] * count, math.inf, inseparable)
    if opened_modules is None:
        return balanced
    return _find_partition(
        seconds,
        stage_count,
        opened_modules,
        MAX_SLOWDOWN * max(sum(seconds[at] for at in stage) for stage in balanced),
        inseparable,
    )


def _find_partition(
    seconds: Sequence[float],
    stage_count: int,
    opened_modules: Sequence[int],
    limit: float,
    inseparable: Collection[int],
) -> list[range]:
    """Find the partition that opens fewest modules, and among these the shortest longest stage.

    No stage is longer than the limit, and none begins with an inseparable unit.
    """
    ends = list(itertools.accumulate(seconds, initial=0.0))
    count = len(seconds)
    best = [[(math.inf, math.inf)] * (count + 1) for _ in range(stage_count + 1)]
    last_start = [[0] * (count + 1) for _ in range(stage_count + 1)]
    best[0][0] = 0, 0.0
    for stage in range(1, stage_count + 1):
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                if start in inseparable:
                    continue
                opened, longest = best[stage - 1][start]
                candidate = (
                    opened + (opened_modules[start] if start else 0),
                    max(longest, ends[stop] - ends[start]),
                )
                if ends[stop] - ends[start] <= limit and candidate < best[stage][stop]:
                    best[stage][stop] = candidate
                    last_start[stage][stop] = start
    stages = []
    stop = count
    for stage in range(stage_count, 0, -1):
        stages.append(range(last_start[stage][stop], stop))
        stop = last_start[stage][stop]
    return stages[::-1]


# ---- uses of tensors and draws ---------------------------------------------------------------
class UseRecorder(TracedForward):
    """A forward that records which stage uses which tensors, and what it draws.

    Attributes:
        recording: The random calls so far.

        draw_starts: Number of random calls before each stage.

        input_draws: Random calls of operations on the inputs alone.

        noted_draws: Number of random calls that are already assigned.

        tensor_uses: The stages that use each tensor, by its id.

        unit_tensors: Ids of the parameters and buffers of each unit.
    """

    def __init__(self, staged_model: StagedModel, recording: DrawRecorder) -> None:
        super().__init__(staged_model)
        self.recording = recording
        self.draw_starts = [0]
        self.input_draws: list[int] = []
        self.noted_draws = 0
        self.tensor_uses: dict[int, set[int]] = {}
        self.unit_tensors = {
            name: [id(each) for each in itertools.chain(module.parameters(), module.buffers())]
            for module, name in staged_model.units.items()
        }

    def begin_unit(self, name: str) -> None:
        previous = self.stage
        super().begin_unit(name)
        self.draw_starts += [len(self.recording.calls)] * (self.stage - previous)

    def note_uses(self, tensors: Sequence[int]) -> None:
        """Note that the current stage uses tensors, by their ids."""
        for tensor in tensors:
            self.tensor_uses.setdefault(tensor, set()).add(self.stage)

    def run_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        self.note_uses(
            [id(each) for each in find_tensors((args, kwargs)) if id(each) in self.model_tensors]
        )
        out = func(*args, **kwargs)
        self.noted_draws = len(self.recording.calls)
        return out

    def note_input_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.input_draws += range(self.noted_draws, len(self.recording.calls))
        self.noted_draws = len(self.recording.calls)

    def run_unit(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.begin_unit(name)
        self.note_uses(
            [
                *self.unit_tensors[name],
                *(
                    id(each)
                    for each in find_tensors((args, kwargs))
                    if id(each) in self.model_tensors
                ),
            ]
        )
        with self.pause_tracing():
            out = call(*args, **kwargs)
        self.noted_draws = len(self.recording.calls)
        operation_id = next(self.operation_ids)
        for number, tensor in enumerate(find_tensors(out)):
            self.mark_made(tensor, (operation_id, number))
        return out


def find_uses_and_draws(
    staged_model: StagedModel, example: Any
) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
    """Find which stages use each tensor, and which random calls each stage makes.

    Args:
        staged_model: The model and its stages.
        example: Inputs of some samples.

    Returns:
        (the stages that use each tensor, by its first name; the random calls where each stage runs:
        its own, and those that earlier stages make of the inputs alone).
    """
    with (
        preserve_all_state(LossModule(staged_model.model, PLACEHOLDER_LOSS)),
        torch.no_grad(),
        use_draw_source(DrawRecorder()) as recording,
    ):
        recorder = UseRecorder(staged_model, recording)
        recorder.run_forward(clone_batch(example))
    uses = {
        name: tuple(sorted(recorder.tensor_uses[id(tensor)]))
        for name, tensor in (
            *staged_model.model.named_parameters(),
            *staged_model.model.named_buffers(),
        )
        if id(tensor) in recorder.tensor_uses
    }
    draw_starts = recorder.draw_starts + [len(recording.calls)] * (
        staged_model.last_stage + 2 - len(recorder.draw_starts)
    )
    return uses, tuple(
        (*(call for call in recorder.input_draws if call < start), *range(start, stop))
        for start, stop in itertools.pairwise(draw_starts)
    )
