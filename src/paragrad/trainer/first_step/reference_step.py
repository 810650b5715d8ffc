"""One worker's step, beside the strategy's own: the whole global batch on rank 0, and on rank 1
its rounding twin; where the model is cut, both on rank 0, one after the other, and no other
rank holds all of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from paragrad.datasets.loading import convert_batch, separate_target
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.loss_additivity import BatchExcerpt
from paragrad.engine.model_shard import enter_pass_contexts
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_all_state
from paragrad.engine.state.values import set_tensor_values
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, convert_loss
from paragrad.jobs.precision import perturb_parameters
from paragrad.parallel.registry import has_model_shards
from paragrad.runtime import stragglers
from paragrad.runtime.allocator import return_freed_memory
from paragrad.runtime.launcher_env import read_available_memory
from paragrad.runtime.rendezvous import count_local_ranks
from paragrad.runtime.world import World
from paragrad.strategies.shares import split_micro_batches
from paragrad.trainer.batch import Batch
from paragrad.trainer.evaluation import choose_evaluation_batch, score_batches, share_output_sums
from paragrad.trainer.first_step.step_check import (
    SAMPLE_ORDERINGS,
    SampleOrdering,
    StepCheck,
    broadcast_numbers,
    broadcast_outcome,
    run_precise_step,
    run_reference_step,
)
from paragrad.trainer.first_step.step_result import StepOutcome

if TYPE_CHECKING:
    from paragrad.trainer.trainer import Trainer


@dataclass(frozen=True)
class ReferenceStep:
    """One worker's step on the global batch of the step under way, on the trainer's model,
    which is put back.

    module, draws: of the whole model, as they are before any cut;  batch(order): its parts, the
    samples of each in that order; test(order): what is tested too, or why nothing is;  buffers:
    as they are before the step;  kept: what else the forward changes, so.
    """

    trainer: Trainer
    module: LossModule
    draws: Draws
    load_parts: Callable[[SampleOrdering], list[BatchExcerpt]]
    load_test_part: Callable[[SampleOrdering], BatchExcerpt | str]
    loss_only: bool
    initial_buffers: dict[str, torch.Tensor]
    saved_states: list[ModuleSnapshot]

    def make_step(
        self, ordering: SampleOrdering = list, move_parameters: bool = False
    ) -> StepOutcome:
        """moved: every parameter up or down by one unit in its last place."""
        trainer = self.trainer
        parts = self.load_parts(ordering)
        test = self.load_test_part(ordering)
        with preserve_all_state(self.module), trainer.batch_norm.use_probe_mode():
            self._restore_model()
            if move_parameters:
                perturb_parameters(self.module.model, torch.Generator().manual_seed(trainer.seed))
            return run_reference_step(
                self.module, parts, self.draws, trainer.seed, trainer.steps, self.loss_only, test
            )

    def _restore_model(self) -> None:
        """The model as it was before the step: the strategy's own may have been made since."""
        for name, buffer in self.module.model.named_buffers():
            if name in self.initial_buffers:
                set_tensor_values(buffer, self.initial_buffers[name])
        for each in self.saved_states:
            each.restore_module()

    def make_variant(self, number: int) -> StepOutcome:
        """Of the samples in one of several orders; before these the same once more, after them
        with the parameters moved.
        """
        return self.make_step(
            SAMPLE_ORDERINGS[number] if 0 <= number < len(SAMPLE_ORDERINGS) else list,
            move_parameters=number == len(SAMPLE_ORDERINGS),
        )

    def make_precise_step(self) -> StepOutcome:
        """In float64. Raises what the model raises there."""
        trainer = self.trainer
        # in which a loss that holds the model leaves gradients
        with preserve_all_state(self.module):
            self._restore_model()
            model = copy.deepcopy(self.module.model)
            with BatchNorm(
                trainer.world, model, lambda *_: None, samples=trainer.batch_norm.samples
            ).use_probe_mode():
                return run_precise_step(
                    model,
                    self.module,
                    self.load_parts(list),
                    self.draws,
                    trainer.seed,
                    trainer.steps,
                    convert_loss(self.module.loss, trainer.world.device, torch.float64),
                    self.loss_only,
                    self.load_test_part(list),
                )


def make_reference_step(
    trainer: Trainer,
    batch: Batch,
    inputs: Any,
    target: Any,
    as_loaded: bool,
    loss_only: bool = False,
) -> tuple[StepCheck | None, str]:
    """Make one worker's step on rank 0, and its rounding twin on rank 1 or after it; or None,
    and why that cannot be.

    as_loaded: `step` got, on every rank, what `batches` gave. Collective.
    """
    world = trainer.world
    alone = has_model_shards(trainer.strategy)
    serial = None
    twin = None
    beside = None
    room, words = _estimate_sample_capacity(trainer, batch)
    because = words if room < len(batch.sample_indices) else None
    given = (
        None
        if as_loaded
        else world.broadcast_object(
            world.gather_objects((batch, inputs, target) if trainer.is_share_leader else None)
        )
    )
    like = StepOutcome(
        0.0,
        0.0,
        {} if loss_only else {name: each.detach() for name, each in trainer.parameters.items()},
        {} if loss_only else {name: each.detach() for name, each in trainer.model.named_buffers()},
    )
    test = functools.partial(_select_test_part, trainer, batch, given, loss_only)
    if not because and world.rank < (1 if alone else 2):
        try:
            parts = (
                functools.partial(_load_parts, trainer, batch)
                if given is None
                else functools.partial(_join_given_batches, trainer, given)
            )
            beside = ReferenceStep(
                trainer,
                trainer.module,
                trainer.draws,
                parts,
                test,
                loss_only,
                {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
                [],
            )
            begun = time.monotonic()
            made = beside.make_step(list if world.rank == 0 else SAMPLE_ORDERINGS[0])
            beside.saved_states.append(ModuleSnapshot(trainer.module, made.changed_parameters))
            serial, twin = (made, None) if world.rank == 0 else (None, made)
            # all others wait for both
            if alone and world.size > 1 and time.monotonic() - begun < world.timeout / 3:
                with contextlib.suppress(Exception):  # then there is no twin
                    twin = beside.make_step(SAMPLE_ORDERINGS[0])
                return_freed_memory()
        except Exception as error:  # on rank 1: then there is no twin
            because = f"one worker's step ended with {type(error).__name__}: {error}"
    waits = stragglers.explain_timeout(
        "rank 0 makes the step of one worker, whole, to compare this one with",
        ", or --skip-first-step-check",
    )
    with waits if beside is None else contextlib.nullcontext():
        everywhere, because = (
            broadcast_numbers(world, serial, because)
            if alone
            else broadcast_outcome(world, serial, like, reason=because)
        )
    if everywhere is None:
        return None, because or "not one worker's step was made"
    part = test(list) if isinstance(everywhere.test_loss, float) else None
    # what a model in float64 computes in less
    eps = trainer.coarsest_eps if trainer.precision == torch.float64 else 0.0
    return StepCheck(
        world,
        everywhere,
        twin,
        beside.make_variant if beside else None,
        beside.make_precise_step if beside else None,
        eps,
        trainer.precision == torch.float64,
        alone,
        loss_only,
        test_part=part if isinstance(part, BatchExcerpt) else None,
    ), ""


def _group_samples(trainer: Trainer, samples: int) -> list[list[int]]:
    """The micro-batches that are one worker's: all in one, unless batch norm sees them
    apart.
    """
    if not trainer.batch_norm.has_computed or trainer.division.micro == 1:
        return [list(range(samples))]
    micros = split_micro_batches(range(samples), trainer.division)
    return [list(itertools.chain.from_iterable(parts)) for parts in micros]


def _load_parts(trainer: Trainer, batch: Batch, ordering: SampleOrdering) -> list[BatchExcerpt]:
    """From the dataset, each part collated by itself."""
    groups = [ordering(group) for group in _group_samples(trainer, len(batch.sample_indices))]
    return [BatchExcerpt(*fetch_places(trainer, batch, group), group) for group in groups]


def fetch_places(trainer: Trainer, batch: Batch, places: list[int]) -> tuple[Any, Any]:
    """(inputs, target) of what stands at some places of a global batch."""
    assert trainer.feed.samples is not None
    fetched = convert_batch(
        trainer.feed.samples[batch.epoch, batch.sample_indices, places],
        trainer.world.device,
        trainer.dtype,
    )
    return separate_target(fetched)  # type: ignore[no-any-return]


def _select_test_part(
    trainer: Trainer,
    batch: Batch,
    given_batches: list[tuple[Batch, Any, Any] | None] | None,
    loss_only: bool,
    ordering: SampleOrdering,
) -> BatchExcerpt | str:
    """The first samples, as many as a rank runs at once, where the model is cut; or why there
    are none.
    """
    if loss_only or not (trainer.has_tests and has_model_shards(trainer.strategy)):
        return ""
    few = list(range(choose_evaluation_batch(len(batch.sample_indices), trainer.division, 0)))
    if given_batches is None:
        return BatchExcerpt(*fetch_places(trainer, batch, ordering(few)), ordering(few))
    try:
        (whole,) = _join_given_batches(trainer, given_batches, list)
        return (
            whole
            if ordering is list and len(few) >= len(whole.positions)
            else whole.select_places(ordering(few[: len(whole.positions)]))
        )
    except ValueError as error:
        return f"the batch that step was given cannot be cut: {error}"


def evaluate_test_part(trainer: Trainer, part: BatchExcerpt, reference_loss: float) -> float:
    """The mean loss of some samples in a test, by the strategy's own passes: of all replicas'
    the furthest from one worker's. Collective.
    """
    assert trainer.passes is not None
    # without autocast, as beside
    module = trainer.module
    spans = list(trainer.log.spans)
    trainer.rehearsing = True
    try:
        with (
            preserve_all_state(module),
            use_model_eval_mode(trainer.model),
            enter_pass_contexts(trainer.pass_contexts),
        ):
            sums = score_batches(
                module,
                trainer.passes.compute_outputs,
                None,
                [part.copy_batch()],
                [part.positions],
                module.uses_graph_divisor,
            )
    finally:
        trainer.rehearsing, trainer.log.spans[:] = False, spans
    total, weight = share_output_sums(trainer.layout, sums)
    every = trainer.samples_world.all_gather(torch.tensor(total / weight, dtype=torch.float64))
    return max(map(float, every), key=lambda value: abs(value - reference_loss))


def _join_given_batches(
    trainer: Trainer, given_batches: list[tuple[Batch, Any, Any] | None], ordering: SampleOrdering
) -> list[BatchExcerpt]:
    """What step was given on all ranks, put together; stand-ins of empty parts left out."""
    if trainer.batch_norm.has_computed and trainer.division.micro > 1:
        raise ValueError(
            "step was given another batch than trainer.batches gave, and batch norm sees "
            "micro-batches"
        )
    parts = []
    for batch, inputs, target in filter(None, given_batches):  # of each share one rank
        places = [
            place
            for micro, part in batch.iterate_slices()
            for place in range(part.start, part.stop)
            if micro.positions
        ]
        if places:
            part = BatchExcerpt(inputs, target, batch.places)
            try:
                parts.append(part.select_places(places))
            # the loop dropped samples: what is left, as it is
            except ValueError:
                parts.append(replace(part, positions=places))
    whole = BatchExcerpt(
        _concatenate_values([part.inputs for part in parts]),
        _concatenate_values([part.target for part in parts]),
        [position for part in parts for position in part.positions],
    )
    places = list(range(len(whole.positions)))
    return [whole if ordering is list else whole.select_places(ordering(places))]


def _concatenate_values(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.dim() else first
    if isinstance(first, dict):
        return {name: _concatenate_values([value[name] for value in values]) for name in first}
    if isinstance(first, tuple | list) and any(
        isinstance(each, torch.Tensor | dict | tuple | list) for each in first
    ):
        return type(first)(_concatenate_values(list(each)) for each in zip(*values, strict=True))
    return functools.reduce(operator.add, values) if isinstance(first, tuple | list) else first


def _estimate_sample_capacity(trainer: Trainer, batch: Batch) -> tuple[int, str]:
    """For how many samples of the batch one worker's step has room here; in words."""
    samples = len(batch.sample_indices)
    left = read_available_memory()
    alone = has_model_shards(trainer.strategy)
    if left is None or trainer.world.rank > (0 if alone else 1):
        return samples, ""
    # every rank divides a copy, and gathers what is compared
    divides = trainer.strategy.shards_parameters
    left //= 1 if alone else trainer.world.size if divides else min(2, trainer.world.size)
    each = max(1, trainer.activation_bytes // max(1, len(batch.micro_batches[0].positions)))
    # cut: a copy to put back, gradients of step, twin and all parts together; the parts, and
    # their gradients
    model = (6 if alone else 4 if divides else 2) * sum(
        parameter.nbytes for parameter in trainer.parameters.values()
    )
    return (
        max(0, min(samples, (left - model) // each)),
        f"{samples} samples want about {(model + samples * each) >> 20} MiB on one rank, and "
        f"{left >> 20} MiB are left",
    )


def shrink_batch(trainer: Trainer, batch: Batch) -> Batch | None:
    """Of the batch as many samples as there is room for, or None where that is all, or not one
    for every share. Collective.
    """
    room = int(
        trainer.world.all_reduce(
            torch.tensor(float(_estimate_sample_capacity(trainer, batch)[0])), "MIN"
        )
    )
    return (
        None
        if room >= len(batch.sample_indices)
        else batch.take_first_samples(room, trainer.division, trainer.replicas)
    )


def refuse_float64_copies(world: World, module: LossModule) -> None:
    """Raises StepFailed where not every rank may have the whole model some times more: to put
    back, and in float64, with gradients and parts beside it. Collective.
    """
    left = read_available_memory() if world.device.type == "cpu" else None
    wanted = (
        7 * (count_local_ranks() or world.size) * sum(each.nbytes for each in module.parameters())
    )
    if not world.all_reduce(torch.tensor(float(left is None or wanted <= left)), "MIN"):
        raise StepFailed(
            f"this step is off from one worker's by more than rounding in its type explains at "
            f"once, and to make "
            f"it again in float64 wants about {wanted >> 20} MiB on each host, which is not there; "
            f"train it in "
            "float64, on fewer ranks of a host, or without the check (--skip-first-step-check, "
            "skip_first_step_check=True)"
        )
