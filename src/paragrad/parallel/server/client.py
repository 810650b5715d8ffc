"""What a worker asks servers, or the office, and how it waits for the answers.

Over one connection messages come in their order, none twice and none left out. So a question is
sent whole once; who has no answer reminds of it, by a header alone: a vector that takes its
time on a slow link is not sent again behind itself. What was lost with a connection is missed
when the reminder comes over the next one, and then sent again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq
import zmq.utils.monitor

from paragrad.errors import StepFailed
from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.join_endpoint import is_port_closed, parse_host_port
from paragrad.parallel.server.message_header import (
    Header,
    InvalidMessage,
    MessageType,
    unpack_header,
)
from paragrad.parallel.server.sockets import (
    LINGER_MILLISECONDS,
    TEXT_BYTES,
    Frames,
    join_vector_frames,
    set_socket_options,
    split_vector_frame,
)

WAKE_UP_DELAY = 1.0  # seconds that a process wakes up late, at least, where it was stopped
MAX_REMINDER_SECONDS = 10.0  # seconds between reminders at most
ABANDONED_SECONDS = 10.0  # seconds in which nobody listens, after which nobody is waited for


class RequestRejected(StepFailed):
    """What was asked was refused. why: in the words of who was asked."""

    def __init__(self, receiver: str, reason: str) -> None:
        super().__init__(f"{receiver} refused it: {reason}")
        self.reason = reason


class ServerClient:
    """Of a worker: questions to every server, each of which has one answer. seconds: to wait
    for one at most;  again: remind of it after so many, where a server may have been started
    anew, and then more seldom, while nothing comes;  name: of what is asked, where it is one
    that is no server;  office: of their training, where a server may be away for long as it is
    started again.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        longest: int,
        keys: KeyPair,
        seconds: float,
        reminder_seconds: float = math.inf,
        name: str | None = None,
        queue_address: Address | None = None,
    ) -> None:
        self.queue_address = queue_address
        self.server_names = [name or f"server {number}" for number in range(len(servers))]
        self.context = zmq.Context()
        self.seconds = seconds
        self.reminder_seconds = reminder_seconds
        self.call_numbers = itertools.count(1)
        self.keys, self.addresses, self.sockets = (
            keys,
            list(servers),
            [self.context.socket(zmq.DEALER) for _ in servers],
        )
        # by server elsewhere: where is told whether somebody listens there
        self.monitors: dict[int, zmq.Socket[bytes]] = {}
        self.unreachable_since: dict[int, float] = {}  # since when nobody does
        for number, (socket, each) in enumerate(zip(self.sockets, servers, strict=True)):
            if not each.is_local and reminder_seconds < math.inf:
                self.monitors[number] = socket.get_monitor_socket(
                    zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
                )
            self.connect_socket(socket, each, longest)

    def connect_socket(self, socket: zmq.Socket[bytes], address: Address, longest: int) -> None:
        set_socket_options(
            socket,
            longest + TEXT_BYTES,
            address.is_local,
            self.seconds if self.reminder_seconds == math.inf else 0.0,
        )
        if address.key is not None:
            socket.curve_serverkey = address.key
            socket.curve_secretkey = self.keys.secret
            socket.curve_publickey = self.keys.public
        socket.connect(address.endpoint)

    def send_requests(
        self, requests: Iterable[tuple[int, Header, Frames]]
    ) -> Iterator[tuple[int, Header, Frames]]:
        """(server, header, frames after it) of the answers to questions (server, header,
        frames), as they come. What frames lie in must stay as it is until then. Raises
        StepFailed where an answer is a refusal, or does not come.
        """
        open_calls: dict[int, tuple[int, Header, Frames]] = {}
        for server, asked, frames in requests:
            header = replace(asked, call=next(self.call_numbers) % 2**32)
            open_calls[header.call] = server, header, (header.pack_header(), *frames)
            self._send_frames(server, open_calls[header.call][2])
        until = time.monotonic() + self.seconds
        woken = math.inf
        pause = self.reminder_seconds
        poller = zmq.Poller()
        # of reminders;  after how many a call was sent again
        rounds = 0
        sent = dict[int, int]()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        while open_calls:
            # this process was stopped: the others were not late
            if (now := time.monotonic()) > woken:
                until = now + self.seconds
            left = until - now
            wait = min(max(left, 0.0), pause)
            woken = now + wait + WAKE_UP_DELAY
            if left <= 0 and not poller.poll(0):
                silent = ", ".join(
                    self.server_names[server]
                    for server in sorted({server for server, *_ in open_calls.values()})
                )
                raise StepFailed(
                    f"no answer from {silent} within {self.seconds:g} s: it, or a worker that it "
                    f"waits for, does "
                    "not go on"
                )
            ready = dict(poller.poll(int(1000 * wait) + 1))
            if not ready and self.reminder_seconds < math.inf:
                rounds += 1
                self._send_reminders(open_calls.values(), rounds)
            pause = (
                self.reminder_seconds
                if ready
                else min(2 * pause, max(MAX_REMINDER_SECONDS, self.reminder_seconds))
            )
            for server, socket in enumerate(self.sockets):
                if socket in ready:
                    first, *frames = join_vector_frames(socket.recv_multipart(copy=False))
                    header = self._parse_answer(self.server_names[server], first.bytes, frames)
                    if header.kind == MessageType.WAIT:  # it is there
                        until = time.monotonic() + self.seconds
                    elif header.call in open_calls and header.kind == MessageType.MISSED:
                        if header.step > sent.get(header.call, 0):
                            sent[header.call] = rounds
                            self._send_frames(server, open_calls[header.call][2])
                    # otherwise it was asked twice
                    elif open_calls.pop(header.call, None):
                        yield server, header, [frame.buffer for frame in frames]
                        until = time.monotonic() + self.seconds

    def _send_reminders(
        self, open_calls: Collection[tuple[int, Header, Frames]], turn: int
    ) -> None:
        """Of all questions that are open. Raises StepFailed where nobody is there any more who
        could answer.
        """
        for server in {server for server, *_ in open_calls} & self.monitors.keys():
            while self.monitors[server].poll(0):
                if (
                    zmq.utils.monitor.recv_monitor_message(self.monitors[server])["event"]
                    == zmq.EVENT_CONNECTED
                ):
                    self.unreachable_since.pop(server, None)
                else:
                    self.unreachable_since.setdefault(server, time.monotonic())
            last = self.queue_address or self.addresses[server]
            if time.monotonic() - self.unreachable_since.get(
                server, math.inf
            ) > ABANDONED_SECONDS and is_port_closed(parse_host_port("", last.endpoint)):
                who = "the training's office" if self.queue_address else self.server_names[server]
                raise StepFailed(
                    f"nobody listens any more at {last.endpoint}, where {who} was: the training "
                    f"was "
                    f"ended, or is over"
                )
        for server, header, _ in open_calls:
            self._send_frames(
                server, (header.make_answer(MessageType.REMIND, step=turn).pack_header(),)
            )

    def _send_frames(self, server: int, frames: Frames) -> None:
        # it is not there: it is missed, and asked again
        with suppress(zmq.Again):
            socket = self.sockets[server]
            socket.send_multipart(
                split_vector_frame(socket, *frames), flags=zmq.NOBLOCK, copy=False
            )

    @staticmethod
    def _parse_answer(name: str, frame: bytes, rest: Sequence[Any]) -> Header:
        try:
            header = unpack_header(frame)
        except InvalidMessage as error:
            raise StepFailed(f"{name} answered with {error}") from None
        if header.kind == MessageType.REFUSED:
            raise RequestRejected(name, rest[-1].bytes.decode(errors="replace"))
        return header

    def close(self) -> None:
        self.context.destroy(linger=LINGER_MILLISECONDS)


def try_handshake(address: Address, keys: KeyPair, seconds: float) -> str:
    """How it goes to be let in: "" where one is, otherwise "unknown" (our key), "another key"
    (theirs), or "silent".
    """
    ends = {
        zmq.EVENT_HANDSHAKE_SUCCEEDED: "",
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unknown",
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "another key",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "another key",
    }
    calling = ServerClient([], 0, keys, seconds)
    until = time.monotonic() + seconds
    try:
        socket = calling.context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(sum(ends))
        calling.connect_socket(socket, address, 0)
        while (left := until - time.monotonic()) > 0:
            if monitor.poll(int(1000 * left) + 1):
                return ends[zmq.Event(zmq.utils.monitor.recv_monitor_message(monitor)["event"])]
        return "silent"
    finally:
        calling.close()
