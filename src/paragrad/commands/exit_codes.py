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

from paragrad.errors import Interrupted, RankFailed, Refused, describe_write_error
from paragrad.runtime.launcher_env import detect_launch
from paragrad.runtime.stop_signals import raise_on_stop_signals


@contextmanager
def use_exit_codes() -> Iterator[None]:
    """Exit codes: 0 done (or stopped by SIGTERM, and saved), 1 a run failed, 2 refused, 130
    stopped; the message last.
    """
    warnings.showwarning = lambda message, *_, **__: print(f"paragrad: {message}", file=sys.stderr)
    try:
        # a rank that was launched ends at once by SIGTERM: it may wait in C++ for others, where
        # no handler is called
        with raise_on_stop_signals() if detect_launch() is None else nullcontext():
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
        _redirect_to_null(sys.stdout)
    except OSError as error:  # a full disk, a folder that is gone
        told = _write_stream(
            sys.stderr,
            f"paragrad: {describe_write_error(error, error.filename or 'what it prints')}\n",
        )
        _write_stream(sys.stdout)
        # the terminal: no failure of ours
        closed = not told and error.errno == errno.EIO and error.filename is None
        raise typer.Exit(0 if closed else 1) from None


def _write_stream(stream: TextIO, text: str = "") -> bool:
    """Write, with what was written before. Where nobody takes it Python would try again at its
    end, and say so in its words.
    """
    try:
        stream.write(text)
        stream.flush()
        return True
    except OSError:
        _redirect_to_null(stream)
        return False


def _redirect_to_null(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


REPLACEMENTS = {
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{HORIZONTAL ELLIPSIS}": "...",
}


def replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """What stands for a sign that a terminal or a file cannot show."""
    assert isinstance(error, UnicodeEncodeError)
    return REPLACEMENTS.get(error.object[error.start], "?"), error.start + 1
