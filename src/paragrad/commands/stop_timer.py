"""Ends a run that was asked to stop and does not come to the end of its step.

User code may ignore signals, wait for ever, or hold a rank in a collective. A rank that makes steps
saves and ends by itself. Others are killed after a time, and the message names where they stand.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paragrad.errors import RankFailed
from paragrad.launch import Launcher
from paragrad.loops.synchronous import SAVE_PHASE, Progress

# Seconds without a report after which a run that was asked to stop is ended. A run whose steps or
# tests take longer gets twice the longest time between two reports.
STOP_SECONDS = 7.0


class StopTimer:
    """Watches the reports of a run, and ends it if they stay away after a request to stop.

    Args:
        launcher: Has started the ranks.

    Attributes:
        launcher: As the argument.

        longest_gap: The longest time between two reports, in seconds.

        last_report: The time of the last report, or 0.0.

        is_saving: Whether the run was saving at the last report.

        is_running: Whether a stop was requested.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.longest_gap = 0.0
        self.last_report = 0.0
        self.is_saving = False
        self.is_running = False

    def follow_run(self, progress: Progress | None) -> Progress:
        """Watch the reports of the next run.

        Args:
            progress: Receives the progress of the run too, or None.

        Returns:
            The function that receives the reports of the run.
        """
        self.longest_gap = 0.0
        self.last_report = 0.0
        self.is_saving = False

        def report(value: dict[str, Any]) -> None:
            self._note_report(value)
            if progress is not None and "phase" not in value:
                progress(value)

        return report

    def _note_report(self, value: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.last_report and not self.is_running:
            self.longest_gap = max(self.longest_gap, now - self.last_report)
        self.last_report = now
        self.is_saving = value.get("phase") == SAVE_PHASE
        if self.is_running:
            self._set_timer()

    def start(self) -> None:
        """Start the time: the run is asked to stop. A signal handler may call this method."""
        self.is_running = True
        self._set_timer()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """End the run in this context if it does not stop in time.

        Outside the main thread, which alone gets signals, this context does nothing.

        Raises:
            RankFailed: The run did not stop in time.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handler = signal.signal(signal.SIGALRM, self._give_up)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous_handler)
            self.is_running = False

    @property
    def _allowed_seconds(self) -> float:
        return max(STOP_SECONDS, 2 * self.longest_gap)

    def _set_timer(self) -> None:
        # files are written in any time
        signal.setitimer(signal.ITIMER_REAL, 0.0 if self.is_saving else self._allowed_seconds)

    def _give_up(self, *_: object) -> None:
        places = self.launcher.locate_ranks()
        raise RankFailed(
            f"the run was asked to stop, and no step ended within {self._allowed_seconds:.0f} s; "
            f"its ranks were killed, and this step is not saved{places and f': {places}'}",
            rank=None,
        )
