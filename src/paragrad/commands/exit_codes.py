"""How the command ends: its exit codes, its last message, and what is printed to those who
cannot show it or have left.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

import typer

from paragrad.errors import Interrupted, RankFailed, Refused, no_room
from paragrad.runtime.launcher_env import launched
from paragrad.runtime.stop_signals import ending_as_interrupted


@contextmanager
def answering() -> Iterator[None]:
    """Exit codes: 0 done (or stopped by SIGTERM, and saved), 1 a run failed, 2 refused, 130
    stopped; the message last.
    """
    warnings.showwarning = lambda message, *_, **__: print(f"paragrad: {message}", file=sys.stderr)
    try:
        # a rank that was launched ends at once by SIGTERM: it may wait in C++ for others, where
        # no handler is called
        with ending_as_interrupted() if launched() is None else nullcontext():
            yield
            # a full disk is told of here, not as the interpreter ends
            sys.stdout.flush()
    except Refused as error:
        print(f"paragrad: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RankFailed as error:
        print(f"{error.traceback}\nparagrad: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        print(
            f"paragrad: stopped{f'; {error}' if isinstance(error, Interrupted) else ''}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    # the reader of a pipe has left, as `| head` does
    except BrokenPipeError:
        _to_nobody(sys.stdout)
    except OSError as error:  # a full disk, a folder that is gone
        told = _taken(
            sys.stderr, f"paragrad: {no_room(error, error.filename or 'what it prints')}\n"
        )
        _taken(sys.stdout)
        # the terminal: no failure of ours
        closed = not told and error.errno == errno.EIO and error.filename is None
        raise typer.Exit(0 if closed else 1) from None


def _taken(stream: TextIO, text: str = "") -> bool:
    """Write, with what was written before. Where nobody takes it Python would try again at its
    end, and say so in its words.
    """
    try:
        stream.write(text)
        stream.flush()
        return True
    except OSError:
        _to_nobody(stream)
        return False


def _to_nobody(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


SPELLED = {
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{HORIZONTAL ELLIPSIS}": "...",
}


def spelled(error: UnicodeError) -> tuple[str, int]:
    """What stands for a sign that a terminal or a file cannot show."""
    assert isinstance(error, UnicodeEncodeError)
    return SPELLED.get(error.object[error.start], "?"), error.start + 1
