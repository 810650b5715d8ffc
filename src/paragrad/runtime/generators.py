"""The random generators of this process, of torch, numpy and random: seeding them, and leaving
them as they were.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random."""
    # torch.manual_seed notes a traceback for absent devices
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def seed_generators(text: str) -> None:
    """Seed torch, numpy and random by a text."""
    seed = random.Random(f"paragrad {text}").getrandbits(32)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def generator_states() -> dict[str, Any]:
    """The states of torch's, numpy's and random's generators, which can be compared."""
    kind, keys, *place = numpy.random.get_state()
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (kind, numpy.asarray(keys).tobytes(), *place),
        "random": random.getstate(),
    }


@contextlib.contextmanager
def generators_seeded(text: str) -> Iterator[None]:
    """The generators of torch, numpy and random begin as the text says; afterwards they are as
    they were.
    """
    with generators_kept():
        seed_generators(text)
        yield


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the generators of torch, numpy and random are as they were."""
    before = states()
    try:
        yield
    finally:
        set_states(before)


def states() -> tuple[Any, Any, Any]:
    """The states of the generators of torch, numpy and random, to be set again."""
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def set_states(before: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(before[0])
    numpy.random.set_state(before[1])
    random.setstate(before[2])
