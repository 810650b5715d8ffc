"""Callbacks: what a run calls at its beginning, after steps and tests, and at its end.

A run calls its callbacks in one process: rank 0, or the process with the work queue. Each callback
is a copy of the job's own, so it keeps files and connections that it opens in `start_run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paragrad.errors import Refused


@dataclass(frozen=True)
class RunStart:
    """What is known of a run before its first step.

    Attributes:
        folder: The folder of the run.

        job: The name of the job.

        strategy: The strategy as text.

        step: The completed steps; more than 0 if the run goes on from a checkpoint.

        steps: The steps of the whole training.

        metric: The name of the test value.

        tests: The tests of the run from whose checkpoint this one goes on, in order.
    """

    folder: Path
    job: str
    strategy: str
    step: int
    steps: int
    metric: str
    tests: tuple[EpochReport, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """A completed step.

    Attributes:
        step: The number of the step, from 1.

        epoch: The epoch, from 0; the round, where clients train in rounds.

        loss: The mean loss of the global batch.

        learning_rate: The rate of the first parameter group in this step.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float


@dataclass(frozen=True)
class EpochReport:
    """An epoch that was tested.

    Attributes:
        step: The completed steps.

        epoch: The epoch, from 0; the round, where clients train in rounds.

        metric: The name of the test value: the metric's name, or loss.

        value: The test value.

        lower_is_better: Whether a lower value is better.
    """

    step: int
    epoch: int
    metric: str
    value: float
    lower_is_better: bool = False

    def is_better_than(self, other: EpochReport | None, margin: float = 0.0) -> bool:
        """Tell whether this test is better than another one.

        Args:
            other: The other test; None is worse than any number.
            margin: How much better it has to be.

        Returns:
            Whether it is better; False if its value is NaN.
        """
        if other is None:
            return self.value == self.value
        gain = self.value - other.value
        return (-gain if self.lower_is_better else gain) > margin


class Callback:
    """Base class of callbacks. Each method does nothing; override what you need.

    Examples:
        >>> import paragrad as pg
        >>> class StopEarly(pg.Callback):
        ...     def observe_test(self, report):
        ...         if report.value > 90:  # per cent
        ...             return True
        >>> run = pg.train(pg.job("digits"), epochs=9, callbacks=[StopEarly()])
        >>> run.test > 90
        True
    """

    def start_run(self, run: RunStart) -> None:
        """Called before the first step.

        Args:
            run: What is known of the run.
        """

    def observe_step(self, report: StepReport) -> bool | None:
        """Called after a step.

        Args:
            report: The step.

        Returns:
            True to end the run on all ranks after the next step.
        """

    def observe_test(self, report: EpochReport) -> bool | None:
        """Called after a test.

        Args:
            report: The test.

        Returns:
            True to end the run on all ranks now.
        """

    def end_run(self, status: str) -> None:
        """Called at the end.

        Args:
            status: "finished" (also if a callback ended the run), "stopped" or "failed".
        """


class EarlyStopping(Callback):
    """End a run when its test has not become better for some epochs.

    Attributes:
        patience: The number of epochs in a row without a better test after which the run ends.

        margin: How much better a test has to be.

        best: The best test so far, or None.

        waited: The epochs since then.
    """

    def __init__(self, patience: int, margin: float = 0.0) -> None:
        """Create the callback.

        Args:
            patience: The number of epochs in a row without a better test after which the run ends.
            margin: How much better a test has to be.

        Raises:
            Refused: The patience is below 1, or the margin is negative.
        """
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise Refused(f"patience must be a whole number of epochs from 1, got {patience!r}")
        if not margin >= 0:
            raise Refused(f"margin must be a number from 0, got {margin!r}")
        self.patience = patience
        self.margin = margin
        self.best: EpochReport | None = None
        self.waited = 0

    def start_run(self, run: RunStart) -> None:
        """Begin with the tests of the run from whose checkpoint this one goes on."""
        self.best = None
        self.waited = 0
        for report in run.tests:
            self.observe_test(report)

    def observe_test(self, report: EpochReport) -> bool:
        """Count the epochs since the best test; True after too many."""
        if report.is_better_than(self.best, self.margin):
            self.best = report
            self.waited = 0
        else:
            self.waited += 1
        return self.waited >= self.patience
