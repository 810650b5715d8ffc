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

from paragrad.executors.program_reader import read_program
from paragrad.schedules.actions import (
    Action,
    Compute,
    Program,
    Recv,
    ScheduleError,
    Send,
    Slot,
    expand_slot,
    format_slot,
)

SendMode = Literal["asynchronous", "grouped", "rendezvous"]
Payload = TypeVar("Payload")


class Interpretation(Protocol[Payload]):
    """What a message carries and what its arrival does. Slots belong to a rank."""

    def read(self, rank: int, send: Send) -> Payload: ...

    def write(self, rank: int, recv: Recv, payload: Payload) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class PostedSend(Generic[Payload]):
    """A posted Send: taken once a Recv has it."""

    send: Send
    payload: Payload
    round: int
    received: bool = False


class RoundCounter:
    """Which round an action falls into, from 1: a rank starts one send and ends one receive in
    a round (links carry both ways at once), keeps the order of its own actions, and a message
    cannot arrive before the round it was sent in.

    of: the round of each rank's last action, which a Meaning may ask for.
    """

    def __init__(self, size: int) -> None:
        self.current = [0] * size
        # the first in which a rank can
        self.next_send = [1] * size
        self.next_receive = [1] * size

    def count_send(self, rank: int, wait: bool) -> int:
        found = max(self.next_send[rank], self.next_receive[rank])
        self.current[rank] = found
        self.next_send[rank] = found + 1
        if wait:
            self.next_receive[rank] = found + 1
        return found

    def count_receive(self, rank: int, sent: int) -> None:
        self.current[rank] = max(sent, self.next_receive[rank])
        self.next_receive[rank] = self.current[rank] + 1

    def count_compute(self, rank: int) -> None:
        self.current[rank] = max(self.next_send[rank], self.next_receive[rank])
        self.next_send[rank] = self.next_receive[rank] = self.current[rank] + 1


class Deadlock(ScheduleError):
    """Nobody can go on."""


def interpret_schedule(
    program: Callable[[int, int], Program],
    size: int,
    interpretation: Interpretation[Payload],
    send_mode: SendMode = "asynchronous",
    rounds: RoundCounter | None = None,
) -> list[list[Action]]:
    """Play `program(rank, size)` of every rank to its end; what each did. Raises ScheduleError
    (Deadlock among them) by name.

    rounds: counts them, for a meaning that wants to know.
    """
    pairs: dict[tuple[int, int], deque[PostedSend[Payload]]] = {}
    rounds = rounds or RoundCounter(size)
    ranks = [
        RankCursor(
            rank, read_program(program, rank, size), interpretation, pairs, send_mode, rounds
        )
        for rank in range(size)
    ]
    waiting = list(ranks)
    while waiting:
        moved = [cursor.run_until_blocked() for cursor in waiting]
        if not any(moved):
            raise Deadlock(_draw_deadlock(waiting, size, send_mode))
        waiting = [cursor for cursor in waiting if not cursor.finished]
    for (source, target), left in pairs.items():
        if left:
            raise ScheduleError(
                f"rank {target} never receives slot {format_slot(left[0].send.slot)} that rank "
                f"{source} "
                f"sends to it, "
                f"in round {left[0].round}"
            )
    return [cursor.actions_done for cursor in ranks]


class RankCursor(Generic[Payload]):
    """One rank on its way: the group of actions it stands at, and what of it is still open."""

    def __init__(
        self,
        rank: int,
        program: Program,
        interpretation: Interpretation[Payload],
        channels: dict[tuple[int, int], deque[PostedSend[Payload]]],
        send_mode: SendMode,
        rounds: RoundCounter,
    ) -> None:
        self.rank = rank
        self.interpretation = interpretation
        self.channels = channels
        self.send_mode = send_mode
        self.rounds = rounds
        self.action_groups = (
            _group_actions(program) if send_mode == "grouped" else ([action] for action in program)
        )
        self.open_sends: list[PostedSend[Payload]] = []  # sends that may not be over
        # of the present group, which wait until those are over
        self.due_sends: deque[PostedSend[Payload]] = deque()
        self.due_receives: list[Recv] = []  # of the present group, not yet taken
        # of the present group, waiting in scratch
        self.added_receives: list[Recv] = []
        # the present group, until the sends of its slot are over
        self.due_compute: Compute | None = None
        self.finished = False
        self.actions_done: list[Action] = []

    def run_until_blocked(self) -> bool:
        """Go as far as possible; whether anything happened."""
        moved = False
        while not self.finished:
            moved |= self._post_due_sends() | self._take_messages() | self._run_due_compute()
            if self._is_blocked():
                return moved
            group = next(self.action_groups, None)
            self.finished = group is None
            moved = True
            self.added_receives = []
            for action in group or []:
                self._post_action(action)
        return moved

    def _is_blocked(self) -> bool:
        """A message has not come, a send blocks, or a slot that is to be written is still being
        sent.
        """
        return (
            bool(self.due_sends or self.due_receives or self.due_compute)
            or any(map(self._is_blocking_send, self.open_sends))
            or any(self._find_open_send(recv.slot) for recv in self.added_receives)
        )

    def _find_open_send(self, slot: Slot) -> PostedSend[Payload] | None:
        """A send of the slot, or of a part of it, that is not over."""
        if not self.open_sends:
            return None
        self.open_sends = [message for message in self.open_sends if not message.received]
        parts = set(expand_slot(slot))
        return next(
            (
                message
                for message in self.open_sends
                if not parts.isdisjoint(expand_slot(message.send.slot))
            ),
            None,
        )

    def _post_action(self, action: Action) -> None:
        self.actions_done.append(action)
        if isinstance(action, Send):
            sent = self.rounds.count_send(self.rank, action.wait)
            message = PostedSend(action, self.interpretation.read(self.rank, action), sent)
            self.due_sends.append(message)
            self._post_due_sends()
        elif isinstance(action, Recv):
            self.due_receives.append(action)
        else:
            self.due_compute = action

    def _post_due_sends(self) -> bool:
        """Post what is due; one that comes after those before it, when they are over."""
        moved = False
        while self.due_sends and not (
            self.due_sends[0].send.after
            and any(not message.received for message in self.open_sends)
        ):
            message = self.due_sends.popleft()
            self.channels.setdefault((self.rank, message.send.to), deque()).append(message)
            self.open_sends.append(message)
            moved = True
        return moved

    def _run_due_compute(self) -> bool:
        """Compute what is due, once the sends of its slot are over."""
        if self.due_compute is None or self._find_open_send(self.due_compute.at):
            return False
        self.rounds.count_compute(self.rank)
        self.interpretation.compute(self.rank, self.due_compute)
        self.due_compute = None
        return True

    def _is_blocking_send(self, message: PostedSend[Payload]) -> bool:
        return not message.received and (message.send.wait or self.send_mode != "asynchronous")

    def _take_messages(self) -> bool:
        """Take what has come; from one peer in order, from different peers in any."""
        left: list[Recv] = []
        for recv in self.due_receives:
            if any(earlier.frm == recv.frm for earlier in left) or not self._take_message(recv):
                left.append(recv)
        moved = len(left) < len(self.due_receives)
        self.due_receives = left
        return moved

    def _take_message(self, recv: Recv) -> bool:
        queue = self.channels.get((recv.frm, self.rank))
        if not queue or (not recv.add and self._find_open_send(recv.slot)):
            return False
        message = queue.popleft()
        self.rounds.count_receive(self.rank, message.round)
        if message.send.slot != recv.slot:
            raise ScheduleError(
                f"rank {self.rank} expects slot {format_slot(recv.slot)} from rank {recv.frm}, "
                f"which "
                f"sends slot "
                f"{format_slot(message.send.slot)}: first sent is first received (round "
                f"{self.rounds.current[self.rank]})"
            )
        message.received = True
        if recv.add:
            self.added_receives.append(recv)
        self.interpretation.write(self.rank, recv, message.payload)
        return True

    def describe_wait(self) -> str:
        first = self.due_receives[0] if self.due_receives else None
        if first and (first.add or not self._find_open_send(first.slot)):
            return f"slot {format_slot(first.slot)} from rank {first.frm}"
        written = [recv.slot for recv in (*self.due_receives, *self.added_receives)] + (
            [self.due_compute.at] if self.due_compute else []
        )
        to_write = next(filter(None, map(self._find_open_send, written)), None)
        blocked = to_write or next(message for message in self.open_sends if not message.received)
        return f"rank {blocked.send.to} to take slot {format_slot(blocked.send.slot)}"


def _group_actions(program: Program) -> Iterator[list[Action]]:
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
            parts = set(expand_slot(action.slot))
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
            (added if action.add else written).update(expand_slot(action.slot))
    if group:
        yield group


def _draw_deadlock(waiting: list[RankCursor[Payload]], size: int, send_mode: SendMode) -> str:
    """Who waits for what, with the last actions of each: the schedule around the hang."""
    first = waiting[0]
    lines = [
        f"deadlock among {size} ranks under {send_mode} sends: rank {first.rank} waits for "
        f"{first.describe_wait()} (round "
        f"{first.rounds.next_receive[first.rank]})"
    ]
    for cursor in waiting[:8]:
        done = cursor.actions_done[-4:]
        lines.append(f"   {cursor.rank} | " + " ".join([*map(str, done[:-1]), f"[{done[-1]}]"]))
    return "\n".join(lines)
