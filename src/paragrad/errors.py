"""The ways paragrad says no: at the door, before any rank starts; while ranks run; and when it
is told to stop.
"""

from __future__ import annotations

import errno
import os
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

LIBRARY_FOLDERS = (
    Path(__file__).parent,
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
)
# frames there are no user's; "<": of no file
LIBRARY_PREFIXES = (*(f"{folder}{os.sep}" for folder in LIBRARY_FOLDERS), "<")


SPACE_REPAIRS = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or have the quota raised",
    errno.EFBIG: "a process may write no longer files here: raise the limit (ulimit -f unlimited)",
}


class Refused(ValueError):
    """Bad input, found before any rank started. The message holds the repair. The command exits
    with 2.
    """


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run or a comparison. folder: where what was done until then is. The command
    exits with 130.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"what was done until then is in {folder}")
        self.folder = folder


class RankFailed(RuntimeError):
    """A rank failed while it ran. The command exits with 1.

    rank: which one, or None where it was the server that all come from; step: the training
    step, or None before the first; tensor: the one to blame, or None; traceback: the text of
    the failing rank's own traceback; differs: nothing broke, but it is another training than
    serial's.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None,
        step: int | None = None,
        tensor: str | None = None,
        traceback: str = "",
        differs: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.step = step
        self.tensor = tensor
        self.traceback = traceback
        self.differs = differs

    def with_message(self, message: str) -> RankFailed:
        """The same failure in other words."""
        return RankFailed(
            message,
            rank=self.rank,
            step=self.step,
            tensor=self.tensor,
            traceback=self.traceback,
            differs=self.differs,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(
            RankFailed,
            self.message,
            rank=self.rank,
            step=self.step,
            tensor=self.tensor,
            traceback=self.traceback,
            differs=self.differs,
        ), ()

    def __str__(self) -> str:
        return (
            self.message
            if self.rank is None
            else format_location(self.rank, self.step, self.tensor) + self.message
        )


class StepFailed(RuntimeError):
    """Raised inside a rank when a step cannot go on; the launcher turns it into RankFailed,
    with what it knows.

    when: on the host's monotonic clock; of what several ranks say, the first is the cause.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        tensor: str | None = None,
        differs: bool = False,
        when: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.tensor = tensor
        self.differs = differs
        self.when = time.monotonic() if when is None else when

    @classmethod
    def wrap_error(cls, error: BaseException, step: int | None = None) -> StepFailed:
        """Any error, with what it knows; one that is no StepFailed is told with its kind. step:
        the one under way, where the error names none.
        """
        message = error.message if isinstance(error, cls) else describe_error(error)
        own = getattr(error, "step", None)
        return cls(
            message,
            step=step if own is None else own,
            tensor=getattr(error, "tensor", None),
            differs=getattr(error, "differs", False),
            when=getattr(error, "when", None),
        )

    def __str__(self) -> str:
        return format_location(None, self.step, self.tensor) + self.message


def format_location(rank: int | None, step: int | None, tensor: str | None) -> str:
    """What begins a failure's sentence; what is None is left out."""
    named = [
        f"{what} {value}"
        for what, value in (("rank", rank), ("step", step), ("tensor", tensor))
        if value is not None
    ]
    return f"{', '.join(named)}: " if named else ""


def describe_error(error: BaseException) -> str:
    """An error of somebody's code in a line: its kind, what it says, the one it began with, and
    where, by the last line that is no library's.
    """
    if isinstance(error, OSError) and error.filename and error.errno in SPACE_REPAIRS:
        return describe_write_error(error, error.filename)
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(LIBRARY_PREFIXES)
    ]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = ""  # it says so itself
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    said = (getattr(root, "strerror", None) or str(root)) in str(error)
    began = "" if said else f" (it began with {type(root).__name__}: {root})"
    return f"{type(error).__name__}: {error}{began}{where}"


@contextmanager
def add_file_name(file: Any) -> Iterator[None]:
    """Around writing: an OSError has the file's name, which Python's own leaves out where it is
    a write that fails.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def describe_write_error(error: OSError, where: str) -> str:
    """What could not be written where, and the repair where it is one of room."""
    return f"{where}: {error.strerror or error}" + (
        f"; {SPACE_REPAIRS[error.errno]}" if error.errno in SPACE_REPAIRS else ""
    )


def format_user_traceback(error: BaseException) -> str:
    """The traceback of what first went wrong, from the first line of somebody's code on; whole
    where there is none.
    """
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    found = traceback.TracebackException.from_exception(error)
    first = next(
        (
            place
            for place, frame in enumerate(found.stack)
            if not frame.filename.startswith(LIBRARY_PREFIXES)
        ),
        0,
    )
    found.stack = traceback.StackSummary.from_list(found.stack[first:])
    return "".join(found.format(chain=first == 0))
