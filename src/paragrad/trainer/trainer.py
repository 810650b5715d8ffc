"""The Trainer: one rank's model, and its training step.

    batch -> loss -> gradients -> exchange -> update

`loops/synchronous.py` drives it for Jobs. `commands/parallelize.py` gives it to users that have
their own loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import (
    Collate,
    Dataset,
    Samples,
    refuse_loader,
    wrap_collate_if_needed,
)
from paragrad.datasets.sample_order import SampleOrder
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import (
    Exchange,
    ExchangeOptions,
    check_totals,
    refuse_moved_parameters,
)
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.layout import Layout, OptimizerState, build_filled_model
from paragrad.engine.model_shard import PassContext, enter_pass_contexts
from paragrad.engine.optimizer.modes import use_optimizer_eval_mode
from paragrad.engine.optimizer.optimizer_state import copy_optimizer_attributes
from paragrad.engine.optimizer.update_probe import ReplicatedDraws
from paragrad.engine.passes import COUNTED_STEPS, LossSums, Passes, count_activations, run_passes
from paragrad.engine.probe import Probe, use_model_eval_mode
from paragrad.engine.rng.draws import CallNumbers, Draws, check_seen_draws, key_draws
from paragrad.engine.state import shared_initialization
from paragrad.engine.state.preserve_state import ModuleSnapshot
from paragrad.errors import StepFailed
from paragrad.jobs.fingerprint import describe_callable
from paragrad.jobs.job import Job
from paragrad.jobs.loss import Loss, LossModule
from paragrad.jobs.precision import find_coarsest_dtype, find_shared_dtype
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.record import Recorder
from paragrad.record.step_log import StepLog
from paragrad.runtime import allocator, generators
from paragrad.runtime.stragglers import StragglerMonitor, make_step_failure
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division, MicroBatch
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.batch import Batch, make_rank_batch
from paragrad.trainer.batch_feed import BatchFeed
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.checkpoint.checkpoint_files import agree_on_newest_checkpoint
from paragrad.trainer.evaluation import Metric, choose_evaluation_batch, evaluate_dataset
from paragrad.trainer.first_step.setup import (
    check_step_outcome,
    prepare_step,
    resolve_doubtful_weight,
)
from paragrad.trainer.first_step.step_check import StepCheck
from paragrad.trainer.model_partition import (
    ModelPartition,
    build_trainer_arguments,
    check_loss_ranks,
    place_rank,
)
from paragrad.trainer.pace import Pace, SlowRanks
from paragrad.trainer.parameter_access import UserModel
from paragrad.trainer.settings import Settings


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    Attributes:
        loss: The mean loss of the global batch; of replicas that step alone, of the replica's part.

        weight: The weight of the mean (samples or tokens), likewise.

        stop: Whether a stop was requested on any rank.
    """

    loss: float
    weight: float
    stop: bool = False


class Trainer:
    """One rank of a resolved strategy, over a model on the world's device.

    Args:
        world: The ranks.

        model: The model.

        loss: The loss.

        optimizer: The optimizer over the model.

        strategy: The resolved strategy.

        seed: The seed of the training.

        scheduler: The scheduler, as in Job.

        clip_norm: The norm to which gradients are clipped, as in Job.

        autocast: The type of forward and loss under autocast, or None.

        collate: The collate function, as in Job.

        dtype: The type of real inputs; the default is the type that the model's real parameters
            share.

        record: The record of steps and spans, or None.

        exchange_options: The options of the exchange.

        compared_strategy: Make one worker's step in a form that can be compared with this strategy:
            the union of all ranks' parts, micro-batch by micro-batch.

        reverse: Whether each micro-batch is reversed (the rounding baseline).

        loss_checked: Whether validation checked the loss; otherwise it is checked before the first
            step.

        skip_first_step_check: Do not compare the first step with one worker's, and go on if random
            draws depend on the layout.

        validation_probe: The probe of the model during validation, or None.

        initial_model: How the model reached this rank, if it is to be partitioned.

        has_tests: Whether a test is compared before the first step of a partitioned model.

        pace: The pace of this rank, if it is slowed on purpose.

        noise_interval: The steps between two measurements of gradient noise, as in GradientNorms.

    Attributes:
        full_world: All ranks, with servers.

        world: The world of this rank, with the axes of the strategy.

        is_server: Whether this rank is a server, which makes no steps.

        model: The model, or this rank's part of it.

        initial_optimizer_attributes: The attributes of the optimizer before the first step.

        log: The log of steps and spans.

        shared_hosts: The hosts on which the ranks share the model's values, or None.

        division: The division of a global batch among the replicas.

        samples_world: The ranks among which samples are divided.

        replicas: The replicas of which this rank runs the parts.

        is_share_leader: Whether this rank records its share; one rank of those with the share does.

        is_exact_split: Whether an exact strategy splits the batch, so that its step is checked.

        parameters: The parameters of `model`, by name.

        precision: The coarsest type of the model.

        module: Model and loss.

        model_identity: The identity of the model in the user's own loop.

        all_parameters: The parameters of `module`.

        layout: The layout of the partitioned model.

        shard_layout: The layout of the tensors that this rank holds: `layout`, or that of shards.

        group_names: The serial names of the parameters in each group of the optimizer, once the
            model is partitioned.

        empty_model: The whole model, without values once it is partitioned.

        user_model: The model of the user's own loop, or None.

        exchange: The exchange, from the first step on.

        passes: The passes, from the first step on.

        model_inspections: The places where techniques partition the model.

        pass_contexts: The contexts in which the passes run.

        feed: The feed of batches.

        straggler_watch: The monitor of ranks that other ranks wait for.

        steps: The number of completed steps.

        own_steps: The number of steps that this trainer made.

        batch_size: The size of the global batch, once it is known.

        restored_strategy_state: The state that the saved strategy's exchange kept beside the
            optimizer's state.

        activation_bytes: The bytes that backward saves of a micro-batch.

        coarsest_eps: The eps of the coarsest numbers in the model.

        draws: The random draws of the model.

        draw_alike: Runs a function with the same draws on every rank.

        noise: The norms by which gradient noise is measured.

        step_check: The check of the current step, or None.

        state_before_step: The state of the module before the current step, or None.

        rehearsing: Whether the current step is a rehearsal, which is restored.

        used_autocast: Whether the passes of the current step used autocast.

        batch_norm: The batch norms of the model.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        *,
        seed: int = 0,
        scheduler: Any = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        collate: Collate | None = None,
        dtype: torch.dtype | None = None,
        record: Recorder | None = None,
        exchange_options: ExchangeOptions | None = None,
        compared_strategy: Strategy | None = None,
        reverse: bool = False,
        loss_checked: bool = False,
        skip_first_step_check: bool = False,
        validation_probe: Probe | None = None,
        initial_model: shared_initialization.InitialModel | None = None,
        has_tests: bool = True,
        pace: Pace | None = None,
        noise_interval: int = 0,
    ) -> None:
        self.full_world = world
        self.world = place_rank(strategy, world)
        self.is_server = strategy.is_server(world.rank)
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.initial_optimizer_attributes = copy_optimizer_attributes(optimizer)
        self.seed = seed
        self.scheduler = scheduler
        self.clip_norm = clip_norm
        self.autocast = autocast
        self.collate = collate
        self.log = StepLog(record)
        self.exchange_options = exchange_options or ExchangeOptions()
        self.reverse = reverse
        self.loss_checked = loss_checked
        self.skip_first_step_check = skip_first_step_check
        self.validation_probe = validation_probe
        self.has_tests = has_tests
        self.shared_hosts = initial_model.record_choice(self.log, world) if initial_model else None
        self.division, self.samples_world = (
            (compared_strategy or strategy).division,
            self.world.select_dividing_axes("samples"),
        )
        self.replicas = (
            list(range(len(self.division.shares)))
            if compared_strategy
            else [self.samples_world.rank % len(self.division.shares)]
        )
        self.is_share_leader = self.world.is_first("samples")
        self.is_exact_split = (
            strategy.exact
            and not compared_strategy
            and not skip_first_step_check
            and (world.size > 1 or self.division.micro > 1)
        )
        self.parameters = dict(model.named_parameters())
        self.precision = find_coarsest_dtype(model)
        self.module = LossModule(model, loss)
        self.model_identity = {} if loss_checked else {"model": describe_callable(model)}
        self.dtype, self.all_parameters = (
            dtype or find_shared_dtype(model),
            list(self.module.parameters()),
        )
        self.layout = Layout()
        self.shard_layout = self.layout
        self.group_names: list[list[str]] = []
        self.empty_model = model
        self.user_model = None if loss_checked else UserModel(model, optimizer)
        self.exchange: Exchange | None = None
        self.passes: Passes | None = None
        self.model_inspections = dict[str, Any]()
        self.pass_contexts = tuple[PassContext, ...]()
        self.pace = pace or Pace(SlowRanks(), seed, world.rank, world.device.type != "cpu")
        self.feed, self.straggler_watch = (
            BatchFeed(self.log, world.device, self.dtype),
            StragglerMonitor(self.world, strategy.guarantees.replicas_equal),
        )
        self.steps = 0
        self.own_steps = 0
        self.batch_size = 0
        self.restored_strategy_state: OptimizerState = {}
        self.activation_bytes = 0
        self.coarsest_eps = 0.0
        self.draws, self.draw_alike, self.noise = (
            Draws(),
            ReplicatedDraws(seed, world.device),
            GradientNorms(self.all_parameters, noise_interval),
        )
        self.step_check: StepCheck | None = None
        self.state_before_step: ModuleSnapshot | None = None
        self.rehearsing = False
        self.used_autocast = False
        self.batch_norm = BatchNorm(
            self.samples_world,
            model,
            self._count_batch_norm_bytes,
            local_statistics=strategy.batch_norm == "share",
        )
        # Draws from here on differ by rank.
        generators.seed_everything(seed + 1 + world.rank)

    @classmethod
    def build_for_job(
        cls,
        world: World,
        job: Job,
        strategy: Strategy,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> Trainer:
        """Build the trainer of a job. Every rank builds the model, or one rank of each host.

        Args:
            world: The ranks.
            job: The job.
            strategy: The resolved strategy.
            settings: The settings, or None for the defaults.
            **overrides: Further arguments of Trainer.
        """
        return cls(
            strategy=strategy,
            **(build_trainer_arguments(world, job, strategy, settings or Settings()) | overrides),
        )

    def adopt_partition(self, partition: ModelPartition) -> None:
        """Let this rank hold a part of the model from here on.

        Args:
            partition: The part.
        """
        self.module = partition.module
        self.empty_model = partition.empty_model
        self.draws = partition.draws
        self.group_names = partition.groups
        self.layout = partition.layout
        self.pass_contexts = partition.contexts
        self.shard_layout = partition.layout
        self.model = partition.module.model
        self.batch_norm.model = self.model
        self.parameters, self.all_parameters = (
            dict(self.model.named_parameters()),
            list(self.module.parameters()),
        )

    def _count_batch_norm_bytes(self, payload: int, ranks: int) -> None:
        if self.exchange is not None:
            self.exchange.count_bytes(
                "batch_norm", count_collective_bytes("all_gather", payload, ranks), computed=True
            )

    # ---- batches -----------------------------------------------------------------------------
    def batches(
        self, dataset: Dataset, batch: int, epoch: int, *, start: int = 0, loaders: int = 0
    ) -> Iterator[Any]:
        """Return this rank's part of every global batch of an epoch, in the exact order.

        The order is a function of (seed, epoch, index). `step` must take each batch before the next
        one. Collective if shares follow the speed of the ranks.

        Args:
            dataset: The dataset.

            batch: The size of the global batch.

            epoch: The epoch.

            start: The batch of the epoch at which to start.

            loaders: The number of processes that load ahead.

        Returns:
            An iterator of (inputs, target), or of dicts if the samples are dicts.
        """
        refuse_loader(dataset, "the dataset")
        order = SampleOrder(len(dataset), batch, self.seed)
        self.batch_size = min(batch, len(dataset))
        self.strategy.refuse_small_batch(min(batch, order.samples), self.strategy)
        if self.strategy.adapts_shares:
            self.division = self.pace.update_shares(
                self.samples_world, self.batch_size, self.division, self.log, epoch
            )
        return self.iterate_batches_at(
            dataset,
            order,
            ((epoch, positions) for positions in order.list_batches(start)),
            loaders,
            self.division,
        )

    def iterate_batches_at(
        self,
        dataset: Dataset,
        order: SampleOrder,
        places: Iterable[tuple[int, range]],
        loaders: int = 0,
        division: Division | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's part of chosen global batches.

        Args:
            dataset: The dataset.

            order: The order of the samples.

            places: (epoch, positions of a global batch); places of one epoch follow each other.

            loaders: The number of processes that load ahead.

            division: The division of a global batch; None for the trainer's.
        """
        division = division or self.division
        samples = Samples(dataset, self.seed, self.collate, self.world.timeout)
        samples = (
            samples
            if self.loss_checked or not self.is_exact_split
            else wrap_collate_if_needed(samples, order.batch)
        )
        for epoch, group in groupby(places, key=lambda place: place[0]):
            yield from self.feed.iterate_batches(
                samples,
                (
                    make_rank_batch(order, epoch, positions, division, self.replicas, self.reverse)
                    for _, positions in group
                ),
                loaders,
            )

    # ---- the step ----------------------------------------------------------------------------
    def step(self, inputs: Any, target: Any = None) -> StepResult:
        """Make a step on the last batch of `batches`: forward, backward, exchange, update.

        Args:
            inputs: The inputs, or the dict.
            target: The target; None if the samples are dicts.

        Raises:
            StepFailed: With the step and the tensor.
        """
        try:
            batch = self.feed.take_batch(inputs, target)
            target = inputs if target is None else target
            with self.straggler_watch.track_step(self.steps):
                prepare_step(self, batch, inputs, target)
                local_sums = self.compute_batch_gradients(batch, inputs, target)
                local_sums, result, rate = self._update(batch, inputs, target, local_sums)
        except Exception as error:
            cause = error if self.exchange is None else self.exchange.find_cause(error)
            raise self.report_failure(cause, is_local=self.strategy.trains_clients) from cause
        assert self.exchange is not None
        if self.layout.is_partitioned:
            self.exchange.count_bytes("parts", self.layout.sent_bytes, computed=True)
            if self.user_model is not None and self.passes is not None:
                self.user_model.write_back_numbers(self.passes.collect_python_numbers())
        # The first step frees the reference step's memory, and the whole model.
        allocator.return_freed_memory(self.own_steps == 0)
        recorded_sums, order = (
            (local_sums, batch.recorded_range)
            if self.is_share_leader and not self.exchange.already_applied
            else (LossSums(), [0, 0])
        )
        self.log.write_step(
            self.steps,
            self.feed.load_start,
            epoch=batch.epoch,
            loss=[recorded_sums.loss, recorded_sums.weight],
            order=order,
            lr=rate,
            sent=dict(self.exchange.sent_bytes),
            **self.noise.record_entry,
        )
        self.steps = self.steps + 1
        self.own_steps = self.own_steps + 1
        return result

    def compute_batch_gradients(self, batch: Batch, inputs: Any, target: Any) -> LossSums:
        """Compute the gradients of a batch, summed over micro-batches, replicas and shared tensors.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs of that part.
            target: The target of that part.

        Returns:
            This rank's own sums of the loss.
        """
        assert self.exchange is not None
        assert self.passes is not None
        # This includes parameters that the optimizer does not hold.
        for parameter in self.all_parameters:
            parameter.grad = None
        self.exchange.begin()
        self.noise.begin_step(self.steps, self.rehearsing)
        samples = sum(len(each.positions) for each in batch.micro_batches)
        share = self.batch_size / len(self.division.shares) or 1.0
        self.layout.sent_bytes = 0
        self.module.doubtful_total = 0.0
        self.used_autocast = False
        self.exchange.stop_requested = self.world.stop.is_set()
        self.exchange.local_samples = samples
        self.exchange.epoch = batch.epoch
        measured_model = (
            None
            if self.rehearsing
            or self.own_steps >= COUNTED_STEPS
            or self.exchange.shard_layout
            or not self.coarsest_eps
            else self.model
        )
        moved_check = refuse_moved_parameters(
            self.exchange, self.parameters, self.layout, self.samples_world.size
        )
        draw_check = check_seen_draws(
            self.draws,
            self.layout.is_partitioned
            and self.is_exact_split
            and (self.own_steps + 1).bit_count() == 1,
        )
        pace = (
            contextlib.nullcontext()
            if self.rehearsing
            else self.pace.pace_step(self.steps, samples, share, self.passes)
        )
        with (
            count_activations(self.passes, measured_model),
            moved_check,
            draw_check,
            pace,
            enter_pass_contexts(self.pass_contexts, self.exchange.count_bytes),
        ):
            local_sums = run_passes(
                self.passes, batch.iterate_micro_batches(inputs, target), len(batch.micro_batches)
            )
        if self.autocast is not None and not self.rehearsing and not self.used_autocast:
            raise StepFailed(
                f"the passes of {self.strategy} leave autocast out; make every forward "
                "host.use_autocast()"
            )
        self.exchange.doubtful_weight = self.module.doubtful_total
        self.exchange.finish(local_sums.weight, local_sums.loss)
        self.layout.sum_shared_gradients(self.parameters)
        return local_sums

    def share_totals(self, local_sums: LossSums) -> tuple[LossSums, list[float]]:
        """Share the sums of the rank that has the loss with all ranks of its replica.

        Collective. A request to stop is shared with all ranks.

        Args:
            local_sums: This rank's own sums.

        Returns:
            The sums of this rank's share, and [weight, loss, stop requests, doubtful weight] of all
            ranks.
        """
        assert self.exchange is not None
        with (
            self.log.record_detail("told", "wait")
            if self.layout.is_partitioned
            else contextlib.nullcontext()
        ):
            rank_numbers = self.layout.share_numbers(
                [local_sums.loss, local_sums.weight, *check_totals(self.exchange)]
            )
        check_loss_ranks([each[1] for each in rank_numbers], self.layout.output_rank_count)
        loss, weight, *sums = rank_numbers[0]
        sums[2], self.exchange.weight_share = (
            max(each[4] for each in rank_numbers),
            weight / (sums[0] or 1.0),
        )
        return local_sums._replace(loss=loss, weight=weight), sums

    def _update(
        self, batch: Batch, inputs: Any, target: Any, local_sums: LossSums
    ) -> tuple[LossSums, StepResult, float]:
        """Divide once by the global weight, then clip, and step optimizer and scheduler.

        This is what serial does.

        Returns:
            The sums of this rank's share, the result, and the learning rate of this update.
        """
        assert self.exchange is not None
        local_sums, (weight, loss, stop, doubtful_weight) = self.share_totals(local_sums)
        with self.log.record_span("update", "update"):
            weight = resolve_doubtful_weight(self, batch, inputs, target, weight, doubtful_weight)
            rate = float(self.optimizer.param_groups[0]["lr"])
            self.exchange.weight = weight
            self.exchange.stop_requested = self.exchange.stop_requested or stop > 0
            if weight:
                self.exchange.average(weight * local_sums.scale)
            else:
                self.exchange.refuse_zero_weight()
            self.noise.measure_mean_gradient(self.exchange.gather_mean_gradients)
            if self.step_check is not None and not self.rehearsing:
                check_step_outcome(self, loss / weight, weight)
            self.draw_alike("update", self.steps, self.exchange.update)
            if self.scheduler is not None:
                self.draw_alike("schedule", self.steps, self.scheduler.step)
        return (
            local_sums,
            StepResult(loss / (weight or 1.0), weight, stop + self.exchange.stop_requests > 0),
            rate,
        )

    def key_draws(
        self, micro: MicroBatch, first: int = 0, calls: CallNumbers | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Key random draws of forward and backward by each sample's place in the global batch.

        If draws depend on the layout, a draw that the first step did not make ends the run.

        Args:
            micro: The micro-batch.
            first: As in `engine.rng.draws.key_draws`.
            calls: As in `engine.rng.draws.key_draws`.
        """
        strict = self.is_exact_split and self.strategy.changes_layout
        return key_draws(
            self.draws,
            self.seed,
            self.steps,
            micro.places[: len(micro.positions)],
            True,
            strict,
            first,
            calls,
        )

    def use_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Use the trainer's autocast, if there is any and the step is no rehearsal."""
        self.used_autocast = True
        is_off = self.autocast is None or self.rehearsing
        return (
            contextlib.nullcontext()
            if is_off
            else torch.autocast(self.world.device.type, self.autocast)
        )

    # ---- evaluation, state and checkpoints ---------------------------------------------------
    def evaluate(self, dataset: Dataset, metric: Metric | None = None, loaders: int = 0) -> float:
        """Evaluate the metric, or the loss if there is no metric, over all samples and ranks.

        Collective.

        Args:
            dataset: The dataset.
            metric: f(output, target) -> (sum, weight), or None for the loss.
            loaders: The number of processes that load ahead.

        Returns:
            The mean.
        """
        return self.evaluate_with_weight(dataset, metric, loaders)["value"]

    def evaluate_with_weight(
        self,
        dataset: Dataset,
        metric: Metric | None = None,
        loaders: int = 0,
        part: tuple[int, int] | None = None,
    ) -> dict[str, float]:
        """Evaluate the metric or the loss with its weight. Collective.

        Args:
            dataset: The dataset.

            metric: f(output, target) -> (sum, weight), or None for the loss.

            loaders: The number of processes that load ahead.

            part: (index, count) of this rank's part of the samples; the default is its place in the
                world.

        Returns:
            {"value", "weight"}: the mean and the weight it is over.
        """
        samples = Samples(dataset, self.seed, self.collate, self.world.timeout)
        if self.user_model is not None:
            self.user_model.follow_changes(self.model, self.passes, check_modes=False)
        with (
            self.use_evaluation_weights(),
            use_model_eval_mode(self.model),
            self.use_autocast(),
            enter_pass_contexts(self.pass_contexts),
        ):
            return evaluate_dataset(
                self.samples_world,
                self.module,
                self.passes,
                self.layout,
                samples,
                metric,
                self.dtype,
                loaders,
                choose_evaluation_batch(self.batch_size, self.strategy.division, self.replicas[0]),
                part,
            )

    def use_evaluation_weights(self) -> contextlib.AbstractContextManager[Any]:
        """Use the evaluation weights of an optimizer that has them (schedule-free), then restore.

        Collective.
        """
        return (
            self.exchange.use_evaluation_weights()
            if self.exchange
            else use_optimizer_eval_mode(self.optimizer, list(self.parameters.values()))
        )

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        """Use the weights that a run of differing replicas stands for, then restore. Collective."""
        return self.exchange.use_effective_weights() if self.exchange else contextlib.nullcontext()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of every parameter as the last update used it (mean, clipped).

        The gradients are valid until any rank begins the next step. Collective if this rank holds a
        part of the model.
        """
        assert self.exchange is not None
        return self.shard_layout.gather_serial_tensors(self.exchange.gather_gradients())

    def gather_model(self) -> nn.Module:
        """Gather the model on rank 0 if ranks hold parts of it. Collective."""
        if not self.shard_layout.is_partitioned or (
            self.layout.is_partitioned and self.samples_world.rank
        ):
            return self.empty_model
        tensors = self.shard_layout.gather_serial_tensors(
            {**self.parameters, **dict(self.model.named_buffers())}, on_all_ranks=False
        )
        return (
            build_filled_model(self.empty_model, tensors)
            if self.world.rank == 0
            else self.empty_model
        )

    def get_local_tensors(self) -> dict[str, Tensor]:
        """Return the tensors on this rank.

        These are the parameters, and the buffers unless the strategy lets them differ by rank.
        """
        buffers = dict(self.model.named_buffers()) if self.strategy.guarantees.buffers_equal else {}
        return {
            **{name: parameter.detach() for name, parameter in self.parameters.items()},
            **buffers,
        }

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the whole model, with its effective weights. Collective."""
        with self.use_effective_weights():
            # Inside this context, buffers are those of the run.
            buffers = (
                {} if self.strategy.guarantees.replicas_equal else dict(self.model.named_buffers())
            )
            tensors = self.shard_layout.gather_serial_tensors(
                {
                    **self.get_local_tensors(),
                    **{name: each.detach() for name, each in buffers.items()},
                }
            )
            return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def save(
        self, folder: str | Path, identity: dict[str, Any] | None = None, **extra_state: Any
    ) -> None:
        """Write a checkpoint of this step below a folder; the previous one is kept. Collective.

        Args:
            folder: The folder below which the checkpoint is written.
            identity: The identity of the Job; None for the user's own loop.
            **extra_state: Further entries of state.json, as in Snapshot.
        """
        trainer_snapshot.save_snapshot(self, Path(folder), identity, extra_state)

    def load(self, folder: str | Path) -> None:
        """Resume from the newest undamaged checkpoint below a folder, saved under any strategy.

        Collective: rank 0 chooses, and every rank reads that one. `trainer.steps` is then the
        number of completed steps.

        Args:
            folder: The folder of a run, or of one checkpoint.

        Raises:
            Refused: If there is no undamaged checkpoint, or if it does not fit.
        """
        trainer_snapshot.restore_snapshot(
            self, agree_on_newest_checkpoint(self.world, Path(folder))
        )

    def report_failure(self, error: Exception, is_local: bool = False) -> StepFailed:
        """Record a failed step, and return its error.

        Args:
            error: The error.
            is_local: Whether no other rank had a part in it.
        """
        self.log.write_failed_step(self.steps)
        return (
            StepFailed.wrap_error(error, self.steps)
            if is_local
            else make_step_failure(self.full_world, error, self.steps)
        )

    def close(self) -> None:
        """Close the exchange; the model is a plain one again."""
        self.straggler_watch.close()
        self.log.write_failed_step(self.steps)  # spans that belong to no step
        for each in (self.passes, self.exchange, self.noise):
            if each is not None:
                each.close()
