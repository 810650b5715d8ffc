"""The part of a global batch that one rank runs.

A part is a list of micro-batches. Each micro-batch is given as positions in the epoch's order and
as places in the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from paragrad.datasets.loading import slice_batch
from paragrad.datasets.sample_order import SampleOrder
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
    sample_indices: list[int]
    micro_batches: list[MicroBatch]
    draw_epoch: int | None = None

    @property
    def places(self) -> list[int]:
        """The places in the global batch of the samples to load, micro-batch after micro-batch."""
        return list(chain.from_iterable(each.places for each in self.micro_batches))

    @property
    def recorded_range(self) -> list[int]:
        """[first, stop] of this rank's positions, which are contiguous."""
        positions = [position for each in self.micro_batches for position in each.positions]
        return [min(positions), max(positions) + 1] if positions else [0, 0]

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
        order.get_indices(epoch, global_range),
        _make_micro_batches(global_range, division, replicas, reverse),
    )


def _make_micro_batches(
    global_range: range, division: Division, replicas: Sequence[int], reverse: bool = False
) -> list[MicroBatch]:
    micro_batches = []
    for parts in split_micro_batches(global_range, division):
        positions = list(chain.from_iterable(parts[replica] for replica in replicas))
        positions = positions[::-1] if reverse else positions
        micro_batches.append(
            MicroBatch(positions, [position - global_range.start for position in positions] or [0])
        )
    return micro_batches
