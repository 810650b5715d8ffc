"""Synchronous data parallelism: every worker computes its share of the batch, gradients are summed over all workers.

The contract with DistributedDataParallel, which cuts gradients into buckets and tells when one is ready:

* backward runs on the *sum* of losses; the exchange sums; the one division by the global weight is the trainer's, for
  every strategy, serial included. The weight itself travels as one more gradient (`paragrad.loss.Summed`).
* every algorithm, `native` too, goes through the same communication hook. The hook queues the bucket and returns a Future;
  one walker thread per rank plays the buckets in DDP's order, over a process group of its own.
* only the last micro-batch of a step is exchanged. A rank whose part is empty runs one sample with weight 0, so that all
  hooks fire in the same order.
* parameters unused in step 0 on any rank: DDP looks for unused ones in every step; unused everywhere leaves grad None.
  Where all were used in step 0, one that gets no gradient later ends the run with its name.
* buffers are not broadcast: exact batch norm (`batch_norm.py`) keeps them equal.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paragrad.errors import StepFailed
from paragrad.players.wire import all_reduce
from paragrad.strategy import Native
from paragrad.world import World

# torch 2.13 renamed the switch that leaves buffers alone in forward
_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _new_name else "broadcast_buffers": False}


@dataclass
class Bucket:
    """Gradients sent together, waiting for their exchange."""
    number: int
    vector: Tensor
    future: torch.futures.Future[Tensor]
    computed: torch.cuda.Event | None = None            # on a GPU: when the gradients are really there


class Exchange:
    """Wraps a module so that its backward sums the gradients of all ranks.

    span(name, lane, start, bytes) is told of every bucket's exchange; clock() is the record's. With overlap=False the
    exchange begins when backward has ended.
    """

    def __init__(self, module: nn.Module, world: World, algorithm: Any, *, some_unused: bool, overlap: bool,
                 clock: Callable[[], float], span: Callable[..., None]) -> None:
        self.world = world.twin(through_host=not isinstance(algorithm, Native))
        self.algorithm, self.overlap, self.clock, self.span, self.device = algorithm, overlap, clock, span, world.device
        self.module = DistributedDataParallel(
            module, process_group=world.group, gradient_as_bucket_view=True, find_unused_parameters=some_unused,
            **KEEP_BUFFERS)
        self.module.register_comm_hook(self, _hook)
        self.sent: dict[str, dict[str, Any]] = {}
        self.parameters = len(list(module.parameters()))
        self.some_unused = some_unused
        self.held: list[Bucket] = []
        self.complete = False
        self.largest = 0                                # bytes of the largest bucket: what the exchange keeps in memory
        self.queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self.walker = threading.Thread(target=self._walk, name="paragrad-walker", daemon=True)
        self.walker.start()

    def begin(self) -> None:
        """A step begins: nothing was sent in it yet."""
        self.sent, self.complete = {}, False

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch: only the last one is exchanged."""
        if not last:
            return self.module.no_sync()
        if self.some_unused:                            # DDP's own map of used parameters, int32
            self.count("used", computed_bytes("all_reduce", 4 * self.parameters, self.world.size), computed=True)
        return contextlib.nullcontext()

    def finish(self) -> None:
        """After the last backward: everything was exchanged, or the names of what got no gradient."""
        if not self.complete:
            names = [name.removeprefix("model.") for name, parameter in self.module.module.named_parameters()
                     if parameter.requires_grad and parameter.grad is None]
            raise StepFailed("no gradient in this step, although all parameters had one in step 0; a parameter whose use "
                             "depends on the data must go unused on some rank in step 0 too, or be used always",
                             tensor=", ".join(names) or None)

    def count(self, kind: str, number: int, *, computed: bool) -> None:
        before = self.sent.get(kind, {"bytes": 0})["bytes"]
        self.sent[kind] = {"bytes": before + number, "computed": computed}

    def ready(self, bucket: Bucket, last: bool) -> None:
        """DDP says that a bucket's gradients are there."""
        self.held.append(bucket)
        self.largest = max(self.largest, bucket.vector.numel() * bucket.vector.element_size())
        self.complete |= last
        if self.overlap or last:
            for each in self.held:
                self.queue.put(each)
            self.held = []

    def _walk(self) -> None:
        while (bucket := self.queue.get()) is not None:
            start = self.clock()
            try:
                if bucket.computed is not None:
                    torch.cuda.set_device(self.device)          # of this thread
                    bucket.computed.synchronize()
                number = self._play(bucket.vector)
                if bucket.computed is not None:
                    torch.cuda.current_stream().synchronize()
                self.count("gradients", number, computed=isinstance(self.algorithm, Native))
                self.span(f"reduce {bucket.number}", "send", start, bytes=number)
                bucket.future.set_result(bucket.vector)
            except Exception as error:
                bucket.future.set_exception(error)

    def _play(self, vector: Tensor) -> int:
        """Sum a bucket over the ranks, in place; the bytes sent. A schedule's messages go through the host."""
        if isinstance(self.algorithm, Native):
            vector.copy_(self.world.all_reduced(vector))
            return computed_bytes("all_reduce", vector.numel() * vector.element_size(), self.world.size)
        on_host = vector.cpu()
        number = all_reduce(self.algorithm, on_host, self.world)
        if on_host is not vector:
            vector.copy_(on_host)
        return number

    def close(self) -> None:
        self.queue.put(None)
        self.walker.join(timeout=1)         # it may wait for a rank that failed; the launcher ends both
        del self.module                     # DDP holds its hook's state, this object: a circle Python cannot see


def _hook(exchange, bucket):  # type: ignore[no-untyped-def]      # DDP looks at annotations, and wants none or its own
    vector, computed = bucket.buffer(), None
    if vector.is_cuda:
        computed = torch.cuda.Event()
        computed.record()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[vector.device] if vector.is_cuda else None)
    exchange.ready(Bucket(bucket.index(), vector, future, computed), bucket.is_last())
    return future


def computed_bytes(collective: str, payload: int, size: int) -> int:
    """Bytes a rank sends in a backend's own collective over `payload` bytes: gloo's are rings."""
    return {"all_reduce": 2 * payload * (size - 1) // size, "all_gather": payload * (size - 1)}[collective]
