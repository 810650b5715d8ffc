"""SIGTERM, and SIGHUP of a terminal that closes, as a request: finish the step, save, end. Ctrl-C before there is anything to
end."""

from __future__ import annotations

import os
import signal
import sys
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
    """While active, SIGTERM calls `ask`, and SIGHUP too, unless it is ignored (nohup). Only a main thread can listen to
    signals; on others this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.signal(kind, lambda *_: ask()) for kind in (signal.SIGTERM, signal.SIGHUP)
              if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def ending_as_interrupted() -> Iterator[None]:
    """While active, and where nobody asks to be told, SIGTERM and SIGHUP are KeyboardInterrupt: what was begun is closed."""
    def interrupt() -> None:
        raise KeyboardInterrupt
    with asking_to_stop(interrupt):
        yield


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While active, Ctrl-C ends this process with 130 and one line: an import that is under way would give a traceback."""
    def leave(*_: object) -> None:
        print("paragrad: stopped", file=sys.stderr, flush=True)
        os._exit(130)
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
