"""The office of a training whose workers wait for nobody: it hands out the samples, and knows
who is there.

A ticket is a share of a global batch in the exact order, or a part of a test, or what one
worker does for all at the end of an epoch. Every ticket is done once: of a worker that died, or
is silent for longer than the limit, another gets it. What a worker does late is refused by the
servers, who know which tickets they applied. An epoch ends when all its tickets are done, so a
test is of one model.

Under ssp(s) nobody gets a ticket who has done more than s more than the one who has done
fewest.

Who joins from elsewhere (`Guests`) is a member as any, under a number that is its key's alone;
but it has not the run's folder, so it keeps nothing there.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from paragrad.parallel.server.message_header import Header, InvalidMessage, MessageType
from paragrad.parallel.server.sockets import Listener, get_connection_key, process_request

TRAIN = "train"
TEST = "test"
KEEP = "keep"
END = "end"
LATE = 2  # of a ticket: its gradient was of older parameters, and was not used


@dataclass(frozen=True)
class Ticket:
    """What one worker is to do. number: of all that are trained;  step, share: which part of
    which batch;  part of parts: of a test;  wanted: of how many shares the step after `after`
    updates is made (-1: nobody knows);  keep: a checkpoint ("checkpoint") or the model
    ("model") is to be kept, of `step` steps;  workers: that were there when it was given, by
    which tickets do not differ.
    """

    what: str
    number: int = 0
    epoch: int = 0
    step: int = 0
    share: int = 0
    part: int = 0
    parts: int = 1
    keep: str = ""
    wanted: int = 1
    after: int = -1
    workers: int = field(default=0, compare=False)


@dataclass
class WorkerState:
    """A worker. done: tickets, counted from the fewest that anybody had done when it came;
    holds: what it is at;  since: when it got that, or asked;  trained: it has done so once;
    whose: the connection it asked over;  asking: whom to answer, while it waits;  answered: the
    number of its last question that was, and the answer.
    """

    number: int
    done_count: int
    since: float
    ticket: Ticket | None = None
    has_trained: bool = False
    connection: bytes = b""
    open_request: tuple[bytes, Header] | None = None
    last_answer: tuple[int, bytes] | None = None


class JoinHandler(Protocol):
    """Those who join from elsewhere. keys: whose each number is;  admit: what one is told that
    asks to take part, of what it would train as text, or None while nothing can be said (it is
    reminded of it, and asked again); raises Unfit;  check: may this be said of a ticket? Raises
    Unfit;  did: it has done a ticket that it was given, and says this of it;  left: it has said
    so.
    """

    keys: dict[int, bytes]

    def admit_worker(self, key: bytes, sender: int, text: bytes) -> bytes | None: ...

    def check_report(self, ticket: Ticket, report: dict[str, float]) -> None: ...

    def record_ticket(self, number: int, ticket: Ticket, report: dict[str, float]) -> None: ...

    def record_departure(self, number: int) -> None: ...


@dataclass
class WorkQueue:
    """bound: of ssp, or None;  wanted: shares that a step waits for, or None;  limit: seconds
    for a ticket;  told_of(member, ticket, said): called when one was done for the first
    time.
    """

    job: int
    bound: int | None
    wanted_shares: int | None
    limit: float
    on_ticket_done: Callable[[int, Ticket, dict[str, Any]], None]
    workers: dict[int, WorkerState] = field(default_factory=dict)
    waiting_tickets: deque[Ticket] = field(default_factory=deque)
    open_tickets: dict[Ticket, int] = field(default_factory=dict)  # who is at it
    # by number of a share: who was at it beside the last
    earlier_workers: dict[int, list[int]] = field(default_factory=dict)
    # updates of which all shares have been told of; of later ones somebody has
    updates_made: int | None = None
    # of how many, by the number of the update
    reported_shares: dict[int, int] = field(default_factory=dict)
    last_tickets: dict[int, Ticket] = field(default_factory=dict)  # to whom last
    is_ended: bool = False
    refusals: Counter[str] = field(default_factory=Counter)
    join_handler: JoinHandler | None = None

    def add_tickets(self, tickets: Iterable[Ticket]) -> None:
        """More to do."""
        self.waiting_tickets.extend(tickets)

    @property
    def is_idle(self) -> bool:
        """Is everything done that was given?"""
        return not self.waiting_tickets and not self.open_tickets

    # ---- messages ----------------------------------------------------------------------------
    def handle_message(self, listener: Listener, frames: list[Any]) -> None:
        """A worker says what it has done, and asks for more."""
        process_request(
            listener,
            frames,
            self.job,
            functools.partial(self._handle_request, listener),
            self.refusals,
        )

    def _handle_request(
        self, listener: Listener, connection: bytes, header: Header, rest: Sequence[Any]
    ) -> None:
        if header.kind == MessageType.REMIND:
            there = (connection, header.call) in (
                (each.connection, each.open_request[1].call)
                for each in self.workers.values()
                if each.open_request
            )
            listener.send_answer(
                connection, header.make_answer(MessageType.WAIT if there else MessageType.MISSED)
            )
            return
        if (
            header.kind not in (MessageType.NEXT, MessageType.JOIN, MessageType.LEAVE)
            or len(rest) != 1
        ):
            raise InvalidMessage(f"{header.kind.name} is no question of a worker's")
        key = get_connection_key(connection)
        if header.kind == MessageType.JOIN:
            if self.join_handler is None or key is None:
                raise InvalidMessage("nobody joins this training here")
            if self.is_ended:
                raise InvalidMessage("the training is over")
            if (
                told := self.join_handler.admit_worker(key, header.sender, rest[0].bytes)
            ) is not None:
                listener.send_answer(connection, header.make_answer(MessageType.JOINED), told)
            return
        number, ticket, said = self._parse_request(rest[0].bytes)
        guests = self.join_handler.keys if self.join_handler else {}
        if guests.get(number) != key:
            raise InvalidMessage("a number that is somebody else's")
        if key is not None and self.join_handler is not None:
            if ticket not in (None, self.last_tickets.get(number)):
                raise InvalidMessage("a ticket that it was not given")
            if ticket is not None:
                self.join_handler.check_report(ticket, said)
        member = self.workers.get(number)
        if (
            member is not None
            and member.last_answer is not None
            and member.last_answer[0] == header.call
        ):
            # it asked twice
            listener.send_answer(
                connection, header.make_answer(MessageType.GIVEN), member.last_answer[1]
            )
        elif (
            member is not None
            and member.open_request is not None
            and member.open_request[1].call == header.call
        ):
            member.connection = connection
            member.open_request = (connection, header)
            listener.send_answer(connection, header.make_answer(MessageType.WAIT))
        else:
            self._record_request(number, ticket, said, (connection, header))
            if self.join_handler is not None and key is not None and ticket is not None:
                self.join_handler.record_ticket(number, ticket, said)
        if header.kind == MessageType.LEAVE and self.join_handler is not None and key is not None:
            self.drop_worker(number)
            self.join_handler.record_departure(number)
            listener.send_answer(connection, header.make_answer(MessageType.DONE))

    @staticmethod
    def _parse_request(text: bytes) -> tuple[int, Ticket | None, dict[str, float]]:
        try:
            number, done, said = json.loads(text)
            ticket = Ticket(**done) if done else None
            return (
                int(number),
                ticket,
                {str(name): float(value) for name, value in dict(said).items()},
            )
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidMessage("a question that cannot be read") from error

    def _record_request(
        self,
        number: int,
        ticket: Ticket | None,
        report: dict[str, Any],
        request: tuple[bytes, Header],
    ) -> None:
        now = time.monotonic()
        member = self.workers.get(number)
        # it does not say what became of that
        if member is not None and member.ticket not in (None, ticket):
            self.drop_worker(number)
            member = None
        if member is None:
            fewest = min((each.done_count for each in self.workers.values()), default=0)
            member = WorkerState(number, fewest, now)
            self.workers[number] = member
        holder = self.open_tickets.pop(ticket, None) if ticket is not None else None
        if ticket is not None and holder is not None:
            # it may have brought it, and not said so yet
            if holder != number:
                self.earlier_workers.setdefault(ticket.number, []).append(holder)
            self._finish_ticket(member, ticket, report)
        # it was late, and nobody else has begun
        elif ticket is not None and ticket in self.waiting_tickets:
            self.waiting_tickets.remove(ticket)
            self._finish_ticket(member, ticket, report)
        member.connection = request[0]
        member.open_request = request
        member.since = now
        member.ticket = None

    def _finish_ticket(self, worker: WorkerState, ticket: Ticket, report: dict[str, Any]) -> None:
        if ticket.what == TRAIN:
            worker.has_trained = True
            late = report.get("became") == LATE  # it is to be done again
            if self.wanted_shares is not None:
                self._count_update(int(report.get("version", -1)), 0 if late else 1, ticket)
            if late:
                self.waiting_tickets.appendleft(ticket)
                return
            worker.done_count += 1
        self.on_ticket_done(worker.number, ticket, report)

    def _count_update(self, version: int, shares: int, ticket: Ticket) -> None:
        """Somebody says that so many updates were made; of the last one a share was, or was
        not, its own.
        """
        if self.updates_made is None:
            # who came first was late: nothing was made since
            self.updates_made = version
        # the server is behind: it was started again
        if not shares and ticket.after == self.updates_made and version < self.updates_made:
            self.updates_made = version
            self.reported_shares.clear()
        if version == self.updates_made + 1:
            self.reported_shares[version] = self.reported_shares.get(version, 0) + shares
        while self.reported_shares.get(self.updates_made + 1, 0) >= ticket.wanted:
            self.updates_made += 1
            del self.reported_shares[self.updates_made]

    def reset_updates(self) -> None:
        """The server was started again, and counts from its snapshot."""
        self.updates_made = None
        self.reported_shares.clear()

    def drop_worker(self, number: int) -> None:
        """A worker is gone: what it was at is somebody else's."""
        member = self.workers.pop(number, None)
        if (
            member is not None
            and member.ticket is not None
            and self.open_tickets.get(member.ticket) == number
        ):
            del self.open_tickets[member.ticket]
            self.waiting_tickets.appendleft(member.ticket)
            if member.ticket.what == TRAIN:
                self.earlier_workers.setdefault(member.ticket.number, []).append(number)

    def drop_connection(self, connection: bytes) -> int | None:
        """Whose connection this was is lost, if it had no other since; its number."""
        number = next(
            (each.number for each in self.workers.values() if each.connection == connection), None
        )
        if number is not None:
            self.drop_worker(number)
        return number

    def drop_late_workers(self) -> list[int]:
        """Who has been at a ticket for longer than the limit; they are lost until they ask
        again.
        """
        now = time.monotonic()
        found = [
            each.number
            for each in self.workers.values()
            if each.ticket is not None and now - each.since > self.limit
        ]
        for number in found:
            self.drop_worker(number)
        return found

    def _can_take(self, worker: WorkerState, ticket: Ticket, fewest: int) -> bool:
        """A worker that has not trained yet knows less of the model; it tests where nobody
        has.
        """
        if (
            ticket.what == TRAIN
            and self.reported_shares
            and ticket.number not in self.earlier_workers
        ):
            # until all of a step have said so: then it is known how many are left
            return False
        if ticket.what == TRAIN:
            return self.bound is None or worker.done_count - fewest <= self.bound
        joined = (
            self.join_handler.keys if self.join_handler is not None and ticket.what == KEEP else {}
        )
        able = [each for each in self.workers.values() if each.number not in joined]
        return worker.number not in joined and (
            worker.has_trained or not any(each.has_trained for each in able)
        )

    def hand_out_tickets(self, listener: Listener) -> None:
        """Answer those who wait, as far as there is something for them."""
        fewest = min((each.done_count for each in self.workers.values()), default=0)
        for member in sorted(self.workers.values(), key=lambda each: each.since):
            if member.open_request is None:
                continue
            if self.is_ended:
                ticket = Ticket(END)
            elif not self.waiting_tickets or not self._can_take(
                member, self.waiting_tickets[0], fewest
            ):
                continue
            else:
                ticket = self.waiting_tickets.popleft()
                if self.wanted_shares is not None and ticket.what == TRAIN:
                    remaining = 1 + sum(
                        each.what == TRAIN for each in (*self.waiting_tickets, *self.open_tickets)
                    )
                    ticket = replace(
                        ticket,
                        wanted=min(self.wanted_shares, remaining),
                        after=-1 if self.updates_made is None else self.updates_made,
                    )
                member.ticket = replace(ticket, workers=len(self.workers))
                ticket = member.ticket
                self.open_tickets[ticket] = member.number
            self.last_tickets[member.number] = ticket
            whose, header = member.open_request
            member.open_request = None
            member.since = time.monotonic()
            member.last_answer = header.call, json.dumps(asdict(ticket)).encode()
            listener.send_answer(
                whose, header.make_answer(MessageType.GIVEN), member.last_answer[1]
            )
