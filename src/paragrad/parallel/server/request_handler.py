"""Handles the requests to a server: checks every field and sends the answers.

In bsp, the gradients of all shares of a step are kept until all have arrived. They are added in the
order of shares. They are applied when a worker sends the divisor, because a worker knows the norm
over all servers. With backup workers, the first shares make a step. Otherwise each push is applied
at once. Each ticket is applied once.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from paragrad.engine.optimizer.modes import use_optimizer_eval_mode
from paragrad.engine.optimizer.update_probe import compute_clip_factor
from paragrad.errors import StepFailed
from paragrad.parallel.server.message_header import Header, InvalidMessage, MessageType, view_bytes
from paragrad.parallel.server.model_buffers import deserialize_tensors, serialize_tensors
from paragrad.parallel.server.pending_pushes import ClientRequest, PendingPush, check_push
from paragrad.parallel.server.shard import ServerShard
from paragrad.parallel.server.shared_buffer import BufferReader, SharedBuffer
from paragrad.parallel.server.snapshot import UPDATES_PER_SNAPSHOT
from paragrad.parallel.server.sockets import Listener, process_request
from paragrad.parallel.server.staleness_bound import StalenessBound
from paragrad.parallel.server.work_queue import LATE

# outcomes of a push, in addition to LATE
APPLIED = 0
ALREADY_APPLIED = 1
CHECK_SECONDS = 0.5  # interval at which a server checks whether a worker is connected


class RequestHandler:
    """Handles the requests to one server.

    Args:
        shard: The slice of the server.

        listener: The socket of the server.

        job: The number of the training.

    Attributes:
        shard: The slice of the server.

        listener: The socket of the server.

        job: The number of the training.

        reader: Reads vectors of the workers.

        staleness_bound: Decides which pulls may be answered.

        pending_pushes: Pushes that wait for others, by share or ticket.

        expected_pulls: (sender, slot) of parameters that were not requested yet after this update.

        waiting_pulls: (connection, header) of those requests that arrived.

        forget_requests: Requests to forget the sum of this step, by sender.

        is_snapshot_due: Whether a snapshot of this step must be saved before the next one.

        left_senders: Senders that left.

        has_met_worker: Whether any worker has come.
    """

    def __init__(self, shard: ServerShard, listener: Listener, job: int) -> None:
        self.shard = shard
        self.listener = listener
        self.job = job
        self.reader = BufferReader(shard.strategy.workers)
        self.staleness_bound = StalenessBound(
            shard.strategy.staleness_bound, shard.strategy.workers
        )
        self.pending_pushes: dict[int, PendingPush] = {}
        self.expected_pulls = set[tuple[int, int]]()
        self.waiting_pulls: list[tuple[bytes, Header]] = []
        self.forget_requests: dict[int, tuple[bytes, Header]] = {}
        self.is_snapshot_due = False
        self.left_senders = set[int]()
        self.has_met_worker = False

    # ---- main loop ---------------------------------------------------------------------------
    def serve_workers(self, worker_count: int, seconds: float | None) -> None:
        """Handle requests until all workers have left.

        Args:
            worker_count: Number of END requests after which it returns.
            seconds: Maximum time until a worker comes. None: wait without limit; the process that
                started this server ends it, because new workers replace those that leave.

        Raises:
            StepFailed: No worker is connected any more, or none came in time.
        """
        since = time.monotonic()
        while len(self.left_senders) < worker_count:
            if (
                frames := self.listener.receive_message(
                    0 if self.is_snapshot_due else CHECK_SECONDS
                )
            ) is not None:
                since = time.monotonic()
                self.has_met_worker = True
                self.handle_message(frames)
            elif self.is_snapshot_due:  # workers compute meanwhile
                self._save_snapshot()
            elif seconds is None or self.listener.connection_count:
                since = time.monotonic()
            elif self.has_met_worker or time.monotonic() - since > seconds:
                raise StepFailed(
                    "no worker is left"
                    if self.has_met_worker
                    else f"no worker came within {seconds:g} s"
                )

    def handle_message(self, frames: Sequence[Any]) -> None:
        """Handle a request.

        Args:
            frames: The frames of the request.
        """
        process_request(
            self.listener, frames, self.job, self._dispatch_request, self.shard.refusals
        )

    def _dispatch_request(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        handlers: dict[MessageType, Callable[[bytes, Header, Sequence[Any]], None]] = {
            MessageType.PUSH: self._handle_push,
            MessageType.UPDATE: self._handle_update,
            MessageType.PULL: self._handle_pull,
            MessageType.GRADIENTS: self._handle_gradients,
            MessageType.STATE: self._handle_state,
            MessageType.FORGET: self._handle_forget,
            MessageType.PROBE: self._handle_probe,
            MessageType.END: self._handle_end,
            MessageType.REMIND: self._handle_reminder,
            MessageType.EXCLUDE: self._handle_exclude,
        }
        if self.shard.snapshots is not None:  # in this case workers may be replaced
            handlers |= {
                MessageType.BUFFERS: self._handle_buffers,
                MessageType.HALT: self._handle_halt,
                MessageType.RESUME: self._handle_resume,
            }
        if header.kind not in handlers:
            raise InvalidMessage(f"{header.kind.name} is no question")
        handlers[header.kind](connection, header, rest)

    def _handle_end(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        # after this, connections end normally and do not count as refused
        if not self.left_senders:
            self.shard.refusals.update(self.listener.refusals)
        self.left_senders.add(header.sender)
        self.listener.send_answer(connection, header.make_answer(MessageType.DONE))

    # ---- gradients ---------------------------------------------------------------------------
    def _handle_push(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        vector, marks = check_push(self.shard, self.reader, header, rest)
        if not self.shard.strategy.uses_work_queue:
            self._collect_share(connection, header, marks, vector)
        # the ticket was applied before; the worker learns that it is done
        elif header.step in self.shard.applied_tickets:
            self.shard.refusals["samples that were applied before"] += 1
            self._send_outcome([(connection, header)], ALREADY_APPLIED)
        elif self.shard.strategy.is_synchronous:
            self._collect_first_shares(connection, header, marks, vector)
        else:
            self._apply_push(connection, header, marks, vector)

    def _send_outcome(self, requests: Iterable[ClientRequest], outcome: int) -> None:
        for connection, header in requests:
            self.listener.send_answer(
                connection,
                header.make_answer(
                    MessageType.DONE, version=self.shard.updates, numbers=(float(outcome),)
                ),
            )

    def _collect_share(
        self, connection: bytes, header: Header, marks: bytes, vector: Tensor
    ) -> None:
        """Collect the shares of a step without backup workers.

        When all have arrived, all of them are answered.
        """
        if header.step != self.shard.updates or self.shard.is_complete:
            raise InvalidMessage(
                f"a gradient of {'an earlier' if header.step <= self.shard.updates else 'a later'} "
                "step"
            )
        if header.shares != self.shard.strategy.share_count or header.share >= header.shares:
            raise InvalidMessage(f"a share that does not exist ({header.share} of {header.shares})")
        push = self.pending_pushes.setdefault(
            header.share, PendingPush(header.sender, header.numbers)
        )
        if push.sender != header.sender or header.slot in push.vectors:
            raise InvalidMessage("a gradient that came before")
        push.add_vector(connection, header, marks, vector)
        complete = [each for each in self.pending_pushes.values() if self._is_complete(each)]
        if len(complete) < header.shares:
            return
        sums = self._sum_numbers()
        squared_norm = self.shard.add_shares(
            [self.pending_pushes[share].vectors for share in sorted(self.pending_pushes)]
        )
        for each in self.pending_pushes.values():
            each.vectors.clear()  # free the memory
            for waiting_connection, waiting_header in each.list_requests():
                self.listener.send_answer(
                    waiting_connection,
                    waiting_header.make_answer(
                        MessageType.DONE,
                        numbers=(*sums[:4], squared_norm),
                        version=self.shard.updates,
                    ),
                )

    def _apply_push(self, connection: bytes, header: Header, marks: bytes, vector: Tensor) -> None:
        """Apply a ticket when all its vectors have arrived."""
        push = self._add_to_push(connection, header, marks, vector)
        if self._is_complete(push):
            del self.pending_pushes[header.step]
            self._mark_applied({header.step: push})
            weight, workers, _, samples, *_ = header.numbers
            self.shard.apply_share(
                push.vectors, header.version, int(samples), workers, has_weight=weight > 0
            )
            self._send_outcome(push.list_requests(), APPLIED)

    def _sum_numbers(self) -> list[float]:
        """Return the sums of the numbers of all pending shares."""
        return [
            sum(numbers)
            for numbers in zip(
                *(self.pending_pushes[share].numbers for share in sorted(self.pending_pushes)),
                strict=True,
            )
        ]

    def _add_to_push(
        self, connection: bytes, header: Header, marks: bytes, vector: Tensor
    ) -> PendingPush:
        """Add a vector to the pending push of a ticket.

        The push belongs to its last sender. If an earlier sender had pushed all of it, its requests
        keep waiting for the answer.
        """
        push = self.pending_pushes.get(header.step)
        if push is None or push.sender != header.sender:
            waiting = push.waiting_requests if push is not None and self._is_complete(push) else {}
            push = PendingPush(header.sender, header.numbers, waiting_requests=waiting)
            self.pending_pushes[header.step] = push
        push.add_vector(connection, header, marks, vector)
        return push

    def _is_complete(self, push: PendingPush) -> bool:
        return len(push.vectors) == len(self.shard.slots)

    def _mark_applied(self, pushes: dict[int, PendingPush]) -> None:
        """Record tickets that are about to be applied in one update."""
        if self.shard.snapshots is not None:
            self.shard.snapshots.record_tickets(
                self.shard, [(ticket, int(each.numbers[3])) for ticket, each in pushes.items()]
            )
        for ticket in pushes:
            self.shard.applied_tickets.add_ticket(ticket)

    def _collect_first_shares(
        self, connection: bytes, header: Header, marks: bytes, vector: Tensor
    ) -> None:
        """Collect shares with backup workers.

        The first shares of the current parameters make a step. Late shares get the outcome LATE.
        """
        if header.version != self.shard.updates:
            self._send_outcome([(connection, header)], LATE)
            return
        self._add_to_push(connection, header, marks, vector)
        complete = [each for each in self.pending_pushes.values() if self._is_complete(each)]
        first = complete[: max(1, header.shares)]
        if len(first) < header.shares:
            return
        others = [
            request
            for each in self.pending_pushes.values()
            if each not in first
            for request in each.list_requests()
        ]
        tickets = [ticket for ticket, each in self.pending_pushes.items() if each in first]
        self.pending_pushes = dict(zip(tickets, first, strict=True))
        self._mark_applied(self.pending_pushes)
        sums = self._sum_numbers()
        squared_norm = self.shard.add_shares([each.vectors for each in first])
        if sums[0]:  # some sample in it counts
            self.shard.divide_gradients(
                sums[0],
                compute_clip_factor(math.sqrt(squared_norm) / sums[0], self.shard.clip_norm),
            )
            self.shard.make_update(1.0, int(sums[3]))
        self.pending_pushes = {}
        self.shard.is_complete = False
        for each in first:
            self._send_outcome(each.list_requests(from_sender=True), APPLIED)
            self._send_outcome(each.list_requests(from_sender=False), ALREADY_APPLIED)
        self._send_outcome(others, LATE)

    def _handle_update(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Make the update of a synchronous step at the first request; send the parameters.

        If the parameters travel, the answers are sent together when all workers have asked. Each
        server begins with another worker (share), so that no link is idle while all servers fill
        the link of one worker.
        """
        if header.step == self.shard.updates and self.shard.is_complete:
            self._make_update(*header.numbers[:2])
        elif header.step != self.shard.updates - 1:
            raise InvalidMessage(
                f"an update of {'an earlier' if header.step < self.shard.updates else 'a later'} "
                "step"
            )
        # A shared vector is answered at once, and so is a request that is sent again.
        if header.is_shared or (header.sender, header.slot) not in self.expected_pulls:
            self._send_vector(connection, header, self.shard.values, self.shard.shared_buffer)
        else:
            self.waiting_pulls.append((connection, header))
        self.expected_pulls.discard((header.sender, header.slot))
        if not self.expected_pulls:
            ready = sorted(self.waiting_pulls, key=lambda each: each[1].share)
            self.waiting_pulls = []
            for each in ready:
                self._send_vector(*each, self.shard.values, self.shard.shared_buffer)

    def _make_update(self, divisor: float, factor: float) -> None:
        """Make the update of a complete synchronous step. Raises InvalidMessage."""
        if not 0 < divisor < math.inf or not 0 < factor <= 1:
            raise InvalidMessage("a divisor or a factor that cannot be right")
        if self.is_snapshot_due:
            self._save_snapshot()
        shares = [
            list(self.pending_pushes[share].numbers[:2]) for share in sorted(self.pending_pushes)
        ]
        self.shard.last_step = {"made": [divisor, factor], "shares": shares}
        self.shard.divide_gradients(divisor, factor)
        self.shard.make_update(1.0, int(self._sum_numbers()[4]))
        self.expected_pulls = {
            (each.sender, slot)
            for each in self.pending_pushes.values()
            for slot in range(len(self.shard.trained_slots))
        }
        self.shard.is_complete = False
        self.pending_pushes = {}
        self.waiting_pulls = []
        self.is_snapshot_due = (
            self.shard.snapshots is not None and self.shard.updates % UPDATES_PER_SNAPSHOT == 0
        )

    def _save_snapshot(self) -> None:
        self.is_snapshot_due = False
        if self.shard.snapshots is not None:
            self.shard.snapshots.try_save_snapshot(self.shard)

    def _handle_buffers(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Store changed buffers, or answer with all of them.

        They come before the gradients of the first share. A worker asks for them when it begins.
        """
        if not rest:
            self.listener.send_answer(
                connection,
                header.make_answer(MessageType.VALUES),
                serialize_tensors(self.shard.buffers),
            )
            return
        if header.step != self.shard.updates or self.shard.is_complete:
            raise InvalidMessage("what forwards change, of another step")
        try:
            # merged, because a forgotten step may have changed buffers too
            self.shard.changed_buffers |= deserialize_tensors(rest[0].bytes)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise InvalidMessage("what forwards change, and cannot be read") from error
        self.listener.send_answer(connection, header.make_answer(MessageType.DONE))

    def _handle_forget(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Forget the sum of a step after all workers have asked for it.

        Until then a worker may read it.
        """
        if header.step != self.shard.updates or not self.shard.is_complete:
            raise InvalidMessage("no step to forget")
        self.forget_requests[header.sender] = connection, header
        if len(self.forget_requests) == self.shard.strategy.share_count:
            self.shard.is_complete = False
            self.pending_pushes = {}
            for waiting_connection, waiting_header in self.forget_requests.values():
                self.listener.send_answer(
                    waiting_connection, waiting_header.make_answer(MessageType.DONE)
                )
            self.forget_requests.clear()

    # ---- restart of workers ------------------------------------------------------------------
    def _handle_halt(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Begin a new training number. Unread requests of the old one are refused."""
        self.job = header.version
        self.reader.forget_regions()
        counts = {
            "updates": self.shard.updates,
            "complete": self.shard.is_complete,
            **self.shard.last_step,
        }
        self.listener.send_answer(
            connection, header.make_answer(MessageType.GIVEN), json.dumps(counts).encode()
        )

    def _handle_resume(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        finish, divisor, factor = header.numbers[:3]
        if finish and self.shard.is_complete:  # another server has made this update
            self._make_update(divisor, factor)
        self.shard.is_complete = False
        self.shard.changed_buffers = {}
        self.pending_pushes = {}
        self.forget_requests.clear()
        self.listener.send_answer(
            connection, header.make_answer(MessageType.DONE, version=self.shard.updates)
        )

    def _handle_reminder(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Answer whether a request has arrived.

        Messages of one connection arrive in order. So a request that does not wait here was
        answered, or was lost with another connection.
        """
        waiting = [
            *self.waiting_pulls,
            *self.forget_requests.values(),
            *(each for push in self.pending_pushes.values() for each in push.list_requests()),
        ]
        is_waiting = (connection, header.call) in (
            (waiting_connection, waiting_header.call)
            for waiting_connection, waiting_header in waiting
        )
        self.listener.send_answer(
            connection, header.make_answer(MessageType.WAIT if is_waiting else MessageType.MISSED)
        )

    # ---- answers -----------------------------------------------------------------------------
    def _send_vector(
        self,
        connection: bytes,
        header: Header,
        vectors: list[Tensor],
        shared_buffer: SharedBuffer | None = None,
        marks: bytes = b"",
        **fields: Any,
    ) -> None:
        """Send a vector.

        Without `shared_buffer` a copy is sent, because the next update may come while it is read.
        Otherwise the vector is in that buffer.
        """
        if header.slot >= len(self.shard.slots):
            raise InvalidMessage("it is for a vector that is not here")
        if header.slot >= len(vectors):  # its values have no gradients
            raise InvalidMessage("it is for a vector that has none")
        slot, vector = self.shard.slots[header.slot], vectors[header.slot]
        self.shard.sent_bytes += vector.nbytes
        answer = header.make_answer(
            MessageType.VALUES,
            dtype=slot.dtype,
            elements=slot.elements,
            version=self.shard.updates,
            is_shared=header.is_shared and shared_buffer is not None and shared_buffer.is_shared,
            **fields,
        )
        self.listener.send_answer(
            connection,
            answer,
            marks,
            view_bytes(vector.clone())
            if shared_buffer is None
            else shared_buffer.make_frame(header.slot, answer.is_shared),
        )

    def _handle_probe(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Answer whether this process can read a vector of the sender.

        The answer also has the location of a vector of this process.
        """
        can_read = bool(rest) and not self.reader.find_obstacle(rest[-1].buffer)
        shared_buffer = self.shard.shared_buffer
        self.listener.send_answer(
            connection,
            header.make_answer(MessageType.DONE, numbers=(float(can_read),)),
            shared_buffer.obstacle.encode(),
            shared_buffer.get_location(0),
        )

    def _handle_pull(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        enforces_bound = self.shard.snapshots is None  # otherwise the work queue enforces the bound
        self._send_values(
            self.staleness_bound.add_pull(connection, header, not header.numbers[1])
            if enforces_bound
            else [(connection, header)]
        )

    def _send_values(self, ready: Iterable[ClientRequest]) -> None:
        for connection, header in ready:
            with (
                use_optimizer_eval_mode(self.shard.optimizer, self.shard.local_parameters)
                if header.numbers[0]
                else nullcontext()
            ):
                self._send_vector(connection, header, self.shard.values)

    def _handle_exclude(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        self._send_values(self.staleness_bound.exclude_sender(header.sender))
        self.listener.send_answer(connection, header.make_answer(MessageType.DONE))

    def _handle_gradients(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        flags = iter(self.shard.gradient_flags)
        marks = [bytes(next(flags) for _ in slot.ranges) for slot in self.shard.trained_slots]
        own_marks = marks[header.slot] if header.slot < len(marks) else b""
        self._send_vector(
            connection,
            header,
            self.shard.gradients,
            marks=own_marks,
            numbers=(float(self.shard.is_complete),),
        )

    def _handle_state(self, connection: bytes, header: Header, rest: Sequence[Any]) -> None:
        try:
            text, vector = self.shard.export_optimizer_state()
        except TypeError as error:
            raise InvalidMessage(f"the optimizer's state cannot be sent: {error}") from None
        self.listener.send_answer(
            connection,
            header.make_answer(MessageType.VALUES, dtype=vector.dtype, elements=vector.numel()),
            text.encode(),
            view_bytes(vector),
        )
