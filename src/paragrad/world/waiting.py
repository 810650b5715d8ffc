"""For whom a rank waits: said after some seconds, since a wait itself ends only at its bound."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paragrad.world.world import World

AFTER = 10.0            # seconds in one step, after which it is asked who else is in it
LOOK = 0.5              # seconds between two looks


class Watch:
    """Of the steps of a rank. A rank that was in a step for long says so in the store where the ranks met; who has said nothing
    as long after that has not come to it, and the first of those that wait names them, once for a step.
    """

    def __init__(self, world: World, after: float | None = None) -> None:
        self.world, self.after = world, AFTER if after is None else after
        self.step, self.since = 0, 0.0                  # since when it is in that step; 0: in none
        self.ended = threading.Event()
        if world.size > 1:
            threading.Thread(target=self._look, name="paragrad-watch", daemon=True).start()

    @contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Around a step."""
        self.step, self.since = step, time.monotonic()
        try:
            yield
        finally:
            self.since = 0.0

    def close(self) -> None:
        self.ended.set()

    def _look(self) -> None:
        told = -1
        while not self.ended.wait(LOOK):
            step, since = self.step, self.since
            if since and time.monotonic() - since > self.after and told != step:
                told = step
                with suppress(Exception):               # the group is left, or its store is out of reach: the wait itself ends
                    self._tell(step, since)

    def _tell(self, step: int, since: float) -> None:
        store, own, size = self.world.store, self.world.rank, self.world.size
        store.set(_key(own), str(step))
        self.ended.wait(self.after + 4 * LOOK)          # for the others to say so too, who came later
        if self.since != since:
            return
        waiting = [rank for rank in range(size) if store.check([_key(rank)]) and int(store.get(_key(rank))) == step]
        away = [str(rank) for rank in range(size) if rank not in waiting]
        if away and own == waiting[0] and self.since == since:
            print(f"paragrad: rank {own} is in step {step} for {time.monotonic() - since:.0f} s, and rank(s) {', '.join(away)} "
                  "have not come to it: still loading, in another number of steps, or gone", file=sys.stderr, flush=True)


def _key(rank: int) -> str:
    return f"paragrad: in a step for long: {rank}"
