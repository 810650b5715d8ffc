"""The words of a schedule, and what they mean.

A *program* is what one rank does, in order; a *schedule* is one program per rank, generated lazily. Its meaning:

1. `Send(wait=False)` never blocks; `wait=True` is a rendezvous: it ends when the receiver has the message (as MPI_Ssend
   and gloo's `send`). `Recv` waits for its message. `Compute` is serial.
2. Between a pair of ranks, first sent is first received. Order is the address; tags are not relied on. A player
   compares slots and refuses a mismatch by name.
3. A write to a slot with an open Send waits for it: `Recv(add=True)` receives into scratch, waits for the slot's sends,
   then adds. A plain `Recv` onto a slot must come when its sends are known to be over.
4. Any size (1, 3, odd, no power of two) and any length (empty, shorter than the size): chunks may be unequal or empty.

There is no time in a schedule and no result: it holds order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

Slot = int | str        # the name of a buffer; in an all-reduce the number of an equal part of the vector


@dataclass(frozen=True, slots=True)
class Send:
    """Give slot to rank `to`; with `wait`, until it has it."""
    to: int
    slot: Slot
    wait: bool = False

    def __str__(self) -> str:
        return f">{self.to}:{self.slot}" + ("!" if self.wait else "")


@dataclass(frozen=True, slots=True)
class Recv:
    """Take slot from rank `frm`: over what is there or, with `add`, added to it."""
    frm: int
    slot: Slot
    add: bool = False

    def __str__(self) -> str:
        return f"<{self.frm}:{self.slot}" + ("+" if self.add else "")


@dataclass(frozen=True, slots=True)
class Compute:
    """Do `what` (a forward, a backward, an update) at slot `at`."""
    what: str
    at: Slot

    def __str__(self) -> str:
        return f"{self.what}{self.at}"


Action = Send | Recv | Compute
Program = Iterator[Action]


class AllReduce(Protocol):
    """A schedule after which every rank holds the sum of all ranks' vectors.

    The vector is cut into `parts(size)` equal parts (`evenly`); a slot is the number of a part.
    """

    def parts(self, size: int) -> int: ...

    def program(self, rank: int, size: int) -> Program: ...


class ScheduleError(ValueError):
    """A schedule that is not what it should be; the message names rank and slot."""


def evenly(length: int, parts: int) -> list[range]:
    """0..length in `parts` consecutive ranges that differ by at most one, the longer ones first."""
    short, longer = divmod(length, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
