"""Requests of a worker to servers or to the work queue, and the wait for their answers.

Over one connection messages arrive in order, none twice and none left out. So a request is sent
whole once. If there is no answer, only a reminder with the header of the request is sent. In this
way a vector that takes long on a slow link is not sent again while it is still on the way.

A request that was lost with its connection is missed when the reminder arrives over the next
connection. Then it is sent again.
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
    LOST_CONNECTION_SECONDS,
    TEXT_BYTES,
    Frames,
    join_vector_frames,
    set_socket_options,
    split_vector_frame,
)
from paragrad.runtime.peer_processes import PeerProcesses

WAKE_UP_DELAY = 1.0  # a process that wakes up so many seconds late was stopped
MAX_REMINDER_SECONDS = 10.0  # maximum interval
CONNECTION_CHECK_SECONDS = 1.0
ABANDONED_SECONDS = 10.0  # After so many seconds without a listening process, the wait ends.


class RequestRejected(StepFailed):
    """A request was refused.

    Args:
        receiver: Name of the server that refused it.
        reason: Its reason.

    Attributes:
        reason: The reason of the server.
    """

    def __init__(self, receiver: str, reason: str) -> None:
        super().__init__(f"{receiver} refused it: {reason}")
        self.reason = reason


class ServerClient:
    """Sends requests to servers. Each request has one answer.

    Args:
        servers: Addresses of the servers.

        longest: Bytes of the longest vector.

        keys: The keys of this process.

        seconds: Maximum time to wait for an answer.

        reminder_seconds: Time before the first reminder, if a server can be restarted. The next
            ones follow at growing intervals. Infinity: no reminders.

        name: Name of the receiver, if it is not a server.

        queue_address: Address of the work queue, if servers may be away for long during a restart.

        peers: The processes without which there will be no answer, or None.

    Attributes:
        queue_address: As given.

        server_names: Names of the servers in error messages.

        context: The ZeroMQ context.

        seconds: As given.

        reminder_seconds: As given.

        call_numbers: Numbers the requests.

        keys: As given.

        addresses: Addresses of the servers.

        sockets: The sockets, one for each server.

        monitors: For servers on other hosts, sockets that report whether connecting succeeds.

        unreachable_since: Time since when no process listens, by server.

        peers: As given.
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
        peers: PeerProcesses | None = None,
    ) -> None:
        self.queue_address = queue_address
        self.peers = peers
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
        self.monitors: dict[int, zmq.Socket[bytes]] = {}
        self.unreachable_since: dict[int, float] = {}
        for number, (socket, each) in enumerate(zip(self.sockets, servers, strict=True)):
            if not each.is_local and (reminder_seconds < math.inf or peers is not None):
                self.monitors[number] = socket.get_monitor_socket(
                    zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
                )
            self.connect_socket(socket, each, longest)

    def limit_waiting(self, seconds: float) -> None:
        """Wait no longer than this for an answer from here on.

        Args:
            seconds: The longest wait, in seconds.
        """
        self.seconds = min(self.seconds, seconds)

    def connect_socket(self, socket: zmq.Socket[bytes], address: Address, longest: int) -> None:
        """Set the options and keys of a socket and connect it.

        Args:
            socket: The socket.
            address: Where to connect to.
            longest: Bytes of the longest vector.
        """
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
        """Send requests and yield their answers as they arrive.

        Args:
            requests: (server, header, frames after it) of each. The memory of the frames must not
                change until the answer arrives.

        Yields:
            (server, header, frames after it) of each answer.

        Raises:
            StepFailed: An answer is a refusal, or does not arrive in time.
        """
        open_calls: dict[int, tuple[int, Header, Frames]] = {}
        for server, request, frames in requests:
            header = replace(request, call=next(self.call_numbers) % 2**32)
            open_calls[header.call] = server, header, (header.pack_header(), *frames)
            self._send_frames(server, open_calls[header.call][2])
        until = time.monotonic() + self.seconds
        latest_wake_up = math.inf
        pause = self.reminder_seconds
        poller = zmq.Poller()
        # rounds of reminders so far, and the round in which a call was last sent again
        reminder_rounds = 0
        resent_rounds = dict[int, int]()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        watched = self.peers.descriptors if self.peers is not None else []
        for descriptor in watched:
            poller.register(descriptor, zmq.POLLIN)
        while open_calls:
            # this process was stopped, so the other processes were not late
            if (now := time.monotonic()) > latest_wake_up:
                until = now + self.seconds
            remaining = until - now
            wait = min(max(remaining, 0.0), pause)
            if self.peers is not None and self.monitors:
                self._refuse_lost_servers({server for server, *_ in open_calls.values()})
                wait = min(wait, CONNECTION_CHECK_SECONDS)
            latest_wake_up = now + wait + WAKE_UP_DELAY
            if remaining <= 0 and not poller.poll(0):
                silent = ", ".join(
                    self.server_names[server]
                    for server in sorted({server for server, *_ in open_calls.values()})
                )
                raise StepFailed(
                    f"no answer from {silent} within {self.seconds:g} s: it, or a worker that it "
                    "waits for, does not continue"
                )
            ready = dict(poller.poll(int(1000 * wait) + 1))
            if self.peers is not None and any(each in ready for each in watched):
                self.peers.refuse_ended()
            if not ready and self.reminder_seconds < math.inf:
                reminder_rounds += 1
                self._send_reminders(open_calls.values(), reminder_rounds)
            pause = (
                self.reminder_seconds
                if ready
                else min(2 * pause, max(MAX_REMINDER_SECONDS, self.reminder_seconds))
            )
            for server, socket in enumerate(self.sockets):
                if socket in ready:
                    first, *frames = join_vector_frames(socket.recv_multipart(copy=False))
                    header = self._parse_answer(self.server_names[server], first.bytes, frames)
                    if header.kind == MessageType.WAIT:  # the request has arrived
                        until = time.monotonic() + self.seconds
                    elif header.call in open_calls and header.kind == MessageType.MISSED:
                        if header.step > resent_rounds.get(header.call, 0):
                            resent_rounds[header.call] = reminder_rounds
                            self._send_frames(server, open_calls[header.call][2])
                    # otherwise this is the second answer to a request that was sent twice
                    elif open_calls.pop(header.call, None):
                        yield server, header, [frame.buffer for frame in frames]
                        until = time.monotonic() + self.seconds

    def _send_reminders(
        self, open_calls: Collection[tuple[int, Header, Frames]], turn: int
    ) -> None:
        """Remind of all open requests.

        If no process that could answer is left, it raises StepFailed.
        """
        for server in {server for server, *_ in open_calls} & self.monitors.keys():
            self._read_events(server)
            last = self.queue_address or self.addresses[server]
            if time.monotonic() - self.unreachable_since.get(
                server, math.inf
            ) > ABANDONED_SECONDS and is_port_closed(parse_host_port("", last.endpoint)):
                name = (
                    "the training's work queue" if self.queue_address else self.server_names[server]
                )
                raise StepFailed(
                    f"{name} does not listen at {last.endpoint} any more: the training was "
                    "stopped, or is over"
                )
        for server, header, _ in open_calls:
            self._send_frames(
                server, (header.make_answer(MessageType.REMIND, step=turn).pack_header(),)
            )

    def _read_events(self, server: int) -> None:
        """Read whether the connection to a server on another host is there."""
        while self.monitors[server].poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self.monitors[server])["event"]
            if event == zmq.EVENT_CONNECTED:
                self.unreachable_since.pop(server, None)
            else:
                self.unreachable_since.setdefault(server, time.monotonic())

    def _refuse_lost_servers(self, servers: Collection[int]) -> None:
        """Raise StepFailed if the connection to a server ended, and it does not listen any more."""
        for server in set(servers) & self.monitors.keys():
            self._read_events(server)
            since = self.unreachable_since.get(server, math.inf)
            if time.monotonic() - since > LOST_CONNECTION_SECONDS:
                raise StepFailed(
                    f"the connection to {self.server_names[server]} ended, and it does not listen "
                    "any more: it was killed, or its host is gone"
                )

    def _send_frames(self, server: int, frames: Frames) -> None:
        # The server is not there. The request will be missed and sent again.
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
        """Close all sockets."""
        self.context.destroy(linger=LINGER_MILLISECONDS)
        if self.peers is not None:
            self.peers.close()


def try_handshake(address: Address, keys: KeyPair, seconds: float) -> str:
    """Try to connect to an address with CurveZMQ.

    Args:
        address: Where to connect to.
        keys: The keys of this process.
        seconds: Maximum time to wait.

    Returns:
        "" after success, "unknown" if our key is not known, "another key" if their key differs, or
        "silent" if there is no answer.
    """
    outcomes = {
        zmq.EVENT_HANDSHAKE_SUCCEEDED: "",
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unknown",
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "another key",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "another key",
    }
    client = ServerClient([], 0, keys, seconds)
    until = time.monotonic() + seconds
    try:
        socket = client.context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(sum(outcomes))
        client.connect_socket(socket, address, 0)
        while (left := until - time.monotonic()) > 0:
            if monitor.poll(int(1000 * left) + 1):
                return outcomes[zmq.Event(zmq.utils.monitor.recv_monitor_message(monitor)["event"])]
        return "silent"
    finally:
        client.close()
