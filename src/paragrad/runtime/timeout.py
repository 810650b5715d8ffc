"""A bound on code of others in this process's main thread: data that never comes, a lock that
somebody holds.
"""

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
    """Raise StepFailed in what runs longer, with the line where it stands. By SIGALRM, which
    ends most waits: no bound on other threads, under a debugger, nor where somebody else uses
    that signal or its timer.
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
            where = f"; it stands at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
            raise StepFailed(
                f"{message} within {seconds:g} s{where} (a longer timeout waits longer)"
            )

    signal.signal(signal.SIGALRM, end)
    # and again, where it is caught and tried anew
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
