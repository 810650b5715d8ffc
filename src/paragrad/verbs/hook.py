"""hook: our all-reduces for people who use DistributedDataParallel without the rest of this library."""

from __future__ import annotations

import atexit
from typing import Any

from paragrad.errors import Refused
from paragrad.notation.choices import Choice
from paragrad.strategies.data import Data
from paragrad.strategies.strategy import Here
from paragrad.strategies.table import refuse_unbuilt
from paragrad.techniques.data_parallel.bucket_queue import BucketQueue, waiting_bucket
from paragrad.training.admission import check_plans
from paragrad.training.settings import Settings
from paragrad.world.joining import ranks_here, standing


def hook(algorithm: str | Choice) -> tuple[Any, Any]:
    """(state, hook) of an all-reduce such as "ring" or "ring_async(segments=4)": `ddp.register_comm_hook(*hook("ring"))`.

    Gradients become the mean over ranks, as DDP's own. Call it on every rank, after init_process_group: it makes a process
    group of its own. The schedule is proved first. Raises Refused.
    """
    world = standing()
    if world is None:
        raise Refused("hook wants a process group; call torch.distributed.init_process_group first")
    try:
        chosen = Data(world.size, reduce=algorithm)
        refuse_unbuilt(chosen)
    except Refused as error:
        raise Refused(f"hook takes the name of an all-reduce, such as 'ring' or 'ring_async(segments=4)', or one of your own; "
                      f"{error}") from None
    resolved = chosen.resolved(Here(ranks=world.size, group=ranks_here(), backend=world.backend or "gloo", own_loop=True))
    check_plans(chosen, resolved, Settings())
    queue = BucketQueue(resolved.reduce, world)
    atexit.register(queue.close)                # a thread that is still there as the interpreter ends may abort it
    return queue, _mean


def _mean(queue, bucket):  # type: ignore[no-untyped-def]        # DDP looks at annotations, and wants none or its own
    waiting = waiting_bucket(bucket.index(), bucket.buffer())
    queue.put(waiting)
    return waiting.future.then(lambda future: future.value().div_(queue.world.size))
