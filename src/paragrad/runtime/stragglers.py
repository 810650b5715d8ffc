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

from paragrad.errors import StepFailed, told
from paragrad.runtime.world import World

AFTER = 10.0  # seconds in one step, after which it is asked who else is in it
LOOK = 0.5  # seconds between two looks
# for the others to say that they fail too: connections to a rank that died close at once, on
# all
HEARD = 2.0
# what gloo and stores say
CLOSED = re.compile("connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)
LATE = re.compile("timed? ?out|gave up waiting", re.IGNORECASE)  # gloo and stores; shm
VAIN = re.compile(
    r"no answer from server|^GroupError: .*(ended while rank|gave up waiting)|^RuntimeError: "
    r"\[[^\]]*gloo|"
    r"^Dist\w*Error: ",
    re.DOTALL,
)  # servers; shm; gloo; stores


def in_vain(message: str) -> bool:
    """Does a failure say that its rank waited for another, which is gone or does not go on? Not
    what a user's code raises.
    """
    return VAIN.search(message) is not None


class Watch:
    """Of the steps of a rank. A rank that was in a step for long says so in the store where the
    ranks met; who has said nothing as long after that has not come to it, and the first of
    those that wait names them, once for a step. in_step: ranks meet in every step; others may
    be long, and nothing is wrong.
    """

    def __init__(self, world: World, in_step: bool = True, after: float = AFTER) -> None:
        self.world = world
        self.after = after if in_step else inf
        # since when it is in that step; 0: in none
        self.step = 0
        self.since = 0.0
        self.ended = threading.Event()
        if world.size > 1 and in_step:
            threading.Thread(target=self._look, name="paragrad-watch", daemon=True).start()

    @contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Around a step."""
        self.step = step
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = 0.0

    def close(self) -> None:
        self.ended.set()

    def _look(self) -> None:
        told = -1
        while not self.ended.wait(LOOK):
            step = self.step
            since = self.since
            if since and time.monotonic() - since > self.after and told != step:
                told = step
                # the group is left, or its store is out of reach: the wait itself ends
                with suppress(Exception):
                    self._tell(step, since)

    def _tell(self, step: int, since: float) -> None:
        store = self.world.store
        own = self.world.rank
        size = self.world.size
        store.set(_key(own), str(step))
        # for the others to say so too, who came later
        self.ended.wait(self.after + 4 * LOOK)
        if self.since != since:
            return
        waiting = [
            rank
            for rank in range(size)
            if store.check([_key(rank)]) and int(store.get(_key(rank))) == step
        ]
        away = [str(rank) for rank in range(size) if rank not in waiting]
        if away and own == waiting[0] and self.since == since:
            print(
                f"paragrad: rank {own} is in step {step} for {time.monotonic() - since:.0f} s, and "
                f"rank(s) {', '.join(away)} "
                "have not come to it: still loading, in another number of steps, or gone",
                file=sys.stderr,
                flush=True,
            )


def _key(rank: int) -> str:
    return f"paragrad: in a step for long: {rank}"


def away(world: World, error: BaseException) -> str:
    """Whom an error of a connection is about, in words; nothing for another error. Every rank
    that fails asks, and so says that it is there: gloo knows addresses, and no ranks.
    """
    if world.size == 1:
        return ""
    others = [rank for rank in range(world.size) if rank != world.rank]
    heard = set[int]()
    told = threading.Event()
    # not a user's own connection
    lost = isinstance(error, RuntimeError) and CLOSED.search(str(error)) is not None
    # the wire names ranks itself
    closed = lost and not isinstance(error, StepFailed) and "says nothing" not in str(error)

    def ask() -> None:
        with suppress(Exception):  # the store went with rank 0
            world.store.set(_failed(world.rank), "")
            if closed:
                with suppress(RuntimeError):  # somebody says nothing
                    world.store.wait([_failed(rank) for rank in others], timedelta(seconds=HEARD))
                heard.update(rank for rank in others if world.store.check([_failed(rank)]))
            told.set()

    # a store may hold who asks for long
    thread = threading.Thread(target=ask, name="paragrad-away", daemon=True)
    thread.start()
    # or one would fail after another, each when the one before has ended
    for found in list(world.kin) if lost else ():
        if (each := found()) is not None and each.group is not None and each.backend == "gloo":
            each.hang_up()
    thread.join(2 * HEARD)
    silent = ", ".join(str(rank) for rank in others if rank not in heard)
    if not closed or not silent:
        return ""
    return (
        f"rank(s) {silent} say nothing: killed, cut off, or still busy"
        if told.is_set()
        else "nor does the store answer in which the ranks met: where rank 0 ran, nobody is left"
    )


@contextmanager
def meanwhile(what: str, repair: str = "") -> Iterator[None]:
    """Around a wait for a rank that does what may take long. Raises StepFailed that says so,
    where it took too long.
    """
    try:
        yield
    except Exception as error:
        if not LATE.search(str(error)):
            raise
        raise StepFailed(
            f"{told(error)}; meanwhile {what}: where that takes longer than ranks wait for each "
            f"other, give a "
            f"longer --timeout{repair}"
        ) from error


def out_of_step() -> AbstractContextManager[None]:
    """Around a wait for ranks that step alone, where what each takes adds up over many
    steps.
    """
    return meanwhile("others make steps of their own", ", or let them meet more often")


def failure(world: World, error: Exception, step: int) -> StepFailed:
    """What was raised in a step, and whom it is about."""
    failed = StepFailed.of(error, step)
    said = away(world, error)
    return (
        StepFailed(
            f"{failed.message}; {said}", step=failed.step, tensor=failed.tensor, when=failed.when
        )
        if said
        else failed
    )


def _failed(rank: int) -> str:
    return f"paragrad: failed: {rank}"
