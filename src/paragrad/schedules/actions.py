"""The words of a schedule, and what they mean.

A *program* is what one rank does, in order; a *schedule* is one program per rank, generated
lazily. Its meaning:

1. `Send(wait=False)` never blocks; `wait=True` is a rendezvous: it ends when the receiver has
the message (as MPI_Ssend
   and gloo's `send`). `after=True`: a player may wait, before it begins, until what the rank
   sent before is over: a program says so where its order allows that. `Recv` waits for its
   message. `Compute` is serial.
2. Between a pair of ranks, first sent is first received. Order is the address; tags are not
relied on. A player
   compares slots and refuses a mismatch by name.
3. A write to a slot with an open Send waits for it: `Recv(add=True)` receives into scratch,
waits for the slot's sends,
   then adds; a plain `Recv` and a `Compute` first wait for the slot's sends. Of a Compute the
   players know the slot `at` alone: what else it reads or writes must be slots that nothing is
   received into afterwards.
4. Any size (1, 3, odd, no power of two) and any length (empty, shorter than the size): chunks
may be unequal or empty.
5. Where no action depends on a choice made by rank, `rank` may as well be an array of all ranks
(`executors/uniform_clock.py`).

There is no time in a schedule and no result: it holds order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from paragrad.errors import Refused

MAX_PARTS = 1 << 22  # parts of a vector

# a buffer's name; in a collective the number of an equal part of the vector, or several
# neighbours
Slot = int | range | str


def format_slot(slot: Slot) -> str:
    """A slot as drawings show it: 3, or 4-7 for the parts 4 to 7."""
    return f"{slot[0]}-{slot[-1]}" if isinstance(slot, range) else str(slot)


def make_slot(start: int, stop: int) -> Slot:
    """The slot of the parts start .. stop - 1: a number where there is one only."""
    return start if stop == start + 1 else range(start, stop)


def expand_slot(slot: Slot) -> Sequence[Slot]:
    """The parts that a slot stands for."""
    return slot if isinstance(slot, range) else (slot,)


@dataclass(frozen=True, slots=True)
class Send:
    """Give slot to rank `to`; with `wait`, until it has it; `after`: it may begin when what was
    sent before is over.
    """

    to: int
    slot: Slot
    wait: bool = False
    after: bool = False

    def __str__(self) -> str:
        return f">{self.to}:{format_slot(self.slot)}" + ("!" if self.wait else "")


@dataclass(frozen=True, slots=True)
class Recv:
    """Take slot from rank `frm`: over what is there or, with `add`, added to it."""

    frm: int
    slot: Slot
    add: bool = False

    def __str__(self) -> str:
        return f"<{self.frm}:{format_slot(self.slot)}" + ("+" if self.add else "")


@dataclass(frozen=True, slots=True)
class Compute:
    """Do `what` (a forward, a backward, an update) at slot `at`."""

    what: str
    at: Slot

    def __str__(self) -> str:
        return f"{self.what}{format_slot(self.at)}"


Action = Send | Recv | Compute
Program = Iterator[Action]


class Schedule(Protocol):
    """One program per rank, over slots of any names."""

    def program(self, rank: int, size: int) -> Program: ...


class Collective(Schedule, Protocol):
    """What all ranks do together with a vector each, cut into `parts(size)` equal parts
    (`evenly`): a slot is the number of a part, or a range of neighbouring ones. Where there is
    no `parts`, there is one for each rank.
    """

    def parts(self, size: int) -> int:
        return size


class AllReduceHalf(Collective, Protocol):
    """One half of an all-reduce. Between the halves each rank owns some parts, which hold the
    sum of all ranks' vectors there.

    The first half makes it so: a reduce where one rank owns everything, a reduce_scatter where
    each owns something. The second tells everybody: a broadcast, or an all_gather.
    """

    def owns(self, rank: int, size: int) -> range: ...


class ScheduleError(ValueError):
    """A schedule that is not what it should be; the message names rank, slot and round (from 1,
    as they are drawn).
    """


def split_evenly(length: int, parts: int) -> list[range]:
    """0..length in `parts` consecutive ranges that differ by at most one, the longer ones
    first.
    """
    short, longer = divmod(length, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def count_parts(schedule: Schedule, size: int) -> int:
    """Into how many equal parts a collective cuts the vector among `size` ranks: one for each
    where it does not say.
    """
    parts = getattr(schedule, "parts", None)
    if parts is None:
        return size
    try:
        count = parts(size)
    except (ScheduleError, Refused):
        raise
    except Exception as error:
        raise ScheduleError(f"parts({size}) raised {type(error).__name__}: {error}") from error
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_PARTS:
        raise ScheduleError(
            f"parts({size}) is {count!r}: give a whole number from 1 to {MAX_PARTS:,}"
        )
    return count


def compute_slot_lengths(
    schedule: Schedule, size: int, length: int | Mapping[Slot, int]
) -> dict[Slot, int]:
    """Elements of every slot: of the parts of a vector of `length` elements, or as they are
    given by name.
    """
    if isinstance(length, Mapping):
        return dict(length)
    return dict(enumerate(len(part) for part in split_evenly(length, count_parts(schedule, size))))
