"""A rank's own process: wait for a task, join the world, run it, answer; end when the launcher is gone.

Started by `ranks.py` as `python -m paragrad.launching.rank FD STACK_FILE`; the socket FD carries pickled tasks and answers.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from paragrad.errors import RankFailed, StepFailed
from paragrad.launching.messages import Failure, Stop, Task
from paragrad.signals import Request
from paragrad.world import joined


def main() -> None:
    """Serve tasks until the launcher closes its end of the socket."""
    launcher = Connection(int(sys.argv[1]))
    for sent in (signal.SIGINT, signal.SIGTERM):        # they reach the launcher too, which ends its ranks or lets them save
        signal.signal(sent, signal.SIG_IGN)
    with Path(sys.argv[2]).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        stop = Request()
        threading.Thread(target=_listen, args=(launcher, tasks, stop), daemon=True).start()
        gc.freeze()                     # what is imported stays: no need to look through it again after every task
        while True:
            launcher.send(_answer(tasks.get(), launcher, stop))
            gc.collect()            # process groups in circles of references keep their threads and sockets


def _listen(launcher: Connection, tasks: queue.SimpleQueue[Task], stop: Request) -> None:
    """Hand tasks over; when the launcher is gone, end this process whatever it is doing."""
    try:
        while True:
            message = launcher.recv()
            if isinstance(message, Stop):
                stop.set()
            else:
                stop.clear()                    # it was meant for an earlier task
                tasks.put(message)
    except (EOFError, OSError):
        shutil.rmtree(Path(sys.argv[2]).parent, ignore_errors=True)         # what the launcher can no longer remove
        os._exit(1)


def _answer(task: Task, launcher: Connection, stop: Request) -> tuple[str, Any]:
    torch.set_num_threads(task.threads)
    try:
        function, arguments = cloudpickle.loads(task.call)
        more = {"report": lambda value: launcher.send(("report", value))} if task.reports else {}
        with joined(task.rank, task.size, task.store, task.backend, task.timeout,
                    task.device, stop) as world:
            try:
                result = function(world, *arguments, **more)
            except BaseException as error:              # also SystemExit: a task never ends its rank
                launcher.send(("failed", _failure(task, error)))
                threading.Event().wait()                # not out of a world where others may wait: the launcher ends us
        return "done", cloudpickle.dumps(result)
    except BaseException as error:
        return "failed", _failure(task, error)


def _failure(task: Task, error: BaseException) -> Failure:
    message = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
    failed = RankFailed(message, rank=task.rank, step=getattr(error, "step", None), tensor=getattr(error, "tensor", None),
                        traceback="".join(traceback.format_exception(error)))
    return Failure(failed, time.monotonic())


if __name__ == "__main__":
    main()
