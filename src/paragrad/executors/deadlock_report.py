"""A report of a deadlock: the last actions of every rank, shared through the store of the world.

For example:

    rank 0 waits for slot 0 from rank 2, which waits for slot 1 from rank 1, which says nothing:
    Timed out waiting 20000ms ...
       0 | >1:0 <2:2+ >1:2 [<2:1+] >1:1 <2:0 >1:0 ...
       1 | says nothing
       2 | >0:2 [<1:1+] >0:1 <1:0+ ...

In a line, `[...]` marks the present action of the rank. The last actions stand before it, and the
next ones after it. `text_drawing.py` explains how an action is written.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from paragrad.runtime.world import World

# Time for the other ranks to share their statuses. A rank that waits for this one fails soon after
# this one does, so 2 s are enough.
STATUS_SECONDS = 2.0


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank when an exchange fails.

    The texts name ranks by their numbers in the launched world.

    Attributes:
        schedule_number: How many schedules the rank began before, in this group.

        actions: Its last actions, and the next ones.

        waits_for: What the rank waits for.

        peer: The rank of this group that it waits for.
    """

    schedule_number: int
    actions: str
    waits_for: str = ""
    peer: int | None = None


class DeadlockReport:
    """The statuses of all ranks, collected in a thread.

    The store may be out of reach, or blocked by a rank that waits in it. So a thread asks it.

    Args:
        world: The world of the ranks.
        own_status: The status of this rank.
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
        with suppress(Exception):  # then the report has the line of this rank only
            store = self.world.store
            store.set(_make_status_key(self.world.rank), json.dumps(asdict(self.own_status)))
            with suppress(RuntimeError):  # a rank does not answer
                store.wait(
                    [_make_status_key(rank) for rank in others], timedelta(seconds=STATUS_SECONDS)
                )
            for rank in others:
                if store.check([_make_status_key(rank)]):
                    self.statuses[rank] = RankStatus(
                        **json.loads(store.get(_make_status_key(rank)))
                    )

    def format_report(self, error: Exception) -> str:
        """Return which rank waits for what, and the last actions of each.

        Args:
            error: The error of this rank.
        """
        self.thread.join(2 * STATUS_SECONDS)
        statuses = dict(self.statuses)
        margin = len(str(max(self.launched_ranks)))
        lines = [
            f"   {name:>{margin}} | {self._format_status(statuses.get(rank))}"
            for rank, name in enumerate(self.launched_ranks)
        ]
        return "\n".join(
            [f"{self._describe_wait_chain(statuses, self.world.rank)}: {error}", *lines]
        )

    def _describe_wait_chain(self, statuses: dict[int, RankStatus], rank: int) -> str:
        """Follow the waits from a rank to a rank that waits for no other, or once around."""
        text = f"rank {self.launched_ranks[rank]}"
        seen = {rank}
        while True:
            status = statuses.get(rank)
            if status is None:
                return f"{text} says nothing"
            if status.peer is None:
                return f"{text} fails"
            rank = status.peer
            text = f"{text} waits for {status.waits_for}"
            if rank in seen:
                return text
            seen.add(rank)
            text += ", which"

    def _format_status(self, status: RankStatus | None) -> str:
        if status is None:
            return "says nothing"
        ahead = status.schedule_number - self.own_status.schedule_number
        suffix = (
            f" ({abs(ahead)} exchange{'s' * (abs(ahead) > 1)} {'ahead' if ahead > 0 else 'behind'})"
            if ahead
            else ""
        )
        return status.actions + suffix


def _make_status_key(rank: int) -> str:
    return f"paragrad/hang/{rank}"
