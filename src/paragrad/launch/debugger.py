"""breakpoint() in user code: a debugger under serial, and one sentence elsewhere.

A debugger stops one process. Of several ranks the others would wait for it, and all would read the
same terminal.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from paragrad.errors import Refused, StepFailed

SERIAL_HINT = 'debug under serial (--strategy serial, strategy="serial"), where it works'
STDIN = 0  # the descriptor that the launcher gives to each rank


@contextlib.contextmanager
def refuse_breakpoints(ranks: int) -> Iterator[None]:
    """Let breakpoint() in this process, where a job is inspected, open no debugger.

    Args:
        ranks: The number of ranks that will run the same code. With several ranks breakpoint() is
            refused; with one it does nothing here, and opens a debugger in the rank.
    """
    previous_hook = sys.breakpointhook

    def handle_breakpoint(*_: Any, **__: Any) -> None:
        if ranks > 1:
            raise Refused(
                f"breakpoint() stops one of {ranks} ranks, and others wait for it; {SERIAL_HINT}"
            )

    sys.breakpointhook = handle_breakpoint
    try:
        yield
    finally:
        sys.breakpointhook = previous_hook


@contextlib.contextmanager
def handle_breakpoints(ranks: int, on_debug: Callable[[], None]) -> Iterator[None]:
    """Let breakpoint() and pdb.set_trace() in a rank open a debugger, or fail in one sentence.

    Args:
        ranks: The number of ranks.
        on_debug: Is called before the first debugger opens.
    """
    previous = sys.breakpointhook, pdb.set_trace
    rank_pid = os.getpid()
    debugger: pdb.Pdb | None = None

    def handle_breakpoint(*_: Any, **__: Any) -> None:
        nonlocal debugger
        if os.getpid() != rank_pid:
            raise StepFailed(
                "breakpoint() was called in a process that loads samples and has no terminal; "
                "leave out --loaders"
            )
        if ranks > 1:
            raise StepFailed(
                f"breakpoint() stops one of {ranks} ranks, and others wait for it; {SERIAL_HINT}"
            )
        if debugger is None:
            on_debug()
            _take_terminal()
            debugger = pdb.Pdb(stdin=open(STDIN, closefd=False), stdout=sys.stderr)  # noqa: SIM115
            debugger.prompt = "(Pdb) "
        debugger.set_trace(sys._getframe(1))

    sys.breakpointhook = handle_breakpoint
    pdb.set_trace = handle_breakpoint
    try:
        yield
    finally:
        sys.breakpointhook, pdb.set_trace = previous


def _take_terminal() -> None:
    """Let this process group read the terminal, if there is one, and take its Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    previous_handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        if os.isatty(STDIN):
            os.tcsetpgrp(STDIN, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, previous_handler)
