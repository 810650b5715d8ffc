"""SIGTERM as a request: finish the step, save, end."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Request:
    """A wish that one part of a program sets and another sees. Without a lock, which a signal handler could find taken."""

    def __init__(self) -> None:
        self.asked = False

    def set(self) -> None:
        self.asked = True

    def clear(self) -> None:
        self.asked = False

    def is_set(self) -> bool:
        return self.asked


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
