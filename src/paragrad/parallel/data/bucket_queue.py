"""A queue of buckets that one thread sums along an all-reduce, in the order of arrival.

The exchange of a bucket can overlap with the rest of backward.
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
    """Gradients that are sent together.

    Attributes:
        number: Number of the bucket in its step.

        vector: The gradients as one flat tensor, which the sum replaces.

        future: Completes with the vector when it is summed.

        computed_event: On a GPU, the event after which the gradients are computed; otherwise None.

        pairs: Each parameter with its gradient, a view of the vector.

        step: Number of the step.
    """

    number: int
    vector: Tensor
    future: torch.futures.Future[Tensor]
    computed_event: torch.cuda.Event | None = None
    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    step: int = 0


class BucketQueue:
    """Sums buckets over all ranks, in a thread and over a process group of its own.

    The constructor is collective: all ranks call it together. Messages of a schedule go through the
    host. The algorithm "auto" (over gloo) chooses one for every bucket size, from a machine file or
    from measurements.

    Args:
        algorithm: An all-reduce schedule, `Native()` or "auto".

        world: The world of the ranks. The queue uses a duplicate of it.

        clock: Returns the time in seconds.

        on_reduced: Called with (bucket, start, traffic) after each bucket; start is the time of
            clock().

        on_pick: Called with (bytes, choice) when "auto" chooses an algorithm.

        machine: Known links of the machine, used by "auto".

    Attributes:
        algorithm: As given.

        clock: As given.

        on_reduced: As given.

        all_reduce_function: Runs a schedule: `run_all_reduce` or `reproducible_all_reduce`.

        compute_function: The reduction of a schedule with an injected fault, otherwise None.

        world: The duplicated world, with its own process group.

        chooser: Chooses the algorithm for "auto", otherwise None.

        failure: The error of the first bucket that failed, otherwise None.

        queue: The buckets that wait for the thread.

        finalizer: Stops the thread.
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
        self.failure: Exception | None = None
        self.queue: QueuedBuckets = queue.SimpleQueue()
        thread = threading.Thread(
            target=_process_buckets, args=[self.queue], name="paragrad-buckets", daemon=True
        )
        # runs in `close`, when the queue is freed, or at exit
        self.finalizer = weakref.finalize(self, _stop_thread, self.queue, thread)
        thread.start()

    def put_bucket(self, bucket: Bucket) -> None:
        """Queue a bucket. Its future completes when it is summed.

        Args:
            bucket: The bucket.

        Raises:
            StepFailed: The queue was closed.
        """
        if not self.finalizer.alive:
            raise StepFailed(
                "its thread was ended by close(), so this gradient cannot be summed; make a new "
                "hook"
            )
        self.queue.put((self, bucket))

    def process_bucket(self, bucket: Bucket) -> None:
        """Sum a bucket and complete its future. The queue's thread calls it.

        Args:
            bucket: The bucket. If the sum fails, its future holds the error.
        """
        start = self.clock()
        # this bucket would fail too, and only after a timeout
        if self.failure is not None:
            bucket.future.set_exception(self.failure)
            return
        try:
            if bucket.computed_event is not None:
                # the current device is a setting of this thread
                torch.cuda.set_device(bucket.vector.device)
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
        """Sum a vector in place. Complex numbers are summed as pairs of real numbers."""
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
        """Sum a vector in place with one algorithm.

        The all-reduce of a backend reports neither times nor bytes.
        """
        if not isinstance(algorithm, Native):
            return self.all_reduce_function(algorithm, vector, self.world, self.compute_function)
        vector.copy_(self.world.all_reduce(vector))
        return Traffic(
            count_collective_bytes("all_reduce", vector.nbytes, self.world.size), computed=True
        )

    def close(self) -> None:
        """Stop the thread. The process group stays until all groups are destroyed."""
        self.finalizer()


QueuedBuckets = queue.SimpleQueue[tuple[BucketQueue, Bucket] | None]


def _process_buckets(buckets: QueuedBuckets) -> None:
    """Run the thread of a queue.

    Between buckets the thread holds no reference to the queue object. If no other reference exists,
    the queue is freed, and that ends the thread.
    """
    while (item := buckets.get()) is not None:
        owner, bucket = item
        owner.process_bucket(bucket)
        del item, owner, bucket


def _stop_thread(buckets: QueuedBuckets, thread: threading.Thread) -> None:
    buckets.put(None)
    if thread is not threading.current_thread():
        # The thread may wait for a rank that failed. Then the launcher ends both processes.
        thread.join(timeout=1)


def make_pending_bucket(number: int, vector: Tensor) -> Bucket:
    """Make a bucket with a new future.

    Args:
        number: Number of the bucket in its step.
        vector: The gradients. On a GPU the current stream may still compute them.

    Returns:
        The bucket. On a GPU its event marks the work of the current stream.
    """
    computed = None
    if vector.is_cuda:
        computed = torch.cuda.Event()
        computed.record()
    devices = [vector.device] if vector.is_cuda else None
    return Bucket(number, vector, torch.futures.Future(devices=devices), computed)
