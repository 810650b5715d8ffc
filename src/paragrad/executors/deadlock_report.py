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
STATUS_SECONDS = 2.0


@dataclass(frozen=True)
class RankStatus:
    """Where a rank stands. walk: how many it began before, over this group;  peer: the rank it
    waits for, in this group; in words ranks have the numbers by which they were launched.
    """

    schedule_number: int
    actions: str
    waits_for: str = ""
    peer: int | None = None


class DeadlockReport:
    """What every rank says of itself. Asked for in a thread: a store may be out of reach, or
    held by whoever waits in it.
    """

    def __init__(self, world: World, own_status: RankStatus) -> None:
        self.world = world
        self.own_status = own_status
        self.launched_ranks = world.global_ranks
        self.statuses = {world.rank: own_status}
        self.thread = threading.Thread(
            target=self._share_statuses, name="paragrad-hang", daemon=True
        )
        self.thread.start()

    def _share_statuses(self) -> None:
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        with suppress(Exception):  # then the own line is all there is
            store = self.world.store
            store.set(_make_status_key(self.world.rank), json.dumps(asdict(self.own_status)))
            with suppress(RuntimeError):  # somebody says nothing
                store.wait(
                    [_make_status_key(rank) for rank in others], timedelta(seconds=STATUS_SECONDS)
                )
            for rank in others:
                if store.check([_make_status_key(rank)]):
                    self.statuses[rank] = RankStatus(
                        **json.loads(store.get(_make_status_key(rank)))
                    )

    def format_report(self, error: Exception) -> str:
        """Who waits for what, and the schedule around the hang."""
        self.thread.join(2 * STATUS_SECONDS)
        standings = dict(self.statuses)
        margin = len(str(max(self.launched_ranks)))
        lines = [
            f"   {name:>{margin}} | {self._format_status(standings.get(rank))}"
            for rank, name in enumerate(self.launched_ranks)
        ]
        return "\n".join(
            [f"{self._describe_wait_chain(standings, self.world.rank)}: {error}", *lines]
        )

    def _describe_wait_chain(self, statuses: dict[int, RankStatus], rank: int) -> str:
        """From this rank to the one it waits for, and on, to one that waits for nobody, or once
        around.
        """
        text = f"rank {self.launched_ranks[rank]}"
        seen = {rank}
        while True:
            standing = statuses.get(rank)
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

    def _format_status(self, status: RankStatus | None) -> str:
        if status is None:
            return "says nothing"
        apart = status.schedule_number - self.own_status.schedule_number
        turn = (
            f" ({abs(apart)} exchange{'s' * (abs(apart) > 1)} {'ahead' if apart > 0 else 'behind'})"
            if apart
            else ""
        )
        return status.actions + turn


def _make_status_key(rank: int) -> str:
    return f"paragrad/hang/{rank}"
