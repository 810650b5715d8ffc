"""Walk all programs of a schedule in one process, with any meaning: numbers, contributions, a drawing.

`walk` visits the ranks in turn and lets each go as far as it can. How sends behave is an argument:

    asynchronous   a Send never blocks (unless it says wait=True)
    grouped        neighbouring messages that do not depend on each other are posted together, and end together (NCCL)
    rendezvous     every Send blocks until its Recv is posted (blocking MPI sends of long messages)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from paragrad.schedules.actions import Action, Compute, Program, Recv, ScheduleError, Send, Slot

Sends = Literal["asynchronous", "grouped", "rendezvous"]
Payload = TypeVar("Payload")


class Meaning(Protocol[Payload]):
    """What a message carries and what its arrival does. Slots belong to a rank."""

    def read(self, rank: int, send: Send) -> Payload: ...

    def write(self, rank: int, recv: Recv, payload: Payload) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class Message(Generic[Payload]):
    """A posted Send: taken once a Recv has it."""
    send: Send
    payload: Payload
    taken: bool = False


class Deadlock(ScheduleError):
    """Nobody can go on."""


def walk(program: Callable[[int, int], Program], size: int, meaning: Meaning[Payload],
         sends: Sends = "asynchronous") -> None:
    """Play `program(rank, size)` of every rank to its end; raises ScheduleError (Deadlock among them) by name."""
    pairs: dict[tuple[int, int], deque[Message[Payload]]] = {}
    ranks = [Walker(rank, program(rank, size), meaning, pairs, sends) for rank in range(size)]
    waiting = list(ranks)
    while waiting:
        moved = [walker.advance() for walker in waiting]
        if not any(moved):
            raise Deadlock(_picture(waiting, size, sends))
        waiting = [walker for walker in waiting if not walker.finished]
    for (source, target), left in pairs.items():
        if left:
            raise ScheduleError(f"rank {target} never receives slot {left[0].send.slot} that rank {source} sends to it")


class Walker(Generic[Payload]):
    """One rank on its way: the group of actions it stands at, and what of it is still open."""

    def __init__(self, rank: int, program: Program, meaning: Meaning[Payload],
                 pairs: dict[tuple[int, int], deque[Message[Payload]]], sends: Sends) -> None:
        self.rank, self.meaning, self.pairs, self.sends = rank, meaning, pairs, sends
        self.groups = _groups(program) if sends == "grouped" else ([action] for action in program)
        self.sent: list[Message[Payload]] = []          # of the present group
        self.receives: list[Recv] = []                  # of the present group, not yet taken
        self.finished = False
        self.trail: list[Action] = []

    def advance(self) -> bool:
        """Go as far as possible; whether anything happened."""
        moved = False
        while not self.finished:
            moved |= self._receive()
            if self.receives or any(self._blocks(message) for message in self.sent):
                return moved
            group = next(self.groups, None)
            self.finished, moved = group is None, True
            self.sent = []
            for action in group or []:
                self._post(action)
        return moved

    def _post(self, action: Action) -> None:
        self.trail.append(action)
        if isinstance(action, Send):
            message = Message(action, self.meaning.read(self.rank, action))
            self.pairs.setdefault((self.rank, action.to), deque()).append(message)
            self.sent.append(message)
        elif isinstance(action, Recv):
            self.receives.append(action)
        else:
            self.meaning.compute(self.rank, action)

    def _blocks(self, message: Message[Payload]) -> bool:
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
        if not queue:
            return False
        message = queue.popleft()
        if message.send.slot != recv.slot:
            raise ScheduleError(f"rank {self.rank} expects slot {recv.slot} from rank {recv.frm}, which sends slot "
                                f"{message.send.slot}: first sent is first received")
        message.taken = True
        self.meaning.write(self.rank, recv, message.payload)
        return True

    def waits_for(self) -> str:
        if self.receives:
            return f"slot {self.receives[0].slot} from rank {self.receives[0].frm}"
        blocked = next(message for message in self.sent if self._blocks(message))
        return f"rank {blocked.send.to} to take slot {blocked.send.slot}"


def _groups(program: Program) -> Iterator[list[Action]]:
    """Neighbouring messages that can be posted together: none reads or adds to what an earlier one writes."""
    group: list[Action] = []
    written: set[Slot] = set()
    for action in program:
        touched = action.at if isinstance(action, Compute) else action.slot
        if group and (isinstance(action, Compute) or isinstance(group[-1], Compute) or touched in written):
            yield group
            group, written = [], set()
        group.append(action)
        if isinstance(action, Recv):
            written.add(action.slot)
    if group:
        yield group


def _picture(waiting: list[Walker[Payload]], size: int, sends: Sends) -> str:
    """Who waits for what, with the last actions of each: the schedule around the hang."""
    first = waiting[0]
    lines = [f"deadlock among {size} ranks under {sends} sends: rank {first.rank} waits for {first.waits_for()}"]
    for walker in waiting[:8]:
        done = walker.trail[-4:]
        lines.append(f"   {walker.rank} | " + " ".join([*map(str, done[:-1]), f"[{done[-1]}]"]))
    return "\n".join(lines)
