"""Samplers of the user: which samples an epoch has, and in which order.

A sampler is a function f(epoch, generator) -> indices, or a torch Sampler. The order of an epoch
is a function of (seed, epoch) only, so each rank draws the same one, and a resumed run goes on in
it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy
import numpy.typing
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from paragrad.errors import Refused, describe_error
from paragrad.runtime.generators import keep_generators, seed_generators

# f(epoch, generator) -> indices, or a torch Sampler of indices
SamplerOrFunction: TypeAlias = Callable[[int, torch.Generator], Iterable[int]] | Sampler[int]
# the samples of a batch: a list, or an array of int64
Indices: TypeAlias = "list[int] | numpy.typing.NDArray[numpy.int64]"


class RepeatedIndex(int):
    """The index of a sample that an epoch has more than once.

    Each occurrence has random transforms of its own.

    Attributes:
        occurrence: How often the epoch had the sample before.
    """

    occurrence: int

    def __new__(cls, index: int, occurrence: int) -> RepeatedIndex:
        made = super().__new__(cls, index)
        made.occurrence = occurrence
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return RepeatedIndex, (int(self), self.occurrence)


class SamplerOrder:
    """The order that a sampler gives to each epoch. Orders of the same sampler are equal.

    Args:
        sampler: f(epoch, generator) -> indices, or a torch Sampler.
        seed: The seed of the job.

    Attributes:
        sampler: As the argument.
        seed: As the argument.
    """

    def __init__(self, sampler: SamplerOrFunction, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SamplerOrder)
            and self.sampler is other.sampler
            and self.seed == other.seed
        )

    def __hash__(self) -> int:
        return hash((id(self.sampler), self.seed))

    def draw_indices(self, epoch: int) -> Any:
        """Draw the order of an epoch.

        Args:
            epoch: The epoch.

        Returns:
            A read-only array of int64: the indices of the samples.

        Raises:
            Refused: The sampler gives something else than indices.
        """
        return _draw_epoch(self, epoch)

    def list_samples(self, epoch: int, positions: range) -> list[int]:
        """List the samples at some positions of an epoch's order.

        Args:
            epoch: The epoch.
            positions: The positions.

        Returns:
            The indices; those of samples that came before in the epoch are RepeatedIndex.
        """
        indices = self.draw_indices(epoch)[positions.start : positions.stop].tolist()
        occurrences = _count_occurrences(self, epoch)[positions.start : positions.stop].tolist()
        return [
            RepeatedIndex(index, occurrence) if occurrence else index
            for index, occurrence in zip(indices, occurrences, strict=True)
        ]


# two, because batches of two epochs are prepared at the end of an epoch
@functools.lru_cache(maxsize=2)
def _draw_epoch(order: SamplerOrder, epoch: int) -> Any:
    indices = draw_sampler(copy_sampler(order.sampler), order.seed, epoch)
    indices.flags.writeable = False  # the cache hands out this same array
    return indices


@functools.lru_cache(maxsize=2)
def _count_occurrences(order: SamplerOrder, epoch: int) -> Any:
    """Count for each position how often the epoch had its sample before."""
    indices = order.draw_indices(epoch)
    by_sample = numpy.argsort(indices, kind="stable")
    ordered = indices[by_sample]
    starts = numpy.flatnonzero(numpy.diff(ordered, prepend=ordered[:1] - 1))
    lengths = numpy.diff(starts, append=len(ordered))
    occurrences = numpy.empty_like(indices)
    occurrences[by_sample] = numpy.arange(len(ordered)) - numpy.repeat(starts, lengths)
    return occurrences


def copy_sampler(sampler: Any) -> Any:
    """Copy a sampler, without the dataset that it may hold.

    Args:
        sampler: The sampler.
    """
    shared = {
        id(value): value
        for value in getattr(sampler, "__dict__", {}).values()
        if hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, list | dict | torch.Tensor | numpy.ndarray | torch.Generator)
    }
    return copy.deepcopy(sampler, shared)


def draw_sampler(sampler: Any, seed: int, epoch: int) -> Any:
    """Draw an epoch from a sampler, with all generators seeded by (seed, epoch).

    Args:
        sampler: The sampler; a torch Sampler may change.
        seed: The seed of the job.
        epoch: The epoch.

    Returns:
        An array of int64.

    Raises:
        Refused: The sampler raised an error, or gives something else than indices.
    """
    with keep_generators():
        seed_generators(f"sampler {seed} {epoch}")
        generator = torch.Generator().manual_seed(torch.initial_seed())
        try:
            if isinstance(sampler, Sampler):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                own: Any = getattr(sampler, "generator", None)
                if isinstance(own, torch.Generator):
                    own.manual_seed(generator.initial_seed())
                drawn = list(sampler)
            else:
                drawn = sampler(epoch, generator)
                drawn = drawn.tolist() if isinstance(drawn, torch.Tensor) else list(drawn)
        except Exception as error:
            raise Refused(f"the sampler raised {describe_error(error)}") from error
    try:
        indices = numpy.array(drawn)
    except ValueError:
        indices = numpy.empty((0, 0))
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise Refused(
            "the sampler must give one index for each sample, as whole numbers; it gave "
            f"{str(drawn[:3])[1:-1]}, ..."
        )
    if indices.size and indices.min() < 0:
        raise Refused(f"the sampler gives index {indices.min()}; give indices from 0")
    return indices.astype(numpy.int64)


def check_sampler(sampler: Any, seed: int, samples: int, epochs: int) -> None:
    """Check that the order of an epoch is a function of (seed, epoch), before any rank starts.

    Args:
        sampler: The sampler.
        seed: The seed of the job.
        samples: The number of samples of the dataset.
        epochs: The number of epochs.

    Raises:
        Refused: It is not, or the sampler gives wrong indices.
    """
    if isinstance(sampler, BatchSampler | DistributedSampler):
        parts = "batches" if isinstance(sampler, BatchSampler) else "shares of ranks"
        raise Refused(
            f"the sampler is a {type(sampler).__name__}, which makes {parts}, and paragrad makes "
            "them itself; give the sampler of one worker, which gives single samples"
        )
    if not isinstance(sampler, Sampler) and not callable(sampler):
        raise Refused(
            f"the sampler is a {type(sampler).__name__}; give a function f(epoch, generator) that "
            "returns the indices of an epoch, or a torch Sampler"
        )
    one = copy_sampler(sampler)
    first, second = (draw_sampler(one, seed, epoch) for epoch in (0, 1))
    other = copy_sampler(sampler)
    if not numpy.array_equal(draw_sampler(other, seed, 1), second):
        raise Refused(
            "the sampler gives another order for an epoch when it is asked again: it counts its "
            "calls, or has its own random generator; give a function f(epoch, generator) that "
            "draws only from this generator"
        )
    if not len(first):
        raise Refused("the sampler gives no samples; let it give at least one index")
    if epochs == 1:
        second = first
    if len(second) != len(first):
        raise Refused(
            f"the sampler gives {len(first)} samples in the first epoch and {len(second)} in the "
            "second; give the same number in all epochs"
        )
    largest = max(first.max(), second.max(initial=0))
    if largest >= samples:
        raise Refused(
            f"the sampler gives index {largest}, and the dataset has {samples} samples; give "
            f"indices from 0 to {samples - 1}"
        )
