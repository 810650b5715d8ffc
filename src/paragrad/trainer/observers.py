"""Observers of a training step: the pace of a rank, gradient noise, the record, signs of life."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from paragrad.engine.optimizer.optimizer_state import get_learning_rate
from paragrad.engine.passes import LossSums
from paragrad.trainer.batch import Batch
from paragrad.trainer.pace import Pace
from paragrad.trainer.step_observer import StepObserver
from paragrad.trainer.training import Training


class PaceObserver(StepObserver):
    """Slows this rank on purpose, and measures its speed.

    Args:
        training: The training.
        pace: The pace of this rank.
    """

    def __init__(self, training: Training, pace: Pace) -> None:
        self.training = training
        self.pace = pace

    def surround_passes(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return the context that measures the passes, and waits after them.

        Args:
            batch: This rank's part of the global batch.
        """
        state, passes = self.training.state, self.training.setup.passes
        assert passes is not None
        passes.start_timing()
        equal_share = state.batch_size / len(state.division.shares) or 1.0
        return self.pace.pace_step(state.steps, batch.own_samples, equal_share, passes)


class NoiseObserver(StepObserver):
    """Measures the norms of gradients for the gradient noise scale.

    Args:
        training: The training.
    """

    def __init__(self, training: Training) -> None:
        self.training = training

    def surround_passes(self, batch: Batch) -> None:
        """Measure the first backward, if this step is measured.

        Args:
            batch: This rank's part of the global batch.
        """
        self.training.noise.begin_step(self.training.state.steps)

    def observe_mean_gradients(self, loss: float, weight: float) -> None:
        """Measure the gradient of the whole batch.

        Args:
            loss: The mean loss.
            weight: The global weight.
        """
        self.training.noise.measure_mean_gradient(self.training.exchange.gather_mean_gradients)

    def finish(self, batch: Batch, sums: LossSums) -> None:
        """Stop measuring, so that a rehearsal of the next step is not measured.

        Args:
            batch: This rank's part of the global batch.
            sums: The sums of the loss over this rank's share.
        """
        self.training.noise.end_step()


class RecordObserver(StepObserver):
    """Writes the line of each step into the record.

    Args:
        training: The training.

    Attributes:
        training: As the argument.

        rate: The learning rate of the current update.

        records_samples: Whether this rank is the first of those that have the same samples.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.rate = 0.0
        self.records_samples = training.world.is_first("samples")

    def observe_mean_gradients(self, loss: float, weight: float) -> None:
        """Keep the learning rate of the update; the scheduler changes it after the update.

        Args:
            loss: The mean loss.
            weight: The global weight.
        """
        self.rate = get_learning_rate(self.training.state.optimizer)

    def finish(self, batch: Batch, sums: LossSums) -> None:
        """Write the line of a step.

        Args:
            batch: This rank's part of the global batch.
            sums: The sums of the loss over this rank's share.
        """
        training, exchange = self.training, self.training.exchange
        # One of the ranks with a share records it.
        is_recorded = self.records_samples and not exchange.already_applied
        training.log.write_step(
            training.state.steps,
            training.feed.load_start,
            epoch=batch.epoch,
            loss=[sums.loss, sums.weight] if is_recorded else [0.0, 0.0],
            order=batch.recorded_ranges if is_recorded else [],
            lr=self.rate,
            sent=dict(exchange.sent_bytes),
            **training.noise.record_entry,
        )


class LifeObserver(StepObserver):
    """Notes each step as a sign of life, which the launcher of a rank looks for.

    Args:
        training: The training.
    """

    def __init__(self, training: Training) -> None:
        self.training = training

    def finish(self, batch: Batch, sums: LossSums) -> None:
        """Note that the training has come further.

        Args:
            batch: This rank's part of the global batch.
            sums: The sums of the loss over this rank's share.
        """
        self.training.world.stop.beat()
