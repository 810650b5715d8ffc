"""The batches that are compared.

These are the first batch, those that differ most from the others, the short last one, and then the
next ones.

A fault of a strategy often shows in a few batches only. They have most padding or least, most
targets ignored or none, or a share without one label. They come early, because a model may magnify
rounding from step to step until nothing can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from paragrad.datasets.loading import Samples, list_batch_tensors
from paragrad.datasets.sample_order import SampleOrder
from paragrad.strategies.shares import Division, split_micro_batches

MAX_INSPECTED = 200  # batches of the first epoch that are inspected, at most
INSPECTION_SECONDS = 3.0  # after which no further batch is inspected


@dataclass(frozen=True)
class BatchTraits:
    """The traits of one global batch.

    Attributes:
        size: elements of its tensors per sample, which grow with padding.

        ignored: targets below 0 per sample.

        empty_parts: parts (of a rank, in a micro-batch) without one target that counts.
    """

    size: float
    ignored: float
    empty_parts: int


EXTREME_MEASURES: tuple[Callable[[BatchTraits], float], ...] = (
    lambda look: look.size,
    lambda look: -look.size,
    lambda look: look.ignored,
    lambda look: -look.ignored,
    lambda look: look.empty_parts,
)


def list_first_batches(order: SampleOrder, steps: int) -> list[tuple[int, range]]:
    """List (epoch, batch) of the first steps: whole epochs, one after the other.

    Args:
        order: the order of the samples.
        steps: number of steps.
    """
    return [(step // order.steps, order.get_batch(step % order.steps)) for step in range(steps)]


def select_compared_batches(
    samples: Samples, order: SampleOrder, steps: int, division: Division
) -> list[tuple[int, range]]:
    """Select (epoch, batch) of the steps that are compared, each at most once.

    If an epoch has no more batches than that, all are taken in their order.

    Args:
        samples: the samples.
        order: the order of the samples.
        steps: number of steps.
        division: how a batch is divided among ranks and micro-batches.
    """
    if steps >= order.steps:
        return list_first_batches(order, steps)
    chosen = [
        order.get_batch(0),
        *find_extreme_batches(samples, order, division),
        order.get_batch(order.steps - 1),
        *map(order.get_batch, range(1, steps)),
    ]
    return [(0, batch) for batch in list(dict.fromkeys(chosen))[:steps]]


def find_extreme_batches(samples: Samples, order: SampleOrder, division: Division) -> list[range]:
    """Find the batches of an epoch with the most and the least of each trait that varies.

    Args:
        samples: the samples.
        order: the order of the samples.
        division: how a batch is divided among ranks and micro-batches.
    """
    traits: dict[range, BatchTraits] = {}
    end = time.monotonic() + INSPECTION_SECONDS
    for batch in map(order.get_batch, range(0, order.steps, -(-order.steps // MAX_INSPECTED))):
        traits[batch] = inspect_batch(samples, order, batch, division)
        if time.monotonic() > end:
            break
    return [
        max(traits, key=lambda batch: measure(traits[batch]))
        for measure in EXTREME_MEASURES
        if len({measure(batch_traits) for batch_traits in traits.values()}) > 1
    ]


def inspect_batch(
    samples: Samples, order: SampleOrder, batch: range, division: Division
) -> BatchTraits:
    """Measure the traits of a batch.

    Args:
        samples: the samples.
        order: the order of the samples.
        batch: positions of the batch in the order.
        division: how the batch is divided among ranks and micro-batches.
    """
    tensors = list_batch_tensors(samples[0, order.get_indices(0, batch)])
    marked_targets = [
        tensor
        for tensor in tensors
        if not tensor.is_floating_point() and not tensor.is_complex() and (tensor < 0).any()
    ]
    empty_parts = 0
    for part in chain.from_iterable(split_micro_batches(batch, division)):
        parts = [
            target[part.start - batch.start : part.stop - batch.start]
            for target in marked_targets
            if _has_sample_dim(target, batch)
        ]
        empty_parts += len(part) > 0 and any(bool((target < 0).all()) for target in parts)
    return BatchTraits(
        sum(map(Tensor.numel, tensors)) / len(batch),
        sum(int((each < 0).sum()) for each in marked_targets) / len(batch),
        empty_parts,
    )


def _has_sample_dim(target: Tensor, batch: range) -> bool:
    return target.dim() > 0 and len(target) == len(batch)
