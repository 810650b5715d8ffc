"""Parameter servers: partition of the parameters, messages, and both sides of the exchange."""

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
    """Make the exchange of `server`, for a worker or for a server.

    Collective: all workers and servers call it together.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of workers and servers, or the world of this process alone.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Returns:
        The exchange of this rank.
    """
    return (ServerExchange if options.is_server(strategy, world.rank) else WorkerExchange)(
        strategy, replica, world, log, options.endpoints
    )
