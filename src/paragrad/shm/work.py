"""Pending operations of a group, and the threads that complete them.

An operation cannot always complete inside its own call. Legal programs would deadlock: one rank
starts an all-reduce, sends, then waits, while another receives before it all-reduces. An operation
also cannot depend on a waiting caller, because a future has none. Operations are therefore put into
a queue. Collectives and messages have a queue each, so that neither delays the other.

* A thread that waits for an operation runs the queue until that operation is done. Usually no other
  thread takes part.
* A daemon thread of the queue completes what no caller waits for within some milliseconds, and what
  has a future.

The callbacks of a future run between two operations, in the thread that runs the queue. No other
thread can run the queue meanwhile, so what a callback waits for is run by this thread.

The daemon polls, however many operations there are meanwhile, and takes over what it sees a second
time. To wake it for each operation would cost as much as a short operation.
"""

from __future__ import annotations

import abc
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IDLE_POLLS = 5  # after so many polls without an operation the daemon sleeps until it is woken
LOCK_POLL_SECONDS = 0.001  # the time between two attempts to run the queue

# The thread that finishes an operation and the one that requests its future may both set the
# future's result.
_future_lock = threading.Lock()


class ShmWork(dist.Work):
    """One operation of a group.

    Attributes:
        queue: The queue of the operation; None for a completed one.

        tensors: The tensors that take the results.

        seconds: The time limit, counted from when the operation begins.

        source: The rank that sent a message; -1 before.

        done: Whether the operation has ended.

        error: The error with which it ended, if any.

        future: The future that the caller requested, until its result is set.

        is_due: Whether the daemon must complete the operation.
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
        self.is_due = False

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as done, and set the result of its future.

        Args:
            error: The error with which the operation ended, if any.
        """
        self.error = error
        self.done = True
        if self.future is not None and self.queue is not None:
            with self.queue.allow_callbacks():
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
        """Wait until the operation is done, and raise its error.

        Args:
            timeout: A time limit, as a timedelta or in seconds; None takes the operation's own.

        Returns:
            True.
        """
        if not self.done and self.queue is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            self.queue.complete_work(self, time.monotonic() + (seconds or self.seconds))
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done and self.queue is not None:
            self.queue.mark_urgent(self)  # the caller may poll until it is done
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
        if self.future is not None:  # requested before
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
    """Operations that no caller waited for at the call. The daemon completes them.

    Attributes:
        poll_seconds: The time between two polls of the daemon.

        works: The operations.

        guard: The lock of `works`.

        wakeup: Is set to wake the daemon.

        is_resting: Whether the daemon sleeps until `wakeup` is set.

        is_closed: Whether the backlog gets no more operations.
    """

    poll_seconds: float
    works: deque[ShmWork] = field(default_factory=deque)
    guard: threading.Lock = field(default_factory=threading.Lock)
    wakeup: threading.Event = field(default_factory=threading.Event)
    is_resting: bool = False
    is_closed: bool = False

    def get_first(self, added: ShmWork | None = None) -> ShmWork | None:
        """Return the first operation that is not done.

        Args:
            added: An operation to append before, if any.

        Returns:
            The operation; None if there is none.
        """
        with self.guard:
            while self.works and self.works[0].done:
                self.works.popleft()
            if added is not None:
                self.works.append(added)
            return self.works[0] if self.works else None


class OperationQueue(abc.ABC):
    """Operations in the order of the calls. A subclass defines `run_until_done`.

    A thread that runs the queue holds `lock`. It finishes every operation that it passes, also for
    waiting threads. The daemon takes over operations without a waiting caller after `poll_seconds`,
    and at most after twice that time.

    Attributes:
        lock: Is held by the thread that runs the queue.

        backlog: The operations for the daemon.

        daemon: The daemon thread, once it has started.

        awaited_works: The operations that a caller waits for.

        callback_thread: The thread that holds the lock and now runs callbacks; None if none does.
    """

    def __init__(self, poll_seconds: float = 0.001) -> None:
        """Make an empty queue.

        Args:
            poll_seconds: The time between two polls of the daemon.
        """
        self.lock = threading.Lock()
        self.backlog = DaemonBacklog(poll_seconds)
        self.daemon: threading.Thread | None = None
        self.awaited_works: list[ShmWork] = []
        self.callback_thread: int | None = None

    @abc.abstractmethod
    def run_until_done(self, work: ShmWork, deadline: float, is_background: bool) -> None:
        """Run the queue until an operation is done. The caller holds the lock.

        An error of the operation is stored in it.

        Args:
            work: The operation.
            deadline: The time limit, on the monotonic clock.
            is_background: No caller waits, so do not spin, and return when a caller waits.
        """

    # optional: a queue that never waits long need not do this
    def request_yield(self) -> None:  # noqa: B027
        """Tell a background thread that runs the queue that a caller waits."""

    # optional as well: it ends what another thread does
    def handle_timeout(self, work: ShmWork) -> None:  # noqa: B027
        """Abandon the group after a timeout; the thread that runs the queue ends the operation.

        Args:
            work: The operation.
        """

    @contextlib.contextmanager
    def allow_callbacks(self) -> Iterator[None]:
        """Let this thread, which holds the lock, run callbacks that use the queue."""
        outer = self.callback_thread  # a callback may finish operations with callbacks
        self.callback_thread = threading.get_ident()
        try:
            yield
        finally:
            self.callback_thread = outer

    def is_in_callback(self) -> bool:
        """Tell whether a callback of one of the queue's futures is the caller."""
        return self.callback_thread == threading.get_ident()

    def complete_work(self, work: ShmWork, deadline: float, is_background: bool = False) -> None:
        """Wait until an operation is done, in this thread or in the one that runs the queue.

        A background thread makes way for a waiting caller.

        Args:
            work: The operation.
            deadline: The time limit, on the monotonic clock.
            is_background: No caller waits for the operation.
        """
        if self.is_in_callback():
            # this thread holds the lock, and no other one can run the operation
            self.run_until_done(work, deadline, is_background=False)
            return
        if not is_background:
            self.awaited_works.append(work)
            if self.lock.locked():
                self.request_yield()
        try:
            while not work.done:
                if is_background and self.awaited_works:
                    time.sleep(LOCK_POLL_SECONDS)  # a lock is not fair: let the caller take it
                elif self.lock.acquire(timeout=LOCK_POLL_SECONDS):
                    try:
                        if not work.done:
                            self.run_until_done(work, deadline, is_background)
                    finally:
                        self.lock.release()
                # the daemon runs the queue, and has a later deadline
                elif not is_background and time.monotonic() > deadline:
                    self.handle_timeout(work)
                    deadline = math.inf
        finally:
            if not is_background:
                self.awaited_works.remove(work)

    def leave_to_daemon(self, work: ShmWork) -> None:
        """Leave an operation to the daemon, so that the caller can go on.

        Args:
            work: The operation.
        """
        self.backlog.get_first(added=work)
        if self.backlog.is_resting:
            self.backlog.wakeup.set()
        if self.daemon is None:
            self.daemon = threading.Thread(
                target=_run_daemon, args=(self.backlog,), daemon=True, name="paragrad shm"
            )
            self.daemon.start()

    def mark_urgent(self, work: ShmWork) -> None:
        """Let the daemon complete an operation soon, and all operations before it.

        A caller waits for its future, or polls it, and cannot complete it.

        Args:
            work: The operation.
        """
        with self.backlog.guard:
            for each in (*self.backlog.works, work):
                each.is_due = True
        self.backlog.wakeup.set()

    def close(self, seconds: float) -> bool:
        """Complete what was left to the daemon, and end it.

        The caller waits for the daemon's end. A thread that frees a tensor while the interpreter
        exits would abort the process.

        Args:
            seconds: The time limit.

        Returns:
            False if the daemon has not ended in time.
        """
        self.backlog.is_closed = True
        self.backlog.wakeup.set()
        # the daemon itself may free the group
        if self.daemon is None or self.daemon is threading.current_thread():
            return True
        self.daemon.join(seconds)
        return not self.daemon.is_alive()


COMPLETED_WORK = ShmWork(None, [], 0.0)  # returned by a call without async_op
COMPLETED_WORK.finish()


def _run_daemon(backlog: DaemonBacklog) -> None:
    """Complete the operations of a backlog until it is closed.

    Between two operations the daemon has no reference to the queue, so that an unused group can be
    freed.
    """
    idle_polls = 0
    while True:
        work = backlog.get_first()
        if work is not None and work.is_due:
            assert work.queue is not None
            work.queue.complete_work(work, time.monotonic() + work.seconds, is_background=True)
            continue
        if work is not None:
            work.is_due = True
            idle_polls = 0
        elif backlog.is_closed:
            return
        elif idle_polls < IDLE_POLLS:
            idle_polls += 1
        else:
            backlog.is_resting = True
            # A thread that leaves an operation checks `is_resting` afterwards.
            if backlog.get_first() is None and not backlog.is_closed:
                backlog.wakeup.wait()
            backlog.is_resting = False
            idle_polls = 0
        del work
        backlog.wakeup.wait(backlog.poll_seconds)
        backlog.wakeup.clear()
