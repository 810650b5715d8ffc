"""The launching process of a training in which workers come and go.

It starts processes and restarts them, and its work queue hands out the samples. All of this is one
loop, which waits for whatever comes first: a request to the queue, a message of a process, or its
end.

A worker that dies is replaced. If a worker is silent for too long, its ticket goes to another
worker. A server that dies restarts from its last snapshot. An exception that any of them raises
ends the run, as under every strategy.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from paragrad.errors import StepFailed
from paragrad.jobs.callback import EpochReport, StepReport
from paragrad.launch import Launcher
from paragrad.launch.process_pool import PROCESS_DIED, TASK_FAILED, ProcessPool
from paragrad.loops.best_test import BestTest
from paragrad.loops.callback_runner import CallbackRunner
from paragrad.loops.join_coordinator import JoinCoordinator, locate_share, write_step_line
from paragrad.loops.loop import Loop
from paragrad.loops.queue_worker import MAX_REPLY_BYTES, run_queue_rank
from paragrad.loops.synchronous import Progress, describe_run_start
from paragrad.parallel.server.curve_keys import SECRET_SUFFIX, Address, KeyPair, write_public_key
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.join_endpoint import parse_host_port
from paragrad.parallel.server.request_handler import ALREADY_APPLIED as APPLIED_BEFORE
from paragrad.parallel.server.sockets import Listener
from paragrad.parallel.server.work_queue import KEEP, TEST, TRAIN, Ticket, WorkQueue
from paragrad.parallel.server.worker_exchange import stop_servers
from paragrad.record.record import ENDED_EARLY, Recorder, read_lines
from paragrad.record.tensorboard import open_event_files
from paragrad.runtime.stop_signals import StopRequest
from paragrad.validation.validate import ValidatedRun

POLL_SECONDS = 0.2  # seconds at most between two checks for late workers
CLOSE_SECONDS = 30.0  # seconds at most for processes to end when everything is saved
# Restarts per process before the run fails, if no batch more is done.
RESTARTS_PER_PROCESS = 5


def run_queue_training(
    launcher: Launcher,
    validated_run: ValidatedRun,
    folder: Path,
    record: Recorder,
    stop_request: StopRequest,
    progress: Progress | None,
) -> str:
    """Train with a work queue.

    Args:
        launcher: starts the processes.

        validated_run: the run.

        folder: the folder of the run.

        record: the run's own record.

        stop_request: set when the run is to stop.

        progress: receives the progress of the run.

    Returns:
        "finished" or "stopped".

    Raises:
        RankFailed: a process failed.
    """
    with (
        contextlib.ExitStack() as exit_stack,
        ProcessPool(
            launcher,
            validated_run.threads,
            validated_run.settings.device,
            validated_run.settings.timeout,
        ) as pool,
    ):
        coordinator = QueueCoordinator(validated_run, folder, record, pool, stop_request, progress)
        exit_stack.callback(coordinator.write_missing_steps)  # when no process writes any more
        return coordinator.run_training()


class QueueCoordinator(Loop[int]):
    """Coordinates one training with a work queue.

    Attributes:
        strategy: the resolved strategy.

        validated_run: the run.

        folder: the folder of the run.

        record: the run's own record.

        pool: the processes of workers and servers.

        stop_request: set when the run is to stop.

        progress: receives the progress of the run.

        endpoints: where workers and servers connect.

        order: the order of the samples.

        shares: shares of a global batch.

        queue: the work queue.

        next_process: the number of the next process.

        listener: receives requests to the queue.

        address: where workers from other hosts join; None if they may not.

        restarts: processes that were restarted, in all.

        restarts_without_progress: restarts since so many shares were done.

        furthest_done: done shares when `restarts_without_progress` was last reset.

        servers: which server a process is, by the number of the process.

        ticket_count: the number of the next training ticket.

        test_totals: sum and weight of the current test.

        close_seconds: seconds at most that processes may take to end.

        loss: the last reported loss.

        done_shares: shares that are done.

        reported_at: when progress was last reported.

        shown_step: the step of that report.

        unrecorded_shares: shares that servers had already applied, with the reports and the workers
            that had them. Their step lines may be missing.

        start: (epoch, step of it) at which the training starts.

        step: steps of the training with tickets given out, in all.

        saved_items: (kind, step) of what was saved.

        write_events: writes TensorBoard values of a step.

        overdue_since: since when workers are late, by number.

        has_requested_life: whether the processes report that they come further.

        callbacks: calls the job's callbacks.

        best_test: the best test so far.
    """

    def __init__(
        self,
        validated_run: ValidatedRun,
        folder: Path,
        record: Recorder,
        pool: ProcessPool,
        stop_request: StopRequest,
        progress: Progress | None,
    ) -> None:
        strategy: Any = validated_run.resolved
        self.strategy = strategy
        self.validated_run = validated_run
        self.folder = folder
        self.record = record
        self.pool = pool
        self.stop_request = stop_request
        self.progress = progress
        listen = validated_run.settings.listen
        allow = validated_run.settings.allow
        self.endpoints = ServerEndpoints(
            secrets.randbits(63),
            str(pool.folder),
            self.strategy.servers,
            host_port=parse_host_port("--listen", listen) if listen else None,
        )
        self.order = validated_run.inspection.order
        self.shares = self.strategy.share_count
        self.queue = WorkQueue(
            self.endpoints.job,
            self.strategy.staleness_bound,
            self.strategy.required_shares if self.strategy.is_synchronous else None,
            validated_run.settings.timeout,
            self.handle_report,
        )
        resumed = validated_run.resume_checkpoint
        self.queue.count_updates_from(resumed.step if resumed else 0)
        self.next_process = self.strategy.size
        join_endpoint = self.endpoints.build_join_endpoint(None, Path(allow)) if allow else None
        if join_endpoint is not None:
            self.queue.admit_joins(
                JoinCoordinator(
                    validated_run,
                    folder,
                    record,
                    self.endpoints,
                    join_endpoint.allowed_folder,
                    self.allocate_number,
                    self.record_event,
                )
            )
        self.listener = Listener(
            MAX_REPLY_BYTES,
            None,
            KeyPair.generate_pair(),
            self.endpoints.queue_address,
            join_endpoint,
        )
        self.address = join_endpoint.address if join_endpoint is not None else None
        self.restarts = 0
        self.restarts_without_progress = 0
        self.furthest_done = 0
        self.servers: dict[int, int] = {}
        self.ticket_count = (
            validated_run.resume_checkpoint.step if validated_run.resume_checkpoint else 0
        ) * self.shares
        self.test_totals = {"sum": 0.0, "weight": 0.0}
        self.close_seconds = min(validated_run.settings.timeout, CLOSE_SECONDS)
        self.loss = 0.0
        self.done_shares = 0
        self.reported_at = -1.0
        self.shown_step = 0
        self.unrecorded_shares: list[tuple[Ticket, dict[str, Any], list[int]]] = []
        self.step = resumed.step if resumed else 0
        self.start = (0, 0)
        self.saved_items = (
            {("checkpoint", self.step)}
            if validated_run.resume_checkpoint
            else set[tuple[str, int]]()
        )
        self.write_events: Callable[..., None] = lambda step, **values: None
        self.overdue_since: dict[int, float] = {}
        self.has_requested_life = False
        # the run has a copy: what callbacks open cannot be sent to other processes
        self.callbacks = CallbackRunner(copy.deepcopy(validated_run.job.callbacks))
        self.best_test = BestTest(folder, resumed)

    def run_training(self) -> str:
        """Train until the end; returns "finished" or "stopped"."""
        try:
            for number in range(self.strategy.size):
                server = number - self.strategy.workers if self.strategy.is_server(number) else None
                self.start_process(number, server)
            if self.address is not None:
                self.announce_join_address(self.address)
            with open_event_files(
                self.folder if self.validated_run.settings.tensorboard else None
            ) as self.write_events:
                status = self.follow_training()
            self.queue.end_training()
            self.close_processes()
        finally:
            self.listener.close()
        self.record.write_line("handed_out", refused=self.queue.refusals, anew=self.restarts)
        return status

    def allocate_number(self) -> int:
        """Allocate the number of one more process."""
        self.next_process += 1
        return self.next_process - 1

    def announce_join_address(self, address: Address) -> None:
        """Record and print how workers from other hosts join."""
        assert address.key is not None
        key = self.folder / "training.key"
        write_public_key(address.key, key)
        instructions = (
            f"others join by: paragrad join {address.endpoint} JOB --server-key {key} --key "
            f"ME{SECRET_SUFFIX}"
        )
        self.record_event("open", instructions)
        print(f"paragrad: {instructions}", file=sys.stderr, flush=True)

    def start_process(self, number: int, server: int | None) -> None:
        """Start a worker or a server.

        Args:
            number: the number of the process.
            server: which server it is; None for a worker.
        """
        if server is not None:
            self.servers[number] = server
        self.pool.start_task(
            number,
            run_queue_rank,
            self.validated_run,
            self.folder,
            self.record.origin,
            self.endpoints.assign_rank(number, server),
        )

    def follow_training(self) -> str:
        """Train, and call the callbacks at the beginning and at the end.

        Returns:
            "finished" or "stopped".
        """
        job, settings = self.validated_run.job, self.validated_run.settings
        steps = min(settings.limit or 2**62, job.epochs * self.order.steps)
        start = describe_run_start(self.validated_run, self.folder, steps)
        if settings.keep:
            self.best_test.write(writes=True)
        status = "finished"
        with self.callbacks.follow_run(start, lambda: status):
            status = self.train_epochs()
            if self.callbacks.end_reason is not None:
                self.record_event(ENDED_EARLY, self.callbacks.end_reason)
        return status

    # ---- epochs and tickets ------------------------------------------------------------------
    def train_epochs(self) -> str:
        """Train all epochs, with a test after each and checkpoints, as `Training.run` does.

        Returns:
            "finished" or "stopped".
        """
        save = self.validated_run.settings.save
        first, start = divmod(self.step, self.order.steps)
        self.start = first, start
        # a run that stopped with the last step of an epoch has not tested it
        is_over = self.has_enough_steps or (
            first > 0 and not start and self.finish_saved_epoch(first - 1)
        )
        if not is_over:
            self.train_segments()
        status = "stopped" if self.stop_request.is_set() else "finished"
        if save or status == "stopped":
            self.save_once("checkpoint")
        if status == "finished":
            self.save_once("model")
        return status

    @property
    def has_enough_steps(self) -> bool:
        """Whether as many steps are made as the settings request."""
        return self.validated_run.settings.has_reached_limit(self.step)

    @property
    def is_ending(self) -> bool:
        """Whether no further steps are given out."""
        return self.stop_request.is_set() or self.callbacks.wants_end or self.has_enough_steps

    def read_clock(self) -> float:
        """Return the seconds since the start of the run, as the record counts them."""
        return self.record.now()

    def iterate_segments(self) -> Iterator[int]:
        """Yield the epochs."""
        yield from range(self.start[0], self.validated_run.job.epochs)

    def train_segment(self, segment: int) -> bool:
        """Train an epoch's batches, share by share.

        Args:
            segment: the epoch.

        Returns:
            False if the run ends before the epoch's test, with a whole batch.
        """
        save = self.validated_run.settings.save
        epoch = segment
        end = (epoch + 1) * self.order.steps
        self.step = epoch * self.order.steps + (self.start[1] if epoch == self.start[0] else 0)
        while self.step < end and not self.is_ending:
            samples = len(self.order.get_batch(self.step % self.order.steps))
            # Ticket numbers are consecutive: servers remember up to which all are applied.
            for share in range(min(self.shares, samples)):
                self.queue.add_tickets([Ticket(TRAIN, self.ticket_count, epoch, self.step, share)])
                self.ticket_count += 1
            self.step += 1
            # enough tickets wait that every worker gets one at once
            while len(self.queue.waiting_tickets) >= 3 * self.shares:
                self.poll_events(epoch)
            if save and self.step % save == 0:
                self.wait_until_idle(epoch)  # a checkpoint is of whole steps
                self.save_once("checkpoint")
        self.wait_until_idle(epoch)
        return not self.is_ending

    def end_segment(self, segment: int, start_time: float) -> bool:
        """Test after an epoch, and record it.

        Args:
            segment: the epoch.
            start_time: when it began, in seconds of the record's clock.

        Returns:
            Whether the goal is reached.
        """
        test = self.run_test(segment)
        self.record.write_line(
            "epoch",
            epoch=segment,
            test=test,
            start=round(start_time, 6),
            seconds=round(self.record.now() - start_time, 6),
        )
        return test is not None and self.handle_test(segment, test)

    def handle_test(self, epoch: int, test: dict[str, float]) -> bool:
        """Report a test, and save if it is the best one.

        Args:
            epoch: the epoch.
            test: the result of the test.

        Returns:
            Whether the goal is reached or a callback ends the run.
        """
        job = self.validated_run.job
        self.write_events(self.step, **{f"test {job.metric_name}": test["value"]})
        if self.progress is not None:
            self.progress(
                {
                    "epoch": epoch,
                    "step": self.step,
                    "steps": job.epochs * self.order.steps,
                    "loss": self.loss,
                    "metric": job.metric_name,
                    "test": test["value"],
                }
            )
        report = EpochReport(
            self.step, epoch, job.metric_name, test["value"], job.wants_lower_tests
        )
        if self.validated_run.settings.keep == "best" and self.best_test.is_beaten_by(report):
            self.save_once("checkpoint")
            self.best_test.keep(report, writes=True)
        return self.callbacks.observe_test(report) or self.validated_run.settings.has_reached_goal(
            test, job
        )

    def finish_saved_epoch(self, epoch: int) -> bool:
        """Finish an epoch after its last step was saved.

        It is tested unless the saved run has tested it.

        Args:
            epoch: the epoch.

        Returns:
            Whether the goal is reached.
        """
        line = (
            self.validated_run.resume_checkpoint
            and self.validated_run.resume_checkpoint.find_epoch_record(epoch)
        )
        if not line:
            return self.end_segment(epoch, self.record.now())
        return self.validated_run.settings.has_reached_goal(line["test"], self.validated_run.job)

    def save_once(self, what: str) -> None:
        """Save a checkpoint or the model, once for each step."""
        if (what, self.step) not in self.saved_items:
            self.saved_items.add((what, self.step))
            self.run_tickets([Ticket(KEEP, step=self.step, keep=what)])

    def run_test(self, epoch: int) -> dict[str, float] | None:
        """Test the model on all workers.

        Returns:
            The value and its weight; None if the job has no test.
        """
        if self.validated_run.job.test is None:
            return None
        self.test_totals = {"sum": 0.0, "weight": 0.0}
        parts = min(self.strategy.workers, self.validated_run.inspection.test_samples)
        self.run_tickets(
            [Ticket(TEST, epoch=epoch, part=part, parts=parts) for part in range(parts)]
        )
        weight = self.test_totals["weight"]
        return {
            "value": self.test_totals["sum"] / weight if weight else float("nan"),
            "weight": weight,
        }

    def run_tickets(self, tickets: list[Ticket]) -> None:
        """Give out tickets, and wait until they are done."""
        self.queue.add_tickets(tickets)
        self.wait_until_idle(None)

    def wait_until_idle(self, epoch: int | None) -> None:
        """Wait until all tickets are done."""
        while not self.queue.is_idle:
            self.poll_events(epoch)

    def handle_report(self, number: int, ticket: Ticket, report: dict[str, Any]) -> None:
        """Handle the report of a finished ticket.

        Args:
            number: the worker.
            ticket: the ticket.
            report: values that the worker reports.
        """
        if ticket.what == TEST:
            self.test_totals = {
                name: self.test_totals[name] + report.get(name, 0.0) for name in self.test_totals
            }
        elif ticket.what == TRAIN:
            self.done_shares, self.loss = self.done_shares + 1, report.get("loss", self.loss)
            if ticket.share == 0:  # once for each batch
                self.write_events(
                    ticket.step + 1,
                    **{name: report[name] for name in ("loss", "lr") if name in report},
                )
                if "loss" in report:
                    self.callbacks.observe_step(
                        StepReport(ticket.step + 1, ticket.epoch, report["loss"], report["lr"])
                    )
            if report.get("became") == APPLIED_BEFORE:
                self.unrecorded_shares.append(
                    (ticket, report, [*self.queue.earlier_workers.get(ticket.number, ()), number])
                )
                self.write_missing_steps(ended_workers_only=True)

    # ---- events ------------------------------------------------------------------------------
    def poll_events(self, epoch: int | None) -> None:
        """Wait for the first event, and handle it.

        Args:
            epoch: the epoch of the progress; None reports no progress.
        """
        poller = zmq.Poller()
        for socket in self.listener.poll_sockets:
            poller.register(socket, zmq.POLLIN)
        numbers = self.pool.descriptors
        for descriptor in numbers:
            poller.register(descriptor, zmq.POLLIN)
        self.queue.hand_out_tickets(self.listener)
        ready = dict(poller.poll(int(1000 * POLL_SECONDS)))
        while (frames := self.listener.receive_message(0)) is not None:
            self.queue.handle_message(self.listener, frames)
        self.queue.hand_out_tickets(self.listener)
        for number in filter(
            None, map(self.queue.drop_connection, self.listener.take_lost_connections())
        ):
            if not self.queue.is_ended:
                self.record_event(
                    "gone",
                    f"worker {number}, which joined, is not connected any more; other workers get "
                    "its unfinished work",
                    rank=number,
                )
        for number in {numbers[each] for each in ready if each in numbers}:
            self.handle_process_event(number)
        for number in self.queue.drop_late_workers():
            self.record_event(
                "late",
                f"worker {number} worked on its samples for longer than {self.queue.limit:g} s; "
                "other workers get them",
                rank=number,
            )
            self.overdue_since[number] = time.monotonic()
        self.kill_overdue()
        if self.stop_request.is_set() and not self.has_requested_life:
            self.has_requested_life = True
            self.pool.request_life(self.pool.members)
        self.report_progress(epoch)

    def handle_process_event(self, number: int) -> None:
        """Handle a message or the end of a process.

        Args:
            number: the number of the process.

        Raises:
            RankFailed: the process raised, or too many restarts made no progress.
        """
        kind, value = self.pool.receive_event(number)
        if kind == TASK_FAILED:
            raise value
        if kind != PROCESS_DIED:
            return
        if value.rank is None:
            raise value  # the fork server died, and all ranks with it
        self.restarts = self.restarts + 1
        self.restarts_without_progress = self.restarts_without_progress + 1
        if self.done_shares >= self.furthest_done + self.shares:
            self.furthest_done = self.done_shares
            self.restarts_without_progress = 0
        if self.restarts_without_progress > RESTARTS_PER_PROCESS * self.strategy.size:
            raise value
        server = self.servers.get(number)
        if server is None:
            self.queue.drop_worker(number)
            if not self.queue.is_ended:
                replacement = self.allocate_number()
                self.record_event(
                    "replaced", f"{value}; worker {replacement} replaces it", rank=number
                )
                self.start_process(replacement, None)
        else:
            self.record_event(
                "again",
                f"{value}; server {server} is started again from its last snapshot",
                rank=number,
            )
            self.queue.reset_updates()
            self.start_process(number, server)

    def kill_overdue(self) -> None:
        """Kill late workers if the others are too few to make a step.

        A worker is killed if it has not come back within one more limit. Others replace it.
        """
        self.overdue_since = {
            number: since
            for number, since in self.overdue_since.items()
            if number in self.pool.members and number not in self.queue.workers
        }
        if (
            not self.strategy.is_synchronous
            or len(self.queue.workers) >= self.strategy.required_shares
        ):
            return
        for number in [
            each
            for each, since in self.overdue_since.items()
            if time.monotonic() - since > self.queue.limit
        ]:
            self.pool.members[number].send_signal(signal.SIGKILL)
            del self.overdue_since[number]

    def write_missing_steps(self, ended_workers_only: bool = False) -> None:
        """Write step lines of shares that servers had applied when a worker sent them again.

        The worker that first sent such a share may have died, or left, before it wrote a line.

        Args:
            ended_workers_only: leave out shares of workers that may still write their line.
        """

        @functools.cache
        def read_written_places(number: int) -> set[tuple[int, tuple[Any, ...]]]:
            lines = read_lines(self.folder / f"rank-{number}.jsonl", spans=False)
            return {
                (line["step"], tuple(map(tuple, line["order"])))
                for line in lines
                if line["kind"] == "step"
            }

        shares, self.unrecorded_shares = self.unrecorded_shares, []
        for ticket, report, workers in shares:
            # the last one sent the share again, and writes no line
            if ended_workers_only and any(each in self.pool.members for each in workers[:-1]):
                self.unrecorded_shares.append((ticket, report, workers))
                continue
            place = (
                ticket.step,
                tuple(map(tuple, locate_share(self.validated_run, ticket))),
            )
            if not any(place in read_written_places(number) for number in workers):
                write_step_line(
                    self.folder, self.record.origin, workers[0], self.validated_run, ticket, report
                )

    def record_event(self, name: str, message: str, **numbers: float) -> None:
        """Write an event into the record.

        Args:
            name: the kind of event.
            message: the event in words.
            **numbers: numbers of the event, such as its rank.
        """
        self.record.write_line("event", name=name, numbers=numbers, message=message)

    def report_progress(self, epoch: int | None) -> None:
        """Report progress, at most ten times a second."""
        now = self.record.now()
        step = self.done_shares // self.shares
        steps = self.validated_run.job.epochs * self.order.steps
        if self.progress is None or epoch is None or step in (0, self.shown_step):
            return
        if now - self.reported_at > 0.1 or step == steps:
            self.reported_at = now
            self.shown_step = step
            self.progress({"epoch": epoch, "step": step, "steps": steps, "loss": self.loss})

    # ---- the end -----------------------------------------------------------------------------
    def close_processes(self) -> None:
        """End the workers, then the servers.

        A process that does not end in time is killed later.
        """
        workers = [number for number in self.pool.members if number not in self.servers]
        self.wait_for_exit(workers)
        # a server that has ended by now has nothing more to report
        with contextlib.suppress(StepFailed):
            stop_servers(self.endpoints, self.close_seconds)
        self.wait_for_exit(list(self.servers))

    def wait_for_exit(self, numbers: list[int]) -> None:
        """Handle events until these processes end, at most `close_seconds`."""
        end = time.monotonic() + self.close_seconds
        while time.monotonic() < end and any(number in self.pool.members for number in numbers):
            self.poll_events(None)
