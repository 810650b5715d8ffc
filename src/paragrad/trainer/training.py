"""The training step on one rank.

    batch -> loss -> gradients -> exchange -> update

`Training.make_step` calls these stages in this order. What a strategy changes lies in the exchange
and the passes of `Training.setup`; what only looks at a step is an observer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import (
    Exchange,
    ExchangeOptions,
    Replica,
    check_totals,
    refuse_moved_parameters,
)
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.layout import Layout
from paragrad.engine.model_shard import enter_pass_contexts
from paragrad.engine.passes import COUNTED_STEPS, LossSums, run_passes
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
from paragrad.parallel.registry import (
    build_exchange,
    build_passes,
    check_equal_schedules,
    has_model_shards,
)
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime import allocator, generators
from paragrad.runtime.stragglers import StragglerMonitor, make_step_failure
from paragrad.runtime.world import World
from paragrad.strategies.shares import MicroBatch
from paragrad.strategies.strategy import Strategy, list_factors
from paragrad.trainer.batch import Batch
from paragrad.trainer.batch_feed import BatchFeed
from paragrad.trainer.model_partition import (
    build_model_partition,
    check_loss_ranks,
    place_rank,
)
from paragrad.trainer.parameter_access import UserModel
from paragrad.trainer.setup import Setup, TrainerOptions
from paragrad.trainer.state import TrainingState
from paragrad.trainer.step_observer import StepObserver, StepResult


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

        user_model: The model of the user's own loop, or None.

        shared_hosts: The hosts on which the ranks share the model's values, or None.

        model_inspections: The places where techniques partition the model.

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
        division = (options.compared_strategy or strategy).division
        share_count = len(division.shares)
        self.is_exact_split = (
            strategy.exact
            and not options.compared_strategy
            and not options.skip_first_step_check
            and (world.size > 1 or division.micro > 1)
        )
        self.state = TrainingState(
            optimizer,
            scheduler,
            division,
            list(range(share_count))
            if options.compared_strategy
            else [samples_world.rank % share_count],
            {"seed": options.seed}
            | ({} if options.is_validated else {"model": describe_callable(model)}),
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
        self.observers: list[StepObserver] = []
        self.user_model = None if options.is_validated else UserModel(model, optimizer)
        self.model_inspections: dict[str, Any] = {}
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
        state = self.state
        observers = [each for each in self.observers if state.is_check_due or not each.is_periodic]
        try:
            batch = self.feed.take_batch(inputs, target)
            target = inputs if target is None else target
            with self.monitor.track_step(state.steps):
                if self.setup.layout.is_partitioned and self.user_model is not None:
                    self.user_model.follow_changes(self.setup.model, self.setup.passes)
                for each in observers:
                    each.prepare(batch, inputs, target)
                sums = self.compute_gradients(batch, inputs, target, observers)
                sums, totals = self.share_totals(sums)
                with self.log.record_span("update", "update"):
                    weight = self.resolve_weight(batch, inputs, target, totals)
                    rate = float(state.optimizer.param_groups[0]["lr"])
                    self.exchange.average_step(weight, sums.scale, totals[2] > 0)
                    loss = totals[1] / (weight or 1.0)
                    for each in observers:
                        each.observe_mean_gradients(loss, weight)
                    self.draw_alike("update", state.steps, self.exchange.update)
                    if state.stepped_scheduler is not None:
                        self.draw_alike("schedule", state.steps, state.stepped_scheduler.step)
        except Exception as error:
            cause = error if self.setup.exchange is None else self.exchange.find_cause(error)
            raise self.report_failure(cause, self.setup.strategy.trains_clients) from cause
        result = StepResult(loss, weight, totals[2] + self.exchange.stop_requests > 0)
        self._finish_step(batch, sums, rate, observers)
        return result

    def compute_gradients(
        self, batch: Batch, inputs: Any, target: Any, observers: Sequence[StepObserver] = ()
    ) -> LossSums:
        """Compute the gradients of a batch, summed over micro-batches, replicas and shared tensors.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs of that part.
            target: The target of that part.
            observers: The observers of the step.

        Returns:
            This rank's own sums of the loss.
        """
        setup, exchange = self.setup, self.exchange
        passes = setup.passes
        assert passes is not None
        # This includes parameters that the optimizer does not hold.
        for parameter in setup.trained_tensors:
            parameter.grad = None
        samples = sum(len(each.positions) for each in batch.micro_batches)
        exchange.start_step(setup.world.stop.is_requested, samples, batch.epoch)
        setup.layout.reset_sent_bytes()
        setup.module.reset_doubtful_total()
        self.used_autocast = False
        with ExitStack() as stack:
            for context in self._list_contexts(batch, observers):
                stack.enter_context(context)
            sums = run_passes(
                passes, batch.iterate_micro_batches(inputs, target), len(batch.micro_batches)
            )
        if self.options.autocast is not None and not self.rehearsing and not self.used_autocast:
            raise StepFailed(
                f"the passes of {setup.strategy} leave autocast out; make every forward "
                "host.use_autocast()"
            )
        exchange.finish_passes(sums.weight, sums.loss, setup.module.doubtful_total)
        if setup.layout.is_partitioned:
            setup.layout.sum_shared_gradients(setup.parameters)
        return sums

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
        if setup.layout.is_partitioned or exchange.sharing_ranks > 1:
            contexts.append(
                refuse_moved_parameters(
                    exchange, setup.parameters, setup.layout, setup.samples_world.size
                )
            )
        if setup.layout.is_partitioned and self.is_exact_split and self.state.is_check_due:
            contexts.append(check_seen_draws(setup.draws, True))
        contexts += [each.surround_passes(batch) for each in observers]
        if setup.pass_contexts:
            contexts.append(enter_pass_contexts(setup.pass_contexts, exchange.count_bytes))
        return contexts

    def share_totals(self, sums: LossSums) -> tuple[LossSums, list[float]]:
        """Share the sums of the rank that has the loss with all ranks of its replica.

        Collective. A request to stop is shared with all ranks.

        Args:
            sums: This rank's own sums.

        Returns:
            The sums of this rank's share, and [weight, loss, stop requests, doubtful weight] of all
            ranks.
        """
        layout = self.setup.layout
        if layout.is_partitioned:
            with self.log.record_detail("told", "wait"):
                rank_numbers = layout.share_numbers(
                    [sums.loss, sums.weight, *check_totals(self.exchange)]
                )
            check_loss_ranks([each[1] for each in rank_numbers], layout.output_rank_count)
            loss, weight, *totals = rank_numbers[0]
            totals[2] = max(each[4] for each in rank_numbers)
        else:
            loss, weight, totals = sums.loss, sums.weight, check_totals(self.exchange)
        self.exchange.keep_weight_share(weight / (totals[0] or 1.0))
        return sums._replace(loss=loss, weight=weight), totals

    def resolve_weight(self, batch: Batch, inputs: Any, target: Any, totals: list[float]) -> float:
        """Return the global weight of a step; a part of the weight may stand for no sample.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs that `step` received.
            target: The target that `step` received.
            totals: [weight, loss, stop requests, doubtful weight] of all ranks.
        """
        weight, _, _, doubtful_weight = totals
        for each in self.observers if doubtful_weight else ():
            weight = each.resolve_weight(batch, inputs, target, weight, doubtful_weight)
        return weight

    def _finish_step(
        self, batch: Batch, sums: LossSums, rate: float, observers: list[StepObserver]
    ) -> None:
        setup = self.setup
        if setup.layout.is_partitioned:
            self.exchange.count_bytes("parts", setup.layout.sent_bytes, computed=True)
            if self.user_model is not None and setup.passes is not None:
                self.user_model.write_back_numbers(setup.passes.collect_python_numbers())
        # The first step frees the reference step's memory, and the whole model.
        if self.state.own_steps == 0:
            allocator.return_freed_memory()
        for each in observers:
            each.finish(batch, sums, rate)
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
        return key_draws(
            self.setup.draws,
            self.options.seed,
            self.state.steps,
            micro.places[: len(micro.positions)],
            always=True,
            strict=self.setup.refuses_new_draws,
            first_call=first_call,
            call_numbers=call_numbers,
        )

    def use_autocast(self) -> AbstractContextManager[Any]:
        """Use the training's autocast, if there is any and the step is no rehearsal."""
        self.used_autocast = True
        is_off = self.options.autocast is None or self.rehearsing
        return (
            contextlib.nullcontext()
            if is_off
            else torch.autocast(self.world.device.type, self.options.autocast)
        )

    # ---- the setup ---------------------------------------------------------------------------
    def set_up_exchange(
        self,
        has_unused_parameters: bool = False,
        example_inputs: Any = None,
        forward: Any = None,
        keeps_whole_model: bool = False,
    ) -> Exchange:
        """Partition the model if the strategy does so, and build its exchange and its passes.

        Collective.

        Args:
            has_unused_parameters: Whether a forward leaves parameters unused.
            example_inputs: The inputs of some samples, or None.
            forward: Runs model and loss once, or None.
            keeps_whole_model: Whether the whole model is needed unchanged for a comparison.

        Returns:
            The exchange.
        """
        strategy, state, options = self.setup.strategy, self.state, self.options
        check_equal_schedules(self.world, strategy)
        if has_model_shards(strategy):
            self._partition_model(example_inputs, keeps_whole_model)
        probe = options.validation_probe
        replica = Replica(
            self.module,
            state.optimizer,
            options.clip_norm,
            has_unused_parameters,
            self.setup.layout,
            forward,
            keeps_whole_model,
            state.steps,
            self.setup.layout.select_local_state(state.restored_tensors),
            state.stepped_scheduler,
            self.draw_alike,
            state.batch_size or 1,
            probe.changed_by_forward if probe else (),
            options.seed,
        )
        exchange = build_exchange(
            strategy,
            replica,
            self.setup.full_world if strategy.servers else self.world,
            self.log,
            options.exchange_options,
        )
        self.setup = replace(self.setup, exchange=exchange)
        if exchange.shard_layout is not None:
            self.setup = replace(
                self.setup,
                module=exchange.loss_module,
                empty_model=exchange.empty_model,
                pass_contexts=(),
            )
            self.batch_norm.adopt_model(self.setup.model)
        self.setup = replace(self.setup, passes=build_passes(strategy, self, exchange))
        return exchange

    def _partition_model(self, example_inputs: Any, keeps_whole_model: bool) -> None:
        """Let this rank hold a part of the model from here on. Collective."""
        strategy = self.setup.strategy
        with self.batch_norm.use_probe_mode():
            partition = build_model_partition(
                strategy,
                self.module,
                self.state.optimizer,
                self.draws,
                self.world,
                example_inputs,
                self.model_inspections,
                keep_whole=keeps_whole_model or self.user_model is not None,
            )
        self.setup = replace(
            self.setup,
            module=partition.module,
            layout=partition.layout,
            empty_model=partition.empty_model,
            draws=partition.draws,
            pass_contexts=partition.contexts,
            group_names=partition.groups,
        )
        self.batch_norm.adopt_model(self.setup.model)
        skips_calls = partition.draws.serial_calls is not None or any(
            each.skips_calls for each in list_factors(strategy)
        )
        if self.batch_norm.per_sample_calls and skips_calls:
            raise StepFailed(
                "the model has batch norms inside of samples or weights, which are known by the "
                "number of their call, and in parts calls have others; write them as "
                "instance_norm, or train it with data(n)"
            )
        for choice in partition.choices if self.world.rank == 0 else ():
            self.log.write_choice(*choice)

    def close_exchange(self) -> None:
        """Close an exchange that was only for what comes before the first step."""
        self.exchange.close()
        self.setup = replace(self.setup, exchange=None, passes=None)

    def adopt_probe(self, probe: Probe, samples: int) -> None:
        """Keep what a forward and a backward of this rank's first micro-batch showed.

        Args:
            probe: The merged probe of all ranks.
            samples: The samples of the first micro-batch of this rank.
        """
        activation_bytes = probe.activation_bytes * max(1, samples)
        self.setup = replace(
            self.setup, draws=probe.draws, probe=replace(probe, activation_bytes=activation_bytes)
        )
        self.module.adopt_findings(probe.weight_known, probe.is_linear)

    def adopt_inspections(self, inspections: dict[str, Any]) -> None:
        """Partition the model at the places that another training found.

        Args:
            inspections: The places by technique.
        """
        self.model_inspections = inspections

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
        for each in (self.setup.passes, self.setup.exchange, self.noise, *self.observers):
            if each is not None:
                each.close()
