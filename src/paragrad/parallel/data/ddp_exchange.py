"""Synchronous data parallelism: every worker computes its share of the batch, gradients are
summed over all workers.

The contract with DistributedDataParallel, which cuts gradients into buckets and tells when one
is ready:

* backward runs on the *sum* of losses; the exchange sums; the one division by the global weight
is the trainer's, for
  every strategy, serial included. The weight itself travels as one more gradient (`Counted`).
* every algorithm, `native` too, goes through the same communication hook. The hook queues the
bucket and returns a Future;
  one thread per rank sums the buckets in DDP's order, over a process group of its own.
* only the last micro-batch of a step is exchanged. A rank whose part is empty runs one sample
with weight 0, so that all
  hooks fire in the same order.
* parameters unused in step 0 on any rank: DDP looks for unused ones in every step; unused
everywhere leaves grad None.
  Where all were used in step 0, one that gets no gradient later ends the run with its name.
* buffers are not broadcast: exact batch norm (`batch_norm.py`) keeps them equal.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paragrad.engine.exchange import Exchange, ExchangeOptions, Replica
from paragrad.errors import StepFailed
from paragrad.executors.transport import Traffic
from paragrad.jobs.loss import LossModule
from paragrad.parallel.data.bucket_queue import Bucket, BucketQueue, make_pending_bucket
from paragrad.planner.algorithm_choice import AlgorithmChoice
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.schedules.fault_injection import inject_fault

# torch 2.13 renamed the switch that leaves buffers alone in forward
_has_forward_sync_buffers = (
    "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
)
KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if _has_forward_sync_buffers else "broadcast_buffers": False
}


class CountingLoss(nn.Module):
    """A summed loss whose gradients tell more: `counter` is a parameter with the gradient
    (weight, loss, ranks asked to stop, doubtful weight).

    Whatever sums the gradients, over micro-batches, over ranks, along any schedule, sums these
    too, in the same message.
    """

    def __init__(self, loss_module: LossModule) -> None:
        super().__init__()
        self.loss_module = loss_module
        parameter = next(
            parameter for parameter in loss_module.model.parameters() if parameter.requires_grad
        )
        # the gradients' own type, to share their bucket; never below float32, which counts to
        # 2^24
        real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
        dtype = torch.promote_types(real, torch.float32)
        self.counter = nn.Parameter(torch.zeros(4, dtype=dtype, device=parameter.device))
        self.stop_requested = 0.0

    def forward(self, inputs: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        total, weight = self.loss_module(inputs, target, samples)
        counted = self.counter.new_tensor(
            [weight, 0.0, self.stop_requested, self.loss_module.doubtful_weight if samples else 0.0]
        )
        counted[1] = total.detach()
        return total + (self.counter * counted).sum(), weight


class DDPWrapper(DistributedDataParallel):
    """SyncBatchNorm, which DDP refuses on the CPU, is computed by ours (`batch_norm.py`)."""

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        pass


class BucketedExchange(Exchange):
    """Gradients are summed over all ranks in buckets, by a thread of their own; every rank
    updates all parameters.

    log is told of every bucket's exchange, and of its parts. Without how.overlap the exchange
    begins when backward has ended. kind: of the bytes that travel.
    """

    kind = "gradients"

    def __init__(
        self, replica: Replica, world: World, log: StepLog, options: ExchangeOptions, algorithm: Any
    ) -> None:
        super().__init__(replica)
        self.queue = BucketQueue(
            inject_fault(algorithm, options.inject_fault),
            world,
            log.now,
            self._record_bucket,
            self._record_algorithm,
            options.machine,
        )
        self.world = world
        self.overlap = options.overlap
        self.log = log

    def _record_bucket(self, bucket: Bucket, start: float, traffic: Traffic) -> None:
        name = f"reduce {bucket.number}"
        self.count_bytes(self.kind, traffic.bytes, computed=traffic.computed)
        self.log.add_span(name, "send", start, bytes=traffic.bytes)
        # of the same time: one after the other, whatever turns they took
        if not traffic.computed:
            for lane, seconds in (
                ("wait", traffic.waiting),
                ("receive", traffic.transfer),
                ("compute", traffic.processing),
            ):
                self.log.add_span(name, lane, start, seconds=seconds)
                start += seconds

    def _record_algorithm(self, bytes_: int, pick: AlgorithmChoice) -> None:
        self.log.write_choice("reduce", str(pick.algorithm), pick.because, bytes_)

    def find_cause(self, error: Exception) -> Exception:
        """DDP gets an exception in the place of a bucket and says that it cannot cast it to a
        tensor.
        """
        return self.queue.failure or error

    def close(self) -> None:
        self.queue.close()


class DDPExchange(BucketedExchange):
    """Wraps a module so that its backward sums the gradients of all ranks."""

    def __init__(
        self, replica: Replica, world: World, log: StepLog, options: ExchangeOptions, algorithm: Any
    ) -> None:
        super().__init__(replica, world, log, options, algorithm)
        log.write_choice(
            "overlap",
            "on" if options.overlap else "off",
            "gradients are exchanged while backward runs"
            if options.overlap
            else "asked for: exchange after backward",
        )
        module = replica.module
        self.has_unused_parameters = replica.has_unused_parameters
        self.counting_loss = CountingLoss(module)
        # its own messages stay out of the queue's group
        self.module = DDPWrapper(
            self.counting_loss,
            process_group=world.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=replica.has_unused_parameters,
            **KEEP_BUFFERS,
        )
        self.module.register_comm_hook(self, _reduce_bucket)
        self.parameter_count = len(list(self.counting_loss.parameters()))
        self.pending_buckets: list[Bucket] = []
        self.is_complete = False

    def begin(self) -> None:
        """DDP exchanges what could be trained when it was made, and no more."""
        super().begin()
        self.is_complete = False
        self.counting_loss.counter.grad = None
        self.refuse_refrozen()

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch: only the last one is
        exchanged.
        """
        if not last:
            return self.module.no_sync()
        self.counting_loss.stop_requested = float(self.stop_requested)
        # DDP's own map of used parameters, int32
        if self.has_unused_parameters:
            self.count_bytes(
                "used",
                count_collective_bytes("all_reduce", 4 * self.parameter_count, self.world.size),
                computed=True,
            )
        return contextlib.nullcontext()

    def finish(self, weight: float, loss: float) -> None:
        """After the last backward: everything was exchanged, or the names of what got no
        gradient.
        """
        if not self.is_complete:
            names = [
                name.removeprefix("model.")
                for name, parameter in self.loss_module.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ]
            raise StepFailed(
                "no gradient in this step, although all parameters had one in step 0; a parameter "
                "whose use "
                "depends on the data must go unused on some rank in step 0 too, or be used always",
                tensor=", ".join(names) or None,
            )

    def reduce_totals(self) -> list[float]:
        assert self.counting_loss.counter.grad is not None
        return self.counting_loss.counter.grad.tolist()  # type: ignore[no-any-return]

    def add_ready_bucket(self, bucket: Bucket, last: bool) -> None:
        """DDP says that a bucket's gradients are there."""
        self.pending_buckets.append(bucket)
        self.peak_bytes = max(self.peak_bytes, bucket.vector.numel() * bucket.vector.element_size())
        self.is_complete |= last
        if self.overlap or last:
            for each in self.pending_buckets:
                self.queue.put_bucket(each)
            self.pending_buckets = []

    def close(self) -> None:
        super().close()
        # DDP holds its hook's state, this object: a circle Python cannot see
        del self.module


class DoubleDivisionFault(BucketedExchange):
    """The planted bug mean_twice: the schedule divides gradients, and the weight beside them,
    by the number of ranks; here the weight is made whole again, so that whoever divides by it
    divides once more.
    """

    def reduce_totals(self) -> list[float]:
        # of whom it is mixed into
        weight, loss, stop, doubt = super().reduce_totals()  # type: ignore[safe-super]
        return [weight * self.world.size, loss * self.world.size, stop, doubt]


class DDPDoubleDivision(DoubleDivisionFault, DDPExchange):
    """mean_twice, planted here."""


# DDP looks at annotations, and wants none or its own
def _reduce_bucket(exchange, bucket):  # type: ignore[no-untyped-def]
    waiting = make_pending_bucket(bucket.index(), bucket.buffer())
    exchange.add_ready_bucket(waiting, bucket.is_last())
    return waiting.future
