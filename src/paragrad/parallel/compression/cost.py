"""What compressing costs on this machine: measured, by what a step does."""

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
    """(a gradient is added to what waits, compressed, and what was sent taken out; what the
    payload stands for is added to a sum, or another flat vector), of random numbers of a shape,
    a few in turn: what waits of one alone would be of no training. The second needs the first
    once.
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
        asked = codec.propose_agreement(vector)
        agreed = None if asked is None else codec.conclude_agreement(asked)
        last[:] = codec.compress(vector, agreed), agreed
        feedback.note_sent("w", codec, last[0], agreed)

    def extract(into: Tensor = total) -> None:
        codec.add(last[0], into, last[1])

    return compress, extract


def measure_codec_cost(
    compressor: Compressor, shape: Sequence[int], times: int = 9
) -> tuple[float, float]:
    """Seconds of the two, on one thread: medians of some."""
    before = torch.get_num_threads()
    steps = make_codec_steps(compressor, shape)
    torch.set_num_threads(1)
    try:
        compress, extract = (median(_time_step(step) for _ in range(times)) for step in steps)
        return compress, extract
    finally:
        torch.set_num_threads(before)


def _time_step(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
