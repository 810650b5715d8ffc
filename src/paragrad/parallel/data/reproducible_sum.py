"""`reproducible=true`: sums with bits that do not depend on algorithm, order or grouping.

Addition of floats is not associative, but addition of integers is. So the vectors are rounded to
multiples of one unit u that all ranks agree on. They are added as 64-bit integers along any
schedule and converted back once. This is the idea of Demmel & Nguyen 2013 (doi
10.1109/ARITH.2013.9), and of Kulisch's accumulator, with one word:

    E: all |x| < 2^E, on all ranks (one all-reduce of a maximum)
    u = 2^(E + ceil(lg p) - 62)
    error at most p u / 2

The sum of p numbers below 2^(62 - ceil(lg p)) in size is less than 2^62, so it cannot overflow. In
float32, the last place of a number at 2^E is 2^(E-24); u is finer than that by a factor of 2^38 /
p. The cost is that one small all-reduce, and eight bytes per number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.executors.transport import Traffic, run_all_reduce
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.runtime.world import World
from paragrad.schedules.actions import Collective, Compute

INTEGER_BITS = 62
BLOCK_ELEMENTS = 1 << 15  # numbers converted at a time, so that they stay in the cache
# Smaller numbers count as 0. With this exponent u and 1/u are still normal float64 numbers.
SMALLEST_EXPONENT = -900
NOT_FINITE_EXPONENT = 1 << 20  # an exponent no number has


def reproducible_all_reduce(
    schedule: Collective,
    vector: Tensor,
    world: World,
    compute: Callable[[Compute, Tensor], None] | None = None,
) -> Traffic:
    """Sum a contiguous vector of floats over all ranks, in place.

    Collective: all ranks call it together.

    Args:
        schedule: The all-reduce schedule.
        vector: The vector, which the sum replaces.
        world: The world of the ranks.
        compute: The reduction, as in `run_all_reduce`; here it receives integers.

    Returns:
        The traffic. The small all-reduce counts as waiting.

    Raises:
        StepFailed: A number is not finite. It is raised on every rank.
    """
    start = time.monotonic()
    mine = compute_exponent(vector)
    wait_start = time.monotonic()
    largest = int(world.all_reduce(torch.tensor([mine]), "MAX"))
    waiting = time.monotonic() - wait_start
    if largest == NOT_FINITE_EXPONENT:
        where = "here" if mine == NOT_FINITE_EXPONENT else "on another rank"
        raise StepFailed(
            f"a gradient is not finite {where}: a reproducible sum needs finite numbers"
        )
    shift = INTEGER_BITS - largest - (world.size - 1).bit_length()
    integers = convert_to_integers(vector, shift)
    traffic = run_all_reduce(schedule, integers, world, compute)
    convert_to_floats(integers, shift, vector)
    waiting += traffic.waiting
    return Traffic(
        traffic.bytes + count_collective_bytes("all_reduce", 8, world.size),
        waiting,
        traffic.transfer,
        time.monotonic() - start - waiting - traffic.transfer,
    )


def compute_exponent(vector: Tensor) -> int:
    """Compute the least exponent E with all |x| < 2^E.

    Args:
        vector: The numbers.

    Returns:
        E, at least SMALLEST_EXPONENT; NOT_FINITE_EXPONENT if some number is not finite.
    """
    lowest, highest = map(float, vector.aminmax()) if vector.numel() else (0.0, 0.0)
    largest = max(-lowest, highest)  # if some number is NaN, both are NaN
    if not math.isfinite(largest):
        return NOT_FINITE_EXPONENT
    return max(math.frexp(largest)[1], SMALLEST_EXPONENT) if largest else SMALLEST_EXPONENT


def convert_to_integers(vector: Tensor, shift: int) -> Tensor:
    """Compute round(x 2^shift) as int64.

    Only the rounding is inexact, because the factor is a normal float64 (|shift| < 1000).

    Args:
        vector: The numbers x.
        shift: The exponent of the factor.

    Returns:
        A new tensor of integers.
    """
    integers = torch.empty_like(vector, dtype=torch.int64)
    for piece, rounded in zip(
        vector.split(BLOCK_ELEMENTS), integers.split(BLOCK_ELEMENTS), strict=True
    ):
        rounded.copy_(piece.to(torch.float64, copy=True).mul_(2.0**shift).round_())
    return integers


def convert_to_floats(integers: Tensor, shift: int, out: Tensor) -> None:
    """Compute the integers times 2^-shift in the dtype of `out`.

    The integers are rounded once, before the multiplication, which only changes the exponent. Types
    of 16 bits are rounded from float64.

    Args:
        integers: The integers.
        shift: The negative exponent of the factor.
        out: Receives the numbers.
    """
    for piece, target in zip(
        integers.split(BLOCK_ELEMENTS), out.split(BLOCK_ELEMENTS), strict=True
    ):
        rounded = piece.to(torch.float32).double() if out.dtype == torch.float32 else piece.double()
        target.copy_(rounded.mul_(2.0**-shift))
