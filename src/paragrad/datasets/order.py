"""The exact order of samples: a pure function of (seed, epoch, index), never of the number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Order:
    """Every one of `samples` once per epoch, in batches of `batch`; the last batch of an epoch may be short."""
    samples: int
    batch: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return -(-self.samples // self.batch)

    def batches(self) -> Iterator[range]:
        """The batches of an epoch as ranges of positions in its order."""
        for start in range(0, self.samples, self.batch):
            yield range(start, min(start + self.batch, self.samples))

    def indices(self, epoch: int, positions: range) -> list[int]:
        """The samples that stand at these positions of an epoch's order."""
        return list(permutation(self.samples, self.seed, epoch)[positions.start:positions.stop])


@lru_cache(maxsize=2)           # one epoch ends where the next begins
def permutation(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """All of 0..samples-1, shuffled by sorting on random keys.

    Only `random.random()` is drawn on: of Python's generators it alone promises the same numbers in every version.
    """
    draw = random.Random(f"paragrad order {seed} {epoch}").random
    keys = [draw() for _ in range(samples)]
    return tuple(sorted(range(samples), key=keys.__getitem__))
