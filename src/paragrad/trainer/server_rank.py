"""A rank that is a parameter server: it serves until the workers dismiss it."""

from __future__ import annotations

from paragrad.errors import StepFailed
from paragrad.trainer.exchange_setup import set_up_exchange
from paragrad.trainer.training import Training

# key in the store of a world with servers: how often the workers dismissed that rank
DISMISSED_KEY = "paragrad: dismissed {}"


def run_parameter_server(training: Training) -> None:
    """Run a server until the workers dismiss it. Collective with the first step of the workers.

    Args:
        training: The training of the server.

    Raises:
        StepFailed: If the server fails, or if it returns before it is dismissed.
    """
    try:
        exchange = set_up_exchange(training)
        exchange.serve()
        full_world = training.setup.full_world
        if full_world.store.add(DISMISSED_KEY.format(full_world.rank), -1) < 0:
            raise StepFailed(
                f"serve() of {type(exchange).__name__} returned before the workers dismissed it; "
                "let it serve until dismiss_servers() tells it to end"
            )
    except Exception as error:
        raise training.report_failure(error) from error


def dismiss_run_servers(training: Training) -> None:
    """Dismiss the servers at the end of a run, also if there was no step.

    Collective of the workers.

    Args:
        training: The training of a worker.
    """
    if training.setup.strategy.servers:
        world, full_world = training.world, training.setup.full_world
        if world.rank == 0:
            for rank in range(world.size, full_world.size):
                full_world.store.add(DISMISSED_KEY.format(rank), 1)
        world.barrier()
        (training.setup.exchange or set_up_exchange(training)).dismiss_servers()
