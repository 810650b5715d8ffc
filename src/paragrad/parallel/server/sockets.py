"""Sockets of servers, and what they share with sockets of workers (ZeroMQ).

On one host the sockets are in a folder that only their owner may enter. Between hosts they use TCP
and encryption (CurveZMQ). Every process makes its own pair of keys and sends only the public one. A
server accepts only keys that it received before.

A server in a folder may also have an endpoint for processes that join from other hosts. They are
known by their keys, and may send fewer types of requests.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, gethostname
from socket import socket as plain_socket
from typing import Any

import zmq
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from paragrad.errors import StepFailed
from paragrad.launch.launcher_folder import use_clearable_tempdir
from paragrad.parallel.server.curve_keys import Address, AllowedKeys, KeyPair
from paragrad.parallel.server.join_endpoint import HostPort, JoinEndpoint, parse_host_port
from paragrad.parallel.server.message_header import (
    Header,
    InvalidMessage,
    MessageType,
    unpack_header,
)
from paragrad.runtime.launcher_env import detect_launch, find_rendezvous_address
from paragrad.runtime.peer_processes import PeerProcesses
from paragrad.runtime.world import World

# bytes that a frame may have in addition to the longest vector, for texts
TEXT_BYTES = 2**20
MESSAGE_LIMIT = 64  # messages of one peer that wait until they are read
LINGER_MILLISECONDS = 2000  # time for the last messages to leave
# time after which a silent TCP connection gets a heartbeat
HEARTBEAT_MILLISECONDS = 2000
# events of a connection
ACCEPTED = zmq.EVENT_ACCEPTED
HANDSHAKE_SUCCEEDED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.EVENT_DISCONNECTED
AUTHENTICATION_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
# A rank on another host without a connection for so long has ended, if it cannot be restarted.
LOST_CONNECTION_SECONDS = 4.0
# time in which the port of a killed process must become free
BIND_SECONDS = 5.0
# first byte of the names of connections
LOCAL_PREFIX = b"\0"
REMOTE_PREFIX = b"\1"
KEY_LENGTH = 40  # characters of a public key
# A piece of a vector is encrypted and decrypted while the one before it travels.
PIECE_BYTES = 2**18
# types of requests that processes from other hosts may send
REMOTE_TYPES = {
    MessageType.PUSH,
    MessageType.PULL,
    MessageType.REMIND,
    MessageType.NEXT,
    MessageType.JOIN,
    MessageType.LEAVE,
}
Frames = Sequence[Any]


def get_connection_key(connection: bytes) -> bytes | None:
    """Return the public key of a connection from another host; CurveZMQ has verified it.

    Args:
        connection: The name of the connection.

    Returns:
        The key, or None for a connection without one.
    """
    return connection[1 : 1 + KEY_LENGTH] if connection[:1] == REMOTE_PREFIX else None


def set_socket_options(
    socket: zmq.Socket[bytes], longest: int, is_local: bool, seconds: float = 0.0
) -> None:
    """Set the options of a socket.

    On one host the system reports when a process ends; a stopped process keeps its connections.
    Between hosts heartbeats replace that report.

    Args:
        socket: The socket.

        longest: Maximum bytes of a frame.

        is_local: Whether the socket is for processes of this host only.

        seconds: Time for which the other side may be stopped, if requests that are lost with a
            connection are not sent again.
    """
    silence_milliseconds = int(min(max(5 * HEARTBEAT_MILLISECONDS, 1000 * seconds), 2**31 - 1))
    heartbeats = (
        ()
        if is_local
        else (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS),
            (zmq.HEARTBEAT_TIMEOUT, silence_milliseconds),
        )
    )
    for option, value in (
        (zmq.LINGER, LINGER_MILLISECONDS),
        (zmq.RCVHWM, MESSAGE_LIMIT),
        (zmq.SNDHWM, MESSAGE_LIMIT),
        (zmq.MAXMSGSIZE, longest),
        (zmq.IPV6, 1),
        *heartbeats,
    ):
        socket.setsockopt(option, value)


class Listener:
    """The socket of a server: receives the requests of all workers, one after another.

    Args:
        longest: Bytes of the longest vector of a worker.

        host: The address of this host for the others; None if all are on this host.

        keys: The keys of this process.

        address: Where to listen; None for a new folder or any free port.

        join_endpoint: A second endpoint for processes that join from other hosts, or None.

        seconds: As in `set_socket_options`.

    Attributes:
        context: The ZeroMQ context.

        socket: The socket of workers that are ranks of the training.

        join_socket: The socket of processes from other hosts; the same one if there is no other.

        sockets: Both sockets; the one that was served last comes last.

        monitors: Sockets that report connections and disconnections.

        events: Counts of these events, by monitor.

        address: Where the server listens.

        folder: The temporary folder of the socket, or None.

        authenticator: Checks the keys of connections, or None without encryption.

        known_connections: The connection on each file descriptor.

        lost_connections: Connections from other hosts that ended.

        workers: The workers that are ranks of the training, by key; empty if others may come.

        peers: The processes without which the training cannot go on, or None.

        ended_workers: Workers without a connection, and since when, by key.

    Raises:
        StepFailed: The server cannot listen at the address.
    """

    def __init__(
        self,
        longest: int,
        host: str | None,
        keys: KeyPair,
        address: Address | None = None,
        join_endpoint: JoinEndpoint | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.context = zmq.Context()
        self.socket = self._make_socket(
            longest, host is None if address is None else address.is_local, seconds
        )
        self.folder: str | None = None
        self.authenticator: ThreadAuthenticator | None = None
        self.monitors = [_monitor_socket(self.socket)]
        self.events = [Counter[int]()]
        if address is not None:
            self.address = address
            # the socket of a killed process may still exist
            Path(address.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            self.socket.bind(address.endpoint)
        elif host is None:
            # It has mode 0700. It is removed with the temporary folder of multiprocessing.
            use_clearable_tempdir()
            self.folder = tempfile.mkdtemp(dir=get_temp_dir())
            self.address = Address(f"ipc://{Path(self.folder) / 'server'}")
            self.socket.bind(self.address.endpoint)
        else:
            self.authenticator = self._start_authenticator(_KnownKeys(frozenset()))
            self.address = _bind_encrypted(self.socket, keys, HostPort(host))
        self.sockets = [self.socket]
        self.join_socket = self.socket
        self.known_connections = dict[int, bytes]()
        self.lost_connections = list[bytes]()
        self.workers: dict[bytes, str] = {}
        self.peers: PeerProcesses | None = None
        self.ended_workers: dict[bytes, float] = {}
        if join_endpoint is not None:
            self._open_join_endpoint(join_endpoint, keys, longest)

    def _make_socket(self, longest: int, is_local: bool, seconds: float = 0.0) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        set_socket_options(socket, longest + TEXT_BYTES, is_local, seconds)
        return socket

    def _start_authenticator(self, credentials: Any) -> ThreadAuthenticator:
        authenticator = ThreadAuthenticator(self.context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=credentials)
        return authenticator

    def _open_join_endpoint(self, join_endpoint: JoinEndpoint, keys: KeyPair, longest: int) -> None:
        """Open the endpoint at its saved place, or at a new one."""
        saved_state = join_endpoint.read_state()
        keys, host_port = saved_state or (keys, join_endpoint.host_port)
        self.join_socket, self.authenticator = (
            self._make_socket(longest, is_local=False),
            self._start_authenticator(AllowedKeys(join_endpoint.allowed_folder)),
        )
        self.monitors.append(_monitor_socket(self.join_socket))
        self.events.append(Counter())
        address = _bind_encrypted(self.join_socket, keys, host_port)
        if saved_state is None:
            join_endpoint.save_state(keys, parse_host_port("", address.endpoint).port)
        self.sockets.append(self.join_socket)

    def allow_keys(self, keys: Iterable[bytes]) -> None:
        """Accept connections with these keys only, from now on, if messages are encrypted.

        Args:
            keys: The public keys.
        """
        if self.authenticator is not None:
            self.authenticator.configure_curve_callback(
                credentials_provider=_KnownKeys(frozenset(keys))
            )

    def watch_workers(self, keys: Mapping[str, bytes], peers: PeerProcesses) -> None:
        """Accept connections of these workers only, and raise an error if one ends.

        Args:
            keys: The public keys of the workers, by their names for messages.
            peers: The processes of the other ranks.
        """
        self.allow_keys(keys.values())
        self.workers = {key: name for name, key in keys.items()}
        self.peers = peers

    def _refuse_ended_workers(self, ready: Sequence[Any]) -> None:
        """Raise StepFailed if a process has ended, or a worker of another host is gone."""
        if self.peers is not None and any(each in ready for each in self.peers.descriptors):
            self.peers.refuse_ended()
        lost = [
            self.workers[key]
            for key, since in self.ended_workers.items()
            if time.monotonic() - since > LOST_CONNECTION_SECONDS
        ]
        # an idle worker may have a new connection, whose name comes with its next message
        if lost and self.connection_count < len(self.workers):
            raise StepFailed(
                f"the connection of {', '.join(lost)} ended, and it did not come back: it was "
                "killed, or its host is gone"
            )

    def receive_message(self, seconds: float) -> list[Any] | None:
        """Receive the next request.

        Args:
            seconds: Maximum time to wait.

        Returns:
            [connection, header, marks, vector] as frames, or None if no request arrived.

        Raises:
            StepFailed: Another rank has ended.
        """
        until = time.monotonic() + seconds
        while True:
            watched = [*self.poll_sockets, *(self.peers.descriptors if self.peers else ())]
            ready = zmq.select(watched, [], [], max(0.0, until - time.monotonic()))[0]
            self._refuse_ended_workers(ready)
            if any(monitor in ready for monitor in self.monitors):
                self._read_events()
            if ready_sockets := [each for each in self.sockets if each in ready]:
                break
            if time.monotonic() >= until:
                return None
        socket = ready_sockets[0]
        # so that the other socket comes first next time
        self.sockets.sort(key=lambda each: each is socket)
        sender, *frames = socket.recv_multipart(copy=False)
        name = LOCAL_PREFIX + sender.bytes
        if socket is self.join_socket is not self.socket:
            name = REMOTE_PREFIX + str(frames[0].get("User-Id")).encode() + sender.bytes
            descriptor = frames[0].get(zmq.SRCFD)
            # another connection had this descriptor before
            if self.known_connections.get(descriptor, name) != name:
                self.lost_connections.append(self.known_connections[descriptor])
            self.known_connections[descriptor] = name
        elif self.workers and self.authenticator is not None:
            key = str(frames[0].get("User-Id")).encode()
            self.known_connections[frames[0].get(zmq.SRCFD)] = key
            self.ended_workers.pop(key, None)
        return [zmq.Frame(name), *join_vector_frames(frames)]

    def send_answer(self, connection: bytes, header: Header, *rest: Any) -> None:
        """Send an answer without waiting. If the receiver does not take it, it is dropped.

        Args:
            connection: The connection of the request.
            header: The header of the answer.
            rest: The frames after the header.
        """
        key = get_connection_key(connection)
        socket, name = (
            (self.socket, connection[1:])
            if key is None
            else (self.join_socket, connection[1 + len(key) :])
        )
        with suppress(zmq.Again):
            socket.send_multipart(
                [name, *split_vector_frame(socket, header.pack_header(), *rest)],
                flags=zmq.NOBLOCK,
                copy=False,
            )

    @property
    def poll_sockets(self) -> list[Any]:
        """The sockets on which a poller must wait: requests and connection events."""
        return [*self.sockets, *self.monitors]

    def _read_events(self) -> None:
        """Read the events of connections.

        They must be read: ZeroMQ accepts no messages while a thousand events are unread.
        """
        for monitor, events in zip(self.monitors, self.events, strict=True):
            # last event of each descriptor
            last: dict[int, int] = {}
            while monitor.poll(0):
                report = zmq.utils.monitor.recv_monitor_message(monitor)
                events[report["event"]] += 1
                last |= (
                    {report["value"]: report["event"]}
                    if report["event"] in (ACCEPTED, DISCONNECTED)
                    else {}
                )
            lost = [
                self.known_connections.pop(descriptor)
                for descriptor, event in last.items()
                if event == DISCONNECTED and descriptor in self.known_connections
            ]
            if self.workers:
                self.ended_workers |= dict.fromkeys(lost, time.monotonic())
            else:
                self.lost_connections += lost

    @property
    def connection_count(self) -> int:
        """Number of current connections.

        Connections without a valid key are included until they are closed, after 30 s at most.
        """
        self._read_events()
        return self.events[0][ACCEPTED] - self.events[0][DISCONNECTED]

    @property
    def refusals(self) -> Counter[str]:
        """Counts of refused or broken TCP connections, by reason.

        It must be read while all workers are connected, because a worker that joined may leave. A
        message longer than the socket accepts ends its connection.
        """
        events = self.events[-1]
        failed_handshakes = events[ACCEPTED] - events[HANDSHAKE_SUCCEEDED]
        counts = {
            "a connection without a known key": events[AUTHENTICATION_FAILED],
            "a connection that is not encrypted, or not ZeroMQ's": failed_handshakes
            - events[AUTHENTICATION_FAILED],
            "a connection that broke off, or sent too long a message": (len(self.sockets) == 1)
            * (events[DISCONNECTED] - failed_handshakes),
        }
        return Counter(
            {
                reason: count
                for reason, count in counts.items()
                if count > 0 and self.authenticator is not None
            }
        )

    def take_lost_connections(self) -> list[bytes]:
        """Return the connections from other hosts that ended since the last call."""
        self._read_events()
        lost = self.lost_connections
        self.lost_connections = []
        return lost

    def close(self) -> None:
        """Close all sockets and remove the folder."""
        if self.peers is not None:
            self.peers.close()
        if self.authenticator is not None:
            self.authenticator.stop()
        for socket in self.sockets:
            socket.disable_monitor()
        self.context.destroy(linger=LINGER_MILLISECONDS)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _monitor_socket(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return a socket that reports connections and disconnections of a socket."""
    return socket.get_monitor_socket(
        ACCEPTED | HANDSHAKE_SUCCEEDED | AUTHENTICATION_FAILED | DISCONNECTED
    )


def _bind_encrypted(socket: zmq.Socket[bytes], keys: KeyPair, host_port: HostPort) -> Address:
    """Bind a socket and return the address at which it is reached. Raises StepFailed."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    until = time.monotonic() + BIND_SECONDS
    while True:
        try:
            socket.bind(str(host_port.resolved))
            bound = parse_host_port("", socket.getsockopt_string(zmq.LAST_ENDPOINT))
            return Address(str(HostPort(host_port.host, bound.port)), keys.public)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or not host_port.port or time.monotonic() > until:
                raise StepFailed(
                    f"cannot listen at {host_port}: {error.strerror}; give another port"
                ) from error
            time.sleep(0.05)  # the process that had the port was killed a moment ago


def split_vector_frame(socket: zmq.Socket[bytes], *frames: Any) -> list[Any]:
    """Return the frames of a message as they are sent.

    With encryption a long vector is sent in pieces, because ZeroMQ encrypts a whole frame before it
    sends any of it. It also decrypts a frame only after all of it has arrived.

    Args:
        socket: The socket.
        frames: Header, marks and vector; the last two may be missing.
    """
    if len(frames) < 3 or len(frames[2]) <= PIECE_BYTES or socket.get(zmq.MECHANISM) != zmq.CURVE:
        return [*frames]
    header, marks, vector = frames
    return [
        header,
        marks,
        *(vector[start : start + PIECE_BYTES] for start in range(0, len(vector), PIECE_BYTES)),
    ]


def join_vector_frames(frames: Sequence[Any]) -> list[Any]:
    """Return the frames of a received message, with the pieces of the vector joined.

    Args:
        frames: The frames as they arrived.
    """
    first = frames[:2]
    pieces = frames[2:]
    if len(pieces) > 1 and all(len(each) == PIECE_BYTES for each in pieces[:-1]):
        pieces = [zmq.Frame(bytearray().join(each.buffer for each in pieces), copy=False)]
    return [*first, *pieces]


@dataclass(frozen=True)
class _KnownKeys:
    """Allows a fixed set of keys."""

    keys: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


def process_request(
    listener: Listener,
    frames: Sequence[Any],
    job: int,
    handler: Callable[[bytes, Header, Sequence[Any]], None],
    refusals: Counter[str],
) -> None:
    """Pass a request to its handler, or refuse it and count the reason.

    Numbers are removed from counted reasons. They come from the sender, which could otherwise
    create any number of reasons.

    Args:
        listener: The socket of the server.

        frames: The frames of the request.

        job: The number of the training to which it must belong.

        handler: Called with (connection, header, frames after it). It may raise InvalidMessage.

        refusals: Counts of refused requests, by reason.
    """
    connection = frames[0].bytes
    header = Header(MessageType.REFUSED, job)
    try:
        if not 2 <= len(frames) <= 4:
            raise InvalidMessage(f"a message of {len(frames) - 1} parts")
        header = unpack_header(frames[1].bytes)
        # a process that joins does not know the number of the training yet
        if header.job != job and header.kind not in (MessageType.JOIN, MessageType.REMIND):
            raise InvalidMessage("it is of another training")
        if get_connection_key(connection) is not None and header.kind not in REMOTE_TYPES:
            raise InvalidMessage(f"{header.kind.name} is not for workers that joined later")
        if header.is_shared and (
            get_connection_key(connection) is not None or not listener.address.is_local
        ):
            raise InvalidMessage("it lies in the memory of another host")
        handler(connection, header, frames[2:])
    except InvalidMessage as error:
        refusals[re.sub(r"\b\d+\b", "N", str(error))] += 1
        listener.send_answer(
            connection, header.make_answer(MessageType.REFUSED), error.sender_text.encode()
        )


def find_own_host(world: World) -> str | None:
    """Return the address at which the other hosts reach this process.

    Args:
        world: The world of workers and servers.

    Returns:
        The address, or None if all are on this host.
    """
    launch = detect_launch()
    if world.backend == "shm" or launch is None or launch.is_on_one_host:
        return None
    with plain_socket(AF_INET, SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        probe.connect(
            (
                rendezvous[0]
                if isinstance(rendezvous := find_rendezvous_address(launch), tuple)
                else gethostname(),
                9,
            )
        )
        return str(probe.getsockname()[0])
