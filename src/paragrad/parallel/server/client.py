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
from paragrad.parallel.server.curve_keys import Address, Keys
from paragrad.parallel.server.join_endpoint import read_place, refuses
from paragrad.parallel.server.message_header import Header, Kind, Unfit, unpacked
from paragrad.parallel.server.sockets import LEAVING, ROOM, Frames, in_one, in_pieces, set_options

STOPPED = 1.0  # seconds that a process wakes up late, at least, where it was stopped
SELDOM = 10.0  # seconds between reminders at most
DESERTED = 10.0  # seconds in which nobody listens, after which nobody is waited for


class Declined(StepFailed):
    """What was asked was refused. why: in the words of who was asked."""

    def __init__(self, who: str, why: str) -> None:
        super().__init__(f"{who} refused it: {why}")
        self.why = why


class Calling:
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
        keys: Keys,
        seconds: float,
        again: float = math.inf,
        name: str | None = None,
        office: Address | None = None,
    ) -> None:
        self.office = office
        self.names = [name or f"server {number}" for number in range(len(servers))]
        self.context = zmq.Context()
        self.seconds = seconds
        self.again = again
        self.calls = itertools.count(1)
        self.keys, self.at, self.sockets = (
            keys,
            list(servers),
            [self.context.socket(zmq.DEALER) for _ in servers],
        )
        # by server elsewhere: where is told whether somebody listens there
        self.lines: dict[int, zmq.Socket[bytes]] = {}
        self.apart: dict[int, float] = {}  # since when nobody does
        for number, (socket, each) in enumerate(zip(self.sockets, servers, strict=True)):
            if not each.on_host and again < math.inf:
                self.lines[number] = socket.get_monitor_socket(
                    zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
                )
            self.connect(socket, each, longest)

    def connect(self, socket: zmq.Socket[bytes], at: Address, longest: int) -> None:
        set_options(
            socket, longest + ROOM, at.on_host, self.seconds if self.again == math.inf else 0.0
        )
        if at.key is not None:
            socket.curve_serverkey = at.key
            socket.curve_secretkey = self.keys.secret
            socket.curve_publickey = self.keys.public
        socket.connect(at.at)

    def asked(
        self, questions: Iterable[tuple[int, Header, Frames]]
    ) -> Iterator[tuple[int, Header, Frames]]:
        """(server, header, frames after it) of the answers to questions (server, header,
        frames), as they come. What frames lie in must stay as it is until then. Raises
        StepFailed where an answer is a refusal, or does not come.
        """
        open_calls: dict[int, tuple[int, Header, Frames]] = {}
        for server, asked, frames in questions:
            header = replace(asked, call=next(self.calls) % 2**32)
            open_calls[header.call] = server, header, (header.packed(), *frames)
            self._send(server, open_calls[header.call][2])
        until = time.monotonic() + self.seconds
        woken = math.inf
        pause = self.again
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
            woken = now + wait + STOPPED
            if left <= 0 and not poller.poll(0):
                silent = ", ".join(
                    self.names[server]
                    for server in sorted({server for server, *_ in open_calls.values()})
                )
                raise StepFailed(
                    f"no answer from {silent} within {self.seconds:g} s: it, or a worker that it "
                    f"waits for, does "
                    "not go on"
                )
            ready = dict(poller.poll(int(1000 * wait) + 1))
            if not ready and self.again < math.inf:
                rounds += 1
                self._remind(open_calls.values(), rounds)
            pause = self.again if ready else min(2 * pause, max(SELDOM, self.again))
            for server, socket in enumerate(self.sockets):
                if socket in ready:
                    first, *frames = in_one(socket.recv_multipart(copy=False))
                    header = self._answer(self.names[server], first.bytes, frames)
                    if header.kind == Kind.WAIT:  # it is there
                        until = time.monotonic() + self.seconds
                    elif header.call in open_calls and header.kind == Kind.MISSED:
                        if header.step > sent.get(header.call, 0):
                            sent[header.call] = rounds
                            self._send(server, open_calls[header.call][2])
                    # otherwise it was asked twice
                    elif open_calls.pop(header.call, None):
                        yield server, header, [frame.buffer for frame in frames]
                        until = time.monotonic() + self.seconds

    def _remind(self, open_calls: Collection[tuple[int, Header, Frames]], turn: int) -> None:
        """Of all questions that are open. Raises StepFailed where nobody is there any more who
        could answer.
        """
        for server in {server for server, *_ in open_calls} & self.lines.keys():
            while self.lines[server].poll(0):
                if (
                    zmq.utils.monitor.recv_monitor_message(self.lines[server])["event"]
                    == zmq.EVENT_CONNECTED
                ):
                    self.apart.pop(server, None)
                else:
                    self.apart.setdefault(server, time.monotonic())
            last = self.office or self.at[server]
            if time.monotonic() - self.apart.get(server, math.inf) > DESERTED and refuses(
                read_place("", last.at)
            ):
                who = "the training's office" if self.office else self.names[server]
                raise StepFailed(
                    f"nobody listens any more at {last.at}, where {who} was: the training was "
                    f"ended, or is over"
                )
        for server, header, _ in open_calls:
            self._send(server, (header.answer(Kind.REMIND, step=turn).packed(),))

    def _send(self, server: int, frames: Frames) -> None:
        # it is not there: it is missed, and asked again
        with suppress(zmq.Again):
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
    """How it goes to be let in: "" where one is, otherwise "unknown" (our key), "another key"
    (theirs), or "silent".
    """
    ends = {
        zmq.EVENT_HANDSHAKE_SUCCEEDED: "",
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unknown",
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "another key",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "another key",
    }
    calling = Calling([], 0, keys, seconds)
    until = time.monotonic() + seconds
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
