"""A parameter server and a work queue without sockets: messages to them, and their answers."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import torch
from equality_table import VECTORS, make_job, make_mlp
from torch import nn
from torch.nn import functional

import paragrad as pg
from paragrad.engine.exchange import Replica
from paragrad.engine.optimizer.update_slices import ParameterRange
from paragrad.jobs.loss import LossModule
from paragrad.parallel.server.curve_keys import Address
from paragrad.parallel.server.message_header import (
    Header,
    MessageType,
    view_bytes,
)
from paragrad.parallel.server.parameter_partition import VectorSlot
from paragrad.parallel.server.request_handler import RequestHandler
from paragrad.parallel.server.shard import ServerShard
from paragrad.parallel.server.work_queue import TRAIN, Ticket, WorkQueue
from paragrad.record.record import Record

JOB = 77


class AnswerRecorder:
    """A replacement of a socket that records the answers of a server."""

    def __init__(self) -> None:
        self.answers: list[tuple[bytes, Header, str]] = []
        self.address = Address("ipc://a place of this host")

    def send_answer(self, whose: bytes, header: Header, *rest: Any) -> None:
        self.answers.append(
            (whose, header, rest[0].decode() if header.kind == MessageType.REFUSED else "")
        )


def make_server(text: str, listening: Any = None) -> RequestHandler:
    """Return the handler of a server that holds all 60 parameters, under SGD with a rate of 1."""
    chosen: Any = pg.strategy(text)
    model = nn.Sequential(
        nn.Linear(10, 5, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64, bias=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    names, tensors = zip(*model.named_parameters(), strict=True)
    slot = VectorSlot(
        torch.float64,
        tuple(ParameterRange(index, 0, each.numel()) for index, each in enumerate(tensors)),
    )
    replica = Replica(
        LossModule(model, functional.mse_loss),
        torch.optim.SGD(model.parameters(), lr=1.0),
        full_batch=12,
    )
    return RequestHandler(
        ServerShard(chosen, replica, [slot], list(names), list(tensors), 12),
        listening or AnswerRecorder(),
        JOB,
    )


def make_frames(header: Header | bytes, *rest: bytes, whose: bytes = b"w0") -> list[Any]:
    first = header if isinstance(header, bytes) else header.pack_header()
    return [
        SimpleNamespace(bytes=each, buffer=memoryview(bytearray(each)))
        for each in (whose, first, *rest)
    ]


def make_push(
    value: float = 1.0,
    elements: int = 60,
    marks: bytes = b"\1\1\1",
    dtype: torch.dtype = torch.float64,
    whose: bytes = b"w0",
    **more: Any,
) -> list[Any]:
    vector = torch.full((elements,), value, dtype=dtype)
    header = Header(
        **{
            "kind": MessageType.PUSH,
            "job": JOB,
            "sender": 1,
            "shares": 2,
            "dtype": dtype,
            "elements": elements,
            "numbers": (6.0, 3.0, 0.0, 6.0, 6.0),
            **more,
        }
    )
    return make_frames(header, marks, bytes(view_bytes(vector)), whose=whose)


def send_and_read_refusal(served: RequestHandler, message: list[Any]) -> str:
    """Send a message to a server; return why it was refused, or an empty text."""
    told: Any = served.listener
    before = len(told.answers)
    served.handle_message(message)
    return "".join(why for _, _, why in told.answers[before:])


class Desk:
    """A work queue and its workers, without sockets."""

    def __init__(
        self, bound: int | None = None, wanted: int | None = None, limit: float = 100.0
    ) -> None:
        self.heard: list[Ticket] = []
        self.office = WorkQueue(
            JOB, bound, wanted, limit, lambda number, ticket, said: self.heard.append(ticket)
        )
        self.given: dict[int, Ticket] = {}
        self.calls = itertools.count(1)

    def send_answer(self, whose: bytes, header: Header, text: bytes) -> None:
        self.given[int(whose)] = Ticket(**json.loads(text))

    def request_ticket(self, number: int, **said: Any) -> Ticket | None:
        """Report a worker's ticket as done, and return its next ticket, or None."""
        done = self.given.pop(number, None)
        text = json.dumps([number, done and done.__dict__, said]).encode()
        message = make_frames(
            Header(MessageType.NEXT, JOB, call=next(self.calls)), text, whose=str(number).encode()
        )
        self.office.handle_message(self, message)  # type: ignore[arg-type]
        self.office.hand_out_tickets(self)  # type: ignore[arg-type]
        return self.given.get(number)

    def add_tickets(self, count: int) -> None:
        self.office.add_tickets(Ticket(TRAIN, number) for number in range(count))


def make_vectors_job(**changes: Any) -> pg.Job:
    return make_job("vectors", make_mlp, VECTORS, test=VECTORS, metric=pg.accuracy).replace(
        **{"epochs": 3, **changes}
    )


def count_server_samples(run: pg.Run) -> list[int]:
    """Return the number of samples that each server applied or lost."""
    record = Record(run.folder)
    return [
        line["samples"] + line["lost"]["samples"]
        for rank in range(len(record.ranks))
        for line in record.select_lines("server", rank)
    ]
