"""Interpret all programs of a schedule in one process.

The interpretation is an argument: numbers, contributions, a drawing. `interpret_schedule` visits
the ranks in turn and lets each go as far as it can. The behaviour of sends is an argument too:

    asynchronous   A Send never blocks (unless it has wait=True).
    grouped        Neighbouring messages that do not depend on each other are posted together,
                   and end together (NCCL).
    rendezvous     Every Send blocks until its Recv is posted (blocking MPI sends of long
                   messages).
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
    """What a message carries, and the effect of its arrival. Slots belong to a rank."""

    def read(self, rank: int, send: Send) -> Payload: ...

    def write(self, rank: int, recv: Recv, payload: Payload) -> None: ...

    def compute(self, rank: int, action: Compute) -> None: ...


@dataclass
class PostedSend(Generic[Payload]):
    """A posted Send.

    Attributes:
        send: The action.
        payload: The content of the message.
        round: The round of the Send.
        received: Whether a Recv has the message.
    """

    send: Send
    payload: Payload
    round: int
    received: bool = False


class RoundCounter:
    """The round of each action, counted from 1.

    In a round, a rank starts one send and ends one receive, as links carry both directions at once.
    A rank keeps the order of its own actions. A message cannot arrive before the round in which it
    is sent.

    Attributes:
        current: The round of each rank's last action, for interpretations that need it.

        next_send: The first round in which each rank can send.

        next_receive: The first round in which each rank can receive.
    """

    def __init__(self, size: int) -> None:
        self.current = [0] * size
        self.next_send = [1] * size
        self.next_receive = [1] * size

    def count_send(self, rank: int, wait: bool) -> int:
        """Count a Send of a rank and return its round."""
        round_ = max(self.next_send[rank], self.next_receive[rank])
        self.current[rank] = round_
        self.next_send[rank] = round_ + 1
        if wait:
            self.next_receive[rank] = round_ + 1
        return round_

    def count_receive(self, rank: int, sent: int) -> None:
        """Count a Recv of a rank.

        Args:
            rank: The rank that receives.
            sent: The round in which the message was sent.
        """
        self.current[rank] = max(sent, self.next_receive[rank])
        self.next_receive[rank] = self.current[rank] + 1

    def count_compute(self, rank: int) -> None:
        """Count a Compute of a rank."""
        self.current[rank] = max(self.next_send[rank], self.next_receive[rank])
        self.next_send[rank] = self.next_receive[rank] = self.current[rank] + 1


class Deadlock(ScheduleError):
    """No rank can continue."""


def interpret_schedule(
    program: Callable[[int, int], Program],
    size: int,
    interpretation: Interpretation[Payload],
    send_mode: SendMode = "asynchronous",
    rounds: RoundCounter | None = None,
) -> list[list[Action]]:
    """Run `program(rank, size)` of every rank to its end.

    Args:
        program: The program of a rank.

        size: The number of ranks.

        interpretation: What messages carry, and the effect of their arrival.

        send_mode: The behaviour of sends.

        rounds: The counter of rounds, for an interpretation that uses it.

    Returns:
        The actions of each rank.

    Raises:
        ScheduleError: If a message does not match or is never received; it names the ranks.

        Deadlock: If no rank can continue.
    """
    channels: dict[tuple[int, int], deque[PostedSend[Payload]]] = {}
    rounds = rounds or RoundCounter(size)
    ranks = [
        RankCursor(
            rank, read_program(program, rank, size), interpretation, channels, send_mode, rounds
        )
        for rank in range(size)
    ]
    waiting = list(ranks)
    while waiting:
        moved = [cursor.run_until_blocked() for cursor in waiting]
        if not any(moved):
            raise Deadlock(_draw_deadlock(waiting, size, send_mode))
        waiting = [cursor for cursor in waiting if not cursor.finished]
    for (source, target), left in channels.items():
        if left:
            raise ScheduleError(
                f"rank {target} never receives slot {format_slot(left[0].send.slot)} that rank "
                f"{source} sends to it, in round {left[0].round}"
            )
    return [cursor.actions_done for cursor in ranks]


class RankCursor(Generic[Payload]):
    """The position of one rank in its program: the current group of actions, and its open messages.

    Args:
        rank: The rank.

        program: Its program.

        interpretation: What messages carry, and the effect of their arrival.

        channels: The posted sends of each (source, target), shared by all ranks.

        send_mode: The behaviour of sends.

        rounds: The counter of rounds, shared by all ranks.
    """

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
        # Sends of the current group that wait until the open sends are over.
        self.due_sends: deque[PostedSend[Payload]] = deque()
        self.due_receives: list[Recv] = []  # of the current group, not yet received
        # Receives of the current group that are in scratch.
        self.added_receives: list[Recv] = []
        # The current group, until the sends of its slot are over.
        self.due_compute: Compute | None = None
        self.finished = False
        self.actions_done: list[Action] = []

    def run_until_blocked(self) -> bool:
        """Go as far as possible; return whether anything happened."""
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
        """Return whether the rank waits for a message, a send, or a slot that is being sent."""
        return (
            bool(self.due_sends or self.due_receives or self.due_compute)
            or any(map(self._is_blocking_send, self.open_sends))
            or any(self._find_open_send(recv.slot) for recv in self.added_receives)
        )

    def _find_open_send(self, slot: Slot) -> PostedSend[Payload] | None:
        """Return a send of the slot, or of a part of it, that is not over."""
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
        """Post the due sends; one with `after` waits until the sends before it are over."""
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
        """Run the due Compute once the sends of its slot are over."""
        if self.due_compute is None or self._find_open_send(self.due_compute.at):
            return False
        self.rounds.count_compute(self.rank)
        self.interpretation.compute(self.rank, self.due_compute)
        self.due_compute = None
        return True

    def _is_blocking_send(self, message: PostedSend[Payload]) -> bool:
        return not message.received and (message.send.wait or self.send_mode != "asynchronous")

    def _take_messages(self) -> bool:
        """Receive what has arrived: in order from one peer, in any order from several."""
        still_due: list[Recv] = []
        for recv in self.due_receives:
            if any(earlier.frm == recv.frm for earlier in still_due) or not self._take_message(
                recv
            ):
                still_due.append(recv)
        moved = len(still_due) < len(self.due_receives)
        self.due_receives = still_due
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
                f"which sends slot {format_slot(message.send.slot)}: first sent is first received "
                f"(round {self.rounds.current[self.rank]})"
            )
        message.received = True
        if recv.add:
            self.added_receives.append(recv)
        self.interpretation.write(self.rank, recv, message.payload)
        return True

    def describe_wait(self) -> str:
        """Return what the rank waits for."""
        first = self.due_receives[0] if self.due_receives else None
        if first and (first.add or not self._find_open_send(first.slot)):
            return f"slot {format_slot(first.slot)} from rank {first.frm}"
        written = [recv.slot for recv in (*self.due_receives, *self.added_receives)] + (
            [self.due_compute.at] if self.due_compute else []
        )
        conflicting = next(filter(None, map(self._find_open_send, written)), None)
        blocked = conflicting or next(
            message for message in self.open_sends if not message.received
        )
        return f"rank {blocked.send.to} to take slot {format_slot(blocked.send.slot)}"


def _group_actions(program: Program) -> Iterator[list[Action]]:
    """Group the messages of a round: sends, then receives, or the other way round.

    No message of a group reads or overwrites a slot that an earlier one writes. Receives that add
    to the same slot can go together: each has a scratch buffer of its own.
    """
    group: list[Action] = []
    written: set[Slot] = set()  # parts that a receive of the group overwrites
    added: set[Slot] = set()  # parts that a receive of the group adds to
    for action in program:
        if isinstance(action, Compute):
            starts_group = True
        else:
            parts = set(expand_slot(action.slot))
            adds = isinstance(action, Recv) and action.add
            starts_group = not parts.isdisjoint(written) or not (adds or parts.isdisjoint(added))
            starts_group |= (
                type(action) is not type(group[-1]) and type(action) is type(group[0])
                if group
                else False
            )
        if group and (starts_group or isinstance(group[-1], Compute)):
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
    """Return which rank waits for what, with the last actions of each."""
    first = waiting[0]
    lines = [
        f"deadlock among {size} ranks under {send_mode} sends: rank {first.rank} waits for "
        f"{first.describe_wait()} (round {first.rounds.next_receive[first.rank]})"
    ]
    for cursor in waiting[:8]:
        done = cursor.actions_done[-4:]
        lines.append(f"   {cursor.rank} | " + " ".join([*map(str, done[:-1]), f"[{done[-1]}]"]))
    return "\n".join(lines)
