"""Synchronous data parallelism: gradients are summed over all workers, along a schedule or in
shared memory.
"""

from __future__ import annotations

from paragrad.engine.exchange import Alone, Exchange, How, Replica
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Dgc
from paragrad.strategies.data import Data
from paragrad.strategies.serial import Serial


def exchange(
    strategy: Data | Serial, replica: Replica, world: World, log: Log, how: How
) -> Exchange:
    """The exchange of `serial` and `data`. Collective."""
    if isinstance(strategy, Data) and strategy.compress is not None:
        from paragrad.parallel.data.compressed_exchange import Compressed
        from paragrad.parallel.data.dgc import Deep

        return (Deep if isinstance(strategy.compress, Dgc) else Compressed)(
            strategy, replica, world, log, how
        )
    if world.size == 1:
        return Alone(replica)
    assert isinstance(strategy, Data)
    if strategy.shared:
        from paragrad.parallel.data.shared_memory import SharedMemory

        return SharedMemory(replica, world, log)
    if strategy.sharded:
        from paragrad.parallel.data.fully_sharded import FullySharded

        return FullySharded(replica, world, log)
    planted = how.sabotage == "mean_twice"
    if replica.layout.cut:
        from paragrad.parallel.data.bucketing import OwnBuckets, OwnBucketsDividedTwice

        return (OwnBucketsDividedTwice if planted else OwnBuckets)(
            replica, world, log, how, strategy.reduce
        )
    from paragrad.parallel.data.ddp_exchange import AllReduceDividedTwice, AllReduceExchange

    return (AllReduceDividedTwice if planted else AllReduceExchange)(
        replica, world, log, how, strategy.reduce
    )
