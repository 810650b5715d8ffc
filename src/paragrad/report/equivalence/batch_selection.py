"""Which batches are compared: the first, those that differ most from the others, the short last
one, then the next ones.

What a strategy gets wrong often shows in a few batches only: most padding or least, most
targets ignored or none, a share without one label. They come early, because a model may magnify
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

MAX_INSPECTED = 200  # batches of the first epoch that are looked at, at most
INSPECTION_SECONDS = 3.0  # after which no further one is


@dataclass(frozen=True)
class BatchTraits:
    """What one global batch is like."""

    size: float  # elements of its tensors per sample: padding
    ignored: float  # targets below 0 per sample
    empty_parts: int  # parts (of a rank, in a micro-batch) without one target that counts


EXTREME_MEASURES: tuple[Callable[[BatchTraits], float], ...] = (
    lambda look: look.size,
    lambda look: -look.size,
    lambda look: look.ignored,
    lambda look: -look.ignored,
    lambda look: look.empty_parts,
)


def list_first_batches(order: SampleOrder, steps: int) -> list[tuple[int, range]]:
    """(epoch, batch) of the first steps: whole epochs, one after the other."""
    return [(step // order.steps, order.get_batch(step % order.steps)) for step in range(steps)]


def select_compared_batches(
    samples: Samples, order: SampleOrder, steps: int, division: Division
) -> list[tuple[int, range]]:
    """(epoch, batch) of the steps that are compared, none twice: all in their order where an
    epoch has no more of them.
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
    """Of an epoch's batches those with the most and the least of something that not all have
    alike.
    """
    looks: dict[range, BatchTraits] = {}
    end = time.monotonic() + INSPECTION_SECONDS
    for batch in map(order.get_batch, range(0, order.steps, -(-order.steps // MAX_INSPECTED))):
        looks[batch] = inspect_batch(samples, order, batch, division)
        if time.monotonic() > end:
            break
    return [
        max(looks, key=lambda batch: measure(looks[batch]))
        for measure in EXTREME_MEASURES
        if len({measure(look) for look in looks.values()}) > 1
    ]


def inspect_batch(
    samples: Samples, order: SampleOrder, batch: range, division: Division
) -> BatchTraits:
    tensors = list_batch_tensors(samples[0, order.get_indices(0, batch)])
    marked = [
        tensor
        for tensor in tensors
        if not tensor.is_floating_point() and not tensor.is_complex() and (tensor < 0).any()
    ]
    bare = 0
    for part in chain.from_iterable(split_micro_batches(batch, division)):
        own = [
            target[part.start - batch.start : part.stop - batch.start]
            for target in marked
            if _has_sample_dim(target, batch)
        ]
        bare += len(part) > 0 and any(bool((target < 0).all()) for target in own)
    return BatchTraits(
        sum(map(Tensor.numel, tensors)) / len(batch),
        sum(int((each < 0).sum()) for each in marked) / len(batch),
        bare,
    )


def _has_sample_dim(target: Tensor, batch: range) -> bool:
    return target.dim() > 0 and len(target) == len(batch)
