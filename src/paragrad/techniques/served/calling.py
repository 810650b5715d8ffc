"""What a worker asks servers, or the office, and how it waits for the answers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq
import zmq.utils.monitor

from paragrad.errors import StepFailed
from paragrad.techniques.served.header import Header, Kind, Unfit, unpacked
from paragrad.techniques.served.keys import Address, Keys
from paragrad.techniques.served.sockets import LEAVING, ROOM, Frames, in_one, in_pieces, set_options

STOPPED = 1.0           # seconds that a process wakes up late, at least, where it was stopped


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
        set_options(socket, longest + ROOM)
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
                    first, *frames = in_one(socket.recv_multipart(copy=False))
                    header = self._answer(self.names[server], first.bytes, frames)
                    if header.kind == Kind.WAIT:                        # it is there
                        until = time.monotonic() + self.seconds
                    elif open_calls.pop(header.call, None):             # otherwise it was asked twice
                        yield server, header, [frame.buffer for frame in frames]

    def _send(self, server: int, frames: Frames) -> None:
        with suppress(zmq.Again):                                       # it is not there: it is asked again
            socket = self.sockets[server]
            socket.send_multipart(in_pieces(socket, *frames), flags=zmq.NOBLOCK, copy=False)

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
