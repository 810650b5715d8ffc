"""Sockets of servers, and what those of workers have in common with them (ZeroMQ).

On one host they lie in a folder that only their owner may enter. Between hosts they are TCP and
encrypted (CurveZMQ): every process makes a pair of keys for itself, public ones alone travel,
and a server lets in only those whose keys it was told. One in a folder may have an entrance
beside, for those who join from elsewhere: they are known by their keys, and may ask for less.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from paragrad.parallel.server.curve_keys import Address, AllowedKeys, KeyPair
from paragrad.parallel.server.join_endpoint import HostPort, JoinEndpoint, parse_host_port
from paragrad.parallel.server.message_header import (
    Header,
    InvalidMessage,
    MessageType,
    unpack_header,
)
from paragrad.runtime.launcher_env import detect_launch, find_rendezvous_address
from paragrad.runtime.world import World

# bytes that a part of a message may have beside the largest vector: texts
TEXT_BYTES = 2**20
MESSAGE_LIMIT = 64  # messages of one peer that are kept until they are looked at
LINGER_MILLISECONDS = 2000  # milliseconds for what was sent last to be gone
# milliseconds after which a silent connection over TCP is asked whether it is there
HEARTBEAT_MILLISECONDS = 2000
# of a connection
ACCEPTED = zmq.EVENT_ACCEPTED
HANDSHAKE_SUCCEEDED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.EVENT_DISCONNECTED
AUTHENTICATION_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
# seconds in which the port of a process that was killed must be free again
BIND_SECONDS = 5.0
# what begins the name of who asks
LOCAL_PREFIX = b"\0"
REMOTE_PREFIX = b"\1"
KEY_LENGTH = 40  # signs of a public key
# bytes of a vector that are encrypted, and decrypted, while those before them travel
PIECE_BYTES = 2**18
# what may be asked from there
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
    """The public key of one who asks from elsewhere, which its connection has proved."""
    return connection[1 : 1 + KEY_LENGTH] if connection[:1] == REMOTE_PREFIX else None


def set_socket_options(
    socket: zmq.Socket[bytes], longest: int, is_local: bool, seconds: float = 0.0
) -> None:
    """seconds: that the other side may stand still, where nobody asks again what is lost with a
    connection. On one host the system tells of a process that ended; one that is stopped keeps
    its connections.
    """
    silent = int(min(max(5 * HEARTBEAT_MILLISECONDS, 1000 * seconds), 2**31 - 1))
    beats = (
        ()
        if is_local
        else ((zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS), (zmq.HEARTBEAT_TIMEOUT, silent))
    )
    for option, value in (
        (zmq.LINGER, LINGER_MILLISECONDS),
        (zmq.RCVHWM, MESSAGE_LIMIT),
        (zmq.SNDHWM, MESSAGE_LIMIT),
        (zmq.MAXMSGSIZE, longest),
        (zmq.IPV6, 1),
        *beats,
    ):
        socket.setsockopt(option, value)


class Listener:
    """Of a server: everybody's questions, one after another. longest: bytes of the longest
    vector of one;  host: by which others reach this one, None: all are on it;  at: where,
    otherwise in a folder or at a port of its own;  entrance: beside, for those who join from
    elsewhere;  seconds: as of `set_options`. Raises StepFailed where that cannot be.
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
        # of all connections there were
        self.monitors = [_monitor_socket(self.socket)]
        self.events = [Counter[int]()]
        if address is not None:
            self.address = address
            # of one that was killed
            Path(address.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            self.socket.bind(address.endpoint)
        elif host is None:
            # mode 0700; cleared with what this process is of
            self.folder = tempfile.mkdtemp(dir=get_temp_dir())
            self.address = Address(f"ipc://{Path(self.folder) / 'server'}")
            self.socket.bind(self.address.endpoint)
        else:
            self.authenticator = self._start_authenticator(_KnownKeys(frozenset()))
            self.address = _bind_encrypted(self.socket, keys, HostPort(host))
        self.sockets = [self.socket]
        self.join_socket = self.socket
        # who asks over which descriptor;  asked until then
        self.known_connections = dict[int, bytes]()
        self.lost_connections = list[bytes]()
        if join_endpoint is not None:
            self._open_join_endpoint(join_endpoint, keys, longest)

    def _make_socket(self, longest: int, is_local: bool, seconds: float = 0.0) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        set_socket_options(socket, longest + TEXT_BYTES, is_local, seconds)
        return socket

    def _start_authenticator(self, credentials: Any) -> ThreadAuthenticator:
        door = ThreadAuthenticator(self.context)
        door.start()
        door.configure_curve_callback(credentials_provider=credentials)
        return door

    def _open_join_endpoint(self, join_endpoint: JoinEndpoint, keys: KeyPair, longest: int) -> None:
        """Where it was, or anew."""
        kept = join_endpoint.read_state()
        keys, place = kept or (keys, join_endpoint.host_port)
        self.join_socket, self.authenticator = (
            self._make_socket(longest, is_local=False),
            self._start_authenticator(AllowedKeys(join_endpoint.allowed_folder)),
        )
        self.monitors.append(_monitor_socket(self.join_socket))
        self.events.append(Counter())
        found = _bind_encrypted(self.join_socket, keys, place)
        if kept is None:
            join_endpoint.save_state(keys, parse_host_port("", found.endpoint).port)
        self.sockets.append(self.join_socket)

    def allow_keys(self, keys: Iterable[bytes]) -> None:
        """From here on these may talk to it, where messages are encrypted."""
        if self.authenticator is not None:
            self.authenticator.configure_curve_callback(
                credentials_provider=_KnownKeys(frozenset(keys))
            )

    def receive_message(self, seconds: float) -> list[Any] | None:
        """[whose, header, marks, vector] of the next question, as frames; None where none
        came.
        """
        until = time.monotonic() + seconds
        while True:
            ready = zmq.select(self.poll_sockets, [], [], max(0.0, until - time.monotonic()))[0]
            if any(monitor in ready for monitor in self.monitors):
                self._read_events()
            if asked := [each for each in self.sockets if each in ready]:
                break
            if time.monotonic() >= until:
                return None
        socket = asked[0]
        # next time another one comes first
        self.sockets.sort(key=lambda each: each is socket)
        whose, *frames = socket.recv_multipart(copy=False)
        name = LOCAL_PREFIX + whose.bytes
        if socket is self.join_socket is not self.socket:
            name = REMOTE_PREFIX + str(frames[0].get("User-Id")).encode() + whose.bytes
            descriptor = frames[0].get(zmq.SRCFD)
            # which another connection had
            if self.known_connections.get(descriptor, name) != name:
                self.lost_connections.append(self.known_connections[descriptor])
            self.known_connections[descriptor] = name
        return [zmq.Frame(name), *join_vector_frames(frames)]

    def send_answer(self, connection: bytes, header: Header, *rest: Any) -> None:
        """Never waits: who does not take what it is told is told no more."""
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
        """What a poller has to wait for: questions, and who comes and goes."""
        return [*self.sockets, *self.monitors]

    def _read_events(self) -> None:
        """Hear who came and went: ZeroMQ waits for it, and takes no message while a thousand
        words of it are left.
        """
        for monitor, events in zip(self.monitors, self.events, strict=True):
            # what a descriptor's connection did last
            last: dict[int, int] = {}
            while monitor.poll(0):
                told = zmq.utils.monitor.recv_monitor_message(monitor)
                events[told["event"]] += 1
                last |= (
                    {told["value"]: told["event"]}
                    if told["event"] in (ACCEPTED, DISCONNECTED)
                    else {}
                )
            self.lost_connections += [
                self.known_connections.pop(each)
                for each, event in last.items()
                if event == DISCONNECTED and each in self.known_connections
            ]

    @property
    def connection_count(self) -> int:
        """How many there are now; strangers, too, until they are sent away, after 30 s at
        most.
        """
        self._read_events()
        return self.events[0][ACCEPTED] - self.events[0][DISCONNECTED]

    @property
    def refusals(self) -> Counter[str]:
        """Connections over TCP that were not let in, or ended, by why: to be read while all
        workers are there. A message that is longer than the socket takes ends its connection;
        who joined may leave.
        """
        events = self.events[-1]
        out = events[ACCEPTED] - events[HANDSHAKE_SUCCEEDED]
        found = {
            "a connection without the key of anybody known": events[AUTHENTICATION_FAILED],
            "a connection that is not encrypted, or not ZeroMQ's": out
            - events[AUTHENTICATION_FAILED],
            "a connection that broke off, or brought too long a message": (len(self.sockets) == 1)
            * (events[DISCONNECTED] - out),
        }
        return Counter(
            {
                why: count
                for why, count in found.items()
                if count > 0 and self.authenticator is not None
            }
        )

    def take_lost_connections(self) -> list[bytes]:
        """Who of those from elsewhere asked over a connection that is gone, since this was
        asked last.
        """
        self._read_events()
        found = self.lost_connections
        self.lost_connections = []
        return found

    def close(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()
        for socket in self.sockets:
            socket.disable_monitor()
        self.context.destroy(linger=LINGER_MILLISECONDS)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _monitor_socket(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Where is told who comes and goes."""
    return socket.get_monitor_socket(
        ACCEPTED | HANDSHAKE_SUCCEEDED | AUTHENTICATION_FAILED | DISCONNECTED
    )


def _bind_encrypted(socket: zmq.Socket[bytes], keys: KeyPair, host_port: HostPort) -> Address:
    """Bind a socket to a place; where it is then reached. Raises StepFailed."""
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
                    f"nobody can be listened to at {host_port}: {error.strerror}; give another port"
                ) from error
            time.sleep(0.05)  # whoever had it was killed a moment ago


def split_vector_frame(socket: zmq.Socket[bytes], *frames: Any) -> list[Any]:
    """Header, marks, vector as they travel. Encrypted, a long vector does in pieces: ZeroMQ
    encrypts a frame before any of it leaves, and decrypts it when all of it is there.
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
    """What came, with the pieces of a vector put together."""
    first = frames[:2]
    pieces = frames[2:]
    if len(pieces) > 1 and all(len(each) == PIECE_BYTES for each in pieces[:-1]):
        pieces = [zmq.Frame(bytearray().join(each.buffer for each in pieces), copy=False)]
    return [*first, *pieces]


@dataclass(frozen=True)
class _KnownKeys:
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
    """Have a question done (by whom, its header, what follows it); or refuse it, and count why,
    without the numbers in it: they are the sender's, who would make as many names of them as he
    likes. job: of which it is to be.
    """
    whose = frames[0].bytes
    header = Header(MessageType.REFUSED, job)
    try:
        if not 2 <= len(frames) <= 4:
            raise InvalidMessage(f"a message of {len(frames) - 1} parts")
        header = unpack_header(frames[1].bytes)
        # who joins does not know it yet
        if header.job != job and header.kind not in (MessageType.JOIN, MessageType.REMIND):
            raise InvalidMessage("it is of another training")
        if get_connection_key(whose) is not None and header.kind not in REMOTE_TYPES:
            raise InvalidMessage(f"{header.kind.name} is not for those who joined from elsewhere")
        if header.is_shared and (
            get_connection_key(whose) is not None or not listener.address.is_local
        ):
            raise InvalidMessage("it lies in the memory of another host")
        handler(whose, header, frames[2:])
    except InvalidMessage as error:
        refusals[re.sub(r"\b\d+\b", "N", str(error))] += 1
        listener.send_answer(
            whose, header.make_answer(MessageType.REFUSED), error.sender_text.encode()
        )


def find_own_host(world: World) -> str | None:
    """By which address the others reach this process; None where all are on this host."""
    told = detect_launch()
    if world.backend == "shm" or told is None or told.is_on_one_host:
        return None
    with plain_socket(AF_INET, SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect(
            (
                place[0]
                if isinstance(place := find_rendezvous_address(told), tuple)
                else gethostname(),
                9,
            )
        )
        return str(probe.getsockname()[0])
