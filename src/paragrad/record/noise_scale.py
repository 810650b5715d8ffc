"""The gradient noise scale of a run (McCandlish et al. 2018, arXiv 1812.06162), from what its
ranks wrote of their gradients.

With G the gradient of the whole loss and S the covariance of one sample's, the mean gradient of
B samples is on average as long as |g_B|^2 = |G|^2 + tr(S) / B. Measured at two sizes, b of a
rank's first micro-batch and B of all (appendix A.1):

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)           tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

Both are unbiased. |g_b|^2 is the mean over ranks, and then b is the harmonic mean of what
theirs weigh, for 1/b is averaged. A quotient of two noisy numbers is biased, so the two are
smoothed apart over the steps, and then divided: B_simple, which is tr(S) / |G|^2, counts what
the loss counts, samples or tokens. A batch of that size is the largest that is useful: it takes
twice the least steps and twice the least samples (section 2.2); a larger one hardly saves steps
any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# of what was smoothed, with each measurement. On the tested problem the estimate is off by 5 %
# in the mean (root of squares); with 0.99 by 16
SMOOTHING = 0.999


@dataclass(frozen=True)
class NoiseScale:
    """After a step: tr(S) and |G|^2, smoothed, how many measurements are in them, and what a
    whole batch weighs, in what the loss counts (samples, tokens, elements of a mean): the mean
    of the measured ones.
    """

    step: int
    trace: float
    signal: float
    count: int
    batch: float

    @property
    def scale(self) -> float | None:
        """B_simple, or None where one of the two is lost beside the other."""
        return self.trace / self.signal if self.signal > 0 and self.trace >= 0 else None


def estimate_step_noise(lines: Iterable[dict[str, Any]]) -> tuple[float, float, float] | None:
    """(tr(S), |G|^2, what the batch weighs) of one step, from the lines of all ranks; None
    where it was not measured.
    """
    told = list(lines)
    parts = [line["noise"] for line in told if line.get("noise")]
    if not parts:
        return None
    few = len(parts) / sum(1 / weight for _, weight, _ in parts)
    short = sum(square for square, _, _ in parts) / len(parts)
    whole = parts[0][2]
    every = sum(line["loss"][1] for line in told)
    if few >= every:  # a batch of one part
        return None
    return (
        (short - whole) / (1 / few - 1 / every),
        (every * whole - few * short) / (every - few),
        every,
    )


def track_noise_scale(steps: Iterable[list[dict[str, Any]]]) -> Iterator[NoiseScale]:
    """After every step that was measured. steps: of each the lines of all ranks."""
    trace = 0.0
    signal = 0.0
    total = 0.0
    weight = 0.0
    count = 0
    for lines in steps:
        if (found := estimate_step_noise(lines)) is not None:
            trace = SMOOTHING * trace + found[0]
            signal = SMOOTHING * signal + found[1]
            total = SMOOTHING * total + 1
            count = count + 1
            weight = weight + found[2]
            yield NoiseScale(lines[0]["step"], trace / total, signal / total, count, weight / count)
