"""Requests with slow answers, over connections that break, or to a process that is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_messages import (
    JOB,
    AnswerRecorder,
    count_server_samples,
    make_frames,
    make_push,
    make_server,
    make_vectors_job,
)

import paragrad as pg
from paragrad.errors import StepFailed
from paragrad.loops import queue_coordinator
from paragrad.parallel.server import client as of_calling
from paragrad.parallel.server import sockets
from paragrad.parallel.server.client import ServerClient
from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.message_header import Header, MessageType, unpack_header, view_bytes
from paragrad.parallel.server.request_handler import ALREADY_APPLIED, APPLIED
from paragrad.parallel.server.sockets import Listener
from paragrad.parallel.server.work_queue import LATE
from paragrad.record.record import Record

pytestmark = pytest.mark.processes

WAIT = 20.0  # seconds for anything
VECTOR = torch.arange(60, dtype=torch.float64)
PUSH = Header(
    MessageType.PUSH,
    JOB,
    1,
    shares=2,
    dtype=VECTOR.dtype,
    elements=60,
    numbers=(6.0, 3.0, 0.0, 6.0, 6.0),
)
PULL = Header(MessageType.PULL, JOB, 1)


class Asker:
    """Sends requests in its own thread, and keeps the answers."""

    def __init__(
        self,
        at: Address,
        *questions: tuple[int, Header, Any],
        keys: KeyPair | None = None,
        seconds: float = WAIT,
        again: float = 0.05,
    ) -> None:
        self.calling = ServerClient([at], 8 * 60, keys or KeyPair.generate_pair(), seconds, again)
        self.answers: list[MessageType] = []
        self.failed: StepFailed | None = None
        self.thread = threading.Thread(target=self.ask, args=(questions,))
        self.thread.start()

    def ask(self, questions: Any) -> None:
        try:
            self.answers += [header.kind for _, header, _ in self.calling.send_requests(questions)]
        except StepFailed as error:
            self.failed = error

    def end(self) -> list[MessageType]:
        self.thread.join(2 * WAIT)
        self.calling.close()
        return self.answers


@contextlib.contextmanager
def open_listener(at: Address | None = None, **more: Any) -> Iterator[Listener]:
    found = Listener(8 * 60, None, KeyPair.generate_pair(), at, **more)
    try:
        yield found
    finally:
        found.close()


def receive_request(here: Listener) -> tuple[bytes, Header, int]:
    """Receive a message. Return its connection, its header and its number of parts."""
    came = here.receive_message(WAIT)
    assert came is not None
    return came[0].bytes, unpack_header(came[1].bytes), len(came)


# ---- over one connection ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "question",
    [(0, PULL, ()), (0, PUSH, (b"\1\1\1", view_bytes(VECTOR)))],
    ids=["a pull", "a push"],
)
def test_request_is_sent_once_however_long_the_answer_takes(question: Any) -> None:
    """Earlier, a request was sent again after each second without an answer.

    The server answered each pull again with the whole vector. If that took longer than a second,
    the link was full of copies. After some vectors the worker failed, because no answer came within
    its limit.
    """
    with open_listener() as here:
        asker = Asker(here.address, question)
        whose, first, parts = receive_request(here)
        reminders = [receive_request(here) for _ in range(4)]
        here.send_answer(whose, first.make_answer(MessageType.DONE))
        assert asker.end() == [MessageType.DONE]
    assert (first.kind, parts) == (question[1].kind, 2 + len(question[2]))
    assert {(each.kind, each.call, parts) for _, each, parts in reminders} == {
        (MessageType.REMIND, first.call, 2)
    }


@pytest.mark.story
def test_acknowledged_request_waits_beyond_its_time_limit() -> None:
    """Earlier, under bsp(backup), only the work queue said that a request must wait.

    A server did not say so while other workers still computed.
    """
    served = make_server("server(3, sync=bsp(backup=1))")
    waits = 0
    with open_listener() as here:
        served.listener = here
        asker = Asker(here.address, (0, PUSH, (b"\1\1\1", view_bytes(VECTOR))), seconds=2.0)
        while waits < 60:  # three seconds, with 0.05 between them
            came = here.receive_message(WAIT)
            assert came is not None
            waits += unpack_header(came[1].bytes).kind == MessageType.REMIND
            served.handle_message(came)
        served.handle_message(make_push(3.0, step=1, sender=2, shares=2, whose=b"\0another"))
        assert asker.end() == [MessageType.DONE]
    assert asker.failed is None
    assert served.shard.received_bytes == 2 * VECTOR.nbytes


@pytest.mark.story
def test_each_answer_has_the_full_time_limit() -> None:
    """Earlier, all answers together had one time limit."""
    with open_listener() as here:
        asker = Asker(here.address, *[(0, PULL, ())] * 8, seconds=3.0, again=0.5)
        questions = [receive_request(here) for _ in range(8)]
        # answer each request after a silence, four seconds in all
        for whose, header, _ in questions:
            while receive_request(here)[1].call != questions[-1][1].call:
                pass
            here.send_answer(whose, header.make_answer(MessageType.DONE))
        assert asker.end() == [MessageType.DONE] * 8


# ---- answers to reminders --------------------------------------------------------------------
class Desk:
    """A server whose answers are kept."""

    def __init__(self, text: str) -> None:
        self.told = AnswerRecorder()
        self.served = make_server(text, self.told)

    def answer_message(self, message: list[Any]) -> list[tuple[bytes, MessageType, int]]:
        before = len(self.told.answers)
        self.served.handle_message(message)
        return [
            (whose, header.kind, int(header.numbers[0]) if header.kind == MessageType.DONE else -1)
            for whose, header, _ in self.told.answers[before:]
        ]

    def answer_reminder(self, call: int, whose: bytes = b"w0", sender: int = 1) -> MessageType:
        ((_, kind, _),) = self.answer_message(
            make_frames(Header(MessageType.REMIND, JOB, sender, call=call), whose=whose)
        )
        return kind


def test_pending_request_survives_and_a_lost_one_is_detected() -> None:
    desk = Desk("server(3, sync=bsp(backup=1))")
    more: dict[str, Any] = {"shares": 2, "step": 0}
    assert desk.answer_reminder(7) == MessageType.MISSED
    assert desk.answer_message(make_push(call=7, **more)) == []
    assert desk.answer_reminder(7) == MessageType.WAIT
    assert desk.answer_reminder(8) == MessageType.MISSED
    # the worker sends it again over this connection
    assert desk.answer_reminder(7, b"w0 again") == MessageType.MISSED
    for _ in range(1000):
        assert desk.answer_message(make_push(call=7, whose=b"w0 again", **more)) == []
    assert desk.answer_reminder(7, b"w0 again") == MessageType.WAIT
    assert len(desk.served.pending_pushes[0].waiting_requests) == 2  # however often it comes
    told = desk.answer_message(make_push(3.0, step=1, sender=2, shares=2, whose=b"w1"))
    assert sorted(told) == [
        (b"w0", MessageType.DONE, APPLIED),
        (b"w0 again", MessageType.DONE, APPLIED),
        (b"w1", MessageType.DONE, APPLIED),
    ]
    assert desk.answer_reminder(7, b"w0 again") == MessageType.MISSED  # it was answered


def test_duplicate_push_does_not_cause_a_resend() -> None:
    """Two workers compute the same ticket, because the first one was late.

    Earlier, each took the place of the other, and learned of it when it asked again.
    """
    desk = Desk("server(3, sync=bsp(backup=1))")
    assert desk.answer_message(make_push(100.0, step=0, call=5)) == []
    assert desk.answer_message(make_push(1.0, step=0, sender=2, whose=b"w1", call=6)) == []
    assert [desk.answer_reminder(5), desk.answer_reminder(6, b"w1", 2)] == [
        MessageType.WAIT,
        MessageType.WAIT,
    ]
    told = desk.answer_message(make_push(3.0, step=1, sender=3, whose=b"w2"))
    assert sorted(told) == [
        (b"w0", MessageType.DONE, ALREADY_APPLIED),
        (b"w1", MessageType.DONE, APPLIED),
        (b"w2", MessageType.DONE, APPLIED),
    ]
    assert torch.equal(
        desk.served.shard.values[0], torch.full((60,), 1 - (1 + 3) / 12, dtype=torch.float64)
    )
    assert desk.answer_message(make_push(3.0, step=2, sender=4, whose=b"w3")) == [
        (b"w3", MessageType.DONE, LATE)
    ]


def test_pull_request_is_not_stored() -> None:
    desk = Desk("server(2, sync=asp)")
    assert [
        kind
        for _, kind, _ in desk.answer_message(make_frames(Header(MessageType.PULL, JOB, 1, call=3)))
    ] == [MessageType.VALUES]
    # the reminder comes after the vector, so no request is open any more
    assert desk.answer_reminder(3) == MessageType.MISSED


# ---- connections that break ------------------------------------------------------------------
def test_request_lost_with_a_connection_is_sent_again() -> None:
    """A server is killed, and restarts at the same address."""
    with tempfile.TemporaryDirectory() as folder:  # a socket needs a short path
        at = Address(f"ipc://{folder}/server")
        with open_listener(at) as first:
            asker = Asker(at, (0, PUSH, (b"\1\1\1", view_bytes(VECTOR))))
            assert receive_request(first)[2] == 4
        with open_listener(at) as second:
            served = make_server("server(2, sync=asp)", second)
            while not asker.answers:
                if (came := second.receive_message(0.1)) is not None:
                    served.handle_message(came)
            assert asker.end() == [MessageType.DONE]
    assert served.shard.updates == 1
    assert served.shard.refusals == {}


def test_no_wait_for_a_server_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier, a worker that came or came back at the end of a training waited for its whole limit.

    It then said that no answer had come.
    """
    monkeypatch.setattr(of_calling, "ABANDONED_SECONDS", 0.3)
    mine = KeyPair.generate_pair()
    here = Listener(8 * 60, "127.0.0.1", KeyPair.generate_pair())
    here.allow_keys([mine.public])
    asker = Asker(here.address, (0, PULL, ()), keys=mine, seconds=300.0)
    receive_request(here)
    here.close()
    assert asker.end() == []
    assert asker.failed is not None
    assert "server 0 does not listen at tcp://127.0.0.1:" in asker.failed.message
    assert asker.failed.message.endswith(" any more: the training was stopped, or is over")


STANDS = """
    import sys
    from paragrad.parallel.server.client import ServerClient
    from paragrad.parallel.server.message_header import Header, MessageType
    from paragrad.parallel.server.curve_keys import Address, KeyPair

    calling = ServerClient([Address(sys.argv[1])], 1000, KeyPair.generate_pair(), 60.0)
    answers = calling.send_requests([(0, Header(MessageType.PULL, 77), ())])
    print([header.kind.name for _, header, _ in answers])
    calling.close()
"""


@pytest.mark.story
def test_stopped_worker_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier, ZeroMQ tested a silent connection and ended it after ten seconds, also on one host.

    A worker of bsp that was stopped for longer lost the answer that came meanwhile. It never asked
    again, and all processes stopped.
    """
    monkeypatch.setattr(sockets, "HEARTBEAT_MILLISECONDS", 20)
    with open_listener() as here:
        words = [sys.executable, "-c", textwrap.dedent(STANDS), here.address.endpoint]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as asker:
            try:
                whose, header, _ = receive_request(here)
                asker.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, asker.pid, os.WSTOPPED | os.WNOWAIT)
                # ten times as long as a connection could be silent
                assert here.receive_message(1.0) is None
                assert here.connection_count == 1
                here.send_answer(whose, header.make_answer(MessageType.DONE))
                asker.send_signal(signal.SIGCONT)
                assert asker.communicate(timeout=60)[0] == "['DONE']\n"
            finally:
                asker.kill()


@pytest.mark.parametrize(("seconds", "silent"), [(0.0, 10_000), (300.0, 300_000), (1e9, 2**31 - 1)])
def test_connection_between_hosts_may_be_idle_for_the_limit(seconds: float, silent: int) -> None:
    """A request that is lost with such a connection is not sent again."""
    here = Listener(8 * 60, "127.0.0.1", KeyPair.generate_pair(), seconds=seconds)
    calling = ServerClient([here.address], 8 * 60, KeyPair.generate_pair(), seconds)
    try:
        assert [
            each.getsockopt(sockets.zmq.HEARTBEAT_TIMEOUT)
            for each in (here.socket, *calling.sockets)
        ] == [silent] * 2
    finally:
        calling.close()
        here.close()


# ---- a training ------------------------------------------------------------------------------
@pytest.mark.story
def test_more_late_workers_than_backups_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three workers are stopped.

    Earlier, the third worker waited for them in its push, until it ended the run: no answer from
    server 0. Now the server tells it that other workers are waited for. New workers replace those
    that do not come back.
    """

    class Halved(queue_coordinator.QueueCoordinator):
        stopped = False

        def run_training(self) -> str:
            # this is not the limit of sockets, because a server needs time to start
            self.queue.limit = 1.0
            return super().run_training()

        def poll_events(self, epoch: int | None) -> None:
            super().poll_events(epoch)
            held = [
                number for number, each in self.queue.workers.items() if each.ticket is not None
            ]
            if not self.stopped and self.done_shares >= 4 and len(held) == 3:
                self.stopped = True
                for number in held[:2]:
                    self.pool.members[number].send_signal(signal.SIGSTOP)

    monkeypatch.setattr(queue_coordinator, "QueueCoordinator", Halved)
    run = pg.train(
        make_vectors_job(epochs=6), "server(3, sync=bsp(backup=1))", runs=tmp_path, timeout=10
    )
    assert run.finished
    assert set(count_server_samples(run)) == {6 * 29}
    assert (run.sample_count.epochs, run.sample_count.twice, run.sample_count.missed) == (6, 0, 0)
    events = [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"]
    assert events.count("late") >= 2
    assert "replaced" in events
