"""hook: our all-reduces, and compressors, for people who use DistributedDataParallel without the rest of this library."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, build
from paragrad.notation.grammar import parse_call
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.data import Data
from paragrad.strategies.strategy import Here
from paragrad.strategies.table import algorithms
from paragrad.techniques.compression.compression import Compression
from paragrad.techniques.compression.feedback import Corrected
from paragrad.techniques.compression.momentum import momentum_of
from paragrad.techniques.data_parallel.bucket_queue import BucketQueue, waiting_bucket
from paragrad.training.admission import check_plans
from paragrad.training.asked import Updates
from paragrad.training.settings import Settings
from paragrad.world.joining import ranks_here, standing


def hook(algorithm: str | Choice, optimizer: torch.optim.Optimizer | None = None,
         steps_per_epoch: int | None = None) -> tuple[Any, Any]:
    """(state, hook) of an all-reduce such as "ring", or of a compressor such as "top_k(0.01)":
    `ddp.register_comm_hook(*hook("ring"))`.

    Gradients become the mean over ranks, as DDP's own, or what was sent of it. Call it on every rank, after
    init_process_group: it makes process groups of its own. A schedule is proved first. optimizer, steps_per_epoch: asked for
    by dgc alone, whose momentum is the optimizer's, taken over, and which warms up by epochs. Raises Refused.
    """
    world = standing()
    if world is None:
        raise Refused("hook wants a process group; call torch.distributed.init_process_group first")
    found = _read(algorithm)
    compressor = found if isinstance(found, Compressor) else None
    chosen = Data(world.size, compress=compressor) if compressor else Data(world.size, reduce=found)
    resolved = chosen.resolved(Here(ranks=world.size, group=ranks_here(), backend=world.backend or "gloo", own_loop=True))
    check_plans(chosen, resolved, Settings())
    if compressor is not None:
        compressor.refuse_hooked(None if optimizer is None else Updates(optimizer), steps_per_epoch)
    elif optimizer is not None or steps_per_epoch is not None:
        raise Refused(f"hook({found}) wants no optimizer and no steps_per_epoch, which dgc has a use for; leave them out")
    queue = BucketQueue(resolved.reduce, world)
    atexit.register(queue.close)                # a thread that is still there as the interpreter ends may abort it
    if compressor is None:
        return queue, _mean
    return Compressing(compressor, world.twin(), queue, optimizer, steps_per_epoch), _compressed


def _read(algorithm: str | Choice) -> Choice:
    known: dict[str, type[Choice]] = {**algorithms(), **Compressor.members}
    try:
        found = build(parse_call(algorithm), known, "hook") if isinstance(algorithm, str) else algorithm
        if not isinstance(found, tuple(known.values())):
            raise Refused(f"got {algorithm!r}")
    except Refused as error:
        raise Refused("hook takes the name of an all-reduce, such as 'ring' or 'ring_async(segments=4)', or one of your own; "
                      f"or that of a compressor, such as 'top_k(0.01)'; {error}") from None
    return found


class Compressing:
    """The state of a hook that compresses: a thread of its own takes bucket after bucket, in DDP's order."""

    def __init__(self, compressor: Compressor, world: Any, queue: BucketQueue, optimizer: torch.optim.Optimizer | None,
                 steps_per_epoch: int | None) -> None:
        self.asked, self.world, self.queue, self.steps_per_epoch = compressor, world, queue, steps_per_epoch
        every = [] if optimizer is None else [each for group in optimizer.param_groups for each in group["params"]]
        self.names = {each: str(number) for number, each in enumerate(every)}
        self.momentum = momentum_of(compressor, optimizer, {name: each for each, name in self.names.items()})
        feedback = Corrected(self.momentum.of) if self.momentum else None
        self.compression = Compression(compressor, world, self._sum, feedback=feedback)
        self.step, self.thread = 0, ThreadPoolExecutor(1, thread_name_prefix="paragrad-compression")
        atexit.register(self.thread.shutdown, wait=False)

    def put(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """A bucket of DDP's; its future has the mean gradients, as far as they were sent, in the bucket's own buffer."""
        waiting = waiting_bucket(bucket.index(), bucket.buffer())
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        last = bucket.is_last()

        def run() -> None:
            try:
                if waiting.computed is not None:
                    waiting.computed.synchronize()
                self._exchange(pairs, last)
                waiting.future.set_result(waiting.vector)
            except Exception as error:
                waiting.future.set_exception(error)
        self.thread.submit(run)
        return waiting.future

    def _exchange(self, pairs: list[tuple[Tensor, Tensor]], last: bool) -> None:
        if self.momentum is not None:
            self.momentum.follow()
        self.compression.become(self.asked.in_epoch(self.step // (self.steps_per_epoch or 1)))
        gradients = {self.names.setdefault(parameter, str(len(self.names))): gradient for parameter, gradient in pairs}
        large = {name: each for name, each in gradients.items() if self.asked.compresses(each.shape)}
        sending = self.compression.begin(large, 1.0 / self.world.size, self.step)
        for name, each in gradients.items():
            if name not in large:
                found = self._sum(each.div(self.world.size), "dense")()
                each.copy_(found if self.momentum is None else self.momentum.moved(name, found, small=True))
        for name, mean in self.compression.finish(sending).items():
            found = mean.view_as(gradients[name])
            gradients[name].copy_(found if self.momentum is None else self.momentum.moved(name, found, small=False))
        self.step += last

    def _sum(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        waiting = waiting_bucket(0, vector)
        self.queue.put(waiting)
        return waiting.future.wait


def _compressed(compressing, bucket):  # type: ignore[no-untyped-def]        # DDP looks at annotations
    return compressing.put(bucket)


def _mean(queue, bucket):  # type: ignore[no-untyped-def]        # DDP looks at annotations, and wants none or its own
    waiting = waiting_bucket(bucket.index(), bucket.buffer())
    queue.put(waiting)
    return waiting.future.then(lambda future: future.value().div_(queue.world.size))
