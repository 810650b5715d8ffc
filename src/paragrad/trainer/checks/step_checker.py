"""The first step sets up the training, and steps are compared with one worker's from there on.

A check compares a step with one worker's: loss, weight, gradients, buffers and Python state before
the update, and then the update itself (`update_check.py`). At the end the replicas are compared bit
for bit. The first step is checked, and later ones as `check_schedule.py` says: rare targets that do
not count, longer padding, or a hook that begins later show late.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paragrad.datasets.loading import clone_batch, convert_batch
from paragrad.engine.exchange import SHARED_PARAMETER_CHANGED, UNCARRIED_PARAMETER_CHANGED
from paragrad.engine.layout import Layout
from paragrad.engine.state.preserve_state import (
    ModuleSnapshot,
    PythonState,
    find_all_owners,
    preserve_all_state,
)
from paragrad.errors import StepFailed, warn_user
from paragrad.jobs.loss import LossModule, convert_loss
from paragrad.jobs.precision import convert_model
from paragrad.parallel.registry import has_model_shards
from paragrad.runtime import stragglers
from paragrad.runtime.allocator import return_freed_memory
from paragrad.runtime.world import World
from paragrad.trainer.batch import Batch
from paragrad.trainer.checks.check_schedule import CheckSchedule
from paragrad.trainer.checks.diagnosis import describe_mismatch, explain_layout_draws
from paragrad.trainer.checks.inspect_model import (
    is_given_as_loaded,
    is_given_as_loaded_everywhere,
    probe_first_micro_batch,
    reuse_validation_probe,
    run_model_once,
)
from paragrad.trainer.checks.reference_step import (
    evaluate_test_part,
    fetch_places,
    make_reference_step,
    refuse_float64_copies,
    shrink_batch,
)
from paragrad.trainer.checks.step_check import TENSOR_KINDS, Mismatch, StepCheck
from paragrad.trainer.checks.step_result import Gap, StepOutcome
from paragrad.trainer.checks.update_check import (
    UpdateCheck,
    iterate_trained,
    list_group_ids,
    list_group_names,
    make_reference_update,
)
from paragrad.trainer.checks.whole_module import (
    WholeModule,
    assemble_whole_module,
    count_model_bytes,
)
from paragrad.trainer.exchange_setup import set_up_exchange
from paragrad.trainer.parameter_access import NONDETERMINISM_HINT, refuse_unequal_copies
from paragrad.trainer.setup import TrainerOptions
from paragrad.trainer.training import Training

OTHER_UPDATE = (
    "the update differs from that of one worker's optimizer with the same gradients: by {:.3g}, "
    "where the largest value is {:.3g}"
)
OTHER_STATE = (
    "the update differs from that of one worker's optimizer with the same gradients: the value is "
    "missing, of another shape, or not finite on one side"
)
UPDATE_CAUSE = (
    "The gradients were equal. Cause not found; possible: the optimizer looks at more than it is "
    "given on a rank, or something else changes parameters or state there"
)
UNEQUAL_GRADIENTS = (
    "before the update ranks {} and {} hold copies of it with other gradients, or another buffer; "
    "this step updated nothing. A forward changes it on one of them alone, or reads it in a way "
    "that paragrad does not see: train it with data(n) and nothing else, or divide the model "
    "elsewhere. {}"
)
UNEQUAL_REPLICAS = (
    "{} this step ranks {} and {} hold copies of it that are not equal bit for bit: something "
    "changed it on one of them alone, such as other gradients after the exchange, or a forward "
    "that writes to it by .data. {}"
)

# Copies of a smaller model are not worth the milliseconds that the system takes for their memory.
RETURNED_BYTES = 4 << 20


class StepChecker:
    """Sets up the exchange before the first step, and compares steps with one worker's.

    Args:
        training: The training.
        inspections: The places where another training partitioned the model, by technique.

    Attributes:
        training: The training.

        inspections: The places where techniques partition the model.

        step_check: The check of the current step, or None.

        state_before: The state of the module before the current step, or None.

        refusal: Why a step was refused; every later step is refused too.

        group_names: The serial names of the parameters in each group of the optimizer; None if one
            of them is not the model's.

        group_ids: The parameters of the groups after the set-up, by identity.

        part_state: The Python state of the loss and of this rank's part of the model when it was
            partitioned, or None.

        update_checks: One worker's update, or why it cannot be compared, or None.

        schedule: Plans the checks, and measures what they cost.

        finding: What this step's check has found to be equal so far; empty if it found nothing.
    """

    def __init__(self, training: Training, inspections: dict[str, Any] | None = None) -> None:
        self.training = training
        self.inspections = {} if inspections is None else inspections
        self.step_check: StepCheck | None = None
        self.state_before: ModuleSnapshot | None = None
        self.refusal: StepFailed | None = None
        self.group_names: list[list[str]] | None = None
        self.group_ids: list[list[int]] = []
        self.part_state: PythonState | None = None
        self.update_checks: list[UpdateCheck] | str | None = None
        self.schedule = CheckSchedule(training.seed, training.options.check_share)
        self.finding = ""

    # ---- before the passes -------------------------------------------------------------------
    def prepare(self, batch: Batch, inputs: Any, target: Any) -> None:
        """Make the reference step of a later step. Collective.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs that `step` received.
            target: The target that `step` received.

        Raises:
            StepFailed: If this step was refused before, and the loop went on.
        """
        training = self.training
        setup = training.setup
        if self.refusal is not None:
            raise self.refusal
        with self.schedule.measure_part(begins=True):
            if setup.layout.is_partitioned and not training.options.skip_first_step_check:
                refuse_unequal_copies(setup.layout, setup.parameters, setup.model)
            if not training.compares_steps:
                return
            as_loaded = is_given_as_loaded_everywhere(training, inputs, target)
        self._make_reference(batch, inputs, target, as_loaded)

    def set_up(self, batch: Batch, inputs: Any, target: Any) -> None:
        """Probe the model, make the reference step, and build exchange and passes. Collective.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs that `step` received.
            target: The target that `step` received.
        """
        training = self.training
        self.group_names = list_group_names(training.setup.model, training.state.optimizer)
        validation_probe = reuse_validation_probe(training)
        probe, as_loaded = (
            (validation_probe, True)
            if validation_probe
            else probe_first_micro_batch(training, batch, inputs, target)
        )
        training.adopt_probe(probe, max(len(each.positions) for each in batch.micro_batches))
        is_exact_split, is_skipped = training.is_exact_split, training.options.skip_first_step_check
        if (draw := probe.draws.layout_dependence) and (is_exact_split or is_skipped):
            training.log.write_choice("random", "by layout", draw)
            if is_exact_split and training.setup.strategy.changes_layout:
                raise StepFailed(explain_layout_draws(draw))
        set_up = functools.partial(
            set_up_exchange,
            training,
            probe.has_unused_parameters,
            next(batch.iterate_micro_batches(inputs, target))[1],
            functools.partial(run_model_once, training, batch, inputs, target),
            self.inspections,
        )
        if training.compares_steps:
            self._make_reference(batch, inputs, target, as_loaded, set_up)
            return
        if is_skipped or is_exact_split:
            training.log.write_choice("first step", "not checked", "asked for")
        set_up(False)
        self._empty_user_model()

    def _make_reference(
        self,
        batch: Batch,
        inputs: Any,
        target: Any,
        as_loaded: bool,
        set_up: Callable[[bool], Any] | None = None,
    ) -> None:
        """Make the reference step, then set up the exchange if this is the first step.

        If the step itself cannot be compared, a rehearsal is made and compared at once.
        """
        training = self.training
        self.step_check = self.state_before = None
        checked = (batch, inputs, target)
        description = "this step"
        with self.schedule.measure_part(begins=set_up is not None):
            whole = assemble_whole_module(training, self.part_state)
            check, reason = make_reference_step(training, *checked, as_loaded, whole)
            smaller_batch = None
            if check is None and as_loaded and not whole.obstacle:
                smaller_batch = shrink_batch(training, batch)
            if smaller_batch is not None:
                places = smaller_batch.places
                checked = smaller_batch, *fetch_places(training, smaller_batch, places)
                check, reason = make_reference_step(training, *checked, as_loaded, whole)
                description = (
                    f"its first {len(smaller_batch.sample_indices)} samples, for which there is "
                    "room on one rank,"
                )
        if set_up:
            set_up(check is not None)
            self.group_ids = list_group_ids(training.state.optimizer)
            if training.setup.explain_no_whole_model():
                self.part_state = PythonState(find_all_owners(training.setup.module))
        if check is None:
            self._empty_user_model()
            what = "later step" if training.state.own_steps else "first step"
            training.log.write_choice(what, "not checked", reason)
            if training.log.recorder is None:  # the user's own loop has no record
                what = "a later step" if training.state.own_steps else "the first step"
                warn_user(f"{what} is not compared with one worker's: {reason}")
            return
        with self.schedule.measure_part():
            self._adopt_check(check, whole, checked, description)

    def _adopt_check(
        self,
        check: StepCheck,
        whole: WholeModule,
        checked: tuple[Batch, Any, Any],
        description: str,
    ) -> None:
        """Keep the check of this step, or rehearse the step and compare at once. Collective."""
        training = self.training
        state_before = ModuleSnapshot(
            training.module,
            check.serial_outcome.changed_parameters if whole.is_everywhere else (),
        )
        reference_loss = check.serial_outcome.test_loss
        if isinstance(reference_loss, float) and check.test_part:
            test_loss = evaluate_test_part(training, check.test_part, reference_loss)
            check = replace(check, test_loss=test_loss)
        elif reference_loss:
            training.log.write_choice("test", "not compared", str(reference_loss))
        # A training with servers has no step that can be repeated. Later a repeated step, which has
        # an exchange of its own, would not have the faults of this training's exchange.
        if (
            not check.is_float64
            and not training.state.own_steps
            and not training.setup.strategy.servers
            and whole.is_everywhere
            and whole.module is not None
            and not whole.is_hooked
        ):
            rerun = functools.partial(
                self._rerun_in_float64,
                whole.module,
                state_before,
                checked[0],
                clone_batch(checked[1:]),
                is_given_as_loaded(training, *checked[1:]),
            )
            check = replace(check, rerun_in_float64=rerun)
        self.step_check, self.state_before = check, state_before
        if training.options.autocast is not None or description != "this step":
            self._rehearse_step(*checked, description)

    def _rerun_in_float64(
        self,
        module: LossModule,
        state_before: ModuleSnapshot,
        batch: Batch,
        given: Any,
        as_loaded: bool,
    ) -> list[Mismatch] | None:
        """Repeat the step in float64, by the strategy's own code on a copy of the whole module.

        Collective.

        Args:
            module: The whole model and the loss.

            state_before: The state of the module before the step.

            batch: This rank's part of the global batch.

            given: (inputs, target) as they were before the step.

            as_loaded: Whether these are what `batches` gave.

        Returns:
            The mismatches of the repeated step, or None if it is impossible.
        """
        training = self.training
        world, strategy, options = training.world, training.setup.strategy, training.options
        copied: Training | None = None
        if has_model_shards(strategy):
            refuse_float64_copies(world, module)
        try:
            with preserve_all_state(module):
                # Ranks that share parameters must all have saved them before one restores them.
                world.barrier()
                # A part of the model is not repeated; the whole module is.
                if not training.setup.layout.is_partitioned:
                    state_before.restore_module()
                model = convert_model(copy.deepcopy(module.model), torch.float64)
                model.zero_grad()
                copied = Training(
                    world,
                    model,
                    convert_loss(module.loss, world.device, torch.float64),
                    torch.optim.SGD(model.parameters(), lr=0.0),
                    strategy,
                    TrainerOptions(
                        seed=options.seed,
                        collate=options.collate,
                        dtype=torch.float64,
                        exchange_options=options.exchange_options,
                        is_validated=True,
                        has_tests=options.has_tests,
                    ),
                )
                copied.state.move_to(training.state.steps)
                copied.state.use_division(training.state.division)
                pair = convert_batch(given, world.device, torch.float64)
                copied.feed.adopt_batch(training.feed.samples, pair if as_loaded else None)
                # The copy must be partitioned in the same way.
                checker = StepChecker(copied, self.inspections)
                checker.set_up(batch, *pair)
                if checker.step_check is None:
                    return None
                return checker.find_mismatches(*checker.average_gradients(batch, *pair))[0]
        except Exception:
            return None
        finally:
            if copied is not None:
                copied.close()

    def _rehearse_step(self, batch: Batch, inputs: Any, target: Any, description: str) -> None:
        """Make the first step, or one of fewer samples, without an update, and check it.

        It runs without autocast, under which a reversed batch hardly differs and a correct split
        does.
        """
        with self.training.rehearse(), preserve_all_state(self.training.module):
            loss, weight = self.average_gradients(batch, inputs, target)
            if weight:  # Without weight, the step itself fails.
                self._check_outcome(loss, weight, description)

    def average_gradients(self, batch: Batch, inputs: Any, target: Any) -> tuple[float, float]:
        """Make a step up to its update; return (mean loss, weight).

        Args:
            batch: This rank's part of the batch.
            inputs: The inputs of that part.
            target: The target of that part.
        """
        training = self.training
        # A model may change its inputs in place.
        sums = training.compute_gradients(batch, *clone_batch((inputs, target)))
        sums, totals = training.share_totals(sums)
        weight = self.resolve_weight(batch, inputs, target, totals.weight, totals.doubtful_weight)
        if not weight:
            return 0.0, 0.0
        return training.take_mean(sums, totals, weight), weight

    def _empty_user_model(self) -> None:
        """Release the values of the user's own model if it is partitioned."""
        training = self.training
        if training.setup.layout.is_partitioned and training.user_model is not None:
            training.user_model.release_values()

    # ---- before the update -------------------------------------------------------------------
    def resolve_weight(
        self, batch: Batch, inputs: Any, target: Any, weight: float, doubtful_weight: float
    ) -> float:
        """Return the global weight of a step if the weights of some shares are doubtful.

        Collective. A share is doubtful if its loss is exactly 0. One worker's weight shows whether
        it counts.

        Args:
            batch: This rank's part of the global batch.

            inputs: The inputs that `step` received.

            target: The target that `step` received.

            weight: The sum of all weights.

            doubtful_weight: The sum of the doubtful weights.

        Raises:
            StepFailed: If one worker's weight cannot be computed or matches neither sum.
        """
        training = self.training
        # If there is one share, one worker's weight says nothing more.
        if (
            not doubtful_weight
            or not training.is_exact_split
            or training.state.division.is_undivided
        ):
            return weight
        check = self.step_check
        reason = training.setup.explain_no_whole_model()
        if check is None and not reason:
            as_loaded = is_given_as_loaded_everywhere(training, inputs, target)
            check, reason = make_reference_step(
                training,
                batch,
                inputs,
                target,
                as_loaded,
                WholeModule(training.module, True),
                loss_only=True,
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

    def compare_gradients(self, loss: float, weight: float) -> None:
        """Compare the gradients with one worker's, and prepare to compare the update.

        Collective.

        Args:
            loss: The mean loss.
            weight: The global weight.

        Raises:
            StepFailed: If the step differs from one worker's.
        """
        if not self.training.compares_steps:
            return
        with self.schedule.measure_part():
            # What the passes of all ranks have freed would lie beside the copies on rank 0.
            self._return_memory()
            gradients = None
            if self.step_check is not None:
                gradients = self._check_outcome(loss, weight, "this step")
            group_names = self._find_group_names()
            self.update_checks = make_reference_update(self.training, group_names, gradients)

    def _return_memory(self) -> None:
        if count_model_bytes(self.training) > RETURNED_BYTES:
            return_freed_memory()

    def _find_group_names(self) -> list[list[str]] | None:
        """Return the names of the parameters in each group; None if they are not known any more."""
        setup, optimizer = self.training.setup, self.training.state.optimizer
        if list_group_ids(optimizer) == self.group_ids:
            return self.group_names
        has_own = setup.exchange is not None and setup.exchange.sharing_ranks > 1
        if setup.shard_layout.is_partitioned or has_own:
            return None
        return list_group_names(setup.model, optimizer)

    def compare_update(self, is_skipped: bool) -> None:
        """Compare what the update left with one worker's update, and plan the next check.

        Collective.

        Args:
            is_skipped: Whether the update was skipped, because a gradient overflowed.

        Raises:
            StepFailed: If the update differs, or replicas are not equal bit for bit.
        """
        training, state = self.training, self.training.state
        if not training.compares_steps:
            if not training.is_exact_split:
                # copies in a partitioned model are compared at doubling distances
                state.plan_check(2 * (state.own_steps + 1))
            return
        with self.schedule.measure_part():
            checks, self.update_checks = self.update_checks, None
            obstacle = "it was skipped" if is_skipped else checks if isinstance(checks, str) else ""
            if isinstance(checks, list) and not is_skipped:
                self._refuse_other_update(checks)
            del checks
            buffers = training.setup.strategy.guarantees.buffers_equal
            self._refuse_unequal_replicas(
                "after", dict(training.setup.model.named_buffers()) if buffers else {}
            )
            if training.world.rank == 0:  # which made the copies
                self._return_memory()
        state.plan_check(self.schedule.plan_next(state.own_steps + 1, state.steps, training.world))
        if self.finding and training.world.rank == 0:
            equal, separator, note = self.finding.partition("; ")
            update = (
                ", and so is its update"
                if not obstacle
                else f"; its update was not compared ({obstacle})"
            )
            text = equal + update + separator + note
            training.log.write_event(
                "checked",
                text,
                step=state.steps,
                seconds=self.schedule.last_seconds,
                update=float(not obstacle),
            )
        self.finding = ""

    def _refuse_other_update(self, checks: list[UpdateCheck]) -> None:
        training = self.training
        found = list[tuple[float, Gap]]()
        for check, (parameters, state) in zip(checks, iterate_trained(training), strict=True):
            gap_found = None
            with contextlib.suppress(Exception):  # what cannot be compared is not refused
                gap_found = check.find_gap(parameters, state)
            if gap_found is not None:
                found.append(gap_found)
        gap = max(found, key=lambda pair: pair[0])[1] if found else None
        if (gap := training.world.broadcast_object(gap)) is not None:
            what = OTHER_UPDATE.format(gap.value, gap.largest)
            if math.isinf(gap.value):
                what = OTHER_STATE
            raise self._refuse(f"{what}. {UPDATE_CAUSE}", gap.tensor or "parameters")

    def _refuse_unequal_replicas(self, when: str, buffers: Mapping[str, Tensor]) -> None:
        """Compare the parameters and buffers of replicas, and other copies, bit for bit."""
        setup = self.training.setup
        tensors = {name: each.detach() for name, each in setup.parameters.items()}
        if unequal := setup.shard_layout.find_unequal_copies(
            {**tensors, **buffers}, self.training.world
        ):
            first, other, tensor = unequal
            message = UNEQUAL_REPLICAS.format(when, first, other, NONDETERMINISM_HINT)
            raise self._refuse(message, tensor)

    def _refuse(self, message: str, tensor: str) -> StepFailed:
        """Keep and return the error of a step that differs."""
        if (last := self.schedule.last_equal) is not None:
            message += f". Step {last} was compared last, and was equal"
        self.refusal = StepFailed(message, tensor=tensor, differs=True)
        return self.refusal

    def _check_outcome(
        self, loss: float, weight: float, description: str
    ) -> dict[str, Tensor | None] | None:
        """Compare a step before its update; return the mean gradients as `find_mismatches` does."""
        step_check = self.step_check
        assert step_check is not None
        waits = stragglers.explain_timeout(
            "rank 0 compares this step with that of one worker", ", or --check 0"
        )
        try:
            with waits:
                mismatches, gradients = self.find_mismatches(loss, weight)
                division_test = step_check.test_division(mismatches) if mismatches else None
        except StepFailed as error:
            if not error.differs:
                raise
            raise self._refuse(error.message, error.tensor or "loss") from error
        self._empty_user_model()
        if mismatches:
            if self.training.state.own_steps:  # the cause, if replicas have become unequal
                self._refuse_unequal_replicas("before", {})
            message = describe_mismatch(self.training, mismatches, division_test)
            raise self._refuse(message, mismatches[0].gap.tensor or "loss")
        # Rank 0 alone may have the tensors.
        self.finding = _describe_equal_step(step_check, description)
        return gradients

    def find_mismatches(
        self, loss: float, weight: float
    ) -> tuple[list[Mismatch], dict[str, Tensor | None] | None]:
        """Find what differs from one worker's step before the update. Collective.

        Args:
            loss: The mean loss.
            weight: The global weight.

        Returns:
            (mismatches, gradients): the mean gradients of the whole model, on rank 0 at least; None
            if they were not gathered.

        Raises:
            StepFailed: If a forward changes what cannot be compared.
        """
        training, setup = self.training, self.training.setup
        step_check, self.step_check = self.step_check, None
        state_before, self.state_before = self.state_before, None
        assert step_check is not None
        assert state_before is not None
        loss_dtype = setup.module.loss_dtype
        if step_check.loss_only:
            return step_check.find_mismatches(StepOutcome(loss, weight, {}, {}), loss_dtype), None
        exchange = training.exchange
        if step_check.serial_outcome.changed_parameters and (
            exchange.sharing_ranks > 1 or exchange.shard_layout is not None
        ):
            raise StepFailed(
                SHARED_PARAMETER_CHANGED,
                tensor=", ".join(list(step_check.serial_outcome.changed_parameters)[:3]),
            )
        changed_parameters, changed_state = state_before.collect_module_changes()
        gradients = exchange.gather_mean_gradients()
        buffers = {name: buffer.detach() for name, buffer in setup.model.named_buffers()}
        if setup.layout.is_partitioned:  # The names of a part are not those of the whole model.
            return _find_partition_mismatches(
                training, step_check, loss, weight, gradients, buffers, changed_state
            )
        if setup.shard_layout.is_partitioned:  # Only the parameters are sharded.
            _refuse_unequal_tensors(setup.shard_layout, gradients, setup.shard_layout.world)
            gradients = setup.shard_layout.gather_serial_tensors(gradients, on_all_ranks=False)
        if step_check.is_first_step and training.world.size > 1:
            is_sharded = setup.shard_layout.is_partitioned
            tensors = buffers if is_sharded else {**gradients, **buffers}
            if setup.shard_layout.find_unequal_copies(tensors, training.world):
                step_check.share_reference(["buffer"] if is_sharded else TENSOR_KINDS)
        outcome = StepOutcome(
            loss, weight, gradients, buffers, frozenset(), changed_parameters, changed_state
        )
        return step_check.find_mismatches(outcome, loss_dtype), gradients


def _describe_equal_step(step_check: StepCheck, description: str) -> str:
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
        f", and so is the loss of {len(step_check.test_part.positions)} sample(s) in a test"
        if step_check.test_part
        else ""
    )
    return text + (
        f"; {len(zero_gradients)} gradient(s) were zero, which shows little of them: "
        f"{', '.join(zero_gradients[:3])}{', ...' if len(zero_gradients) > 3 else ''}"
        if zero_gradients
        else ""
    )


def _find_partition_mismatches(
    training: Training,
    step_check: StepCheck,
    loss: float,
    weight: float,
    gradients: dict[str, Tensor | None],
    buffers: dict[str, Tensor],
    changed_state: dict[str, Any],
) -> tuple[list[Mismatch], dict[str, Tensor | None]]:
    """Compare the step of a partitioned model; return its gradients on rank 0 too.

    Collective. The first replica is gathered on rank 0, which has one worker's step. The other
    replicas are compared with the first one.
    """
    # In the first step only: later the reference began with what the parts keep in Python, and a
    # read value that is wrong shows in the loss or in a gradient.
    if not training.state.own_steps and (
        changed_names := [
            *step_check.serial_outcome.changed_parameters,
            *step_check.serial_outcome.changed_state,
        ]
    ):
        raise StepFailed(UNCARRIED_PARAMETER_CHANGED, tensor=", ".join(changed_names[:3]))
    layout = training.setup.layout
    tensors = {**gradients, **buffers}
    is_first_replica = not training.setup.samples_world.rank
    _refuse_unequal_tensors(layout, tensors, layout.world)
    gathered: Any = [{}, {}]
    if is_first_replica:
        gathered, _ = layout.gather_serial_values([gradients, buffers])
    # what one worker's forward changes in Python and reads, from the ranks that change it
    states = training.world.gather_objects(
        {
            name: changed_state[name]
            for name in step_check.serial_outcome.changed_state
            if name in changed_state
        }
    )
    outcome = None
    if training.world.rank == 0:
        outcome = StepOutcome(
            loss,
            weight,
            gathered[0],
            gathered[1],
            changed_state={name: value for each in states for name, value in each.items()},
            test_loss=step_check.test_loss,
        )
    mismatches = step_check.find_mismatches(outcome, training.module.loss_dtype)
    if not mismatches and training.setup.samples_world.size > 1:
        _refuse_unequal_tensors(layout, tensors, training.world)
    return mismatches, gathered[0]


def _refuse_unequal_tensors(
    layout: Layout, tensors: dict[str, Tensor | None], world: World
) -> None:
    """Check that copies of one tensor are bit-equal. Collective."""
    if unequal := layout.find_unequal_copies(tensors, world):
        raise StepFailed(
            UNEQUAL_GRADIENTS.format(*unequal[:2], NONDETERMINISM_HINT),
            tensor=unequal[2],
            differs=True,
        )
