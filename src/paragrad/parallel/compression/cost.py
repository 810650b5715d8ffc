"""Measure what compression costs on this machine, with the work of a training step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paragrad.parallel.compression.codec import build_codec
from paragrad.parallel.compression.feedback import ErrorFeedback, MomentumCorrection, NoFeedback
from paragrad.strategies.compressors import Compressor, Dgc

TRIAL_GRADIENTS = 4  # gradients that are compressed in turn


def make_codec_steps(
    compressor: Compressor, shape: Sequence[int]
) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Make functions that compress and extract random gradients of a shape.

    The first adds a gradient to what waits, compresses the sum, and removes what was sent. The
    second adds what the payload represents to a sum, or to another flat vector. A few gradients are
    used in turn, because with a single one the rest that waits would be unrealistic.

    Args:
        compressor: The compressor.
        shape: Shape of the gradients.

    Returns:
        (compress, extract). Call compress once before extract.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = itertools.cycle(
        [torch.randn(*shape, generator=generator) for _ in range(TRIAL_GRADIENTS)]
    )
    codec = build_codec(compressor, shape)
    feedback = (
        MomentumCorrection(lambda name: (0.9, False), compressor.masking)
        if isinstance(compressor, Dgc)
        else (ErrorFeedback() if compressor.feedback else NoFeedback())
    )
    total = torch.zeros(codec.elements)
    last = list[Any]()

    def compress() -> None:
        vector = feedback.compensate_gradient("w", next(gradients), 0.5)
        proposal = codec.propose_agreement(vector)
        agreement = None if proposal is None else codec.conclude_agreement(proposal)
        last[:] = codec.compress(vector, agreement), agreement
        feedback.note_sent("w", codec, last[0], agreement)

    def extract(into: Tensor = total) -> None:
        codec.add(last[0], into, last[1])

    return compress, extract


def measure_codec_cost(
    compressor: Compressor, shape: Sequence[int], times: int = 9
) -> tuple[float, float]:
    """Measure the seconds to compress and to extract, on one thread.

    Args:
        compressor: The compressor.
        shape: Shape of the gradients.
        times: Number of measurements; their median is returned.

    Returns:
        (seconds to compress, seconds to extract).
    """
    threads = torch.get_num_threads()
    steps = make_codec_steps(compressor, shape)
    torch.set_num_threads(1)
    try:
        compress, extract = (median(_time_step(step) for _ in range(times)) for step in steps)
        return compress, extract
    finally:
        torch.set_num_threads(threads)


def _time_step(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
