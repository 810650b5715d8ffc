"""Buckets for passes that are not one forward followed by one backward.

DistributedDataParallel (DDP) learns from one forward what the next backward will compute, and it
exchanges in that backward only. If all forwards of a step come first, its gradients are wrong
without an error. If a backward is computed in two parts, its hooks do not fire.

Here the passes report which gradient is final (`mark_ready`), or report nothing. Then `finish`
sends what is left. A separate message has weight, loss, stop requests and the flags of parameters
with a gradient, because a part of a model may not hold the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.exchange import ExchangeOptions, Replica
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.errors import StepFailed
from paragrad.parallel.data.bucket_queue import Bucket, make_pending_bucket
from paragrad.parallel.data.ddp_exchange import BucketedExchange, DoubleDivisionFault
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World

BUCKET_BYTES = 25 * 2**20  # bytes of a bucket, as in DDP


class VectorSumExchange(BucketedExchange):
    """Base class of exchanges that sum vectors over all ranks on request.

    Args:
        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

        algorithm: The all-reduce algorithm, `Native()` or "auto".

    Attributes:
        retained_bytes: Bytes that the exchange keeps in memory during a sum, in addition to the
            buckets.

        sent_buckets: Buckets that were queued in this step, in their order.
    """

    retained_bytes = 0

    def __init__(
        self, replica: Replica, world: World, log: StepLog, options: ExchangeOptions, algorithm: Any
    ) -> None:
        super().__init__(replica, world, log, options, algorithm)
        self.sent_buckets: list[Bucket] = []

    def _start_sum(self, vector: Tensor) -> Callable[[], Tensor]:
        """Queue a vector to be summed in place over ranks.

        Returns a function that waits for the sum and returns it.
        """
        bucket = make_pending_bucket(len(self.sent_buckets), vector)
        self.peak_bytes = max(self.peak_bytes, vector.nbytes)
        self.sent_buckets.append(bucket)
        self.queue.put_bucket(bucket)
        return bucket.future.wait

    def _sum_tensors(
        self, tensors: Mapping[str, Tensor], share: float = 1.0, total: float = 1.0
    ) -> dict[str, Tensor]:
        """Return the sums of tensors over ranks, in float32 or finer. Collective.

        The tensors of this rank are multiplied by `share`, and the sums are divided by `total`.
        """
        buckets = split_into_buckets(tensors.values())
        self.sent_buckets = []
        for bucket in buckets:
            # in a coarser dtype a mean would lose precision
            wider = get_accumulation_dtype(bucket[0].dtype)
            self._start_sum(torch.cat([each.reshape(-1).to(wider) for each in bucket]).mul_(share))
        self.peak_bytes = max(
            self.peak_bytes,
            self.retained_bytes
            + max((bucket.vector.nbytes for bucket in self.sent_buckets), default=0),
        )
        vectors = [bucket.future.wait().div_(total) for bucket in self.sent_buckets]
        sums = [
            place.view_as(each)
            for bucket, vector in zip(buckets, vectors, strict=True)
            for each, place in zip(
                bucket, vector.split([each.numel() for each in bucket]), strict=True
            )
        ]
        return dict(zip(tensors, sums, strict=True))


class GradientBucketExchange(VectorSumExchange):
    """Sums the gradients that backward left in the parameters, bucket by bucket.

    All ranks sum the buckets in the same order: the last parameters first.

    Args:
        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

        algorithm: The all-reduce algorithm, `Native()` or "auto".

    Attributes:
        trained: The trained parameters, in the order of the model.

        device: Device of the trained parameters, or None if there are none.

        buckets: The parameters of each bucket.

        bucket_numbers: Number of the bucket of each parameter.

        final_parameters: Parameters with a final gradient in this step.

        has_logged_overlap: Whether the choice "overlap" was logged.

        totals: Weight, loss, stop requests and doubtful weight, summed over ranks.
    """

    def __init__(
        self, replica: Replica, world: World, log: StepLog, options: ExchangeOptions, algorithm: Any
    ) -> None:
        super().__init__(replica, world, log, options, algorithm)
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.device = self.trained[0].device if self.trained else None
        self.buckets = split_into_buckets(self.trained[::-1])
        self.bucket_numbers = {
            parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket
        }
        self.final_parameters: set[nn.Parameter] = set()
        # if the passes never report a final gradient, there is no overlap to log
        self.has_logged_overlap = False

    def begin(self) -> None:
        super().begin()
        self.final_parameters = set()
        self.sent_buckets = []

    def mark_ready(self, parameter: nn.Parameter) -> None:
        if self.bucket_numbers[parameter] < len(self.sent_buckets):
            names = {each: name for name, each in self.loss_module.model.named_parameters()}
            raise StepFailed(
                "backward adds to its gradient again after it was sent: it is in two checkpoints; "
                "call them with use_reentrant=False, or train with --no-overlap",
                tensor=names[parameter],
            )
        self.final_parameters.add(parameter)
        while (
            self.overlap
            and len(self.sent_buckets) < len(self.buckets)
            and self.final_parameters.issuperset(self.buckets[len(self.sent_buckets)])
        ):
            self._start_sum(self._flatten_bucket(self.buckets[len(self.sent_buckets)]))

    def finish(self, weight: float, loss: float) -> None:
        if self.final_parameters and not self.has_logged_overlap:
            self.has_logged_overlap = True
            self.log.write_choice(
                "overlap",
                "on" if self.overlap else "off",
                "of gradients that are final before the passes end"
                if self.overlap
                else "asked for: exchange after backward",
            )
        for bucket in self.buckets[len(self.sent_buckets) :]:
            self._start_sum(self._flatten_bucket(bucket))
        used_flags = [float(parameter.grad is not None) for parameter in self.trained]
        self._start_sum(
            torch.tensor(
                [weight, loss, float(self.stop_requested), self.doubtful_weight, *used_flags],
                dtype=torch.float64,
                device=self.device,
            )
        )
        with self.log.record_detail("buckets", "wait"):
            *vectors, totals = [bucket.future.wait() for bucket in self.sent_buckets]
        self.totals = totals[:4].tolist()
        used_flags = totals[4:].tolist()
        used = dict(zip(self.trained, used_flags, strict=True))
        for bucket, vector in zip(self.buckets, vectors, strict=True):
            for parameter, gradient in zip(
                bucket, vector.split([each.numel() for each in bucket]), strict=True
            ):
                parameter.grad = gradient.view_as(parameter) if used[parameter] else None

    def reduce_totals(self) -> list[float]:
        return self.totals

    def _flatten_bucket(self, bucket: list[nn.Parameter]) -> Tensor:
        """Return the gradients of a bucket as one vector; the gradients become views of it.

        Only one additional bucket is in memory, and only for a moment.
        """
        flat = torch.cat(
            [
                (torch.zeros_like(each) if each.grad is None else each.grad).reshape(-1)
                for each in bucket
            ]
        )
        for parameter, place in zip(
            bucket, flat.split([each.numel() for each in bucket]), strict=True
        ):
            parameter.grad = None if parameter.grad is None else place.view_as(parameter)
        return flat


def split_into_buckets(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Divide tensors into buckets.

    Neighbours of one dtype and device share a bucket of at most BUCKET_BYTES bytes. A larger tensor
    has a bucket of its own.

    Args:
        tensors: Tensors in the order in which they are sent.

    Returns:
        The tensors of each bucket, in the same order.
    """
    buckets: list[list[Any]] = []
    for _, same_dtype in itertools.groupby(tensors, key=lambda each: (each.dtype, each.device)):
        bytes_ = 0
        buckets.append([])
        for each in same_dtype:
            bytes_ += each.nbytes
            if buckets[-1] and bytes_ > BUCKET_BYTES:
                buckets.append([])
                bytes_ = each.nbytes
            buckets[-1].append(each)
    return buckets


class GradientBucketDoubleDivision(DoubleDivisionFault, GradientBucketExchange):
    """GradientBucketExchange with the injected fault mean_twice."""
