"""A time limit for user code in the main thread, such as data that never comes or a held lock."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paragrad.errors import StepFailed


@contextmanager
def limit_time(seconds: float, message: str) -> Iterator[None]:
    """Raise StepFailed in code that runs too long, with the line where it stands.

    The limit uses SIGALRM, which ends most waits. There is no limit in other threads, under a
    debugger, or where other code uses that signal or its timer.

    Args:
        seconds: The time limit.
        message: The start of the error message; the number of seconds follows it.

    Raises:
        StepFailed: The limit is reached.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL
        or signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)
    ):
        yield
        return

    def end(_: int, frame: FrameType | None) -> None:
        if sys.gettrace() is None:
            where = (
                f"; the process is at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
            )
            raise StepFailed(
                f"{message} within {seconds:g} s{where} (a longer timeout waits longer)"
            )

    signal.signal(signal.SIGALRM, end)
    # The timer repeats, in case the code catches the error and tries again.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
