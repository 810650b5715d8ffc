"""Recovery of a synchronous training in which any process may die: nothing is lost.

The servers hold all state. Workers are ranks of one world, as under `data`, and servers are
processes beside it. When a worker dies, or waits for another in vain, all workers are ended. The
servers report their steps; an update that one has made is made by the others, too. Then workers
begin the next step in a new world.

When a server dies, everything goes back to the last step of which all servers have a snapshot, the
record too. The same steps are then made again.
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

POLL_SECONDS = 0.2  # seconds at most between two checks for a stop request
MAX_RESTARTS = 10  # restarts of the workers without a further step
# seconds for a server to report its step; it may be writing a snapshot
ANSWER_SECONDS = 30.0


def run_recoverable_training(
    launcher: Launcher,
    validated_run: ValidatedRun,
    folder: Path,
    record: Recorder,
    stop_request: StopRequest,
    progress: Progress | None,
) -> str:
    """Train, and recover from the death of any process.

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
        RankFailed: a process raised, or too many restarts made no progress.
    """
    with ProcessPool(
        launcher,
        validated_run.threads,
        validated_run.settings.device,
        validated_run.settings.timeout,
    ) as pool:
        return RecoveryCoordinator(
            validated_run, folder, record, pool, stop_request, progress
        ).run_training()


class RecoveryCoordinator:
    """Coordinates one training that recovers from failures.

    Attributes:
        validated_run: the run.

        folder: the folder of the run.

        record: the run's own record.

        pool: the processes of workers and servers.

        stop_request: set when the run is to stop.

        progress: receives the progress of the run.

        workers: numbers of the worker processes.

        servers: numbers of the server processes.

        endpoints: where workers and servers connect.

        statuses: how each finished worker ended.

        failures: recent deaths and exceptions: (PROCESS_DIED or TASK_FAILED, the error).

        cause_deadline: when the cause of these failures is decided; 0 without failures.

        stop_sent: whether the workers have received the stop request.

        world_count: worlds of workers so far.

        restarts: restarts since the furthest step was reached.

        furthest_step: the furthest step so far.

        rank_error: the error that a rank raised since then.

        first_end: when the first worker ended; 0 before.

        answer_seconds: seconds at most that a server may take to answer.
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
        self.validated_run = validated_run
        self.folder = folder
        self.record = record
        self.pool = pool
        self.stop_request = stop_request
        self.progress = progress
        size = validated_run.size
        servers = validated_run.resolved.servers
        self.workers = range(size - servers)
        self.servers = range(size - servers, size)
        self.endpoints = ServerEndpoints(secrets.randbits(63), str(pool.folder), servers)
        self.statuses: dict[int, str] = {}
        self.failures: list[tuple[str, RankFailed]] = []
        self.cause_deadline = 0.0
        self.stop_sent = False
        self.world_count = 0
        self.restarts = 0
        self.furthest_step = 0
        self.rank_error: RankFailed | None = None
        self.first_end = 0.0
        self.answer_seconds = min(validated_run.settings.timeout, ANSWER_SECONDS)

    def run_training(self) -> str:
        """Train until the end; returns "finished" or "stopped"."""
        self.start_servers()
        self.start_workers()
        while len(self.statuses) < len(self.workers):
            self.poll_events()
        self.close_servers()
        return self.statuses[0]

    def start_servers(self) -> None:
        """Start all servers."""
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
        """Start all workers in a new world."""
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
        """End the servers, which write into the record.

        A server that does not end in time is killed later. Everything is saved by now.
        """
        with contextlib.suppress(StepFailed):
            stop_servers(self.endpoints, self.answer_seconds)
        deadline = time.monotonic() + self.answer_seconds
        while self.pool.members and time.monotonic() < deadline:
            for number in self.pool.wait_members(POLL_SECONDS):
                self.pool.receive_event(number)

    # ---- events and recovery -----------------------------------------------------------------
    def poll_events(self) -> None:
        """Wait for the first event, and handle it.

        Raises:
            RankFailed: a process raised, or too many restarts made no progress.
        """
        if self.stop_request.is_set() and not self.stop_sent:
            self.pool.request_stop(number for number in self.workers if number in self.pool.members)
            self.stop_sent = True
        for number in self.pool.wait_members(POLL_SECONDS):
            kind, value = self.pool.receive_event(number)
            if kind == TASK_DONE and number in self.workers:
                self.statuses[number] = value
                self.first_end = self.first_end or time.monotonic()
            elif kind == TASK_REPORTED and self.progress:
                self.progress(value)
            elif kind == PROCESS_DIED and value.rank is None:
                raise value  # the fork server died, and all ranks with it
            elif kind in (PROCESS_DIED, TASK_FAILED):
                self.cause_deadline = self.cause_deadline or time.monotonic() + DEATH_GRACE_SECONDS
                self.failures.append((kind, value))
        if (
            self.first_end
            and time.monotonic() - self.first_end > self.validated_run.settings.timeout
            and not self.failures
        ):
            late = next(number for number in self.workers if number not in self.statuses)
            self.failures.append(
                (
                    PROCESS_DIED,
                    RankFailed("it does not end, but other workers have ended", rank=late),
                )
            )
        # the cause of the first failures may arrive until then
        if self.failures and time.monotonic() > self.cause_deadline:
            self.restart_workers(self.select_cause())
            self.failures = []
            self.cause_deadline = 0.0

    def select_cause(self) -> RankFailed:
        """Select the failure for which the workers restart.

        A death comes before the messages of ranks that noticed it, and before a wait in vain.

        Raises:
            RankFailed: a rank raised an exception of its own, and no process died.
        """
        deaths = [value for kind, value in self.failures if kind == PROCESS_DIED]
        raised = [
            value
            for kind, value in self.failures
            if kind == TASK_FAILED and not is_peer_failure(value.message)
        ]
        self.rank_error = raised[0] if raised else self.rank_error
        if raised and not deaths:
            raise raised[0]
        return deaths[0] if deaths else self.failures[0][1]

    def restart_workers(self, failure: RankFailed) -> None:
        """Restart all workers with the step that the servers agree on.

        Args:
            failure: why the workers restart.

        Raises:
            RankFailed: too many restarts made no progress.
        """
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
        """Halt the servers, and find the step with which the workers begin again.

        If a server is gone, everything goes back to the last common snapshot. If a restarted server
        dies, too, this is repeated.

        Args:
            failure: why the workers restart.

        Returns:
            (step, (weight, loss) of every share of the step before), as in `halt_servers`.

        Raises:
            RankFailed: servers keep dying.
        """
        reason = ""
        deadline = time.monotonic() + max(self.validated_run.settings.timeout, ANSWER_SECONDS)
        for _ in range(1 + MAX_RESTARTS):
            try:
                if reason:
                    self.restore_snapshots(failure, reason)
                    self.wait_for_servers(deadline)
                step, last = self.halt_servers()
            except StepFailed as error:
                reason = str(error)
                continue
            if reason:
                rewind_record(self.folder, len(self.workers), step)
            else:
                self.record_event(
                    "again", f"{failure}; all workers start again from step {step}", step
                )
            return step, last
        raise failure.with_message(f"{failure.message}; and {reason}")

    def wait_for_servers(self, deadline: float) -> None:
        """Wait for servers that were restarted; they read a snapshot and write one.

        Args:
            deadline: until when to wait, on the monotonic clock.

        Raises:
            StepFailed: a server is gone, or does not answer in time.
            RankFailed: a server raised.
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
            ) as client:
                try:
                    probe = Header(MessageType.PROBE, self.endpoints.job)
                    list(
                        client.send_requests(
                            (server, probe, ()) for server in range(len(self.servers))
                        )
                    )
                    return
                except StepFailed:
                    if time.monotonic() > deadline:
                        raise

    def refuse_dead_servers(self) -> None:
        """Raise StepFailed if a server is gone, or the error that a server raised."""
        for number in self.pool.wait_members(0):
            kind, value = self.pool.receive_event(number)
            if kind == TASK_FAILED:
                raise value
        if gone := [
            number - len(self.workers) for number in self.servers if number not in self.pool.members
        ]:
            raise StepFailed(f"server(s) {', '.join(map(str, gone))} have ended")

    def halt_servers(self) -> tuple[int, tuple[tuple[float, float], ...]]:
        """Halt all servers, and bring them to one step.

        No workers run meanwhile.

        Returns:
            (the step of all servers, (weight, loss) of every share of the step before).

        Raises:
            StepFailed: a server is gone, or the steps differ.
        """
        self.refuse_dead_servers()
        previous = self.endpoints
        self.endpoints = replace(self.endpoints, job=secrets.randbits(63))
        with contextlib.closing(
            ServerClient(
                self.endpoints.server_addresses,
                MAX_REPLY_BYTES,
                KeyPair.generate_pair(),
                self.answer_seconds,
            )
        ) as client:
            halt_header = Header(MessageType.HALT, previous.job, version=self.endpoints.job)
            answers = {
                server: json.loads(bytes(rest[0]))
                for server, _, rest in client.send_requests(
                    (server, halt_header, ()) for server in range(previous.servers)
                )
            }
            first = max(answers.values(), key=lambda each: each["updates"])
            resume_requests = (
                (
                    server,
                    Header(
                        MessageType.RESUME,
                        self.endpoints.job,
                        numbers=(float(each["updates"] < first["updates"]), *first["made"]),
                    ),
                    (),
                )
                for server, each in answers.items()
            )
            versions = {header.version for _, header, _ in client.send_requests(resume_requests)}
        if versions != {first["updates"]}:
            raise StepFailed(f"servers are at different steps: {sorted(versions)}")
        return first["updates"], tuple((weight, loss) for weight, loss in first["shares"])

    def restore_snapshots(self, failure: RankFailed, reason: str) -> None:
        """Restart the servers from the last step of which all have a snapshot.

        Args:
            failure: what happened first.
            reason: why the servers cannot go on.
        """
        self.pool.kill_members(number for number in self.servers if number in self.pool.members)
        step = find_common_step(self.pool.folder, len(self.servers))
        if step is None:  # no snapshot yet
            step = (
                self.validated_run.resume_checkpoint.step
                if self.validated_run.resume_checkpoint
                else 0
            )
        self.endpoints = replace(self.endpoints, job=secrets.randbits(63), step=step)
        self.record_event("back", f"{failure}: {reason}; everything goes back to step {step}", step)
        self.start_servers()

    def record_event(self, name: str, message: str, step: int) -> None:
        """Write an event into the record.

        Args:
            name: the kind of event.
            message: the event in words.
            step: the step at which it happens.
        """
        self.record.write_line("event", name=name, numbers={"step": step}, message=message)


def rewind_record(folder: Path, workers: int, step: int) -> None:
    """Set a run's record and its checkpoints back to their state before a step.

    Args:
        folder: the folder of the run.
        workers: number of workers.
        step: the first step that is removed.
    """
    for number in range(workers):
        path = folder / f"rank-{number}.jsonl"
        kept_bytes = 0
        truncate_torn_line(path)
        for text in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            if (
                text.startswith((b'{"kind":"step"', b'{"kind":"spans"'))
                and json.loads(text)["step"] >= step
            ):
                os.truncate(path, kept_bytes)
                break
            kept_bytes += len(text)
    for later in list_checkpoint_folders(folder):
        if read_folder_step(later) > step:
            shutil.rmtree(later)
