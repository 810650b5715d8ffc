"""Synchronous data parallelism: gradients are summed over all workers, along a schedule or in shared memory."""

from __future__ import annotations

from paragrad.record.log import Log
from paragrad.strategies.data import Data
from paragrad.strategies.serial import Serial
from paragrad.techniques.exchange import Alone, Exchange, Held, How
from paragrad.world.world import World


def exchange(strategy: Data | Serial, held: Held, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `serial` and `data`. Collective."""
    if world.size == 1:
        return Alone(held)
    assert isinstance(strategy, Data)
    if strategy.shared:
        from paragrad.techniques.data_parallel.shared_memory import SharedMemory
        return SharedMemory(held, world, log)
    from paragrad.techniques.data_parallel.all_reduce import AllReduceExchange, DividedTwice
    divided = how.sabotage == "mean_twice"
    return (DividedTwice if divided else AllReduceExchange)(held, world, log, how, strategy.reduce)
