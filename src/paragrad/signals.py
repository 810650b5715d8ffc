"""SIGTERM as a request: finish the step, save, end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def asking_to_stop(ask: Callable[[], None]) -> Iterator[None]:
    """While active, SIGTERM calls `ask`. Only a main thread can listen to signals; on others this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: ask())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
