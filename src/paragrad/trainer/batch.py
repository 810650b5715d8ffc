"""The part of a global batch that one rank runs, and the feed of these parts.

A part is a list of micro-batches. Each micro-batch is given as positions in the epoch's order and
as places in the global batch. The feed also checks that `step` receives the batch that was given
last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, tee
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from paragrad.datasets.loader_processes import load_batches
from paragrad.datasets.loading import Samples, convert_batch, list_batch_tensors, slice_batch
from paragrad.datasets.sample_order import SampleOrder
from paragrad.datasets.sampler import Indices
from paragrad.errors import StepFailed
from paragrad.record.step_log import StepLog
from paragrad.strategies.shares import Division, MicroBatch, split_micro_batches


@dataclass(frozen=True)
class Batch:
    """This rank's part of one global batch.

    Attributes:
        epoch: The epoch of the global batch.

        global_range: The positions of the global batch in the order of `epoch`.

        sample_indices: The dataset indices of all samples of the global batch.

        micro_batches: The micro-batches of this rank.

        draw_epoch: The epoch by which random draws of samples are keyed, if it is not `epoch`.
    """

    epoch: int
    global_range: range
    sample_indices: Indices
    micro_batches: list[MicroBatch]
    draw_epoch: int | None = None

    @property
    def own_samples(self) -> int:
        """The number of samples of this rank."""
        if len(self.micro_batches) == 1:
            return len(self.micro_batches[0].positions)
        return sum(len(each.positions) for each in self.micro_batches)

    @property
    def places(self) -> Sequence[int]:
        """The places in the global batch of the samples to load, micro-batch after micro-batch."""
        return join_places([each.places for each in self.micro_batches])

    @property
    def recorded_ranges(self) -> list[list[int]]:
        """The ranges [first, stop] of this rank's positions, as few as possible, in their order."""
        positions = join_places([each.positions for each in self.micro_batches])
        if isinstance(positions, range) and positions.step == 1:
            return [[positions.start, positions.stop]] if positions else []
        ranges: list[list[int]] = []
        for position in sorted(positions):
            if ranges and ranges[-1][1] == position:
                ranges[-1][1] = position + 1
            else:
                ranges.append([position, position + 1])
        return ranges

    def take_first_samples(
        self, count: int, division: Division, replicas: Sequence[int]
    ) -> Batch | None:
        """Return the same batch with its first samples only.

        Args:
            count: The number of samples to keep.
            division: The division of a global batch among the replicas.
            replicas: The replicas of which this rank runs the parts.

        Returns:
            The smaller batch, or None if a replica would have no sample.
        """
        kept_range = self.global_range[:count]
        micro_batches = split_micro_batches(kept_range, division)
        if not all(
            any(parts[replica] for parts in micro_batches)
            for replica in range(len(division.shares))
        ):
            return None
        return Batch(
            self.epoch,
            kept_range,
            self.sample_indices[:count],
            _make_micro_batches(kept_range, division, replicas),
        )

    def iterate_slices(self) -> Iterator[tuple[MicroBatch, slice]]:
        """Yield every micro-batch with its slice of the loaded samples."""
        start = 0
        for each in self.micro_batches:
            yield each, slice(start, start + len(each.places))
            start += len(each.places)

    def iterate_micro_batches(
        self, inputs: Any, target: Any
    ) -> Iterator[tuple[MicroBatch, Any, Any]]:
        """Yield every micro-batch with its part of the loaded samples.

        Args:
            inputs: The loaded inputs of all micro-batches.
            target: The loaded targets of all micro-batches.

        Yields:
            (micro-batch, inputs, target).
        """
        if len(self.micro_batches) == 1:
            yield self.micro_batches[0], inputs, target
            return
        samples = len(self.places)
        for micro, part in self.iterate_slices():
            yield micro, *slice_batch((inputs, target), part, samples)


def join_places(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Join places; those of ranges that follow each other are a range.

    Args:
        parts: The parts, in order.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, range) and first.step == 1:
        stop = first.start
        for each in parts:
            if not (isinstance(each, range) and each.step == 1 and each.start == stop):
                break
            stop = each.stop
        else:
            return range(first.start, stop)
    return list(chain.from_iterable(parts))


def make_rank_batch(
    order: SampleOrder,
    epoch: int,
    global_range: range,
    division: Division,
    replicas: Sequence[int],
    reverse: bool = False,
) -> Batch:
    """Build the part of a global batch that the given replicas run together.

    Args:
        order: The order of the samples.

        epoch: The epoch of the global batch.

        global_range: The positions of the global batch in the epoch's order.

        division: The division of a global batch among the replicas.

        replicas: The replicas of which the parts are joined.

        reverse: Whether the samples of each micro-batch are reversed.
    """
    return Batch(
        epoch,
        global_range,
        order.select_indices(epoch, global_range),
        _make_micro_batches(global_range, division, replicas, reverse),
    )


def _make_micro_batches(
    global_range: range, division: Division, replicas: Sequence[int], reverse: bool = False
) -> list[MicroBatch]:
    start = global_range.start
    return [
        MicroBatch(_shift(places, start), places or [0])
        for places in _list_places(len(global_range), division, tuple(replicas), reverse)
    ]


@lru_cache(maxsize=64)  # nearly all batches of a training have one size
def _list_places(
    samples: int, division: Division, replicas: tuple[int, ...], reverse: bool
) -> list[Sequence[int]]:
    """The places in a global batch of the samples of some replicas, for each micro-batch."""
    micro_places = []
    for parts in split_micro_batches(range(samples), division):
        places: Sequence[int] = parts[replicas[0]]
        if len(replicas) > 1:
            places = list(chain.from_iterable(parts[replica] for replica in replicas))
        micro_places.append(places[::-1] if reverse else places)
    return micro_places


def _shift(places: Sequence[int], offset: int) -> Sequence[int]:
    """Add an offset to places; a range stays a range."""
    if isinstance(places, range):
        return range(places.start + offset, places.stop + offset, places.step)
    return [place + offset for place in places]


class BatchFeed:
    """Yields batches one after the other. A step takes each batch once, before the next one.

    Attributes:
        log: The log in which loading is recorded.

        device: The device to which batches are moved.

        dtype: The type to which real tensors are converted, or None.

        pending_batch: The batch that was given last, until a step takes it.

        loaded_batch: The tensors of the batch that was given last.

        samples: The source of the samples.

        load_start: The time at which the last batch began to load, in seconds of the log's clock.

        untaken_tensors: Tensors that were given and that no step took.
    """

    def __init__(self, log: StepLog, device: torch.device, dtype: torch.dtype | None) -> None:
        self.log = log
        self.device = device
        self.dtype = dtype
        self.pending_batch: Batch | None = None
        self.loaded_batch: Any = None
        self.samples: Samples | None = None
        self.load_start = 0.0
        self.untaken_tensors = WeakTensorKeyDictionary()

    def iterate_batches(
        self, samples: Samples, batches: Iterable[Batch], loaders: int
    ) -> Iterator[Any]:
        """Yield the loaded samples of each batch.

        At most as many batches as are loaded ahead are made before they are needed.

        Args:
            samples: The source of the samples.
            batches: The batches to load, in order.
            loaders: The number of processes that load ahead.
        """
        self.samples = samples
        batches, ahead = tee(batches)
        data = load_batches(
            samples,
            (
                (
                    batch.epoch if batch.draw_epoch is None else batch.draw_epoch,
                    batch.sample_indices,
                    batch.places,
                )
                for batch in ahead
            ),
            loaders,
        )
        for batch in batches:
            started = time.monotonic()
            self.load_start = self.log.convert_moment(started)
            try:
                loaded = convert_batch(next(data), self.device, self.dtype)
            finally:
                if self.log.is_recorded:
                    self.log.end_span("load", "data", started)
            self.pending_batch = batch
            self.loaded_batch = loaded
            yield loaded
            # No step took this batch: the loop skipped it, or something loads ahead.
            if self.pending_batch is batch:
                self.untaken_tensors.update(dict.fromkeys(list_batch_tensors(loaded)))

    def adopt_batch(self, samples: Samples | None, loaded_batch: Any) -> None:
        """Take over a batch that another feed gave.

        Args:
            samples: The source of the samples.
            loaded_batch: The tensors of the batch, or None if `step` received other ones.
        """
        self.samples = samples
        self.loaded_batch = loaded_batch

    def take_batch(self, inputs: Any, target: Any) -> Batch:
        """Return the batch that was given last, once.

        Args:
            inputs: The inputs that the step received.
            target: The target that the step received.

        Raises:
            StepFailed: If no batch is pending, or if the step received an earlier batch.
        """
        batch, self.pending_batch = self.pending_batch, None
        if batch is None:
            raise StepFailed(
                "step got a batch that is not from trainer.batches, or the same batch again; loop "
                "over trainer.batches(...), and call step once for each batch"
            )
        if len(self.untaken_tensors) and any(
            tensor in self.untaken_tensors for tensor in list_batch_tensors([inputs, target])
        ):
            raise StepFailed(
                "step got an earlier batch than the one trainer.batches gave last: something "
                "reads ahead, which would mix shares; loop over trainer.batches itself (loaders=1 "
                "loads ahead)"
            )
        return batch
