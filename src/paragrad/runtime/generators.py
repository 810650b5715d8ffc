"""The random generators of torch, numpy and random: seed, keep and compare them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, numpy and random.

    Args:
        seed: The seed.
    """
    # torch.manual_seed also records a traceback for devices that are absent
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def seed_generators(text: str) -> None:
    """Seed the generators of torch (on the CPU), numpy and random from a text.

    Args:
        text: The text that gives the seed.
    """
    seed = random.Random(f"paragrad {text}").getrandbits(32)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def fingerprint_generators() -> dict[str, Any]:
    """Return the generators' states in a form that can be compared.

    Returns:
        The state of each generator, by library.
    """
    algorithm, keys, *position = numpy.random.get_state()
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (algorithm, numpy.asarray(keys).tobytes(), *position),
        "random": random.getstate(),
    }


@contextlib.contextmanager
def use_seeded_generators(text: str) -> Iterator[None]:
    """Seed the generators from a text, and restore their states at the end of the context.

    Args:
        text: The text that gives the seed.
    """
    with keep_generators():
        seed_generators(text)
        yield


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the states of the generators at the end of the context."""
    states = capture_generators()
    try:
        yield
    finally:
        restore_generators(states)


def capture_generators() -> tuple[Any, Any, Any]:
    """Return the generators' states in a form that `restore_generators` takes.

    Returns:
        The states of torch's, numpy's and random's generator.
    """
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def restore_generators(states: tuple[Any, Any, Any]) -> None:
    """Set the generators to captured states.

    Args:
        states: The result of `capture_generators`.
    """
    torch.default_generator.set_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])
