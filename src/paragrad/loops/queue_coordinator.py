"""A training whose workers come and go, from this side: processes are started, and started
anew; the office hands out samples.

All of it is one loop in the launching process, which waits for whatever comes first: a question
to the office, a word of a process, or its end. A worker that dies is replaced, and of one that
is silent for too long the ticket is somebody else's; a server that dies is started again from
its last snapshot. What any of them raises ends the run, as under every strategy.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from paragrad.errors import StepFailed
from paragrad.launch import Launcher
from paragrad.launch.process_pool import PROCESS_DIED, TASK_FAILED, ProcessPool
from paragrad.loops.join_coordinator import JoinCoordinator, locate_share, write_step_line
from paragrad.loops.queue_worker import MAX_REPLY_BYTES, run_queue_rank
from paragrad.loops.synchronous import Progress
from paragrad.parallel.server.curve_keys import SECRET_SUFFIX, Address, KeyPair, write_public_key
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.join_endpoint import parse_host_port
from paragrad.parallel.server.request_handler import ALREADY_APPLIED as APPLIED_BEFORE
from paragrad.parallel.server.sockets import Listener
from paragrad.parallel.server.work_queue import KEEP, TEST, TRAIN, Ticket, WorkQueue
from paragrad.parallel.server.worker_exchange import stop_servers
from paragrad.record.record import Recorder, read_lines
from paragrad.record.tensorboard import open_event_files
from paragrad.runtime.stop_signals import StopRequest
from paragrad.validation.validate import ValidatedRun

POLL_SECONDS = 0.2  # seconds after which somebody looks whether a worker is late
CLOSE_SECONDS = 30.0  # seconds at most for processes to end in, when all is saved
# times as many processes as there are may be started anew while no batch more is done
RESTARTS_PER_PROCESS = 5


def run_queue_training(
    launcher: Launcher,
    validated_run: ValidatedRun,
    folder: Path,
    record: Recorder,
    stop_request: StopRequest,
    progress: Progress | None,
) -> str:
    """Train; how it ended: "finished" or "stopped". Raises RankFailed."""
    with (
        contextlib.ExitStack() as at_last,
        ProcessPool(
            launcher,
            validated_run.threads,
            validated_run.settings.device,
            validated_run.settings.timeout,
        ) as crew,
    ):
        run = QueueCoordinator(validated_run, folder, record, crew, stop_request, progress)
        at_last.callback(run.write_missing_steps)  # when nobody writes any more
        return run.run_training()


class QueueCoordinator:
    """One training."""

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
        self.queue.updates_made = (
            validated_run.resume_checkpoint.step if validated_run.resume_checkpoint else 0
        )
        self.next_process = self.strategy.size  # the next number of a process
        entrance = self.endpoints.build_join_endpoint(None, Path(allow)) if allow else None
        if entrance is not None:
            self.queue.join_handler = JoinCoordinator(
                validated_run,
                folder,
                record,
                self.endpoints,
                entrance.allowed_folder,
                self.allocate_number,
                self.record_event,
            )
        self.listener = Listener(
            MAX_REPLY_BYTES, None, KeyPair.generate_pair(), self.endpoints.queue_address, entrance
        )
        self.address = entrance.address if entrance is not None else None
        # started anew: in all, and since so many shares were done
        self.restarts = 0
        self.restarts_without_progress = 0
        self.furthest_done = 0
        # number of a process -> which server it is
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
        # of which servers had the share; who had it
        self.unrecorded_shares: list[tuple[Ticket, dict[str, Any], list[int]]] = []
        # of the training: steps that were given out, in all
        self.step = self.queue.updates_made
        self.saved_items = (
            {("checkpoint", self.step)}
            if validated_run.resume_checkpoint
            else set[tuple[str, int]]()
        )
        self.write_events: Callable[..., None] = lambda step, **values: None
        self.overdue_since: dict[int, float] = {}  # since when workers are late

    def run_training(self) -> str:
        try:
            for number in range(self.strategy.size):
                server = number - self.strategy.workers if self.strategy.is_server(number) else None
                self.start_process(number, server)
            if self.address is not None:
                self.announce_join_address(self.address)
            with open_event_files(
                self.folder if self.validated_run.settings.tensorboard else None
            ) as self.write_events:
                status = self.train_epochs()
            self.queue.is_ended = True
            self.close_processes()
        finally:
            self.listener.close()
        self.record.write_line("handed_out", refused=self.queue.refusals, anew=self.restarts)
        return status

    def allocate_number(self) -> int:
        """Of one more process."""
        self.next_process += 1
        return self.next_process - 1

    def announce_join_address(self, address: Address) -> None:
        """How others join: in the record, and to whoever started it."""
        assert address.key is not None
        key = self.folder / "office.key"
        write_public_key(address.key, key)
        said = (
            f"others join by: paragrad join {address.endpoint} JOB --server-key {key} --key "
            f"ME{SECRET_SUFFIX}"
        )
        self.record_event("open", said)
        print(f"paragrad: {said}", file=sys.stderr, flush=True)

    def start_process(self, number: int, server: int | None) -> None:
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

    # ---- what is to be done ------------------------------------------------------------------
    def train_epochs(self) -> str:
        """As `Training.run` has it: a test after each, checkpoints, and how the training
        ended.
        """
        checked, save = self.validated_run, self.validated_run.settings.save
        first, start = divmod(self.step, self.order.steps)
        # a run that was stopped with an epoch's last step made no test of it
        over = self.has_enough_steps or (
            first > 0 and not start and self.finish_saved_epoch(first - 1)
        )
        for epoch in range(first, checked.job.epochs) if not over else ():
            begun = self.record.now()
            if not self.train_epoch(epoch, start if epoch == first else 0) or self.finish_epoch(
                epoch, begun
            ):
                break
        status = "stopped" if self.stop_request.is_set() else "finished"
        if save or status == "stopped":
            self.save_once("checkpoint")
        if status == "finished":
            self.save_once("model")
        return status

    @property
    def has_enough_steps(self) -> bool:
        """Are as many steps made as were asked for?"""
        return self.validated_run.settings.has_reached_limit(self.step)

    def train_epoch(self, epoch: int, start: int) -> bool:
        """The epoch's batches from there on, share by share. False where the run ends before
        the epoch's test, with a whole batch.
        """
        save = self.validated_run.settings.save
        end = (epoch + 1) * self.order.steps
        self.step = epoch * self.order.steps + start
        while self.step < end and not self.stop_request.is_set() and not self.has_enough_steps:
            samples = len(self.order.get_batch(self.step % self.order.steps))
            # numbers follow each other: servers remember where from
            for share in range(min(self.shares, samples)):
                self.queue.add_tickets([Ticket(TRAIN, self.ticket_count, epoch, self.step, share)])
                self.ticket_count += 1
            self.step += 1
            # somebody can always be given something
            while len(self.queue.waiting_tickets) >= 3 * self.shares:
                self.poll_events(epoch)
            if save and self.step % save == 0:
                self.wait_until_idle(epoch)  # what is kept is of whole steps
                self.save_once("checkpoint")
        self.wait_until_idle(epoch)
        return not self.stop_request.is_set() and not self.has_enough_steps

    def finish_epoch(self, epoch: int, start: float) -> bool:
        """The test after an epoch; True where the goal is reached."""
        test = self.run_test(epoch)
        self.record.write_line(
            "epoch",
            epoch=epoch,
            test=test,
            start=round(start, 6),
            seconds=round(self.record.now() - start, 6),
        )
        if test is not None:
            self.write_events(
                self.step, **{f"test {self.validated_run.job.metric_name}": test["value"]}
            )
        return self.validated_run.settings.has_reached_goal(test)

    def finish_saved_epoch(self, epoch: int) -> bool:
        """Going on from the last step of an epoch: its test, unless the run that was saved made
        it; True where the goal is reached.
        """
        line = (
            self.validated_run.resume_checkpoint
            and self.validated_run.resume_checkpoint.find_epoch_record(epoch)
        )
        if not line:
            return self.finish_epoch(epoch, self.record.now())
        return self.validated_run.settings.has_reached_goal(line["test"])

    def save_once(self, what: str) -> None:
        """Once of a step."""
        if (what, self.step) not in self.saved_items:
            self.saved_items.add((what, self.step))
            self.run_tickets([Ticket(KEEP, step=self.step, keep=what)])

    def run_test(self, epoch: int) -> dict[str, float] | None:
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
        self.queue.add_tickets(tickets)
        self.wait_until_idle(None)

    def wait_until_idle(self, epoch: int | None) -> None:
        """Wait until all is done that was given."""
        while not self.queue.is_idle:
            self.poll_events(epoch)

    def handle_report(self, number: int, ticket: Ticket, report: dict[str, Any]) -> None:
        if ticket.what == TEST:
            self.test_totals = {
                name: self.test_totals[name] + report.get(name, 0.0) for name in self.test_totals
            }
        elif ticket.what == TRAIN:
            self.done_shares, self.loss = self.done_shares + 1, report.get("loss", self.loss)
            if ticket.share == 0:  # one of those that make a batch
                self.write_events(
                    ticket.step + 1,
                    **{name: report[name] for name in ("loss", "lr") if name in report},
                )
            if report.get("became") == APPLIED_BEFORE:
                self.unrecorded_shares.append(
                    (ticket, report, [*self.queue.earlier_workers.get(ticket.number, ()), number])
                )

    # ---- what comes --------------------------------------------------------------------------
    def poll_events(self, epoch: int | None) -> None:
        """Wait for what comes first, and do what it asks for."""
        poller = zmq.Poller()
        for socket in self.listener.poll_sockets:
            poller.register(socket, zmq.POLLIN)
        whose = self.pool.descriptors
        for descriptor in whose:
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
                    f"worker {number}, which joined, is not reached any more; others get what it "
                    f"was at",
                    rank=number,
                )
        for number in {whose[each] for each in ready if each in whose}:
            self.handle_process_event(number)
        for number in self.queue.drop_late_workers():
            self.record_event(
                "late",
                f"worker {number} was at its samples for longer than {self.queue.limit:g} s; "
                f"others get "
                "them",
                rank=number,
            )
            self.overdue_since[number] = time.monotonic()
        self.kill_overdue()
        self.report_progress(epoch)

    def handle_process_event(self, number: int) -> None:
        """A process said something, or is gone. Raises RankFailed."""
        what, value = self.pool.receive_event(number)
        if what == TASK_FAILED:
            raise value
        if what != PROCESS_DIED:
            return
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
                another = self.allocate_number()
                self.record_event(
                    "replaced", f"{value}; worker {another} is there for it", rank=number
                )
                self.start_process(another, None)
        else:
            self.record_event(
                "again",
                f"{value}; server {server} is started again from its last snapshot",
                rank=number,
            )
            self.queue.reset_updates()
            self.start_process(number, server)

    def kill_overdue(self) -> None:
        """Where those who are left are too few to make a step, and nobody who is late came back
        within the limit once more, others come for them.
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

    def write_missing_steps(self) -> None:
        """The lines of shares that servers had when who came with them asked: whoever had
        brought them first may have died, or left, before it wrote one.
        """

        @functools.cache
        def written(number: int) -> set[tuple[int, ...]]:
            lines = read_lines(self.folder / f"rank-{number}.jsonl", spans=False)
            return {(line["step"], *line["order"]) for line in lines if line["kind"] == "step"}

        for ticket, said, who in self.unrecorded_shares:
            place = (ticket.step, *locate_share(self.validated_run, ticket))
            if not any(place in written(number) for number in who):
                write_step_line(
                    self.folder, self.record.origin, who[0], self.validated_run, ticket, said
                )

    def record_event(self, name: str, message: str, **numbers: float) -> None:
        self.record.write_line("event", name=name, numbers=numbers, message=message)

    def report_progress(self, epoch: int | None) -> None:
        now = self.record.now()
        step = self.done_shares // self.shares
        steps = self.validated_run.job.epochs * self.order.steps
        if self.progress is None or epoch is None or step in (0, self.shown_step):
            return
        if now - self.reported_at > 0.1 or step == steps:
            self.reported_at = now
            self.shown_step = step
            self.progress({"epoch": epoch, "step": step, "steps": steps, "loss": self.loss})

    # ---- its end -----------------------------------------------------------------------------
    def close_processes(self) -> None:
        """Workers end, then servers; who does not in time is left to be killed."""
        workers = [number for number in self.pool.members if number not in self.servers]
        self.wait_for_exit(workers)
        # one that is gone by now has told all that it had to tell
        with contextlib.suppress(StepFailed):
            stop_servers(self.endpoints, self.close_seconds)
        self.wait_for_exit(list(self.servers))

    def wait_for_exit(self, numbers: list[int]) -> None:
        end = time.monotonic() + self.close_seconds
        while time.monotonic() < end and any(number in self.pool.members for number in numbers):
            self.poll_events(None)
