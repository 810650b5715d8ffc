"""What a worker, or a server, of a training does whose samples are handed out
(`techniques.served.office`): each is in a world of its own, and may die, stall, or come late.

A worker asks the office for a ticket, does what it says, and says so with its next question.
The learning rate that it records is that of the ticket's step; the servers' scheduler counts
the samples that were applied. One that joined from elsewhere has not the run's folder: it says
the numbers of its steps with its questions, and the launching process records them.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paragrad.datasets.loading import Dataset, Samples, parted
from paragrad.errors import StepFailed
from paragrad.jobs.job import opened
from paragrad.loops.synchronous import log_memory, save_trained
from paragrad.parallel.server.client import Calling
from paragrad.parallel.server.curve_keys import Keys
from paragrad.parallel.server.endpoints import Meeting
from paragrad.parallel.server.message_header import Header, Kind
from paragrad.parallel.server.work_queue import END, KEEP, TEST, TRAIN, Ticket
from paragrad.parallel.server.worker_exchange import AGAIN, Asking
from paragrad.record.cpu_load import Cpu
from paragrad.record.record import Recorder
from paragrad.runtime.generators import seed_everything
from paragrad.runtime.world import CPU, World
from paragrad.trainer.batch import batch_of
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.first_step.setup import wire
from paragrad.trainer.pace import Pace
from paragrad.trainer.trainer import Trainer
from paragrad.validation import resume_check
from paragrad.validation.validate import Admitted

LONGEST = 2**16  # bytes of what the office says
FAREWELL = 2.0  # seconds for the office to hear that a worker leaves


def rank_of(world: World, checked: Admitted, folder: Path, origin: float, meeting: Meeting) -> str:
    """What every rank does, until the office has nothing more to do; or, of a server, until it
    is dismissed.
    """
    with Recorder(folder / f"rank-{meeting.number}.jsonl", origin) as record:
        cpu = Cpu()
        take_part(world, checked, folder, meeting, record)
        record.write("cpu", **cpu.told())
    return "finished"


def take_part(
    world: World, checked: Admitted, folder: Path, meeting: Meeting, record: Recorder | None = None
) -> Counter[str]:
    """Until the office has nothing more to do; what was done, by kind of ticket."""
    settings = checked.settings
    done = Counter[str]()
    # from where messages are sent
    here = world if meeting.server is None else replace(world, device=CPU)
    trainer = Trainer.of_job(
        here,
        checked.job,
        checked.resolved,
        settings,
        record=record,
        seen=checked.facts.probe,
        how=replace(settings.how, meeting=meeting),
        pace=Pace(settings.slowed, checked.job.seed, meeting.number, world.device.type != "cpu"),
    )
    # its rank is the first, of a world of its own
    seed_everything(checked.job.seed + 1 + meeting.number)
    trainer.log.always = settings.trace is not None
    trainer.batch_size = min(checked.job.batch, checked.facts.samples)
    try:
        if checked.saved is not None:
            trainer_snapshot.restore(trainer, checked.saved)
        if meeting.server is not None:
            wire(trainer, False, None).serve()
        else:
            done = Worker(trainer, checked, folder, meeting).run()
        log_memory(trainer)
    except Exception as error:
        raise trainer.failed(error) from error
    finally:
        trainer.close()
    return done


class Worker:
    """Does what it is told, ticket after ticket."""

    def __init__(self, trainer: Trainer, checked: Admitted, folder: Path, meeting: Meeting) -> None:
        self.trainer = trainer
        self.checked = checked
        self.folder = folder
        self.meeting = meeting
        job = checked.job
        settings = checked.settings
        self.train: Dataset = opened(job.train, settings.folder)
        self.test: Dataset | None = None if job.test is None else opened(job.test, settings.folder)
        self.samples = Samples(self.train, job.seed, job.collate, trainer.world.timeout)
        self.scheduler = trainer.scheduler
        trainer.scheduler = None
        self.rate_of = trainer.steps  # of which step the learning rate is
        self.guest = bool(meeting.told)  # it joined from elsewhere
        # the launching process ends its own ranks; of another's there is nobody who would
        self.office = Calling(
            [meeting.office],
            LONGEST,
            meeting.keys or Keys.made(),
            trainer.world.timeout if self.guest else math.inf,
            AGAIN,
            "the training's office",
        )

    def run(self) -> Counter[str]:
        """Until the office says that it is over; what was done, by kind of ticket."""
        does: dict[str, Callable[[Ticket], dict[str, Any]]] = {
            TRAIN: self.trains,
            TEST: self.tests,
            KEEP: self.keeps,
        }
        done: tuple[dict[str, Any] | None, dict[str, Any]] = None, {}
        count = Counter[str]()
        try:
            while (ticket := self.next(*done)).what != END:
                done = asdict(ticket), does[ticket.what](ticket)
                count[ticket.what] += 1
        except BaseException:
            if self.guest:
                self.leave()
            raise
        finally:
            self.office.close()
        return count

    def next(self, done: dict[str, Any] | None, said: dict[str, Any]) -> Ticket:
        """The office takes as long as it wants: it has nothing to do while others still
        train.
        """
        text = json.dumps([self.meeting.number, done, said]).encode()
        for _, header, rest in self.office.asked(
            [(0, Header(Kind.NEXT, self.meeting.job), (text,))]
        ):
            if header.kind != Kind.GIVEN:
                raise StepFailed("the office answered with something else than a ticket")
            return Ticket(**json.loads(bytes(rest[0])))
        raise StepFailed("the office does not answer")

    def leave(self) -> None:
        """What it was at is somebody else's at once."""
        self.office.seconds = min(self.office.seconds, FAREWELL)
        with suppress(StepFailed):
            text = json.dumps([self.meeting.number, None, {}]).encode()
            list(self.office.asked([(0, Header(Kind.LEAVE, self.meeting.job), (text,))]))

    def trains(self, ticket: Ticket) -> dict[str, Any]:
        trainer = self.trainer
        order = self.checked.facts.order
        self.rate(ticket.step)
        trainer.steps = ticket.step
        trainer.replicas = [ticket.share]
        if isinstance(trainer.exchange, Asking):
            trainer.exchange.ticket = ticket
        else:
            trainer.how = replace(trainer.how, meeting=replace(self.meeting, ticket=ticket))
        batch = batch_of(
            order,
            ticket.epoch,
            order.at(ticket.step % order.steps),
            trainer.division,
            trainer.replicas,
        )
        said: dict[str, Any] = {}
        begun = time.monotonic()
        rate = trainer.optimizer.param_groups[0]["lr"]
        for fetched in trainer.feed.give(self.samples, [batch], 0):
            result = trainer.step(*parted(fetched))
            assert isinstance(trainer.exchange, Asking)
            said = {
                "loss": result.loss,
                "weight": result.weight,
                "became": trainer.exchange.became,
                "version": trainer.exchange.version,
                "lr": float(rate),
            }
            if self.guest:
                said |= {
                    "seconds": time.monotonic() - begun,
                    "sent": trainer.exchange.sent["gradients"]["bytes"],
                }
        return said

    def rate(self, step: int) -> None:
        """The learning rate of a step."""
        # schedulers want to know, and servers step
        self.trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
        for number in range(self.rate_of, step if self.scheduler is not None else 0):
            self.trainer.alike("schedule", number, self.scheduler.step)
        self.rate_of = max(self.rate_of, step)

    def tests(self, ticket: Ticket) -> dict[str, Any]:
        assert self.test is not None
        self.wired()
        found = self.trainer.evaluation(
            self.test, self.checked.job.metric, part=(ticket.part, ticket.parts)
        )
        return {
            "sum": found["value"] * found["weight"] if found["weight"] else 0.0,
            "weight": found["weight"],
        }

    def wired(self) -> None:
        """Where nobody has trained yet (a run that goes on with a test)."""
        if self.trainer.exchange is None:
            wire(self.trainer, False, None)

    def keeps(self, ticket: Ticket) -> dict[str, Any]:
        trainer = self.trainer
        self.wired()
        self.rate(ticket.step)
        trainer.steps = ticket.step
        trainer.scheduler = self.scheduler
        if ticket.keep == "model":
            save_trained(trainer, self.folder / "model.safetensors")
        else:
            trainer.save(
                self.folder, resume_check.identity_of(self.checked.job, self.checked.facts)
            )
        trainer.scheduler = None
        return {}
