"""A hang, drawn: every rank's last actions, told through the store that the ranks met in.

rank 0 waits for slot 0 from rank 2, which waits for slot 1 from rank 1, which says nothing:
Timed out waiting 20000ms ...
   0 | >1:0 <2:2+ >1:2 [<2:1+] >1:1 <2:0 >1:0 ...
   1 | says nothing
   2 | >0:2 [<1:1+] >0:1 <1:0+ ...
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from paragrad.runtime.world import World

# for the others to say where they stand: who waits for this rank fails with it, within
# milliseconds
SECONDS = 2.0


@dataclass(frozen=True)
class Standing:
    """Where a rank stands. walk: how many it began before, over this group;  peer: the rank it
    waits for, in this group; in words ranks have the numbers by which they were launched.
    """

    walk: int
    actions: str
    waits_for: str = ""
    peer: int | None = None


class Lines:
    """What every rank says of itself. Asked for in a thread: a store may be out of reach, or
    held by whoever waits in it.
    """

    def __init__(self, world: World, mine: Standing) -> None:
        self.world = world
        self.mine = mine
        self.names = world.launched
        self.standings = {world.rank: mine}
        self.thread = threading.Thread(target=self._exchange, name="paragrad-hang", daemon=True)
        self.thread.start()

    def _exchange(self) -> None:
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        with suppress(Exception):  # then the own line is all there is
            store = self.world.store
            store.set(_key(self.world.rank), json.dumps(asdict(self.mine)))
            with suppress(RuntimeError):  # somebody says nothing
                store.wait([_key(rank) for rank in others], timedelta(seconds=SECONDS))
            for rank in others:
                if store.check([_key(rank)]):
                    self.standings[rank] = Standing(**json.loads(store.get(_key(rank))))

    def picture(self, error: Exception) -> str:
        """Who waits for what, and the schedule around the hang."""
        self.thread.join(2 * SECONDS)
        standings = dict(self.standings)
        margin = len(str(max(self.names)))
        lines = [
            f"   {name:>{margin}} | {self._line(standings.get(rank))}"
            for rank, name in enumerate(self.names)
        ]
        return "\n".join([f"{self._story(standings, self.world.rank)}: {error}", *lines])

    def _story(self, standings: dict[int, Standing], rank: int) -> str:
        """From this rank to the one it waits for, and on, to one that waits for nobody, or once
        around.
        """
        text = f"rank {self.names[rank]}"
        seen = {rank}
        while True:
            standing = standings.get(rank)
            if standing is None:
                return f"{text} says nothing"
            if standing.peer is None:
                return f"{text} fails"
            rank = standing.peer
            text = f"{text} waits for {standing.waits_for}"
            if rank in seen:
                return text
            seen.add(rank)
            text += ", which"

    def _line(self, standing: Standing | None) -> str:
        if standing is None:
            return "says nothing"
        apart = standing.walk - self.mine.walk
        turn = (
            f" ({abs(apart)} exchange{'s' * (abs(apart) > 1)} {'ahead' if apart > 0 else 'behind'})"
            if apart
            else ""
        )
        return standing.actions + turn


def _key(rank: int) -> str:
    return f"paragrad/hang/{rank}"
