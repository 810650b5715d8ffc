"""The state of a training on one rank: what a checkpoint holds, and the counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paragrad.engine.layout import OptimizerState
from paragrad.engine.optimizer.optimizer_state import copy_optimizer_attributes
from paragrad.strategies.shares import Division


class TrainingState:
    """What changes from step to step, besides the values of the model.

    Args:
        optimizer: The optimizer over the model.

        scheduler: The scheduler, as in Job, or None.

        division: The division of a global batch among the replicas.

        replicas: The replicas of which this rank runs the parts.

        identity: What a checkpoint of the user's own loop must have in common with the training.

    Attributes:
        optimizer: The optimizer of the present steps.

        scheduler: The scheduler, or None.

        is_scheduled_by_loop: Whether the loop steps the scheduler, and no step of the trainer does.

        initial_optimizer_attributes: The attributes of the optimizer before the first step.

        steps: The number of completed steps.

        own_steps: The number of steps that this trainer made.

        batch_size: The size of the global batch, once it is known; otherwise 0.

        division: The division of a global batch among the replicas.

        replicas: The replicas of which this rank runs the parts.

        restored_tensors: The state that the saved strategy's exchange kept beside the optimizer's
            state.

        identity: As the argument.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        division: Division,
        replicas: list[int],
        identity: Mapping[str, Any],
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.is_scheduled_by_loop = False
        self.initial_optimizer_attributes = copy_optimizer_attributes(optimizer)
        self.steps = 0
        self.own_steps = 0
        self.batch_size = 0
        self.division = division
        self.replicas = replicas
        self.restored_tensors: OptimizerState = {}
        self.identity = identity

    @property
    def stepped_scheduler(self) -> Any:
        """The scheduler that every step steps, or None."""
        return None if self.is_scheduled_by_loop else self.scheduler

    @property
    def is_check_due(self) -> bool:
        """Whether the next step is checked: of the own steps these are 1, 2, 4, 8, ..."""
        return (self.own_steps + 1).bit_count() == 1

    def count_step(self) -> None:
        """Count a completed step."""
        self.steps = self.steps + 1
        self.own_steps = self.own_steps + 1

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
