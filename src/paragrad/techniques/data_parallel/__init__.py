"""Synchronous data parallelism: gradients are summed over all workers, along a schedule or in
shared memory.
"""

from __future__ import annotations

from paragrad.record.log import Log
from paragrad.strategies.compressors import Dgc
from paragrad.strategies.data import Data
from paragrad.strategies.serial import Serial
from paragrad.techniques.exchange import Alone, Exchange, How, Replica
from paragrad.world.world import World


def exchange(
    strategy: Data | Serial, replica: Replica, world: World, log: Log, how: How
) -> Exchange:
    """The exchange of `serial` and `data`. Collective."""
    if isinstance(strategy, Data) and strategy.compress is not None:
        from paragrad.techniques.data_parallel.compressed import Compressed
        from paragrad.techniques.data_parallel.deep import Deep

        return (Deep if isinstance(strategy.compress, Dgc) else Compressed)(
            strategy, replica, world, log, how
        )
    if world.size == 1:
        return Alone(replica)
    assert isinstance(strategy, Data)
    if strategy.shared:
        from paragrad.techniques.data_parallel.shared_memory import SharedMemory

        return SharedMemory(replica, world, log)
    if strategy.sharded:
        from paragrad.techniques.data_parallel.fully_sharded import FullySharded

        return FullySharded(replica, world, log)
    planted = how.sabotage == "mean_twice"
    if replica.layout.cut:
        from paragrad.techniques.data_parallel.own_buckets import OwnBuckets, OwnBucketsDividedTwice

        return (OwnBucketsDividedTwice if planted else OwnBuckets)(
            replica, world, log, how, strategy.reduce
        )
    from paragrad.techniques.data_parallel.all_reduce import (
        AllReduceDividedTwice,
        AllReduceExchange,
    )

    return (AllReduceDividedTwice if planted else AllReduceExchange)(
        replica, world, log, how, strategy.reduce
    )
