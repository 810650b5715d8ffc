"""Parameter servers: who holds what, what travels, and both sides of it."""

from __future__ import annotations

from paragrad.engine.exchange import Exchange, How, Replica
from paragrad.parallel.server.server_exchange import Serving
from paragrad.parallel.server.worker_exchange import Asking
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


def exchange(strategy: Server, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `server`, of a worker or of a server. Collective over all of them."""
    return (Serving if how.serves(strategy, world.rank) else Asking)(
        strategy, replica, world, log, how.meeting
    )
