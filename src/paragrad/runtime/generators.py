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


def fingerprint_generators() -> dict[str, Any]:
    """The states of torch's, numpy's and random's generators, which can be compared."""
    kind, keys, *place = numpy.random.get_state()
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (kind, numpy.asarray(keys).tobytes(), *place),
        "random": random.getstate(),
    }


@contextlib.contextmanager
def use_seeded_generators(text: str) -> Iterator[None]:
    """The generators of torch, numpy and random begin as the text says; afterwards they are as
    they were.
    """
    with keep_generators():
        seed_generators(text)
        yield


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Afterwards the generators of torch, numpy and random are as they were."""
    before = capture_generators()
    try:
        yield
    finally:
        restore_generators(before)


def capture_generators() -> tuple[Any, Any, Any]:
    """The states of the generators of torch, numpy and random, to be set again."""
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def restore_generators(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])
