"""Parameter servers under a flood of bad messages, while a training runs in other processes.

Some messages are from unknown senders, and some from a sender that has a worker's key. The training
is encrypted, over TCP, as between hosts.

Its workers begin each step when the flood is ready for it. So the flood is present in all steps
except the first and the last, at any speed of both.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zmq
import zmq.utils.monitor
from equality_table import VECTORS, make_job
from server_messages import JOB, AnswerRecorder, make_frames, make_push, make_server
from torch import nn

import paragrad as pg
from paragrad.commands import train
from paragrad.loops.synchronous import train_rank
from paragrad.parallel.server import server_exchange, worker_exchange
from paragrad.parallel.server.client import ServerClient
from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.message_header import DTYPES, Header, MessageType, unpack_header
from paragrad.parallel.server.sockets import MESSAGE_LIMIT, TEXT_BYTES, Listener
from paragrad.record.record import Record
from paragrad.runtime.world import World
from paragrad.strategies.server import Server

pytestmark = pytest.mark.processes

WAIT = 60.0  # seconds for anything
STEPS = 12
WIDTH = 2000
BARE = [b"let me in"]
ELEMENTS = 10 * WIDTH + WIDTH + WIDTH * 4 + 4
LONGEST = 4 * ELEMENTS  # bytes of the server's one vector


def make_wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


WIDE = make_job("wide", make_wide_mlp, VECTORS).replace(
    epochs=STEPS // 3  # an epoch has three steps
)


# ---- in the ranks of the training ------------------------------------------------------------
@dataclass(frozen=True)
class Insight:
    """What a sender with all data of a worker has.

    It can reach the server, and it can make messages like those of the worker.
    """

    job: int
    sender: int
    at: Address
    keys: KeyPair


def run_rank_during_flood(world: World, *arguments: Any, place: str, **more: Any) -> Any:
    """Run a rank of the training, over TCP on any backend.

    Before each step, a worker waits until the flood goes on.
    """

    def begin(self: worker_exchange.WorkerExchange) -> None:
        nonlocal seen
        if self.step > seen:
            seen = self.step
            meeting.send((collect_insight(self), sent.copy()))
            sent.clear()
            assert meeting.poll(WAIT), "the flood does not go on"
            meeting.recv()
        begun(self)

    def collect_insight(self: worker_exchange.WorkerExchange) -> Insight:
        return Insight(self.job, self.sender, self.client.address, self.client.keys)

    def initialize_client(
        self: ServerClient,
        servers: Sequence[Address],
        longest: int,
        keys: KeyPair,
        *rest: Any,
        **more: Any,
    ) -> None:
        self.address = servers[0]  # type: ignore[attr-defined]
        self.keys = keys
        called(self, servers, longest, keys, *rest, **more)

    def send(self: ServerClient, number: int, message: Any) -> None:
        sent.append([bytes(each) for each in message])
        sends(self, number, message)

    def allow(self: Listener, keys: Any) -> None:
        """Allow the keys somewhat late, when no connection has come yet.

        An earlier connection would be refused, and would never come again.
        """
        assert self.receive_message(0.5) is None
        assert not any(self.events)
        allows(self, keys)

    def serve(self: server_exchange.ServerExchange) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # begin a new measurement of the peak
        before = read_memory_size("VmRSS")
        serves(self)
        Path(place, "grown").write_text(str(read_memory_size("VmHWM") - before))

    seen = 0
    sent = list[list[bytes]]()
    begun = worker_exchange.WorkerExchange.begin
    called = ServerClient.__init__
    sends = ServerClient._send_frames
    allows = Listener.allow_keys
    serves = server_exchange.ServerExchange.serve
    with contextlib.ExitStack() as stack:
        for owner, name, other in (
            (server_exchange, "find_own_host", lambda world: "127.0.0.1"),
            (worker_exchange.WorkerExchange, "begin", begin),
            (ServerClient, "__init__", initialize_client),
            (ServerClient, "_send_frames", send),
            (Listener, "allow_keys", allow),
            (server_exchange.ServerExchange, "serve", serve),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        if world.rank < 2:
            meeting = stack.enter_context(Client(str(Path(place, "meeting")), "AF_UNIX"))
        return train_rank(world, *arguments, **more)


def read_memory_size(what: str) -> int:
    """Return the size of this process's memory in bytes, by the kernel's name of the value."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


# ---- the flood -------------------------------------------------------------------------------
Message = list[bytes]
Drawn = tuple[str, Message]  # (name of the refusal, message)


@dataclass
class Spoiled:
    """Invalid messages under a worker's key, each with one error.

    before: messages that workers sent in earlier steps.
    """

    draw: random.Random
    told: Insight
    before: list[Message]

    def make_gradient_push(
        self, body: bytes | None = None, marks: bytes = b"\1" * 4, **more: Any
    ) -> Message:
        """Return a worker's push of a step that is long over, with the given changes."""
        header = Header(
            MessageType.PUSH,
            **{
                "job": self.told.job,
                "sender": self.told.sender,
                "share": self.draw.randrange(2),
                "shares": 2,
                "elements": ELEMENTS,
                "numbers": (6.0, 3.0, 0.0, 0.0, 6.0),
                **more,
            },
        )
        return [header.pack_header(), marks, bytes(LONGEST) if body is None else body]

    def make_cut_off(self) -> Drawn:
        header, marks, body = self.make_gradient_push()
        return self.draw.choice(
            [
                (
                    "a header of N bytes, which has N",
                    [header[: self.draw.randrange(len(header))], marks, body],
                ),
                (
                    "N bytes, where its header says N",
                    [header, marks, body[: self.draw.randrange(LONGEST)]],
                ),
                (
                    "marks that do not fit the slice",
                    [header, marks[: self.draw.randrange(4)], body],
                ),
                (
                    "a push without its marks and its vector",
                    [header, marks][: self.draw.randrange(1, 3)],
                ),
            ]
        )

    def make_noise(self) -> Drawn:
        header = self.draw.randbytes(len(self.make_gradient_push()[0]))
        return self.draw.choice(
            [
                ("a message of N parts", [self.draw.randbytes(9)] * self.draw.randrange(4, 9)),
                (
                    "no message of paragrad's, or one of another version",
                    [header, b"", self.draw.randbytes(LONGEST)],
                ),
            ]
        )

    def replay_earlier(self) -> Drawn:
        message = self.draw.choice(self.before)
        return f"{'a gradient' if len(message) == 3 else 'an update'} of an earlier step", message

    def make_other_shape(self) -> Drawn:
        fewer = self.draw.randrange(1, ELEMENTS)
        return self.draw.choice(
            [
                (
                    "a gradient of N elements for N parameters",
                    self.make_gradient_push(bytes(4 * fewer), elements=fewer),
                ),
                (
                    "it is for a vector that is not here",
                    self.make_gradient_push(slot=self.draw.randrange(1, 2**32)),
                ),
            ]
        )

    def make_other_type(self) -> Drawn:
        dtype = self.draw.choice([each for each in DTYPES if each != torch.float32])
        return (
            f"gradients of type {str(dtype).removeprefix('torch.')}, and here are parameters of "
            "float32",
            self.make_gradient_push(bytes(dtype.itemsize * ELEMENTS), dtype=dtype),
        )

    def make_not_finite(self) -> Drawn:
        bad = self.draw.choice([float("nan"), float("inf"), -float("inf")])
        vector = torch.zeros(ELEMENTS)
        vector[self.draw.randrange(ELEMENTS)] = bad
        return self.draw.choice(
            [
                (
                    "a gradient that is not finite",
                    self.make_gradient_push(vector.numpy().tobytes()),
                ),
                ("numbers that are not finite", self.make_gradient_push(numbers=(6.0, bad))),
            ]
        )

    def make_oversized(self) -> Drawn:
        """Return a push that is too long for the server, but not for the socket."""
        more = ELEMENTS + self.draw.randrange(1, TEXT_BYTES // 4 - 64)
        return (
            "a gradient of N elements for N parameters",
            self.make_gradient_push(bytes(4 * more), elements=more),
        )

    def make_later_step(self) -> Drawn:
        later = STEPS + self.draw.randrange(2**40)
        return self.draw.choice(
            [
                ("a gradient of a later step", self.make_gradient_push(step=later)),
                (
                    "an update of a later step",
                    [
                        Header(
                            MessageType.UPDATE,
                            self.told.job,
                            self.told.sender,
                            later,
                            numbers=(12.0, 1.0),
                        ).pack_header()
                    ],
                ),
            ]
        )

    def make_other_job(self) -> Drawn:
        return "it is of another training", self.make_gradient_push(
            job=self.told.job ^ self.draw.randrange(1, 2**63)
        )

    def draw_message(self) -> Drawn:
        return self.draw.choice(
            [
                self.make_cut_off,
                self.make_noise,
                self.replay_earlier,
                self.make_other_shape,
                self.make_other_type,
                self.make_not_finite,
                self.make_oversized,
                self.make_later_step,
                self.make_other_job,
            ]
        )()


@contextlib.contextmanager
def open_connection(
    at: Address, keys: KeyPair
) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Open a connection that is not made again.

    Yield it, and a socket that reports its end.
    """
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as line,
        line.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended,
    ):
        line.linger = 0
        line.reconnect_ivl = -1
        line.sndhwm = MESSAGE_LIMIT
        line.sndtimeo = int(1000 * WAIT)
        if at.key is not None:
            line.curve_serverkey = at.key
            line.curve_secretkey = keys.secret
            line.curve_publickey = keys.public
        line.connect(at.endpoint)
        yield line, ended


def send_with_key(line: zmq.Socket[bytes], told: Insight, messages: Iterable[Message]) -> None:
    """Send all messages as fast as the server accepts them; then wait until it has read all."""
    for message in messages:
        line.send_multipart(message, copy=False)
        while line.poll(0):
            line.recv_multipart()
    question = Header(MessageType.PULL, told.job, call=1).pack_header()
    line.send(question)
    while True:
        # the server drops answers to a client that does not read them, so ask again
        if not line.poll(1000):
            line.send(question)
        elif unpack_header(line.recv_multipart()[0]).kind == MessageType.VALUES:
            return


def send_and_wait_for_end(at: Address, keys: KeyPair, message: Message) -> None:
    """Send a message over its own connection, and wait until the server ends that connection."""
    with open_connection(at, keys) as (line, ended):
        with contextlib.suppress(zmq.Again):  # the server has ended it already
            line.send_multipart(message, zmq.NOBLOCK)
        assert ended.poll(1000 * WAIT), "the server let it in"


def send_over_tcp(at: Address, noise: bytes) -> None:
    """Send some bytes, and wait until the server closes the connection."""
    host, port = at.endpoint.removeprefix("tcp://").split(":")
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection((host, int(port)), WAIT) as line,
    ):
        line.sendall(noise)
        with contextlib.suppress(OSError):  # the server has closed it already
            line.shutdown(socket.SHUT_WR)
        while line.recv(4096):
            pass


def draw_noises(draw: random.Random, count: int) -> list[bytes]:
    """Return random bytes; some begin with a greeting like that of ZeroMQ."""
    greeting = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
    return [
        draw.choice([b"", greeting[:12], greeting]) + draw.randbytes(draw.randrange(2000))
        for _ in range(count)
    ]


def flood(door: socket.socket, count: int, seed: int) -> tuple[Counter[str], int]:
    """Send a part of the flood during each step.

    In all, it sends `count` messages with a worker's key, and as many random ones over TCP. A few
    messages have an unknown key or are too long. Return the refusals that the record should have,
    and the bytes that the server accepted.
    """
    draw = random.Random(seed)
    refused = Counter[str]()
    before = list[Message]()
    size = 0
    parts = [count // (STEPS - 2)] * (STEPS - 2)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Connection(door.accept()[0].detach())) for _ in range(2)]
        told, _ = (receive_report(worker, before) for worker in workers)
        line, _ = stack.enter_context(open_connection(told.at, told.keys))
        crowd = stack.enter_context(ThreadPoolExecutor(4))
        for part in parts:
            for worker in workers:
                worker.send("the flood goes on")
            drawn = [
                Spoiled(draw, told, select_replayable_messages(before)).draw_message()
                for _ in range(part)
            ]
            size += sum(len(frame) for _, message in drawn for frame in message)
            refused.update(why for why, _ in drawn)
            away = [
                (replace(told.at, key=None), told.keys, BARE),
                (told.at, KeyPair.generate_pair(), BARE),
                (told.at, told.keys, [bytes(LONGEST + TEXT_BYTES + 1)]),
            ] * max(1, part // 100)
            jobs = [
                crowd.submit(send_over_tcp, told.at, noise) for noise in draw_noises(draw, part)
            ]
            jobs += [crowd.submit(send_and_wait_for_end, *each) for each in away]
            send_with_key(line, told, (message for _, message in drawn))
            for each in jobs:
                each.result(WAIT)
            refused.update(
                {
                    "a connection that is not encrypted, or not ZeroMQ's": part + len(away) // 3,
                    "a connection without a known key": len(away) // 3,
                    "a connection that broke off, or sent too long a message": len(away) // 3,
                }
            )
            for worker in workers:
                receive_report(worker, before)
        # no flood during the last step: the server has read all of it
        for worker in workers:
            worker.send("it is over")
        for worker in workers:
            # the worker leaves before this connection ends
            assert worker.poll(WAIT)
    return refused, size


def receive_report(worker: Connection, before: list[Message]) -> Insight:
    """Return a worker's report before a step, and append what it has sent to `before`."""
    assert worker.poll(WAIT), "a worker does not go on"
    insight, sent = worker.recv()
    before += sent
    return insight  # type: ignore[no-any-return]


def select_replayable_messages(before: list[Message]) -> list[Message]:
    """Return the messages that workers may not send again.

    Each worker requests each update, so the last request may come again.
    """
    headers = [unpack_header(message[0]) for message in before]
    last = max(header.step for header in headers)
    return [
        message
        for message, header in zip(before, headers, strict=True)
        if header.kind == MessageType.PUSH
        or (header.kind == MessageType.UPDATE and header.step < last)
    ]


# ---- the tests -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=[pytest.mark.story, pytest.mark.timeout(300)])]
)
def test_flood_is_refused_by_name_and_training_is_bit_equal(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is bit-equal to one without a flood, and the server's memory grows little.

    Two connections send messages at a time. The growth is at most what the sockets keep of them,
    less than a quarter of what was sent.
    """
    # servers are ranks of the workers' world, as between hosts
    monkeypatch.setattr(Server, "can_recover", False)
    undisturbed = pg.train(WIDE, "server(2)", runs=tmp_path, check=0)
    monkeypatch.setattr(train, "train_rank", partial(run_rank_during_flood, place=str(tmp_path)))
    with ThreadPoolExecutor(1) as other, socket.socket(socket.AF_UNIX) as door:
        door.settimeout(WAIT)
        door.bind(str(tmp_path / "meeting"))
        door.listen()
        flooding = other.submit(flood, door, count, seed=count)
        try:
            run = pg.train(WIDE, "server(2)", runs=tmp_path, check=0)
        finally:
            refused, size = flooding.result(WAIT)
    (line,) = Record(run.folder).select_lines("server", 2)
    assert line["refused"] == refused
    assert Record(undisturbed.folder).select_lines("server", 2)[0]["refused"] == {}
    assert run.losses == undisturbed.losses
    for name, tensor in undisturbed.model().state_dict().items():
        assert torch.equal(run.model().state_dict()[name], tensor), name
    grown = int((tmp_path / "grown").read_text())
    most = 2 * MESSAGE_LIMIT * (LONGEST + TEXT_BYTES)
    print(
        f"{sum(refused.values()):,} refused, {size:,} bytes; the server grew by {grown:,} bytes at "
        "most"
    )
    assert grown < most
    assert size > 4 * most or count < 10_000


def test_message_names_stay_few_under_random_numbers() -> None:
    """Earlier, each length of a header gave a new name in the record and in the server's memory."""
    served = make_server("server(2)")
    draw = random.Random(1)
    whole = make_push()[1].bytes
    for _ in range(1000):
        number = draw.randrange(2**32)
        for message in (
            make_frames(draw.randbytes(draw.randrange(99))),
            make_frames(whole[:4] + bytes([max(MessageType) + 1 + number % 200]) + whole[5:]),
            make_frames(whole[:5] + bytes([20 + number % 200]) + whole[6:]),
            make_frames(whole, *[b""] * (3 + number % 99)),
            make_frames(whole, b"\1\1\1", bytes(draw.randrange(480))),
            make_push(share=2 + number // 2),
            make_frames(replace(unpack_header(whole), elements=number), b"\1\1\1", b""),
        ):
            served.handle_message(message)
    assert set(served.shard.refusals) == {
        "a header of N bytes, which has N",
        "a message of no known kind (N)",
        "numbers of no known type (N)",
        "a message of N parts",
        "N bytes, where its header says N",
        "a share that does not exist (N of N)",
        "a gradient of N elements for N parameters",
    }


def test_repeated_leave_message_counts_once() -> None:
    """Earlier, a repeated END counted as that of another worker.

    The server then ended while workers were still connected.
    """
    listening: Any = AnswerRecorder()
    listening.refusals = {}
    served = make_server("server(2)", listening)
    for sender in (1, 1, 2):
        assert len(served.left_senders) < 2
        served.handle_message(make_frames(Header(MessageType.END, JOB, sender)))
    assert served.left_senders == {1, 2}


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener(LONGEST, "127.0.0.1", KeyPair.generate_pair())
    yield found
    found.close()


def test_unknown_connections_do_not_affect_the_workers(listener: Listener) -> None:
    """Earlier, each unknown connection counted as a worker that had left.

    With as many of them as workers, a server assumed that no worker was left. While there was work,
    the server did not read connection events. So the socket stopped at 2000 unknown connections.
    """
    keys = KeyPair.generate_pair()
    draw = random.Random(2)
    listener.allow_keys([keys.public])
    with open_connection(listener.address, keys) as (line, _), ThreadPoolExecutor(4) as crowd:
        line.send(b"first")
        assert listener.receive_message(WAIT)
        strangers = [
            crowd.submit(send_over_tcp, listener.address, noise)
            for noise in draw_noises(draw, 2500)
        ]
        while not all(each.done() for each in strangers):
            assert listener.receive_message(0.01) is None
        line.send(b"second")
        found = listener.receive_message(WAIT)
        assert found is not None
        assert found[1].bytes == b"second"
        assert listener.receive_message(0) is None
        assert listener.connection_count == 1
        assert listener.refusals == {"a connection that is not encrypted, or not ZeroMQ's": 2500}


def test_busy_server_is_sent_no_more_than_socket_buffers(listener: Listener) -> None:
    """While the server reads nothing, the sender waits when all buffers are full.

    These are the buffers of both sockets and of the system (some megabytes, of 120 KB each).
    """
    keys = KeyPair.generate_pair()
    listener.allow_keys([keys.public])
    with open_connection(listener.address, keys) as (line, _):
        sent = 0
        while sent < 2000 and line.poll(1000, zmq.POLLOUT):
            line.send_multipart([b"", b"", bytes(LONGEST)], copy=False)
            sent += 1
        assert 2 * MESSAGE_LIMIT <= sent <= 2 * MESSAGE_LIMIT + 16 * 2**20 // LONGEST
        for _ in range(sent):
            assert listener.receive_message(WAIT)
