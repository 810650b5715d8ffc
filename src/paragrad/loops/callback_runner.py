"""Calls the callbacks of a job in the one process of a run that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.callback import Callback, EpochReport, RunStart, StepReport


class CallbackFailed(StepFailed):
    """A callback failed. It ends the run, also where the failure of a client does not."""


class CallbackRunner:
    """Calls callbacks, and remembers whether one wants to end the run.

    Args:
        callbacks: The callbacks; empty in the other processes of the run.

    Attributes:
        callbacks: As the argument.

        wants_end: Whether a callback wants to end the run.

        end_reason: Which callback wanted it first, as a sentence; None before that.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks
        self.wants_end = False
        self.end_reason: str | None = None

    @contextmanager
    def follow_run(self, run: RunStart, read_status: Callable[[], str]) -> Iterator[None]:
        """Call the callbacks at the beginning and at the end of a run.

        Args:
            run: What is known of the run.
            read_status: Returns the status of a run that did not fail.

        Raises:
            CallbackFailed: A callback failed.
        """
        try:
            for callback in self.callbacks:
                with _name_callback(callback):
                    callback.start_run(run)
            yield
        except BaseException:
            for callback in self.callbacks:
                with suppress(Exception):  # the run ends with the first failure
                    callback.end_run("failed")
            raise
        for callback in self.callbacks:
            with _name_callback(callback):
                callback.end_run(read_status())

    def observe_step(self, report: StepReport) -> bool:
        """Call the callbacks after a step.

        Args:
            report: The step.

        Returns:
            Whether a callback wants to end the run.

        Raises:
            CallbackFailed: A callback failed.
        """
        return self._call_each(lambda callback: callback.observe_step(report))

    def observe_test(self, report: EpochReport) -> bool:
        """Call the callbacks after a test.

        Args:
            report: The test.

        Returns:
            Whether a callback wants to end the run.

        Raises:
            CallbackFailed: A callback failed.
        """
        return self._call_each(lambda callback: callback.observe_test(report))

    def _call_each(self, call: Callable[[Callback], bool | None]) -> bool:
        """Call each callback, and remember whether one wants to end the run."""
        for callback in self.callbacks:
            with _name_callback(callback):
                if call(callback):
                    self.wants_end = True
                    name = type(callback).__name__
                    self.end_reason = self.end_reason or f"the callback {name} ended the run"
        return self.wants_end


@contextmanager
def _name_callback(callback: Callback) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CallbackFailed(
            f"callback {type(callback).__name__} raised {describe_error(error)}"
        ) from error
