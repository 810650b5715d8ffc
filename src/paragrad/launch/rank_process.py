"""A rank's own process: wait for a task, join the world, run it, answer; end when the launcher
is gone.

Forked by `server.py`, or started by it as `python -m paragrad.launch.rank_process FD`; the
socket FD carries pickled tasks and answers.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from paragrad.errors import RankFailed, StepFailed, traced
from paragrad.launch import job_files
from paragrad.launch.protocol import Failure, Setup, Stop, Task
from paragrad.runtime import allocator
from paragrad.runtime.rendezvous import joined
from paragrad.runtime.stop_signals import Request
from paragrad.runtime.world import TIMEOUT


def serve(launcher: Connection) -> None:
    """Take over what the launcher says of itself, then serve tasks until it closes its end of
    the socket.
    """
    # they reach the launcher too, which ends its ranks or lets them save
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    try:
        setup: Setup = launcher.recv()
        _take_over(setup)
        allocator.keep()
    except (EOFError, OSError):  # it is gone already
        os._exit(1)
    with setup.stacks.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        stop = Request()
        threading.Thread(target=_listen, args=(launcher, tasks, stop), daemon=True).start()
        # what is imported stays: no need to look through it again after every task
        gc.freeze()
        while True:
            launcher.send(_answer(tasks.get(), launcher, stop))
            # process groups in circles of references keep their threads and sockets
            gc.collect()
            allocator.give_back()


def _take_over(setup: Setup) -> None:
    for name in os.environ.keys() - setup.environment.keys():
        del os.environ[name]
    os.environ.update(setup.environment)
    # its loaders' sockets go where the launcher clears, however this ends:
    own: Any = multiprocessing.current_process()
    # Python's own folder (pymp-...) is left behind by a kill
    own._config["tempdir"] = str(setup.stacks.parent)
    sys.path[:] = setup.path
    sys.argv[:] = [""]
    os.chdir(setup.folder)
    if setup.affinity is not None:
        os.sched_setaffinity(0, setup.affinity)


def _listen(launcher: Connection, tasks: queue.SimpleQueue[Task], stop: Request) -> None:
    """Hand tasks over; when the launcher is gone, end this process whatever it is doing."""
    try:
        while True:
            message = launcher.recv()
            if isinstance(message, Stop):
                stop.set()
            else:
                stop.clear()  # it was meant for an earlier task
                tasks.put(message)
    except (EOFError, OSError):
        os._exit(1)


def _answer(task: Task, launcher: Connection, stop: Request) -> tuple[str, Any]:
    torch.set_num_threads(task.threads)
    try:
        job_files.run(task.files)
        dtype, function, arguments = cloudpickle.loads(task.call)
        torch.set_default_dtype(dtype)
        more = {"report": lambda value: launcher.send(("report", value))} if task.reports else {}
        with joined(
            task.rank,
            task.size,
            task.store,
            task.backend,
            task.timeout or TIMEOUT,
            task.device,
            stop,
        ) as world:
            try:
                result = function(world, *arguments, **more)
            # also SystemExit: a task never ends its rank
            except BaseException as error:
                launcher.send(("failed", _failure(task, error)))
                # not out of a world where others may wait: the launcher ends us
                threading.Event().wait()
        return "done", cloudpickle.dumps(result)
    except BaseException as error:
        return "failed", _failure(task, error)


def _failure(task: Task, error: BaseException) -> Failure:
    told = StepFailed.of(error)
    failed = RankFailed(
        told.message,
        rank=task.rank,
        step=told.step,
        tensor=told.tensor,
        differs=told.differs,
        traceback=traced(error),
    )
    return Failure(failed, told.when)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
