"""The exact order of samples: a pure function of (seed, epoch, index), never of the number of
workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from paragrad.errors import Refused
from paragrad.runtime.launcher_env import read_available_memory

# bytes a sample while an order is made: key 8, number 8, sorting 4, and 8 of the epoch's before
BYTES_PER_SAMPLE = 28
MAX_SAMPLES = 10**10  # samples: at a million a second nearly three hours for one look at each


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Every one of `samples` once per epoch, in batches of `batch`; the last batch of an epoch
    may be short.
    """

    samples: int
    batch: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return -(-self.samples // self.batch)

    def get_batch(self, step: int) -> range:
        """The batch of a step of an epoch as a range of positions in its order."""
        start = step * self.batch
        return range(start, min(start + self.batch, self.samples))

    def list_batches(self, start: int = 0) -> Iterator[range]:
        """The batches of an epoch, from a step on."""
        return map(self.get_batch, range(start, self.steps))

    def get_indices(self, epoch: int, positions: range) -> list[int]:
        """The samples that stand at these positions of an epoch's order."""
        order = permute_samples(self.samples, self.seed, epoch)
        indices: list[int] = order[positions.start : positions.stop].tolist()
        return indices


@lru_cache(maxsize=2)  # one epoch ends where the next begins
def permute_samples(samples: int, seed: int, epoch: int) -> Any:
    """An array of all of 0..samples-1, shuffled by sorting on random keys. Raises Refused where
    memory cannot hold it.

    The keys are those of `random.Random(text).random()`, which of Python's generators alone
    promises the same numbers in every version; numpy's RandomState, which promises it too, goes
    on from its state, in one call for all.
    """
    refuse_oversized_dataset(samples, "an epoch")
    order = shuffle_indices(samples, f"order {seed} {epoch}")
    order.flags.writeable = False  # it is everybody's
    return order


def shuffle_indices(count: int, text: str) -> Any:
    """An array of all of 0..count-1, as `permutation` makes it, for the text."""
    # stable: of equal keys the lower sample first
    return numpy.argsort(make_random_state(text).random_sample(count), kind="stable")


def make_random_state(text: str) -> Any:
    """numpy's RandomState, beginning as `random.Random` does for the text."""
    _, (*state, position), _ = random.Random(f"paragrad {text}").getstate()
    found = numpy.random.RandomState()
    found.set_state(("MT19937", state, position, 0, 0.0))
    return found


def refuse_endless_dataset(samples: int, what: str) -> None:
    """Refuse a dataset that says it has more samples than anybody will see."""
    if samples > MAX_SAMPLES:
        raise Refused(
            f"{what} has {samples} samples, whose end nobody would see; let its __len__ say how "
            f"many an epoch has, "
            f"at most {MAX_SAMPLES}"
        )


def refuse_oversized_dataset(samples: int, what: str, ranks: int = 1) -> None:
    """Refuse a dataset so long that this host cannot hold its order, in as many ranks."""
    refuse_endless_dataset(samples, what)
    left = read_available_memory()
    if left is not None and ranks * BYTES_PER_SAMPLE * samples > left:
        every, fewer = (
            (f" in each of {ranks} ranks", ", or start fewer ranks") if ranks > 1 else ("", "")
        )
        raise Refused(
            f"{what} has {samples} samples, whose order takes {BYTES_PER_SAMPLE} bytes a sample "
            f"while it is "
            f"made{every}, and "
            f"there is memory for {left // (ranks * BYTES_PER_SAMPLE)}; let its __len__ say no "
            f"more{fewer}"
        )
