"""For whom a rank waits: said after some seconds, since a wait itself ends only at its bound;
and whom it waited for, where a connection was closed.
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

from paragrad.errors import StepFailed, describe_error
from paragrad.runtime.world import World

SLOW_STEP_SECONDS = 10.0  # seconds in one step, after which it is asked who else is in it
POLL_SECONDS = 0.5  # seconds between two looks
# for the others to say that they fail too: connections to a rank that died close at once, on
# all
FAILURE_REPORT_SECONDS = 2.0
# what gloo and stores say
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
    """Does a failure say that its rank waited for another, which is gone or does not go on? Not
    what a user's code raises.
    """
    return PEER_FAILURE_PATTERN.search(message) is not None


class StragglerMonitor:
    """Of the steps of a rank. A rank that was in a step for long says so in the store where the
    ranks met; who has said nothing as long after that has not come to it, and the first of
    those that wait names them, once for a step. in_step: ranks meet in every step; others may
    be long, and nothing is wrong.
    """

    def __init__(
        self, world: World, meets_every_step: bool = True, slow_after: float = SLOW_STEP_SECONDS
    ) -> None:
        self.world = world
        self.slow_after = slow_after if meets_every_step else inf
        # since when it is in that step; 0: in none
        self.step = 0
        self.started_at = 0.0
        self.ended = threading.Event()
        if world.size > 1 and meets_every_step:
            threading.Thread(target=self._poll_steps, name="paragrad-watch", daemon=True).start()

    @contextmanager
    def track_step(self, step: int) -> Iterator[None]:
        """Around a step."""
        self.step = step
        self.started_at = time.monotonic()
        try:
            yield
        finally:
            self.started_at = 0.0

    def close(self) -> None:
        self.ended.set()

    def _poll_steps(self) -> None:
        told = -1
        while not self.ended.wait(POLL_SECONDS):
            step = self.step
            since = self.started_at
            if since and time.monotonic() - since > self.slow_after and told != step:
                told = step
                # the group is left, or its store is out of reach: the wait itself ends
                with suppress(Exception):
                    self._report_stragglers(step, since)

    def _report_stragglers(self, step: int, started_at: float) -> None:
        store = self.world.store
        own = self.world.rank
        size = self.world.size
        store.set(_make_slow_step_key(own), str(step))
        # for the others to say so too, who came later
        self.ended.wait(self.slow_after + 4 * POLL_SECONDS)
        if self.started_at != started_at:
            return
        waiting = [
            rank
            for rank in range(size)
            if store.check([_make_slow_step_key(rank)])
            and int(store.get(_make_slow_step_key(rank))) == step
        ]
        away = [str(rank) for rank in range(size) if rank not in waiting]
        if away and own == waiting[0] and self.started_at == started_at:
            print(
                f"paragrad: rank {own} is in step {step} for {time.monotonic() - started_at:.0f} "
                f"s, and "
                f"rank(s) {', '.join(away)} "
                "have not come to it: still loading, in another number of steps, or gone",
                file=sys.stderr,
                flush=True,
            )


def _make_slow_step_key(rank: int) -> str:
    return f"paragrad: in a step for long: {rank}"


def describe_missing_ranks(world: World, error: BaseException) -> str:
    """Whom an error of a connection is about, in words; nothing for another error. Every rank
    that fails asks, and so says that it is there: gloo knows addresses, and no ranks.
    """
    if world.size == 1:
        return ""
    others = [rank for rank in range(world.size) if rank != world.rank]
    heard = set[int]()
    told = threading.Event()
    # not a user's own connection
    lost = isinstance(error, RuntimeError) and CLOSED_PATTERN.search(str(error)) is not None
    # the wire names ranks itself
    closed = lost and not isinstance(error, StepFailed) and "says nothing" not in str(error)

    def ask() -> None:
        with suppress(Exception):  # the store went with rank 0
            world.store.set(_make_failure_key(world.rank), "")
            if closed:
                with suppress(RuntimeError):  # somebody says nothing
                    world.store.wait(
                        [_make_failure_key(rank) for rank in others],
                        timedelta(seconds=FAILURE_REPORT_SECONDS),
                    )
                heard.update(
                    rank for rank in others if world.store.check([_make_failure_key(rank)])
                )
            told.set()

    # a store may hold who asks for long
    thread = threading.Thread(target=ask, name="paragrad-away", daemon=True)
    thread.start()
    # or one would fail after another, each when the one before has ended
    for found in list(world.related_worlds) if lost else ():
        if (each := found()) is not None and each.group is not None and each.backend == "gloo":
            each.abort()
    thread.join(2 * FAILURE_REPORT_SECONDS)
    silent = ", ".join(str(rank) for rank in others if rank not in heard)
    if not closed or not silent:
        return ""
    return (
        f"rank(s) {silent} say nothing: killed, cut off, or still busy"
        if told.is_set()
        else "nor does the store answer in which the ranks met: where rank 0 ran, nobody is left"
    )


@contextmanager
def explain_timeout(activity: str, repair: str = "") -> Iterator[None]:
    """Around a wait for a rank that does what may take long. Raises StepFailed that says so,
    where it took too long.
    """
    try:
        yield
    except Exception as error:
        if not TIMEOUT_PATTERN.search(str(error)):
            raise
        raise StepFailed(
            f"{describe_error(error)}; meanwhile {activity}: where that takes longer than ranks "
            f"wait for each "
            f"other, give a "
            f"longer --timeout{repair}"
        ) from error


def explain_independent_steps() -> AbstractContextManager[None]:
    """Around a wait for ranks that step alone, where what each takes adds up over many
    steps.
    """
    return explain_timeout("others make steps of their own", ", or let them meet more often")


def make_step_failure(world: World, error: Exception, step: int) -> StepFailed:
    """What was raised in a step, and whom it is about."""
    failed = StepFailed.wrap_error(error, step)
    said = describe_missing_ranks(world, error)
    return (
        StepFailed(
            f"{failed.message}; {said}", step=failed.step, tensor=failed.tensor, when=failed.when
        )
        if said
        else failed
    )


def _make_failure_key(rank: int) -> str:
    return f"paragrad: failed: {rank}"
