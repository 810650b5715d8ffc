"""Parameter servers: who holds what, what travels, and both sides of it."""

from __future__ import annotations

from paragrad.record.log import Log
from paragrad.strategies.server import Server
from paragrad.techniques.exchange import Exchange, How, Replica
from paragrad.techniques.served.asking import Asking
from paragrad.techniques.served.serving import Serving
from paragrad.world.world import World


def exchange(strategy: Server, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `server`, of a worker or of a server. Collective over all of them."""
    return (Serving if how.serves(strategy, world.rank) else Asking)(
        strategy, replica, world, log, how.meeting
    )
