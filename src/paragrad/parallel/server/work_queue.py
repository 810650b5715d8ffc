"""A queue of sample ranges for asynchronous training. It also tracks which workers are alive.

A ticket is one of three tasks: a share of a global batch, a part of a test, or a task that one
worker does for all at the end of an epoch. Shares have the exact order of samples. Every ticket is
done once. If a worker dies, or is silent for longer than the limit, another worker gets its ticket.
Servers know which tickets they applied, so they refuse late pushes. An epoch ends when all its
tickets are done, so a test uses one model.

Under ssp(s) a worker waits for its next ticket if it has done more than s tickets more than the
slowest worker.

A worker that joins from another host (`JoinHandler`) is a worker like any other, and its number
belongs to its key only. It has no access to the folder of the run, so it gets no tickets that save
something.
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
LATE = 2  # outcome of a ticket: its gradient belonged to older parameters and was not used


@dataclass(frozen=True)
class Ticket:
    """A task for one worker.

    Attributes:
        what: TRAIN, TEST, KEEP or END.

        number: Number among all tickets of training.

        epoch: Number of the epoch.

        step: Number of the batch; for KEEP, the number of steps to save.

        share: Number of the share in the batch.

        part: Number of the part of a test.

        parts: Number of parts of the test.

        keep: What to save: "checkpoint" or "model".

        wanted: Number of shares of the next step.

        after: Number of updates before that step; -1 if it is unknown.

        workers: Number of workers when the ticket was given. It does not distinguish tickets.
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
    """The state of a worker.

    Attributes:
        number: Number of the worker.

        done_count: Number of tickets it has done, counted from that of the slowest worker when it
            came.

        since: Time when it got its ticket or sent its request.

        ticket: Its current ticket, or None.

        has_trained: Whether it has done a ticket of training.

        connection: The connection of its last request.

        open_request: (connection, header) of its request, while it waits for an answer.

        last_answer: (number of the request, answer) of its last answered request.
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
    """Handles workers that join from other hosts.

    Attributes:
        keys: The public key of each worker number.
    """

    keys: dict[int, bytes]

    def admit_worker(self, key: bytes, sender: int, text: bytes) -> bytes | None:
        """Admit a worker.

        Args:
            key: Its public key.
            sender: The random number of the process.
            text: What it would train.

        Returns:
            The answer, or None if there is none yet. Then the worker sends its request again after
            a reminder.

        Raises:
            InvalidMessage: The worker is not admitted.
        """
        ...

    def check_report(self, ticket: Ticket, report: dict[str, float]) -> None:
        """Check the report of a worker on a ticket.

        Args:
            ticket: The ticket.
            report: Numbers by name.

        Raises:
            InvalidMessage: The report is not possible.
        """
        ...

    def record_ticket(self, number: int, ticket: Ticket, report: dict[str, float]) -> None:
        """Record a ticket that a worker has done.

        Args:
            number: Number of the worker.
            ticket: The ticket.
            report: Numbers by name.
        """
        ...

    def record_departure(self, number: int) -> None:
        """Record that a worker has left.

        Args:
            number: Number of the worker.
        """
        ...


@dataclass
class WorkQueue:
    """Hands out tickets to workers.

    Attributes:
        job: The number of the training.

        bound: The bound s of ssp(s), or None.

        wanted_shares: Number of shares that a step waits for, or None.

        limit: Maximum seconds for a ticket.

        on_ticket_done: Called with (worker number, ticket, report) when a ticket is done for the
            first time.

        workers: The workers by number.

        waiting_tickets: Tickets that no worker has.

        open_tickets: Tickets that a worker has, with its number.

        earlier_workers: By number of the ticket, the workers that had it before the last one.

        updates_made: Number of updates for which all shares have been reported; None if it is
            unknown.

        reported_shares: Shares reported for later updates, by number of the update.

        last_tickets: The last ticket of each worker.

        is_ended: Whether the training is over.

        refusals: Counts of refused requests, by reason.

        join_handler: Handles workers from other hosts, or None.
    """

    job: int
    bound: int | None
    wanted_shares: int | None
    limit: float
    on_ticket_done: Callable[[int, Ticket, dict[str, Any]], None]
    workers: dict[int, WorkerState] = field(default_factory=dict)
    waiting_tickets: deque[Ticket] = field(default_factory=deque)
    open_tickets: dict[Ticket, int] = field(default_factory=dict)
    earlier_workers: dict[int, list[int]] = field(default_factory=dict)
    updates_made: int | None = None
    reported_shares: dict[int, int] = field(default_factory=dict)
    last_tickets: dict[int, Ticket] = field(default_factory=dict)
    is_ended: bool = False
    refusals: Counter[str] = field(default_factory=Counter)
    join_handler: JoinHandler | None = None

    def count_updates_from(self, updates_made: int) -> None:
        """Count the updates from here on.

        Args:
            updates_made: The number of updates so far.
        """
        self.updates_made = updates_made

    def admit_joins(self, join_handler: JoinHandler) -> None:
        """Let workers from other hosts join.

        Args:
            join_handler: Handles these workers.
        """
        self.join_handler = join_handler

    def end_training(self) -> None:
        """Give out no more tickets: the training is over."""
        self.is_ended = True

    def add_tickets(self, tickets: Iterable[Ticket]) -> None:
        """Add tickets to the queue.

        Args:
            tickets: The tickets, in order.
        """
        self.waiting_tickets.extend(tickets)

    @property
    def is_idle(self) -> bool:
        """Whether all tickets are done."""
        return not self.waiting_tickets and not self.open_tickets

    # ---- messages ----------------------------------------------------------------------------
    def handle_message(self, listener: Listener, frames: list[Any]) -> None:
        """Handle a request: a worker reports a ticket and asks for the next one.

        Args:
            listener: The socket of the queue.
            frames: The frames of the request.
        """
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
            is_open = (connection, header.call) in (
                (each.connection, each.open_request[1].call)
                for each in self.workers.values()
                if each.open_request
            )
            listener.send_answer(
                connection, header.make_answer(MessageType.WAIT if is_open else MessageType.MISSED)
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
                raise InvalidMessage("this training takes no workers that join")
            if self.is_ended:
                raise InvalidMessage("the training is over")
            if (
                answer := self.join_handler.admit_worker(key, header.sender, rest[0].bytes)
            ) is not None:
                listener.send_answer(connection, header.make_answer(MessageType.JOINED), answer)
            return
        number, ticket, report = self._parse_request(rest[0].bytes)
        joined_keys = self.join_handler.keys if self.join_handler else {}
        if joined_keys.get(number) != key:
            raise InvalidMessage("a number that belongs to another worker")
        if key is not None and self.join_handler is not None:
            if ticket not in (None, self.last_tickets.get(number)):
                raise InvalidMessage("a ticket that it was not given")
            if ticket is not None:
                self.join_handler.check_report(ticket, report)
        worker = self.workers.get(number)
        if (
            worker is not None
            and worker.last_answer is not None
            and worker.last_answer[0] == header.call
        ):
            # this request was answered before
            listener.send_answer(
                connection, header.make_answer(MessageType.GIVEN), worker.last_answer[1]
            )
        elif (
            worker is not None
            and worker.open_request is not None
            and worker.open_request[1].call == header.call
        ):
            worker.connection = connection
            worker.open_request = (connection, header)
            listener.send_answer(connection, header.make_answer(MessageType.WAIT))
        else:
            self._record_request(number, ticket, report, (connection, header))
            if self.join_handler is not None and key is not None and ticket is not None:
                self.join_handler.record_ticket(number, ticket, report)
        if header.kind == MessageType.LEAVE and self.join_handler is not None and key is not None:
            self.drop_worker(number)
            self.join_handler.record_departure(number)
            listener.send_answer(connection, header.make_answer(MessageType.DONE))

    @staticmethod
    def _parse_request(text: bytes) -> tuple[int, Ticket | None, dict[str, float]]:
        try:
            number, ticket_fields, report = json.loads(text)
            ticket = Ticket(**ticket_fields) if ticket_fields else None
            return (
                int(number),
                ticket,
                {str(name): float(value) for name, value in dict(report).items()},
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
        worker = self.workers.get(number)
        # the worker does not report its last ticket
        if worker is not None and worker.ticket not in (None, ticket):
            self.drop_worker(number)
            worker = None
        if worker is None:
            fewest = min((each.done_count for each in self.workers.values()), default=0)
            worker = WorkerState(number, fewest, now)
            self.workers[number] = worker
        holder = self.open_tickets.pop(ticket, None) if ticket is not None else None
        if ticket is not None and holder is not None:
            # the other worker may have pushed it without reporting it yet
            if holder != number:
                self.earlier_workers.setdefault(ticket.number, []).append(holder)
            self._finish_ticket(worker, ticket, report)
        # the worker was late, and no other one has begun this ticket
        elif ticket is not None and ticket in self.waiting_tickets:
            self.waiting_tickets.remove(ticket)
            self._finish_ticket(worker, ticket, report)
        worker.connection = request[0]
        worker.open_request = request
        worker.since = now
        worker.ticket = None

    def _finish_ticket(self, worker: WorkerState, ticket: Ticket, report: dict[str, Any]) -> None:
        if ticket.what == TRAIN:
            worker.has_trained = True
            is_late = report.get("became") == LATE  # the ticket must be done again
            if self.wanted_shares is not None:
                self._count_update(int(report.get("version", -1)), 0 if is_late else 1, ticket)
            if is_late:
                self.waiting_tickets.appendleft(ticket)
                return
            worker.done_count += 1
        self.on_ticket_done(worker.number, ticket, report)

    def _count_update(self, version: int, shares: int, ticket: Ticket) -> None:
        """Count the shares of an update that a worker reports.

        The worker reports that `version` updates were made. `shares` is 1 if its own share was in
        the last one, otherwise 0.
        """
        if self.updates_made is None:
            # After a restart of the server, the first report comes from a late worker. No update
            # was made since.
            self.updates_made = version
        # the server is behind, so it was restarted
        if not shares and ticket.after == self.updates_made and version < self.updates_made:
            self.updates_made = version
            self.reported_shares.clear()
        if version == self.updates_made + 1:
            self.reported_shares[version] = self.reported_shares.get(version, 0) + shares
        while self.reported_shares.get(self.updates_made + 1, 0) >= ticket.wanted:
            self.updates_made += 1
            del self.reported_shares[self.updates_made]

    def reset_updates(self) -> None:
        """Forget the number of updates, because the server restarted from its snapshot."""
        self.updates_made = None
        self.reported_shares.clear()

    def drop_worker(self, number: int) -> None:
        """Remove a worker. Another worker gets its ticket.

        Args:
            number: Number of the worker.
        """
        worker = self.workers.pop(number, None)
        if (
            worker is not None
            and worker.ticket is not None
            and self.open_tickets.get(worker.ticket) == number
        ):
            del self.open_tickets[worker.ticket]
            self.waiting_tickets.appendleft(worker.ticket)
            if worker.ticket.what == TRAIN:
                self.earlier_workers.setdefault(worker.ticket.number, []).append(number)

    def drop_connection(self, connection: bytes) -> int | None:
        """Remove the worker of a lost connection, unless it has used another one since.

        Args:
            connection: The connection.

        Returns:
            The number of the worker, or None.
        """
        number = next(
            (each.number for each in self.workers.values() if each.connection == connection), None
        )
        if number is not None:
            self.drop_worker(number)
        return number

    def drop_late_workers(self) -> list[int]:
        """Remove workers that have had a ticket for longer than the limit.

        They come back with their next request.

        Returns:
            The numbers of the workers.
        """
        now = time.monotonic()
        late = [
            each.number
            for each in self.workers.values()
            if each.ticket is not None and now - each.since > self.limit
        ]
        for number in late:
            self.drop_worker(number)
        return late

    def _can_take(self, worker: WorkerState, ticket: Ticket, fewest: int) -> bool:
        """Return whether a worker may get a ticket.

        A worker that has not trained yet has an older model. It may test only if no worker has
        trained.
        """
        if (
            ticket.what == TRAIN
            and self.reported_shares
            and ticket.number not in self.earlier_workers
        ):
            # The number of remaining shares is known only after all workers of a step have
            # reported.
            return False
        if ticket.what == TRAIN:
            return self.bound is None or worker.done_count - fewest <= self.bound
        joined = (
            self.join_handler.keys if self.join_handler is not None and ticket.what == KEEP else {}
        )
        candidates = [each for each in self.workers.values() if each.number not in joined]
        return worker.number not in joined and (
            worker.has_trained or not any(each.has_trained for each in candidates)
        )

    def hand_out_tickets(self, listener: Listener) -> None:
        """Answer waiting workers, as far as there are tickets for them.

        Args:
            listener: The socket of the queue.
        """
        fewest = min((each.done_count for each in self.workers.values()), default=0)
        for worker in sorted(self.workers.values(), key=lambda each: each.since):
            if worker.open_request is None:
                continue
            if self.is_ended:
                ticket = Ticket(END)
            elif not self.waiting_tickets or not self._can_take(
                worker, self.waiting_tickets[0], fewest
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
                worker.ticket = replace(ticket, workers=len(self.workers))
                ticket = worker.ticket
                self.open_tickets[ticket] = worker.number
            self.last_tickets[worker.number] = ticket
            connection, header = worker.open_request
            worker.open_request = None
            worker.since = time.monotonic()
            worker.last_answer = header.call, json.dumps(asdict(ticket)).encode()
            listener.send_answer(
                connection, header.make_answer(MessageType.GIVEN), worker.last_answer[1]
            )
