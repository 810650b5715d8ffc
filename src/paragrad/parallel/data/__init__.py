"""Synchronous data parallelism: gradients are summed over all workers, along a schedule or in
shared memory.
"""

from __future__ import annotations

from paragrad.engine.exchange import Exchange, ExchangeOptions, NoExchange, Replica
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Dgc
from paragrad.strategies.data import Data
from paragrad.strategies.serial import Serial


def make_exchange(
    strategy: Data | Serial, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """The exchange of `serial` and `data`. Collective."""
    if isinstance(strategy, Data) and strategy.compress is not None:
        from paragrad.parallel.data.compressed_exchange import CompressedExchange
        from paragrad.parallel.data.dgc import DgcExchange

        return (DgcExchange if isinstance(strategy.compress, Dgc) else CompressedExchange)(
            strategy, replica, world, log, options
        )
    if world.size == 1:
        return NoExchange(replica)
    assert isinstance(strategy, Data)
    if strategy.shares_memory:
        from paragrad.parallel.data.shared_memory import SharedMemoryExchange

        return SharedMemoryExchange(replica, world, log)
    if strategy.shards_parameters:
        from paragrad.parallel.data.fully_sharded import FullyShardedExchange

        return FullyShardedExchange(replica, world, log)
    planted = options.inject_fault == "mean_twice"
    if replica.layout.is_partitioned:
        from paragrad.parallel.data.bucketing import (
            GradientBucketDoubleDivision,
            GradientBucketExchange,
        )

        return (GradientBucketDoubleDivision if planted else GradientBucketExchange)(
            replica, world, log, options, strategy.reduce
        )
    from paragrad.parallel.data.ddp_exchange import DDPDoubleDivision, DDPExchange

    return (DDPDoubleDivision if planted else DDPExchange)(
        replica, world, log, options, strategy.reduce
    )
