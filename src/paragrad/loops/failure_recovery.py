"""A synchronous training whose servers keep all there is to keep, so that any process of it may
die, and none of it is lost.

Workers are ranks of one world, as under `data`, and servers processes beside it. When a worker
dies, or waits for another in vain, all workers are ended; the servers say where they stand,
what one has made the others make too, and workers begin the next step in a new world. When a
server dies, everything goes back to the last step of which all servers have a snapshot, the
record too: the same steps are made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path

from paragrad.errors import RankFailed, StepFailed
from paragrad.launch import Launcher
from paragrad.launch.launcher import DEATH_GRACE_SECONDS
from paragrad.launch.process_pool import (
    PROCESS_DIED,
    TASK_DONE,
    TASK_FAILED,
    TASK_REPORTED,
    ProcessPool,
)
from paragrad.loops.queue_worker import MAX_REPLY_BYTES, run_queue_rank
from paragrad.loops.synchronous import Progress, train_rank
from paragrad.parallel.server.client import ServerClient
from paragrad.parallel.server.curve_keys import KeyPair
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.message_header import Header, MessageType
from paragrad.parallel.server.snapshot import find_common_step
from paragrad.parallel.server.worker_exchange import stop_servers
from paragrad.record.record import Recorder, truncate_torn_line
from paragrad.runtime.stop_signals import StopRequest
from paragrad.runtime.stragglers import is_peer_failure
from paragrad.trainer.checkpoint.checkpoint_files import (
    list_checkpoint_folders,
    read_folder_step,
    remove_partial_files,
)
from paragrad.validation.validate import ValidatedRun

POLL_SECONDS = 0.2  # seconds after which somebody looks whether the run is to stop
MAX_RESTARTS = 10  # times that workers may begin again without a step more
# seconds for a server to say where it stands: it may be writing a snapshot
ANSWER_SECONDS = 30.0


def run_recoverable_training(
    launcher: Launcher,
    validated_run: ValidatedRun,
    folder: Path,
    record: Recorder,
    stop_request: StopRequest,
    progress: Progress | None,
) -> str:
    """Train; how it ended: "finished" or "stopped". Raises RankFailed."""
    with ProcessPool(
        launcher,
        validated_run.threads,
        validated_run.settings.device,
        validated_run.settings.timeout,
    ) as crew:
        return RecoveryCoordinator(
            validated_run, folder, record, crew, stop_request, progress
        ).run_training()


class RecoveryCoordinator:
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
        self.validated_run = validated_run
        self.folder = folder
        self.record = record
        self.pool = pool
        self.stop_request = stop_request
        self.progress = progress
        size = validated_run.size
        servers = validated_run.resolved.servers
        # by number
        self.workers = range(size - servers)
        self.servers = range(size - servers, size)
        self.endpoints = ServerEndpoints(secrets.randbits(63), str(pool.folder), servers)
        self.statuses: dict[int, str] = {}
        self.failures: list[tuple[str, RankFailed]] = []  # who died or failed, of late
        self.cause_deadline = 0.0
        self.stop_sent = False
        # of workers; begun again since the furthest step was reached
        self.world_count = 0
        self.restarts = 0
        self.furthest_step = 0
        self.rank_error: RankFailed | None = None  # by a rank of itself, since then
        # when the first worker came to its end
        self.first_end = 0.0
        self.answer_seconds = min(validated_run.settings.timeout, ANSWER_SECONDS)

    def run_training(self) -> str:
        self.start_servers()
        self.start_workers()
        while len(self.statuses) < len(self.workers):
            self.poll_events()
        self.close_servers()
        return self.statuses[0]

    def start_servers(self) -> None:
        for number in self.servers:
            self.pool.start_task(
                number,
                run_queue_rank,
                self.validated_run,
                self.folder,
                self.record.origin,
                self.endpoints.assign_rank(number, number - len(self.workers)),
            )

    def start_workers(self) -> None:
        store = self.pool.folder / f"workers-{self.world_count}"
        self.world_count = self.world_count + 1
        self.statuses = {}
        self.stop_sent = False
        self.first_end = 0.0
        for number in self.workers:
            self.pool.start_task(
                number,
                train_rank,
                self.validated_run,
                self.folder,
                self.record.origin,
                self.endpoints.assign_rank(number),
                size=len(self.workers),
                store=store,
                backend=self.validated_run.backend,
            )

    def close_servers(self) -> None:
        """Servers end, which write into the record; who does not in time is left to be killed.
        All is saved by now.
        """
        with contextlib.suppress(StepFailed):
            stop_servers(self.endpoints, self.answer_seconds)
        until = time.monotonic() + self.answer_seconds
        while self.pool.members and time.monotonic() < until:
            for number in self.pool.wait_members(POLL_SECONDS):
                self.pool.receive_event(number)

    # ---- what comes --------------------------------------------------------------------------
    def poll_events(self) -> None:
        """Wait for what comes first, and do what it asks for. Raises RankFailed."""
        if self.stop_request.is_set() and not self.stop_sent:
            self.pool.request_stop(number for number in self.workers if number in self.pool.members)
            self.stop_sent = True
        for number in self.pool.wait_members(POLL_SECONDS):
            what, value = self.pool.receive_event(number)
            if what == TASK_DONE and number in self.workers:
                self.statuses[number] = value
                self.first_end = self.first_end or time.monotonic()
            elif what == TASK_REPORTED and self.progress:
                self.progress(value)
            elif what in (PROCESS_DIED, TASK_FAILED):
                self.cause_deadline = self.cause_deadline or time.monotonic() + DEATH_GRACE_SECONDS
                self.failures.append((what, value))
        if (
            self.first_end
            and time.monotonic() - self.first_end > self.validated_run.settings.timeout
            and not self.failures
        ):
            late = next(number for number in self.workers if number not in self.statuses)
            self.failures.append(
                (
                    PROCESS_DIED,
                    RankFailed("it does not come to its end, as the others have", rank=late),
                )
            )
        # until then the cause may show
        if self.failures and time.monotonic() > self.cause_deadline:
            self.restart_workers(self.select_cause())
            self.failures = []
            self.cause_deadline = 0.0

    def select_cause(self) -> RankFailed:
        """For which workers are to begin again: a death, before what others say who met it; or
        that somebody waited in vain. Raises what a rank has raised of itself.
        """
        deaths = [value for what, value in self.failures if what == PROCESS_DIED]
        raised = [
            value
            for what, value in self.failures
            if what == TASK_FAILED and not is_peer_failure(value.message)
        ]
        self.rank_error = raised[0] if raised else self.rank_error
        if raised and not deaths:
            raise raised[0]
        return deaths[0] if deaths else self.failures[0][1]

    def restart_workers(self, failure: RankFailed) -> None:
        self.restarts += 1
        if self.restarts > MAX_RESTARTS:
            raise self.rank_error or failure
        self.pool.kill_members(number for number in self.workers if number in self.pool.members)
        remove_partial_files(self.folder)
        step, last = self.agree_on_step(failure)
        if step > self.furthest_step:
            self.furthest_step = step
            self.restarts = 0
            self.rank_error = None
        self.endpoints = replace(self.endpoints, step=step, last=last)
        self.start_workers()

    def agree_on_step(self, failure: RankFailed) -> tuple[int, tuple[tuple[float, float], ...]]:
        """As `halted`; everything goes back where a server is gone, again where one that was
        started for it is. Raises RankFailed.
        """
        because = ""
        until = time.monotonic() + max(self.validated_run.settings.timeout, ANSWER_SECONDS)
        for _ in range(1 + MAX_RESTARTS):
            try:
                if because:
                    self.restore_snapshots(failure, because)
                    self.wait_for_servers(until)
                step, last = self.halt_servers()
            except StepFailed as error:
                because = str(error)
                continue
            if because:
                rewind_record(self.folder, len(self.workers), step)
            else:
                self.record_event(
                    "again", f"{failure}; all workers begin again with step {step}", step
                )
            return step, last
        raise failure.with_message(f"{failure.message}; and {because}")

    def wait_for_servers(self, deadline: float) -> None:
        """Wait for servers that were started: they read a snapshot, and write one, for as long
        as it takes. Raises StepFailed where one is gone by then, or does not come; RankFailed:
        what one raises.
        """
        while True:
            self.refuse_dead_servers()
            with contextlib.closing(
                ServerClient(
                    self.endpoints.server_addresses,
                    MAX_REPLY_BYTES,
                    KeyPair.generate_pair(),
                    5 * POLL_SECONDS,
                )
            ) as calling:
                try:
                    look = Header(MessageType.PROBE, self.endpoints.job)
                    list(
                        calling.send_requests(
                            (server, look, ()) for server in range(len(self.servers))
                        )
                    )
                    return
                except StepFailed:
                    if time.monotonic() > deadline:
                        raise

    def refuse_dead_servers(self) -> None:
        for number in self.pool.wait_members(0):
            what, value = self.pool.receive_event(number)
            if what == TASK_FAILED:
                raise value
        if gone := [
            number - len(self.workers) for number in self.servers if number not in self.pool.members
        ]:
            raise StepFailed(f"server(s) {', '.join(map(str, gone))} are gone")

    def halt_servers(self) -> tuple[int, tuple[tuple[float, float], ...]]:
        """(the step, (weight, loss) of every share of the one before) where all servers stand,
        without workers. Raises StepFailed where one is gone.
        """
        self.refuse_dead_servers()
        before = self.endpoints
        self.endpoints = replace(self.endpoints, job=secrets.randbits(63))
        with contextlib.closing(
            ServerClient(
                self.endpoints.server_addresses,
                MAX_REPLY_BYTES,
                KeyPair.generate_pair(),
                self.answer_seconds,
            )
        ) as calling:
            halt = Header(MessageType.HALT, before.job, version=self.endpoints.job)
            told = {
                server: json.loads(bytes(rest[0]))
                for server, _, rest in calling.send_requests(
                    (server, halt, ()) for server in range(before.servers)
                )
            }
            first = max(told.values(), key=lambda each: each["updates"])
            questions = (
                (
                    server,
                    Header(
                        MessageType.RESUME,
                        self.endpoints.job,
                        numbers=(float(each["updates"] < first["updates"]), *first["made"]),
                    ),
                    (),
                )
                for server, each in told.items()
            )
            stand = {header.version for _, header, _ in calling.send_requests(questions)}
        if stand != {first["updates"]}:
            raise StepFailed(f"servers stand at steps {sorted(stand)}")
        return first["updates"], tuple((weight, loss) for weight, loss in first["shares"])

    def restore_snapshots(self, failure: RankFailed, reason: str) -> None:
        """Servers begin with the last step of which all of them have a snapshot."""
        self.pool.kill_members(number for number in self.servers if number in self.pool.members)
        step = find_common_step(self.pool.folder, len(self.servers))
        if step is None:  # before the first one
            step = (
                self.validated_run.resume_checkpoint.step
                if self.validated_run.resume_checkpoint
                else 0
            )
        self.endpoints = replace(self.endpoints, job=secrets.randbits(63), step=step)
        self.record_event("back", f"{failure}: {reason}; everything goes back to step {step}", step)
        self.start_servers()

    def record_event(self, name: str, message: str, step: int) -> None:
        self.record.write_line("event", name=name, numbers={"step": step}, message=message)


def rewind_record(folder: Path, workers: int, step: int) -> None:
    """A run's record, and its checkpoints, are as they were before that step."""
    for number in range(workers):
        path = folder / f"rank-{number}.jsonl"
        kept = 0
        truncate_torn_line(path)
        for text in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            if (
                text.startswith((b'{"kind":"step"', b'{"kind":"spans"'))
                and json.loads(text)["step"] >= step
            ):
                os.truncate(path, kept)
                break
            kept += len(text)
    for later in list_checkpoint_folders(folder):
        if read_folder_step(later) > step:
            shutil.rmtree(later)
