"""Work: an operation of a group that was asked for, and who carries it out.

An operation that completed inside its own call would deadlock legal programs (one rank starts
an all-reduce, sends, then waits; the other receives before it all-reduces), and one that needs
its waiter would never complete a future. So operations are queued in a lane (one for
collectives, one for messages: neither may hold the other up), and

* whoever waits for one carries out the lane until that one is done: no hand-over between
threads on the usual way;
* what nobody waits for in some milliseconds, or has a future, a daemon thread of the lane
carries out. It looks now and then,
  however many operations there were meanwhile, and takes over what it sees a second time: to be
  told of each would cost as much as a short one.
"""

from __future__ import annotations

import abc
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# of the daemon, with nothing left to it, before it sleeps until it is called
IDLE_POLLS = 5
LOCK_POLL_SECONDS = 0.001  # seconds between two looks whether the lane has become free

# who finishes a work and who asks for its future may both want to tell the future
_future_lock = threading.Lock()


class ShmWork(dist.Work):
    """One operation. seconds: its time limit, from when it begins;  source: the rank a message
    came from.
    """

    def __init__(self, queue: OperationQueue | None, tensors: list[Tensor], seconds: float) -> None:
        super().__init__()
        self.queue = queue
        self.tensors = tensors
        self.seconds = seconds
        self.source = -1
        self.done = False
        self.error: BaseException | None = None
        self.future: torch.futures.Future[Any] | None = None
        self.is_due = False  # for the daemon

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done = True
        if self.future is not None:
            self._set_future()

    def _set_future(self) -> None:
        with _future_lock:
            future, self.future = self.future, None
        if future is None:
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.tensors)

    # ---- as torch.distributed.Work -----------------------------------------------------------
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Until it is done. Raises what went wrong."""
        if not self.done and self.queue is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            self.queue.complete_work(self, time.monotonic() + (seconds or self.seconds))
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done and self.queue is not None:
            self.queue.mark_urgent(self)  # who asks may ask until it is
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[Tensor]:
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self.future is not None:  # asked for before
            self.future.then(lambda other: _copy_future(other, future))
            return future
        self.future = future
        if self.done or self.queue is None:
            self._set_future()
        else:
            self.queue.mark_urgent(self)
        return future

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source


def _copy_future(done: torch.futures.Future[Any], future: torch.futures.Future[Any]) -> None:
    try:
        future.set_result(done.wait())
    except Exception as error:
        future.set_exception(error)


@dataclass
class DaemonBacklog:
    """What nobody waited for when it was asked for. patience: seconds between two looks of its
    daemon;  resting: it must be called;  closed: nothing more will come.
    """

    poll_seconds: float
    works: deque[ShmWork] = field(default_factory=deque)
    guard: threading.Lock = field(default_factory=threading.Lock)
    wakeup: threading.Event = field(default_factory=threading.Event)
    is_resting: bool = False
    is_closed: bool = False

    def get_first(self, added: ShmWork | None = None) -> ShmWork | None:
        """The first of them that is not done, after one was added."""
        with self.guard:
            while self.works and self.works[0].done:
                self.works.popleft()
            if added is not None:
                self.works.append(added)
            return self.works[0] if self.works else None


class OperationQueue(abc.ABC):
    """Operations in the order they were asked for. A subclass says how to `advance` until one
    is done.

    A thread that advances holds `lock`; it finishes every work it passes, in whichever thread
    that waits. patience: seconds after which the daemon takes over what nobody waits for, and
    twice as many at most.
    """

    def __init__(self, poll_seconds: float = 0.001) -> None:
        self.lock = threading.Lock()
        self.backlog = DaemonBacklog(poll_seconds)
        self.daemon: threading.Thread | None = None
        self.awaited_works: list[ShmWork] = []  # what somebody waits for

    @abc.abstractmethod
    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        """Until `work` is done, with the lock held; its error is the work's. patient: nobody
        waits, so do not spin, and come back when somebody is `impatient`.
        """

    # a lane that never waits long need not
    def request_yield(self) -> None:  # noqa: B027
        """Tell who is at the lane, if it is patient, that somebody else is not."""

    # nor to end what another thread does
    def handle_timeout(self, work: ShmWork) -> None:  # noqa: B027
        """Give the group up, for who waits for `work`: whoever is at the lane sees it, and ends
        the work.
        """

    def complete_work(self, work: ShmWork, deadline: float, is_background: bool = False) -> None:
        """Until `work` is done, here or by the thread that is at it; who is patient makes way
        for who is not.
        """
        if not is_background:
            self.awaited_works.append(work)
            if self.lock.locked():
                self.request_yield()
        try:
            while not work.done:
                if is_background and self.awaited_works:
                    time.sleep(LOCK_POLL_SECONDS)  # who waits has the lane: a lock knows no turns
                elif self.lock.acquire(timeout=LOCK_POLL_SECONDS):
                    try:
                        if not work.done:
                            self.run_until_done(work, deadline, is_background)
                    finally:
                        self.lock.release()
                # the daemon, which is at the lane, has more time
                elif not is_background and time.monotonic() > deadline:
                    self.handle_timeout(work)
                    deadline = math.inf
        finally:
            if not is_background:
                self.awaited_works.remove(work)

    def leave_to_daemon(self, work: ShmWork) -> None:
        """Its caller goes on: the daemon takes it over in a moment."""
        self.backlog.get_first(added=work)
        if self.backlog.is_resting:
            self.backlog.wakeup.set()
        if self.daemon is None:
            self.daemon = threading.Thread(
                target=_run_daemon, args=(self.backlog,), daemon=True, name="paragrad shm"
            )
            self.daemon.start()

    def mark_urgent(self, work: ShmWork) -> None:
        """Somebody waits for its future, who cannot carry it out; nor what comes before it."""
        with self.backlog.guard:
            for each in (*self.backlog.works, work):
                each.is_due = True
        self.backlog.wakeup.set()

    def close(self, seconds: float) -> bool:
        """End the daemon after what was left to it; False if that takes longer.

        Its caller waits: a thread that is freeing a tensor while the interpreter ends would
        abort the process.
        """
        self.backlog.is_closed = True
        self.backlog.wakeup.set()
        # a group may go in its own daemon's hands
        if self.daemon is None or self.daemon is threading.current_thread():
            return True
        self.daemon.join(seconds)
        return not self.daemon.is_alive()


COMPLETED_WORK = ShmWork(None, [], 0.0)  # what was asked for without async_op
COMPLETED_WORK.finish()


def _run_daemon(backlog: DaemonBacklog) -> None:
    """Without a reference to the lane between two works: a group that nobody holds may go."""
    looks = 0
    while True:
        work = backlog.get_first()
        if work is not None and work.is_due:
            assert work.queue is not None
            work.queue.complete_work(work, time.monotonic() + work.seconds, is_background=True)
            continue
        if work is not None:
            work.is_due = True
            looks = 0
        elif backlog.is_closed:
            return
        elif looks < IDLE_POLLS:
            looks += 1
        else:
            backlog.is_resting = True
            # whoever leaves something looks afterwards if it rests
            if backlog.get_first() is None and not backlog.is_closed:
                backlog.wakeup.wait()
            backlog.is_resting = False
            looks = 0
        del work
        backlog.wakeup.wait(backlog.poll_seconds)
        backlog.wakeup.clear()
