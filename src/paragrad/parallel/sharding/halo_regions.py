"""Which elements a halo has, along a dimension on which a window slides.

Every output needs some inputs: a convolution needs a window of them, a reflecting pad one, an
interpolation two or four. The outputs are divided evenly. The inputs that a rank's outputs need and
that the rank does not hold are its halo.

This module computes the halo, without torch; `window_rules.fetch_halo` fetches it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import groupby
from math import floor
from typing import NamedTuple

from paragrad.parallel.sharding.partition import DimPartition

PADDING = -1  # stands for an input that does not exist
# indices of elements, or PADDING, in the order in which they are needed
WantedIndices = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """The window of a convolution or a pooling.

    Output o needs the inputs o * stride - before + dilation * (0, 1, ... kernel - 1).

    Attributes:
        kernel: Number of inputs of one output.

        stride: Distance of the windows of neighbouring outputs.

        before: Padding before the first input.

        after: Padding behind the last input.

        dilation: Distance of neighbouring inputs of a window.

        ceil: Whether outputs at the end may also reach beyond the padding.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Number of elements from the first to the last input of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def count_outputs(self, size: int) -> int:
        """Return the number of outputs for `size` inputs."""
        space = size + self.before + self.after - self.reach
        count = (-(-space // self.stride) if self.ceil else space // self.stride) + 1
        return count - 1 if self.ceil and (count - 1) * self.stride >= size + self.before else count

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """Return the inputs that consecutive outputs need together."""
        start = outputs.start * self.stride - self.before
        stop = (outputs.stop - 1) * self.stride - self.before + self.reach
        return tuple(at if 0 <= at < size else PADDING for at in range(start, stop))

    def count_window_inputs(self, size: int, include_padding: bool) -> list[int]:
        """Count the inputs over which each output takes the mean.

        Args:
            size: Number of inputs.
            include_padding: Whether padding counts.

        Returns:
            One count for each output.
        """
        low, high = (-self.before, size + self.after) if include_padding else (0, size)
        starts = [at * self.stride - self.before for at in range(self.count_outputs(size))]
        return [min(start + self.kernel, high) - max(start, low) for start in starts]


@dataclass(frozen=True)
class TransposedWindow:
    """The window of a transposed convolution.

    Input i contributes to the outputs i * stride - before + dilation * (0, 1, ... kernel - 1).

    Attributes:
        kernel: Number of outputs to which one input contributes.

        stride: Distance of the outputs of neighbouring inputs.

        before: Outputs that are left out at the beginning.

        after: Outputs that are left out at the end.

        dilation: Distance of neighbouring outputs of one input.

        extra_outputs: Outputs at the end to which no input contributes.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    extra_outputs: int = 0

    @property
    def reach(self) -> int:
        """Number of elements from the first to the last output of one input."""
        return self.dilation * (self.kernel - 1) + 1

    def count_outputs(self, size: int) -> int:
        """Return the number of outputs for `size` inputs."""
        return (size - 1) * self.stride - self.before - self.after + self.reach + self.extra_outputs

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """Return the inputs that contribute to consecutive outputs, at least one input."""
        start = max(0, -(-(outputs.start + self.before - self.reach + 1) // self.stride))
        stop = min(size, (outputs.stop - 1 + self.before) // self.stride + 1)
        return tuple(range(min(start, size - 1), max(stop, min(start, size - 1) + 1)))

    def compute_padding(self, outputs: range, wanted: WantedIndices) -> tuple[int, int]:
        """Compute how the result of some inputs is padded to become a range of outputs.

        Args:
            outputs: The wanted outputs.
            wanted: The inputs that the convolution gets.

        Returns:
            (elements to add in front, elements to add behind); negative numbers remove elements.
        """
        start = wanted[0] * self.stride - self.before
        return start - outputs.start, outputs.stop - (
            start + (len(wanted) - 1) * self.stride + self.reach
        )


@dataclass(frozen=True)
class PaddingWindow:
    """Outputs of a padding: some before the inputs, the inputs, and some behind them.

    Attributes:
        before: Number of outputs in front of the inputs.
        after: Number of outputs behind the inputs.
        mode: As in torch.nn.functional.pad.
    """

    before: int
    after: int
    mode: str

    def count_outputs(self, size: int) -> int:
        """Return the number of outputs for `size` inputs."""
        return size + self.before + self.after

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """Return the input of each of these outputs."""
        return tuple(locate_padded_input(at - self.before, size, self.mode) for at in outputs)


@dataclass(frozen=True)
class ResizeWindow:
    """Outputs of an interpolation; each needs all inputs from its first to its last tap.

    Attributes:
        taps: For each output, pairs (input, weight).
    """

    taps: list[list[tuple[int, float]]]

    def count_outputs(self, size: int) -> int:
        """Return the number of outputs for `size` inputs."""
        return len(self.taps)

    def find_inputs(self, outputs: range, size: int) -> WantedIndices:
        """Return the inputs from the first to the last tap of these outputs."""
        positions = [position for at in outputs for position, _ in self.taps[at]]
        return tuple(range(min(positions), max(positions) + 1))


def locate_padded_input(position: int, size: int, mode: str) -> int:
    """Find the input that stands at a padded position.

    Args:
        position: Position relative to the first input; it may lie outside of the inputs.
        size: Number of inputs.
        mode: As in torch.nn.functional.pad.

    Returns:
        Index of the input, or PADDING.
    """
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
    """Compute the inputs and weights of an interpolation by a whole factor, as torch defines them.

    Args:
        kind: "nearest", "linear" or "cubic".
        size: Number of inputs.
        factor: Number of outputs for each input.
        align_corners: As in torch.nn.functional.interpolate.

    Returns:
        For each output, pairs (input, weight).
    """
    taps = []
    last = size * factor - 1
    for out in range(last + 1):
        position = out * (size - 1) / last if align_corners and last else (out + 0.5) / factor - 0.5
        if kind == "nearest":
            taps.append([(out // factor, 1.0)])
        elif kind == "linear":
            low = floor(position := max(position, 0.0))
            taps.append([(low, 1 - (position - low)), (min(low + 1, size - 1), position - low)])
        else:
            low = floor(position)
            taps.append(
                [
                    (
                        min(max(low + step, 0), size - 1),
                        _compute_cubic_weight(abs(position - low - step)),
                    )
                    for step in (-1, 0, 1, 2)
                ]
            )
    return taps


def _compute_cubic_weight(x: float, a: float = -0.75) -> float:
    """Compute the weight of cubic convolution (Keys 1981), with the parameter a of torch."""
    return ((a + 2) * x - (a + 3)) * x * x + 1 if x <= 1 else ((x - 5) * x + 8) * x * a - 4 * a


# ---- owners ------------------------------------------------------------------------------
class ElementRun(NamedTuple):
    """Consecutive elements of one rank's piece.

    Attributes:
        owner: The rank that holds them; PADDING if no rank does.
        start: Position of the first element in that rank's piece.
        length: Number of elements.
    """

    owner: int
    start: int
    length: int


@functools.lru_cache(maxsize=4096)
def find_runs(partition: DimPartition, wanted: WantedIndices) -> tuple[ElementRun, ...]:
    """Find where the elements are that a rank needs.

    Args:
        partition: How the elements are divided; it has one block.
        wanted: The needed elements, in order.

    Returns:
        Runs of elements, in the order of `wanted`.
    """
    starts = [partition.list_ranges(rank)[0].start for rank in range(partition.ranks)]
    owner = [rank for rank in range(partition.ranks) for _ in partition.list_ranges(rank)[0]]
    runs = []
    for key, run in groupby(
        enumerate(wanted),
        key=lambda item: (
            (PADDING, 0) if item[1] == PADDING else (owner[item[1]], item[1] - item[0])
        ),
    ):
        positions = [at for _, at in run]
        runs.append(
            ElementRun(
                key[0], 0 if key[0] == PADDING else positions[0] - starts[key[0]], len(positions)
            )
        )
    return tuple(runs)


def count_fetched(partition: DimPartition, wanted: tuple[WantedIndices, ...], rank: int) -> int:
    """Count the elements along a dimension that a rank receives from others.

    Args:
        partition: How the dimension is divided.
        wanted: For each rank, the elements that it needs.
        rank: The rank.

    Returns:
        Number of elements along the dimension.
    """
    return sum(
        run.length for run in find_runs(partition, wanted[rank]) if run.owner not in (rank, PADDING)
    )


def count_sent(partition: DimPartition, wanted: tuple[WantedIndices, ...], rank: int) -> int:
    """Count the elements along a dimension that a rank sends to others.

    Args:
        partition: How the dimension is divided.
        wanted: For each rank, the elements that it needs.
        rank: The rank.

    Returns:
        Number of elements along the dimension.
    """
    return sum(
        run.length
        for other, needed in enumerate(wanted)
        if other != rank
        for run in find_runs(partition, needed)
        if run.owner == rank
    )
