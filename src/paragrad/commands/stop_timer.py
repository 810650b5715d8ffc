"""Ends a run that was asked to stop and comes no further.

User code may ignore signals, wait for ever, or hold a rank in a collective. A run that makes steps,
tests or saves comes to its end by itself. Otherwise its ranks are killed after a time, and the
message names where they stand.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paragrad.errors import RankFailed
from paragrad.launch import Launcher

# Seconds without a sign of life after which a run that was asked to stop is ended. Ranks whose
# steps take longer get twice their longest step.
STOP_SECONDS = 7.0


class StopOverdue(BaseException):
    """A run that was asked to stop came no further.

    It is no Exception, so that no callback and no loop takes it for an error of its own.
    """

    def make_failure(self) -> RankFailed:
        """Return the failure to show and to record."""
        return RankFailed(str(self), rank=None)


class StopTimer:
    """Ends the tasks of a launcher if they come no further after a request to stop.

    Args:
        launcher: Has started the ranks.

    Attributes:
        launcher: As the argument.

        allowed_seconds: The seconds that may pass without a sign of life.

        previous: The handler and the timer of SIGALRM before `start`, or None.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.allowed_seconds = STOP_SECONDS
        self.previous: tuple[Any, tuple[float, float]] | None = None

    def start(self) -> None:
        """Start the time: the run is asked to stop. A signal handler may call this method."""
        if self.previous is None:
            self.previous = (
                signal.signal(signal.SIGALRM, self._give_up),
                signal.getitimer(signal.ITIMER_REAL),
            )
        signal.setitimer(signal.ITIMER_REAL, self.allowed_seconds)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Make `start` effective in this context, which must be in the main thread.

        Raises:
            RankFailed: The run came no further.
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.launcher.follow_life(self._note_life if is_main_thread else None)
        try:
            yield
        except StopOverdue as error:
            raise error.make_failure() from None
        finally:
            self.launcher.follow_life(None)
            if self.previous is not None:
                handler, timer = self.previous
                self.previous = None
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, *timer)

    def _note_life(self, longest_gap: float) -> None:
        """Begin the time anew: a rank has come further."""
        if self.previous is not None:
            self.allowed_seconds = max(self.allowed_seconds, 2 * longest_gap)
            signal.setitimer(signal.ITIMER_REAL, self.allowed_seconds)

    def _give_up(self, *_: object) -> None:
        if not self.launcher.has_live_tasks:
            return
        places = self.launcher.locate_ranks()
        raise StopOverdue(
            f"the run was asked to stop, and made no progress for {self.allowed_seconds:.0f} s; "
            f"its ranks were killed, and this step is not saved{places and f': {places}'}"
        )
