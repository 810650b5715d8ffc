"""Buckets of our own: for passes that are not one forward and then one backward, in which
DistributedDataParallel's go wrong.

DDP learns from one forward what the next backward will make, and exchanges in that backward
alone: with all forwards of a step first its gradients are wrong without an error, and where a
backward is made in two parts its hooks do not fire. Here the passes say which gradient is final
(`ready`), or nothing, and `finish` sends what is left. Weight, loss, the wish to stop, and
which parameters have a gradient at all, travel in a message of their own: a part of a model
need not have the loss.
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

BUCKET_BYTES = 25 * 2**20  # of a bucket, as DDP's


class VectorSumExchange(BucketedExchange):
    """Sums vectors over all ranks when it is told to. beside: bytes that are kept meanwhile."""

    retained_bytes = 0

    def __init__(
        self, replica: Replica, world: World, log: StepLog, options: ExchangeOptions, algorithm: Any
    ) -> None:
        super().__init__(replica, world, log, options, algorithm)
        self.sent_buckets: list[Bucket] = []

    def _start_sum(self, vector: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a vector over ranks, in their order along the all-reduce; waits for
        it.
        """
        bucket = make_pending_bucket(len(self.sent_buckets), vector)
        self.peak_bytes = max(self.peak_bytes, vector.nbytes)
        self.sent_buckets.append(bucket)
        self.queue.put_bucket(bucket)
        return bucket.future.wait

    def _sum_tensors(
        self, tensors: Mapping[str, Tensor], share: float = 1.0, total: float = 1.0
    ) -> dict[str, Tensor]:
        """The sum of each over ranks, of which this one's counts `share`, divided by `total`;
        in float32 or finer. Collective.
        """
        cut = split_into_buckets(tensors.values())
        self.sent_buckets = []
        for bucket in cut:
            # in less, a mean would be a coarser number
            wider = get_accumulation_dtype(bucket[0].dtype)
            self._start_sum(torch.cat([each.reshape(-1).to(wider) for each in bucket]).mul_(share))
        self.peak_bytes = max(
            self.peak_bytes,
            self.retained_bytes
            + max((bucket.vector.nbytes for bucket in self.sent_buckets), default=0),
        )
        vectors = [bucket.future.wait().div_(total) for bucket in self.sent_buckets]
        places = [
            place.view_as(each)
            for bucket, vector in zip(cut, vectors, strict=True)
            for each, place in zip(
                bucket, vector.split([each.numel() for each in bucket]), strict=True
            )
        ]
        return dict(zip(tensors, places, strict=True))


class GradientBucketExchange(VectorSumExchange):
    """Sums gradients where backward leaves them, bucket by bucket, in one order on all ranks:
    the last parameters first.
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
        self.final_parameters: set[nn.Parameter] = set()  # whose gradient is, in this step
        # of which there is none where passes never say so
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
                "call them with "
                "use_reentrant=False, or train with --no-overlap",
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
                "of gradients that the passes say are final before their end"
                if self.overlap
                else "asked for: exchange after backward",
            )
        for bucket in self.buckets[len(self.sent_buckets) :]:
            self._start_sum(self._flatten_bucket(bucket))
        there = [float(parameter.grad is not None) for parameter in self.trained]
        self._start_sum(
            torch.tensor(
                [weight, loss, float(self.stop_requested), self.doubtful_weight, *there],
                dtype=torch.float64,
                device=self.device,
            )
        )
        with self.log.record_detail("buckets", "wait"):
            *vectors, told = [bucket.future.wait() for bucket in self.sent_buckets]
        self.totals = told[:4].tolist()
        there = told[4:].tolist()
        used = dict(zip(self.trained, there, strict=True))
        for bucket, vector in zip(self.buckets, vectors, strict=True):
            for parameter, gradient in zip(
                bucket, vector.split([each.numel() for each in bucket]), strict=True
            ):
                parameter.grad = gradient.view_as(parameter) if used[parameter] else None

    def reduce_totals(self) -> list[float]:
        return self.totals

    def _flatten_bucket(self, bucket: list[nn.Parameter]) -> Tensor:
        """The gradients in a row, which are views of it from now on: beside them there is one
        bucket more, and for a moment.
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
    """Neighbours of one type, up to so many bytes."""
    found: list[list[Any]] = []
    for _, alike in itertools.groupby(tensors, key=lambda each: (each.dtype, each.device)):
        bytes_ = 0
        found.append([])
        for each in alike:
            bytes_ += each.nbytes
            if found[-1] and bytes_ > BUCKET_BYTES:
                found.append([])
                bytes_ = each.nbytes
            found[-1].append(each)
    return found


class GradientBucketDoubleDivision(DoubleDivisionFault, GradientBucketExchange):
    """mean_twice, planted here."""
