"""The batches of a test: which samples are collated together, and which rank evaluates them.

A `collate` may draw random numbers, pad to the longest sample, or sort. So its result depends on
the samples that it gets together. In a test these are consecutive samples of the dataset, a *test
batch*. Its size depends on the dataset and the global batch size only. So a test has the same
batches under every strategy, and a masked language model gets the same masks.

Test batches go to the ranks in turn, whole. The last ones, of which not every rank would get one,
are divided among the ranks if every sample is a row of the collated batch:

    test batches 0 to 4 on two ranks    rank 0 | 0  2  first half of 4
                                        rank 1 | 1  3  second half of 4

torch's own collate treats every sample by itself. Then each rank loads and evaluates one contiguous
part of the dataset, and no sample is loaded twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paragrad.datasets.loader_processes import load_batches
from paragrad.datasets.loading import Samples, map_leaves, slice_batch
from paragrad.errors import StepFailed
from paragrad.schedules.actions import split_evenly

MAX_EVALUATION_BATCH = 256  # the largest number of samples that are evaluated at once
PROBE_SAMPLES = 3  # samples of a small batch, which is compared with one of a sample less


@dataclass(frozen=True)
class EvaluationPlan:
    """Which samples of a test one rank evaluates.

    Attributes:
        samples: The number of samples of the dataset.
        batch: The number of samples of a test batch.
        largest: The most samples that this rank evaluates at once.
        part: The index of this rank's part of the test.
        parts: The number of parts.
    """

    samples: int
    batch: int
    largest: int
    part: int = 0
    parts: int = 1

    @property
    def test_batches(self) -> list[range]:
        """The positions of all test batches in the dataset."""
        return split_range(range(self.samples), self.batch)

    @property
    def whole_batches(self) -> list[range]:
        """The test batches that this rank evaluates alone."""
        stop = len(self.test_batches) // self.parts * self.parts
        return self.test_batches[self.part : stop : self.parts]

    @property
    def remaining_batches(self) -> list[range]:
        """The last test batches, fewer than ranks."""
        return self.test_batches[len(self.test_batches) // self.parts * self.parts :]

    @property
    def contiguous_part(self) -> list[range]:
        """What this rank evaluates at once, where no sample depends on the others of its batch."""
        return split_range(split_evenly(self.samples, self.parts)[self.part], self.largest)

    def select_rows(self, count: int) -> range:
        """Select this rank's rows of a remaining test batch.

        Args:
            count: The samples of the test batch.
        """
        return split_evenly(count, self.parts)[self.part]

    def list_part_sizes(self, is_collated: bool) -> list[int]:
        """List how many samples this rank evaluates at once, one number for each time.

        Args:
            is_collated: Whether the samples have a collate of their own, whose batches can be
                divided.
        """
        if not is_collated:
            return list(map(len, self.contiguous_part))
        rows = [range(len(batch)) for batch in self.whole_batches]
        rows += [self.select_rows(len(batch)) for batch in self.remaining_batches]
        return [len(part) for each in rows for part in split_range(each, self.largest)]


def split_range(positions: range, size: int) -> list[range]:
    """Split a range into consecutive ranges of `size`; the last one may be shorter."""
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def choose_test_batch(batch_size: int) -> int:
    """Return the number of samples of a test batch.

    Args:
        batch_size: The size of the global batch, or 0 if it is not known yet.
    """
    return min(MAX_EVALUATION_BATCH, batch_size or MAX_EVALUATION_BATCH)


def iterate_evaluation_batches(
    samples: Samples, plan: EvaluationPlan, loaders: int = 0
) -> Iterator[tuple[list[int], Any]]:
    """Load what a rank evaluates.

    Args:
        samples: The samples of the test.
        plan: Which of them this rank evaluates.
        loaders: The number of processes that load ahead.

    Yields:
        (positions in the dataset, loaded batch).
    """
    if samples.collate is None:
        batches = plan.contiguous_part
        loaded = load_batches(samples, ((0, list(batch)) for batch in batches), loaders)
        for batch in batches:
            yield list(batch), next(loaded)
        return
    remaining = plan.remaining_batches
    whole = plan.whole_batches
    may_divide = (bool(remaining) or plan.largest < plan.batch) and has_rows_of_samples(samples)
    if not may_divide:
        whole = whole + remaining[plan.part : plan.part + 1]
        remaining = []
    loaded = load_batches(samples, ((0, list(batch)) for batch in whole + remaining), loaders)
    for batch in whole:
        yield from _divide_batch(batch, next(loaded), range(len(batch)), plan.largest, may_divide)
    for number, batch in enumerate(remaining):
        collated = next(loaded)
        if is_divisible(collated, len(batch)):
            rows = plan.select_rows(len(batch))
            yield from _divide_batch(batch, collated, rows, plan.largest, True)
        elif number == plan.part:
            yield list(batch), collated


def _divide_batch(
    batch: range, collated: Any, rows: range, largest: int, may_divide: bool
) -> Iterator[tuple[list[int], Any]]:
    """Yield some rows of a collated test batch, at most `largest` at once if it can be divided."""
    if len(rows) == len(batch) <= largest or not (
        may_divide and is_divisible(collated, len(batch))
    ):
        yield list(batch), collated
        return
    for part in split_range(rows, largest):
        sliced = slice_batch(collated, slice(part.start, part.stop), len(batch))
        yield list(batch[part.start : part.stop]), sliced


def is_divisible(value: Any, samples: int) -> bool:
    """Return whether everything in a collated batch has one row for each sample.

    A value without rows, such as a number of tokens, may be of the whole batch. So such a batch is
    not divided in a test.

    Args:
        value: The batch, nested tuples, lists and dicts.
        samples: The number of samples of the batch.
    """
    found: list[bool] = []

    def inspect_leaf(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            is_dense = not leaf.is_nested and not str(leaf.layout).startswith("torch.sparse")
            found.append(is_dense and leaf.dim() > 0 and len(leaf) == samples)
        else:
            is_sequence = isinstance(leaf, tuple | list) and not isinstance(leaf, PackedSequence)
            found.append(is_sequence and len(leaf) == samples)

    map_leaves(inspect_leaf, value)
    return all(found)


def has_rows_of_samples(samples: Samples) -> bool:
    """Return whether the rows of collated batches are samples, tried on two small batches.

    Where the first dimension is another one (time first), it may equal the number of samples by
    chance, but not in both.

    Args:
        samples: The samples, with a collate.
    """
    most = min(PROBE_SAMPLES, len(samples))
    try:
        return all(
            is_divisible(samples[0, list(range(count))], count)
            for count in (most, most - 1)
            if count
        )
    except StepFailed:  # collate wants more samples than that
        return False
