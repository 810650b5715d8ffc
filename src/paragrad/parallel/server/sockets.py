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
from paragrad.parallel.server.curve_keys import Address, Allowed, Keys
from paragrad.parallel.server.join_endpoint import Entrance, Place, read_place
from paragrad.parallel.server.message_header import Header, Kind, Unfit, unpacked
from paragrad.runtime.launcher_env import address, launched
from paragrad.runtime.world import World

# bytes that a part of a message may have beside the largest vector: texts
ROOM = 2**20
WAITING = 64  # messages of one peer that are kept until they are looked at
LEAVING = 2000  # milliseconds for what was sent last to be gone
# milliseconds after which a silent connection over TCP is asked whether it is there
BEAT = 2000
# of a connection
CAME = zmq.EVENT_ACCEPTED
LET_IN = zmq.EVENT_HANDSHAKE_SUCCEEDED
GONE = zmq.EVENT_DISCONNECTED
UNKNOWN = zmq.EVENT_HANDSHAKE_FAILED_AUTH
# seconds in which the port of a process that was killed must be free again
BINDING = 5.0
# what begins the name of who asks
FROM_HERE = b"\0"
FROM_ELSEWHERE = b"\1"
KEY = 40  # signs of a public key
# bytes of a vector that are encrypted, and decrypted, while those before them travel
PIECE = 2**18
# what may be asked from there
ELSEWHERE = {Kind.PUSH, Kind.PULL, Kind.REMIND, Kind.NEXT, Kind.JOIN, Kind.LEAVE}
Frames = Sequence[Any]


def key_of(whose: bytes) -> bytes | None:
    """The public key of one who asks from elsewhere, which its connection has proved."""
    return whose[1 : 1 + KEY] if whose[:1] == FROM_ELSEWHERE else None


def set_options(
    socket: zmq.Socket[bytes], longest: int, on_host: bool, seconds: float = 0.0
) -> None:
    """seconds: that the other side may stand still, where nobody asks again what is lost with a
    connection. On one host the system tells of a process that ended; one that is stopped keeps
    its connections.
    """
    silent = int(min(max(5 * BEAT, 1000 * seconds), 2**31 - 1))
    beats = () if on_host else ((zmq.HEARTBEAT_IVL, BEAT), (zmq.HEARTBEAT_TIMEOUT, silent))
    for option, value in (
        (zmq.LINGER, LEAVING),
        (zmq.RCVHWM, WAITING),
        (zmq.SNDHWM, WAITING),
        (zmq.MAXMSGSIZE, longest),
        (zmq.IPV6, 1),
        *beats,
    ):
        socket.setsockopt(option, value)


class Listening:
    """Of a server: everybody's questions, one after another. longest: bytes of the longest
    vector of one;  host: by which others reach this one, None: all are on it;  at: where,
    otherwise in a folder or at a port of its own;  entrance: beside, for those who join from
    elsewhere;  seconds: as of `set_options`. Raises StepFailed where that cannot be.
    """

    def __init__(
        self,
        longest: int,
        host: str | None,
        keys: Keys,
        at: Address | None = None,
        entrance: Entrance | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.context = zmq.Context()
        self.socket = self._socket(longest, host is None if at is None else at.on_host, seconds)
        self.folder: str | None = None
        self.door: ThreadAuthenticator | None = None
        # of all connections there were
        self.monitors = [_watched(self.socket)]
        self.events = [Counter[int]()]
        if at is not None:
            self.address = at
            # of one that was killed
            Path(at.at.removeprefix("ipc://")).unlink(missing_ok=True)
            self.socket.bind(at.at)
        elif host is None:
            # mode 0700; cleared with what this process is of
            self.folder = tempfile.mkdtemp(dir=get_temp_dir())
            self.address = Address(f"ipc://{Path(self.folder) / 'server'}")
            self.socket.bind(self.address.at)
        else:
            self.door = self._door(_Known(frozenset()))
            self.address = _encrypted(self.socket, keys, Place(host))
        self.sockets = [self.socket]
        self.elsewhere = self.socket
        # who asks over which descriptor;  asked until then
        self.entered = dict[int, bytes]()
        self.gone = list[bytes]()
        if entrance is not None:
            self._open(entrance, keys, longest)

    def _socket(self, longest: int, on_host: bool, seconds: float = 0.0) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        set_options(socket, longest + ROOM, on_host, seconds)
        return socket

    def _door(self, lets_in: Any) -> ThreadAuthenticator:
        door = ThreadAuthenticator(self.context)
        door.start()
        door.configure_curve_callback(credentials_provider=lets_in)
        return door

    def _open(self, entrance: Entrance, keys: Keys, longest: int) -> None:
        """Where it was, or anew."""
        kept = entrance.found()
        keys, place = kept or (keys, entrance.place)
        self.elsewhere, self.door = (
            self._socket(longest, on_host=False),
            self._door(Allowed(entrance.allowed)),
        )
        self.monitors.append(_watched(self.elsewhere))
        self.events.append(Counter())
        found = _encrypted(self.elsewhere, keys, place)
        if kept is None:
            entrance.keep(keys, read_place("", found.at).port)
        self.sockets.append(self.elsewhere)

    def allow(self, keys: Iterable[bytes]) -> None:
        """From here on these may talk to it, where messages are encrypted."""
        if self.door is not None:
            self.door.configure_curve_callback(credentials_provider=_Known(frozenset(keys)))

    def take(self, seconds: float) -> list[Any] | None:
        """[whose, header, marks, vector] of the next question, as frames; None where none
        came.
        """
        until = time.monotonic() + seconds
        while True:
            ready = zmq.select(self.waiting, [], [], max(0.0, until - time.monotonic()))[0]
            if any(monitor in ready for monitor in self.monitors):
                self._watch()
            if asked := [each for each in self.sockets if each in ready]:
                break
            if time.monotonic() >= until:
                return None
        socket = asked[0]
        # next time another one comes first
        self.sockets.sort(key=lambda each: each is socket)
        whose, *frames = socket.recv_multipart(copy=False)
        name = FROM_HERE + whose.bytes
        if socket is self.elsewhere is not self.socket:
            name = FROM_ELSEWHERE + str(frames[0].get("User-Id")).encode() + whose.bytes
            descriptor = frames[0].get(zmq.SRCFD)
            # which another connection had
            if self.entered.get(descriptor, name) != name:
                self.gone.append(self.entered[descriptor])
            self.entered[descriptor] = name
        return [zmq.Frame(name), *in_one(frames)]

    def answer(self, whose: bytes, header: Header, *rest: Any) -> None:
        """Never waits: who does not take what it is told is told no more."""
        key = key_of(whose)
        socket, name = (
            (self.socket, whose[1:]) if key is None else (self.elsewhere, whose[1 + len(key) :])
        )
        with suppress(zmq.Again):
            socket.send_multipart(
                [name, *in_pieces(socket, header.packed(), *rest)], flags=zmq.NOBLOCK, copy=False
            )

    @property
    def waiting(self) -> list[Any]:
        """What a poller has to wait for: questions, and who comes and goes."""
        return [*self.sockets, *self.monitors]

    def _watch(self) -> None:
        """Hear who came and went: ZeroMQ waits for it, and takes no message while a thousand
        words of it are left.
        """
        for monitor, events in zip(self.monitors, self.events, strict=True):
            # what a descriptor's connection did last
            last: dict[int, int] = {}
            while monitor.poll(0):
                told = zmq.utils.monitor.recv_monitor_message(monitor)
                events[told["event"]] += 1
                last |= {told["value"]: told["event"]} if told["event"] in (CAME, GONE) else {}
            self.gone += [
                self.entered.pop(each)
                for each, event in last.items()
                if event == GONE and each in self.entered
            ]

    @property
    def connections(self) -> int:
        """How many there are now; strangers, too, until they are sent away, after 30 s at
        most.
        """
        self._watch()
        return self.events[0][CAME] - self.events[0][GONE]

    @property
    def refused(self) -> Counter[str]:
        """Connections over TCP that were not let in, or ended, by why: to be read while all
        workers are there. A message that is longer than the socket takes ends its connection;
        who joined may leave.
        """
        events = self.events[-1]
        out = events[CAME] - events[LET_IN]
        found = {
            "a connection without the key of anybody known": events[UNKNOWN],
            "a connection that is not encrypted, or not ZeroMQ's": out - events[UNKNOWN],
            "a connection that broke off, or brought too long a message": (len(self.sockets) == 1)
            * (events[GONE] - out),
        }
        return Counter(
            {why: count for why, count in found.items() if count > 0 and self.door is not None}
        )

    def left(self) -> list[bytes]:
        """Who of those from elsewhere asked over a connection that is gone, since this was
        asked last.
        """
        self._watch()
        found = self.gone
        self.gone = []
        return found

    def close(self) -> None:
        if self.door is not None:
            self.door.stop()
        for socket in self.sockets:
            socket.disable_monitor()
        self.context.destroy(linger=LEAVING)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _watched(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Where is told who comes and goes."""
    return socket.get_monitor_socket(CAME | LET_IN | UNKNOWN | GONE)


def _encrypted(socket: zmq.Socket[bytes], keys: Keys, place: Place) -> Address:
    """Bind a socket to a place; where it is then reached. Raises StepFailed."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    until = time.monotonic() + BINDING
    while True:
        try:
            socket.bind(str(place.resolved))
            bound = read_place("", socket.getsockopt_string(zmq.LAST_ENDPOINT))
            return Address(str(Place(place.host, bound.port)), keys.public)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or not place.port or time.monotonic() > until:
                raise StepFailed(
                    f"nobody can be listened to at {place}: {error.strerror}; give another port"
                ) from error
            time.sleep(0.05)  # whoever had it was killed a moment ago


def in_pieces(socket: zmq.Socket[bytes], *frames: Any) -> list[Any]:
    """Header, marks, vector as they travel. Encrypted, a long vector does in pieces: ZeroMQ
    encrypts a frame before any of it leaves, and decrypts it when all of it is there.
    """
    if len(frames) < 3 or len(frames[2]) <= PIECE or socket.get(zmq.MECHANISM) != zmq.CURVE:
        return [*frames]
    header, marks, vector = frames
    return [
        header,
        marks,
        *(vector[start : start + PIECE] for start in range(0, len(vector), PIECE)),
    ]


def in_one(frames: Sequence[Any]) -> list[Any]:
    """What came, with the pieces of a vector put together."""
    first = frames[:2]
    pieces = frames[2:]
    if len(pieces) > 1 and all(len(each) == PIECE for each in pieces[:-1]):
        pieces = [zmq.Frame(bytearray().join(each.buffer for each in pieces), copy=False)]
    return [*first, *pieces]


@dataclass(frozen=True)
class _Known:
    keys: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


def heard(
    listening: Listening,
    frames: Sequence[Any],
    job: int,
    does: Callable[[bytes, Header, Sequence[Any]], None],
    refused: Counter[str],
) -> None:
    """Have a question done (by whom, its header, what follows it); or refuse it, and count why,
    without the numbers in it: they are the sender's, who would make as many names of them as he
    likes. job: of which it is to be.
    """
    whose = frames[0].bytes
    header = Header(Kind.REFUSED, job)
    try:
        if not 2 <= len(frames) <= 4:
            raise Unfit(f"a message of {len(frames) - 1} parts")
        header = unpacked(frames[1].bytes)
        # who joins does not know it yet
        if header.job != job and header.kind not in (Kind.JOIN, Kind.REMIND):
            raise Unfit("it is of another training")
        if key_of(whose) is not None and header.kind not in ELSEWHERE:
            raise Unfit(f"{header.kind.name} is not for those who joined from elsewhere")
        if header.lies and (key_of(whose) is not None or not listening.address.on_host):
            raise Unfit("it lies in the memory of another host")
        does(whose, header, frames[2:])
    except Unfit as error:
        refused[re.sub(r"\b\d+\b", "N", str(error))] += 1
        listening.answer(whose, header.answer(Kind.REFUSED), error.told.encode())


def own_host(world: World) -> str | None:
    """By which address the others reach this process; None where all are on this host."""
    told = launched()
    if world.backend == "shm" or told is None or told.on_one_host:
        return None
    with plain_socket(AF_INET, SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect((place[0] if isinstance(place := address(told), tuple) else gethostname(), 9))
        return str(probe.getsockname()[0])
