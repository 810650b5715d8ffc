"""Before the first step: the model is looked at, one worker's first step is made beside, then
the exchange is wired.
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

# in the store of a world with servers: how often the workers let that rank go
DISMISSED_KEY = "paragrad: dismissed {}"
PARTITIONED_REASON = "the model is cut: no rank holds all of it any more"
SHARDED_REASON = "the parameters are sharded: no rank can run the model alone any more"


def prepare_step(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> None:
    """Look at the model and wire up; make one worker's step beside, where this one has to show
    that it is the same.

    That is the first one, and of steps 2, 4, 8, ... the loss: rare targets that do not count,
    longer padding, a term that grows come late. Collective.
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
        # the 2nd, 4th, 8th, ...
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
    seen = reuse_validation_probe(trainer)
    found, as_loaded = (
        (seen, True) if seen else probe_first_micro_batch(trainer, batch, inputs, target)
    )
    trainer.draws = found.draws
    trainer.module.has_traced_divisor = found.weight_known
    trainer.coarsest_eps = found.coarsest_eps
    trainer.module.is_linear = found.is_linear
    trainer.activation_bytes = found.activation_bytes * max(
        1, len(batch.micro_batches[0].positions)
    )
    if found.draws.layout_dependence and (trainer.is_exact_split or trainer.skip_first_step_check):
        trainer.log.write_choice("random", "by layout", found.draws.layout_dependence)
        if trainer.is_exact_split and trainer.strategy.changes_layout:
            raise StepFailed(explain_layout_draws(found.draws.layout_dependence))
    forward = functools.partial(run_model_once, trainer, batch, inputs, target)
    wiring = functools.partial(
        set_up_exchange,
        trainer,
        found.has_unused_parameters,
        next(batch.iterate_micro_batches(inputs, target))[1],
        forward,
    )
    if trainer.is_exact_split:
        _prepare_step_check(trainer, batch, inputs, target, as_loaded, set_up=wiring)
        return
    if trainer.skip_first_step_check:
        trainer.log.write_choice("first step", "not checked", "asked for")
    wiring()
    empty_user_model(trainer)


def explain_no_whole_model(trainer: Trainer) -> str:
    """Why no rank can run the whole model, from here on; or nothing."""
    sharded = trainer.exchange is not None and trainer.exchange.shard_layout is not None
    return (
        PARTITIONED_REASON if trainer.layout.is_partitioned else SHARDED_REASON if sharded else ""
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
    """One worker's step beside, then the exchange; where that is to be compared at once and not
    in the step itself, compare.
    """
    proved = (batch, inputs, target)
    of = "this step"
    module = trainer.module
    trainer.step_check, because = make_reference_step(trainer, *proved, as_loaded, loss_only)
    if trainer.step_check is None and as_loaded and (few := shrink_batch(trainer, batch)):
        proved = few, *fetch_places(trainer, few, few.places)
        trainer.step_check, because = make_reference_step(trainer, *proved, as_loaded, loss_only)
        of = f"its first {len(few.sample_indices)} samples, for which there is room on one rank,"
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
        trainer.log.write_choice(
            "loss again" if loss_only else "first step", "not checked", because
        )
        if trainer.log.recorder is None:  # a loop of one's own
            warnings.warn(
                f"step {trainer.steps} is not compared with one worker's: {because}", stacklevel=2
            )
        return
    of_one = trainer.step_check.serial_outcome.test_loss
    if isinstance(of_one, float) and trainer.step_check.test_part:
        trainer.step_check.test_loss = evaluate_test_part(
            trainer, trainer.step_check.test_part, of_one
        )
    elif of_one:
        trainer.log.write_choice("test", "not compared", str(of_one))
    # which have no step to make again
    if trainer.precision != torch.float64 and not trainer.strategy.servers:
        loaded = is_given_as_loaded(trainer, *proved[1:])
        trainer.step_check.rerun_in_float64 = functools.partial(
            _rerun_step_in_float64,
            trainer,
            module,
            trainer.state_before_step,
            proved[0],
            clone_batch(proved[1:]),
            loaded,
        )
    if trainer.autocast is not None or proved[0] is not batch:
        rehearse_step(trainer, *proved, of)


def _rerun_step_in_float64(
    trainer: Trainer,
    module: LossModule,
    state_before: ModuleSnapshot,
    batch: Batch,
    given: Any,
    as_loaded: bool,
) -> list[Mismatch] | None:
    """The misses of the same step in float64, by the strategy's own code on a copy of the whole
    module; None where that cannot be. given: (inputs, target) as they were before the step;
    loaded: they are what `batches` gave. Collective.
    """
    twin: Trainer | None = None
    if has_model_shards(trainer.strategy):
        refuse_float64_copies(trainer.world, module)
    try:
        with preserve_all_state(module):
            # parameters that ranks share are as they are, on all of them
            trainer.world.barrier()
            if not trainer.layout.is_partitioned:  # a part is not what is run again
                state_before.restore_module()
            model = convert_model(copy.deepcopy(module.model), torch.float64)
            model.zero_grad()
            twin = type(trainer)(
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
            # cut alike
            twin.steps = trainer.steps
            twin.model_inspections = trainer.model_inspections
            twin.division = trainer.division
            pair = convert_batch(given, trainer.world.device, torch.float64)
            twin.feed.samples = trainer.feed.samples
            twin.feed.loaded_batch = pair if as_loaded else None
            prepare_step(twin, batch, *pair)
            return (
                find_step_mismatches(twin, *_average_gradients(twin, batch, *pair))
                if twin.step_check
                else None
            )
    except Exception:
        return None
    finally:
        if twin is not None:
            twin.close()


def set_up_exchange(
    trainer: Trainer,
    has_unused_parameters: bool,
    example_inputs: Any,
    forward: Callable[[], Any] | None = None,
) -> Exchange:
    """Cut the model, where the trainer's strategy does; make its exchange, and its passes.
    Collective.
    """
    check_equal_schedules(trainer.world, trainer.strategy)
    if has_model_shards(trainer.strategy):
        with trainer.batch_norm.use_probe_mode():
            part = build_model_partition(
                trainer.strategy,
                trainer.module,
                trainer.optimizer,
                trainer.draws,
                trainer.world,
                example_inputs,
                # and whoever may ask one worker again has the whole model too
                trainer.model_inspections,
                keep_whole=trainer.step_check is not None or trainer.user_model is not None,
            )
        trainer.adopt_partition(part)
        skips = part.draws.serial_calls is not None or any(
            each.skips_calls for each in list_factors(trainer.strategy)
        )
        if trainer.batch_norm.per_sample_calls and skips:
            raise StepFailed(
                "the model has batch norms inside of samples or weights, which are known by the "
                "number of their "
                "call, and in parts calls have others; write them as instance_norm, or train it "
                "with data(n)"
            )
        for choice in part.choices if trainer.world.rank == 0 else ():
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
    among = trainer.full_world if trainer.strategy.servers else trainer.world
    made = build_exchange(trainer.strategy, replica, among, trainer.log, trainer.exchange_options)
    trainer.exchange = made
    if (shards := made.shard_layout) is not None:
        trainer.adopt_partition(
            ModelPartition(
                made.loss_module,
                trainer.layout,
                made.empty_model,
                trainer.draws,
                (),
                trainer.group_names,
            )
        )
        trainer.shard_layout = shards
        trainer.parameters = dict(made.shard_tensors)
        trainer.all_parameters = made.parameters
    trainer.passes = build_passes(trainer.strategy, trainer, made)
    return made


def empty_user_model(trainer: Trainer) -> None:
    """The user's own model, which is cut, has no values from here on."""
    if trainer.layout.is_partitioned and trainer.user_model is not None:
        trainer.user_model.release_values()


def run_parameter_server(trainer: Trainer) -> None:
    """Of a server: until the workers dismiss it. Collective with their first step."""
    try:
        exchange = set_up_exchange(trainer, False, None)
        exchange.serve()
        if trainer.full_world.store.add(DISMISSED_KEY.format(trainer.full_world.rank), -1) < 0:
            raise StepFailed(
                f"serve() of {type(exchange).__name__} returned before the workers dismissed it; "
                f"let it serve "
                "until dismiss() tells it to end"
            )
    except Exception as error:
        raise trainer.report_failure(error) from error


def dismiss_run_servers(trainer: Trainer) -> None:
    """Of a worker, at the end of a run: let the servers go, which wait for a first step where
    there was none. Collective.
    """
    if trainer.strategy.servers:
        if trainer.world.rank == 0:
            for rank in range(trainer.world.size, trainer.full_world.size):
                trainer.full_world.store.add(DISMISSED_KEY.format(rank), 1)
        trainer.world.barrier()
        (trainer.exchange or set_up_exchange(trainer, False, None)).dismiss_servers()


def check_equal_schedules(world: World, strategy: Strategy) -> None:
    """All ranks have the same schedules: a program is a function of (rank, size) alone, and is
    asked for in every process. Collective. Raises StepFailed.
    """
    for plan in strategy.plan_schedules():
        # programs, where there are many
        some = range(0, plan.size, max(1, plan.size // 32))
        text = repr([list(plan.schedule.program(rank, plan.size)) for rank in some])
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8
        ).long()
        for rank, theirs in enumerate(world.all_gather(digest)):
            if not torch.equal(theirs, digest):
                raise StepFailed(
                    f"{plan.schedule} has another program on rank {rank} than on rank "
                    f"{world.rank}: it is to be a "
                    "function of (rank, size) alone, not of the process, its environment or chance"
                )


def rehearse_step(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, description: str
) -> None:
    """The first step, or one of fewer samples, without an update, and without autocast, in
    which a reversed batch hardly differs and a right split does.
    """
    trainer.rehearsing, spans = True, list(trainer.log.spans)
    try:
        with preserve_all_state(trainer.module):
            loss, weight = _average_gradients(trainer, batch, inputs, target)
            if weight:  # otherwise the step itself says so
                check_step_outcome(trainer, loss, weight, description)
    finally:
        trainer.rehearsing, trainer.log.spans[:] = False, spans


def _average_gradients(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any
) -> tuple[float, float]:
    """(mean loss, weight) of a step that is made up to its update."""
    assert trainer.exchange is not None
    # which a model may change in place
    own = trainer.compute_batch_gradients(batch, *clone_batch((inputs, target)))
    own, (weight, loss, _, doubt) = trainer.share_totals(own)
    weight = resolve_doubtful_weight(trainer, batch, inputs, target, weight, doubt)
    if not weight:
        return 0.0, 0.0
    trainer.exchange.average(weight * own.scale)
    return loss / weight, weight


def resolve_doubtful_weight(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, weight: float, doubtful_weight: float
) -> float:
    """The global weight, where some shares' may be that of nothing: their loss is exactly 0,
    and one worker's weight says whether they count. Collective.
    """
    # of one share nothing else is known apart
    if not doubtful_weight or not trainer.is_exact_split or trainer.division == Division():
        return weight
    found = trainer.step_check
    because = explain_no_whole_model(trainer)
    if found is None and not because:
        as_loaded = is_given_as_loaded_everywhere(trainer, inputs, target)
        found, because = make_reference_step(
            trainer, batch, inputs, target, as_loaded, loss_only=True
        )
    if found is not None:
        if weight == doubtful_weight:  # nothing counts on any rank
            return found.serial_outcome.weight
        for counted in (weight, weight - doubtful_weight):
            if abs(counted - found.serial_outcome.weight) <= 1e-6 * max(1.0, weight):
                return counted
    raise StepFailed(
        "a share's loss is exactly 0, and whether it counts cannot be seen"
        + (f" ({because})" if because else "")
        + "; return the pair (sum, weight)",
        tensor="loss",
    )


def check_step_outcome(
    trainer: Trainer, loss: float, weight: float, description: str = "this step"
) -> None:
    """Compare; raises StepFailed before the update where the step is not one worker's.
    Collective.
    """
    assert trainer.step_check is not None
    proof = trainer.step_check
    misses = find_step_mismatches(trainer, loss, weight)
    empty_user_model(trainer)
    if misses:
        raise StepFailed(
            describe_mismatch(trainer, misses), tensor=misses[0].gap.tensor, differs=True
        )
    if proof.first_rank_only and trainer.world.rank:  # rank 0 has seen it
        return
    made = proof.serial_outcome
    what = (
        "the loss"
        if proof.loss_only
        else f"loss, weight, {len(made.gradients)} gradients, {len(made.buffers)} buffers"
    )
    what += f" of {description} " + ("is" if proof.loss_only else "are")
    zero = [
        name
        for name, each in made.gradients.items()
        if each is not None and not each.count_nonzero()
    ]
    what += " one worker's" + (
        f", and so is the loss of {len(proof.test_part.positions)} samples in a test"
        if proof.test_part
        else ""
    )
    what += (
        f"; {len(zero)} gradient(s) were zero, which shows little of them: "
        f"{', '.join(zero[:3])}{', ...' if len(zero) > 3 else ''}"
        if zero
        else ""
    )
    trainer.log.write_event("checked", what, step=trainer.steps)


def find_step_mismatches(trainer: Trainer, loss: float, weight: float) -> list[Mismatch]:
    """What of the step, before its update, is not one worker's. Collective."""
    proof, trainer.step_check = trainer.step_check, None
    kept, trainer.state_before_step = trainer.state_before_step, None
    assert proof is not None
    assert kept is not None
    assert trainer.exchange is not None
    if proof.loss_only:
        return proof.find_mismatches(StepOutcome(loss, weight, {}, {}), trainer.module.loss_dtype)
    if proof.serial_outcome.changed_parameters and (
        trainer.exchange.sharing_ranks > 1 or trainer.exchange.shard_layout is not None
    ):
        raise StepFailed(
            SHARED_PARAMETER_CHANGED,
            tensor=", ".join(list(proof.serial_outcome.changed_parameters)[:3]),
        )
    moved, state = kept.collect_module_changes()
    gradients = trainer.exchange.gather_mean_gradients()
    buffers = {name: buffer.detach() for name, buffer in trainer.model.named_buffers()}
    if trainer.layout.is_partitioned:  # names of a part are not those of the whole
        return _find_partition_mismatches(trainer, proof, loss, weight, gradients, buffers)
    if trainer.shard_layout.is_partitioned:  # parameters alone are divided
        _refuse_unequal_tensors(trainer.shard_layout, gradients, trainer.shard_layout.world)
        gradients = trainer.shard_layout.gather_serial_tensors(gradients)
    return proof.find_mismatches(
        StepOutcome(loss, weight, gradients, buffers, frozenset(), moved, state),
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
    """The first replica is put together on rank 0, where one worker's step is; the other ones
    are its copies. Collective.
    """
    if carried := [
        *step_check.serial_outcome.changed_parameters,
        *step_check.serial_outcome.changed_state,
    ]:
        raise StepFailed(UNCARRIED_PARAMETER_CHANGED, tensor=", ".join(carried[:3]))
    layout = trainer.layout
    parts = {**gradients, **buffers}
    first = not trainer.samples_world.rank
    _refuse_unequal_tensors(layout, parts, layout.world)
    whole: Any = [
        layout.gather_serial_tensors(each, on_all_ranks=False) if first else {}
        for each in (gradients, buffers)
    ]
    made = StepOutcome(loss, weight, whole[0], whole[1], test_loss=step_check.test_loss)
    misses = step_check.find_mismatches(made, trainer.module.loss_dtype)
    if not misses and trainer.samples_world.size > 1:
        _refuse_unequal_tensors(layout, parts, trainer.world)
    return misses


def _refuse_unequal_tensors(
    layout: Layout, tensors: dict[str, Tensor | None], world: World
) -> None:
    """Copies of one tensor are the same to the bit. Collective."""
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
