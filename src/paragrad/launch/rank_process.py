"""A rank's process: wait for a task, join the world, run the task, and answer.

The process ends when its launcher is gone. `fork_server.py` forks it, or starts it as `python -m
paragrad.launch.rank_process FD`. The socket FD carries pickled tasks and answers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TextIO, cast

import cloudpickle
import torch

from paragrad.errors import RankFailed, StepFailed
from paragrad.launch import job_files
from paragrad.launch.debugger import handle_breakpoints
from paragrad.launch.protocol import LIFE, ProcessSetup, RankTask, StopMessage, TaskFailure
from paragrad.runtime import allocator
from paragrad.runtime.rendezvous import join_world
from paragrad.runtime.stop_signals import StopRequest
from paragrad.runtime.world import DEFAULT_TIMEOUT


def serve_tasks(connection: Connection) -> None:
    """Apply the launcher's state, then run tasks until the launcher closes its end of the socket.

    Args:
        connection: The connection to the launcher.
    """
    launcher = LauncherConnection(connection)
    # the launcher's standard input is for a debugger alone
    sys.stdin = open(os.devnull)  # noqa: SIM115
    # these signals also reach the launcher, which ends its ranks or lets them save
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    try:
        setup: ProcessSetup = launcher.receive()
        _apply_setup(setup)
        allocator.keep_freed_memory()
    except (EOFError, OSError):  # the launcher is gone already
        os._exit(1)
    with setup.stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        tasks: queue.SimpleQueue[RankTask] = queue.SimpleQueue()
        stop = StopRequest()
        threading.Thread(
            target=_receive_messages, args=(launcher, tasks, stop), daemon=True
        ).start()
        # imported objects stay: the collection after every task need not visit them
        gc.freeze()
        while True:
            launcher.send(_run_task(tasks.get(), launcher, stop))
            # process groups in reference cycles keep their threads and sockets
            gc.collect()
            allocator.return_freed_memory()


def _apply_setup(setup: ProcessSetup) -> None:
    for name in os.environ.keys() - setup.environment.keys():
        del os.environ[name]
    os.environ.update(setup.environment)
    process: Any = multiprocessing.current_process()
    # The launcher clears this folder, however the rank ends. A kill would leave Python's own
    # folder (pymp-...) behind, which has the sockets of data loaders.
    process._config["tempdir"] = str(setup.stack_file.parent)
    sys.path[:] = setup.import_paths
    sys.argv[:] = [""]
    os.chdir(setup.working_folder)
    if setup.affinity is not None:
        os.sched_setaffinity(0, setup.affinity)


class LauncherConnection:
    """The connection to the launcher. Two threads of a rank may send.

    Args:
        connection: The connection.

    Attributes:
        connection: As the argument.
        lock: Is held while a message is sent.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()

    def send(self, message: tuple[str, Any]) -> None:
        """Send a message.

        Args:
            message: The kind of message, and its value.
        """
        with self.lock:
            self.connection.send(message)

    def receive(self) -> Any:
        """Wait for the next message, and return it."""
        return self.connection.recv()


def _receive_messages(
    launcher: LauncherConnection, tasks: queue.SimpleQueue[RankTask], stop: StopRequest
) -> None:
    """Queue tasks and stop requests; when the launcher is gone, end this process at once."""
    reports_life = False
    try:
        while True:
            message = launcher.receive()
            if isinstance(message, RankTask):
                stop.clear()  # an earlier request was for an earlier task
                tasks.put(message)
                continue
            if isinstance(message, StopMessage):
                stop.set()
            if not reports_life:
                reports_life = True
                threading.Thread(target=_report_life, args=(launcher, stop), daemon=True).start()
    except (EOFError, OSError):
        os._exit(1)


def _report_life(launcher: LauncherConnection, stop: StopRequest) -> None:
    """Report again and again whether the task comes further, with the longest time it took."""
    beats = -1
    with contextlib.suppress(OSError):  # the launcher is gone
        while True:
            if stop.is_saving or stop.beats != beats:
                beats = stop.beats
                launcher.send((LIFE, stop.longest_gap))
            time.sleep(LIFE_SECONDS)


LIFE_SECONDS = 0.5  # between two reports of life


class PrefixedStream:
    """A text stream that begins each line with the same words. It is written line by line.

    Args:
        stream: The stream to write to.
        prefix: The words.

    Attributes:
        stream: As the argument.
        prefix: As the argument.
        at_line_start: Whether the next text begins a line.
    """

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self.stream = stream
        self.prefix = prefix
        self.at_line_start = True

    def write(self, text: str) -> int:
        """Write a text.

        Args:
            text: The text.

        Returns:
            The number of its characters.
        """
        # a reader of the pipe that is gone (`| tee`, at Ctrl-C) is no reason to end the run
        with contextlib.suppress(BrokenPipeError):
            for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
                self.stream.write(self.prefix + piece if self.at_line_start else piece)
                self.at_line_start = piece.endswith("\n")
            if self.at_line_start:
                self.stream.flush()
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Write texts.

        Args:
            texts: The texts.
        """
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def _name_printed_lines(rank: int, size: int) -> Iterator[None]:
    """Begin each line that user code prints with its rank, unless there is only one."""
    streams = sys.stdout, sys.stderr
    prefix = f"rank {rank}: " if size > 1 or rank else ""
    sys.stdout, sys.stderr = (cast(TextIO, PrefixedStream(stream, prefix)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            with contextlib.suppress(OSError):  # a full disk, a reader that is gone
                stream.flush()


def _run_task(task: RankTask, launcher: LauncherConnection, stop: StopRequest) -> tuple[str, Any]:
    def stop_progress() -> None:
        if task.has_reports:
            launcher.send(("report", {"step": 0, "steps": 0, "debugging": True}))

    with (
        _name_printed_lines(task.rank, task.size),
        handle_breakpoints(task.size, stop_progress),
    ):
        return _call_task_function(task, launcher, stop)


def _call_task_function(
    task: RankTask, launcher: LauncherConnection, stop: StopRequest
) -> tuple[str, Any]:
    torch.set_num_threads(task.threads)
    try:
        job_files.run_job_files(task.job_files)
        dtype, function, arguments = cloudpickle.loads(task.pickled_call)
        torch.set_default_dtype(dtype)
        keywords = (
            {"report": lambda value: launcher.send(("report", value))} if task.has_reports else {}
        )
        with join_world(
            task.rank,
            task.size,
            task.store,
            task.backend,
            task.timeout or DEFAULT_TIMEOUT,
            task.device,
            stop,
        ) as world:
            try:
                result = function(world, *arguments, **keywords)
            # also for SystemExit: a task never ends its rank
            except BaseException as error:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError):
                        stream.flush()
                launcher.send(("failed", _make_task_failure(task, error)))
                # Stay in the world, where other ranks may wait; the launcher ends this process.
                threading.Event().wait()
        return "done", cloudpickle.dumps(result)
    except BaseException as error:
        return "failed", _make_task_failure(task, error)


def _make_task_failure(task: RankTask, error: BaseException) -> TaskFailure:
    return TaskFailure(RankFailed.wrap_error(error, task.rank), StepFailed.wrap_error(error).when)


if __name__ == "__main__":
    serve_tasks(Connection(int(sys.argv[1])))
