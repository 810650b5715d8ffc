"""What one rank runs of one global batch: its micro-batches, as places in the epoch's order and
as samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from paragrad.datasets.loading import cut
from paragrad.datasets.sample_order import Order
from paragrad.strategies.shares import Division, Micro, micro_batches


@dataclass(frozen=True)
class Batch:
    """This rank's part of the global batch that stands at `whole` in the order of `epoch`;
    indices: all its samples;  drawn: by which epoch samples are, where that is another.
    """

    epoch: int
    whole: range
    indices: list[int]
    micros: list[Micro]
    drawn: int | None = None

    @property
    def places(self) -> list[int]:
        """The places in the global batch of what to load, micro-batch after micro-batch."""
        return list(chain.from_iterable(each.places for each in self.micros))

    @property
    def recorded(self) -> list[int]:
        """[first, stop] of its positions, which are contiguous."""
        positions = [position for each in self.micros for position in each.positions]
        return [min(positions), max(positions) + 1] if positions else [0, 0]

    def fewer(self, count: int, division: Division, replicas: Sequence[int]) -> Batch | None:
        """The same of its first samples alone; None where a share would have none."""
        whole = self.whole[:count]
        micros = micro_batches(whole, division)
        if not all(
            any(parts[replica] for parts in micros) for replica in range(len(division.shares))
        ):
            return None
        return Batch(self.epoch, whole, self.indices[:count], _micros(whole, division, replicas))

    def cuts(self) -> Iterator[tuple[Micro, slice]]:
        """Every micro-batch, with its place in what was loaded."""
        start = 0
        for each in self.micros:
            yield each, slice(start, start + len(each.places))
            start += len(each.places)

    def parts(self, inputs: Any, target: Any) -> Iterator[tuple[Micro, Any, Any]]:
        """Every micro-batch with its part of what was loaded."""
        if len(self.micros) == 1:
            yield self.micros[0], inputs, target
            return
        samples = len(self.places)
        for micro, part in self.cuts():
            yield micro, *cut((inputs, target), part, samples)


def batch_of(
    order: Order,
    epoch: int,
    whole: range,
    division: Division,
    replicas: Sequence[int],
    reverse: bool = False,
) -> Batch:
    """The part of a global batch that these replicas' parts make together; reverse: each
    micro-batch back to front.
    """
    return Batch(
        epoch, whole, order.indices(epoch, whole), _micros(whole, division, replicas, reverse)
    )


def _micros(
    whole: range, division: Division, replicas: Sequence[int], reverse: bool = False
) -> list[Micro]:
    micros = []
    for parts in micro_batches(whole, division):
        positions = list(chain.from_iterable(parts[replica] for replica in replicas))
        positions = positions[::-1] if reverse else positions
        micros.append(Micro(positions, [position - whole.start for position in positions] or [0]))
    return micros
