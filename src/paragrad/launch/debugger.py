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
from paragrad.launch.protocol import DEBUGGER_STDIN

SERIAL_HINT = 'debug under serial (--strategy serial, strategy="serial"), where it works'


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
    launcher_group = 0

    def handle_breakpoint(*_: Any, **__: Any) -> None:
        nonlocal debugger, launcher_group
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
            signal.signal(signal.SIGINT, signal.default_int_handler)
            launcher_group = _give_terminal(os.getpgrp())
            stdin = os.fdopen(DEBUGGER_STDIN, closefd=False)
            debugger = pdb.Pdb(stdin=stdin, stdout=sys.stderr)
        debugger.set_trace(sys._getframe(1))

    sys.breakpointhook = handle_breakpoint
    pdb.set_trace = handle_breakpoint
    try:
        yield
    finally:
        sys.breakpointhook, pdb.set_trace = previous
        if debugger is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _give_terminal(launcher_group)


def _give_terminal(group: int) -> int:
    """Let a process group read the terminal, if there is one, and get its Ctrl-C.

    Args:
        group: The number of the group.

    Returns:
        The group that had the terminal before.
    """
    if not os.isatty(DEBUGGER_STDIN):
        return group
    previous_handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        before = os.tcgetpgrp(DEBUGGER_STDIN)
        os.tcsetpgrp(DEBUGGER_STDIN, group)
    finally:
        signal.signal(signal.SIGTTOU, previous_handler)
    return before
