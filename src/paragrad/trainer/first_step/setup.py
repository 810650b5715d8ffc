"""The setup of the first step.

The model is probed, the reference step of one worker is made, and the exchange is set up.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paragrad.datasets.loading import clone_batch, convert_batch
from paragrad.engine.exchange import (
    SHARED_PARAMETER_CHANGED,
    UNCARRIED_PARAMETER_CHANGED,
    Exchange,
    Replica,
)
from paragrad.engine.layout import Layout
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_all_state
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, convert_loss
from paragrad.jobs.precision import convert_model
from paragrad.parallel.registry import build_exchange, build_passes, has_model_shards
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Strategy, list_factors
from paragrad.trainer.batch import Batch
from paragrad.trainer.first_step.diagnosis import describe_mismatch, explain_layout_draws
from paragrad.trainer.first_step.inspect_model import (
    is_given_as_loaded,
    is_given_as_loaded_everywhere,
    probe_first_micro_batch,
    reuse_validation_probe,
    run_model_once,
)
from paragrad.trainer.first_step.reference_step import (
    evaluate_test_part,
    fetch_places,
    make_reference_step,
    refuse_float64_copies,
    shrink_batch,
)
from paragrad.trainer.first_step.step_check import Mismatch, StepCheck
from paragrad.trainer.first_step.step_result import StepOutcome
from paragrad.trainer.model_partition import ModelPartition, build_model_partition
from paragrad.trainer.parameter_access import NONDETERMINISM_HINT, refuse_unequal_copies

if TYPE_CHECKING:
    from paragrad.trainer.trainer import Trainer

# key in the store of a world with servers: how often the workers dismissed that rank
DISMISSED_KEY = "paragrad: dismissed {}"
PARTITIONED_REASON = "the model is cut: no rank holds all of it any more"
SHARDED_REASON = "the parameters are sharded: no rank can run the model alone any more"


def prepare_step(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> None:
    """Prepare a step: set up the exchange before the first one, and a check if one is due.

    Collective. The first step is checked against one worker's. Of steps 2, 4, 8, ... the loss is
    checked: rare targets that do not count, longer padding, or a growing term appear late.

    Args:
        trainer: The trainer.
        batch: This rank's part of the global batch.
        inputs: The inputs that `step` received.
        target: The target that `step` received.
    """
    if trainer.exchange is not None:
        if trainer.user_model is not None:
            trainer.user_model.follow_changes(trainer.model, trainer.passes)
        if (
            trainer.layout.is_partitioned
            and not trainer.skip_first_step_check
            and (trainer.own_steps + 1).bit_count() == 1
        ):
            refuse_unequal_copies(trainer.layout, trainer.parameters, trainer.model)
        if trainer.is_exact_split and trainer.own_steps == 1 and explain_no_whole_model(trainer):
            trainer.log.write_choice("loss again", "not checked", explain_no_whole_model(trainer))
        # steps 2, 4, 8, ...
        elif (
            trainer.is_exact_split
            and not explain_no_whole_model(trainer)
            and (trainer.own_steps + 1).bit_count() == 1
        ):
            _prepare_step_check(
                trainer,
                batch,
                inputs,
                target,
                is_given_as_loaded_everywhere(trainer, inputs, target),
                loss_only=True,
            )
        return
    validation_probe = reuse_validation_probe(trainer)
    probe, as_loaded = (
        (validation_probe, True)
        if validation_probe
        else probe_first_micro_batch(trainer, batch, inputs, target)
    )
    trainer.draws = probe.draws
    trainer.module.has_traced_divisor = probe.weight_known
    trainer.coarsest_eps = probe.coarsest_eps
    trainer.module.is_linear = probe.is_linear
    trainer.activation_bytes = probe.activation_bytes * max(
        1, len(batch.micro_batches[0].positions)
    )
    if probe.draws.layout_dependence and (trainer.is_exact_split or trainer.skip_first_step_check):
        trainer.log.write_choice("random", "by layout", probe.draws.layout_dependence)
        if trainer.is_exact_split and trainer.strategy.changes_layout:
            raise StepFailed(explain_layout_draws(probe.draws.layout_dependence))
    forward = functools.partial(run_model_once, trainer, batch, inputs, target)
    set_up = functools.partial(
        set_up_exchange,
        trainer,
        probe.has_unused_parameters,
        next(batch.iterate_micro_batches(inputs, target))[1],
        forward,
    )
    if trainer.is_exact_split:
        _prepare_step_check(trainer, batch, inputs, target, as_loaded, set_up=set_up)
        return
    if trainer.skip_first_step_check:
        trainer.log.write_choice("first step", "not checked", "asked for")
    set_up()
    empty_user_model(trainer)


def explain_no_whole_model(trainer: Trainer) -> str:
    """Explain why no rank can run the whole model from here on; an empty text if one can.

    Args:
        trainer: The trainer.
    """
    is_sharded = trainer.exchange is not None and trainer.exchange.shard_layout is not None
    return (
        PARTITIONED_REASON
        if trainer.layout.is_partitioned
        else SHARDED_REASON
        if is_sharded
        else ""
    )


def _prepare_step_check(
    trainer: Trainer,
    batch: Batch,
    inputs: Any,
    target: Any,
    as_loaded: bool,
    loss_only: bool = False,
    set_up: Callable[[], Any] | None = None,
) -> None:
    """Make the reference step, then set up the exchange.

    If the step itself cannot be compared, a rehearsal is made and compared at once.
    """
    checked = (batch, inputs, target)
    description = "this step"
    module = trainer.module
    trainer.step_check, reason = make_reference_step(trainer, *checked, as_loaded, loss_only)
    if trainer.step_check is None and as_loaded and (smaller_batch := shrink_batch(trainer, batch)):
        checked = smaller_batch, *fetch_places(trainer, smaller_batch, smaller_batch.places)
        trainer.step_check, reason = make_reference_step(trainer, *checked, as_loaded, loss_only)
        description = (
            f"its first {len(smaller_batch.sample_indices)} samples, for which there is room on "
            "one rank,"
        )
    if set_up:
        set_up()
    trainer.state_before_step = ModuleSnapshot(
        trainer.module,
        trainer.step_check.serial_outcome.changed_parameters
        if trainer.step_check and not trainer.layout.is_partitioned
        else (),
    )
    if trainer.step_check is None:
        empty_user_model(trainer)
        trainer.log.write_choice("loss again" if loss_only else "first step", "not checked", reason)
        if trainer.log.recorder is None:  # the user's own loop has no record
            warnings.warn(
                f"step {trainer.steps} is not compared with one worker's: {reason}", stacklevel=2
            )
        return
    reference_loss = trainer.step_check.serial_outcome.test_loss
    if isinstance(reference_loss, float) and trainer.step_check.test_part:
        trainer.step_check.test_loss = evaluate_test_part(
            trainer, trainer.step_check.test_part, reference_loss
        )
    elif reference_loss:
        trainer.log.write_choice("test", "not compared", str(reference_loss))
    # A training with servers has no step that can be repeated.
    if trainer.precision != torch.float64 and not trainer.strategy.servers:
        step_as_loaded = is_given_as_loaded(trainer, *checked[1:])
        trainer.step_check.rerun_in_float64 = functools.partial(
            _rerun_step_in_float64,
            trainer,
            module,
            trainer.state_before_step,
            checked[0],
            clone_batch(checked[1:]),
            step_as_loaded,
        )
    if trainer.autocast is not None or checked[0] is not batch:
        rehearse_step(trainer, *checked, description)


def _rerun_step_in_float64(
    trainer: Trainer,
    module: LossModule,
    state_before: ModuleSnapshot,
    batch: Batch,
    given: Any,
    as_loaded: bool,
) -> list[Mismatch] | None:
    """Repeat the step in float64, by the strategy's own code on a copy of the whole module.

    Collective.

    Args:
        trainer: The trainer.

        module: The whole model and the loss.

        state_before: The state of the module before the step.

        batch: This rank's part of the global batch.

        given: (inputs, target) as they were before the step.

        as_loaded: Whether these are what `batches` gave.

    Returns:
        The mismatches of the repeated step, or None if it is impossible.
    """
    copied_trainer: Trainer | None = None
    if has_model_shards(trainer.strategy):
        refuse_float64_copies(trainer.world, module)
    try:
        with preserve_all_state(module):
            # Ranks that share parameters must all have saved them before one restores them.
            trainer.world.barrier()
            # A part of the model is not repeated; the whole module is.
            if not trainer.layout.is_partitioned:
                state_before.restore_module()
            model = convert_model(copy.deepcopy(module.model), torch.float64)
            model.zero_grad()
            copied_trainer = type(trainer)(
                trainer.world,
                model,
                convert_loss(module.loss, trainer.world.device, torch.float64),
                torch.optim.SGD(model.parameters(), lr=0.0),
                trainer.strategy,
                seed=trainer.seed,
                collate=trainer.collate,
                dtype=torch.float64,
                exchange_options=trainer.exchange_options,
                loss_checked=True,
                has_tests=trainer.has_tests,
            )
            # The copy must be partitioned in the same way.
            copied_trainer.steps = trainer.steps
            copied_trainer.model_inspections = trainer.model_inspections
            copied_trainer.division = trainer.division
            pair = convert_batch(given, trainer.world.device, torch.float64)
            copied_trainer.feed.samples = trainer.feed.samples
            copied_trainer.feed.loaded_batch = pair if as_loaded else None
            prepare_step(copied_trainer, batch, *pair)
            return (
                find_step_mismatches(
                    copied_trainer, *_average_gradients(copied_trainer, batch, *pair)
                )
                if copied_trainer.step_check
                else None
            )
    except Exception:
        return None
    finally:
        if copied_trainer is not None:
            copied_trainer.close()


def set_up_exchange(
    trainer: Trainer,
    has_unused_parameters: bool,
    example_inputs: Any,
    forward: Callable[[], Any] | None = None,
) -> Exchange:
    """Partition the model if the strategy does so, and build its exchange and its passes.

    Collective.

    Args:
        trainer: The trainer.
        has_unused_parameters: Whether a forward leaves parameters unused.
        example_inputs: The inputs of some samples, or None.
        forward: Runs model and loss once, or None.

    Returns:
        The exchange.
    """
    check_equal_schedules(trainer.world, trainer.strategy)
    if has_model_shards(trainer.strategy):
        with trainer.batch_norm.use_probe_mode():
            partition = build_model_partition(
                trainer.strategy,
                trainer.module,
                trainer.optimizer,
                trainer.draws,
                trainer.world,
                example_inputs,
                trainer.model_inspections,
                keep_whole=trainer.step_check is not None or trainer.user_model is not None,
            )
        trainer.adopt_partition(partition)
        skips_calls = partition.draws.serial_calls is not None or any(
            each.skips_calls for each in list_factors(trainer.strategy)
        )
        if trainer.batch_norm.per_sample_calls and skips_calls:
            raise StepFailed(
                "the model has batch norms inside of samples or weights, which are known by the "
                "number of their call, and in parts calls have others; write them as "
                "instance_norm, or train it with data(n)"
            )
        for choice in partition.choices if trainer.world.rank == 0 else ():
            trainer.log.write_choice(*choice)
    replica = Replica(
        trainer.module,
        trainer.optimizer,
        trainer.clip_norm,
        has_unused_parameters,
        trainer.layout,
        forward,
        trainer.step_check is not None,
        trainer.steps,
        trainer.layout.select_local_state(trainer.restored_strategy_state),
        trainer.scheduler,
        trainer.draw_alike,
        trainer.batch_size or 1,
        trainer.validation_probe.changed_by_forward if trainer.validation_probe else (),
        trainer.seed,
    )
    exchange_world = trainer.full_world if trainer.strategy.servers else trainer.world
    exchange = build_exchange(
        trainer.strategy, replica, exchange_world, trainer.log, trainer.exchange_options
    )
    trainer.exchange = exchange
    if (shard_layout := exchange.shard_layout) is not None:
        trainer.adopt_partition(
            ModelPartition(
                exchange.loss_module,
                trainer.layout,
                exchange.empty_model,
                trainer.draws,
                (),
                trainer.group_names,
            )
        )
        trainer.shard_layout = shard_layout
        trainer.parameters = dict(exchange.shard_tensors)
        trainer.all_parameters = exchange.parameters
    trainer.passes = build_passes(trainer.strategy, trainer, exchange)
    return exchange


def empty_user_model(trainer: Trainer) -> None:
    """Release the values of the user's own model if it is partitioned.

    Args:
        trainer: The trainer.
    """
    if trainer.layout.is_partitioned and trainer.user_model is not None:
        trainer.user_model.release_values()


def run_parameter_server(trainer: Trainer) -> None:
    """Run a server until the workers dismiss it. Collective with the first step of the workers.

    Args:
        trainer: The trainer of the server.

    Raises:
        StepFailed: If the server fails, or if it returns before it is dismissed.
    """
    try:
        exchange = set_up_exchange(trainer, False, None)
        exchange.serve()
        if trainer.full_world.store.add(DISMISSED_KEY.format(trainer.full_world.rank), -1) < 0:
            raise StepFailed(
                f"serve() of {type(exchange).__name__} returned before the workers dismissed it; "
                "let it serve until dismiss_servers() tells it to end"
            )
    except Exception as error:
        raise trainer.report_failure(error) from error


def dismiss_run_servers(trainer: Trainer) -> None:
    """Dismiss the servers at the end of a run, also if there was no step.

    Collective of the workers.

    Args:
        trainer: The trainer of a worker.
    """
    if trainer.strategy.servers:
        if trainer.world.rank == 0:
            for rank in range(trainer.world.size, trainer.full_world.size):
                trainer.full_world.store.add(DISMISSED_KEY.format(rank), 1)
        trainer.world.barrier()
        (trainer.exchange or set_up_exchange(trainer, False, None)).dismiss_servers()


def check_equal_schedules(world: World, strategy: Strategy) -> None:
    """Check that all ranks have the same schedules.

    Collective. A program is a function of (rank, size) alone, and every process generates it.

    Args:
        world: The ranks.
        strategy: The resolved strategy.

    Raises:
        StepFailed: If a rank has another program.
    """
    for plan in strategy.plan_schedules():
        # If there are many ranks, only some of their programs are compared.
        ranks = range(0, plan.size, max(1, plan.size // 32))
        text = repr([list(plan.schedule.program(rank, plan.size)) for rank in ranks])
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8
        ).long()
        for rank, other_digest in enumerate(world.all_gather(digest)):
            if not torch.equal(other_digest, digest):
                raise StepFailed(
                    f"{plan.schedule} has another program on rank {rank} than on rank "
                    f"{world.rank}: it is to be a function of (rank, size) alone, not of the "
                    "process, its environment or chance"
                )


def rehearse_step(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, description: str
) -> None:
    """Make the first step, or one of fewer samples, without an update, and check it.

    It runs without autocast, under which a reversed batch hardly differs and a correct split does.

    Args:
        trainer: The trainer.

        batch: This rank's part of the batch.

        inputs: The inputs of that part.

        target: The target of that part.

        description: The description of the step in messages.
    """
    trainer.rehearsing, spans = True, list(trainer.log.spans)
    try:
        with preserve_all_state(trainer.module):
            loss, weight = _average_gradients(trainer, batch, inputs, target)
            if weight:  # Without weight, the step itself fails.
                check_step_outcome(trainer, loss, weight, description)
    finally:
        trainer.rehearsing, trainer.log.spans[:] = False, spans


def _average_gradients(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any
) -> tuple[float, float]:
    """Make a step up to its update; return (mean loss, weight)."""
    assert trainer.exchange is not None
    # A model may change its inputs in place.
    local_sums = trainer.compute_batch_gradients(batch, *clone_batch((inputs, target)))
    local_sums, (weight, loss, _, doubtful_weight) = trainer.share_totals(local_sums)
    weight = resolve_doubtful_weight(trainer, batch, inputs, target, weight, doubtful_weight)
    if not weight:
        return 0.0, 0.0
    trainer.exchange.average(weight * local_sums.scale)
    return loss / weight, weight


def resolve_doubtful_weight(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, weight: float, doubtful_weight: float
) -> float:
    """Return the global weight of a step if the weights of some shares are doubtful.

    Collective. A share is doubtful if its loss is exactly 0. One worker's weight shows whether it
    counts.

    Args:
        trainer: The trainer.

        batch: This rank's part of the global batch.

        inputs: The inputs that `step` received.

        target: The target that `step` received.

        weight: The sum of all weights.

        doubtful_weight: The sum of the doubtful weights.

    Raises:
        StepFailed: If one worker's weight cannot be computed or matches neither sum.
    """
    # If there is one share, one worker's weight says nothing more.
    if not doubtful_weight or not trainer.is_exact_split or trainer.division == Division():
        return weight
    check = trainer.step_check
    reason = explain_no_whole_model(trainer)
    if check is None and not reason:
        as_loaded = is_given_as_loaded_everywhere(trainer, inputs, target)
        check, reason = make_reference_step(
            trainer, batch, inputs, target, as_loaded, loss_only=True
        )
    if check is not None:
        if weight == doubtful_weight:  # No share counts for certain.
            return check.serial_outcome.weight
        for candidate in (weight, weight - doubtful_weight):
            if abs(candidate - check.serial_outcome.weight) <= 1e-6 * max(1.0, weight):
                return candidate
    raise StepFailed(
        "a share's loss is exactly 0, and whether it counts cannot be seen"
        + (f" ({reason})" if reason else "")
        + "; return the pair (sum, weight)",
        tensor="loss",
    )


def check_step_outcome(
    trainer: Trainer, loss: float, weight: float, description: str = "this step"
) -> None:
    """Compare the step with one worker's before the update. Collective.

    Args:
        trainer: The trainer.
        loss: The mean loss.
        weight: The global weight.
        description: The description of the step in messages.

    Raises:
        StepFailed: If the step differs from one worker's.
    """
    assert trainer.step_check is not None
    step_check = trainer.step_check
    mismatches = find_step_mismatches(trainer, loss, weight)
    empty_user_model(trainer)
    if mismatches:
        raise StepFailed(
            describe_mismatch(trainer, mismatches), tensor=mismatches[0].gap.tensor, differs=True
        )
    # Rank 0 alone has the tensors and writes the event.
    if step_check.first_rank_only and trainer.world.rank:
        return
    outcome = step_check.serial_outcome
    text = (
        "the loss"
        if step_check.loss_only
        else f"loss, weight, {len(outcome.gradients)} gradients, {len(outcome.buffers)} buffers"
    )
    text += f" of {description} " + ("is" if step_check.loss_only else "are")
    zero_gradients = [
        name
        for name, each in outcome.gradients.items()
        if each is not None and not each.count_nonzero()
    ]
    text += " one worker's" + (
        f", and so is the loss of {len(step_check.test_part.positions)} samples in a test"
        if step_check.test_part
        else ""
    )
    text += (
        f"; {len(zero_gradients)} gradient(s) were zero, which shows little of them: "
        f"{', '.join(zero_gradients[:3])}{', ...' if len(zero_gradients) > 3 else ''}"
        if zero_gradients
        else ""
    )
    trainer.log.write_event("checked", text, step=trainer.steps)


def find_step_mismatches(trainer: Trainer, loss: float, weight: float) -> list[Mismatch]:
    """Find what differs from one worker's step before the update. Collective.

    Args:
        trainer: The trainer.
        loss: The mean loss.
        weight: The global weight.

    Raises:
        StepFailed: If a forward changes what cannot be compared.
    """
    step_check, trainer.step_check = trainer.step_check, None
    state_before, trainer.state_before_step = trainer.state_before_step, None
    assert step_check is not None
    assert state_before is not None
    assert trainer.exchange is not None
    if step_check.loss_only:
        return step_check.find_mismatches(
            StepOutcome(loss, weight, {}, {}), trainer.module.loss_dtype
        )
    if step_check.serial_outcome.changed_parameters and (
        trainer.exchange.sharing_ranks > 1 or trainer.exchange.shard_layout is not None
    ):
        raise StepFailed(
            SHARED_PARAMETER_CHANGED,
            tensor=", ".join(list(step_check.serial_outcome.changed_parameters)[:3]),
        )
    changed_parameters, changed_state = state_before.collect_module_changes()
    gradients = trainer.exchange.gather_mean_gradients()
    buffers = {name: buffer.detach() for name, buffer in trainer.model.named_buffers()}
    if trainer.layout.is_partitioned:  # The names of a part are not those of the whole model.
        return _find_partition_mismatches(trainer, step_check, loss, weight, gradients, buffers)
    if trainer.shard_layout.is_partitioned:  # Only the parameters are sharded.
        _refuse_unequal_tensors(trainer.shard_layout, gradients, trainer.shard_layout.world)
        gradients = trainer.shard_layout.gather_serial_tensors(gradients)
    return step_check.find_mismatches(
        StepOutcome(
            loss, weight, gradients, buffers, frozenset(), changed_parameters, changed_state
        ),
        trainer.module.loss_dtype,
    )


def _find_partition_mismatches(
    trainer: Trainer,
    step_check: StepCheck,
    loss: float,
    weight: float,
    gradients: dict[str, Tensor | None],
    buffers: dict[str, Tensor],
) -> list[Mismatch]:
    """Compare the step of a partitioned model.

    Collective. The first replica is gathered on rank 0, which has one worker's step. The other
    replicas are compared with the first one.
    """
    if changed_names := [
        *step_check.serial_outcome.changed_parameters,
        *step_check.serial_outcome.changed_state,
    ]:
        raise StepFailed(UNCARRIED_PARAMETER_CHANGED, tensor=", ".join(changed_names[:3]))
    layout = trainer.layout
    tensors = {**gradients, **buffers}
    is_first_replica = not trainer.samples_world.rank
    _refuse_unequal_tensors(layout, tensors, layout.world)
    gathered: Any = [
        layout.gather_serial_tensors(each, on_all_ranks=False) if is_first_replica else {}
        for each in (gradients, buffers)
    ]
    outcome = StepOutcome(loss, weight, gathered[0], gathered[1], test_loss=step_check.test_loss)
    mismatches = step_check.find_mismatches(outcome, trainer.module.loss_dtype)
    if not mismatches and trainer.samples_world.size > 1:
        _refuse_unequal_tensors(layout, tensors, trainer.world)
    return mismatches


def _refuse_unequal_tensors(
    layout: Layout, tensors: dict[str, Tensor | None], world: World
) -> None:
    """Check that copies of one tensor are bit-equal. Collective."""
    if unequal := layout.find_unequal_copies(tensors, world):
        raise StepFailed(
            "before the first update ranks {} and {} hold copies of it with other gradients, or "
            "another buffer; "
            "nothing was updated. A forward changes it on one of them alone, or reads it by a way "
            "that is not "
            "seen: train it with data(n) and nothing else, or cut parts elsewhere. {}".format(
                *unequal[:2], NONDETERMINISM_HINT
            ),
            tensor=unequal[2],
            differs=True,
        )
