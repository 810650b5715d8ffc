"""The reference step: the step of one worker, made next to the strategy's own.

Rank 0 runs the whole global batch, and its rounding baseline if it needs one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paragrad.datasets.loading import clone_batch, convert_batch, separate_target
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.loss_additivity import BatchExcerpt
from paragrad.engine.passes import enter_pass_contexts
from paragrad.engine.probe import has_parameter_hooks, use_model_eval_mode
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_all_state
from paragrad.engine.state.values import set_tensor_values
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, convert_loss
from paragrad.jobs.precision import convert_model, find_coarsest_dtype, perturb_parameters
from paragrad.parallel.registry import has_model_shards
from paragrad.runtime import stragglers
from paragrad.runtime.allocator import return_freed_memory
from paragrad.runtime.launcher_env import read_available_memory
from paragrad.runtime.rendezvous import count_local_ranks
from paragrad.runtime.single_group import act_alone
from paragrad.runtime.world import World
from paragrad.strategies.shares import split_micro_batches
from paragrad.trainer.batch import Batch
from paragrad.trainer.checks.step_check import (
    SAMPLE_ORDERINGS,
    SampleOrdering,
    StepCheck,
    broadcast_outcome,
    run_reference_step,
)
from paragrad.trainer.checks.step_result import StepOutcome
from paragrad.trainer.checks.whole_module import SMALL_BYTES, WholeModule, count_model_bytes
from paragrad.trainer.evaluation import choose_evaluation_batch, score_batches, share_output_sums
from paragrad.trainer.training import Training


@dataclass(frozen=True)
class ReferenceStep:
    """One worker's step on the current global batch. It uses the training's model and restores it.

    Attributes:
        training: The training.

        module: The whole model and the loss, before any partitioning.

        draws: The random draws of the whole model.

        load_parts: load_parts(ordering) returns the batch in parts, each with its samples in that
            ordering.

        load_divided_parts: load_divided_parts() returns the batch in the parts that the strategy
            divides it into.

        load_test_part: load_test_part(ordering) returns the samples of the test, or why there is no
            test.

        loss_only: Whether only the loss is computed.

        initial_buffers: The buffers of model and loss before the step, by `_list_buffers`.

        saved_states: Other state that the forward changes, as it was before the step.
    """

    training: Training
    module: LossModule
    draws: Draws
    load_parts: Callable[[SampleOrdering], list[BatchExcerpt]]
    load_divided_parts: Callable[[], list[BatchExcerpt]]
    load_test_part: Callable[[SampleOrdering], BatchExcerpt | str]
    loss_only: bool
    initial_buffers: dict[tuple[str, str], torch.Tensor]
    saved_states: list[ModuleSnapshot]

    def make_step(self, ordering: SampleOrdering = list, moved: int = 0) -> StepOutcome:
        """Make one worker's step.

        Args:
            ordering: The ordering of the samples of each part.
            moved: If not 0, every parameter is moved up or down by one unit in its last place, in
                directions that this number draws.
        """
        training = self.training
        with act_alone():  # collate may call collectives too
            parts = self.load_parts(ordering)
            test = self.load_test_part(ordering)
        with act_alone(), preserve_all_state(self.module), training.batch_norm.use_probe_mode():
            self._restore_model()
            if moved:
                signs = torch.Generator().manual_seed(training.seed + moved - 1)
                perturb_parameters(self.module.model, signs)
            outcome = run_reference_step(
                self.module,
                parts,
                self.draws,
                training.seed,
                training.state.steps,
                self.loss_only,
                test,
            )
        training.world.stop.beat()
        if training.setup.exchange is not None and self.module is training.module:
            parameters = dict(self.module.model.named_parameters())
            training.exchange.note_outside_backward(
                parameters[name]
                for name, gradient in outcome.gradients.items()
                if gradient is not None
            )
        return outcome

    def _restore_model(self) -> None:
        """Restore the model to its state before the step.

        The strategy may have made its own step in the meantime.
        """
        for name, buffer in _list_buffers(self.module).items():
            if name in self.initial_buffers:
                set_tensor_values(buffer, self.initial_buffers[name])
        for each in self.saved_states:
            each.restore_module()

    def make_variant(self, number: int) -> StepOutcome:
        """Repeat the step with the samples in another ordering, or with moved parameters.

        Args:
            number: The index of a sample ordering. A negative number repeats the step unchanged; a
                number that is no ordering's moves the parameters, each number in other directions.
        """
        reference = self if has_parameter_hooks(self.module) else self._copy_reference()
        return reference.make_step(
            SAMPLE_ORDERINGS[number] if 0 <= number < len(SAMPLE_ORDERINGS) else list,
            moved=max(0, number + 1 - len(SAMPLE_ORDERINGS)),
        )

    def make_divided_step(self) -> StepOutcome:
        """Repeat the step with the batch in the parts that the strategy divides it into."""
        reference = self if has_parameter_hooks(self.module) else self._copy_reference()
        return replace(reference, load_parts=lambda _: self.load_divided_parts()).make_step()

    def _copy_reference(self) -> ReferenceStep:
        """Copy the reference as it was before the step.

        A step is made more than once after the passes of the strategy. DDP notes what a backward of
        its own parameters uses, and would take it for the next step's.
        """
        try:
            with preserve_all_state(self.module):
                self._restore_model()
                # together, because a loss may hold the model
                module = self.module.wrap_model(
                    *copy.deepcopy((self.module.model, self.module.loss))
                )
        except Exception:  # The model cannot be copied.
            return self
        return replace(self, module=module, saved_states=[])

    def make_precise_step(self) -> StepOutcome:
        """Make the step in float64. Raises what the model raises in float64."""
        training = self.training
        # A loss that holds the model leaves gradients in it.
        with act_alone(), preserve_all_state(self.module):
            self._restore_model()
            model = copy.deepcopy(self.module.model)
            with BatchNorm(
                training.world,
                model,
                lambda *_: None,
                samples=training.batch_norm.samples,
            ).use_probe_mode():
                test = self.load_test_part(list)
                return run_reference_step(
                    self.module.wrap_model(
                        convert_model(model, torch.float64),
                        convert_loss(self.module.loss, training.world.device, torch.float64),
                    ),
                    [part.convert(torch.float64) for part in self.load_parts(list)],
                    self.draws,
                    training.seed,
                    training.state.steps,
                    self.loss_only,
                    test if isinstance(test, str) else test.convert(torch.float64),
                )


def _list_buffers(module: LossModule) -> dict[tuple[str, str], torch.Tensor]:
    """List the buffers of model and loss by (owner, name)."""
    loss = module.state_owner
    owners = {"model": module.model, "loss": loss if isinstance(loss, torch.nn.Module) else None}
    return {
        (owner, name): buffer
        for owner, each in owners.items()
        if each is not None
        for name, buffer in each.named_buffers()
    }


def make_reference_step(
    training: Training,
    batch: Batch,
    inputs: Any,
    target: Any,
    as_loaded: bool,
    whole: WholeModule,
    loss_only: bool = False,
) -> tuple[StepCheck | None, str]:
    """Make one worker's step on rank 0. Collective.

    Args:
        training: The training.

        batch: This rank's part of the global batch.

        inputs: The inputs that `step` received.

        target: The target that `step` received.

        as_loaded: Whether `step` received on every rank what `batches` gave.

        whole: The whole model and the loss.

        loss_only: Whether only the loss is compared.

    Returns:
        (check, reason): the check, or None and the reason why there is none.
    """
    world = training.world
    precision = find_coarsest_dtype(training.setup.empty_model)
    serial = None
    reference = None
    capacity, explanation = _estimate_sample_capacity(training, batch)
    reason = whole.obstacle or (explanation if capacity < len(batch.sample_indices) else None)
    # later the model may be in another mode, or its test may draw
    skips_test = loss_only or training.state.own_steps > 0
    given_batches = None
    if not as_loaded:
        given_batches = world.gather_objects(
            # rank 0's own would stay what the model may change in place
            (batch, *clone_batch((inputs, target))) if training.world.is_first("samples") else None
        )
        if not skips_test and _has_test_part(training):  # all ranks run the test
            given_batches = world.broadcast_object(given_batches)
    test = functools.partial(_select_test_part, training, batch, given_batches, skips_test)
    if not reason and whole.module is not None and world.rank == 0:
        try:
            parts = (
                functools.partial(_load_parts, training, batch)
                if given_batches is None
                else functools.partial(_join_given_batches, training, given_batches)
            )
            reference = ReferenceStep(
                training,
                whole.module,
                training.setup.whole_draws,
                parts,
                functools.partial(_load_divided_parts, training, batch, given_batches),
                test,
                loss_only,
                {name: buffer.clone() for name, buffer in _list_buffers(whole.module).items()},
                [],
            )
            serial = reference.make_step()
            if whole.is_everywhere:  # The strategy's own step changes it before a variant.
                reference.saved_states.append(
                    ModuleSnapshot(whole.module, serial.changed_parameters)
                )
            if world.size > 1:
                return_freed_memory()
        except Exception as error:
            serial = None
            reason = f"one worker's step ended with {type(error).__name__}: {error}"
    waits = stragglers.explain_timeout(
        "rank 0 makes the whole step of one worker, to compare this step with it",
        ", or --skip-first-step-check",
    )
    with waits if reference is None else contextlib.nullcontext():
        shared_outcome, reason = broadcast_outcome(world, serial, reason=reason)
    if shared_outcome is None:
        return None, reason or "not one worker's step was made"
    test_part = test(list) if isinstance(shared_outcome.test_loss, float) else None
    # Batch norm takes its statistics over all parts, which one worker would have to make at once.
    # Every share begins with the same buffers, and one worker's parts would not.
    changes = shared_outcome.changed_buffers or shared_outcome.changed_parameters
    is_divided = (
        not training.state.division.is_undivided
        and not loss_only
        and not training.batch_norm.has_computed
        and not (
            len(training.state.division.shares) > 1 and (changes or shared_outcome.changed_state)
        )
    )
    # the coarsest type in which a float64 model computes some of its values
    eps = training.setup.coarsest_eps if precision == torch.float64 else 0.0
    return StepCheck(
        world,
        shared_outcome,
        reference.make_variant if reference else None,
        reference.make_precise_step if reference and not whole.is_hooked else None,
        reference.make_divided_step if reference and is_divided else None,
        eps,
        precision == torch.float64,
        loss_only,
        is_first_step=not training.state.own_steps,
        test_part=test_part if isinstance(test_part, BatchExcerpt) else None,
    ), ""


def _group_samples(training: Training, samples: int) -> list[list[int]]:
    """Group the samples by the micro-batches of one worker.

    There is one group for all samples, unless batch norm sees the micro-batches apart.
    """
    if not training.batch_norm.has_computed or training.state.division.micro == 1:
        return [list(range(samples))]
    micros = split_micro_batches(range(samples), training.state.division)
    return [list(itertools.chain.from_iterable(parts)) for parts in micros]


def _load_parts(training: Training, batch: Batch, ordering: SampleOrdering) -> list[BatchExcerpt]:
    """Load the parts from the dataset; each part is collated by itself."""
    groups = [ordering(group) for group in _group_samples(training, len(batch.sample_indices))]
    return [BatchExcerpt(*fetch_places(training, batch, group), group) for group in groups]


def _load_divided_parts(
    training: Training, batch: Batch, given_batches: list[tuple[Batch, Any, Any] | None] | None
) -> list[BatchExcerpt]:
    """Load the batch in the parts of all ranks and micro-batches, collated as ranks do it.

    A rank collates all its samples together, and slices them into its micro-batches.
    """
    micros = split_micro_batches(range(len(batch.sample_indices)), training.state.division)
    whole = None
    if given_batches is not None:
        (whole,) = _join_given_batches(training, given_batches, list)
    divided: list[BatchExcerpt] = []
    for parts in zip(*micros, strict=True):  # the parts of a rank
        places = [place for part in parts for place in part]
        if not places:
            continue
        excerpt = whole or BatchExcerpt(*fetch_places(training, batch, places), places)
        divided += [
            excerpt.select_places([excerpt.positions.index(place) for place in part])
            for part in parts
            if part
        ]
    return divided


def fetch_places(training: Training, batch: Batch, places: Sequence[int]) -> tuple[Any, Any]:
    """Load the samples at some places of a global batch.

    Args:
        training: The training.
        batch: This rank's part of the global batch.
        places: The places in the global batch.

    Returns:
        (inputs, target).
    """
    assert training.feed.samples is not None
    fetched = convert_batch(
        training.feed.samples[batch.epoch, batch.sample_indices, places],
        training.world.device,
        training.feed.dtype,
    )
    return separate_target(fetched)


def _has_test_part(training: Training) -> bool:
    """Return whether the loss of a test is compared: the model is partitioned, and has tests."""
    return training.options.has_tests and has_model_shards(training.setup.strategy)


def _select_test_part(
    training: Training,
    batch: Batch,
    given_batches: list[tuple[Batch, Any, Any] | None] | None,
    loss_only: bool,
    ordering: SampleOrdering,
) -> BatchExcerpt | str:
    """Return the first samples of the batch for a test of a partitioned model.

    They are as many as a rank evaluates at once. Returns a text if there is no test: the reason, or
    an empty text.
    """
    if loss_only or not _has_test_part(training):
        return ""
    places = list(
        range(choose_evaluation_batch(len(batch.sample_indices), training.state.division, 0))
    )
    if given_batches is None:
        return BatchExcerpt(*fetch_places(training, batch, ordering(places)), ordering(places))
    try:
        (joined,) = _join_given_batches(training, given_batches, list)
        return (
            joined
            if ordering is list and len(places) >= len(joined.positions)
            else joined.select_places(ordering(places[: len(joined.positions)]))
        )
    except ValueError as error:
        return f"the batch that step was given cannot be divided: {error}"


def evaluate_test_part(training: Training, part: BatchExcerpt, reference_loss: float) -> float:
    """Compute the mean loss of some samples in a test, by the strategy's own passes.

    Collective.

    Args:
        training: The training.
        part: The samples.
        reference_loss: The loss of one worker.

    Returns:
        Of the losses of all replicas, the one that is furthest from the reference.
    """
    assert training.setup.passes is not None
    # The test runs without autocast, as the reference step does.
    module = training.module
    with (
        training.rehearse(),
        act_alone(),
        preserve_all_state(module),
        use_model_eval_mode(training.setup.model),
        enter_pass_contexts(training.setup.pass_contexts),
    ):
        sums = score_batches(
            module,
            training.setup.passes.compute_outputs,
            None,
            [part.copy_batch()],
            [part.positions],
            module.uses_graph_divisor,
        )
    total, weight = share_output_sums(training.setup.layout, sums)
    replica_losses = training.setup.samples_world.all_gather(
        torch.tensor(total / weight, dtype=torch.float64)
    )
    return max(map(float, replica_losses), key=lambda value: abs(value - reference_loss))


def _join_given_batches(
    training: Training, given_batches: list[tuple[Batch, Any, Any] | None], ordering: SampleOrdering
) -> list[BatchExcerpt]:
    """Join what `step` received on all ranks; placeholder samples of empty parts are left out."""
    if training.batch_norm.has_computed and training.state.division.micro > 1:
        raise ValueError(
            "step was given another batch than trainer.batches gave, and batch norm sees "
            "micro-batches"
        )
    parts = []
    for batch, inputs, target in filter(None, given_batches):  # one rank of each share
        places = [
            place
            for micro, part in batch.iterate_slices()
            for place in range(part.start, part.stop)
            if micro.positions
        ]
        if places:
            part = BatchExcerpt(inputs, target, list(batch.places))
            try:
                parts.append(part.select_places(places))
            # The loop dropped samples; the rest is taken unchanged.
            except ValueError:
                parts.append(replace(part, positions=places))
    joined = BatchExcerpt(
        _concatenate_values([part.inputs for part in parts]),
        _concatenate_values([part.target for part in parts]),
        [position for part in parts for position in part.positions],
    )
    places = list(range(len(joined.positions)))
    return [joined if ordering is list else joined.select_places(ordering(places))]


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


def _estimate_sample_capacity(training: Training, batch: Batch) -> tuple[int, str]:
    """Estimate for how many samples of the batch one worker's step has memory here.

    Returns:
        (samples, explanation).
    """
    samples = len(batch.sample_indices)
    setup = training.setup
    is_partitioned = has_model_shards(setup.strategy) or bool(setup.explain_no_whole_model())
    if training.world.rank:
        return samples, ""
    # In the first step every rank shards a copy.
    shards_copies = setup.strategy.shards_parameters and not training.state.own_steps
    per_sample = max(1, setup.probe.activation_bytes if setup.probe else 0)
    # If the model is partitioned, there are six: a copy to restore, the gradients of the step,
    # of the baseline and of all parts together, the parts, and the gradients of these. Otherwise
    # rank 0 has the first three, a copy for the baselines, and the gradients of a second one.
    model = (6 if is_partitioned else 5) * count_model_bytes(training)
    needed = model + samples * per_sample
    bytes_left = None if needed <= SMALL_BYTES else read_available_memory()
    if bytes_left is None:
        return samples, ""
    bytes_left //= training.world.size if shards_copies else 1
    return (
        max(0, min(samples, (bytes_left - model) // per_sample)),
        f"{samples} samples need about {needed >> 20} MiB on one rank, and "
        f"{bytes_left >> 20} MiB are left",
    )


def shrink_batch(training: Training, batch: Batch) -> Batch | None:
    """Reduce the batch to as many samples as there is memory for.

    Collective.

    Args:
        training: The training.
        batch: This rank's part of the global batch.

    Returns:
        The smaller batch. None if there is memory for all samples, or if a share would be empty.
    """
    capacity = int(
        training.world.all_reduce(
            torch.tensor(float(_estimate_sample_capacity(training, batch)[0])), "MIN"
        )
    )
    return (
        None
        if capacity >= len(batch.sample_indices)
        else batch.take_first_samples(capacity, training.state.division, training.state.replicas)
    )


def refuse_float64_copies(world: World, module: LossModule) -> None:
    """Check that every rank has memory for several copies of the whole model.

    Collective. They are a copy to restore, one in float64, its gradients, and its parts.

    Args:
        world: The ranks.
        module: The whole model and the loss.

    Raises:
        StepFailed: If a host has too little memory.
    """
    available = read_available_memory() if world.device.type == "cpu" else None
    needed = (
        7 * (count_local_ranks() or world.size) * sum(each.nbytes for each in module.parameters())
    )
    if not world.all_reduce(torch.tensor(float(available is None or needed <= available)), "MIN"):
        raise StepFailed(
            "this step is off from one worker's by more than rounding in its type explains, "
            f"and a repetition in float64 needs about {needed >> 20} MiB on each host, "
            "which are not free; train it in float64, on fewer ranks of a host, or without the "
            "check (--skip-first-step-check, skip_first_step_check=True)"
        )
