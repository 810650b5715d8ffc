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

from paragrad.datasets.loading import clone_batch
from paragrad.engine.rng.draws import DrawRecorder
from paragrad.engine.rng.random_kernels import use_draw_source
from paragrad.engine.state.preserve_state import preserve_all_state
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
from paragrad.parallel.tracing.receive_boundary import attach_received
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.parallel.tracing.tracer import StagedModel, TracedForward, Unit, find_tensors
from paragrad.strategies.pipeline import RequestedCut

ROUNDS = 3  # of which the quickest counts
# a part, where that leaves modules whole: inside of one that is cut every operation is watched
MAX_SLOWDOWN = 1.1


@dataclass(frozen=True)
class StagePartition:
    """Where a model is cut. parts: the units of each, modules that are called as a whole;
    seconds: of each part, forward and backward, as it was measured;  work: of each, operations
    in the matrix products of a forward;  uses: of each parameter and buffer that was used, in
    which parts;  draws: the random calls that are made where each part is run; standing: what
    those modules give that decide shapes by values;  watched: the parts as ranks run them, in
    larger calls.
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
        """Each part in words."""
        return [
            units[0][0] + (f" to {units[-1][0]}" if len(units) > 1 else "") for units in self.stages
        ]

    def __str__(self) -> str:
        return " | ".join(self.stage_names)


def partition_into_stages(
    model: nn.Module, example: Any, stage_count: int, requested: RequestedCut | None = None
) -> StagePartition:
    """Into parts that take equally long, or as asked for. Raises StepFailed where there are not
    as many.
    """
    units = find_cut_points(model, example, stage_count, requested)
    names = list(units.work)
    with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
        timed = _time_units(model, names, example)
    cuts = (
        partition_as_requested(model, names, stage_count, requested)
        if requested
        else balance_stages(
            timed, stage_count, None if units.is_sequential else count_opened_modules(units)
        )
    )
    found = tuple(tuple(names[at] for at in part) for part in cuts)
    # of which the operations between them are another part's
    watched = _enlarge_units(model, example, units, found)
    return StagePartition(
        found,
        tuple(sum(timed[at] for at in part) for part in cuts),
        tuple(sum(units.work[unit] for unit in part) for part in found),
        *find_uses_and_draws(StagedModel(model, watched), example),
        units.fixed_outputs,
        watched,
    )


def _enlarge_units(
    model: nn.Module, example: Any, units: CutPoints, stages: Sequence[Sequence[Unit]]
) -> Sequence[Sequence[Unit]]:
    """The parts as ranks run them: in calls as large as can be, unless a tensor goes from one
    part to another by a way that is seen inside of them alone.
    """
    if units.is_sequential:
        return stages
    found = join_units(units, stages)
    try:
        with preserve_all_state(LossModule(model, PLACEHOLDER_LOSS)):
            StageForward(model, found, units.fixed_outputs).try_all_stages(example)
    except StepFailed:
        return stages
    return found


def partition_as_requested(
    model: nn.Module, units: Sequence[Unit], stage_count: int, requested: RequestedCut
) -> list[range]:
    """The parts that are asked for. Raises StepFailed where they are not as many, or one would
    be empty.
    """
    said = f"cut=[{', '.join(map(str, requested))}]"
    sizes = [each for each in requested if isinstance(each, int)]
    if sizes and (len(sizes) != stage_count or sum(sizes) != len(units)):
        raise StepFailed(
            f"{said} is {len(sizes)} part(s) of {sum(sizes)} modules together, and there are "
            f"{stage_count} of "
            f"{len(units)}: {format_units(units)}; give {stage_count} numbers that add up to "
            f"{len(units)}"
        )
    if sizes:
        ends = list(itertools.accumulate(sizes, initial=0))
        return [range(*two) for two in itertools.pairwise(ends)]
    starts = [0]
    for name in (resolve_module_name(model, str(each)) for each in requested):
        inside = [at for at, (unit, _) in enumerate(units) if f"{unit}.".startswith(f"{name}.")]
        if not inside:
            raise StepFailed(
                f"{said}: {name} is not called in a forward; cut at one of "
                f"{format_units(units[1:])}"
            )
        starts.append(inside[0])
    starts.append(len(units))
    if len(requested) != stage_count - 1 or any(
        start >= stop for start, stop in itertools.pairwise(starts)
    ):
        raise StepFailed(
            f"{said} names the modules with which all parts but the first begin, and {stage_count} "
            f"parts "
            f"that are not "
            f"empty need {stage_count - 1} in the order in which they are called: of "
            f"{format_units(units[1:])}"
        )
    return [range(*two) for two in itertools.pairwise(starts)]


class UnitTimer(TracedForward):
    """A forward in which every unit's backward follows at once, alone."""

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
        given = find_tensors(out)
        place = next(self.operation_ids)
        fresh = dict(
            zip(
                map(id, given),
                attach_received(given, [each.requires_grad for each in given])[0],
                strict=True,
            )
        )
        out = tree_map_only(Tensor, lambda each: fresh[id(each)], out)
        for number, tensor in enumerate(find_tensors(out)):
            self.mark_made(tensor, (place, number))
        return out

    def attach_made_tensors(self, tree: Any) -> Any:
        """What units before have made, as if it had been made here; the model's inputs stay
        what they are.
        """
        made = {id(each): each for each in find_tensors(tree) if each in self.origins}
        fresh = dict(
            zip(
                made,
                attach_received(
                    list(made.values()), [each.requires_grad for each in made.values()]
                )[0],
                strict=True,
            )
        )
        return tree_map_only(Tensor, lambda each: fresh.get(id(each), each), tree)


def _time_units(model: nn.Module, units: Sequence[Unit], example: Any) -> list[float]:
    """Seconds of each unit, forward and backward."""
    rounds = []
    for _ in range(ROUNDS):
        timing = UnitTimer(StagedModel(model, [units]))
        timing.run_forward(clone_batch(example))
        rounds.append(timing.seconds)
        model.zero_grad()
    return [min(each) for each in zip(*rounds, strict=True)]


def balance_stages(
    seconds: Sequence[float], stage_count: int, opened_modules: Sequence[int] | None = None
) -> list[range]:
    """Consecutive parts, none empty, of which the longest is as short as can be. opened: how
    many modules a cut before each goes through: the fewest in all, as far as the longest part
    is at most LONGER times as long for it.
    """
    count = len(seconds)
    even = _find_partition(seconds, stage_count, [0] * count, math.inf)
    if opened_modules is None:
        return even
    return _find_partition(
        seconds,
        stage_count,
        opened_modules,
        MAX_SLOWDOWN * max(sum(seconds[at] for at in part) for part in even),
    )


def _find_partition(
    seconds: Sequence[float], stage_count: int, opened_modules: Sequence[int], limit: float
) -> list[range]:
    """The fewest opened, then the shortest longest part; no part is longer than the limit."""
    ends = list(itertools.accumulate(seconds, initial=0.0))
    count = len(seconds)
    best = [[(math.inf, math.inf)] * (count + 1) for _ in range(stage_count + 1)]
    last = [[0] * (count + 1) for _ in range(stage_count + 1)]
    best[0][0] = 0, 0.0
    for part in range(1, stage_count + 1):
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                cut, longest = best[part - 1][start]
                found = (
                    cut + (opened_modules[start] if start else 0),
                    max(longest, ends[stop] - ends[start]),
                )
                if ends[stop] - ends[start] <= limit and found < best[part][stop]:
                    best[part][stop] = found
                    last[part][stop] = start
    found_parts = []
    stop = count
    for part in range(stage_count, 0, -1):
        found_parts.append(range(last[part][stop], stop))
        stop = last[part][stop]
    return found_parts[::-1]


# ---- who uses what ---------------------------------------------------------------------------
class UseRecorder(TracedForward):
    """A forward that notes which part uses which tensors, and what it draws."""

    def __init__(self, staged_model: StagedModel, recording: DrawRecorder) -> None:
        super().__init__(staged_model)
        # draws before each part
        self.recording = recording
        self.draw_starts = [0]
        # draws by operations on the inputs alone
        self.input_draws: list[int] = []
        self.noted_draws = 0  # draws of which that is known
        self.tensor_uses: dict[int, set[int]] = {}  # tensor -> parts
        self.unit_tensors = {
            name: [id(each) for each in itertools.chain(module.parameters(), module.buffers())]
            for module, name in staged_model.units.items()
        }

    def begin_unit(self, name: str) -> None:
        before = self.stage
        super().begin_unit(name)
        self.draw_starts += [len(self.recording.calls)] * (self.stage - before)

    def note_uses(self, tensors: Sequence[int]) -> None:
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
        place = next(self.operation_ids)
        for number, tensor in enumerate(find_tensors(out)):
            self.mark_made(tensor, (place, number))
        return out


def find_uses_and_draws(
    staged_model: StagedModel, example: Any
) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
    """({tensor, by its first name: the parts that use it}, the random calls that are made where
    each part is run: its own, and those that parts before it make of the inputs alone).
    """
    with (
        preserve_all_state(LossModule(staged_model.model, PLACEHOLDER_LOSS)),
        torch.no_grad(),
        use_draw_source(DrawRecorder()) as recording,
    ):
        looking = UseRecorder(staged_model, recording)
        looking.run_forward(clone_batch(example))
    uses = {
        name: tuple(sorted(looking.tensor_uses[id(tensor)]))
        for name, tensor in (
            *staged_model.model.named_parameters(),
            *staged_model.model.named_buffers(),
        )
        if id(tensor) in looking.tensor_uses
    }
    drawn = looking.draw_starts + [len(recording.calls)] * (
        staged_model.last_stage + 2 - len(looking.draw_starts)
    )
    return uses, tuple(
        (*(call for call in looking.input_draws if call < start), *range(start, stop))
        for start, stop in itertools.pairwise(drawn)
    )
