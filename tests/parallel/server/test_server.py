"""Parameter servers: valid and invalid messages, the work queue, and late or dead processes.

The equality table tests that `server(n)` trains as serial.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from equality_table import IMAGES, VECTORS, make_batch_norm_cnn, make_deep_mlp, make_job, make_mlp
from server_messages import (
    JOB,
    AnswerRecorder,
    Desk,
    count_server_samples,
    make_frames,
    make_push,
    make_server,
    make_vectors_job,
    send_and_read_refusal,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset
from unusual_optimizers import DistanceSgd, Harmonic

import paragrad as pg
from paragrad.engine.exchange import Replica
from paragrad.engine.optimizer.update_slices import ParameterRange
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule
from paragrad.loops import queue_coordinator
from paragrad.loops.join_coordinator import write_step_line
from paragrad.parallel.server import client
from paragrad.parallel.server import shared_buffer as shelf_of
from paragrad.parallel.server.client import ServerClient
from paragrad.parallel.server.compressed_push import build_push_codec
from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.message_header import (
    Header,
    InvalidMessage,
    MessageType,
    unpack_header,
    view_bytes,
    view_vector,
)
from paragrad.parallel.server.parameter_partition import VectorSlot
from paragrad.parallel.server.request_handler import ALREADY_APPLIED, APPLIED, RequestHandler
from paragrad.parallel.server.shard import ServerShard
from paragrad.parallel.server.shared_buffer import SharedBuffer
from paragrad.parallel.server.sockets import PIECE_BYTES, Listener, join_vector_frames
from paragrad.parallel.server.work_queue import LATE, TEST, TRAIN, Ticket
from paragrad.record.record import Record, read_lines
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

HANDED = 6.0, 2.0, 0.0, 6.0  # of a share that the queue gave to one of two workers


def make_step(served: RequestHandler) -> None:
    """Make a synchronous step of two shares."""
    told: Any = AnswerRecorder()
    served.listener = told
    number = served.shard.updates
    served.handle_message(make_push(1.0, step=number, share=0))
    served.handle_message(make_push(3.0, step=number, share=1, sender=2, whose=b"w1"))
    assert [header.numbers[0] for _, header, _ in told.answers] == [12.0, 12.0]
    served.handle_message(
        make_frames(Header(MessageType.UPDATE, JOB, 1, number, shares=2, numbers=(12.0, 1.0)))
    )
    served.handle_message(
        make_frames(
            Header(MessageType.UPDATE, JOB, 2, number, shares=2, numbers=(12.0, 1.0)), whose=b"w1"
        )
    )
    assert [header.kind for _, header, _ in told.answers[2:]] == [MessageType.VALUES] * 2


WHOLE = make_push()[1].bytes
BAD: dict[str, Callable[[], list[Any]]] = {
    "a header of 7 bytes": lambda: make_frames(b"nothing"),
    "a header of": lambda: make_frames(WHOLE[:-1]),
    "of another version": lambda: make_frames(b"pgr9" + WHOLE[4:]),
    "no known kind (99)": lambda: make_frames(WHOLE[:4] + bytes([99]) + WHOLE[5:]),
    "no known type (50)": lambda: make_frames(WHOLE[:5] + bytes([50]) + WHOLE[6:]),
    "of another training": lambda: make_frames(replace(_make_header(), job=JOB + 1), b"", b""),
    "a message of 0 parts": lambda: make_frames(_make_header())[:1],
    "DONE is no question": lambda: make_frames(replace(_make_header(), kind=MessageType.DONE)),
    "without its marks and its vector": lambda: make_frames(_make_header()),
    "gradients of type float32, and here are parameters of float64": lambda: make_push(
        dtype=torch.float32
    ),
    "a gradient of 61 elements for 60 parameters": lambda: make_push(elements=61),
    "472 bytes, where its header says 480": lambda: make_frames(
        _make_header(), b"\1\1\1", bytes(472)
    ),
    "marks that do not fit the slice": lambda: make_push(marks=b"\1"),
    "a gradient that is not finite": lambda: make_push(float("nan")),
    "numbers that are not finite": lambda: make_push(numbers=(float("inf"), 0.0, 0.0, 0.0)),
    "for a vector that is not here": lambda: make_push(slot=1),
    "a gradient of a later step": lambda: make_push(step=1_000_000),
    "a gradient of an earlier step": lambda: make_push(step=-1),
    "a share that does not exist (2 of 2)": lambda: make_push(share=2, step=1),
    "an update of a later step": lambda: make_frames(
        Header(MessageType.UPDATE, JOB, 1, 5, shares=2, numbers=(12.0, 1.0))
    ),
}


def _make_header() -> Header:
    return Header(
        MessageType.PUSH,
        JOB,
        1,
        step=1,
        shares=2,
        dtype=torch.float64,
        elements=60,
        numbers=(6.0, 3.0, 0.0, 6.0),
    )


@pytest.mark.parametrize("why", BAD)
def test_invalid_message_is_refused_and_changes_nothing(why: str) -> None:
    served = make_server("server(2)")
    undisturbed = make_server("server(2)")
    make_step(served)
    make_step(undisturbed)
    assert why in send_and_read_refusal(served, BAD[why]())
    make_step(served)
    make_step(undisturbed)
    assert torch.equal(served.shard.values[0], undisturbed.shard.values[0])
    assert sum(served.shard.refusals.values()) == 1


def test_mean_of_all_shares_is_one_update() -> None:
    served = make_server("server(2)")
    make_step(served)
    assert torch.equal(
        served.shard.values[0], torch.full((60,), 1 - (1 + 3) / 12, dtype=torch.float64)
    )


def test_duplicates_and_incomplete_steps_update_nothing() -> None:
    served = make_server("server(2)")
    assert send_and_read_refusal(served, make_push()) == ""
    assert send_and_read_refusal(served, make_push(9.0)) == "a gradient that came before"
    assert send_and_read_refusal(served, make_push(9.0, sender=5)) == "a gradient that came before"
    assert "an update of a later step" in send_and_read_refusal(
        served, make_frames(Header(MessageType.UPDATE, JOB, 1, 0, shares=2, numbers=(12.0, 1.0)))
    )
    assert send_and_read_refusal(served, make_push(3.0, share=1)) == ""
    assert "cannot be" in send_and_read_refusal(
        served, make_frames(Header(MessageType.UPDATE, JOB, 1, 0, shares=2, numbers=(0.0, 1.0)))
    )
    assert float(served.shard.values[0].sum()) == 60.0


def test_finite_values_with_an_infinite_sum() -> None:
    served = make_server("server(2)")
    assert send_and_read_refusal(served, make_push(1e308)) == ""
    vector = torch.tensor([float("inf"), -float("inf")] * 30, dtype=torch.float64)
    message = make_push(share=1)
    message[-1] = make_frames(bytes(view_bytes(vector)))[1]
    assert send_and_read_refusal(served, message) == "a gradient that is not finite"


def test_vector_at_an_unaligned_address() -> None:
    """ZeroMQ may store a short message at any address.

    Earlier, torch's sums of complex numbers at such an address ended the server by SIGSEGV.
    """
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    header = Header(MessageType.PUSH, JOB, dtype=values.dtype, elements=2)
    for start in range(16):
        frame = memoryview(bytearray(start) + bytearray(view_bytes(values)))[start:]
        found = view_vector(header, frame)
        assert found.data_ptr() % 16 == 0
        assert torch.equal(found + found, 2 * values)


def push_shared_vector(served: RequestHandler, place: bytes, **more: Any) -> str:
    """Return why a push is refused whose vector is at this place in shared memory, or ""."""
    message = make_push(is_shared=True, **more)
    message[-1] = make_frames(place)[1]
    return send_and_read_refusal(served, message)


def test_shared_vector_is_read_in_place() -> None:
    served = make_server("server(2)")
    shelf = SharedBuffer([(torch.float32, 3), (torch.float64, 60)])
    shelf.vectors[1].fill_(2.0)
    place = shelf.make_frame(1, is_shared=True)
    assert push_shared_vector(served, place) == ""
    assert served.pending_pushes[0].vectors[0][1].data_ptr() != shelf.vectors[1].data_ptr()
    assert push_shared_vector(served, place, share=1, sender=2) == ""
    assert torch.equal(served.shard.gradients[0], torch.full((60,), 4.0, dtype=torch.float64))
    shelf.vectors[1][7] = float("nan")
    assert push_shared_vector(make_server("server(2)"), place) == "a gradient that is not finite"
    shelf.close()
    assert push_shared_vector(make_server("server(2)"), place).startswith(
        "it lies where it cannot be read: "
    )


def test_invalid_shared_memory_references_are_refused() -> None:
    """Whatever the sender writes, the server reads no other file and nothing beyond the end.

    Earlier, a size of -1 ended the server.
    """
    shelf = SharedBuffer([(torch.float64, 60)])
    begin, address = shelf.get_location(0).decode().split(" ", 1)
    host, pid, number, size, token = address.split()
    unreadable = [
        b"",
        b"\xff\xfe",
        b"0",
        f"x {address}".encode(),
        f"{begin} none: sorry".encode(),
        *(
            " ".join([begin, *words]).encode()
            for words in (
                [host, pid, number, size],
                ["elsewhere", pid, number, size, token],
                [host, "1/../1", number, size, token],
                [host, pid, "99999", size, token],
                *(
                    [host, pid, number, each, token]
                    for each in (str(10 * int(size)), "0", "-1", str(10**30))
                ),
                [host, pid, number, size, "00" * 16],
            )
        ),
    ]
    for place in unreadable:
        assert push_shared_vector(make_server("server(2)"), place).startswith(
            "it lies where it cannot be read: "
        ), place
    for start in (0, int(size), int(size) - 472, -490, 10**30):
        assert (
            push_shared_vector(make_server("server(2)"), f"{start} {address}".encode())
            == "it lies beyond the end of what can be read"
        )
    served = make_server("server(2)")
    told = AnswerRecorder()
    told.address = Address("tcp://10.0.0.1:4000", b"key")
    served.listener = told  # type: ignore[assignment]
    assert (
        push_shared_vector(served, shelf.get_location(0)) == "it lies in the memory of another host"
    )
    shelf.close()


def test_vectors_are_sent_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, what, other, why in (
        (shelf_of, "find_missing_features", lambda: "here is no /proc", "here is no /proc"),
        (
            os,
            "posix_fallocate",
            mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left")),
            "no 0 MiB of shared memory on this host (no space left); start fewer workers",
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, what, other)
            shelf = SharedBuffer([(torch.float64, 60), (torch.float32, 0)])
        assert (shelf.is_shared, shelf.obstacle) == (False, why)
        assert bytes(shelf.make_frame(0, shelf.is_shared)) == bytes(view_bytes(shelf.vectors[0]))
        shelf.close()
    assert SharedBuffer([(torch.float32, 0)]).vectors[0].numel() == 0  # nothing to map


LIE = "lie in shared memory"
HERE = "servers and workers are on one host"


@pytest.mark.parametrize(
    ("text", "gradients", "parameters"),
    [
        ("server(2, servers=2)", (LIE, HERE), (LIE, HERE)),
        ("server(2, sync=asp)", (LIE, HERE), ("travel", "an update may come while they are read")),
        (
            "server(2, sync=bsp(backup=1))",
            *[("travel", "a late worker may write the next ones while they are read")] * 2,
        ),
    ],
)
def test_vectors_of_one_host_use_shared_memory(
    text: str, gradients: tuple[str, str], parameters: tuple[str, str], tmp_path: Path
) -> None:
    lines = Record(pg.train(make_vectors_job(epochs=1), text, runs=tmp_path).folder).select_lines(
        "choice"
    )
    for what, told in (("gradients", gradients), ("parameters", parameters)):
        found = [(line["picked"], line["because"]) for line in lines if line["what"] == what]
        assert set(found) == {told}


def make_mlp_without_memory_access() -> nn.Module:
    """Return a model. Outside of the launcher, block access to the memory of other processes."""
    if os.environ["PARAGRAD_TEST_LAUNCHER"] != str(os.getpid()):
        shelf_of.open_region = mock.Mock(side_effect=RuntimeError("not permitted"))
    return make_mlp()


def test_unreadable_shared_vector_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems let no process open the memory of another one, although they share a folder.

    Earlier, a push was then refused, which ended the training.
    """
    monkeypatch.setenv("PARAGRAD_TEST_LAUNCHER", str(os.getpid()))
    made = make_job("unopened", make_mlp_without_memory_access, VECTORS).replace(epochs=1)
    run = pg.train(made, "server(2)", runs=tmp_path)
    assert run.losses == pytest.approx(pg.train(made, "serial", runs=tmp_path).losses, rel=1e-5)
    told = {
        (line["what"], line["picked"], line["because"])
        for line in Record(run.folder).select_lines("choice")
    }
    assert ("gradients", "travel", "server 0 cannot read them") in told
    assert ("parameters", "travel", "it lies where it cannot be read: not permitted") in told


def test_parameter_replies_rotate_over_the_workers() -> None:
    """Earlier, every server answered the first worker first.

    The link of that worker was full, while the links of the others were idle.
    """
    served = make_server("server(3)")
    told = AnswerRecorder()
    served.listener = told  # type: ignore[assignment]
    for share in range(3):
        served.handle_message(make_push(step=0, share=share, shares=3, sender=share))
    told.answers.clear()

    def request_update(sender: int, turn: int = 0, lies: bool = False) -> list[bytes]:
        before = len(told.answers)
        header = Header(
            MessageType.UPDATE,
            JOB,
            sender,
            share=turn,
            shares=3,
            is_shared=lies,
            numbers=(18.0, 1.0),
        )
        served.handle_message(make_frames(header, whose=b"w%d" % sender))
        return [
            whose for whose, header, _ in told.answers[before:] if header.kind == MessageType.VALUES
        ]

    assert [request_update(0, 2), request_update(2, 1)] == [[], []]
    # a worker that is not expected, or not any more, gets an answer at once
    assert [request_update(9), request_update(0)] == [[b"w9"], [b"w0"]]
    assert request_update(1, 0) == [b"w1", b"w2", b"w0"]
    assert request_update(1, 0) == [b"w1"]


def test_servers_keep_the_staleness_bound_under_torchrun() -> None:
    """Earlier, no process kept the bound under torchrun, so ssp was the same as asp."""
    served = make_server("server(3, sync=ssp(1))")
    told = AnswerRecorder()
    served.listener = told  # type: ignore[assignment]

    def pull_parameters(sender: int, step: int) -> list[tuple[int, int]]:
        """Return (sender, step) of each worker that gets parameters now."""
        before = len(told.answers)
        served.handle_message(
            make_frames(
                Header(MessageType.PULL, JOB, sender, step=step, shares=3), whose=b"w%d" % sender
            )
        )
        return [
            (int(whose[1:]), header.step)
            for whose, header, _ in told.answers[before:]
            if header.kind == MessageType.VALUES
        ]

    # no other worker has come yet
    assert [pull_parameters(0, 4), pull_parameters(0, 5), pull_parameters(0, 6)] == [
        [(0, 4)],
        [(0, 5)],
        [],
    ]
    assert [pull_parameters(1, 4), pull_parameters(2, 4)] == [[(1, 4)], [(2, 4)]]
    assert pull_parameters(1, 5) == [(1, 5)]
    assert pull_parameters(1, 6) == []
    assert sorted(pull_parameters(2, 5)) == [(0, 6), (1, 6), (2, 5)]
    served.handle_message(make_frames(Header(MessageType.EXCLUDE, JOB, 2, shares=3), whose=b"w2"))
    # worker 2 waits for the others before a save
    assert [pull_parameters(0, 7), pull_parameters(1, 7)] == [[(0, 7)], [(1, 7)]]
    assert pull_parameters(0, 9) == []
    told.answers.clear()
    served.handle_message(
        make_frames(
            Header(MessageType.PULL, JOB, 0, step=10, shares=3, numbers=(0.0, 1.0)), whose=b"w0"
        )
    )
    # the current parameters, for no step
    assert [header.step for _, header, _ in told.answers] == [10]
    free = make_server("server(3, sync=asp)")
    free.listener = told  # type: ignore[assignment]
    free.handle_message(make_frames(Header(MessageType.PULL, JOB, 0, step=9, shares=3)))
    assert told.answers[-1][1].kind == MessageType.VALUES


def test_asynchronous_updates_are_applied_at_once() -> None:
    served = make_server("server(2, sync=asp)")
    # a worker that pushes a ticket again is told that it is done
    for ticket in (3, 0, 3):
        assert send_and_read_refusal(served, make_push(1.0, step=ticket, numbers=HANDED)) == ""
    assert float(served.shard.values[0][0]) == -1.0
    assert served.shard.refusals == {"samples that were applied before": 1}
    assert served.shard.samples == 12


def test_learning_rate_is_divided_by_the_staleness() -> None:
    served = make_server("server(2, sync=asp, rate=by_staleness)")
    for ticket, version in ((0, 0), (1, 0), (2, 0)):  # late by 0, 1, 2 updates
        send_and_read_refusal(served, make_push(1.0, step=ticket, version=version))
    assert float(served.shard.values[0][0]) == 1 - 1 - 1 - 0.5
    assert served.shard.staleness == {0: 1, 1: 1, 2: 1}


def test_additional_workers_do_not_enlarge_the_updates() -> None:
    """Staleness acts like more momentum, so more workers do not make updates larger.

    Earlier, runs that other workers joined ended at 86 %, and undisturbed runs at 97 %.
    """
    served = make_server("server(2, sync=asp)")
    # the number of workers is not given, one of two, all two, and two more than these
    for ticket, workers in enumerate((0, 1, 2, 4)):
        send_and_read_refusal(
            served, make_push(1.0, step=ticket, version=ticket, numbers=(6.0, workers, 0.0, 6.0))
        )
    assert float(served.shard.values[0][0]) == 1 - 1 - 1 - 1 - 0.5
    stale = make_server("server(2, sync=asp, rate=by_staleness)")
    # the division by staleness already covers this
    send_and_read_refusal(stale, make_push(1.0, step=0, numbers=(6.0, 4.0, 0.0, 6.0)))
    assert float(stale.shard.values[0][0]) == 0.0


def test_backup_workers_are_not_waited_for() -> None:
    """The first two of three workers make a step.

    The third is told that it was late, and its gradient is not used.
    """
    told = AnswerRecorder()
    served = make_server("server(3, sync=bsp(backup=1))", told)
    for ticket, value in ((0, 1.0), (2, 3.0), (1, 100.0)):
        served.handle_message(make_push(value, step=ticket, sender=ticket, shares=2))
    assert [int(header.numbers[0]) for _, header, _ in told.answers] == [0, 0, LATE]
    assert torch.equal(
        served.shard.values[0], torch.full((60,), 1 - (1 + 3) / 12, dtype=torch.float64)
    )


# ---- sockets ---------------------------------------------------------------------------------
def test_only_known_keys_connect_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    # a client that is not let in has a message left, and would wait for it
    monkeypatch.setattr(client, "LINGER_MILLISECONDS", 0)
    mine = KeyPair.generate_pair()
    others = KeyPair.generate_pair()
    listening = Listener(1000, "127.0.0.1", KeyPair.generate_pair())
    try:
        listening.allow_keys([mine.public])
        port = int(listening.address.endpoint.rsplit(":", 1)[1])
        for noise in (os.urandom(64), b"GET / HTTP/1.0\r\n\r\n", b"", os.urandom(10_000)):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(noise)
        assert _request_and_read_answer(listening, others) == "nothing came"
        assert _request_and_read_answer(listening, mine) == "DONE"
        assert listening.address.key is not None
        bare = replace(listening.address, key=None)
        assert _request_and_read_answer(listening, mine, bare) == "nothing came"
    finally:
        listening.close()


@pytest.mark.parametrize("length", [8, PIECE_BYTES, PIECE_BYTES + 8, 3 * PIECE_BYTES])
@pytest.mark.parametrize("host", ["127.0.0.1", None], ids=["encrypted", "on one host"])
def test_vector_is_received_as_sent(host: str | None, length: int) -> None:
    """With encryption, a long vector is sent in pieces.

    Earlier, it was sent whole. It was decrypted when its last byte had come, and the link was idle
    meanwhile.
    """
    vector = torch.randint(256, (length,), dtype=torch.uint8)
    mine = KeyPair.generate_pair()
    header = Header(MessageType.PUSH, JOB, dtype=torch.uint8, elements=length)
    listening = Listener(length, host, KeyPair.generate_pair())
    calling = ServerClient([listening.address], length, mine, 30.0)
    pieces = -(-length // PIECE_BYTES) if host else 1
    try:
        listening.allow_keys([mine.public])
        calling._send_frames(0, (header.pack_header(), b"\1", view_bytes(vector)))
        came = listening.receive_message(30.0)
        assert came is not None
        whose, first, marked, there = came
        assert torch.equal(view_vector(unpack_header(first.bytes), there.buffer), vector)
        listening.send_answer(whose.bytes, header, marked.bytes, view_bytes(vector))
        assert calling.sockets[0].poll(30_000)
        frames = calling.sockets[0].recv_multipart(copy=False)
        assert len(frames) == 2 + pieces
        first, marked, there = join_vector_frames(frames)
        assert torch.equal(view_vector(unpack_header(first.bytes), there.buffer), vector)
    finally:
        calling.close()
        listening.close()


def _request_and_read_answer(listening: Listener, keys: KeyPair, at: Any = None) -> str:
    """Return the kind of the answer to a request with these keys."""
    calling = ServerClient([at or listening.address], 1000, keys, 30.0)
    try:
        calling.sockets[0].send_multipart([Header(MessageType.END, JOB).pack_header()])
        got = listening.receive_message(1.0)
        if got is None:
            return "nothing came"
        make_server("server(2)", listening).handle_message(got)
        first, *_ = calling.sockets[0].recv_multipart()
        return MessageType(first[4]).name
    finally:
        calling.close()


def test_unanswered_request_is_reported() -> None:
    listening = Listener(1000, None, KeyPair.generate_pair())
    calling = ServerClient([listening.address], 1000, KeyPair.generate_pair(), 0.2)
    try:
        with pytest.raises(StepFailed, match="no answer from server"):
            list(calling.send_requests([(0, Header(MessageType.PULL, JOB), ())]))
    finally:
        calling.close()
        listening.close()


def test_stopped_worker_restarts_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is stopped for longer than its limit.

    Earlier, it then looked at the clock before it looked for an answer, and reported that no answer
    had come.
    """
    listening = Listener(1000, None, KeyPair.generate_pair())
    calling = ServerClient([listening.address], 1000, KeyPair.generate_pair(), 30.0, 0.1)
    later = itertools.count()
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (100.0 if next(later) > 2 else 0.0))
    send = calling._send_frames

    def send_after_clock_jump(server: int, frames: Any) -> None:
        if next(later) > 5:  # it asks again, and is answered
            send(server, frames)
            whose, header, *_ = listening.receive_message(20.0) or []
            listening.send_answer(
                whose.bytes, replace(unpack_header(header.bytes), kind=MessageType.DONE)
            )

    monkeypatch.setattr(calling, "_send_frames", send_after_clock_jump)
    try:
        assert [
            header.kind
            for _, header, _ in calling.send_requests([(0, Header(MessageType.PULL, JOB), ())])
        ] == [MessageType.DONE]
    finally:
        calling.close()
        listening.close()


# ---- the queue -------------------------------------------------------------------------------


def test_no_worker_exceeds_the_staleness_bound() -> None:
    desk = Desk(bound=2)
    desk.add_tickets(20)
    assert desk.request_ticket(0) is not None
    assert desk.request_ticket(1) is not None  # and is slow
    assert [desk.request_ticket(0) is not None for _ in range(4)] == [True, True, False, False]
    desk.request_ticket(1)
    assert 0 in desk.given


def test_ticket_has_the_number_of_workers() -> None:
    """A ticket stays equal to itself, whatever its number of workers is."""
    desk = Desk()
    desk.add_tickets(3)
    assert [ticket and ticket.workers for ticket in map(desk.request_ticket, (0, 1, 2))] == [
        1,
        2,
        3,
    ]
    desk.office.drop_worker(1)
    again = desk.request_ticket(0)
    assert again == Ticket(TRAIN, 1)
    assert again.workers == 2
    desk.request_ticket(0)
    assert sorted(ticket.number for ticket in desk.heard) == [0, 1]


def test_number_of_workers_reaches_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_many_workers(ticket: Ticket, **changes: Any) -> Ticket:
        return replace(ticket, **{**changes, "workers": 10**6})

    monkeypatch.setattr("paragrad.parallel.server.work_queue.replace", claim_many_workers)
    one, more = (
        pg.train(make_vectors_job(epochs=epochs), "server(2, servers=2, sync=asp)", runs=tmp_path)
        .model()
        .state_dict()
        for epochs in (1, 3)
    )
    assert 0 < max(float((value - one[name]).abs().max()) for name, value in more.items()) < 1e-5


def test_samples_of_a_lost_worker_are_reassigned_once() -> None:
    desk = Desk()
    desk.add_tickets(3)
    lost = desk.request_ticket(0)
    desk.office.drop_worker(0)
    assert desk.request_ticket(1) == lost
    # worker 0 comes back, and has done its ticket after all
    assert desk.request_ticket(0) != lost
    # earlier, the line of the other worker was not looked for, and a second one was written
    assert desk.office.earlier_workers == {0: [0, 1]}
    while desk.request_ticket(1):
        pass
    desk.request_ticket(0)
    assert sorted(ticket.number for ticket in desk.heard) == [0, 1, 2]
    assert desk.office.is_idle


def test_silent_worker_is_late() -> None:
    desk = Desk(limit=-1.0)
    desk.add_tickets(1)
    desk.request_ticket(0)
    assert desk.office.drop_late_workers() == [0]
    assert desk.request_ticket(1) is not None


def test_step_with_backups_adapts_to_the_workers_left() -> None:
    desk = Desk(wanted=2)
    desk.office.updates_made = 0
    desk.add_tickets(3)
    first = [desk.request_ticket(number) for number in range(3)]
    assert [ticket and ticket.wanted for ticket in first] == [2, 2, 2]
    # no new ticket until both workers of the finished step have reported
    assert desk.request_ticket(2, became=LATE, version=1) is None
    assert desk.request_ticket(0, version=1) is None
    desk.request_ticket(1, version=1)
    (again,) = desk.given.values()
    assert again.number == 2
    assert (again.wanted, again.after) == (1, 1)


def test_repeated_request_gets_the_same_ticket() -> None:
    """Earlier, a request that crossed its answer took a second ticket.

    No worker computed that ticket, so the run never ended.
    """
    desk = Desk()
    desk.add_tickets(2)
    text = json.dumps([0, None, {}]).encode()
    for _ in range(2):
        desk.office.handle_message(
            desk, make_frames(Header(MessageType.NEXT, JOB, call=9), text, whose=b"0")
        )
        desk.office.hand_out_tickets(desk)  # type: ignore[arg-type]
        assert desk.given[0].number == 0
    assert len(desk.office.open_tickets) == 1


def test_restarted_server_with_fewer_updates_is_accepted() -> None:
    """A server restarts at 200 updates. A report of 250, from before, comes after that."""
    desk = Desk(wanted=2)
    desk.office.updates_made = 249
    desk.add_tickets(3)
    desk.request_ticket(0)
    desk.office.reset_updates()
    desk.request_ticket(0, version=250)
    assert desk.office.updates_made == 250
    desk.request_ticket(0, became=LATE, version=200)
    assert desk.office.updates_made == 200
    assert desk.given[0].after == 200


def test_invalid_request_is_refused() -> None:
    desk = Desk()
    told = AnswerRecorder()
    for message in (
        make_frames(b"x"),
        make_frames(Header(MessageType.NEXT, 5), b"[]"),
        make_frames(Header(MessageType.PUSH, JOB), b""),
        make_frames(Header(MessageType.NEXT, JOB), b'[1, {"no": 3}, {}]'),
        make_frames(Header(MessageType.NEXT, JOB), b"\xff"),
        make_frames(Header(MessageType.NEXT, JOB), b"[1, null, [1]]"),
        make_frames(Header(MessageType.NEXT, JOB), b"[" * 100_000),
    ):
        desk.office.handle_message(told, message)  # type: ignore[arg-type]
    assert [header.kind for _, header, _ in told.answers] == [MessageType.REFUSED] * 7
    assert sum(desk.office.refusals.values()) == 7


# ---- trainings -------------------------------------------------------------------------------


def make_halving_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize(
    "made",
    [
        make_job(
            "deep",
            make_deep_mlp,
            Subset(VECTORS, range(24)),
            test=VECTORS,
            clip_norm=0.5,
            scheduler=make_halving_lr,
            scheduler_every="step",
        ),
        pytest.param(
            make_job("normed", make_batch_norm_cnn, Subset(IMAGES, range(24)), test=IMAGES),
            marks=pytest.mark.table,
        ),
    ],
    ids=lambda made: made.name,
)
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.table)])
def test_single_asynchronous_worker_equals_serial(
    made: pg.Job, servers: int, tmp_path: Path
) -> None:
    """With one worker, nothing is stale, so all equals serial.

    This includes dropout, clipping, a scheduler, and batch norm with its buffers. The data has no
    short batch, because a short batch counts less, in proportion to its length.
    """
    made = made.replace(dtype=torch.float64)
    run, serial = (
        pg.train(made, text, runs=tmp_path)
        for text in (f"server(1, servers={servers}, sync=asp)", "serial")
    )
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)
    assert run.test == pytest.approx(serial.test)
    rates = [
        [line["lr"] for line in Record(each.folder).select_lines("step")] for each in (run, serial)
    ]
    assert rates[0] == rates[1]
    for name, tensor in serial.model().state_dict().items():
        assert torch.allclose(run.model().state_dict()[name], tensor, rtol=1e-9, atol=1e-12), name


def make_large_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 500), nn.Tanh(), nn.Linear(500, 4))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "text",
    [
        "server(2, compress={})",
        "server(3, servers=2, compress={})",
        "server(2, servers=2, sync=asp, compress={})",
        "server(2, sync=ssp(1), compress={})",
    ],
)
@pytest.mark.parametrize(
    ("compressor", "bound", "less"), [("int8", 2 / 127, 7.5), ("bf16", 1 / 200, 3.9)]
)
def test_pushes_may_be_compressed(
    text: str, compressor: str, bound: float, less: float, tmp_path: Path
) -> None:
    """The first gradient differs by what the compressor rounds.

    With int8, this is less than one unit of the largest entry of each share.
    """
    made = make_job("large", make_large_mlp, VECTORS).replace(
        dtype=torch.float64, epochs=1, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    run, serial = (
        pg.train(made, each, runs=tmp_path) for each in (text.format(compressor), "serial")
    )
    assert "sync" in text or run.losses[0] == pytest.approx(serial.losses[0], rel=1e-12)
    servers = [
        line
        for rank in range(len(Record(run.folder).ranks))
        for line in Record(run.folder).select_lines("server", rank)
    ]
    plain = [
        line
        for other in [pg.train(made, text.format("none"), runs=tmp_path)]
        for rank in range(len(other.ranks))
        for line in other.select_lines("server", rank)
    ]
    assert sum(line["received"] for line in servers) * less < sum(
        line["received"] for line in plain
    )
    assert all(not line["refused"] for line in servers)
    one, exact = (
        pg.train(made, text.format(each), runs=tmp_path, limit=1).model().state_dict()
        for each in (compressor, "none")
    )
    begun = made.build_model().state_dict()
    assert not all(torch.equal(one[name], exact[name]) for name in exact)
    if "sync" not in text:
        moved = max(float((exact[name] - begun[name]).abs().max()) for name in exact)
        assert all(
            float((one[name] - exact[name]).abs().max()) <= 3 * bound * moved for name in exact
        )


def test_malformed_compressed_push_is_refused() -> None:
    chosen: Any = pg.strategy("server(2, compress=bf16)")
    slot = VectorSlot(torch.float64, (ParameterRange(0, 0, 60),))
    parcel = build_push_codec(chosen, slot)
    assert parcel is not None
    vector = torch.arange(60.0, dtype=torch.float64)
    other: Any = pg.strategy("server(2, compress=int8)")
    drawn = build_push_codec(other, VectorSlot(torch.float32, (ParameterRange(0, 0, 3000),)))
    many = torch.randn(3000)
    assert drawn is not None
    assert (
        drawn.encode_vector(many, 1, 2)
        == drawn.encode_vector(many, 1, 2)
        != drawn.encode_vector(many, 1, 3)
    )
    assert torch.equal(parcel.decode_vector(parcel.encode_vector(vector)), vector)
    with pytest.raises(
        InvalidMessage, match="119 bytes, where this vector has 120 when compressed"
    ):
        parcel.decode_vector(memoryview(bytes(119)))
    served = make_server("server(2, compress=bf16)")
    assert "where they are compressed" in send_and_read_refusal(served, make_push(is_shared=True))
    assert "480 bytes" in send_and_read_refusal(served, make_push())
    assert "not finite" in send_and_read_refusal(
        served,
        make_frames(
            replace(_make_header(), numbers=(6.0, 3.0, 0.0, 6.0, 6.0), step=0),
            b"\1\1\1",
            bytes(torch.full((60,), math.inf).bfloat16().view(torch.uint8).numpy()),
        ),
    )


@pytest.mark.parametrize(
    "text",
    ["server(3, servers=2, sync=asp)", "server(2, sync=ssp(1))", "server(3, sync=bsp(backup=1))"],
)
def test_every_sample_is_applied_once_on_every_server(text: str, tmp_path: Path) -> None:
    run = pg.train(make_vectors_job(), text, runs=tmp_path, save=1)
    assert set(count_server_samples(run)) == {3 * 29}
    assert (run.sample_count.epochs, run.sample_count.twice, run.sample_count.missed) == (3, 0, 0)
    assert not run.header["exact"]
    for other in ("serial", "data(2)", "server(2, sync=asp)", "server(2)"):
        assert (
            len(
                pg.train(make_vectors_job(epochs=4), other, runs=tmp_path, resume=run.folder).losses
            )
            == 3
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", ["server(2)", "server(2, servers=2, sync=asp)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_types_and_batch_norm(text: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In bfloat16 the first step is rehearsed. Earlier, its sum was then refused as a duplicate.

    With batch norm, a server has two vectors. Earlier, only the first was reported as applied.
    """
    made = make_job("normed", make_batch_norm_cnn, IMAGES, test=IMAGES).replace(dtype=dtype)
    run, serial = (pg.train(made, each, runs=tmp_path) for each in (text, "serial"))
    assert set(count_server_samples(run)) == {2 * 30}
    if text == "server(2)":
        assert run.losses == pytest.approx(serial.losses, rel=0.05)
    counted = [each.model().state_dict()["1.num_batches_tracked"] for each in (run, serial)]
    assert int(counted[0]) == int(counted[1]) * (1 if text == "server(2)" else 2)


class Seeing(nn.Module):
    """A model whose forwards count calls and mark the samples that they saw.

    A weight that is not trained also changes in each forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.follows = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.stays = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("small", torch.zeros(1, dtype=torch.int8))
        self.register_buffer("seen", torch.zeros(997, dtype=torch.bool))
        self.register_buffer("unseen", torch.ones(997, dtype=torch.bool))
        # with another order of strides
        self.register_buffer("table", torch.ones(4, 10).t())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                which = (x.abs().sum(1) * 1e4).long() % 997
                self.seen[which], self.unseen[which] = True, False
                self.calls += 1
                self.small += 1
                self.follows += 1.0
        return self.layer(x) * self.stays + x @ self.table  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "text", ["server(2, servers=2, sync=asp)", "server(2, sync=bsp(backup=1))"]
)
def test_forward_changes_of_all_workers_are_merged(text: str, tmp_path: Path) -> None:
    """Earlier, each worker had its own 32-bit counts, flags and untrained weights.

    A worker that came later began with the initial values. A checkpoint had the values of any one
    worker.
    """
    made = make_job("seeing", Seeing, VECTORS).replace(dtype=torch.float64, epochs=4)
    run = pg.train(made, text, runs=tmp_path)
    serial = pg.train(made, runs=tmp_path)
    found = run.model().state_dict()
    expected = serial.model().state_dict()
    assert torch.equal(found["seen"], expected["seen"])
    assert torch.equal(found["unseen"], expected["unseen"])
    assert 20 < int(found["seen"].sum()) <= 29
    # four epochs of three batches of two shares, each with a forward
    assert (int(found["calls"]), int(found["small"])) == (24, 24)
    # in units of a full batch
    assert found["follows"].tolist() == pytest.approx(3 * [4 * 29 / 12 if "asp" in text else 24.0])


def test_changes_of_8_bit_counters_are_averaged() -> None:
    """Earlier, the mean of the changes 100 and 100 was -28, because their sum exceeded 8 bits."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    count = torch.ones(1, dtype=torch.int8)
    slots = [
        VectorSlot(torch.float64, (ParameterRange(0, 0, 2),)),
        VectorSlot(torch.int8, (ParameterRange(1, 0, 1),), is_added=True),
    ]
    replica = Replica(
        LossModule(nn.ParameterList([weight]), functional.mse_loss),
        torch.optim.SGD([weight], lr=1.0),
    )
    chosen: Any = pg.strategy("server(2, sync=asp)")
    shard = ServerShard(chosen, replica, slots, ["0", "count"], [weight, count], 12)
    share = {
        0: (b"\1", torch.zeros(2, dtype=torch.float64)),
        1: (b"\1", torch.tensor([100], dtype=torch.int8)),
    }
    shard.add_shares([share, share])
    assert shard.values[1].tolist() == [101]
    shard.shared_buffer.close()


def draw_and_compute_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes the next random number of numpy to a file, once in each process.

    It then waits for the other worker's file. Otherwise one worker may compute all shares of so
    short a training before the other one asks for a share.
    """
    folder = Path(os.environ["PARAGRAD_TEST_DRAWN"])
    if torch.is_grad_enabled() and os.getpid() != int(os.environ["PARAGRAD_TEST_LAUNCHER"]):
        with (
            contextlib.suppress(FileExistsError),
            (folder / str(os.getpid())).open("x") as file,
        ):
            file.write(str(numpy.random.random()))
        deadline = time.monotonic() + 30
        while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    return functional.cross_entropy(output, target)


def test_workers_draw_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker is the first rank of its own world.

    Earlier, all workers drew the same numbers, also a worker that replaced a dead one.
    """
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    monkeypatch.setenv("PARAGRAD_TEST_DRAWN", str(drawn))
    monkeypatch.setenv("PARAGRAD_TEST_LAUNCHER", str(os.getpid()))
    pg.train(make_vectors_job(loss=draw_and_compute_loss), "server(2, sync=ssp(0))", runs=tmp_path)
    found = [path.read_text() for path in drawn.iterdir()]
    assert len(set(found)) == len(found) == 2


def test_servers_resume_checkpoints_of_other_strategies(tmp_path: Path) -> None:
    half = pg.train(make_vectors_job(epochs=2), "serial", runs=tmp_path, save=100)
    whole = pg.train(make_vectors_job(dtype=torch.float64), "serial", runs=tmp_path)
    run = pg.train(make_vectors_job(), "server(1, sync=asp)", runs=tmp_path, resume=half.folder)
    assert run.losses == pytest.approx(whole.losses[-3:], rel=1e-4)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("optimizer", [DistanceSgd, Harmonic])
def test_checkpoint_of_servers_has_numbers_of_groups(
    optimizer: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Earlier, a checkpoint had the optimizer groups of a worker, which makes no optimizer steps.

    In a resumed run, counts and estimates silently began anew. State in a dictionary ended the run:
    "Object of type Tensor is not JSON serializable".
    """
    counted = make_job(
        "counted", make_mlp, VECTORS, optimizer=optimizer, dtype=torch.float64, epochs=2
    )
    expected = pg.train(counted, "serial", runs=tmp_path).model().state_dict()
    half = pg.train(counted.replace(epochs=1), "server(2)", runs=tmp_path, save=3)
    for chosen in ("server(2)", "serial"):
        run = pg.train(counted, chosen, runs=tmp_path, resume=half.folder)
        for name, values in run.model().state_dict().items():
            torch.testing.assert_close(values, expected[name], rtol=1e-10, atol=1e-13)


def test_interrupted_asynchronous_run_resumes(tmp_path: Path) -> None:
    def stop(told: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    run = pg.train(
        make_vectors_job(epochs=200), "server(2, sync=asp)", runs=tmp_path, progress=stop
    )
    assert run.stopped
    made = len(run.losses)
    on = pg.train(
        make_vectors_job(epochs=200),
        "server(2, sync=asp)",
        runs=tmp_path,
        resume=run.folder,
        limit=made + 3,
    )
    assert len(on.losses) == 3


def test_run_options_work_with_the_work_queue(
    tmp_path: Path,
) -> None:
    """Earlier, checkpoints were made only after epochs, and event files had no content.

    Two checkpoints are kept. Also, a run that was resumed behind its limit trained to the end.
    """
    run = pg.train(
        make_vectors_job(epochs=2),
        "server(2, sync=asp)",
        runs=tmp_path,
        save=2,
        tensorboard=True,
        limit=5,
    )
    assert sorted(each.name for each in run.folder.glob("checkpoint-*")) == [
        f"checkpoint-{step:08}" for step in (4, 5)
    ]
    assert [each.name for each in (run.folder / "tensorboard").iterdir()] != []
    assert len(run.losses) == 5
    assert (
        on := pg.train(
            make_vectors_job(epochs=2),
            "server(2, sync=asp)",
            runs=tmp_path,
            resume=run.folder,
            limit=4,
        )
    ).losses == []
    assert on.finished


def test_epoch_stopped_at_its_last_batch_is_evaluated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a resumed run began the next epoch at once.

    The epoch before was not tested, and the goal was not checked.
    """

    class Stopped(queue_coordinator.QueueCoordinator):
        def handle_report(self, number: int, ticket: Ticket, report: dict[str, Any]) -> None:
            super().handle_report(number, ticket, report)
            if ticket.what == TRAIN and ticket.step == self.order.steps - 1:
                self.stop_request.set()

    with monkeypatch.context() as patch:
        patch.setattr(queue_coordinator, "QueueCoordinator", Stopped)
        run = pg.train(make_vectors_job(epochs=2), "server(2, sync=asp)", runs=tmp_path)
    assert run.stopped
    assert list(Record(run.folder).select_lines("epoch")) == []
    on = pg.train(
        make_vectors_job(epochs=2), "server(2, sync=asp)", runs=tmp_path, resume=run.folder
    )
    assert [line["epoch"] for line in Record(on.folder).select_lines("epoch")] == [0, 1]
    ended = pg.train(make_vectors_job(epochs=1), "server(2, sync=asp)", runs=tmp_path, save=3)
    # this epoch was tested already
    after = pg.train(make_vectors_job(epochs=2), "serial", runs=tmp_path, resume=ended.folder)
    assert [line["epoch"] for line in Record(after.folder).select_lines("epoch")] == [1]


# ---- dead and late processes -----------------------------------------------------------------
class Disturbed(queue_coordinator.QueueCoordinator):
    """A coordinator that sends a signal to one of its processes after some tickets."""

    after = 5
    happens = signal.SIGKILL
    number = 0
    limit = 300.0
    happened = False
    stopped: Any = None

    def run_training(self) -> str:
        # this is not the limit of sockets, because a server needs time to start
        self.queue.limit = self.limit
        return super().run_training()

    def handle_report(self, number: int, ticket: Ticket, report: dict[str, Any]) -> None:
        super().handle_report(number, ticket, report)
        if ticket.what != TRAIN:
            return
        member = self.queue.workers.get(self.number)
        if (
            not self.happened
            and self.done_shares >= self.after
            and (self.number in self.servers or (member and member.ticket))
        ):
            # the condition also waits for a worker that starts late
            self.happened = True
            victim = self.pool.members[self.number]
            victim.send_signal(self.happens)
            self.stopped = victim if self.happens == signal.SIGSTOP else None
        if (
            self.stopped is not None
            and self.queue.workers.get(self.number) is None
            and self.done_shares > self.after + 6
        ):
            self.stopped.send_signal(signal.SIGCONT)
            self.stopped = None


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("number", "happens", "more", "event"),
    [
        (0, signal.SIGKILL, {}, "replaced"),
        (1, signal.SIGSTOP, {"limit": 0.5}, "late"),
        (2, signal.SIGKILL, {}, "again"),
        (3, signal.SIGKILL, {}, "again"),
    ],
    ids=[
        "a worker is killed",
        "a worker is stopped",
        "the first server is killed",
        "the second server is killed",
    ],
)
def test_other_workers_continue_after_a_failure(
    number: int,
    happens: signal.Signals,
    more: dict[str, Any],
    event: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        queue_coordinator,
        "QueueCoordinator",
        type("Here", (Disturbed,), {"number": number, "happens": happens, **more}),
    )
    run = pg.train(make_vectors_job(epochs=6), "server(2, servers=2, sync=asp)", runs=tmp_path)
    assert run.finished
    assert set(count_server_samples(run)) == {6 * 29}
    events = [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"]
    assert event in events
    lost = [
        line["lost"]["updates"]
        for rank in range(len(Record(run.folder).ranks))
        for line in Record(run.folder).select_lines("server", rank)
    ]
    assert sum(map(bool, lost)) == (event == "again")


@pytest.mark.story
def test_timeout_setting_applies_to_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a world of one rank had a limit of 300 s, whatever --timeout said.

    So workers waited that long for a server that hung.
    """

    class Hung(Disturbed):
        number = 2
        happens = signal.SIGSTOP

        def handle_report(self, number: int, ticket: Ticket, report: dict[str, Any]) -> None:
            super().handle_report(number, ticket, report)
            self.stopped = None  # it stays stopped

    monkeypatch.setattr(queue_coordinator, "QueueCoordinator", Hung)
    with pytest.raises(pg.RankFailed, match="no answer from server 0 within 10 s"):
        pg.train(make_vectors_job(epochs=6), "server(2, sync=asp)", runs=tmp_path, timeout=10)


@pytest.mark.parametrize("living", [False, True], ids=["killed", "living"])
@pytest.mark.parametrize("became", [APPLIED, ALREADY_APPLIED])
@pytest.mark.parametrize(
    "wrote", [None, 4, 6], ids=["nobody wrote", "the dead one wrote", "a late one wrote"]
)
def test_applied_share_without_a_worker_record_is_audited(
    became: int, wrote: int | None, living: bool, tmp_path: Path
) -> None:
    """The sample count includes a share that every server has, but no worker has recorded.

    Earlier, it missed such a share of a worker that was late and then killed, or that had joined.
    If the next worker applied the share, that worker wrote its line itself. For a killed worker,
    the line is written at once. Earlier, it was missed too if the launcher was killed then.
    """
    run: Any = queue_coordinator.QueueCoordinator.__new__(queue_coordinator.QueueCoordinator)
    run.validated_run = validate_run(make_vectors_job(), "server(2, sync=asp)")
    run.folder = tmp_path
    run.unrecorded_shares = []
    run.pool = SimpleNamespace(members={4: None} if living else {})
    run.done_shares = 0
    run.loss = 0.0
    run.shares = 2
    ticket = Ticket(TRAIN, 3, 0, 1, 1)
    desk = Desk()
    desk.office.add_tickets([ticket])
    desk.request_ticket(4)
    desk.office.drop_worker(4)
    desk.request_ticket(6)
    desk.office.limit = -1.0
    assert desk.office.drop_late_workers() == [6]
    run.queue = desk.office
    run.record = SimpleNamespace(origin=0.0)
    if wrote is not None:
        write_step_line(
            tmp_path, 0.0, wrote, run.validated_run, ticket, {"loss": 1.0, "weight": 6.0}
        )
    run.handle_report(5, ticket, {"became": became, "loss": 2.0, "weight": 6.0})
    if living:
        # it may still write its line itself
        assert wrote is not None or not [*tmp_path.iterdir()]
        run.write_missing_steps()
    found = [
        (number, line["step"], line["order"], line["loss"])
        for number in (4, 5, 6)
        for line in read_lines(tmp_path / f"rank-{number}.jsonl")
    ]
    mine = [(4, 1, [[18, 24]], [12.0, 6.0])] if became == ALREADY_APPLIED else []
    assert found == (mine if wrote is None else [(wrote, 1, [[18, 24]], [6.0, 6.0])])


def raise_or_compute_loss(output: Tensor, target: Tensor) -> Tensor:
    if (
        torch.is_grad_enabled()
        and float(target.sum()) > 0
        and os.environ.get("PARAGRAD_TEST_RAISES")
        and len(target) < 12
    ):
        raise ValueError("broken")
    return functional.cross_entropy(output, target)


def test_asynchronous_worker_exception_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_vectors_job(loss=raise_or_compute_loss)
    begin = queue_coordinator.QueueCoordinator.start_process

    def start(self: queue_coordinator.QueueCoordinator, number: int, server: int | None) -> None:
        monkeypatch.setenv("PARAGRAD_TEST_RAISES", "yes")
        begin(self, number, server)

    monkeypatch.setattr(queue_coordinator.QueueCoordinator, "start_process", start)
    with pytest.raises(pg.RankFailed, match="ValueError: broken"):
        pg.train(made, "server(2, sync=asp)", runs=tmp_path)


def make_short_one_cycle_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)


@pytest.mark.parametrize("text", ["server(2)", "data(2)"])
def test_failing_server_names_the_step(text: str, tmp_path: Path) -> None:
    """The scheduler ends before the training.

    Earlier, every server named step 0, because the rank of a server makes no steps.
    """
    with pytest.raises(pg.RankFailed, match="total steps is 4") as failed:
        pg.train(make_vectors_job(scheduler=make_short_one_cycle_lr), text, runs=tmp_path)
    assert failed.value.step == 4


def test_server_exit_after_saving_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a finished training ended with a traceback, like an interrupted one."""

    class Late(queue_coordinator.QueueCoordinator):
        def wait_for_exit(self, numbers: list[int]) -> None:
            super().wait_for_exit(numbers)
            for number in self.servers if not numbers or numbers[0] not in self.servers else ():
                self.pool.members[number].send_signal(signal.SIGSTOP)
                self.close_seconds = 0.5

    monkeypatch.setattr(queue_coordinator, "QueueCoordinator", Late)
    run = pg.train(make_vectors_job(epochs=1), "server(2, sync=asp)", runs=tmp_path)
    assert run.finished
    assert run.model()


def test_failing_listener_is_recorded_as_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_port_error(*_: Any) -> None:
        raise StepFailed("the port is somebody else's by now")

    monkeypatch.setattr(queue_coordinator, "Listener", raise_port_error)
    with pytest.raises(pg.RankFailed, match="somebody else's by now"):
        pg.train(make_vectors_job(epochs=1), "server(2, sync=asp)", runs=tmp_path)
    record = Record(next(tmp_path.iterdir()))
    assert [line["status"] for line in record.run_lines if line["kind"] == "end"] == ["failed"]


def test_evaluation_is_assigned_to_trained_workers() -> None:
    desk = Desk()
    desk.add_tickets(1)
    desk.request_ticket(0)
    desk.request_ticket(1)
    desk.office.add_tickets([Ticket(TEST, part=part, parts=2) for part in range(2)])
    desk.request_ticket(0)
    assert 1 not in desk.given
