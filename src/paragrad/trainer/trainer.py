"""Trainer: one rank's model, and the step that reads like the sentence

    batch -> loss -> gradients -> exchange -> update

`loop.py` drives it for Jobs, `commands/parallelize.py` gives it to people who own their loop.
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
    """A step's outcome, the same on every rank: the mean loss of the global batch, and its
    weight (samples or tokens); of replicas that step alone, each one's own. stop: some rank was
    asked to stop.
    """

    loss: float
    weight: float
    stop: bool = False


class Trainer:
    """One rank of a resolved strategy, over a model on the world's device.

    scheduler, clip_norm, collate: as in Job;  autocast: the type that forward and loss are
    computed in, or None;  dtype: what inputs are brought to, otherwise what the model's real
    parameters share;  record: where steps and spans go, or None;  how: exchanges go;  like:
    compute what one worker must to be compared with that strategy (the union of all ranks'
    parts, micro-batch by micro-batch);  reverse: each micro-batch in reverse order (the
    rounding twin);  examined: the loss was looked at, at the door;  otherwise it is before the
    first step;  unchecked: do not compare the first step with one worker's, and go on where
    draws depend on the layout;  seen: what a look at the model showed at the door;  begun: how
    the model came here, where it is cut;  tests: before the first step of one that is cut a
    test is compared;  pace: whether this rank is slowed on purpose;  noise: as in
    GradientNorms.
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
        # without steps
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
        # where the ranks of one have the model in one place
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
        # of the ranks with one share, the one that records it
        self.is_share_leader = self.world.is_first("samples")
        self.is_exact_split = (
            strategy.exact
            and not compared_strategy
            and not skip_first_step_check
            and (world.size > 1 or self.division.micro > 1)
        )
        self.parameters = dict(model.named_parameters())
        self.precision = find_coarsest_dtype(model)
        # own loops
        self.module = LossModule(model, loss)
        self.model_identity = {} if loss_checked else {"model": describe_callable(model)}
        self.dtype, self.all_parameters = (
            dtype or find_shared_dtype(model),
            list(self.module.parameters()),
        )
        # what of the model this rank holds, from the cut on; held: or its shards
        self.layout = Layout()
        self.shard_layout = self.layout
        # then, serial names of the parameters in each group of the optimizer
        self.group_names: list[list[str]] = []
        # without values once it is cut
        self.empty_model = model
        self.user_model = None if loss_checked else UserModel(model, optimizer)
        self.exchange: Exchange | None = None
        self.passes: Passes | None = None
        # where techniques cut; what they want around
        self.model_inspections = dict[str, Any]()
        self.pass_contexts = tuple[PassContext, ...]()
        self.pace = pace or Pace(SlowRanks(), seed, world.rank, world.device.type != "cpu")
        self.feed, self.straggler_watch = (
            BatchFeed(self.log, world.device, self.dtype),
            StragglerMonitor(self.world, strategy.guarantees.replicas_equal),
        )
        # taken: by this trainer;  batch_size: once known
        self.steps = 0
        self.own_steps = 0
        self.batch_size = 0
        # what exchanges of the strategy that was saved keep beside the optimizer's state
        self.restored_strategy_state: OptimizerState = {}
        # that backward keeps of a micro-batch: bytes; eps of the coarsest numbers
        self.activation_bytes = 0
        self.coarsest_eps = 0.0
        self.draws, self.draw_alike, self.noise = (
            Draws(),
            ReplicatedDraws(seed, world.device),
            GradientNorms(self.all_parameters, noise_interval),
        )
        # of the step under way, that it is one worker's; kept: what it began with
        self.step_check: StepCheck | None = None
        self.state_before_step: ModuleSnapshot | None = None
        # cast: the passes were under autocast
        self.rehearsing = False
        self.used_autocast = False
        self.batch_norm = BatchNorm(
            self.samples_world,
            model,
            self._count_batch_norm_bytes,
            local_statistics=strategy.batch_norm == "share",
        )
        # what is drawn from here on differs by rank
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
        """The trainer of a job, whose model every rank builds itself; one that is cut, one rank
        of every host.
        """
        return cls(
            strategy=strategy,
            **(build_trainer_arguments(world, job, strategy, settings or Settings()) | overrides),
        )

    def adopt_partition(self, partition: ModelPartition) -> None:
        """From here on this rank holds a part of the model."""
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
        """This rank's part of every global batch of an epoch, in the exact order: a function of
        (seed, epoch, index).

        batch: the global size;  start: begin with that batch of the epoch;  loaders: processes
        that load ahead. Gives (inputs, target), or the dict where samples are dicts, for
        `step`, which must take it before the next one. Collective where shares follow what
        ranks take.
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
            ((epoch, whole) for whole in order.list_batches(start)),
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
        """The same for chosen (epoch, positions of a global batch); places of one epoch follow
        each other.
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
                    make_rank_batch(order, epoch, whole, division, self.replicas, self.reverse)
                    for _, whole in group
                ),
                loaders,
            )

    # ---- the step ----------------------------------------------------------------------------
    def step(self, inputs: Any, target: Any = None) -> StepResult:
        """Forward, backward, exchange, update on what `batches` gave last. Raises StepFailed
        with step and tensor.
        """
        try:
            batch = self.feed.take_batch(inputs, target)
            target = inputs if target is None else target
            with self.straggler_watch.track_step(self.steps):
                prepare_step(self, batch, inputs, target)
                own = self.compute_batch_gradients(batch, inputs, target)
                own, result, rate = self._update(batch, inputs, target, own)
        except Exception as error:
            cause = error if self.exchange is None else self.exchange.find_cause(error)
            raise self.report_failure(cause, is_local=self.strategy.trains_clients) from cause
        assert self.exchange is not None
        if self.layout.is_partitioned:
            self.exchange.count_bytes("parts", self.layout.sent_bytes, computed=True)
            if self.user_model is not None and self.passes is not None:
                self.user_model.write_back_numbers(self.passes.collect_python_numbers())
        # what the step was compared with, and a whole model
        allocator.return_freed_memory(self.own_steps == 0)
        mine, order = (
            (own, batch.recorded_range)
            if self.is_share_leader and not self.exchange.already_applied
            else (LossSums(), [0, 0])
        )
        self.log.write_step(
            self.steps,
            self.feed.load_start,
            epoch=batch.epoch,
            loss=[mine.loss, mine.weight],
            order=order,
            lr=rate,
            sent=dict(self.exchange.sent_bytes),
            **self.noise.record_entry,
        )
        self.steps = self.steps + 1
        self.own_steps = self.own_steps + 1
        return result

    def compute_batch_gradients(self, batch: Batch, inputs: Any, target: Any) -> LossSums:
        """Summed over micro-batches, replicas and owners; this rank's own sums."""
        assert self.exchange is not None
        assert self.passes is not None
        # also those that the optimizer does not hold
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
        looked = (
            None
            if self.rehearsing
            or self.own_steps >= COUNTED_STEPS
            or self.exchange.shard_layout
            or not self.coarsest_eps
            else self.model
        )
        still = refuse_moved_parameters(
            self.exchange, self.parameters, self.layout, self.samples_world.size
        )
        late = check_seen_draws(
            self.draws,
            self.layout.is_partitioned
            and self.is_exact_split
            and (self.own_steps + 1).bit_count() == 1,
        )
        paced = (
            contextlib.nullcontext()
            if self.rehearsing
            else self.pace.pace_step(self.steps, samples, share, self.passes)
        )
        with (
            count_activations(self.passes, looked),
            still,
            late,
            paced,
            enter_pass_contexts(self.pass_contexts, self.exchange.count_bytes),
        ):
            own = run_passes(
                self.passes, batch.iterate_micro_batches(inputs, target), len(batch.micro_batches)
            )
        if self.autocast is not None and not self.rehearsing and not self.used_autocast:
            raise StepFailed(
                f"the passes of {self.strategy} leave autocast out; make every forward "
                f"within.casting()"
            )
        self.exchange.doubtful_weight = self.module.doubtful_total
        self.exchange.finish(own.weight, own.loss)
        self.layout.sum_shared_gradients(self.parameters)
        return own

    def share_totals(self, local_sums: LossSums) -> tuple[LossSums, list[float]]:
        """(own sums of this rank's share, [weight, loss, ranks asked to stop, doubtful weight]
        of all), as who has the loss tells; of the wish to stop all hear. Collective.
        """
        assert self.exchange is not None
        with (
            self.log.record_detail("told", "wait")
            if self.layout.is_partitioned
            else contextlib.nullcontext()
        ):
            told = self.layout.share_numbers(
                [local_sums.loss, local_sums.weight, *check_totals(self.exchange)]
            )
        check_loss_ranks([each[1] for each in told], self.layout.output_rank_count)
        loss, weight, *sums = told[0]
        sums[2], self.exchange.weight_share = (
            max(each[4] for each in told),
            weight / (sums[0] or 1.0),
        )
        return local_sums._replace(loss=loss, weight=weight), sums

    def _update(
        self, batch: Batch, inputs: Any, target: Any, local_sums: LossSums
    ) -> tuple[LossSums, StepResult, float]:
        """The one division by the global weight, then clipping, the optimizer and the
        scheduler: as serial. Returns the share's own sums, the result and the learning rate of
        this update.
        """
        assert self.exchange is not None
        local_sums, (weight, loss, stop, doubt) = self.share_totals(local_sums)
        with self.log.record_span("update", "update"):
            weight = resolve_doubtful_weight(self, batch, inputs, target, weight, doubt)
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
        """Around forward and backward: what is drawn is keyed by each sample's place in the
        global batch; where that depends on the layout, a draw that the first step did not make
        ends the run. first, calls: as Keyed has them.
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
        self.used_autocast = True
        off = self.autocast is None or self.rehearsing
        return (
            contextlib.nullcontext()
            if off
            else torch.autocast(self.world.device.type, self.autocast)
        )

    # ---- what others look at -----------------------------------------------------------------
    def evaluate(self, dataset: Dataset, metric: Metric | None = None, loaders: int = 0) -> float:
        """The metric over a dataset (or, without one, the loss): every sample once, over all
        ranks. Collective.
        """
        return self.evaluate_with_weight(dataset, metric, loaders)["value"]

    def evaluate_with_weight(
        self,
        dataset: Dataset,
        metric: Metric | None = None,
        loaders: int = 0,
        part: tuple[int, int] | None = None,
    ) -> dict[str, float]:
        """The same with the weight it stands on: {"value", "weight"}. part: (which, of how
        many), where it is told.
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
        """Parameters in the eval mode of an optimizer that has one (schedule-free); afterwards
        as they were. Collective.
        """
        return (
            self.exchange.use_evaluation_weights()
            if self.exchange
            else use_optimizer_eval_mode(self.optimizer, list(self.parameters.values()))
        )

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model as what the run stands for, where replicas differ; afterwards as it was.
        Collective.
        """
        return self.exchange.use_effective_weights() if self.exchange else contextlib.nullcontext()

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter as the last update used it (mean, clipped); until any
        rank begins the next step. Collective where this rank holds parts, as `state` is.
        """
        assert self.exchange is not None
        return self.shard_layout.gather_serial_tensors(self.exchange.gather_gradients())

    def gather_model(self) -> nn.Module:
        """The model, put together on rank 0 where ranks hold parts. Collective."""
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
        """What is on this rank: parameters, and buffers unless the strategy lets them differ by
        rank.
        """
        buffers = dict(self.model.named_buffers()) if self.strategy.guarantees.buffers_equal else {}
        return {
            **{name: parameter.detach() for name, parameter in self.parameters.items()},
            **buffers,
        }

    def state(self) -> dict[str, Tensor]:
        """The same of the whole model, as what the run stands for."""
        with self.use_effective_weights():
            # the run's, in here
            buffers = (
                {} if self.strategy.guarantees.replicas_equal else dict(self.model.named_buffers())
            )
            found = self.shard_layout.gather_serial_tensors(
                {
                    **self.get_local_tensors(),
                    **{name: each.detach() for name, each in buffers.items()},
                }
            )
            return {name: tensor for name, tensor in found.items() if tensor is not None}

    def save(
        self, folder: str | Path, identity: dict[str, Any] | None = None, **extra_state: Any
    ) -> None:
        """Write a checkpoint of this step below a folder, and keep the one before it. beside:
        as in Snapshot. Collective.
        """
        trainer_snapshot.save_snapshot(self, Path(folder), identity, extra_state)

    def load(self, folder: str | Path) -> None:
        """Go on from the newest whole checkpoint below a folder, saved under any strategy:
        `trainer.steps` steps were made. Collective: rank 0 chooses, and every rank reads that
        one. Raises Refused.
        """
        trainer_snapshot.restore_snapshot(
            self, agree_on_newest_checkpoint(self.world, Path(folder))
        )

    # own: no other rank had a part in it
    def report_failure(self, error: Exception, is_local: bool = False) -> StepFailed:
        self.log.write_failed_step(self.steps)
        return (
            StepFailed.wrap_error(error, self.steps)
            if is_local
            else make_step_failure(self.full_world, error, self.steps)
        )

    def close(self) -> None:
        """Let go of the exchange; the model is a plain one again."""
        self.straggler_watch.close()
        self.log.write_failed_step(self.steps)  # spans that no step took
        for each in (self.passes, self.exchange, self.noise):
            if each is not None:
                each.close()
