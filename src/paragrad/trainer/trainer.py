"""The Trainer: what loops call to train, evaluate and save a model on one rank.

`loops/synchronous.py` drives it for Jobs. `commands/parallelize.py` gives it to users that have
their own loop. The step itself is `trainer/training.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import (
    Dataset,
    Samples,
    refuse_loader,
    wrap_collate_if_needed,
)
from paragrad.datasets.sample_order import SampleOrder
from paragrad.datasets.sampler import SamplerOrFunction, check_sampler
from paragrad.datasets.stream import Stream, refuse_sampled_stream
from paragrad.engine.optimizer.modes import use_optimizer_eval_mode
from paragrad.engine.passes import enter_pass_contexts
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.rng.draws import COMPILED_DRAWS
from paragrad.engine.state.shared_initialization import InitialModel, build_shared_model
from paragrad.errors import Refused
from paragrad.jobs.job import TRAINED_MODELS, Job
from paragrad.jobs.loss import Loss
from paragrad.runtime.single_group import act_alone
from paragrad.runtime.world import CPU, World
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.batch import make_rank_batch
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.checkpoint.checkpoint_files import (
    agree_on_newest_checkpoint,
    list_checkpoint_folders,
)
from paragrad.trainer.checks.step_checker import StepChecker
from paragrad.trainer.evaluation import Metric, choose_evaluation_batch, evaluate_dataset
from paragrad.trainer.evaluation_batches import choose_test_batch
from paragrad.trainer.model_partition import is_shared_per_host
from paragrad.trainer.observers import (
    LifeObserver,
    NoiseObserver,
    PaceObserver,
    RecordObserver,
)
from paragrad.trainer.pace import Pace, SlowRanks
from paragrad.trainer.settings import Settings
from paragrad.trainer.setup import TrainerOptions
from paragrad.trainer.step_observer import StepResult
from paragrad.trainer.training import Training


class Trainer:
    """What a loop calls on one rank: batches, steps, tests, checkpoints.

    The setup, the state and the step are in `training`. The model is on the world's device.

    Args:
        world: The ranks.

        model: The model.

        loss: The loss.

        optimizer: The optimizer over the model.

        strategy: The resolved strategy.

        options: What else is requested; None for the defaults.

        scheduler: The scheduler, as in Job.

        initial_model: How the model reached this rank, if it is to be partitioned.

    Attributes:
        training: The setup, the state and the step.

        checker: Sets up the exchange, and compares steps with one worker's.

        pace: The pace of this rank.

        folder: Where the user's own loop saves, or None.

        loaded_folder: The folder of the run from whose checkpoint this one goes on, or None.

        overwrites: Whether saving there removes checkpoints of later steps.

        is_open: Whether the trainer is not closed yet.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        options: TrainerOptions | None = None,
        scheduler: Any = None,
        initial_model: InitialModel | None = None,
    ) -> None:
        options = options or TrainerOptions()
        self.training = Training(
            world, model, loss, optimizer, strategy, options, scheduler, initial_model
        )
        self.checker = StepChecker(self.training)
        self.pace = options.pace or Pace(
            SlowRanks(), options.seed, world.rank, world.device.type != "cpu"
        )
        self.training.adopt_checker(self.checker)
        self.folder: Path | None = None
        self.loaded_folder: Path | None = None
        self.overwrites = False
        if strategy.adapts_shares or self.pace.slow_ranks != SlowRanks():
            self.training.add_observer(PaceObserver(self.training, self.pace))
        if options.noise_interval:
            self.training.add_observer(NoiseObserver(self.training))
        if options.record is not None:
            self.training.add_observer(RecordObserver(self.training))
        # once for the training, because asking in each step takes microseconds
        self.is_open = True
        COMPILED_DRAWS.open()

    @classmethod
    def build_for_job(
        cls,
        world: World,
        job: Job,
        strategy: Strategy,
        settings: Settings | None = None,
        **options: Any,
    ) -> Trainer:
        """Build the trainer of a job. Every rank builds the model, or one rank of each host.

        Collective. A server holds its parameters on the CPU, from where messages are sent.

        Args:
            world: The ranks.
            job: The job.
            strategy: The resolved strategy.
            settings: The settings, or None for the defaults.
            **options: Options of the trainer that job and settings do not give, by name.
        """
        settings = settings or Settings()
        if strategy.servers and world.size == strategy.size and strategy.is_server(world.rank):
            world = replace(world, device=CPU)
        if is_shared_per_host(strategy, world):
            initial_model = build_shared_model(world, job.build_model_to_train)
            TRAINED_MODELS.add(initial_model.model)
        else:
            initial_model = InitialModel(job.build_model_to_train().to(world.device))
        optimizer = job.optimizer(initial_model.model.parameters())
        trainer = cls(
            world,
            initial_model.model,
            job.build_loss(world.device),
            optimizer,
            strategy,
            replace(
                TrainerOptions(
                    seed=job.seed,
                    clip_norm=job.clip_norm,
                    autocast=job.autocast,
                    collate=job.collate,
                    dtype=job.parameter_dtype,
                    exchange_options=settings.exchange_options,
                    reverse=settings.reverse,
                    is_validated=True,
                    skip_first_step_check=settings.skip_first_step_check,
                    check_share=settings.check_share,
                    has_tests=job.test is not None,
                    pace=Pace(
                        settings.slow_ranks, job.seed, world.rank, world.device.type != "cpu"
                    ),
                    noise_interval=settings.noise_scale or 0,
                ),
                **options,
            ),
            job.scheduler(optimizer) if job.scheduler else None,
            initial_model,
        )
        trainer.training.add_observer(LifeObserver(trainer.training))
        return trainer

    # ---- what a loop reads -------------------------------------------------------------------
    @property
    def world(self) -> World:
        """The world of this rank, with the axes of the strategy."""
        return self.training.world

    @property
    def strategy(self) -> Strategy:
        """The resolved strategy."""
        return self.training.setup.strategy

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server, which makes no steps."""
        return self.strategy.is_server(self.training.setup.full_world.rank)

    @property
    def model(self) -> nn.Module:
        """The model, or this rank's part of it."""
        return self.training.setup.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the present steps."""
        return self.training.state.optimizer

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return self.training.state.steps

    # ---- batches and steps -------------------------------------------------------------------
    def batches(
        self,
        dataset: Dataset,
        batch: int,
        epoch: int,
        *,
        start: int = 0,
        loaders: int = 0,
        sampler: SamplerOrFunction | None = None,
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

            sampler: Which samples the epoch has, as in `Job`.

        Returns:
            An iterator of (inputs, target), or of dicts if the samples are dicts.
        """
        refuse_loader(dataset, "the dataset")
        training, state = self.training, self.training.state
        if not training.options.is_validated:
            if isinstance(dataset, Stream):
                dataset.refuse_changing_samples(training.seed, batch)
            if sampler is not None:
                refuse_sampled_stream(dataset)
                check_sampler(sampler, training.seed, len(dataset), epoch + 1)
        order = SampleOrder.build(dataset, batch, training.seed, sampler)
        state.use_batch_size(min(batch, order.samples))
        self.strategy.refuse_small_batch(min(batch, order.samples), self.strategy)
        if self.strategy.adapts_shares:
            state.use_division(
                self.pace.update_shares(
                    training.setup.samples_world,
                    state.batch_size,
                    state.division,
                    training.log,
                    epoch,
                )
            )
        return self.iterate_batches_at(
            dataset,
            order,
            ((epoch, positions) for positions in order.list_batches(start)),
            loaders,
            state.division,
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
        training, options = self.training, self.training.options
        division = division or training.state.division
        samples = Samples(dataset, options.seed, options.collate, self.world.timeout)
        if not options.is_validated and training.is_exact_split:
            samples = wrap_collate_if_needed(samples, order.batch)
        for epoch, group in groupby(places, key=lambda place: place[0]):
            yield from training.feed.iterate_batches(
                samples,
                (
                    make_rank_batch(
                        order, epoch, positions, division, training.state.replicas, options.reverse
                    )
                    for _, positions in group
                ),
                loaders,
            )

    def step(self, inputs: Any, target: Any = None) -> StepResult:
        """Make a step on the last batch of `batches`: forward, backward, exchange, update.

        Args:
            inputs: The inputs, or the dict.
            target: The target; None if the samples are dicts.

        Raises:
            StepFailed: With the step and the tensor.

            Refused: The folder of `parallelize` has checkpoints of another training.
        """
        if (
            self.folder is not None
            and not self.training.state.own_steps
            and not self.overwrites
            and self.loaded_folder != self.folder.resolve()
        ):
            self._refuse_full_folder(self.folder)
        return self.training.make_step(inputs, target)

    def check_next_step(self) -> None:
        """Compare the next step with one worker's, besides the steps that are compared anyway.

        All ranks call this, for example before the last step and before each step after which the
        loop saves.
        """
        self.training.state.request_check()

    def prepare_without_step(self, inputs: Any, target: Any) -> None:
        """Probe the model on the last batch, and set up the exchange, without a step. Collective.

        Args:
            inputs: The inputs.
            target: The target.

        Raises:
            StepFailed: With the tensor.
        """
        try:
            self.checker.set_up(self.training.feed.take_batch(inputs, target), inputs, target)
        except Exception as error:
            raise self.training.report_failure(error) from error

    # ---- evaluation --------------------------------------------------------------------------
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
        training, setup, state = self.training, self.training.setup, self.training.state
        samples = Samples(dataset, training.seed, training.options.collate, self.world.timeout)
        if training.user_model is not None:
            training.user_model.follow_changes(setup.model, setup.passes, check_modes=False)
        with (
            self.use_evaluation_weights(),
            act_alone(),
            use_model_eval_mode(setup.model),
            training.use_autocast(),
            enter_pass_contexts(setup.pass_contexts),
        ):
            return evaluate_dataset(
                setup,
                samples,
                metric,
                training.feed.dtype,
                loaders,
                choose_test_batch(state.batch_size),
                choose_evaluation_batch(
                    state.batch_size, self.strategy.division, state.replicas[0]
                ),
                part,
            )

    def use_evaluation_weights(self) -> contextlib.AbstractContextManager[Any]:
        """Use the evaluation weights of an optimizer that has them (schedule-free), then restore.

        Collective.
        """
        setup = self.training.setup
        return (
            setup.exchange.use_evaluation_weights()
            if setup.exchange
            else use_optimizer_eval_mode(self.optimizer, list(setup.parameters.values()))
        )

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        """Use the weights that a run of differing replicas stands for, then restore. Collective."""
        return self.training.setup.use_effective_weights()

    # ---- the whole model and checkpoints -----------------------------------------------------
    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of every parameter as the last update used it (mean, clipped).

        The gradients are valid until any rank begins the next step. Collective if this rank holds a
        part of the model.
        """
        return self.training.setup.shard_layout.gather_serial_tensors(
            self.training.exchange.gather_gradients()
        )

    def gather_model(self) -> nn.Module:
        """Gather the model on rank 0 if ranks hold parts of it. Collective."""
        return self.training.setup.gather_model()

    def get_local_tensors(self) -> dict[str, Tensor]:
        """Return the tensors on this rank.

        These are the parameters, and the buffers unless the strategy lets them differ by rank.
        """
        setup = self.training.setup
        buffers = (
            dict(setup.model.named_buffers()) if self.strategy.guarantees.buffers_equal else {}
        )
        return {
            **{name: parameter.detach() for name, parameter in setup.parameters.items()},
            **buffers,
        }

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the whole model, with its effective weights. Collective."""
        with self.use_effective_weights():
            # Inside this context, buffers are those of the run.
            buffers = (
                {} if self.strategy.guarantees.replicas_equal else dict(self.model.named_buffers())
            )
            tensors = self.training.setup.shard_layout.gather_serial_tensors(
                {
                    **self.get_local_tensors(),
                    **{name: each.detach() for name, each in buffers.items()},
                }
            )
            return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def save(
        self,
        folder: str | Path | None = None,
        identity: dict[str, Any] | None = None,
        *,
        overwrite: bool = False,
        **extra_state: Any,
    ) -> None:
        """Write a checkpoint of this step below a folder; the previous one is kept. Collective.

        Args:
            folder: The folder below which the checkpoint is written; None for that of
                `parallelize`.

            identity: The identity of the Job; None for the user's own loop.

            overwrite: Whether checkpoints of later steps, which another training left there, are
                removed.

            **extra_state: Further entries of state.json, as in Snapshot.

        Raises:
            Refused: There is no folder.

            StepFailed: The folder has a checkpoint of a later step.
        """
        folder = folder or self.folder
        if folder is None:
            raise Refused("trainer.save() needs a folder: give it here, or to pg.parallelize")
        trainer_snapshot.save_snapshot(
            self.training,
            Path(folder),
            identity,
            extra_state,
            overwrite or (self.overwrites and Path(folder) == self.folder),
        )

    def use_folder(self, folder: str | Path, overwrite: bool = False) -> None:
        """Save into this folder from here on.

        The first step refuses a folder with checkpoints that this training has not loaded.

        Args:
            folder: The folder.
            overwrite: Whether such checkpoints are removed when the training saves.
        """
        self.folder = Path(folder)
        self.overwrites = overwrite

    def _refuse_full_folder(self, folder: Path) -> None:
        """Refuse a folder with checkpoints that this training has not loaded. Collective."""
        newest = self.world.broadcast_object(next(iter(list_checkpoint_folders(folder)), None))
        if newest is not None:
            raise Refused(
                f"{newest} is of another training; continue from it (trainer.load(folder)), give "
                "another folder, or overwrite=True"
            )

    def load(self, folder: str | Path) -> None:
        """Resume from the newest undamaged checkpoint below a folder, saved under any strategy.

        Collective: rank 0 chooses, and every rank reads that one. `trainer.steps` is then the
        number of completed steps.

        Args:
            folder: The folder of a run, or of one checkpoint.

        Raises:
            Refused: If there is no undamaged checkpoint, or if it does not fit.
        """
        saved = agree_on_newest_checkpoint(self.world, Path(folder))
        trainer_snapshot.restore_snapshot(self.training, saved)
        self.loaded_folder = saved.folder.parent

    def close(self) -> None:
        """Close the exchange; the model is a plain one again."""
        if self.is_open:
            COMPILED_DRAWS.close()
        self.is_open = False
        self.training.close()
