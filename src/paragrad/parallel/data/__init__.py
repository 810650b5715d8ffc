"""Synchronous data parallelism: gradients are summed over all workers.

The sum follows a schedule of messages or uses shared memory.
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
    """Make the exchange of `serial` or `data`.

    Collective: all ranks call it together.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Returns:
        The exchange of this rank.
    """
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
    has_fault = options.inject_fault == "mean_twice"
    if replica.layout.is_partitioned:
        from paragrad.parallel.data.bucketing import (
            GradientBucketDoubleDivision,
            GradientBucketExchange,
        )

        return (GradientBucketDoubleDivision if has_fault else GradientBucketExchange)(
            replica, world, log, options, strategy.reduce
        )
    from paragrad.parallel.data.ddp_exchange import DDPDoubleDivision, DDPExchange

    return (DDPDoubleDivision if has_fault else DDPExchange)(
        replica, world, log, options, strategy.reduce
    )
