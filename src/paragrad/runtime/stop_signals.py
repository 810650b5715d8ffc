"""SIGTERM, and SIGHUP of a terminal that closes, as a request: finish the step, save, end.
Ctrl-C before there is anything to end. The end of a parent.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


class Request:
    """A wish that one part of a program sets and another sees. Without a lock, which a signal
    handler could find taken.
    """

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
    """While active, SIGTERM calls `ask`, and SIGHUP too, unless it is ignored (nohup). Only a
    main thread can listen to signals; on others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        kind: signal.signal(kind, lambda *_: ask())
        for kind in (signal.SIGTERM, signal.SIGHUP)
        if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def ending_as_interrupted() -> Iterator[None]:
    """While active, and where nobody asks to be told, SIGTERM and SIGHUP are KeyboardInterrupt:
    what was begun is closed.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    with asking_to_stop(interrupt):
        yield


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While active, Ctrl-C ends this process with 130 and one line: an import that is under way
    would give a traceback.
    """

    def leave(*_: object) -> None:
        print("paragrad: stopped", file=sys.stderr, flush=True)
        os._exit(130)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def die_with(parent: int) -> None:
    """Be killed when this process's parent ends, at once where it has. On Linux alone; and it
    is the end of the thread of the parent that forked this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def ending_with_this() -> Callable[[int], None] | None:
    """What loaders (DataLoader's worker_init_fn) begin with, to end with this process: they
    look at it every 5 s only. None in a thread of it, which may end before.
    """
    this = threading.current_thread() is threading.main_thread()
    return functools.partial(_ends_with, os.getpid()) if this else None


def _ends_with(parent: int, number: int) -> None:
    die_with(parent)
