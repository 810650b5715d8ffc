"""Parameter servers: who holds what, what travels, and both sides of it."""

from __future__ import annotations

from paragrad.engine.exchange import Exchange, ExchangeOptions, Replica
from paragrad.parallel.server.server_exchange import ServerExchange
from paragrad.parallel.server.worker_exchange import WorkerExchange
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.server import Server


def make_exchange(
    strategy: Server, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """The exchange of `server`, of a worker or of a server. Collective over all of them."""
    return (ServerExchange if options.is_server(strategy, world.rank) else WorkerExchange)(
        strategy, replica, world, log, options.endpoints
    )
