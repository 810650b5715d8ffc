"""Signals that end a process.

SIGTERM and SIGHUP (a terminal that closes) request a stop: finish the step, save, and end. Ctrl-C
can also arrive before there is anything to end. A process can be tied to its parent.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

PR_SET_PDEATHSIG = 1


class StopRequest:
    """A flag that one part of a program sets and another reads, and signs of life of the other.

    It has no lock, because a signal handler could find the lock taken.

    Attributes:
        is_requested: Whether a stop is requested.

        beats: How often the program has come further: a step, a batch of a test.

        last_beat: The time of the last one, on the monotonic clock; 0.0 before it.

        longest_gap: The longest time between two, in seconds.

        is_saving: Whether files are being written.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.beats = 0
        self.last_beat = 0.0
        self.longest_gap = 0.0
        self.is_saving = False

    def beat(self) -> None:
        """Note that the program has come further."""
        now = time.monotonic()
        if self.last_beat:
            self.longest_gap = max(self.longest_gap, now - self.last_beat)
        self.last_beat = now
        self.beats += 1

    @contextmanager
    def note_saving(self) -> Iterator[None]:
        """Note that files are being written, while the context is active."""
        was_saving = self.is_saving
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = was_saving
            self.beat()

    def set(self) -> None:
        """Request a stop."""
        self.is_requested = True

    def clear(self) -> None:
        """Withdraw the request, and begin anew."""
        self.is_requested = False
        self.last_beat = 0.0
        self.longest_gap = 0.0

    def is_set(self) -> bool:
        """Tell whether a stop is requested."""
        return self.is_requested


@contextmanager
def handle_stop_signals(on_stop: Callable[[], None]) -> Iterator[None]:
    """Call a function when SIGTERM or SIGHUP arrives, while the context is active.

    An ignored SIGHUP (nohup) stays ignored. Python runs signal handlers only in the main thread; in
    other threads this context does nothing.

    Args:
        on_stop: The function to call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(kind: int, frame: FrameType | None) -> None:
        on_stop()

    previous_handlers = {
        kind: signal.signal(kind, handle)
        for kind in (signal.SIGTERM, signal.SIGHUP)
        if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for kind, handler in previous_handlers.items():
            # a rank that is about to report its failure has another one (runtime/peer_processes.py)
            if signal.getsignal(kind) is handle:
                signal.signal(kind, handler)


@contextmanager
def stop_on_interrupt(on_first: Callable[[], None]) -> Iterator[StopRequest]:
    """Call a function at the first Ctrl-C; the second one raises KeyboardInterrupt.

    An ignored SIGINT (a job in the background of a script) stays ignored. In other threads than the
    main one this context does nothing.

    Args:
        on_first: The function to call.

    Yields:
        A flag that is set if Ctrl-C was pressed.
    """
    interrupted = StopRequest()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):
        yield interrupted
        return

    def handle_first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.set()
        on_first()

    previous_handler = signal.signal(signal.SIGINT, handle_first)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, so that open resources are closed.

    An inner `handle_stop_signals` takes precedence.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    with handle_stop_signals(interrupt):
        yield


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """On Ctrl-C, end this process with exit code 130 and one line, while the context is active.

    Otherwise an import that is under way would print a traceback.
    """

    previous_handler = signal.signal(signal.SIGINT, lambda *_: exit_stopped())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def exit_stopped() -> None:
    """End this process at once, with exit code 130 and one line."""
    # not by print, which a signal handler cannot call inside of another print
    with suppress(OSError):  # the terminal may be gone
        os.write(2, b"paragrad: stopped\n")
    os._exit(130)


def exit_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends. Linux only.

    The signal also comes when the thread of the parent that forked this process ends. If the parent
    has ended already, the process exits at once.

    Args:
        parent: The process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def make_worker_init() -> Callable[[int], None] | None:
    """Make a `worker_init_fn` of DataLoader that ties its workers to this process.

    By themselves the workers look for their parent only every 5 s.

    Returns:
        The function; None outside the main thread, because another thread can end earlier.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    return functools.partial(_tie_worker_to_parent, os.getpid()) if is_main_thread else None


def _tie_worker_to_parent(parent: int, worker: int) -> None:
    exit_with_parent(parent)
