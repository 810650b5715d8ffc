"""The errors of paragrad: before any rank starts, while ranks run, and when the user stops it."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARY_FOLDERS = (
    Path(__file__).parent,
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
)
# frames in these places are not user code; "<" begins the name of code without a file
LIBRARY_PREFIXES = (*(f"{folder}{os.sep}" for folder in LIBRARY_FOLDERS), "<")
OWN_PREFIX = LIBRARY_PREFIXES[0]
NOTE_PREFIX = "paragrad: "  # of notes that paragrad adds to errors


SPACE_REPAIRS = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or have the quota raised",
    errno.EFBIG: "a process cannot write longer files here: raise the limit (ulimit -f unlimited)",
}


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code, also in a shell or a notebook.

    Args:
        frame: The frame.
    """
    return not (file := frame.f_code.co_filename).startswith(LIBRARY_PREFIXES) or (
        file.startswith("<") and frame.f_globals.get("__name__") == "__main__"
    )


def warn_user(message: str) -> None:
    """Warn at the line of the user's code that called paragrad.

    Args:
        message: The message.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_frame(frame):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


class Refused(ValueError):
    """Bad input, found before any rank starts.

    The message says how to repair it. The command exits with 2.
    """


class UnknownName(Refused):
    """A name that is not known, or not yet: the file of a job may define it."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run or a comparison. The command exits with 130.

    Attributes:
        folder: The folder that holds the results up to then.
    """

    def __init__(self, folder: Path, saved_step: int | None = None) -> None:
        super().__init__(
            f"the results so far are in {folder}"
            if saved_step is None
            else f"step {saved_step} is saved in {folder}; go on with resume={str(folder)!r}"
        )
        self.folder = folder


class RankFailed(RuntimeError):
    """A rank failed while it ran. The command exits with 1.

    Attributes:
        message: What happened.

        rank: The rank, or None if the server that starts all ranks failed.

        step: The training step, or None before the first.

        tensor: The tensor that caused it, or None.

        traceback: The text of the failing rank's whole traceback.

        user_traceback: The lines of user code in it, if user code raised the error; otherwise
            empty. The command prints it above the message.

        differs: True if nothing broke, but the training differs from serial's.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None,
        step: int | None = None,
        tensor: str | None = None,
        traceback: str = "",
        user_traceback: str = "",
        differs: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.step = step
        self.tensor = tensor
        self.traceback = traceback
        self.user_traceback = user_traceback
        self.differs = differs

    @classmethod
    def wrap_error(cls, error: BaseException, rank: int | None) -> RankFailed:
        """Make the failure of a rank from the error that it raised.

        Args:
            error: The error.
            rank: The rank, or None.

        Returns:
            The failure, with the step and the tensor that the error names, and with its traceback.
        """
        failure = StepFailed.wrap_error(error)
        return cls(
            failure.message,
            rank=rank,
            step=failure.step,
            tensor=failure.tensor,
            traceback="".join(traceback.format_exception(error)),
            user_traceback=format_user_traceback(error),
            differs=failure.differs,
        )

    def with_message(self, message: str) -> RankFailed:
        """Return the same failure with another message.

        Args:
            message: The new message.

        Returns:
            The new error.
        """
        return RankFailed(
            message,
            rank=self.rank,
            step=self.step,
            tensor=self.tensor,
            traceback=self.traceback,
            user_traceback=self.user_traceback,
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
            user_traceback=self.user_traceback,
            differs=self.differs,
        ), ()

    def __str__(self) -> str:
        return (
            self.message
            if self.rank is None
            else format_location(self.rank, self.step, self.tensor) + self.message
        )


class StepFailed(RuntimeError):
    """Raised in a rank when a step cannot continue; the launcher turns it into RankFailed.

    Attributes:
        message: What happened.

        step: The training step, or None.

        tensor: The tensor that caused it, or None.

        differs: True if nothing broke, but the training differs from serial's.

        when: The time on the host's monotonic clock. If several ranks fail, the first failure is
            the cause.
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
        """Wrap any error, with the step and tensor that it names.

        The message of an error that is no StepFailed includes its kind.

        Args:
            error: The error.
            step: The current step, used if the error names none.

        Returns:
            The wrapped error.
        """
        message = error.message if isinstance(error, cls) else describe_error(error)
        own_step = getattr(error, "step", None)
        return cls(
            message,
            step=step if own_step is None else own_step,
            tensor=getattr(error, "tensor", None),
            differs=getattr(error, "differs", False),
            when=getattr(error, "when", None),
        )

    def __str__(self) -> str:
        return format_location(None, self.step, self.tensor) + self.message


def format_location(rank: int | None, step: int | None, tensor: str | None) -> str:
    """Format the beginning of a failure's message; values that are None are left out.

    Args:
        rank: The rank.
        step: The step.
        tensor: The tensor.

    Returns:
        Such as `rank 1, step 3: `, or an empty text.
    """
    named = [
        f"{what} {value}"
        for what, value in (("rank", rank), ("step", step), ("tensor", tensor))
        if value is not None
    ]
    return f"{', '.join(named)}: " if named else ""


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error, its cause, the cause of that, and so on.

    Args:
        error: The error. User code may have raised it from itself (`raise error from error`).

    Yields:
        Each error once.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def describe_error(error: BaseException) -> str:
    """Describe an error of user code in one line.

    The line contains its kind, its message, the first cause, the last place outside of libraries,
    and the notes that paragrad added.

    Args:
        error: The error.

    Returns:
        The line.
    """
    if isinstance(error, OSError) and error.filename and error.errno in SPACE_REPAIRS:
        return describe_write_error(error, error.filename)
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(LIBRARY_PREFIXES)
    ]
    place = f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = ""  # its message names the file
    *_, root = iterate_causes(error)
    is_named = (getattr(root, "strerror", None) or str(root)) in str(error)
    cause = "" if is_named else f" (first cause: {type(root).__name__}: {root})"
    notes = "".join(
        f"; {each.removeprefix(NOTE_PREFIX)}"
        for each in getattr(error, "__notes__", ())
        if each.startswith(NOTE_PREFIX)
    )
    return f"{type(error).__name__}: {error}{cause}{place}{notes}"


@contextmanager
def add_file_name(file: Any) -> Iterator[None]:
    """Add the name of a file to an OSError of a block.

    Python leaves the name out if a write fails.

    Args:
        file: The file.

    Raises:
        OSError: The error with the name.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def describe_write_error(error: OSError, where: str) -> str:
    """Describe that a file could not be written, with the repair if there is no space.

    Args:
        error: The error.
        where: The file or folder.

    Returns:
        The message.
    """
    return f"{where}: {error.strerror or error}" + (
        f"; {SPACE_REPAIRS[error.errno]}" if error.errno in SPACE_REPAIRS else ""
    )


def format_user_traceback(error: BaseException) -> str:
    """Format the traceback of the first cause, from the first line of user code on.

    Lines of paragrad are left out.

    Args:
        error: The error.

    Returns:
        The text; empty if paragrad itself raised the error, or if no user code was running.
    """
    first = error
    for each in iterate_causes(error):
        if each is not error and each.__traceback__ is None:
            break
        first = each
    formatted = traceback.TracebackException.from_exception(first)
    user_frames = itertools.dropwhile(
        lambda frame: frame.filename.startswith(LIBRARY_PREFIXES), formatted.stack
    )
    shown_frames = [frame for frame in user_frames if not frame.filename.startswith(OWN_PREFIX)]
    if isinstance(first, StepFailed | Refused | RankFailed) or not shown_frames:
        return ""
    formatted.stack = traceback.StackSummary.from_list(shown_frames)
    return "".join(formatted.format(chain=False))
