"""What one rank runs of one global batch: its micro-batches, as places in the epoch's order and
as samples.
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
    """This rank's part of the global batch that stands at `whole` in the order of `epoch`;
    indices: all its samples;  drawn: by which epoch samples are, where that is another.
    """

    epoch: int
    global_range: range
    sample_indices: list[int]
    micro_batches: list[MicroBatch]
    draw_epoch: int | None = None

    @property
    def places(self) -> list[int]:
        """The places in the global batch of what to load, micro-batch after micro-batch."""
        return list(chain.from_iterable(each.places for each in self.micro_batches))

    @property
    def recorded_range(self) -> list[int]:
        """[first, stop] of its positions, which are contiguous."""
        positions = [position for each in self.micro_batches for position in each.positions]
        return [min(positions), max(positions) + 1] if positions else [0, 0]

    def take_first_samples(
        self, count: int, division: Division, replicas: Sequence[int]
    ) -> Batch | None:
        """The same of its first samples alone; None where a share would have none."""
        whole = self.global_range[:count]
        micros = split_micro_batches(whole, division)
        if not all(
            any(parts[replica] for parts in micros) for replica in range(len(division.shares))
        ):
            return None
        return Batch(
            self.epoch,
            whole,
            self.sample_indices[:count],
            _make_micro_batches(whole, division, replicas),
        )

    def iterate_slices(self) -> Iterator[tuple[MicroBatch, slice]]:
        """Every micro-batch, with its place in what was loaded."""
        start = 0
        for each in self.micro_batches:
            yield each, slice(start, start + len(each.places))
            start += len(each.places)

    def iterate_micro_batches(
        self, inputs: Any, target: Any
    ) -> Iterator[tuple[MicroBatch, Any, Any]]:
        """Every micro-batch with its part of what was loaded."""
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
    """The part of a global batch that these replicas' parts make together; reverse: each
    micro-batch back to front.
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
    micros = []
    for parts in split_micro_batches(global_range, division):
        positions = list(chain.from_iterable(parts[replica] for replica in replicas))
        positions = positions[::-1] if reverse else positions
        micros.append(
            MicroBatch(positions, [position - global_range.start for position in positions] or [0])
        )
    return micros
