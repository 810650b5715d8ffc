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
from paragrad.executors.transport import Traffic, run_all_reduce
from paragrad.parallel.data.reproducible_sum import reproducible_all_reduce
from paragrad.planner.algorithm_choice import AlgorithmChoice, AlgorithmChooser
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.runtime.world import World
from paragrad.schedules.fault_injection import make_fault_compute
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
    computed_event: torch.cuda.Event | None = None
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
        on_reduced: Callable[[Bucket, float, Traffic], None] = lambda bucket, start, traffic: None,
        on_pick: Callable[[int, AlgorithmChoice], None] = lambda bytes_, pick: None,
        machine: Machine | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.clock = clock
        self.on_reduced = on_reduced
        self.all_reduce_function = (
            reproducible_all_reduce if getattr(algorithm, "reproducible", False) else run_all_reduce
        )
        self.compute_function = make_fault_compute(algorithm, world.size)
        self.world = world.duplicate(through_host=not isinstance(algorithm, Native))
        self.chooser = (
            AlgorithmChooser(self.world, Native(), self._run_all_reduce, machine, on_choice=on_pick)
            if algorithm == "auto"
            else None
        )
        # of the first bucket that could not be summed
        self.failure: Exception | None = None
        self.queue: QueuedBuckets = queue.SimpleQueue()
        thread = threading.Thread(
            target=_process_buckets, args=[self.queue], name="paragrad-buckets", daemon=True
        )
        # by `close`, or when nobody has it, or at exit
        self.finalizer = weakref.finalize(self, _stop_thread, self.queue, thread)
        thread.start()

    def put_bucket(self, bucket: Bucket) -> None:
        """Its future completes when it is summed. Raises StepFailed after `close`."""
        if not self.finalizer.alive:
            raise StepFailed(
                "its thread was ended by close(), and nobody would sum this gradient; make a new "
                "hook"
            )
        self.queue.put((self, bucket))

    def process_bucket(self, bucket: Bucket) -> None:
        """Sum a bucket, or say why not; in the queue's thread."""
        start = self.clock()
        # nor could this one be, and each would take its time to say so
        if self.failure is not None:
            bucket.future.set_exception(self.failure)
            return
        try:
            if bucket.computed_event is not None:
                torch.cuda.set_device(bucket.vector.device)  # of this thread
                bucket.computed_event.synchronize()
            traffic = self._exchange_bucket(bucket)
            if bucket.computed_event is not None:
                torch.cuda.current_stream().synchronize()
            self.on_reduced(bucket, start, traffic)
            bucket.future.set_result(bucket.vector)
        except Exception as error:
            self.failure = self.failure or error
            bucket.future.set_exception(error)

    def _exchange_bucket(self, bucket: Bucket) -> Traffic:
        return self._reduce_vector(bucket.vector)

    def _reduce_vector(self, vector: Tensor) -> Traffic:
        """Sum a bucket in place; complex numbers as pairs of real ones."""
        if vector.is_complex():
            vector = torch.view_as_real(vector).view(-1)
        if isinstance(self.algorithm, Native):
            return self._run_all_reduce(self.algorithm, vector)
        on_host = vector.cpu()
        traffic = self._run_all_reduce(
            self.chooser.choose_algorithm(on_host) if self.chooser else self.algorithm, on_host
        )
        if on_host is not vector:
            vector.copy_(on_host)
        return traffic

    def _run_all_reduce(self, algorithm: Any, vector: Tensor) -> Traffic:
        """Sum a vector in place by one algorithm. A backend's own all-reduce tells neither
        times nor bytes.
        """
        if not isinstance(algorithm, Native):
            return self.all_reduce_function(algorithm, vector, self.world, self.compute_function)
        vector.copy_(self.world.all_reduce(vector))
        return Traffic(
            count_collective_bytes("all_reduce", vector.nbytes, self.world.size), computed=True
        )

    def close(self) -> None:
        """End its thread; its process group stays until all are destroyed."""
        self.finalizer()


QueuedBuckets = queue.SimpleQueue[tuple[BucketQueue, Bucket] | None]


def _process_buckets(buckets: QueuedBuckets) -> None:
    """The thread. Between buckets it holds no queue, so that one which nobody has is freed, and
    ends it.
    """
    while (item := buckets.get()) is not None:
        owner, bucket = item
        owner.process_bucket(bucket)
        del item, owner, bucket


def _stop_thread(buckets: QueuedBuckets, thread: threading.Thread) -> None:
    buckets.put(None)
    if thread is not threading.current_thread():
        # it may wait for a rank that failed; the launcher ends both
        thread.join(timeout=1)


def make_pending_bucket(number: int, vector: Tensor) -> Bucket:
    """A bucket with its future; on a GPU, with what this stream has still to compute of it."""
    computed = None
    if vector.is_cuda:
        computed = torch.cuda.Event()
        computed.record()
    devices = [vector.device] if vector.is_cuda else None
    return Bucket(number, vector, torch.futures.Future(devices=devices), computed)
