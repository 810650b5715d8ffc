"""Workers that join a running training from elsewhere, on the side of the training.

The coordinator decides which workers may join, what they are sent, and what is recorded of them. It
also writes the step lines of such a worker. The position of its share in the order comes from the
ticket, which is the queue's own. The other numbers come with the worker's next request. Its clock
is another one, so a step ends when that request arrives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from paragrad.loops.join import build_join_identity, refuse_other_job
from paragrad.parallel.server.curve_keys import PUBLIC_SUFFIX, AllowedKeys, write_public_key
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.message_header import InvalidMessage
from paragrad.parallel.server.request_handler import APPLIED
from paragrad.parallel.server.work_queue import TEST, TRAIN, Ticket
from paragrad.record.record import Recorder
from paragrad.trainer.batch import make_rank_batch
from paragrad.validation.validate import ValidatedRun

MAX_JOINED = 10_000  # workers that may join one training
MAX_STEP_SECONDS = 1e9
REPORT_KEYS = ("became", "loss", "weight", "seconds", "lr", "sent")


def locate_share(validated_run: ValidatedRun, ticket: Ticket) -> list[list[int]]:
    """List the ranges of a ticket's share in the sample order, in the form of the record.

    Args:
        validated_run: the run.
        ticket: the ticket.
    """
    order = validated_run.inspection.order
    batch = make_rank_batch(
        order,
        ticket.epoch,
        order.get_batch(ticket.step % order.steps),
        validated_run.resolved.division,
        [ticket.share],
    )
    return batch.recorded_ranges


def write_step_line(
    folder: Path,
    origin: float,
    number: int,
    validated_run: ValidatedRun,
    ticket: Ticket,
    report: dict[str, float],
) -> None:
    """Write the step line of another process, from its report.

    The number of such workers is not known, so the file is open only while one line is written.

    Args:
        folder: the folder of the run.

        origin: the origin of the record's clock.

        number: the worker.

        validated_run: the run.

        ticket: the ticket of the step.

        report: the worker's report of it.
    """
    seconds = report.get("seconds", 0.0)
    with Recorder(folder / f"rank-{number}.jsonl", origin) as record:
        record.write_line(
            "step",
            step=ticket.step,
            start=round(record.now() - seconds, 6),
            seconds=round(seconds, 6),
            epoch=ticket.epoch,
            loss=[report["loss"] * report["weight"], report["weight"]],
            order=locate_share(validated_run, ticket),
            lr=report.get("lr"),
            sent={"gradients": {"bytes": int(report.get("sent", 0)), "computed": False}},
        )


class JoinCoordinator:
    """Admits workers to one training, and records their steps.

    Attributes:
        validated_run: the run.

        folder: the folder of the run.

        origin: the origin of the record's clock.

        endpoints: where workers and servers connect.

        allowed_keys: public keys of workers that may join.

        allocate_number: returns the number of one more process.

        record_event: writes an event into the record.

        join_identity: the job as text, which a worker's own must equal.

        keys: the key of each worker that joined, by number.

        joined_numbers: numbers by (key, number that the worker drew for itself).

        last_recorded: the last ticket with a written line, by worker.
    """

    def __init__(
        self,
        validated_run: ValidatedRun,
        folder: Path,
        record: Recorder,
        endpoints: ServerEndpoints,
        allowed: Path,
        allocate_number: Callable[[], int],
        record_event: Callable[..., None],
    ) -> None:
        self.validated_run = validated_run
        self.folder = folder
        self.origin = record.origin
        self.endpoints = endpoints
        self.allowed_keys = AllowedKeys(allowed)
        self.allocate_number = allocate_number
        self.record_event = record_event
        self.join_identity = build_join_identity(validated_run.job, validated_run.inspection)
        self.keys: dict[int, bytes] = {}
        self.joined_numbers: dict[tuple[bytes, int], int] = {}
        self.last_recorded: dict[int, int] = {}
        endpoints.joined_folder.mkdir()

    def admit_worker(self, key: bytes, sender: int, text: bytes) -> bytes | None:
        """Answer a worker that requests to join.

        Args:
            key: the worker's public key.
            sender: the number that the worker drew for itself.
            text: the job that the worker would train, as text.

        Returns:
            The answer as JSON; None until all servers are there.

        Raises:
            InvalidMessage: the job is another one, or too many workers have joined.
        """
        servers = [
            join_endpoint and join_endpoint.address
            for join_endpoint in map(
                self.endpoints.build_join_endpoint, range(self.endpoints.servers)
            )
        ]
        refuse_other_job(self.join_identity, text)
        if not all(servers):
            return None
        if (number := self.joined_numbers.get((key, sender))) is None:
            if len(self.joined_numbers) >= MAX_JOINED:
                raise InvalidMessage(f"{MAX_JOINED} workers have joined already")
            number = self._register_worker(key)
            self.joined_numbers[key, sender] = number
        settings = self.validated_run.settings
        answer = {
            "number": number,
            "job": self.endpoints.job,
            "strategy": str(self.validated_run.resolved),
            "slow": settings.slow,
            "pace": settings.pace,
            "servers": [[each.endpoint, (each.key or b"").decode()] for each in servers if each],
        }
        return json.dumps(answer).encode()

    def _register_worker(self, key: bytes) -> int:
        number = self.allocate_number()
        write_public_key(key, self.endpoints.joined_folder / f"{number}{PUBLIC_SUFFIX}")
        self.keys[number] = key
        self.record_event(
            "joined",
            f"worker {number} joined, with the key of "
            f"{self.allowed_keys.find_key_name(key)}{PUBLIC_SUFFIX}",
            rank=number,
        )
        return number

    def check_report(self, ticket: Ticket, report: dict[str, float]) -> None:
        """Check that the reported numbers of a ticket are possible.

        The sum of a test may be infinite or NaN, because a model may have no finite loss.

        Args:
            ticket: the ticket.
            report: the numbers that the worker reports.

        Raises:
            InvalidMessage: a number is missing, or impossible.
        """
        if not all(
            math.isfinite(value)
            for name, value in report.items()
            if (ticket.what, name) != (TEST, "sum")
        ):
            raise InvalidMessage("numbers that are not finite")
        if ticket.what != TRAIN:
            return
        if missing := [name for name in REPORT_KEYS if name not in report]:
            raise InvalidMessage(f"a step without its {missing[0]}")
        if not (
            0 <= report["seconds"] < MAX_STEP_SECONDS
            and 0 <= report["sent"] < 2**63
            and report["weight"] >= 0
            and math.isfinite(report["loss"] * report["weight"])
        ):
            raise InvalidMessage("impossible numbers of a step")

    def record_ticket(self, number: int, ticket: Ticket, report: dict[str, float]) -> None:
        """Write the step line of a share that was applied and has no line yet.

        Args:
            number: the worker.
            ticket: the ticket.
            report: the worker's report of it.
        """
        if (
            ticket.what == TRAIN
            and report["became"] == APPLIED
            and self.last_recorded.get(number) != ticket.number
        ):
            write_step_line(self.folder, self.origin, number, self.validated_run, ticket, report)
            self.last_recorded[number] = ticket.number

    def record_departure(self, number: int) -> None:
        """Record that a worker has left. No other worker can join by its number."""
        self.keys.pop(number, None)
        (self.endpoints.joined_folder / f"{number}{PUBLIC_SUFFIX}").unlink(missing_ok=True)
        self.record_event(
            "left", f"worker {number} left; other workers get its unfinished work", rank=number
        )
