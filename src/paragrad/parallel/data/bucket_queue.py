"""The queue of buckets: a thread sums them along an all-reduce, in the order in which they
come.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.executors.machine import Machine
from paragrad.executors.transport import Traffic, all_reduce
from paragrad.parallel.data.reproducible_sum import reproducible_all_reduce
from paragrad.planner.algorithm_choice import Chooser, Pick
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.runtime.world import World
from paragrad.schedules.fault_injection import planted
from paragrad.strategies.data import Native


@dataclass
class Bucket:
    """Gradients sent together, waiting for their exchange. pairs: each parameter with its
    gradient, a view of the vector.
    """

    number: int
    vector: Tensor
    future: torch.futures.Future[Tensor]
    # on a GPU: when the gradients are really there
    computed: torch.cuda.Event | None = None
    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    step: int = 0


class BucketQueue:
    """Sums buckets over all ranks, over a process group of its own. Collective.

    played(bucket, start, traffic) is told of each, with clock()'s time at its start. A
    schedule's messages go through the host. algorithm "auto" (over gloo): picks one for every
    size of buckets, by a machine file or what it measures; picked is told.
    """

    def __init__(
        self,
        algorithm: Any,
        world: World,
        clock: Callable[[], float] = lambda: 0.0,
        played: Callable[[Bucket, float, Traffic], None] = lambda bucket, start, traffic: None,
        picked: Callable[[int, Pick], None] = lambda bytes_, pick: None,
        machine: Machine | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.clock = clock
        self.played = played
        self.sum = (
            reproducible_all_reduce if getattr(algorithm, "reproducible", False) else all_reduce
        )
        self.compute = planted(algorithm, world.size)
        self.world = world.twin(through_host=not isinstance(algorithm, Native))
        self.chooser = (
            Chooser(self.world, Native(), self._sum, machine, told=picked)
            if algorithm == "auto"
            else None
        )
        # of the first bucket that could not be summed
        self.failure: Exception | None = None
        self.queue: Waiting = queue.SimpleQueue()
        thread = threading.Thread(
            target=_run, args=[self.queue], name="paragrad-buckets", daemon=True
        )
        # by `close`, or when nobody has it, or at exit
        self.end = weakref.finalize(self, _ended, self.queue, thread)
        thread.start()

    def put(self, bucket: Bucket) -> None:
        """Its future completes when it is summed. Raises StepFailed after `close`."""
        if not self.end.alive:
            raise StepFailed(
                "its thread was ended by close(), and nobody would sum this gradient; make a new "
                "hook"
            )
        self.queue.put((self, bucket))

    def serve(self, bucket: Bucket) -> None:
        """Sum a bucket, or say why not; in the queue's thread."""
        start = self.clock()
        # nor could this one be, and each would take its time to say so
        if self.failure is not None:
            bucket.future.set_exception(self.failure)
            return
        try:
            if bucket.computed is not None:
                torch.cuda.set_device(bucket.vector.device)  # of this thread
                bucket.computed.synchronize()
            traffic = self._exchange(bucket)
            if bucket.computed is not None:
                torch.cuda.current_stream().synchronize()
            self.played(bucket, start, traffic)
            bucket.future.set_result(bucket.vector)
        except Exception as error:
            self.failure = self.failure or error
            bucket.future.set_exception(error)

    def _exchange(self, bucket: Bucket) -> Traffic:
        return self._play(bucket.vector)

    def _play(self, vector: Tensor) -> Traffic:
        """Sum a bucket in place; complex numbers as pairs of real ones."""
        if vector.is_complex():
            vector = torch.view_as_real(vector).view(-1)
        if isinstance(self.algorithm, Native):
            return self._sum(self.algorithm, vector)
        on_host = vector.cpu()
        traffic = self._sum(self.chooser.pick(on_host) if self.chooser else self.algorithm, on_host)
        if on_host is not vector:
            vector.copy_(on_host)
        return traffic

    def _sum(self, algorithm: Any, vector: Tensor) -> Traffic:
        """Sum a vector in place by one algorithm. A backend's own all-reduce tells neither
        times nor bytes.
        """
        if not isinstance(algorithm, Native):
            return self.sum(algorithm, vector, self.world, self.compute)
        vector.copy_(self.world.all_reduced(vector))
        return Traffic(computed_bytes("all_reduce", vector.nbytes, self.world.size), computed=True)

    def close(self) -> None:
        """End its thread; its process group stays until all are destroyed."""
        self.end()


Waiting = queue.SimpleQueue[tuple[BucketQueue, Bucket] | None]


def _run(waiting: Waiting) -> None:
    """The thread. Between buckets it holds no queue, so that one which nobody has is freed, and
    ends it.
    """
    while (item := waiting.get()) is not None:
        owner, bucket = item
        owner.serve(bucket)
        del item, owner, bucket


def _ended(waiting: Waiting, thread: threading.Thread) -> None:
    waiting.put(None)
    if thread is not threading.current_thread():
        # it may wait for a rank that failed; the launcher ends both
        thread.join(timeout=1)


def waiting_bucket(number: int, vector: Tensor) -> Bucket:
    """A bucket with its future; on a GPU, with what this stream has still to compute of it."""
    computed = None
    if vector.is_cuda:
        computed = torch.cuda.Event()
        computed.record()
    devices = [vector.device] if vector.is_cuda else None
    return Bucket(number, vector, torch.futures.Future(devices=devices), computed)
