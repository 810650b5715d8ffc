"""Synchronous data parallelism with DistributedDataParallel (DDP).

Every worker computes its share of the batch. Gradients are summed over all workers. DDP divides the
gradients into buckets and calls a communication hook when a bucket is ready. The contract with DDP:

* Backward runs on the *sum* of losses, and the exchange sums gradients. `Exchange.average`
  divides once by the global weight, for every strategy, `serial` included. The weight itself
  travels as one more gradient (`CountingLoss`).
* Every algorithm, `native` too, goes through the same communication hook. The hook queues the
  bucket and returns a Future. One thread per rank sums the buckets in DDP's order, over a process
  group of its own.
* Only the last micro-batch of a step is exchanged. A rank with an empty share runs one sample with
  weight 0, so that all hooks fire in the same order.
* If some parameters were unused in step 0 on any rank, DDP looks for unused parameters in every
  step. A parameter that is unused on all ranks has the gradient None.
* If all parameters were used in step 0, a parameter that gets no gradient later ends the run. The
  error names that parameter.
* Buffers are not broadcast, because exact batch norm (`engine/batch_norm.py`) keeps them equal.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable
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

# torch 2.13 renamed the option that keeps DDP from broadcasting buffers in forward
_has_forward_sync_buffers = (
    "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
)
KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if _has_forward_sync_buffers else "broadcast_buffers": False
}


class CountingLoss(nn.Module):
    """A loss with gradients that also carry the totals of a step.

    The gradient of the parameter `counter` is (weight, loss, ranks asked to stop, doubtful weight).
    Everything that sums gradients also sums these numbers in the same message: over micro-batches,
    over ranks, along any schedule. Weights are sent in units of a power of two near the divisor of
    the step, so that they are not much larger than gradients. The reason is a reproducible sum: it
    rounds all numbers of a bucket to one unit.

    Args:
        loss_module: The model and the loss. The model has at least one trained parameter.

    Attributes:
        loss_module: The model and the loss. Its forward gives a share of the mean, and its weight.
        counter: Parameter of 4 numbers. Its gradient is the totals.
        stop_requested: 1.0 if this rank was asked to stop, otherwise 0.0.
        weight_unit: The unit of the weights; the same on all ranks.
    """

    def __init__(self, loss_module: LossModule) -> None:
        super().__init__()
        self.loss_module = loss_module
        parameter = next(
            parameter for parameter in loss_module.model.parameters() if parameter.requires_grad
        )
        # The dtype of the gradients, so that the counter shares their bucket. At least float32,
        # which counts exactly up to 2^24.
        real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
        dtype = torch.promote_types(real, torch.float32)
        self.counter = nn.Parameter(torch.zeros(4, dtype=dtype, device=parameter.device))
        self.stop_requested = 0.0
        self.weight_unit = 1.0

    def forward(self, inputs: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """Return the share of the mean, with the totals attached to its graph, and the weight.

        Args:
            inputs: The inputs of the model.
            target: The target of the loss.
            samples: Number of samples that count. 0: the doubtful weight is 0 too.
        """
        share, weight = self.loss_module(inputs, target, samples)
        doubtful = self.loss_module.doubtful_weight if samples else 0.0
        self.weight_unit = 2.0 ** math.frexp(self.loss_module.divisor or 1.0)[1]
        totals = self.counter.new_tensor(
            [weight / self.weight_unit, 0.0, self.stop_requested, doubtful / self.weight_unit]
        )
        totals[1] = share.detach()
        return share + (self.counter * totals).sum(), weight


class DDPWrapper(DistributedDataParallel):
    """DDP without its check for SyncBatchNorm, which it refuses on the CPU.

    Our own batch norm (`engine/batch_norm.py`) replaces SyncBatchNorm.
    """

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        pass


class BucketedExchange(Exchange):
    """Base class of exchanges that sum vectors over all ranks in buckets.

    A separate thread sums the buckets. Every rank updates all parameters. The log gets a span for
    each bucket and its stages. With `options.overlap` off, the exchange begins when backward has
    ended.

    Args:
        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

        algorithm: The all-reduce algorithm, `Native()` or "auto".

    Attributes:
        kind: The kind under which the bytes of the next buckets are counted.

        queue: The queue of buckets.

        world: The world of the workers.

        overlap: Whether buckets are exchanged while backward runs.

        log: The step log.
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
        # These spans divide the same time. They are drawn one after the other, though the stages
        # alternated.
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
        """Return the error of the first bucket that failed, if there is one.

        DDP receives an exception in the place of a bucket and only reports that it cannot cast it
        to a tensor.

        Args:
            error: The error that was raised in the step.
        """
        return self.queue.failure or error

    def close(self) -> None:
        self.queue.close()


class DDPExchange(BucketedExchange):
    """Wraps a module with DDP so that its backward sums the gradients of all ranks.

    Args:
        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

        algorithm: The all-reduce algorithm, `Native()` or "auto".

    Attributes:
        has_unused_parameters: Some parameter was unused in step 0, so DDP looks for unused ones.

        counting_loss: The module that DDP wraps.

        parameter_count: Number of parameters of that module.

        pending_buckets: Buckets that are ready and wait for the end of backward.

        outside_parameters: Parameters that a backward pass outside of steps has used since the last
            step, if DDP looks for unused ones.

        is_complete: Whether DDP delivered the last bucket of this step.
    """

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
        # DDP's own messages use another process group than those of the queue
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
        self.outside_parameters: list[Tensor] = []
        self.is_complete = False

    def begin(self) -> None:
        """Begin a step.

        DDP exchanges the parameters that were trained when it was constructed, so a change of these
        is refused.
        """
        super().begin()
        self.is_complete = False
        self.counting_loss.counter.grad = None
        self.refuse_refrozen()

        # DDP takes what an outside backward used for used in this step too, and wants its gradient
        for parameter in self.outside_parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.outside_parameters = []

    def note_outside_backward(self, parameters: Iterable[Tensor]) -> None:
        if self.has_unused_parameters:
            self.outside_parameters = list(parameters)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward and backward of one micro-batch.

        Only the last micro-batch of a step is exchanged.

        Args:
            last: Whether this is the last micro-batch of the step.
        """
        if not last:
            return self.module.no_sync()
        self.counting_loss.stop_requested = float(self.stop_requested)
        # DDP all-reduces a map of used parameters, in int32
        if self.has_unused_parameters:
            self.count_bytes(
                "used",
                count_collective_bytes("all_reduce", 4 * self.parameter_count, self.world.size),
                computed=True,
            )
        return contextlib.nullcontext()

    def finish(self, weight: float, loss: float) -> None:
        """Check after the last backward that all buckets were exchanged.

        Args:
            weight: Sum of the weights of this rank. The counter already carries it.
            loss: Sum of the losses of this rank. The counter already carries it.

        Raises:
            StepFailed: A parameter got no gradient. The error names it.
        """
        if not self.is_complete:
            names = [
                name.removeprefix("model.")
                for name, parameter in self.loss_module.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ]
            raise StepFailed(
                "no gradient in this step, although all parameters had one in step 0; a parameter "
                "whose use depends on the data must be unused on some rank in step 0 too, or be "
                "used always",
                tensor=", ".join(names) or None,
            )

    def reduce_totals(self) -> list[float]:
        counting = self.counting_loss
        assert counting.counter.grad is not None
        weight, loss, stop, doubtful = counting.counter.grad.tolist()
        return [weight * counting.weight_unit, loss, stop, doubtful * counting.weight_unit]

    def add_ready_bucket(self, bucket: Bucket, last: bool) -> None:
        """Take a bucket after DDP reports its gradients as ready.

        Args:
            bucket: The bucket.
            last: Whether it is the last bucket of the step.
        """
        self.pending_buckets.append(bucket)
        self.peak_bytes = max(self.peak_bytes, bucket.vector.numel() * bucket.vector.element_size())
        self.is_complete |= last
        if self.overlap or last:
            for pending in self.pending_buckets:
                self.queue.put_bucket(pending)
            self.pending_buckets = []

    def close(self) -> None:
        super().close()
        # DDP refers to the state of its hook, which is this object. Python's garbage collector
        # cannot see that cycle.
        del self.module


class DoubleDivisionFault(BucketedExchange):
    """The injected fault mean_twice.

    With this fault the schedule divides the gradients, and the weight with them, by the number of
    ranks. This class multiplies the weight again, so that the division by the weight divides a
    second time.
    """

    def reduce_totals(self) -> list[float]:
        # the next class in the MRO, a subclass of BucketedExchange, defines it
        weight, loss, stop, doubt = super().reduce_totals()  # type: ignore[safe-super]
        return [weight * self.world.size, loss * self.world.size, stop, doubt]


class DDPDoubleDivision(DoubleDivisionFault, DDPExchange):
    """DDPExchange with the injected fault mean_twice."""


# DDP checks the annotations of a hook: it accepts none or its own types
def _reduce_bucket(exchange, bucket):  # type: ignore[no-untyped-def]
    """DDP's communication hook: queue a bucket and return its Future."""
    pending = make_pending_bucket(bucket.index(), bucket.buffer())
    exchange.add_ready_bucket(pending, bucket.is_last())
    return pending.future
