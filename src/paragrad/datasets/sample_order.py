"""The exact order of samples, a pure function of (seed, epoch, index).

The order does not depend on the number of workers. A sampler of the user may give it
(`datasets/sampler.py`), and a stream has its own (`datasets/stream.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy

from paragrad.datasets.sampler import Indices, SamplerOrder, SamplerOrFunction
from paragrad.datasets.stream import Stream
from paragrad.errors import Refused, StepFailed
from paragrad.runtime.launcher_env import read_available_memory

# memory for making an order: key 8, index 8, sorting 4, and 8 for the order of the previous epoch
BYTES_PER_SAMPLE = 28
# so few samples always fit, and asking the system takes longer than to sort them
SMALL_SAMPLES = 2**16
MAX_SAMPLES = 10**10  # at a million samples a second, one pass takes nearly three hours


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """An order that contains each sample once per epoch, or what a sampler gives, in batches.

    Attributes:
        samples: The number of samples of an epoch.

        batch: The number of samples of a batch; the last batch of an epoch may be shorter.

        seed: The seed of the order.

        sampler: The order of a sampler; None for each sample once.

        is_in_order: Whether the samples come in the order of the dataset, which is a stream.
    """

    samples: int
    batch: int
    seed: int
    sampler: SamplerOrder | None = None
    is_in_order: bool = False

    @classmethod
    def build(
        cls, dataset: Any, batch: int, seed: int, sampler: SamplerOrFunction | None = None
    ) -> SampleOrder:
        """Build the order of a dataset.

        Args:
            dataset: The dataset; only its length matters, and whether it is a Stream.
            batch: The number of samples of a batch.
            seed: The seed of the order.
            sampler: The sampler, or None.

        Raises:
            Refused: The sampler gives something else than indices.
        """
        if isinstance(dataset, Stream) or sampler is None:
            return cls(len(dataset), batch, seed, is_in_order=isinstance(dataset, Stream))
        order = SamplerOrder(sampler, seed)
        return cls(len(order.draw_indices(0)), batch, seed, order)

    def replace_seed(self, seed: int) -> SampleOrder:
        """Return the order that another seed gives.

        Args:
            seed: The other seed.
        """
        sampler = None if self.sampler is None else SamplerOrder(self.sampler.sampler, seed)
        return replace(self, seed=seed, sampler=sampler)

    @property
    def steps(self) -> int:
        """The number of steps per epoch."""
        return -(-self.samples // self.batch)

    def get_batch(self, step: int) -> range:
        """Return the positions of a batch in the order of its epoch.

        Args:
            step: The step within the epoch.

        Returns:
            The positions as a range.
        """
        start = step * self.batch
        return range(start, min(start + self.batch, self.samples))

    def list_batches(self, start: int = 0) -> Iterator[range]:
        """Iterate over the batches of an epoch.

        Args:
            start: The first step.

        Returns:
            An iterator over ranges of positions.
        """
        return map(self.get_batch, range(start, self.steps))

    def get_indices(self, epoch: int, positions: range) -> list[int]:
        """Return the samples at some positions of an epoch's order.

        Args:
            epoch: The epoch.
            positions: The positions in its order.

        Returns:
            The indices of the samples in the dataset.
        """
        indices = self.select_indices(epoch, positions)
        return indices if isinstance(indices, list) else indices.tolist()

    def select_indices(self, epoch: int, positions: range) -> Indices:
        """Return the samples at some positions as `get_indices` does, without a list if possible.

        Args:
            epoch: The epoch.
            positions: The positions in its order.

        Returns:
            The indices of the samples: an array of int64, or a list.
        """
        if self.sampler is not None:
            if (count := len(self.sampler.draw_indices(epoch))) != self.samples:
                raise StepFailed(
                    f"the sampler gives {count} samples in epoch {epoch} and {self.samples} in the "
                    "first; give the same number in all epochs"
                )
            return self.sampler.list_samples(epoch, positions)
        if self.is_in_order:
            return list(positions)
        order = permute_samples(self.samples, self.seed, epoch)
        return order[positions.start : positions.stop].copy()


@lru_cache(maxsize=2)  # two, because batches of two epochs are prepared at the end of an epoch
def permute_samples(samples: int, seed: int, epoch: int) -> Any:
    """Return the order of an epoch: an array of 0..samples-1, sorted by random keys.

    The keys equal those of `random.Random(text).random()`. Of Python's generators, only this one
    promises the same numbers in every version. The RandomState of numpy promises it too. It
    continues from that state and draws all keys in one call.

    Args:
        samples: The number of samples.
        seed: The seed of the order.
        epoch: The epoch.

    Returns:
        A read-only array of int64.

    Raises:
        Refused: The memory of this host cannot hold the order.
    """
    refuse_oversized_dataset(samples, "an epoch")
    order = shuffle_indices(samples, f"order {seed} {epoch}")
    order.flags.writeable = False  # the cache hands out this same array
    return order


def shuffle_indices(count: int, text: str) -> Any:
    """Return an array of 0..count-1, shuffled as `permute_samples` does.

    Args:
        count: The number of indices.
        text: The text that seeds the generator.

    Returns:
        The array.
    """
    # stable: if keys are equal, the lower index comes first
    return numpy.argsort(make_random_state(text).random_sample(count), kind="stable")


def make_random_state(text: str) -> Any:
    """Create a numpy RandomState in the state of `random.Random` after seeding with a text.

    Args:
        text: The text that seeds the generator.

    Returns:
        The generator.
    """
    _, (*state, position), _ = random.Random(f"paragrad {text}").getstate()
    generator = numpy.random.RandomState()
    generator.set_state(("MT19937", state, position, 0, 0.0))
    return generator


def refuse_endless_dataset(samples: int, what: str) -> None:
    """Refuse a dataset that is too long to ever be passed over.

    Args:
        samples: The length that the dataset gives.
        what: What the dataset is called in the message.

    Raises:
        Refused: There are more than MAX_SAMPLES samples.
    """
    if samples > MAX_SAMPLES:
        raise Refused(
            f"{what} has {samples} samples, too many for one epoch; let its __len__ return how "
            f"many an epoch has, at most {MAX_SAMPLES}"
        )


def refuse_oversized_dataset(samples: int, what: str, ranks: int = 1) -> None:
    """Refuse a dataset that is too long to hold its order in the memory of this host.

    Args:
        samples: The length that the dataset gives.

        what: What the dataset is called in the message.

        ranks: The number of ranks on this host; each holds an order of its own.

    Raises:
        Refused: There are too many samples.
    """
    refuse_endless_dataset(samples, what)
    available = read_available_memory() if ranks * samples > SMALL_SAMPLES else None
    if available is not None and ranks * BYTES_PER_SAMPLE * samples > available:
        on_ranks, repair = (
            (f" in each of {ranks} ranks", ", or start fewer ranks") if ranks > 1 else ("", "")
        )
        raise Refused(
            f"{what} has {samples} samples; their order takes {BYTES_PER_SAMPLE} bytes a sample "
            f"while it is made{on_ranks}, and there is memory for "
            f"{available // (ranks * BYTES_PER_SAMPLE)}; let its __len__ return no more{repair}"
        )
