"""Sockets between workers and servers (ZeroMQ).

On one host they lie in a folder that only their owner may enter. Between hosts they are TCP and encrypted (CurveZMQ): every
process makes a pair of keys for itself, public ones alone travel, and a server lets in only those whose keys it was told.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from paragrad.techniques.served.header import Header, Kind, Unfit, unpacked
from paragrad.world.launched import address, launched
from paragrad.world.world import World

ROOM = 2**20            # bytes that a part of a message may have beside the largest vector: texts
WAITING = 64            # messages of one peer that are kept until they are looked at
LEAVING = 2000          # milliseconds for what was sent last to be gone
BEAT = 2000             # milliseconds after which a silent connection is asked whether it is there
CAME, LET_IN, GONE = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED        # of a connection
UNKNOWN = zmq.EVENT_HANDSHAKE_FAILED_AUTH
Frames = Sequence[Any]


@dataclass(frozen=True)
class Keys:
    """A process's own pair, made anew for every training."""
    public: bytes
    secret: bytes

    @classmethod
    def made(cls) -> Keys:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Address:
    """Where a server listens; key: its public one, where messages are encrypted."""
    at: str
    key: bytes | None = None


def _set(socket: zmq.Socket[bytes], longest: int) -> None:
    for option, value in ((zmq.LINGER, LEAVING), (zmq.RCVHWM, WAITING), (zmq.SNDHWM, WAITING), (zmq.MAXMSGSIZE, longest),
                          (zmq.HEARTBEAT_IVL, BEAT), (zmq.HEARTBEAT_TIMEOUT, 5 * BEAT), (zmq.IPV6, 1)):
        socket.setsockopt(option, value)


class Listening:
    """Of a server: everybody's questions, one after another. longest: bytes of the longest vector of one;  host: by which
    others reach this one, None: all are on it;  at: where, otherwise in a folder or at a port of its own."""

    def __init__(self, longest: int, host: str | None, keys: Keys, at: Address | None = None) -> None:
        self.context, self.keys = zmq.Context(), keys
        self.socket = self.context.socket(zmq.ROUTER)
        _set(self.socket, longest + ROOM)
        self.folder: str | None = None
        self.door: ThreadAuthenticator | None = None
        self.events: Counter[int] = Counter()           # of all connections there were
        self.monitor = self.socket.get_monitor_socket(CAME | LET_IN | UNKNOWN | GONE)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.monitor, zmq.POLLIN)
        if at is not None:
            self.address = at
            Path(at.at.removeprefix("ipc://")).unlink(missing_ok=True)          # of one that was killed
            self.socket.bind(at.at)
        elif host is None:
            self.folder = tempfile.mkdtemp(dir=get_temp_dir())              # mode 0700; cleared with what this process is of
            self.address = Address(f"ipc://{Path(self.folder) / 'server'}")
            self.socket.bind(self.address.at)
        else:
            self.door = ThreadAuthenticator(self.context)
            self.door.start()
            self.door.configure_curve_callback(credentials_provider=_Nobody())
            self.socket.curve_server, self.socket.curve_secretkey = True, keys.secret
            self.socket.curve_publickey = keys.public
            port = self.socket.bind_to_random_port(f"tcp://{_bracketed(host)}")
            self.address = Address(f"tcp://{_bracketed(host)}:{port}", keys.public)

    def allow(self, keys: Iterable[bytes]) -> None:
        """From here on these may talk to it, where messages are encrypted."""
        if self.door is not None:
            self.door.configure_curve_callback(credentials_provider=_Known(frozenset(keys)))

    def take(self, seconds: float) -> list[Any] | None:
        """[whose, header, marks, vector] of the next question, as frames; None where none came. Events are read too, which
        would otherwise be in the way of messages once there are 2000."""
        until = time.monotonic() + seconds
        while ready := dict(self.poller.poll(max(0, int(1000 * (until - time.monotonic()))))):
            while self.monitor in ready and self.monitor.poll(0):
                self.events[zmq.utils.monitor.recv_monitor_message(self.monitor)["event"]] += 1
            if self.socket in ready:
                return self.socket.recv_multipart(copy=False)
        return None

    def answer(self, whose: bytes, header: Header, *rest: Any) -> None:
        """Never waits: who does not take what it is told is told no more."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([whose, header.packed(), *rest], flags=zmq.NOBLOCK, copy=False)

    @property
    def connections(self) -> int:
        """How many there are now; strangers, too, until they are sent away, after 30 s at most."""
        return self.events[CAME] - self.events[GONE]

    @property
    def refused(self) -> Counter[str]:
        """Connections over TCP that were not let in, or ended, by why: to be read while all workers are there. A message that
        is longer than the socket takes ends its connection."""
        out = self.events[CAME] - self.events[LET_IN]
        found = {"a connection without the key of anybody known": self.events[UNKNOWN],
                 "a connection that is not encrypted, or not ZeroMQ's": out - self.events[UNKNOWN],
                 "a connection that broke off, or brought too long a message": self.events[GONE] - out}
        return Counter({why: count for why, count in found.items() if count > 0 and self.door is not None})

    def close(self) -> None:
        if self.door is not None:
            self.door.stop()
        self.socket.disable_monitor()
        self.context.destroy(linger=LEAVING)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class Calling:
    """Of a worker: questions to every server, each of which has one answer. seconds: to wait for one at most;  again: ask again
    after so many, where a server may have been started anew."""

    def __init__(self, servers: Sequence[Address], longest: int, keys: Keys, seconds: float, again: float = math.inf) -> None:
        self.context, self.seconds, self.again, self.calls = zmq.Context(), seconds, again, itertools.count(1)
        self.sockets = []
        for each in servers:
            socket = self.context.socket(zmq.DEALER)
            _set(socket, longest + ROOM)
            if each.key is not None:
                socket.curve_serverkey, socket.curve_secretkey = each.key, keys.secret
                socket.curve_publickey = keys.public
            socket.connect(each.at)
            self.sockets.append(socket)

    def asked(self, questions: Iterable[tuple[int, Header, Frames]]) -> Iterator[tuple[int, Header, Frames]]:
        """(server, header, frames after it) of the answers to questions (server, header, frames), as they come. What frames lie
        in must stay as it is until then. Raises StepFailed where an answer is a refusal, or does not come."""
        open_calls: dict[int, tuple[int, Frames]] = {}
        for server, header, frames in questions:
            call = next(self.calls) % 2**32
            open_calls[call] = server, (replace(header, call=call).packed(), *frames)
            self._send(*open_calls[call])
        until, poller = time.monotonic() + self.seconds, zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        while open_calls:
            left = until - time.monotonic()
            if left <= 0 and not poller.poll(0):
                raise StepFailed(f"no answer from server(s) {sorted({server for server, _ in open_calls.values()})} within "
                                 f"{self.seconds:g} s: it, or a worker that it waits for, does not go on")
            ready = dict(poller.poll(int(1000 * min(max(left, 0.0), self.again)) + 1))
            for each in () if ready else open_calls.values():
                self._send(*each)
            for server, socket in enumerate(self.sockets):
                if socket in ready:
                    first, *frames = socket.recv_multipart(copy=False)
                    header = self._answer(server, first.bytes, frames)
                    if open_calls.pop(header.call, None):               # otherwise it was asked twice
                        yield server, header, [frame.buffer for frame in frames]

    def _send(self, server: int, frames: Frames) -> None:
        with contextlib.suppress(zmq.Again):                            # it is not there: it is asked again
            self.sockets[server].send_multipart(list(frames), flags=zmq.NOBLOCK, copy=False)

    @staticmethod
    def _answer(server: int, frame: bytes, rest: Sequence[Any]) -> Header:
        try:
            header = unpacked(frame)
        except Unfit as error:
            raise StepFailed(f"server {server} answered with {error}") from None
        if header.kind == Kind.REFUSED:
            raise StepFailed(f"server {server} refused it: {rest[-1].bytes.decode(errors='replace')}")
        return header

    def close(self) -> None:
        self.context.destroy(linger=LEAVING)


class _Nobody:
    def callback(self, domain: str, key: bytes) -> bool:
        return False


@dataclass(frozen=True)
class _Known:
    keys: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def heard(listening: Listening, frames: Sequence[Any], job: int, does: Callable[[bytes, Header, Sequence[Any]], None],
          refused: Counter[str]) -> None:
    """Have a question done (by whom, its header, what follows it); or refuse it, and count why, without the numbers in it: they
    are the sender's, who would make as many names of them as he likes. job: of which it is to be."""
    whose, header = frames[0].bytes, Header(Kind.REFUSED, job)
    try:
        if not 2 <= len(frames) <= 4:
            raise Unfit(f"a message of {len(frames) - 1} parts")
        header = unpacked(frames[1].bytes)
        if header.job != job:
            raise Unfit("it is of another training")
        does(whose, header, frames[2:])
    except Unfit as error:
        refused[re.sub(r"\b\d+\b", "N", str(error))] += 1
        listening.answer(whose, header.answer(Kind.REFUSED), str(error).encode())


def own_host(world: World) -> str | None:
    """By which address the others reach this process; None where all are on this host."""
    told = launched()
    if world.backend == "shm" or told is None or told.on_one_host:
        return None
    with plain_socket(AF_INET, SOCK_DGRAM) as probe:        # connecting sends nothing
        probe.connect((place[0] if isinstance(place := address(told), tuple) else gethostname(), 9))
        return str(probe.getsockname()[0])
