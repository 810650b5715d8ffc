"""The setup of a training on one rank, as frozen values.

`TrainerOptions` holds what was requested. `Setup` holds what strategy and model are resolved to.
Before the first step it has no exchange and no passes, and its model is the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import Collate
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import Exchange, ExchangeOptions
from paragrad.engine.layout import Layout, OptimizerState, build_filled_model
from paragrad.engine.model_shard import PassContext
from paragrad.engine.passes import Passes
from paragrad.engine.probe import Probe
from paragrad.engine.rng.draws import Draws
from paragrad.jobs.loss import LossModule
from paragrad.record.record import Recorder
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.pace import Pace


@dataclass(frozen=True)
class TrainerOptions:
    """What is requested of a training, besides model, loss, optimizer and strategy.

    Attributes:
        seed: The seed of the training.

        clip_norm: The norm to which gradients are clipped, as in Job.

        autocast: The type of forward and loss under autocast, or None.

        collate: The collate function, as in Job.

        dtype: The type of real inputs; None for the type that the model's real parameters share.

        record: The record of steps and spans, or None.

        exchange_options: The options of the exchange.

        reverse: Whether each micro-batch is reversed (the rounding baseline).

        is_validated: Whether validation checked the loss; otherwise it is checked before the first
            step.

        skip_first_step_check: Compare no step with one worker's, and go on if random
            draws depend on the layout.

        check_share: The share of checks in the run's time, from 0 (no check) to 1 (all steps).

        validation_probe: The probe of the model during validation, or None.

        has_tests: Whether a test is compared before the first step of a partitioned model.

        pace: The pace of this rank, if it is slowed on purpose, or None.

        noise_interval: The steps between two measurements of gradient noise, as in GradientNorms.
    """

    seed: int = 0
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    collate: Collate | None = None
    dtype: torch.dtype | None = None
    record: Recorder | None = None
    exchange_options: ExchangeOptions = field(default_factory=ExchangeOptions)
    reverse: bool = False
    is_validated: bool = False
    skip_first_step_check: bool = False
    check_share: float = 0.01
    validation_probe: Probe | None = None
    has_tests: bool = True
    pace: Pace | None = None
    noise_interval: int = 0


@dataclass(frozen=True)
class Setup:
    """What strategy and model are resolved to on one rank.

    Attributes:
        full_world: All ranks, with servers.

        world: The world of this rank, with the axes of the strategy.

        samples_world: The ranks among which samples are divided.

        strategy: The resolved strategy.

        module: Model and loss, or this rank's part of the model and the loss.

        batch_norm: The batch norms of the model.

        layout: The layout of the partitioned model.

        empty_model: The whole model, without values once it is partitioned.

        draws: The random draws of the model.

        refuses_new_draws: Whether a draw that the first step did not make ends the run.

        probe: What a forward and a backward of a first micro-batch showed on all ranks; None before
            that.

        pass_contexts: The contexts in which the passes run.

        group_names: The serial names of the parameters in each group of the optimizer, once the
            model is partitioned.

        exchange: The exchange, from the first step on.

        passes: The passes, from the first step on.
    """

    full_world: World
    world: World
    samples_world: World
    strategy: Strategy
    module: LossModule
    batch_norm: BatchNorm
    layout: Layout
    empty_model: nn.Module
    draws: Draws = field(default_factory=Draws)
    refuses_new_draws: bool = False
    probe: Probe | None = None
    pass_contexts: tuple[PassContext, ...] = ()
    group_names: list[list[str]] = field(default_factory=list)
    exchange: Exchange | None = None
    passes: Passes | None = None

    @property
    def model(self) -> nn.Module:
        """The model, or this rank's part of it."""
        return self.module.model

    @property
    def shard_layout(self) -> Layout:
        """The layout of the tensors that this rank holds: `layout`, or that of shards."""
        if self.exchange is not None and self.exchange.shard_layout is not None:
            return self.exchange.shard_layout
        return self.layout

    @property
    def whole_draws(self) -> Draws:
        """The random draws of the whole model."""
        return self.probe.draws if self.probe is not None else self.draws

    @property
    def coarsest_eps(self) -> float:
        """The eps of the coarsest numbers in the model; 0 before the first step."""
        return self.probe.coarsest_eps if self.probe is not None else 0.0

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters of the model by name, or the shards of this rank."""
        if self.exchange is not None and self.exchange.shard_layout is not None:
            return dict(self.exchange.shard_tensors)
        return dict(self.model.named_parameters())

    @cached_property
    def copied_parameters(self) -> Mapping[str, Tensor]:
        """The parameters of a divided model of which other ranks hold copies, by name."""
        return self.layout.select_copies(self.parameters, self.samples_world.size)

    @cached_property
    def watched_parameters(self) -> Mapping[str, Tensor]:
        """The parameters that no backward pass may change, by name.

        Its gradient there is that of a part of the batch, or other ranks have the parameter too.
        """
        strategy = self.strategy
        is_split = strategy.division != Division() and strategy.guarantees.replicas_equal
        return self.parameters if is_split or strategy.servers else self.copied_parameters

    @cached_property
    def trained_tensors(self) -> list[nn.Parameter]:
        """The parameters in which backward leaves gradients: those of the model and the loss."""
        if self.exchange is not None and self.exchange.shard_layout is not None:
            return self.exchange.parameters
        return list(self.module.parameters())

    def use_effective_weights(self) -> AbstractContextManager[None]:
        """Use the weights that a run of differing replicas stands for, then restore. Collective."""
        return self.exchange.use_effective_weights() if self.exchange else nullcontext()

    def gather_optimizer_state(self) -> OptimizerState:
        """Gather the optimizer's state of the whole model on rank 0. Collective."""
        if self.exchange is None:
            return {}
        return self.shard_layout.gather_serial_state(self.exchange.gather_optimizer_state())

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

    def explain_no_whole_model(self) -> str:
        """Explain why no rank can run the whole model any more; an empty text if one can."""
        if self.layout.is_partitioned:
            return "the model is divided: no rank holds all of it any more"
        if self.exchange is not None and self.exchange.shard_layout is not None:
            return "the parameters are sharded: no rank can run the model alone any more"
        return ""
