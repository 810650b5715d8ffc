"""The actions of a schedule and their meaning.

A *program* is the ordered list of actions of one rank. A *schedule* is one program per rank,
generated lazily. Its meaning:

1. `Send(wait=False)` never blocks. `wait=True` is a rendezvous: the send ends when the receiver has
   the message (as MPI_Ssend and gloo's `send` do). With `after=True` an executor may first wait
   until the earlier sends of the rank are over; a program sets it where its order allows that.
   `Recv` waits for its message. `Compute` is serial.
2. Between a pair of ranks, messages arrive in the order in which they are sent. This order is the
   address; tags are not relied on. An executor compares slots and refuses a mismatch by name.
3. A write to a slot waits for the open sends of that slot. `Recv(add=True)` receives into scratch,
   waits for the sends of the slot, then adds. A plain `Recv` and a `Compute` first wait for the
   sends of the slot. Of a `Compute`, executors know the slot `at` only. Everything else that it
   reads or writes must be in slots that receive no later message.
4. A schedule works for any number of ranks (1, 3, odd, no power of two). It works for any length
   (empty, shorter than the number of ranks): chunks may be unequal or empty.
5. If no action depends on a choice made by rank, `rank` may be a number that stands for all ranks
   (`executors/rank_number.py`).

A schedule holds order only: it has no time and no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from paragrad.errors import Refused

MAX_PARTS = 1 << 22  # upper limit of `parts(size)`

# The name of a buffer. In a collective: the number of an equal part of the vector, or a range of
# neighbouring parts.
Slot = int | range | str


def format_slot(slot: Slot) -> str:
    """Return a slot as drawings show it: 3, or 4-7 for the parts 4 to 7."""
    return f"{slot[0]}-{slot[-1]}" if isinstance(slot, range) else str(slot)


def make_slot(start: int, stop: int) -> Slot:
    """Return the slot of the parts start .. stop - 1: a number if it is a single part."""
    return start if stop == start + 1 else range(start, stop)


def expand_slot(slot: Slot) -> Sequence[Slot]:
    """Return the parts that a slot stands for."""
    return slot if isinstance(slot, range) else (slot,)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a slot to another rank.

    Attributes:
        to: The rank that receives.

        slot: The slot to send.

        wait: Whether the send lasts until the receiver has the message.

        after: Whether an executor may first wait until the earlier sends of this rank are over.
    """

    to: int
    slot: Slot
    wait: bool = False
    after: bool = False

    def __str__(self) -> str:
        return f">{self.to}:{format_slot(self.slot)}" + ("!" if self.wait else "")


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive a slot from another rank.

    Attributes:
        frm: The rank that sends.
        slot: The slot to write.
        add: Whether the message is added to the slot; otherwise it overwrites the slot.
    """

    frm: int
    slot: Slot
    add: bool = False

    def __str__(self) -> str:
        return f"<{self.frm}:{format_slot(self.slot)}" + ("+" if self.add else "")


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a computation, such as a forward, a backward or an update.

    Attributes:
        what: The name of the computation.
        at: The slot that it writes.
    """

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
    """A schedule in which all ranks take part, each with a vector of the same length.

    The vector is divided into `parts(size)` equal parts (`split_evenly`). A slot is the number of a
    part, or a range of neighbouring parts. A schedule without `parts` has one part per rank.
    """

    def parts(self, size: int) -> int:
        return size


class AllReduceHalf(Collective, Protocol):
    """One half of an all-reduce.

    Between the halves each rank owns some parts, which hold the sum of the vectors of all ranks
    there. The first half produces this state. It is a reduce if one rank owns everything, and a
    reduce_scatter if each rank owns something. The second half is a broadcast or an all_gather: it
    sends the sums to all ranks.
    """

    def owns(self, rank: int, size: int) -> range: ...


class ScheduleError(ValueError):
    """An invalid schedule; the message names rank, slot and round (counted from 1, as drawn)."""


def split_evenly(length: int, parts: int) -> list[range]:
    """Divide 0..length into consecutive ranges; their lengths differ by at most one.

    Args:
        length: The number of elements.
        parts: The number of ranges.

    Returns:
        The ranges in order, the longer ones first.
    """
    short, longer = divmod(length, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def count_parts(schedule: Schedule, size: int) -> int:
    """Return into how many equal parts a collective divides the vector.

    Args:
        schedule: The collective. If it has no method `parts`, there is one part per rank.
        size: The number of ranks.

    Raises:
        ScheduleError: If `parts` fails, or does not return a whole number from 1 to MAX_PARTS.
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
    """Return the number of elements of every slot.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        length: The number of elements of the vector, or the elements of every slot by name.
    """
    if isinstance(length, Mapping):
        return dict(length)
    return dict(enumerate(len(part) for part in split_evenly(length, count_parts(schedule, size))))
