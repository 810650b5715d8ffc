"""Observers of a training step: what the step calls at fixed places."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from paragrad.engine.passes import LossSums
from paragrad.trainer.batch import Batch


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


class StepObserver:
    """Base class of observers. A step calls these methods in this order.

    Attributes:
        observes_checked_steps_only: Whether it observes only the steps that are checked: 1, 2, 4,
            8, ...
    """

    observes_checked_steps_only = False

    def set_up(self, batch: Batch, inputs: Any, target: Any) -> None:
        """Build exchange and passes before the first step.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs that `step` received.
            target: The target that `step` received.
        """

    def prepare(self, batch: Batch, inputs: Any, target: Any) -> None:
        """Prepare a step that is not the first.

        Args:
            batch: This rank's part of the global batch.
            inputs: The inputs that `step` received.
            target: The target that `step` received.
        """

    def surround_passes(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return the context around the passes of a step.

        Args:
            batch: This rank's part of the global batch.
        """
        return contextlib.nullcontext()

    def resolve_weight(
        self, batch: Batch, inputs: Any, target: Any, weight: float, doubtful_weight: float
    ) -> float:
        """Return the global weight, if a part of it may stand for no sample.

        Args:
            batch: This rank's part of the global batch.

            inputs: The inputs that `step` received.

            target: The target that `step` received.

            weight: The sum of all weights.

            doubtful_weight: The sum of the doubtful weights.
        """
        return weight

    def observe_mean_gradients(self, loss: float, weight: float) -> None:
        """Look at the mean gradients before the update.

        Args:
            loss: The mean loss.
            weight: The global weight.
        """

    def finish(self, batch: Batch, sums: LossSums, rate: float) -> None:
        """Look at the finished step, before it is counted.

        Args:
            batch: This rank's part of the global batch.
            sums: The sums of the loss over this rank's share.
            rate: The learning rate of the update.
        """

    def close(self) -> None:
        """Release what the observer holds."""
