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


class StopRequest:
    """A wish that one part of a program sets and another sees. Without a lock, which a signal
    handler could find taken.
    """

    def __init__(self) -> None:
        self.is_requested = False

    def set(self) -> None:
        self.is_requested = True

    def clear(self) -> None:
        self.is_requested = False

    def is_set(self) -> bool:
        return self.is_requested


@contextmanager
def handle_stop_signals(on_stop: Callable[[], None]) -> Iterator[None]:
    """While active, SIGTERM calls `ask`, and SIGHUP too, unless it is ignored (nohup). Only a
    main thread can listen to signals; on others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        kind: signal.signal(kind, lambda *_: on_stop())
        for kind in (signal.SIGTERM, signal.SIGHUP)
        if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """While active, and where nobody asks to be told, SIGTERM and SIGHUP are KeyboardInterrupt:
    what was begun is closed.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    with handle_stop_signals(interrupt):
        yield


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
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


def exit_with_parent(parent: int) -> None:
    """Be killed when this process's parent ends, at once where it has. On Linux alone; and it
    is the end of the thread of the parent that forked this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def make_worker_init() -> Callable[[int], None] | None:
    """What loaders (DataLoader's worker_init_fn) begin with, to end with this process: they
    look at it every 5 s only. None in a thread of it, which may end before.
    """
    this = threading.current_thread() is threading.main_thread()
    return functools.partial(_tie_worker_to_parent, os.getpid()) if this else None


def _tie_worker_to_parent(parent: int, worker: int) -> None:
    exit_with_parent(parent)
