"""Who joins a running training from elsewhere, from its side: who is let in, what it is told,
what is recorded of it.

A step line of such a worker is written here: where its share stands in the order is the
ticket's, which was ours, and the rest are numbers that it says with its next question. Its
clock is not ours: a step ended when that question came.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from paragrad.loops.join import known_by, refuse_other
from paragrad.parallel.server.curve_keys import PUBLIC, Allowed, write_public
from paragrad.parallel.server.endpoints import Meeting
from paragrad.parallel.server.message_header import Unfit
from paragrad.parallel.server.request_handler import APPLIED
from paragrad.parallel.server.work_queue import TEST, TRAIN, Ticket
from paragrad.record.record import Recorder
from paragrad.trainer.batch import batch_of
from paragrad.validation.validate import Admitted

MOST = 10_000  # that join in a training
MOST_SECONDS = 1e9  # of a step
NUMBERS = ("became", "loss", "weight", "seconds", "lr", "sent")


def place_of(checked: Admitted, ticket: Ticket) -> list[int]:
    """Where a ticket's share stands in the order, as the record has it."""
    order = checked.facts.order
    batch = batch_of(
        order,
        ticket.epoch,
        order.at(ticket.step % order.steps),
        checked.resolved.division,
        [ticket.share],
    )
    return batch.recorded


def write_step(
    folder: Path,
    origin: float,
    number: int,
    checked: Admitted,
    ticket: Ticket,
    said: dict[str, float],
) -> None:
    """The line of a step of somebody else's, by what is said of it. Of how many, nobody knows:
    a file is open for a line.
    """
    seconds = said.get("seconds", 0.0)
    with Recorder(folder / f"rank-{number}.jsonl", origin) as record:
        record.write(
            "step",
            step=ticket.step,
            start=round(record.now() - seconds, 6),
            seconds=round(seconds, 6),
            epoch=ticket.epoch,
            loss=[said["loss"] * said["weight"], said["weight"]],
            order=place_of(checked, ticket),
            lr=said.get("lr"),
            sent={"gradients": {"bytes": int(said.get("sent", 0)), "computed": False}},
        )


class Guests:
    """Of one training. number: the next of a process;  event: writes one into the record."""

    def __init__(
        self,
        checked: Admitted,
        folder: Path,
        record: Recorder,
        meeting: Meeting,
        allowed: Path,
        number: Callable[[], int],
        event: Callable[..., None],
    ) -> None:
        self.checked = checked
        self.folder = folder
        self.origin = record.origin
        self.meeting = meeting
        self.allowed = Allowed(allowed)
        self.number = number
        self.event = event
        self.known = known_by(checked.job, checked.facts)
        self.keys: dict[int, bytes] = {}
        # by its key, and the number that it drew for itself
        self.numbers: dict[tuple[bytes, int], int] = {}
        self.last: dict[int, int] = {}  # ticket whose line is written
        meeting.joined.mkdir()

    def admit(self, key: bytes, sender: int, text: bytes) -> bytes | None:
        """What one is told that asks to take part; None until all servers are there. Raises
        Unfit.
        """
        servers = [
            entrance and entrance.address
            for entrance in map(self.meeting.entrance, range(self.meeting.servers))
        ]
        refuse_other(self.known, text)
        if not all(servers):
            return None
        if (number := self.numbers.get((key, sender))) is None:
            if len(self.numbers) >= MOST:
                raise Unfit(f"{MOST} have joined already")
            number = self._joined(key)
            self.numbers[key, sender] = number
        settings = self.checked.settings
        told = {
            "number": number,
            "job": self.meeting.job,
            "strategy": str(self.checked.resolved),
            "slow": settings.slow,
            "pace": settings.pace,
            "servers": [[each.at, (each.key or b"").decode()] for each in servers if each],
        }
        return json.dumps(told).encode()

    def _joined(self, key: bytes) -> int:
        number = self.number()
        write_public(key, self.meeting.joined / f"{number}{PUBLIC}")
        self.keys[number] = key
        self.event(
            "joined",
            f"worker {number} joined, with the key of {self.allowed.name(key)}{PUBLIC}",
            rank=number,
        )
        return number

    def check(self, ticket: Ticket, said: dict[str, float]) -> None:
        """What is said of a test may be the loss of a model that has no finite one. Raises
        Unfit.
        """
        if not all(
            math.isfinite(value)
            for name, value in said.items()
            if (ticket.what, name) != (TEST, "sum")
        ):
            raise Unfit("numbers that are not finite")
        if ticket.what != TRAIN:
            return
        if missing := [name for name in NUMBERS if name not in said]:
            raise Unfit(f"a step without its {missing[0]}")
        if not (
            0 <= said["seconds"] < MOST_SECONDS
            and 0 <= said["sent"] < 2**63
            and said["weight"] >= 0
            and math.isfinite(said["loss"] * said["weight"])
        ):
            raise Unfit("numbers of a step that cannot be")

    def did(self, number: int, ticket: Ticket, said: dict[str, float]) -> None:
        """A step line, of a share that was applied and has none yet."""
        if (
            ticket.what == TRAIN
            and said["became"] == APPLIED
            and self.last.get(number) != ticket.number
        ):
            write_step(self.folder, self.origin, number, self.checked, ticket, said)
            self.last[number] = ticket.number

    def left(self, number: int) -> None:
        """It said so: nobody else comes in by that number."""
        self.keys.pop(number, None)
        (self.meeting.joined / f"{number}{PUBLIC}").unlink(missing_ok=True)
        self.event("left", f"worker {number} left; others get what it was at", rank=number)
