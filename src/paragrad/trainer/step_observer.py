"""Observers of a training step: what the step calls at fixed places."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

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
    """Base class of observers. A step calls these methods in this order."""

    def surround_passes(self, batch: Batch) -> AbstractContextManager[Any] | None:
        """Return the context around the passes of a step, or None.

        The step calls this before it enters the context of any observer.

        Args:
            batch: This rank's part of the global batch.
        """
        return None

    def observe_mean_gradients(self, loss: float, weight: float) -> None:
        """Look at the mean gradients before the update.

        Args:
            loss: The mean loss.
            weight: The global weight.
        """

    def finish(self, batch: Batch, sums: LossSums) -> None:
        """Look at the finished step, before it is counted.

        Args:
            batch: This rank's part of the global batch.
            sums: The sums of the loss over this rank's share.
        """


class StepObservers:
    """The observers of a training's steps. A step calls only methods that an observer defines.

    Attributes:
        observers: The observers, in the order in which they were added.

        pass_observers: Those that may have a context around the passes.

        gradient_observers: Those that look at the mean gradients.
    """

    def __init__(self) -> None:
        self.observers: list[StepObserver] = []
        self.pass_observers: list[StepObserver] = []
        self.gradient_observers: list[StepObserver] = []

    def add(self, observer: StepObserver) -> None:
        """Let an observer look at each step.

        Args:
            observer: The observer; those that were added before are called before it.
        """
        kind = type(observer)
        self.observers.append(observer)
        if kind.surround_passes is not StepObserver.surround_passes:
            self.pass_observers.append(observer)
        if kind.observe_mean_gradients is not StepObserver.observe_mean_gradients:
            self.gradient_observers.append(observer)


class StepChecks(Protocol):
    """What a training asks of its checker (`trainer.checks.step_checker.StepChecker`)."""

    def set_up(self, batch: Batch, inputs: Any, target: Any) -> None:
        """Build exchange and passes before the first step."""

    def prepare(self, batch: Batch, inputs: Any, target: Any) -> None:
        """Prepare the check of a later step."""

    def resolve_weight(
        self, batch: Batch, inputs: Any, target: Any, weight: float, doubtful_weight: float
    ) -> float:
        """Return the global weight, of which a part may stand for no sample."""

    def compare_gradients(self, loss: float, weight: float) -> None:
        """Compare the mean gradients with one worker's before the update."""

    def compare_update(self, is_skipped: bool) -> None:
        """Compare what the update left with one worker's update, and plan the next check."""
