"""How the command ends: exit codes, the last message, and output that cannot be written."""

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
    """End the command with an exit code, and print the message last.

    The codes are: 0 done (or stopped by SIGTERM and saved, or the reader of the output closed the
    pipe), 1 a run failed, 2 refused, 130 stopped.
    """
    warnings.showwarning = lambda message, *_, **__: print(f"paragrad: {message}", file=sys.stderr)
    try:
        # Under a launcher no handler is installed, so that SIGTERM ends the rank at once: a rank
        # may wait for others in C++, where Python calls no handler.
        with raise_on_stop_signals() if detect_launch() is None else nullcontext():
            yield
            # a full disk fails here, not at the interpreter's exit
            sys.stdout.flush()
    except Refused as error:
        print(f"paragrad: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RankFailed as error:
        shown = f"{error.user_traceback}\n" if error.user_traceback else ""
        print(f"{shown}paragrad: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        print(
            f"paragrad: stopped{f'; {error}' if isinstance(error, Interrupted) else ''}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    # the reader of the pipe has closed it, as `| head` does
    except BrokenPipeError:
        _redirect_to_null(sys.stdout)
    except OSError as error:  # a full disk, a folder that is gone
        printed = _write_stream(
            sys.stderr,
            f"paragrad: {describe_write_error(error, error.filename or 'what it prints')}\n",
        )
        _write_stream(sys.stdout)
        # a terminal that was closed is no failure of the run
        terminal_closed = not printed and error.errno == errno.EIO and error.filename is None
        raise typer.Exit(0 if terminal_closed else 1) from None


def _write_stream(stream: TextIO, text: str = "") -> bool:
    """Write text and flush the stream; return whether that worked.

    If it fails, the stream is redirected. Otherwise Python would try again at its end, and print a
    message of its own.
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
    """Replace a character that a terminal or a file cannot encode; an error handler for codecs.

    Args:
        error: the encoding error.

    Returns:
        (replacement, position after it).
    """
    assert isinstance(error, UnicodeEncodeError)
    return REPLACEMENTS.get(error.object[error.start], "?"), error.start + 1
