"""Sockets between workers and servers (ZeroMQ).

On one host they lie in a folder that only their owner may enter. Between hosts they are TCP and encrypted (CurveZMQ): every
process makes a pair of keys for itself, public ones alone travel, and a server lets in only those whose keys it was told. One
in a folder may have an entrance beside, for those who join from elsewhere: they are known by their keys, and may ask for less.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, gethostname
from socket import socket as plain_socket
from typing import Any

import zmq
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from paragrad.errors import StepFailed
from paragrad.techniques.served.entrance import Entrance, Place, read_place
from paragrad.techniques.served.header import Header, Kind, Unfit, unpacked
from paragrad.techniques.served.keys import Address, Allowed, Keys
from paragrad.world.launched import address, launched
from paragrad.world.world import World

ROOM = 2**20            # bytes that a part of a message may have beside the largest vector: texts
WAITING = 64            # messages of one peer that are kept until they are looked at
LEAVING = 2000          # milliseconds for what was sent last to be gone
BEAT = 2000             # milliseconds after which a silent connection is asked whether it is there
STOPPED = 1.0           # seconds that a process wakes up late, at least, where it was stopped
BINDING = 5.0           # seconds in which the port of a process that was killed must be free again
FROM_HERE, FROM_ELSEWHERE = b"\0", b"\1"            # what begins the name of who asks
KEY = 40                # signs of a public key
ELSEWHERE = {Kind.PUSH, Kind.PULL, Kind.NEXT, Kind.JOIN, Kind.LEAVE}         # what may be asked from there
Frames = Sequence[Any]


def key_of(whose: bytes) -> bytes | None:
    """The public key of one who asks from elsewhere, which its connection has proved."""
    return whose[1:1 + KEY] if whose[:1] == FROM_ELSEWHERE else None


def _set(socket: zmq.Socket[bytes], longest: int) -> None:
    for option, value in ((zmq.LINGER, LEAVING), (zmq.RCVHWM, WAITING), (zmq.SNDHWM, WAITING), (zmq.MAXMSGSIZE, longest),
                          (zmq.HEARTBEAT_IVL, BEAT), (zmq.HEARTBEAT_TIMEOUT, 5 * BEAT), (zmq.IPV6, 1)):
        socket.setsockopt(option, value)


class Listening:
    """Of a server: everybody's questions, one after another. longest: bytes of the longest vector of one;  host: by which
    others reach this one, None: all are on it;  at: where, otherwise in a folder or at a port of its own;  entrance: beside,
    for those who join from elsewhere. Raises StepFailed where that cannot be."""

    def __init__(self, longest: int, host: str | None, keys: Keys, at: Address | None = None,
                 entrance: Entrance | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self._socket(longest)
        self.folder: str | None = None
        self.door: ThreadAuthenticator | None = None
        self.coming, self.there = _watched(self.socket), set[int]()         # connections, by their descriptors
        if at is not None:
            self.address = at
            Path(at.at.removeprefix("ipc://")).unlink(missing_ok=True)          # of one that was killed
            self.socket.bind(at.at)
        elif host is None:
            self.folder = tempfile.mkdtemp(dir=get_temp_dir())              # mode 0700; cleared with what this process is of
            self.address = Address(f"ipc://{Path(self.folder) / 'server'}")
            self.socket.bind(self.address.at)
        else:
            self.door = self._door(_Known(frozenset()))
            self.address = _encrypted(self.socket, keys, Place(host))
        self.sockets, self.elsewhere = [self.socket], self.socket
        self.entered, self.gone = dict[int, bytes](), list[bytes]()         # who asks over which descriptor;  asked until then
        if entrance is not None:
            self._open(entrance, keys, longest)

    def _socket(self, longest: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        _set(socket, longest + ROOM)
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
        self.elsewhere, self.door = self._socket(longest), self._door(Allowed(entrance.allowed))
        self.leaving = _watched(self.elsewhere)
        found = _encrypted(self.elsewhere, keys, place)
        if kept is None:
            entrance.keep(keys, read_place("", found.at).port)
        self.sockets.append(self.elsewhere)

    def allow(self, keys: Iterable[bytes]) -> None:
        """From here on these may talk to it, where messages are encrypted."""
        if self.door is not None:
            self.door.configure_curve_callback(credentials_provider=_Known(frozenset(keys)))

    def take(self, seconds: float) -> list[Any] | None:
        """[whose, header, marks, vector] of the next question, as frames; None where none came."""
        ready = zmq.select(self.sockets, [], [], seconds)[0]
        if not ready:
            return None
        socket = ready[0]
        self.sockets.sort(key=lambda each: each is socket)              # next time another one comes first
        whose, *frames = socket.recv_multipart(copy=False)
        name = FROM_HERE + whose.bytes
        if socket is self.elsewhere is not self.socket:
            name = FROM_ELSEWHERE + frames[0].get("User-Id").encode() + whose.bytes
            descriptor = frames[0].get(zmq.SRCFD)
            if self.entered.get(descriptor, name) != name:          # which another connection had
                self.gone.append(self.entered[descriptor])
            self.entered[descriptor] = name
        return [zmq.Frame(name), *frames]

    def answer(self, whose: bytes, header: Header, *rest: Any) -> None:
        """Never waits: who does not take what it is told is told no more."""
        key = key_of(whose)
        socket, name = (self.socket, whose[1:]) if key is None else (self.elsewhere, whose[1 + len(key):])
        with suppress(zmq.Again):
            socket.send_multipart([name, header.packed(), *rest], flags=zmq.NOBLOCK, copy=False)

    @property
    def connections(self) -> int:
        """How many there are now."""
        for came, descriptor in _told(self.coming):
            (self.there.add if came else self.there.discard)(descriptor)
        return len(self.there)

    def left(self) -> list[bytes]:
        """Who of those from elsewhere asked over a connection that is gone, since this was asked last."""
        last = {descriptor: came for came, descriptor in _told(self.leaving)} if len(self.sockets) > 1 else {}
        found = self.gone + [self.entered.pop(each) for each, came in last.items() if not came and each in self.entered]
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
    return socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)


def _told(monitor: zmq.Socket[bytes]) -> Iterator[tuple[bool, int]]:
    """(it came, or it went, its descriptor) of every connection since this was asked last."""
    while monitor.poll(0):
        told = zmq.utils.monitor.recv_monitor_message(monitor)
        yield told["event"] == zmq.EVENT_ACCEPTED, told["value"]


def _encrypted(socket: zmq.Socket[bytes], keys: Keys, place: Place) -> Address:
    """Bind a socket to a place; where it is then reached. Raises StepFailed."""
    socket.curve_server, socket.curve_secretkey, socket.curve_publickey = True, keys.secret, keys.public
    until = time.monotonic() + BINDING
    while True:
        try:
            socket.bind(str(place.resolved))
            bound = read_place("", socket.getsockopt_string(zmq.LAST_ENDPOINT))
            return Address(str(Place(place.host, bound.port)), keys.public)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or not place.port or time.monotonic() > until:
                raise StepFailed(f"nobody can be listened to at {place}: {error.strerror}; give another port") from error
            time.sleep(0.05)                            # whoever had it was killed a moment ago


class Declined(StepFailed):
    """What was asked was refused. why: in the words of who was asked."""

    def __init__(self, who: str, why: str) -> None:
        super().__init__(f"{who} refused it: {why}")
        self.why = why


class Calling:
    """Of a worker: questions to every server, each of which has one answer. seconds: to wait for one at most;  again: ask again
    after so many, where a server may have been started anew;  name: of what is asked, where it is one that is no server."""

    def __init__(self, servers: Sequence[Address], longest: int, keys: Keys, seconds: float, again: float = math.inf,
                 name: str | None = None) -> None:
        self.names = [name or f"server {number}" for number in range(len(servers))]
        self.context, self.seconds, self.again, self.calls = zmq.Context(), seconds, again, itertools.count(1)
        self.keys, self.sockets = keys, [self.context.socket(zmq.DEALER) for _ in servers]
        for socket, each in zip(self.sockets, servers, strict=True):
            self.connect(socket, each, longest)

    def connect(self, socket: zmq.Socket[bytes], at: Address, longest: int) -> None:
        _set(socket, longest + ROOM)
        if at.key is not None:
            socket.curve_serverkey, socket.curve_secretkey = at.key, self.keys.secret
            socket.curve_publickey = self.keys.public
        socket.connect(at.at)

    def asked(self, questions: Iterable[tuple[int, Header, Frames]]) -> Iterator[tuple[int, Header, Frames]]:
        """(server, header, frames after it) of the answers to questions (server, header, frames), as they come. What frames lie
        in must stay as it is until then. Raises StepFailed where an answer is a refusal, or does not come."""
        open_calls: dict[int, tuple[int, Frames]] = {}
        for server, header, frames in questions:
            call = next(self.calls) % 2**32
            open_calls[call] = server, (replace(header, call=call).packed(), *frames)
            self._send(*open_calls[call])
        until, woken, poller = time.monotonic() + self.seconds, math.inf, zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        while open_calls:
            if (now := time.monotonic()) > woken:                       # this process was stopped: the others were not late
                until = now + self.seconds
            left = until - now
            woken = now + min(max(left, 0.0), self.again) + STOPPED
            if left <= 0 and not poller.poll(0):
                silent = ", ".join(self.names[server] for server in sorted({server for server, _ in open_calls.values()}))
                raise StepFailed(f"no answer from {silent} within {self.seconds:g} s: it, or a worker that it waits for, does "
                                 "not go on")
            ready = dict(poller.poll(int(1000 * min(max(left, 0.0), self.again)) + 1))
            for each in () if ready else open_calls.values():
                self._send(*each)
            for server, socket in enumerate(self.sockets):
                if socket in ready:
                    first, *frames = socket.recv_multipart(copy=False)
                    header = self._answer(self.names[server], first.bytes, frames)
                    if header.kind == Kind.WAIT:                        # it is there
                        until = time.monotonic() + self.seconds
                    elif open_calls.pop(header.call, None):             # otherwise it was asked twice
                        yield server, header, [frame.buffer for frame in frames]

    def _send(self, server: int, frames: Frames) -> None:
        with suppress(zmq.Again):                                       # it is not there: it is asked again
            self.sockets[server].send_multipart(list(frames), flags=zmq.NOBLOCK, copy=False)

    @staticmethod
    def _answer(name: str, frame: bytes, rest: Sequence[Any]) -> Header:
        try:
            header = unpacked(frame)
        except Unfit as error:
            raise StepFailed(f"{name} answered with {error}") from None
        if header.kind == Kind.REFUSED:
            raise Declined(name, rest[-1].bytes.decode(errors="replace"))
        return header

    def close(self) -> None:
        self.context.destroy(linger=LEAVING)


def knock(at: Address, keys: Keys, seconds: float) -> str:
    """How it goes to be let in: "" where one is, otherwise "unknown" (our key), "another key" (theirs), or "silent"."""
    ends = {zmq.EVENT_HANDSHAKE_SUCCEEDED: "", zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unknown",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "another key", zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "another key"}
    calling, until = Calling([], 0, keys, seconds), time.monotonic() + seconds
    try:
        socket = calling.context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(sum(ends))
        calling.connect(socket, at, 0)
        while (left := until - time.monotonic()) > 0:
            if monitor.poll(int(1000 * left) + 1):
                return ends[zmq.Event(zmq.utils.monitor.recv_monitor_message(monitor)["event"])]
        return "silent"
    finally:
        calling.close()


@dataclass(frozen=True)
class _Known:
    keys: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


def heard(listening: Listening, frames: Sequence[Any], job: int, does: Callable[[bytes, Header, Sequence[Any]], None],
          refused: Counter[str]) -> None:
    """Have a question done (by whom, its header, what follows it); or refuse it, and count why. job: of which it is to be."""
    whose, header = frames[0].bytes, Header(Kind.REFUSED, job)
    try:
        if not 2 <= len(frames) <= 4:
            raise Unfit(f"a message of {len(frames) - 1} parts")
        header = unpacked(frames[1].bytes)
        if header.job != job and header.kind != Kind.JOIN:              # who joins does not know it yet
            raise Unfit("it is of another training")
        if key_of(whose) is not None and header.kind not in ELSEWHERE:
            raise Unfit(f"{header.kind.name} is not for those who joined from elsewhere")
        does(whose, header, frames[2:])
    except Unfit as error:
        refused[str(error)] += 1
        listening.answer(whose, header.answer(Kind.REFUSED), error.told.encode())


def own_host(world: World) -> str | None:
    """By which address the others reach this process; None where all are on this host."""
    told = launched()
    if world.backend == "shm" or told is None or told.on_one_host:
        return None
    with plain_socket(AF_INET, SOCK_DGRAM) as probe:        # connecting sends nothing
        probe.connect((place[0] if isinstance(place := address(told), tuple) else gethostname(), 9))
        return str(probe.getsockname()[0])
