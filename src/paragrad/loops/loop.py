"""The loop of every training: segments, and what happens at the end of each.

A segment is an epoch (`loops.synchronous`), a round of clients (`loops.rounds`), or a ticket of the
work queue (`loops.queue_worker`). The process that gives out tickets (`loops.queue_coordinator`)
loops over epochs too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from paragrad.datasets.loading import separate_target
from paragrad.engine.optimizer.optimizer_state import get_learning_rate
from paragrad.trainer.step_observer import StepResult
from paragrad.trainer.trainer import Trainer

Segment = TypeVar("Segment")


class Loop(ABC, Generic[Segment]):
    """Base class of loops. A subclass says what a segment is, and what happens at its end."""

    def train_segments(self) -> None:
        """Train all segments, until one ends the run."""
        for segment in self.iterate_segments():
            start_time = self.read_clock()
            if not self.train_segment(segment) or self.end_segment(segment, start_time):
                break

    @abstractmethod
    def read_clock(self) -> float:
        """Return the seconds since the start of the run, as the record counts them."""

    @abstractmethod
    def iterate_segments(self) -> Iterator[Segment]:
        """Yield the segments in their order."""

    @abstractmethod
    def train_segment(self, segment: Segment) -> bool:
        """Train a segment.

        Args:
            segment: The segment.

        Returns:
            False if the run ends before the end of the segment.
        """

    @abstractmethod
    def end_segment(self, segment: Segment, start_time: float) -> bool:
        """Do what follows a segment.

        Args:
            segment: The segment.
            start_time: The time at which the segment began, in seconds of the record's clock.

        Returns:
            True if the run ends.
        """


class BatchLoop(Loop[Segment]):
    """Base class of loops that make the steps themselves.

    Args:
        trainer: The trainer of this rank.

    Attributes:
        trainer: The trainer of this rank.

        training: The setup, the state and the step of the trainer.

        reads_rate: Whether `end_step` uses the learning rate.
    """

    def __init__(self, trainer: Trainer, reads_rate: bool = True) -> None:
        """Take the trainer.

        Args:
            trainer: The trainer of this rank.
            reads_rate: As the attribute.
        """
        self.trainer = trainer
        self.training = trainer.training
        self.reads_rate = reads_rate

    def read_clock(self) -> float:
        """Return the seconds since the start of the run, as the record counts them."""
        return self.training.log.now()

    @property
    def needs_check(self) -> bool:
        """Whether the next step is compared with one worker's, besides those that are planned."""
        return False

    def train_batches(self, segment: Segment, batches: Iterable[Any]) -> bool:
        """Make a step on each batch.

        Args:
            segment: The segment of the batches.
            batches: This rank's part of each global batch.

        Returns:
            False if the run ends before the last batch.
        """
        for batch in batches:
            if self.needs_check:
                self.training.state.request_check()
            rate = get_learning_rate(self.training.state.optimizer) if self.reads_rate else 0.0
            result = self.training.make_step(*separate_target(batch))
            if not self.end_step(segment, result, rate):
                return False
        return True

    @abstractmethod
    def end_step(self, segment: Segment, result: StepResult, rate: float) -> bool:
        """Do what follows a step.

        Args:
            segment: The segment of the step.
            result: The result of the step.
            rate: The learning rate before the step, if `reads_rate`.

        Returns:
            False if the run ends.
        """
