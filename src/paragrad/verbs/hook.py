"""hook: our all-reduces for people who use DistributedDataParallel without the rest of this library."""

from __future__ import annotations

from typing import Any

from paragrad.errors import Refused
from paragrad.strategies.strategy import Data, refuse_unbuilt, resolve, strategy
from paragrad.techniques.data_parallel.walker import Walker, waiting_bucket
from paragrad.training.admission import check_schedule
from paragrad.training.settings import Settings
from paragrad.world.joining import ranks_here, standing


def hook(algorithm: str) -> tuple[Any, Any]:
    """(state, hook) of an all-reduce such as "ring" or "ring_async(segments=4)": `ddp.register_comm_hook(*hook("ring"))`.

    Gradients become the mean over ranks, as DDP's own. Call it on every rank, after init_process_group: it makes a process
    group of its own. The schedule is proved first. Raises Refused.
    """
    world = standing()
    if world is None:
        raise Refused("hook wants a process group; call torch.distributed.init_process_group first")
    chosen = strategy(f"data({world.size}, reduce={algorithm})")
    refuse_unbuilt(chosen)
    resolved = resolve(chosen, cores=1, group=ranks_here())
    check_schedule(chosen, resolved, Settings())
    assert isinstance(resolved, Data)
    assert isinstance(chosen, Data)
    if chosen != Data(world.size, reduce=chosen.reduce):
        raise Refused(f"hook takes the name of an all-reduce, such as 'ring' or 'ring_async(segments=4)'; got {algorithm!r}")
    return Walker(resolved.reduce, world), _mean


def _mean(walker, bucket):  # type: ignore[no-untyped-def]        # DDP looks at annotations, and wants none or its own
    waiting = waiting_bucket(bucket)
    walker.put(waiting)
    return waiting.future.then(lambda future: future.value().div_(walker.world.size))
