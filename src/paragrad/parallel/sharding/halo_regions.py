"""What ranks fetch of each other's pieces of a dimension along which a window slides. No torch.

Every output sees some inputs: of a convolution a window of them, of a reflecting pad one, of an
interpolation two or four. The outputs are divided evenly, and a rank fetches what its own see
and it does not have: the halo.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import groupby
from math import floor
from typing import NamedTuple

from paragrad.parallel.sharding.partition import DimPartition

PADDING = -1  # an input that there is not
# which elements of a dimension, or PADDING, in the order in which they are wanted
WantedIndices = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Output o sees the inputs o * stride - before + dilation * (0, 1, ... kernel - 1). ceil:
    of outputs at the end also those that see beyond the padding.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def count_outputs(self, size: int) -> int:
        room = size + self.before + self.after - self.reach
        count = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        return count - 1 if self.ceil and (count - 1) * self.stride >= size + self.before else count

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """What outputs in a row see together."""
        start = outputs.start * self.stride - self.before
        stop = (outputs.stop - 1) * self.stride - self.before + self.reach
        return tuple(at if 0 <= at < size else PADDING for at in range(start, stop))

    def count_window_inputs(self, size: int, include_padding: bool) -> list[int]:
        """How many inputs an output is the mean of, of all outputs; padded: those of the
        padding are some.
        """
        low, high = (-self.before, size + self.after) if include_padding else (0, size)
        starts = [at * self.stride - self.before for at in range(self.count_outputs(size))]
        return [min(start + self.kernel, high) - max(start, low) for start in starts]


@dataclass(frozen=True)
class TransposedWindow:
    """Of a transposed convolution: input i gives to the outputs i * stride - before + dilation
    * (0, 1, ... kernel - 1); more: outputs at the end that get nothing.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    extra_outputs: int = 0

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def count_outputs(self, size: int) -> int:
        return (size - 1) * self.stride - self.before - self.after + self.reach + self.extra_outputs

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """What gives to outputs in a row; one input at least."""
        start = max(0, -(-(outputs.start + self.before - self.reach + 1) // self.stride))
        stop = min(size, (outputs.stop - 1 + self.before) // self.stride + 1)
        return tuple(range(min(start, size - 1), max(stop, min(start, size - 1) + 1)))

    def compute_padding(self, outputs: range, wanted: WantedIndices) -> tuple[int, int]:
        """How much to put before and after what those inputs give, for these outputs; below 0:
        to take away.
        """
        start = wanted[0] * self.stride - self.before
        return start - outputs.start, outputs.stop - (
            start + (len(wanted) - 1) * self.stride + self.reach
        )


@dataclass(frozen=True)
class PaddingWindow:
    """Outputs that stand before, over and after inputs. mode: as torch.nn.functional.pad has
    them.
    """

    before: int
    after: int
    mode: str

    def count_outputs(self, size: int) -> int:
        return size + self.before + self.after

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        return tuple(locate_padded_input(at - self.before, size, self.mode) for at in outputs)


@dataclass(frozen=True)
class ResizeWindow:
    """Outputs of an interpolation, which see all inputs from the first to the last of their
    taps.
    """

    taps: list[list[tuple[int, float]]]

    def count_outputs(self, size: int) -> int:
        return len(self.taps)

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        places = [place for at in outputs for place, _ in self.taps[at]]
        return tuple(range(min(places), max(places) + 1))


def locate_padded_input(position: int, size: int, mode: str) -> int:
    """Which input stands at a place outside of them."""
    if mode == "reflect":
        return (
            -position
            if position < 0
            else 2 * (size - 1) - position
            if position >= size
            else position
        )
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    return position % size if mode == "circular" else position if 0 <= position < size else PADDING


def compute_taps(
    kind: str, size: int, factor: int, align_corners: bool
) -> list[list[tuple[int, float]]]:
    """Of every output of an interpolation by a whole factor: inputs and their weights, as torch
    has them.
    """
    found = []
    last = size * factor - 1
    for out in range(last + 1):
        place = out * (size - 1) / last if align_corners and last else (out + 0.5) / factor - 0.5
        if kind == "nearest":
            found.append([(out // factor, 1.0)])
        elif kind == "linear":
            low = floor(place := max(place, 0.0))
            found.append([(low, 1 - (place - low)), (min(low + 1, size - 1), place - low)])
        else:
            low = floor(place)
            found.append(
                [
                    (
                        min(max(low + step, 0), size - 1),
                        _compute_cubic_weight(abs(place - low - step)),
                    )
                    for step in (-1, 0, 1, 2)
                ]
            )
    return found


def _compute_cubic_weight(x: float, a: float = -0.75) -> float:
    """Keys 1981, with torch's a."""
    return ((a + 2) * x - (a + 3)) * x * x + 1 if x <= 1 else ((x - 5) * x + 8) * x * a - 4 * a


# ---- from whom -------------------------------------------------------------------------------
class ElementRun(NamedTuple):
    """Elements in a row of one rank's piece, by their places in it; owner PADDING: there are
    none.
    """

    owner: int
    start: int
    length: int


@functools.lru_cache(maxsize=4096)
def find_runs(partition: DimPartition, wanted: WantedIndices) -> tuple[ElementRun, ...]:
    """Where the elements that a rank wants are; have: of one block."""
    starts = [partition.list_ranges(rank)[0].start for rank in range(partition.ranks)]
    owner = [rank for rank in range(partition.ranks) for _ in partition.list_ranges(rank)[0]]
    found = []
    for key, row in groupby(
        enumerate(wanted),
        key=lambda item: (
            (PADDING, 0) if item[1] == PADDING else (owner[item[1]], item[1] - item[0])
        ),
    ):
        places = [at for _, at in row]
        found.append(
            ElementRun(key[0], 0 if key[0] == PADDING else places[0] - starts[key[0]], len(places))
        )
    return tuple(found)


def count_fetched(partition: DimPartition, wanted: tuple[WantedIndices, ...], rank: int) -> int:
    """How many elements along the dimension come to a rank from others."""
    return sum(
        run.length for run in find_runs(partition, wanted[rank]) if run.owner not in (rank, PADDING)
    )


def count_sent(partition: DimPartition, wanted: tuple[WantedIndices, ...], rank: int) -> int:
    """How many go from it to others."""
    return sum(
        run.length
        for other, want in enumerate(wanted)
        if other != rank
        for run in find_runs(partition, want)
        if run.owner == rank
    )
