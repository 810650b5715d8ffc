"""Walk all programs of a schedule in one process, with any meaning: numbers, contributions, a
drawing.

`walk` visits the ranks in turn and lets each go as far as it can. How sends behave is an
argument:

    asynchronous   a Send never blocks (unless it says wait=True) grouped        neighbouring
    messages that do not depend on each other are posted together, and end together (NCCL)
    rendezvous     every Send blocks until its Recv is posted (blocking MPI sends of long
    messages)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from paragrad.executors.program_reader import read
from paragrad.schedules.actions import (
    Action,
    Compute,
    Program,
    Recv,
    ScheduleError,
    Send,
    Slot,
    parts_in,
    shown,
)

Sends = Literal["asynchronous", "grouped", "rendezvous"]
Payload = TypeVar("Payload")


class Meaning(Protocol[Payload]):
    """What a message carries and what its arrival does. Slots belong to a rank."""

    def read(self, rank: int, send: Send) -> Payload: ...

    def write(self, rank: int, recv: Recv, payload: Payload) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class Posted(Generic[Payload]):
    """A posted Send: taken once a Recv has it."""

    send: Send
    payload: Payload
    round: int
    taken: bool = False


class Rounds:
    """Which round an action falls into, from 1: a rank starts one send and ends one receive in
    a round (links carry both ways at once), keeps the order of its own actions, and a message
    cannot arrive before the round it was sent in.

    of: the round of each rank's last action, which a Meaning may ask for.
    """

    def __init__(self, size: int) -> None:
        self.of = [0] * size
        # the first in which a rank can
        self.to_send = [1] * size
        self.to_receive = [1] * size

    def send(self, rank: int, wait: bool) -> int:
        found = max(self.to_send[rank], self.to_receive[rank])
        self.of[rank] = found
        self.to_send[rank] = found + 1
        if wait:
            self.to_receive[rank] = found + 1
        return found

    def receive(self, rank: int, sent: int) -> None:
        self.of[rank] = max(sent, self.to_receive[rank])
        self.to_receive[rank] = self.of[rank] + 1

    def compute(self, rank: int) -> None:
        self.of[rank] = max(self.to_send[rank], self.to_receive[rank])
        self.to_send[rank] = self.to_receive[rank] = self.of[rank] + 1


class Deadlock(ScheduleError):
    """Nobody can go on."""


def walk(
    program: Callable[[int, int], Program],
    size: int,
    meaning: Meaning[Payload],
    sends: Sends = "asynchronous",
    rounds: Rounds | None = None,
) -> list[list[Action]]:
    """Play `program(rank, size)` of every rank to its end; what each did. Raises ScheduleError
    (Deadlock among them) by name.

    rounds: counts them, for a meaning that wants to know.
    """
    pairs: dict[tuple[int, int], deque[Posted[Payload]]] = {}
    rounds = rounds or Rounds(size)
    ranks = [
        Cursor(rank, read(program, rank, size), meaning, pairs, sends, rounds)
        for rank in range(size)
    ]
    waiting = list(ranks)
    while waiting:
        moved = [cursor.advance() for cursor in waiting]
        if not any(moved):
            raise Deadlock(_picture(waiting, size, sends))
        waiting = [cursor for cursor in waiting if not cursor.finished]
    for (source, target), left in pairs.items():
        if left:
            raise ScheduleError(
                f"rank {target} never receives slot {shown(left[0].send.slot)} that rank {source} "
                f"sends to it, "
                f"in round {left[0].round}"
            )
    return [cursor.trail for cursor in ranks]


class Cursor(Generic[Payload]):
    """One rank on its way: the group of actions it stands at, and what of it is still open."""

    def __init__(
        self,
        rank: int,
        program: Program,
        meaning: Meaning[Payload],
        pairs: dict[tuple[int, int], deque[Posted[Payload]]],
        sends: Sends,
        rounds: Rounds,
    ) -> None:
        self.rank = rank
        self.meaning = meaning
        self.pairs = pairs
        self.sends = sends
        self.rounds = rounds
        self.groups = _groups(program) if sends == "grouped" else ([action] for action in program)
        self.sent: list[Posted[Payload]] = []  # sends that may not be over
        # of the present group, which wait until those are over
        self.due_sends: deque[Posted[Payload]] = deque()
        self.receives: list[Recv] = []  # of the present group, not yet taken
        # of the present group, waiting in scratch
        self.added: list[Recv] = []
        # the present group, until the sends of its slot are over
        self.due: Compute | None = None
        self.finished = False
        self.trail: list[Action] = []

    def advance(self) -> bool:
        """Go as far as possible; whether anything happened."""
        moved = False
        while not self.finished:
            moved |= self._send() | self._receive() | self._compute()
            if self._held_up():
                return moved
            group = next(self.groups, None)
            self.finished = group is None
            moved = True
            self.added = []
            for action in group or []:
                self._post(action)
        return moved

    def _held_up(self) -> bool:
        """A message has not come, a send blocks, or a slot that is to be written is still being
        sent.
        """
        return (
            bool(self.due_sends or self.receives or self.due)
            or any(map(self._blocks, self.sent))
            or any(self._open(recv.slot) for recv in self.added)
        )

    def _open(self, slot: Slot) -> Posted[Payload] | None:
        """A send of the slot, or of a part of it, that is not over."""
        if not self.sent:
            return None
        self.sent = [message for message in self.sent if not message.taken]
        parts = set(parts_in(slot))
        return next(
            (message for message in self.sent if not parts.isdisjoint(parts_in(message.send.slot))),
            None,
        )

    def _post(self, action: Action) -> None:
        self.trail.append(action)
        if isinstance(action, Send):
            sent = self.rounds.send(self.rank, action.wait)
            message = Posted(action, self.meaning.read(self.rank, action), sent)
            self.due_sends.append(message)
            self._send()
        elif isinstance(action, Recv):
            self.receives.append(action)
        else:
            self.due = action

    def _send(self) -> bool:
        """Post what is due; one that comes after those before it, when they are over."""
        moved = False
        while self.due_sends and not (
            self.due_sends[0].send.after and any(not message.taken for message in self.sent)
        ):
            message = self.due_sends.popleft()
            self.pairs.setdefault((self.rank, message.send.to), deque()).append(message)
            self.sent.append(message)
            moved = True
        return moved

    def _compute(self) -> bool:
        """Compute what is due, once the sends of its slot are over."""
        if self.due is None or self._open(self.due.at):
            return False
        self.rounds.compute(self.rank)
        self.meaning.compute(self.rank, self.due)
        self.due = None
        return True

    def _blocks(self, message: Posted[Payload]) -> bool:
        return not message.taken and (message.send.wait or self.sends != "asynchronous")

    def _receive(self) -> bool:
        """Take what has come; from one peer in order, from different peers in any."""
        left: list[Recv] = []
        for recv in self.receives:
            if any(earlier.frm == recv.frm for earlier in left) or not self._take(recv):
                left.append(recv)
        moved = len(left) < len(self.receives)
        self.receives = left
        return moved

    def _take(self, recv: Recv) -> bool:
        queue = self.pairs.get((recv.frm, self.rank))
        if not queue or (not recv.add and self._open(recv.slot)):
            return False
        message = queue.popleft()
        self.rounds.receive(self.rank, message.round)
        if message.send.slot != recv.slot:
            raise ScheduleError(
                f"rank {self.rank} expects slot {shown(recv.slot)} from rank {recv.frm}, which "
                f"sends slot "
                f"{shown(message.send.slot)}: first sent is first received (round "
                f"{self.rounds.of[self.rank]})"
            )
        message.taken = True
        if recv.add:
            self.added.append(recv)
        self.meaning.write(self.rank, recv, message.payload)
        return True

    def waits_for(self) -> str:
        first = self.receives[0] if self.receives else None
        if first and (first.add or not self._open(first.slot)):
            return f"slot {shown(first.slot)} from rank {first.frm}"
        written = [recv.slot for recv in (*self.receives, *self.added)] + (
            [self.due.at] if self.due else []
        )
        to_write = next(filter(None, map(self._open, written)), None)
        blocked = to_write or next(message for message in self.sent if not message.taken)
        return f"rank {blocked.send.to} to take slot {shown(blocked.send.slot)}"


def _groups(program: Program) -> Iterator[list[Action]]:
    """The messages of a round: sends, then receives (or the other way round), none of which
    reads or overwrites what an earlier one writes. Receives that add to the same slot can go
    together: each comes into scratch of its own.
    """
    group: list[Action] = []
    written: set[Slot] = set()  # parts that a receive of the group overwrites
    added: set[Slot] = set()  # and those that one adds to
    for action in program:
        if isinstance(action, Compute):
            starts_anew = True
        else:
            parts = set(parts_in(action.slot))
            adds = isinstance(action, Recv) and action.add
            starts_anew = not parts.isdisjoint(written) or not (adds or parts.isdisjoint(added))
            starts_anew |= (
                type(action) is not type(group[-1]) and type(action) is type(group[0])
                if group
                else False
            )
        if group and (starts_anew or isinstance(group[-1], Compute)):
            yield group
            group = []
            written = set()
            added = set()
        group.append(action)
        if isinstance(action, Recv):
            (added if action.add else written).update(parts_in(action.slot))
    if group:
        yield group


def _picture(waiting: list[Cursor[Payload]], size: int, sends: Sends) -> str:
    """Who waits for what, with the last actions of each: the schedule around the hang."""
    first = waiting[0]
    lines = [
        f"deadlock among {size} ranks under {sends} sends: rank {first.rank} waits for "
        f"{first.waits_for()} (round "
        f"{first.rounds.to_receive[first.rank]})"
    ]
    for cursor in waiting[:8]:
        done = cursor.trail[-4:]
        lines.append(f"   {cursor.rank} | " + " ".join([*map(str, done[:-1]), f"[{done[-1]}]"]))
    return "\n".join(lines)
