"""The two ways paragrad says no: at the door, before any rank starts; and while ranks run."""

from __future__ import annotations

from functools import partial
from typing import Any


class Refused(ValueError):
    """Bad input, found before any rank started. The message holds the repair. The command exits with 2."""


class RankFailed(RuntimeError):
    """A rank failed while it ran. The command exits with 1.

    rank: which one, or None where it was the server that all come from; step: the training step, or None before the first;
    tensor: the one to blame, or None; traceback: the text of the failing rank's own traceback; differs: nothing broke, but it
    is another training than serial's.
    """

    def __init__(self, message: str, *, rank: int | None, step: int | None = None, tensor: str | None = None,
                 traceback: str = "", differs: bool = False) -> None:
        super().__init__(message)
        self.message, self.rank, self.step, self.tensor = message, rank, step, tensor
        self.traceback, self.differs = traceback, differs

    def saying(self, message: str) -> RankFailed:
        """The same failure in other words."""
        return RankFailed(message, rank=self.rank, step=self.step, tensor=self.tensor, traceback=self.traceback,
                          differs=self.differs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RankFailed, self.message, rank=self.rank, step=self.step, tensor=self.tensor,
                       traceback=self.traceback, differs=self.differs), ()

    def __str__(self) -> str:
        if self.rank is None:
            return self.message
        where = f"rank {self.rank}"
        if self.step is not None:
            where += f", step {self.step}"
        if self.tensor is not None:
            where += f", tensor {self.tensor}"
        return f"{where}: {self.message}"


class StepFailed(RuntimeError):
    """Raised inside a rank when a step cannot go on; the launcher turns it into RankFailed, with what it knows."""

    def __init__(self, message: str, *, step: int | None = None, tensor: str | None = None, differs: bool = False) -> None:
        super().__init__(message)
        self.step, self.tensor, self.differs = step, tensor, differs

    @classmethod
    def of(cls, error: BaseException, step: int | None = None) -> StepFailed:
        """Any error, with what it knows; one that is no StepFailed is told with its kind. step: the one under way, if known."""
        message = str(error) if isinstance(error, cls) else f"{type(error).__name__}: {error}"
        return cls(message, step=getattr(error, "step", None) if step is None else step,
                   tensor=getattr(error, "tensor", None), differs=getattr(error, "differs", False))
