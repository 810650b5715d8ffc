"""A worker or a server of a training with a work queue (`parallel.server.work_queue`).

Each one is in a world of its own. It may fail, stall, or join late.

A worker requests a ticket, does its task, and reports the result with its next request. The
learning rate in its record is that of the ticket's step. The scheduler of the servers counts the
samples that were applied. A worker that joined from elsewhere has no folder of the run. It sends
the numbers of its steps with its requests, and the launching process records them.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paragrad.datasets.loading import Dataset, Samples
from paragrad.errors import StepFailed
from paragrad.jobs.job import open_dataset
from paragrad.loops.loop import BatchLoop
from paragrad.loops.synchronous import log_memory, save_trained_model
from paragrad.parallel.server.client import ServerClient
from paragrad.parallel.server.curve_keys import KeyPair
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.message_header import Header, MessageType
from paragrad.parallel.server.work_queue import END, KEEP, TEST, TRAIN, Ticket
from paragrad.parallel.server.worker_exchange import REMINDER_SECONDS, WorkerExchange
from paragrad.record.cpu_load import CpuMeter
from paragrad.record.record import Recorder
from paragrad.runtime.generators import seed_everything
from paragrad.runtime.world import CPU, World
from paragrad.trainer.batch import make_rank_batch
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.exchange_setup import set_up_exchange
from paragrad.trainer.pace import Pace
from paragrad.trainer.step_observer import StepResult
from paragrad.trainer.trainer import Trainer
from paragrad.validation import resume_check
from paragrad.validation.validate import ValidatedRun

MAX_REPLY_BYTES = 2**16  # the largest answer of the work queue, in bytes
LEAVE_TIMEOUT = 2.0  # the seconds in which the work queue must answer a worker that leaves


def run_queue_rank(
    world: World,
    validated_run: ValidatedRun,
    folder: Path,
    origin: float,
    endpoints: ServerEndpoints,
) -> str:
    """Run a worker until the work queue is finished, or a server until it is dismissed.

    Args:
        world: This process's own world.

        validated_run: The validated job, strategy and settings.

        folder: The folder of the run.

        origin: The start of the record's clock.

        endpoints: The endpoints of the work queue and the servers.

    Returns:
        "finished".
    """
    with Recorder(folder / f"rank-{endpoints.number}.jsonl", origin) as record:
        cpu = CpuMeter()
        run_worker_or_server(world, validated_run, folder, endpoints, record)
        record.write_line("cpu", **cpu.measure_usage())
    return "finished"


def run_worker_or_server(
    world: World,
    validated_run: ValidatedRun,
    folder: Path,
    endpoints: ServerEndpoints,
    record: Recorder | None = None,
) -> Counter[str]:
    """Run a worker until the work queue is finished, or a server until it is dismissed.

    Args:
        world: This process's own world.

        validated_run: The validated job, strategy and settings.

        folder: The folder of the run.

        endpoints: The endpoints of the work queue and the servers.

        record: The record, or None.

    Returns:
        The number of tickets of each kind.
    """
    settings = validated_run.settings
    counts = Counter[str]()
    # A server holds its parameters on the CPU, from where messages are sent.
    local_world = world if endpoints.server is None else replace(world, device=CPU)
    trainer = Trainer.build_for_job(
        local_world,
        validated_run.job,
        validated_run.resolved,
        settings,
        record=record,
        validation_probe=validated_run.inspection.probe,
        exchange_options=replace(settings.exchange_options, endpoints=endpoints),
        pace=Pace(
            settings.slow_ranks,
            validated_run.job.seed,
            endpoints.number,
            world.device.type != "cpu",
        ),
    )
    # In its own world, its rank is 0; the seed is that of its number.
    seed_everything(validated_run.job.seed + 1 + endpoints.number)
    training = trainer.training
    if settings.trace is not None:
        training.log.write_all_details()
    training.state.use_batch_size(min(validated_run.job.batch, validated_run.inspection.samples))
    try:
        if validated_run.resume_checkpoint is not None:
            trainer_snapshot.restore_snapshot(training, validated_run.resume_checkpoint)
        if endpoints.server is not None:
            set_up_exchange(training).serve()
        else:
            counts = QueueWorker(trainer, validated_run, folder, endpoints).process_tickets()
        log_memory(training)
    except Exception as error:
        raise training.report_failure(error) from error
    finally:
        trainer.close()
    return counts


class QueueWorker(BatchLoop[Ticket]):
    """A worker that does one ticket after another.

    Attributes:
        validated_run: The validated job, strategy and settings.

        folder: The folder of the run.

        endpoints: The endpoints of the work queue and the servers.

        train_dataset: The training set.

        test_dataset: The test set, or None.

        samples: The source of the training samples.

        scheduler: The job's scheduler, or None.

        rate_step: The step of the current learning rate.

        ticket_start: The time at which the training of a ticket began, in seconds.

        report: The result of the last ticket.

        finished_ticket: The last ticket that was done, or None.

        counts: The number of tickets of each kind.

        is_joined: Whether the worker joined from elsewhere.

        queue_client: The client of the work queue.
    """

    def __init__(
        self,
        trainer: Trainer,
        validated_run: ValidatedRun,
        folder: Path,
        endpoints: ServerEndpoints,
    ) -> None:
        super().__init__(trainer)
        self.validated_run = validated_run
        self.folder = folder
        self.endpoints = endpoints
        job = validated_run.job
        settings = validated_run.settings
        self.train_dataset: Dataset = open_dataset(job.train, settings.folder)
        self.test_dataset: Dataset | None = (
            None if job.test is None else open_dataset(job.test, settings.folder)
        )
        self.samples = Samples(self.train_dataset, job.seed, job.collate, trainer.world.timeout)
        self.scheduler = self.training.state.scheduler
        self.training.state.leave_scheduler_to_loop()
        self.rate_step = trainer.steps
        self.ticket_start = 0.0
        self.report: dict[str, Any] = {}
        self.finished_ticket: dict[str, Any] | None = None
        self.counts = Counter[str]()
        self.is_joined = bool(endpoints.known_addresses)
        # The launching process ends its own ranks. A joined worker needs a timeout, because no
        # process would end it.
        self.queue_client = ServerClient(
            [endpoints.queue_address],
            MAX_REPLY_BYTES,
            endpoints.keys or KeyPair.generate_pair(),
            trainer.world.timeout if self.is_joined else math.inf,
            REMINDER_SECONDS,
            "the training's work queue",
        )

    def process_tickets(self) -> Counter[str]:
        """Do tickets until the work queue is finished; return the number of each kind."""
        try:
            self.train_segments()
        except BaseException:
            if self.is_joined:
                self.leave_queue()
            raise
        finally:
            self.queue_client.close()
        return self.counts

    def iterate_segments(self) -> Iterator[Ticket]:
        """Yield the tickets of the work queue, until it has no more."""
        while (ticket := self.request_ticket(self.finished_ticket, self.report)).what != END:
            yield ticket

    def request_ticket(
        self, finished_ticket: dict[str, Any] | None, report: dict[str, Any]
    ) -> Ticket:
        """Request the next ticket.

        The work queue may take long to answer: it has no ticket while other workers still train.

        Args:
            finished_ticket: The ticket that was done, or None.
            report: The result of that ticket.

        Raises:
            StepFailed: If the answer is no ticket, or if there is none.
        """
        text = json.dumps([self.endpoints.number, finished_ticket, report]).encode()
        for _, header, rest in self.queue_client.send_requests(
            [(0, Header(MessageType.NEXT, self.endpoints.job), (text,))]
        ):
            if header.kind != MessageType.GIVEN:
                raise StepFailed("the work queue did not answer with a ticket")
            return Ticket(**json.loads(bytes(rest[0])))
        raise StepFailed("the work queue does not answer")

    def leave_queue(self) -> None:
        """Leave the work queue, so that another worker gets this worker's ticket at once."""
        self.queue_client.limit_waiting(LEAVE_TIMEOUT)
        with suppress(StepFailed):
            text = json.dumps([self.endpoints.number, None, {}]).encode()
            list(
                self.queue_client.send_requests(
                    [(0, Header(MessageType.LEAVE, self.endpoints.job), (text,))]
                )
            )

    def train_segment(self, segment: Ticket) -> bool:
        """Train on the samples of a ticket, if it has some.

        Args:
            segment: The ticket.

        Returns:
            True: the work queue decides on the end of the run.
        """
        if segment.what != TRAIN:
            return True
        state = self.training.state
        order = self.validated_run.inspection.order
        self.advance_schedule(segment.step)
        state.move_to(segment.step)
        state.use_replicas([segment.share])
        if (exchange := self.training.setup.exchange) is not None:
            assert isinstance(exchange, WorkerExchange)
            exchange.take_ticket(segment)
        else:
            self.training.use_exchange_options(
                replace(
                    self.training.options.exchange_options,
                    endpoints=replace(self.endpoints, ticket=segment),
                )
            )
        batch = make_rank_batch(
            order,
            segment.epoch,
            order.get_batch(segment.step % order.steps),
            state.division,
            state.replicas,
        )
        self.report = {}
        self.ticket_start = time.monotonic()
        batches = self.training.feed.iterate_batches(self.samples, [batch], 0)
        return self.train_batches(segment, batches)

    def end_step(self, segment: Ticket, result: StepResult, rate: float) -> bool:
        """Keep the result of a step for the work queue.

        Args:
            segment: The ticket.
            result: The result of the step.
            rate: The learning rate of the step.

        Returns:
            True: the work queue decides on the end of the run.
        """
        exchange = self.training.exchange
        assert isinstance(exchange, WorkerExchange)
        self.report = {
            "loss": result.loss,
            "weight": result.weight,
            "became": exchange.push_outcome,
            "version": exchange.version,
            "lr": rate,
        }
        if self.is_joined:
            self.report |= {
                "seconds": time.monotonic() - self.ticket_start,
                "sent": exchange.sent_bytes["gradients"]["bytes"],
            }
        return True

    def end_segment(self, segment: Ticket, start_time: float) -> bool:
        """Evaluate or save, if the ticket asks for it, and count the ticket.

        Args:
            segment: The ticket.
            start_time: The time at which the ticket began, in seconds of the record's clock.

        Returns:
            False: the work queue decides on the end of the run.
        """
        if segment.what == TEST:
            self.report = self.evaluate_ticket(segment)
        elif segment.what == KEEP:
            self.report = self.save_ticket(segment)
        self.finished_ticket = asdict(segment)
        self.counts[segment.what] += 1
        return False

    def advance_schedule(self, step: int) -> None:
        """Step the scheduler to the learning rate of a step."""
        # Here the servers make the steps.
        self.training.state.allow_early_scheduling()
        for number in range(self.rate_step, step if self.scheduler is not None else 0):
            self.training.draw_alike("schedule", number, self.scheduler.step)
        self.rate_step = max(self.rate_step, step)

    def evaluate_ticket(self, ticket: Ticket) -> dict[str, Any]:
        """Evaluate a part of the test set, and return the report."""
        assert self.test_dataset is not None
        self.ensure_exchange()
        result = self.trainer.evaluate_with_weight(
            self.test_dataset, self.validated_run.job.metric, part=(ticket.part, ticket.parts)
        )
        return {
            "sum": result["value"] * result["weight"] if result["weight"] else 0.0,
            "weight": result["weight"],
        }

    def ensure_exchange(self) -> None:
        """Set up the exchange if there was no step yet, as in a run that resumes with a test."""
        if self.training.setup.exchange is None:
            set_up_exchange(self.training)

    def save_ticket(self, ticket: Ticket) -> dict[str, Any]:
        """Save the model or a checkpoint, and return an empty report."""
        trainer = self.trainer
        self.ensure_exchange()
        self.advance_schedule(ticket.step)
        self.training.state.move_to(ticket.step)
        with trainer.world.stop.note_saving():
            if ticket.keep == "model":
                save_trained_model(trainer, self.folder / "model.safetensors")
            else:
                trainer.save(
                    self.folder,
                    resume_check.build_job_identity(
                        self.validated_run.job, self.validated_run.inspection
                    ),
                )
        return {}
