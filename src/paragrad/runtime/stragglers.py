"""Stragglers: name the ranks that others wait for.

A wait ends only at its time limit, so a monitor reports slow ranks earlier. If a connection closes,
the error names the ranks that caused it.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from math import inf

from paragrad.errors import NOTE_PREFIX, RankFailed, StepFailed, describe_error
from paragrad.runtime.world import World

SLOW_STEP_SECONDS = 10.0  # after this time in one step a rank looks which others are in it
POLL_SECONDS = 0.5
# Time for other ranks to report their failure: when a rank dies, its connections close on all
# ranks at once.
FAILURE_REPORT_SECONDS = 2.0
# messages of gloo and of stores
CLOSED_PATTERN = re.compile(
    "connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE
)
TIMEOUT_PATTERN = re.compile("timed? ?out|gave up waiting", re.IGNORECASE)  # gloo and stores; shm
PEER_FAILURE_PATTERN = re.compile(
    r"no answer from server|^GroupError: .*(ended while rank|gave up waiting)|^RuntimeError: "
    r"\[[^\]]*gloo|"
    r"^Dist\w*Error: ",
    re.DOTALL,
)  # servers; shm; gloo; stores


def is_peer_failure(message: str) -> bool:
    """Tell whether a failure only means that its rank waited for another one.

    The other rank is gone or does not continue. Errors of user code do not count.

    Args:
        message: The message of the failure.
    """
    return PEER_FAILURE_PATTERN.search(message) is not None


class StragglerMonitor:
    """Watches the steps of a rank and reports the ranks that do not come.

    A rank that is in one step for long writes this into the store where the ranks met. A rank
    without such an entry after the same time again has not reached the step. The lowest of the
    waiting ranks names the missing ones, once a step.

    Attributes:
        world: The world of the ranks.

        slow_after: Seconds in one step after which the rank writes its entry.

        step: The step of this rank.

        started_at: When that step began, on the monotonic clock; 0.0 between steps.

        ended: Is set when the monitor is closed.
    """

    def __init__(
        self, world: World, meets_every_step: bool = True, slow_after: float = SLOW_STEP_SECONDS
    ) -> None:
        """Start the monitor's thread.

        Args:
            world: The world of the ranks.
            meets_every_step: Do the ranks meet in every step? Otherwise long steps are normal, and
                nothing is reported.
            slow_after: Seconds after which a step counts as slow.
        """
        self.world = world
        self.slow_after = slow_after if meets_every_step else inf
        self.step = 0
        self.started_at = 0.0
        self.ended = threading.Event()
        if world.size > 1 and meets_every_step:
            threading.Thread(target=self._poll_steps, name="paragrad-watch", daemon=True).start()

    def start_step(self, step: int) -> None:
        """Watch a step until `end_step`.

        Args:
            step: The number of the step.
        """
        self.step = step
        self.started_at = time.monotonic()

    def end_step(self) -> None:
        """End what `start_step` began."""
        self.started_at = 0.0

    @contextmanager
    def track_step(self, step: int) -> Iterator[None]:
        """Watch a step, while the context is active.

        Args:
            step: The number of the step.
        """
        self.start_step(step)
        try:
            yield
        finally:
            self.end_step()

    def close(self) -> None:
        """End the monitor."""
        self.ended.set()

    def _poll_steps(self) -> None:
        reported = -1
        while not self.ended.wait(POLL_SECONDS):
            step = self.step
            started_at = self.started_at
            if started_at and time.monotonic() - started_at > self.slow_after and reported != step:
                reported = step
                # If the group is left or its store is out of reach, the wait ends by itself.
                with suppress(Exception):
                    self._report_stragglers(step, started_at)

    def _report_stragglers(self, step: int, started_at: float) -> None:
        store = self.world.store
        own_rank = self.world.rank
        size = self.world.size
        store.set(_make_slow_step_key(own_rank), str(step))
        # give ranks that came later the time to write their entry
        self.ended.wait(self.slow_after + 4 * POLL_SECONDS)
        if self.started_at != started_at:
            return
        waiting = [
            rank
            for rank in range(size)
            if store.check([_make_slow_step_key(rank)])
            and int(store.get(_make_slow_step_key(rank))) == step
        ]
        missing = [str(rank) for rank in range(size) if rank not in waiting]
        if missing and own_rank == waiting[0] and self.started_at == started_at:
            print(
                f"paragrad: rank {own_rank} is in step {step} for "
                f"{time.monotonic() - started_at:.0f} s, and rank(s) {', '.join(missing)} have not "
                "reached it: they still load, make another number of steps, or have ended",
                file=sys.stderr,
                flush=True,
            )


def _make_slow_step_key(rank: int) -> str:
    return f"paragrad: in a step for long: {rank}"


def describe_missing_ranks(world: World, error: BaseException) -> str:
    """Name the ranks that a connection error is about.

    Every failing rank calls it, and thereby says that it is alive: gloo knows addresses but no
    ranks.

    Args:
        world: The world of the ranks.
        error: The error of this rank.

    Returns:
        The description; empty for other errors.
    """
    if world.size == 1:
        return ""
    others = [rank for rank in range(world.size) if rank != world.rank]
    reporting = set[int]()
    has_answer = threading.Event()
    # a connection of user code raises an OSError instead
    is_connection_error = (
        isinstance(error, RuntimeError) and CLOSED_PATTERN.search(str(error)) is not None
    )
    # the transport names the ranks itself ("says nothing")
    is_unexplained = (
        is_connection_error
        and not isinstance(error, StepFailed)
        and "says nothing" not in str(error)
    )

    def query_store() -> None:
        with suppress(Exception):  # the store went with rank 0
            world.store.set(_make_failure_key(world.rank), "")
            if is_unexplained:
                with suppress(RuntimeError):  # a rank does not report
                    world.store.wait(
                        [_make_failure_key(rank) for rank in others],
                        timedelta(seconds=FAILURE_REPORT_SECONDS),
                    )
                reporting.update(
                    rank for rank in others if world.store.check([_make_failure_key(rank)])
                )
            has_answer.set()

    # in a thread, because a request to the store can block for long
    thread = threading.Thread(target=query_store, name="paragrad-away", daemon=True)
    thread.start()
    # Without this, ranks would fail one after another, each when the previous one has ended.
    for reference in list(world.related_worlds) if is_connection_error else ():
        if (
            (related := reference()) is not None
            and related.group is not None
            and related.backend == "gloo"
        ):
            related.abort()
    thread.join(2 * FAILURE_REPORT_SECONDS)
    silent = ", ".join(str(rank) for rank in others if rank not in reporting)
    if not is_unexplained or not silent:
        return ""
    return (
        f"rank(s) {silent} say nothing: killed, cut off, or still busy"
        if has_answer.is_set()
        else "the store in which the ranks met does not answer either: its process, on the host of "
        "rank 0, has ended"
    )


def note_missing_ranks(world: World, error: Exception) -> None:
    """Add a note to a connection error that names the ranks that it is about.

    Args:
        world: The world of the ranks.
        error: The error of this rank.
    """
    if isinstance(error, RankFailed):  # it has the note of its own error
        return
    if description := describe_missing_ranks(world, error):
        error.add_note(f"{NOTE_PREFIX}{description}")


@contextmanager
def explain_timeout(activity: str, repair: str = "") -> Iterator[None]:
    """Explain a timeout of a wait for a rank that does something long.

    Args:
        activity: What the other rank does meanwhile.
        repair: More advice for the message.

    Raises:
        StepFailed: The wait took too long.
    """
    try:
        yield
    except Exception as error:
        if not TIMEOUT_PATTERN.search(str(error)):
            raise
        raise StepFailed(
            f"{describe_error(error)}; meanwhile {activity}: if that takes longer than ranks "
            f"wait for each other, give a longer --timeout{repair}"
        ) from error


def explain_independent_steps() -> AbstractContextManager[None]:
    """Explain a timeout where ranks step independently and their delays add up over many steps.

    Returns:
        The context for the wait.
    """
    return explain_timeout("others make steps of their own", ", or let them meet more often")


def make_step_failure(world: World, error: Exception, step: int) -> StepFailed:
    """Wrap an error of a step, and name the ranks that it is about.

    Args:
        world: The world of the ranks.
        error: The error.
        step: The number of the step.

    Returns:
        The failure to raise.
    """
    failed = StepFailed.wrap_error(error, step)
    description = describe_missing_ranks(world, error)
    return (
        StepFailed(
            f"{failed.message}; {description}",
            step=failed.step,
            tensor=failed.tensor,
            when=failed.when,
        )
        if description
        else failed
    )


def _make_failure_key(rank: int) -> str:
    return f"paragrad: failed: {rank}"
