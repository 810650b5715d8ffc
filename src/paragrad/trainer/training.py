"""The training step on one rank.

    batch -> loss -> gradients -> exchange -> update

`Training.make_step` calls these stages in this order. What a strategy changes lies in the exchange
and the passes of `Training.setup`. Before step 0 `StepChecker` builds both; it also compares steps
with one worker's. Observers are called at fixed places of the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import (
    NO_CONTEXT,
    Exchange,
    ExchangeOptions,
    Totals,
    check_totals,
    refuse_moved_parameters,
)
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.layout import Layout, OptimizerState, check_loss_ranks
from paragrad.engine.loss_scale import LossScale, has_overflow
from paragrad.engine.optimizer.optimizer_state import copy_unsaved_values
from paragrad.engine.passes import (
    COUNTED_STEPS,
    LossSums,
    enter_contexts,
    enter_pass_contexts,
    run_passes,
)
from paragrad.engine.probe import Probe
from paragrad.engine.rng.draws import (
    CallNumbers,
    Draws,
    ReplicatedDraws,
    check_seen_draws,
    key_draws,
)
from paragrad.engine.state.shared_initialization import InitialModel
from paragrad.errors import StepFailed
from paragrad.jobs.fingerprint import describe_callable
from paragrad.jobs.loss import Loss, LossModule
from paragrad.jobs.precision import find_shared_dtype
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime import allocator, generators
from paragrad.runtime.stragglers import StragglerMonitor, make_step_failure
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division, MicroBatch
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.batch import Batch, BatchFeed
from paragrad.trainer.model_partition import (
    place_rank,
)
from paragrad.trainer.parameter_access import UserModel
from paragrad.trainer.setup import Setup, TrainerOptions
from paragrad.trainer.step_observer import StepChecks, StepObserver, StepObservers, StepResult


class TrainingState:
    """What changes from step to step, besides the values of the model.

    Args:
        optimizer: The optimizer over the model.

        scheduler: The scheduler, as in Job, or None.

        division: The division of a global batch among the replicas.

        replicas: The replicas of which this rank runs the parts.

        identity: What a checkpoint of the user's own loop must have in common with the training.

        loss_scale: The loss scale, if forwards run in float16.

    Attributes:
        optimizer: The optimizer of the present steps.

        scheduler: The scheduler, or None.

        next_check: The number of the own step, from 1, that is checked next.

        is_check_requested: Whether the next step is checked, besides those that are planned.

        is_scheduled_by_loop: Whether the loop steps the scheduler, and no step of the trainer does.

        initial_optimizer_values: What the optimizer kept in itself before the first step.

        steps: The number of completed steps.

        own_steps: The number of steps that this trainer made.

        batch_size: The size of the global batch, once it is known; otherwise 0.

        micro_batch_samples: The samples of the largest micro-batch of this rank; 0 before it.

        division: The division of a global batch among the replicas.

        replicas: The replicas of which this rank runs the parts.

        restored_tensors: The state that the saved strategy's exchange kept beside the optimizer's
            state.

        identity: As the argument.

        loss_scale: As the argument.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        division: Division,
        replicas: list[int],
        identity: Mapping[str, Any],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.next_check = 1
        self.is_check_requested = False
        self.is_scheduled_by_loop = False
        self.initial_optimizer_values = copy_unsaved_values(optimizer)
        self.steps = 0
        self.own_steps = 0
        self.batch_size = 0
        self.micro_batch_samples = 0
        self.division = division
        self.replicas = replicas
        self.restored_tensors: OptimizerState = {}
        self.identity = identity
        self.loss_scale = loss_scale

    @property
    def stepped_scheduler(self) -> Any:
        """The scheduler that every step steps, or None."""
        return None if self.is_scheduled_by_loop else self.scheduler

    @property
    def is_check_due(self) -> bool:
        """Whether the next step is checked."""
        return self.is_check_requested or self.own_steps + 1 == self.next_check

    def plan_check(self, own_step: int) -> None:
        """Plan the next check.

        Args:
            own_step: The number of the step in this process, from 1.
        """
        self.next_check = own_step

    def request_check(self) -> None:
        """Check the next step too, on all ranks: the last one before a checkpoint, for example."""
        self.is_check_requested = True

    def count_step(self) -> None:
        """Count a completed step."""
        self.steps = self.steps + 1
        self.own_steps = self.own_steps + 1
        self.is_check_requested = False

    def move_to(self, steps: int) -> None:
        """Set the number of completed steps.

        Args:
            steps: The number, as serial counts.
        """
        self.steps = steps

    def restore(self, steps: int, tensors: OptimizerState) -> None:
        """Take over the counters of a checkpoint.

        Args:
            steps: The number of completed steps.
            tensors: The tensors that the saved strategy's exchange kept.
        """
        self.steps = steps
        self.restored_tensors = tensors

    def use_batch_size(self, batch_size: int) -> None:
        """Set the size of the global batch.

        Args:
            batch_size: The number of samples.
        """
        self.batch_size = batch_size

    def keep_micro_batch(self, samples: int) -> None:
        """Keep the size of the largest micro-batch.

        Args:
            samples: The number of its samples on this rank.
        """
        self.micro_batch_samples = samples

    def use_division(self, division: Division) -> None:
        """Divide global batches otherwise from here on.

        Args:
            division: The division.
        """
        self.division = division

    def use_replicas(self, replicas: list[int]) -> None:
        """Run the parts of other replicas from here on.

        Args:
            replicas: The indices of the replicas.
        """
        self.replicas = replicas

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with another optimizer from here on.

        Args:
            optimizer: The optimizer over the same model.
        """
        self.optimizer = optimizer

    def leave_scheduler_to_loop(self) -> None:
        """Let the loop step the scheduler from here on."""
        self.is_scheduled_by_loop = True

    def allow_early_scheduling(self) -> None:
        """Let the scheduler step before the optimizer does, without a warning of torch."""
        self.optimizer._opt_called = True


class Training:
    """One rank's training: its setup, its state, and the step.

    It is the host of the passes (`engine.passes.PassesHost`).

    Args:
        world: The ranks.

        model: The model, on the world's device.

        loss: The loss.

        optimizer: The optimizer over the model.

        strategy: The resolved strategy.

        options: What else is requested.

        scheduler: The scheduler, as in Job.

        initial_model: How the model reached this rank, if it is to be partitioned.

    Attributes:
        options: As the argument.

        setup: What strategy and model are resolved to.

        state: What changes from step to step.

        feed: The feed of batches.

        log: The log of steps and spans.

        observers: The observers of each step, in order.

        user_model: Watches the model of a user's own loop; None for a Job.

        shared_hosts: The hosts on which ranks share the model's values until it is partitioned, or
            None.

        checker: Builds exchange and passes before the first step, and compares steps.

        draw_alike: Runs a function with the same draws on every rank.

        noise: The norms by which gradient noise is measured.

        monitor: The monitor of ranks that other ranks wait for.

        is_exact_split: Whether an exact strategy splits the batch, so that its step is checked.

        rehearsing: Whether the current step is a rehearsal, which is restored.

        used_autocast: Whether the passes of the current step used autocast.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        options: TrainerOptions,
        scheduler: Any = None,
        initial_model: InitialModel | None = None,
    ) -> None:
        self.options = options
        self.log = StepLog(options.record)
        self.shared_hosts = initial_model.record_choice(self.log, world) if initial_model else None
        rank_world = place_rank(strategy, world)
        samples_world = rank_world.select_dividing_axes("samples")
        division = strategy.division
        share_count = len(division.shares)
        self.is_exact_split = (
            strategy.exact
            and not options.skip_first_step_check
            and (world.size > 1 or division.micro > 1)
        )
        self.state = TrainingState(
            optimizer,
            scheduler,
            division,
            [samples_world.rank % share_count],
            {"seed": options.seed}
            | ({} if options.is_validated else {"model": describe_callable(model)}),
            LossScale() if options.autocast == torch.float16 else None,
        )
        self.setup = Setup(
            world,
            rank_world,
            samples_world,
            strategy,
            LossModule(model, loss),
            BatchNorm(
                samples_world,
                model,
                self._count_batch_norm_bytes,
                local_statistics=strategy.batch_norm == "share",
            ),
            Layout(),
            model,
            refuses_new_draws=self.is_exact_split and strategy.changes_layout,
        )
        self.feed = BatchFeed(self.log, world.device, options.dtype or find_shared_dtype(model))
        self.observers = StepObservers()
        self.user_model = None if options.is_validated else UserModel(model, optimizer)
        self.checker: StepChecks | None = None
        self.draw_alike = ReplicatedDraws(options.seed, world.device)
        self.noise = GradientNorms(self.setup.trained_tensors, options.noise_interval)
        self.monitor = StragglerMonitor(rank_world, strategy.guarantees.replicas_equal)
        self.rehearsing = False
        self.used_autocast = False
        # Draws from here on differ by rank.
        generators.seed_everything(options.seed + 1 + world.rank)

    # ---- the step ----------------------------------------------------------------------------
    def make_step(self, inputs: Any, target: Any) -> StepResult:
        """Make a step on the last batch of the feed.

        Args:
            inputs: The inputs, or the dict.
            target: The target; None if the samples are dicts.

        Returns:
            The result of the step.

        Raises:
            StepFailed: With the step and the tensor.
        """
        state, checker, is_check_due = self.state, self.checker, self.state.is_check_due
        assert checker is not None
        update_start = 0.0
        try:
            batch = self.feed.take_batch(inputs, target)
            target = inputs if target is None else target
            self.monitor.start_step(state.steps)
            if self.setup.layout.is_partitioned and self.user_model is not None:
                self.user_model.follow_changes(self.module.model, self.setup.passes)
            if self.setup.exchange is None:
                checker.set_up(batch, inputs, target)
            elif is_check_due:
                checker.prepare(batch, inputs, target)
            sums = self.compute_gradients(batch, inputs, target, self.observers.pass_observers)
            sums, totals = self.share_totals(sums)
            update_start = time.monotonic()
            weight, doubtful_weight = totals.weight, totals.doubtful_weight
            if doubtful_weight:
                weight = checker.resolve_weight(batch, inputs, target, weight, doubtful_weight)
            loss = self.take_mean(sums, totals, weight)
            for each in self.observers.gradient_observers:
                each.observe_mean_gradients(loss, weight)
            if is_check_due:
                checker.compare_gradients(loss, weight)
            is_skipped = state.loss_scale is not None and self._find_overflow()
            if is_skipped:
                self.exchange.skip_update()
            else:
                self.draw_alike("update", state.steps, self.exchange.update)
            if is_check_due:
                checker.compare_update(is_skipped)
            if state.stepped_scheduler is not None:
                self.draw_alike("schedule", state.steps, state.stepped_scheduler.step)
        except Exception as error:
            self.monitor.end_step()
            if update_start:
                self.log.end_span("update", "update", update_start)
            cause = error if self.setup.exchange is None else self.exchange.find_cause(error)
            raise self.report_failure(cause, self.setup.strategy.trains_clients) from cause
        finally:
            self.monitor.end_step()
        self.log.end_span("update", "update", update_start)
        stop_requests = totals.stop_requests + self.exchange.stop_requests
        result = StepResult(loss, weight, stop_requests > 0)
        self._finish_step(batch, sums)
        return result

    def compute_gradients(
        self, batch: Batch, inputs: Any, target: Any, observers: Sequence[StepObserver] = ()
    ) -> LossSums:
        """Compute the gradients of a batch, summed over micro-batches, replicas and shared tensors.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs of that part.
            target: The target of that part.
            observers: The observers that may have a context around the passes.

        Returns:
            This rank's own sums of the loss.
        """
        setup, exchange = self.setup, self.exchange
        passes = setup.passes
        assert passes is not None
        # This includes parameters that the optimizer does not hold.
        for parameter in setup.trained_tensors:
            parameter.grad = None
        exchange.start_step(setup.world.stop.is_requested, batch.own_samples, batch.epoch)
        if setup.layout.is_partitioned:
            setup.layout.reset_sent_bytes()
        divisor = self.choose_divisor(batch)
        # a rehearsal runs without autocast
        loss_scale = None if self.rehearsing else self.state.loss_scale
        scale = 1.0 if loss_scale is None else loss_scale.value
        self.used_autocast = False
        # a module that an exchange wraps around it computes with shares
        leaves_factor = passes.leaves_factor and exchange.module is setup.module
        setup.module.start_passes(divisor, scale, leaves_factor)
        micro_batches = batch.iterate_micro_batches(inputs, target)
        try:
            # most steps have no contexts, and an empty one takes microseconds
            if contexts := self._list_contexts(batch, observers):
                with enter_contexts(contexts):
                    sums = run_passes(passes, micro_batches, len(batch.micro_batches))
            else:
                sums = run_passes(passes, micro_batches, len(batch.micro_batches))
        finally:
            setup.module.end_passes()
        if self.options.autocast is not None and not self.rehearsing and not self.used_autocast:
            raise StepFailed(
                f"the passes of {setup.strategy} leave autocast out; make every forward "
                "host.use_autocast()"
            )
        # The sums over ranks end here; DDP began them during backward.
        exchange.finish_passes(sums.weight, sums.loss, setup.module.doubtful_total)
        if setup.layout.is_partitioned:
            setup.layout.sum_shared_gradients(setup.parameters)
        return LossSums(sums.loss, sums.weight, divisor, scale)

    def choose_divisor(self, batch: Batch) -> float | None:
        """Choose by what the passes divide the sums of micro-batches.

        Before all weights are known, the mean over several parts cannot be taken. So the passes
        divide by what all ranks know: the samples of the global batch, times a power of two near
        the weight of a sample. Hooks then see gradients of the right size. A power of two rounds
        nothing.

        Args:
            batch: This rank's part of the global batch.

        Returns:
            The divisor. None if this rank's part is the whole batch, in one micro-batch; backward
            then runs on what the loss returned.
        """
        state, exchange = self.state, self.setup.exchange
        has_own_mean = (exchange is not None and exchange.steps_alone) or (
            len(state.replicas) == len(state.division.shares)
        )
        if has_own_mean and len(batch.micro_batches) == 1:
            return None
        probe = self.options.validation_probe or self.setup.probe
        count = batch.own_samples if has_own_mean else len(batch.sample_indices)
        return (count or 1) * ((probe.sample_weight if probe else 0.0) or 1.0)

    def take_mean(self, sums: LossSums, totals: Totals, weight: float) -> float:
        """Turn the summed gradients into those of the mean over the global batch.

        Args:
            sums: The sums of this rank's share.
            totals: The totals of all ranks.
            weight: The global weight.

        Returns:
            The mean loss.
        """
        divisor = sums.used_divisor
        self.exchange.average_step(weight, divisor, totals.stop_requests > 0)
        return totals.loss / (weight / divisor if weight else 1.0)

    def _find_overflow(self) -> bool:
        """Return whether a mean gradient of any rank overflowed, and adapt the loss scale.

        Collective. The update of such a step is skipped on all ranks.

        Raises:
            StepFailed: Gradients overflow at the least scale too.
        """
        loss_scale, world = self.state.loss_scale, self.world
        assert loss_scale is not None
        flag = torch.tensor([float(has_overflow(self.state.optimizer))])
        overflowed = bool(world.all_reduce(flag, "MAX"))
        used_scale = loss_scale.value
        loss_scale.update(overflowed)
        if overflowed and world.rank == 0:
            self.log.write_event(
                "overflow",
                f"step {self.state.steps} was skipped: a gradient overflowed in float16; the loss "
                f"scale went from {used_scale:g} to {loss_scale.value:g}",
                step=self.state.steps,
                scale=loss_scale.value,
            )
        if loss_scale.is_exhausted:
            raise StepFailed(
                "gradients are not finite at the least loss scale either, so a larger scale is not "
                "the cause; lower the learning rate, or train in bfloat16 or float32"
            )
        return overflowed

    def _list_contexts(
        self, batch: Batch, observers: Sequence[StepObserver]
    ) -> list[AbstractContextManager[Any]]:
        """List the contexts around the passes of a step; most steps need none."""
        setup, exchange = self.setup, self.exchange
        contexts: list[AbstractContextManager[Any]] = []
        if (
            self.state.own_steps < COUNTED_STEPS
            and not self.rehearsing
            and exchange.shard_layout is None
            and setup.coarsest_eps
            and setup.passes is not None
        ):
            contexts.append(setup.passes.count_activations(setup.model))
        if setup.copied_parameters or exchange.sharing_ranks > 1:
            contexts.append(
                refuse_moved_parameters(exchange, setup.parameters, setup.copied_parameters)
            )
        if setup.layout.is_partitioned and self.is_exact_split and self.state.is_check_due:
            contexts.append(check_seen_draws(setup.draws))
        for each in observers:
            if (context := each.surround_passes(batch)) is not None:
                contexts.append(context)
        if setup.pass_contexts:
            contexts.append(enter_pass_contexts(setup.pass_contexts, exchange.count_bytes))
        return contexts

    def share_totals(self, sums: LossSums) -> tuple[LossSums, Totals]:
        """Share the sums of the rank that has the loss with all ranks of its replica.

        Collective. A request to stop is shared with all ranks.

        Args:
            sums: This rank's own sums.

        Returns:
            The sums of this rank's share, and the totals of all ranks.
        """
        layout = self.setup.layout
        if layout.is_partitioned:
            with self.log.record_detail("wait for loss", "wait"):
                rank_numbers = layout.share_numbers(
                    [sums.loss, sums.weight, *check_totals(self.exchange)]
                )
            check_loss_ranks([each[1] for each in rank_numbers], layout.output_rank_count)
            loss, weight, *numbers = rank_numbers[0]
            totals = Totals(*numbers)
            stop_requests = max(Totals(*each[2:]).stop_requests for each in rank_numbers)
            totals = totals._replace(stop_requests=stop_requests)
            sums = LossSums(loss, weight, sums.divisor, sums.scale)
        else:
            totals = check_totals(self.exchange)
        self.exchange.keep_weight_share(sums.weight / (totals.weight or 1.0))
        return sums, totals

    def _finish_step(self, batch: Batch, sums: LossSums) -> None:
        setup = self.setup
        if setup.layout.is_partitioned:
            self.exchange.count_bytes("parts", setup.layout.sent_bytes, computed=True)
            if self.user_model is not None and setup.passes is not None:
                self.user_model.write_back_numbers(setup.passes.collect_python_numbers())
        # The first step frees the reference step's memory, and the whole model.
        if self.state.own_steps == 0:
            allocator.return_freed_memory()
        if self.observers.observers:
            own_sums = LossSums(sums.loss * sums.used_divisor, sums.weight)
            for each in self.observers.observers:
                each.finish(batch, own_sums)
        self.state.count_step()

    # ---- what passes ask their host ----------------------------------------------------------
    @property
    def exchange(self) -> Exchange:
        """The exchange; it exists from the first step on."""
        assert self.setup.exchange is not None
        return self.setup.exchange

    @property
    def world(self) -> World:
        """The world of this rank."""
        return self.setup.world

    @property
    def watched_parameters(self) -> Mapping[str, Tensor]:
        """The parameters that no backward pass may change, by name."""
        return self.setup.watched_parameters

    @property
    def module(self) -> LossModule:
        """Model and loss, or this rank's part of the model and the loss."""
        return self.setup.module

    @property
    def batch_norm(self) -> BatchNorm:
        """The batch norms of the model."""
        return self.setup.batch_norm

    @property
    def draws(self) -> Draws:
        """The random draws of the model."""
        return self.setup.draws

    @property
    def compares_steps(self) -> bool:
        """Whether steps are compared with one worker's."""
        return self.is_exact_split and self.options.check_share > 0

    @property
    def is_plain(self) -> bool:
        """Whether one worker makes the steps of a plain loop: nothing is split or exchanged."""
        return self.setup.full_world.size == 1 and self.state.division.is_undivided

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return self.options.seed

    def key_draws(
        self, micro: MicroBatch, first_call: int = 0, call_numbers: CallNumbers | None = None
    ) -> AbstractContextManager[Any]:
        """Key random draws of forward and backward by each sample's place in the global batch.

        If draws depend on the layout, a draw that the first step did not make ends the run.

        Args:
            micro: The micro-batch.
            first_call: As in `engine.rng.draws.KeyedDraws`.
            call_numbers: As in `engine.rng.draws.KeyedDraws`.
        """
        setup, state = self.setup, self.state
        return key_draws(
            setup.draws,
            self.options.seed,
            state.steps,
            micro.places[: len(micro.positions)],
            always=True,
            strict=setup.refuses_new_draws,
            first_call=first_call,
            call_numbers=call_numbers,
            has_all_samples=state.division.is_undivided,
        )

    def use_autocast(self) -> AbstractContextManager[Any]:
        """Use the training's autocast, if there is any and the step is no rehearsal."""
        self.used_autocast = True
        is_off = self.options.autocast is None or self.rehearsing
        return (
            NO_CONTEXT if is_off else torch.autocast(self.world.device.type, self.options.autocast)
        )

    # ---- the setup ---------------------------------------------------------------------------
    def adopt_setup(self, setup: Setup) -> None:
        """Train with another setup from here on.

        Args:
            setup: The setup, with a part of the model, an exchange, or passes.
        """
        if setup.model is not self.setup.model:
            setup.batch_norm.adopt_model(setup.model)
        self.setup = setup

    def adopt_probe(self, probe: Probe, samples: int) -> None:
        """Keep what a forward and a backward of a first micro-batch showed.

        Args:
            probe: What the ranks found together.
            samples: The samples of the largest micro-batch of this rank.
        """
        self.setup = replace(self.setup, draws=probe.draws, probe=probe)
        self.state.keep_micro_batch(samples)
        self.module.adopt_findings(probe.weight_known, probe.is_linear)

    def adopt_checker(self, checker: StepChecks) -> None:
        """Let this object build exchange and passes, and compare steps.

        Args:
            checker: The checker.
        """
        self.checker = checker

    def add_observer(self, observer: StepObserver) -> None:
        """Let an observer look at each step.

        Args:
            observer: The observer; those that were added before are called before it.
        """
        self.observers.add(observer)

    def use_exchange_options(self, exchange_options: ExchangeOptions) -> None:
        """Build the exchange with other options.

        Args:
            exchange_options: The options.
        """
        self.options = replace(self.options, exchange_options=exchange_options)

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[None]:
        """Mark what happens in this context as a rehearsal; its spans are not recorded."""
        span_count = len(self.log.spans)
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False
            self.log.forget_spans(span_count)

    def _count_batch_norm_bytes(self, payload: int, ranks: int) -> None:
        if self.setup.exchange is not None:
            self.exchange.count_bytes(
                "batch_norm", count_collective_bytes("all_gather", payload, ranks), computed=True
            )

    # ---- the end -----------------------------------------------------------------------------
    def report_failure(self, error: Exception, is_local: bool = False) -> StepFailed:
        """Record a failed step, and return its error.

        Args:
            error: The error.
            is_local: Whether no other rank had a part in it.

        Returns:
            The error to raise.
        """
        self.log.write_failed_step(self.state.steps)
        return (
            StepFailed.wrap_error(error, self.state.steps)
            if is_local
            else make_step_failure(self.setup.full_world, error, self.state.steps)
        )

    def close(self) -> None:
        """Close the exchange; the model is a plain one again."""
        self.monitor.close()
        self.log.write_failed_step(self.state.steps)  # spans that belong to no step
        for each in (self.setup.passes, self.setup.exchange, self.noise):
            if each is not None:
                each.close()
